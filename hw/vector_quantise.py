# SPDX-License-Identifier: Apache-2.0
"""Blocks of a Microscaling format from a stream of FP32 vectors."""

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.fifo import SyncFIFO
from amaranth.lib.wiring import In, Out

from golden.formats import BLOCK, MX_FORMATS, SCALE_NAN, SPECS, Format
from hw.emit import place
from hw.vector_encode import VectorEncode


def block_vectors(lanes: int) -> int:
    """Vectors that a block takes."""
    return max(BLOCK // lanes, 1)


def vector_blocks(lanes: int) -> int:
    """Blocks that lie in a vector, a part of one counted as one."""
    return max(lanes // BLOCK, 1)


def vector_entry(lanes: int, address_bits: int) -> data.StructLayout:
    """A result vector on its way to memory; `ends` a block of MX formats."""
    return data.StructLayout(
        {"y": data.ArrayLayout(32, lanes), "present": lanes, "address": address_bits, "ends": 1}
    )


def code_entry(lanes: int, address_bits: int) -> data.StructLayout:
    return data.StructLayout(
        {
            "codes": data.ArrayLayout(8, lanes),
            "scales": data.ArrayLayout(8, vector_blocks(lanes)),
            "present": lanes,
            "address": address_bits,
        }
    )


class VectorQuantise(wiring.Component):
    """Codes and scales of vectors, as `golden.quantise.quantise`.

    A vector is seen twice: `measure` shows it as it enters a queue outside, `vector` takes it from
    that queue, in the same order. A vector is taken once the last one of its block has been
    measured; the queue must have room for a block. `LATENCY` cycles from `vector` to `coded`, one
    vector per cycle.

    Parameters
    ----------
    lanes : elements of a vector, a power of two from 4 on
    address_bits : of what travels along
    depth : of the queue

    Members
    -------
    clear : In(1)
        Forgets all vectors, one per cycle: held until `busy` is low.
    format : In(Format)
        Must not change while vectors are under way, like the two below.
    fixed_scale, scale : In
        `scale` (not 0xFF) is every block's scale in place of its own.
    measure : In(1)
    entry : In
        The vector that is measured.
    busy : Out(1)
        Verdicts or codes are under way.
    vector : In(stream)
    coded : Out(stream)
    """

    LATENCY = VectorEncode.LATENCY

    def __init__(self, lanes: int, address_bits: int, depth: int) -> None:
        if lanes < 4 or lanes & (lanes - 1):
            raise ValueError(f"lanes must be a power of two from 4 on, not {lanes!r}")
        if depth < block_vectors(lanes):
            raise ValueError(
                f"depth must be at least {block_vectors(lanes)} vectors, not {depth!r}"
            )
        self.lanes, self.address_bits, self.depth = lanes, address_bits, depth
        entry = vector_entry(lanes, address_bits)
        super().__init__(
            {
                "clear": In(1),
                "format": In(Format),
                "fixed_scale": In(1),
                "scale": In(8),
                "measure": In(1),
                "busy": Out(1),
                "entry": In(entry),
                "vector": In(stream.Signature(entry)),
                "coded": Out(stream.Signature(code_entry(lanes, address_bits))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        blocks = vector_blocks(self.lanes)
        width = self.lanes // blocks

        # Largest exponent field of a vector's blocks, then of the blocks. Subnormals count as 0,
        # which makes no difference: their scale would be the smallest one too.
        measured = Signal()
        ends = Signal(reset_less=True)
        fresh = Signal(init=1)
        m.d.sync += measured.eq(self.measure)
        with m.If(self.measure):
            m.d.sync += ends.eq(self.entry.ends)
        with m.If(measured):
            m.d.sync += fresh.eq(ends)
        with m.If(self.clear):
            m.d.sync += [measured.eq(0), fresh.eq(1)]
        maximum_exponent = Signal(4)
        with m.Switch(self.format):
            for fmt in MX_FORMATS:
                with m.Case(fmt):
                    m.d.comb += maximum_exponent.eq(SPECS[fmt].max_exponent)

        def larger(a: Value, b: Value, name: str) -> Signal:
            result = Signal(8, name=name)
            m.d.comb += result.eq(Mux(a > b, a, b))
            return result

        verdict = data.StructLayout({"scale": 8, "blank": 1})
        verdicts = Signal(data.ArrayLayout(verdict, blocks))
        for k in range(blocks):
            lanes = [self.entry.y[i] for i in range(k * width, (k + 1) * width)]
            fields = [x[23:31] for x in lanes]
            while len(fields) > 1:
                fields = [
                    larger(fields[i], fields[i + 1], f"field_{k}_{len(fields)}_{i}")
                    for i in range(0, len(fields), 2)
                ]
            field = Signal(8, name=f"field_{k}", reset_less=True)
            some = Signal(name=f"some_{k}", reset_less=True)
            with m.If(self.measure):
                m.d.sync += [field.eq(fields[0]), some.eq(Cat(x[:31].any() for x in lanes).any())]
            largest = Signal(8, name=f"largest_{k}", reset_less=True)
            other = Signal(name=f"other_{k}", reset_less=True)  # than zero
            block_field = Signal(8, name=f"block_field_{k}")
            block_some = Signal(name=f"block_some_{k}")
            difference = Signal(9, name=f"difference_{k}")
            own_scale = Signal(8, name=f"own_scale_{k}")
            m.d.comb += [
                block_field.eq(larger(field, Mux(fresh, 0, largest), f"running_{k}")),
                block_some.eq(some | (~fresh & other)),
                difference.eq(block_field - maximum_exponent),
                own_scale.eq(
                    Mux(
                        block_field == 0xFF,
                        SCALE_NAN,
                        Mux(difference[8] | ~block_some, 0, difference[:8]),
                    )
                ),
                verdicts[k].blank.eq(~self.fixed_scale & ((block_field == 0xFF) | ~block_some)),
                verdicts[k].scale.eq(Mux(self.fixed_scale, self.scale, own_scale)),
            ]
            with m.If(measured):
                m.d.sync += [largest.eq(block_field), other.eq(block_some)]

        m.submodules.ready_blocks = ready_blocks = SyncFIFO(
            width=verdicts.shape().size, depth=self.depth
        )
        head = data.View(verdicts.shape(), ready_blocks.r_data)
        advance = Signal()
        taken = Signal()
        entry = self.vector.payload
        m.d.comb += [
            ready_blocks.w_data.eq(verdicts),
            ready_blocks.w_en.eq(measured & ends),
            taken.eq(self.vector.valid & self.vector.ready),
            self.vector.ready.eq(advance & ready_blocks.r_rdy),
            ready_blocks.r_en.eq((taken & entry.ends) | self.clear),
        ]

        # What goes along with the codes.
        tag = data.StructLayout(
            {
                "scales": data.ArrayLayout(8, blocks),
                "present": self.lanes,
                "address": self.address_bits,
            }
        )
        along: Value = Signal(tag)
        m.d.comb += [
            along.present.eq(entry.present),
            along.address.eq(entry.address),
            along.scales.eq(Cat(head[k].scale for k in range(blocks))),
        ]
        valid: Value = taken
        valids = []
        for age in range(self.LATENCY):
            valid_register = Signal(name=f"valid_{age}")
            along_register = Signal(tag, name=f"along_{age}", reset_less=True)
            with m.If(advance):
                m.d.sync += [valid_register.eq(valid), along_register.eq(along)]
            with m.If(self.clear):
                m.d.sync += valid_register.eq(0)
            valid, along = valid_register, along_register
            valids.append(valid)
        for i in range(self.lanes):
            encode = VectorEncode()
            place(m, platform, f"encode{i}", encode)
            m.d.comb += [
                encode.enable.eq(advance),
                encode.format.eq(self.format),
                encode.x.eq(entry.y[i]),
                encode.scale.eq(head[i // width].scale),
                encode.blank.eq(head[i // width].blank),
                self.coded.payload.codes[i].eq(encode.code),
            ]
        m.d.comb += [
            advance.eq(~valid | self.coded.ready),
            self.coded.valid.eq(valid),
            self.busy.eq(Cat(valids).any() | measured | ready_blocks.r_rdy),
            self.coded.payload.scales.eq(along.scales),
            self.coded.payload.present.eq(along.present),
            self.coded.payload.address.eq(along.address),
        ]
        return m
