# SPDX-License-Identifier: Apache-2.0
"""Stores of the vector engine: conversion, addresses, and gathering of the rows' reductions."""

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.fifo import SyncFIFO
from amaranth.lib.wiring import In, Out

from golden.formats import SPECS, Format
from hw.ports import GRANULE_BITS, LINE_BITS, SramClient
from hw.vector_format import size_bits, width_step
from hw.vector_quantise import VectorQuantise, block_vectors, vector_entry

QUEUE = 2  # vectors that wait to be written, beside a block; one per cycle goes through
WORDS = 4  # reductions that wait to be gathered


class VectorStore(wiring.Component):
    """Writes result vectors, and the reductions of up to `lanes` neighbouring rows at a time.

    One vector per cycle is taken while `enable` is high, and written two cycles later at the
    earliest. Reductions go first when they have filled an aligned vector or are the command's last.

    Addresses beyond 32 bits become the last of the address space, which no memory has.

    Members
    -------
    start : In(1)
        Begins a command; addresses are taken with it.
    stop : In(1)
        Throws everything away except a write that is offered already. Held until `quiet`.
    rows : In(16)
    store, format, fixed_scale, scale : In
        Of the command; they hold still, like `rows`, `stride` and `reduce`.
    address, stride, reduce_address : In
    reduce : In(1)
        The command reduces its rows.
    enable : Out(1)
        A vector and a reduction can be taken.
    valid, y, present, last, final : In
        A result vector, its elements that exist; it ends its row; the last row.
    reduce_valid, reduced : In
        The next row's reduction.
    finished : Out(1)
        All that the command writes has been taken by the memory.
    quiet : Out(1)
        Nothing is offered and nothing waits.
    client : Out(SramClient)
    """

    def __init__(self, lanes: int) -> None:
        if lanes < 4 or lanes & (lanes - 1):
            raise ValueError(f"lanes must be a power of two from 4 on, not {lanes!r}")
        self.lanes = lanes
        self.lines = lanes * 32 // LINE_BITS
        super().__init__(
            {
                "start": In(1),
                "stop": In(1),
                "rows": In(16),
                "store": In(1),
                "format": In(Format),
                "fixed_scale": In(1),
                "scale": In(8),
                "address": In(32),
                "stride": In(16),
                "reduce_address": In(32),
                "reduce": In(1),
                "enable": Out(1),
                "valid": In(1),
                "y": In(data.ArrayLayout(32, lanes)),
                "present": In(lanes),
                "last": In(1),
                "final": In(1),
                "reduce_valid": In(1),
                "reduced": In(32),
                "finished": Out(1),
                "quiet": Out(1),
                "client": Out(SramClient(self.lines)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        lanes = self.lanes
        vector_bits = (lanes * 4).bit_length() - 1  # of a byte address inside a request
        align = vector_bits - (LINE_BITS // 8).bit_length() + 1
        request = self.client.request

        def following(address, step, name: str) -> Signal:
            """`address` + `step`; the 33rd bit stays once it is set."""
            total = Signal(33, name=name)
            m.d.comb += total.eq((address[:32] + step) | Cat(Const(0, 32), address[32]))
            return total

        def line(address):
            top = address[vector_bits:32] | address[32].replicate(32 - vector_bits)
            return Cat(Const(0, align), top)

        held = Signal()  # an offer was not taken, and whether it is one of reductions
        held_choice = Signal(reset_less=True)

        # Result vectors, as they are written but for their place in the lines.
        bf16 = Signal()
        base = Signal(33, reset_less=True)
        address = Signal(33, reset_less=True)
        complete = Signal()
        entry = vector_entry(lanes, 33)
        depth = block_vectors(lanes) + QUEUE
        m.submodules.queue = queue = SyncFIFO(width=entry.size, depth=depth)
        m.submodules.quantise = quantise = VectorQuantise(lanes, 33, depth)
        new = Signal(entry)
        scaled = Signal()
        push = Signal()
        vector_of_block = Signal(range(max(block_vectors(lanes), 2)))
        m.d.comb += [
            bf16.eq(self.format == Format.BF16),
            scaled.eq((self.format != Format.BF16) & (self.format != Format.FP32)),
            push.eq(self.valid & self.enable & self.store & ~self.stop),
            new.ends.eq(self.last | (vector_of_block == block_vectors(lanes) - 1)),
            quantise.format.eq(self.format),
            quantise.fixed_scale.eq(self.fixed_scale),
            quantise.scale.eq(self.scale),
            quantise.measure.eq(push & scaled),
            quantise.entry.eq(new),
            quantise.clear.eq(self.stop & ~held),
            new.present.eq(self.present),
            new.address.eq(address),
            queue.w_data.eq(new),
            queue.w_en.eq(push),
        ]
        for i in range(lanes):
            rounded = Signal(17, name=f"rounded_{i}")
            y = self.y[i]
            m.d.comb += [
                # NaN is canonical: 0x7FC0 by itself.
                rounded.eq(y[16:] + (y[15] & (y[16] | y[:15].any()))),
                new.y[i].eq(Mux(bf16, rounded[:16], y)),
            ]
        size = Signal(vector_bits + 1)
        with m.Switch(self.format):
            for fmt in Format:
                with m.Case(fmt):
                    m.d.comb += size.eq(1 << size_bits(lanes, fmt))
        next_row = following(base, Cat(Const(0, 2), self.stride), "next_row")
        next_vector = following(address, size, "next_vector")
        with m.If(self.valid & self.enable):
            m.d.sync += [
                address.eq(next_vector),
                vector_of_block.eq(Mux(new.ends, 0, vector_of_block + 1)),
            ]
            with m.If(self.last):
                m.d.sync += [address.eq(next_row), base.eq(next_row)]
            with m.If(self.final):
                m.d.sync += complete.eq(1)

        # Reductions of neighbouring rows.
        m.submodules.words = words = SyncFIFO(width=32, depth=WORDS)
        row = Signal(16, reset_less=True)
        target = Signal(33, reset_less=True)
        gathered = Signal(data.ArrayLayout(32, lanes), reset_less=True)
        filled = Signal(lanes)
        where = Signal(33, reset_less=True)
        ready = Signal()
        reduced_all = Signal()
        pop = Signal()
        written = Signal()  # the gathered reductions have been taken
        word = Signal(range(lanes))
        next_target = following(target, 4, "next_target")
        m.d.comb += [
            words.w_data.eq(self.reduced),
            words.w_en.eq(self.reduce_valid & self.enable & ~self.stop),
            pop.eq(words.r_rdy & (~ready | written | self.stop)),
            words.r_en.eq(pop),
            word.eq(target[2:vector_bits]),
        ]
        with m.If(written | (self.stop & ~(held & held_choice))):
            m.d.sync += [filled.eq(0), ready.eq(0)]
        with m.If(pop & ~self.stop):
            m.d.sync += [
                filled.eq(Mux(written, 0, filled) | (1 << word)),
                where.eq(target),
                target.eq(next_target),
                row.eq(row - 1),
                reduced_all.eq(row == 1),
                ready.eq((word == lanes - 1) | (row == 1)),
            ]
            with m.Switch(word):
                for i in range(lanes):
                    with m.Case(i):
                        m.d.sync += gathered[i].eq(words.r_data)
        with m.If(self.start):
            m.d.sync += [
                base.eq(self.address),
                address.eq(self.address),
                complete.eq(0),
                vector_of_block.eq(0),
                target.eq(self.reduce_address),
                row.eq(self.rows),
                reduced_all.eq(0),
            ]

        # What is offered stays offered.
        choice = Signal()
        taken = Signal()
        head = data.View(entry, queue.r_data)
        coded = quantise.coded
        waits = Signal()  # a vector is ready to be written
        go = Signal()
        m.d.comb += [
            waits.eq(Mux(scaled, coded.valid, queue.r_rdy)),
            choice.eq(Mux(held, held_choice, ready)),
            request.valid.eq(Mux(self.stop, held, ready | waits)),
            taken.eq(request.valid & request.ready),
            written.eq(taken & choice),
            go.eq(taken & ~choice),
            quantise.vector.payload.eq(queue.r_data),
            quantise.vector.valid.eq(queue.r_rdy & scaled & ~self.stop),
            coded.ready.eq(go),
            queue.r_en.eq(
                queue.r_rdy
                & Mux(self.stop & ~held, 1, Mux(scaled, quantise.vector.ready & ~self.stop, go))
            ),
            self.enable.eq(queue.w_rdy & words.w_rdy),
            self.quiet.eq(~held & ~queue.r_rdy & ~words.r_rdy & ~ready & ~quantise.busy),
            self.finished.eq(
                complete & ~queue.r_rdy & ~quantise.busy & (~self.reduce | (reduced_all & ~ready))
            ),
            # A constant bit of a signal with other drivers would never be evaluated in Verilog.
            request.payload.write.eq(request.valid),
        ]
        m.d.sync += [held.eq(request.valid & ~request.ready), held_choice.eq(choice)]

        def slots(address, granules: list, fmt: Format) -> Value:
            """Write mask: `granules` in the part of the request that `address` means."""
            step = width_step(fmt)
            slot = Const(0) if not step else address[vector_bits - step : vector_bits]
            here = Cat(granules)
            return Cat(here & (slot == k).replicate(len(here)) for k in range(1 << step))

        with m.If(choice):
            m.d.comb += [
                request.payload.address.eq(line(where)),
                request.payload.data.eq(gathered),
                request.payload.mask.eq(Cat(bit.replicate(32 // GRANULE_BITS) for bit in filled)),
            ]
        with m.Else(), m.Switch(self.format):
            for fmt in Format:
                spec = SPECS[fmt]
                bits = spec.storage_bits
                source = coded.payload if spec.scaled else head
                elements = source.codes if spec.scaled else source.y
                share = max(GRANULE_BITS // bits, 1)  # elements of a granule
                granules = [
                    source.present[i].replicate(max(bits // GRANULE_BITS, 1))
                    for i in range(0, lanes, share)
                ]
                with m.Case(fmt):
                    m.d.comb += [
                        request.payload.address.eq(line(source.address)),
                        request.payload.data.eq(
                            Cat(elements[i][:bits] for i in range(lanes)).replicate(32 // bits)
                        ),
                        request.payload.mask.eq(slots(source.address, granules, fmt)),
                    ]
                    if spec.scaled:
                        # Every line that is touched gets the scale of its block.
                        for k in range(self.lines):
                            block = k * spec.codes_per_line % lanes * len(source.scales) // lanes
                            m.d.comb += [
                                request.payload.scales[k].eq(source.scales[block]),
                                request.payload.scale_mask[k].eq(request.payload.mask[k].any()),
                            ]
        return m
