# SPDX-License-Identifier: Apache-2.0
"""Loads of the vector engine: addresses, credits, choice of a line's part, conversion to FP32."""

from amaranth import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.fifo import SyncFIFO
from amaranth.lib.wiring import In, Out

from golden.formats import SPECS, Format
from hw.emit import place
from hw.isa import Kind
from hw.ports import LINE_ADDRESS_BITS, LINE_BITS, SCALE_BITS, SramClient
from hw.vector_decode import VectorDecode
from hw.vector_format import MAX_STEP, width_step

DEPTH = 8  # responses that may be under way or wait; covers the round trip to the tile SRAM
ROW_BITS = 16
STRIDE_BITS = 16


def operand_config() -> data.StructLayout:
    """An operand in memory: `address` and `stride` (in units of four bytes) as in the command."""
    return data.StructLayout({"kind": Kind, "address": 32, "stride": STRIDE_BITS, "format": Format})


class VectorLoad(wiring.Component):
    """Reads one or two operands of a command, vector by vector, through one SRAM port.

    Rows come in order, in a row the vectors; for every vector first operand 0, then operand 1, each
    if it is of kind VECTOR, or of kind ROW and the vector is the row's first. One request per
    cycle; requests are made only with room for their responses, at most `DEPTH` ahead of `out`.
    From `start` to the first vector on `out` `LATENCY` cycles at least, then one vector per cycle.

    Addresses beyond 32 bits become the last of the address space, which no memory has.

    Parameters
    ----------
    lanes : elements of a vector, a power of two from 4 on
    operands : 1 or 2

    Members
    -------
    start : In(1)
        Begins a command.
    stop : In(1)
        No more requests; what comes is thrown away. Held until `quiet`, then `clear`.
    clear : In(1)
    rows, vectors : In(16)
        Rows, and vectors of a row, both less one; `vectors` holds still after `start`.
    toggle : In(16)
        The vector i of a row is taken from i XOR `toggle` (operands of kind VECTOR); holds still.
    operand : In
        Configuration of every operand, taken with `start` like `rows`.
    quiet : Out(1)
        No request is offered, none is unanswered, no response waits.
    client : Out(SramClient)
    out : Out(stream)
        A vector of FP32 values, NaN canonical; a ROW operand is on every lane.
    """

    LATENCY = 7

    def __init__(self, lanes: int, operands: int) -> None:
        if lanes < 4 or lanes & (lanes - 1):
            raise ValueError(f"lanes must be a power of two from 4 on, not {lanes!r}")
        if operands not in (1, 2):
            raise ValueError(f"operands must be 1 or 2, not {operands!r}")
        self.lanes, self.operands = lanes, operands
        self.lines = lanes * 32 // LINE_BITS
        super().__init__(
            {
                "start": In(1),
                "stop": In(1),
                "clear": In(1),
                "rows": In(ROW_BITS),
                "vectors": In(ROW_BITS),
                "toggle": In(ROW_BITS),
                "operand": In(data.ArrayLayout(operand_config(), operands)),
                "quiet": Out(1),
                "client": Out(SramClient(self.lines)),
                "out": Out(stream.Signature(data.ArrayLayout(32, lanes))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        vector_bits = (self.lanes * 4).bit_length() - 1  # of a byte address inside a request
        line_bits = (LINE_BITS // 8).bit_length() - 1
        part = data.StructLayout({"byte": vector_bits, "format": Format, "row": 1})

        # Responses, and beside them what part of each is meant.
        word_bits = self.lines * LINE_BITS
        m.submodules.parts = parts = SyncFIFO(width=part.size, depth=DEPTH)
        m.submodules.words = words = SyncFIFO(
            width=word_bits + self.lines * SCALE_BITS, depth=DEPTH
        )

        # Walk over rows, vectors and operands.
        active = Signal()
        row = Signal(ROW_BITS, reset_less=True)
        index = Signal(ROW_BITS, reset_less=True)
        second = Signal()
        operands = [
            Signal(operand_config(), name=f"operand_{k}", reset_less=True)
            for k in range(self.operands)
        ]
        # One bit more than an address: it stays when an address has passed the end of the space.
        base = [Signal(33, name=f"base_{k}", reset_less=True) for k in range(self.operands)]
        walks = [Signal(name=f"walks_{k}") for k in range(self.operands)]
        needs = [Signal(name=f"needs_{k}") for k in range(self.operands)]
        for k, operand in enumerate(operands):
            m.d.comb += [
                walks[k].eq(operand.kind == Kind.VECTOR),
                needs[k].eq(walks[k] | ((operand.kind == Kind.ROW) & (index == 0))),
            ]
        item = Signal()
        end_of_vector = Signal()
        if self.operands == 2:
            m.d.comb += [
                item.eq(second | ~needs[0]),
                end_of_vector.eq(item | ~needs[1]),
            ]
        else:
            m.d.comb += end_of_vector.eq(1)
        end_of_row = Signal()
        m.d.comb += end_of_row.eq(end_of_vector & ((index == self.vectors) | ~Cat(walks).any()))

        chosen = Signal(operand_config())
        chosen_base = Signal(33)
        m.d.comb += [chosen.eq(operands[0]), chosen_base.eq(base[0])]
        if self.operands == 2:
            with m.If(item):
                m.d.comb += [chosen.eq(operands[1]), chosen_base.eq(base[1])]
        place_in_row = Signal(ROW_BITS)
        offset = Signal(ROW_BITS + vector_bits)
        address = Signal(33)
        m.d.comb += place_in_row.eq(Mux(chosen.kind == Kind.ROW, 0, index ^ self.toggle))
        with m.Switch(chosen.format):
            for fmt in Format:
                with m.Case(fmt):
                    shift = vector_bits - width_step(fmt)
                    m.d.comb += offset.eq(Cat(Const(0, shift), place_in_row))
        m.d.comb += address.eq((chosen_base[:32] + offset) | Cat(Const(0, 32), chosen_base[32]))

        # One request is held in a register until it is taken.
        request_valid = Signal()
        request_line = Signal(LINE_ADDRESS_BITS, reset_less=True)
        request_part = Signal(part, reset_less=True)
        credits = Signal(range(DEPTH + 1), init=DEPTH)
        unanswered = Signal(range(DEPTH + 1))
        taken = Signal()
        step = Signal()
        align = vector_bits - line_bits
        m.d.comb += [
            self.client.request.valid.eq(request_valid),
            self.client.request.payload.address.eq(request_line),
            taken.eq(request_valid & self.client.request.ready),
            step.eq(active & ~self.stop & (credits != 0) & (~request_valid | taken)),
            self.quiet.eq(~request_valid & (unanswered == 0) & ~words.r_rdy),
        ]
        m.d.sync += unanswered.eq(unanswered + taken - self.client.valid)
        with m.If(taken):
            m.d.sync += request_valid.eq(0)
        with m.If(step):
            m.d.sync += [
                request_valid.eq(1),
                request_line.eq(
                    Cat(
                        Const(0, align),
                        address[vector_bits:32] | address[32].replicate(32 - vector_bits),
                    )
                ),
                request_part.byte.eq(address[:vector_bits]),
                request_part.format.eq(chosen.format),
                request_part.row.eq(chosen.kind == Kind.ROW),
                second.eq(~end_of_vector),
            ]
            with m.If(end_of_vector):
                m.d.sync += index.eq(index + 1)
            with m.If(end_of_row):
                m.d.sync += [index.eq(0), row.eq(row - 1), active.eq(row != 0)]
                for k, operand in enumerate(operands):
                    total = Signal(33, name=f"next_base_{k}")
                    m.d.comb += total.eq(base[k][:32] + Cat(Const(0, 2), operand.stride))
                    m.d.sync += base[k].eq(total | Cat(Const(0, 32), base[k][32]))
        with m.If(self.start):
            m.d.sync += [
                active.eq(
                    Cat(
                        (self.operand[k].kind == Kind.VECTOR) | (self.operand[k].kind == Kind.ROW)
                        for k in range(self.operands)
                    ).any()
                ),
                row.eq(self.rows),
                index.eq(0),
                second.eq(0),
            ]
            for k, operand in enumerate(operands):
                m.d.sync += [operand.eq(self.operand[k]), base[k].eq(self.operand[k].address)]
        with m.If(self.clear):
            m.d.sync += active.eq(0)

        advance = Signal()
        pop = Signal()
        m.d.comb += [
            parts.w_data.eq(request_part),
            parts.w_en.eq(taken),
            words.w_data.eq(Cat(self.client.response.data, self.client.response.scales)),
            words.w_en.eq(self.client.valid),
            pop.eq(words.r_rdy & (advance | self.stop)),
            parts.r_en.eq(pop),
            words.r_en.eq(pop),
        ]
        m.d.sync += credits.eq(credits + pop - step)

        # Halve the word, by the address bits from the top: every format's vector is one of these
        # halves, as is the value of a ROW operand, and the scales of its lines go along.
        head = data.View(part, parts.r_data)
        halves = [words.r_data[:word_bits]]
        scales = [words.r_data[word_bits:]]
        lane_bits = self.lanes.bit_length() - 1
        for bit in reversed(range(vector_bits - max(lane_bits, MAX_STEP), vector_bits)):
            for name, values, least in (("half", halves, 1), ("scales", scales, SCALE_BITS)):
                whole = values[-1]
                size = max(len(whole) // 2, least)
                half = Signal(size, name=f"{name}_{bit}")
                m.d.comb += half.eq(Mux(head.byte[bit], whole[len(whole) - size :], whole[:size]))
                values.append(half)
        selected_valid = Signal()
        selected = Signal(data.ArrayLayout(32, self.lanes), reset_less=True)
        scale = Signal(data.ArrayLayout(SCALE_BITS, self.lanes), reset_less=True)
        selected_format = Signal(Format, reset_less=True)
        with m.If(advance):
            m.d.sync += [
                selected_valid.eq(pop & ~self.stop),
                selected_format.eq(Mux(head.row, Format.FP32, head.format)),
            ]
            for i in range(self.lanes):
                with m.If(head.row):
                    m.d.sync += selected[i].eq(halves[lane_bits])
                with m.Else(), m.Switch(head.format):
                    for fmt in Format:
                        bits, step = SPECS[fmt].storage_bits, width_step(fmt)
                        with m.Case(fmt):
                            m.d.sync += [
                                selected[i].eq(halves[step].word_select(i, bits)),
                                scale[i].eq(
                                    scales[step].word_select(i * bits // LINE_BITS, SCALE_BITS)
                                ),
                            ]

        out_valid = Signal()
        m.d.comb += [
            advance.eq(~out_valid | self.out.ready),
            self.out.valid.eq(out_valid),
        ]
        with m.If(advance):
            m.d.sync += out_valid.eq(selected_valid)
        for i in range(self.lanes):
            decode = VectorDecode()
            place(m, platform, f"decode{i}", decode)
            m.d.comb += [
                decode.enable.eq(advance),
                decode.format.eq(selected_format),
                decode.code.eq(selected[i]),
                decode.scale.eq(scale[i]),
                self.out.payload[i].eq(decode.value),
            ]
        with m.If(self.clear):
            m.d.sync += [selected_valid.eq(0), out_valid.eq(0)]
        return m
