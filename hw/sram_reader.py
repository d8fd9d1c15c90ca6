# SPDX-License-Identifier: Apache-2.0
"""Reads ranges of tile SRAM lines as a stream of beats."""

from amaranth import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.hbm_channel import PIECE, PIECE_BITS, line_beat
from hw.line_fifo import LineFifo
from hw.ports import LINE_ADDRESS_BITS, sram_response

DEPTH = 16  # beats that may be on their way or wait


class SramReader(wiring.Component):
    """Ranges of lines in, the beats of `lines` aligned lines that they lie in out, in order.

    One request per cycle, each issued into reserved room for its answer. `address` goes to the SRAM
    client's request; `valid` and `response` are the client's.
    """

    def __init__(self, lines: int):
        self.lines = lines
        super().__init__(
            {
                "piece": In(stream.Signature(PIECE)),
                "address": Out(stream.Signature(LINE_ADDRESS_BITS)),
                "valid": In(1),
                "response": In(sram_response(lines)),
                "beat": Out(stream.Signature(line_beat(lines))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        lines = self.lines
        shift = (lines - 1).bit_length()
        extent = data.StructLayout({"start": range(lines + 1), "end": range(lines + 1)})
        m.submodules.extents = extents = LineFifo(extent, DEPTH)
        m.submodules.answers = answers = LineFifo(
            data.ArrayLayout(self.response.data.shape().elem_shape, lines), DEPTH
        )

        active = Signal()
        address = Signal(LINE_ADDRESS_BITS, reset_less=True)
        left = Signal(PIECE_BITS, reset_less=True)
        room = Signal(range(DEPTH + 1), init=DEPTH)
        offset = Signal(range(lines + 1))
        reach = Signal(PIECE_BITS + 1)  # lines from the start of the beat to the end
        final, issue, taken = Signal(), Signal(), Signal()
        m.d.comb += [
            offset.eq(address[:shift]),
            reach.eq(left + offset),
            final.eq(reach <= lines),
            self.address.p.eq(address - offset),
            # Room for the answer is room for its extent: neither queue ever refuses.
            self.address.valid.eq(active & (room != 0)),
            issue.eq(self.address.valid & self.address.ready),
            extents.input.valid.eq(issue),
            extents.input.p.start.eq(offset),
            extents.input.p.end.eq(lines),
            self.piece.ready.eq(~active | (issue & final)),
        ]
        with m.If(final):
            m.d.comb += extents.input.p.end.eq(reach)
        with m.If(issue):
            m.d.sync += [
                active.eq(~final),
                address.eq(address - offset + lines),
                left.eq(reach - lines),
            ]
        with m.If(self.piece.valid & self.piece.ready):
            m.d.sync += [
                active.eq(1),
                address.eq(self.piece.p.address),
                left.eq(self.piece.p.lines),
            ]
        m.d.sync += room.eq(room - issue + taken)

        m.d.comb += [
            answers.input.valid.eq(self.valid),
            answers.input.p.eq(self.response.data),
            self.beat.valid.eq(answers.output.valid & extents.output.valid),
            taken.eq(self.beat.valid & self.beat.ready),
            answers.output.ready.eq(taken),
            extents.output.ready.eq(taken),
            self.beat.p.data.eq(answers.output.p),
            self.beat.p.start.eq(extents.output.p.start),
            self.beat.p.end.eq(extents.output.p.end),
        ]
        return m
