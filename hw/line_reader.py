# SPDX-License-Identifier: Apache-2.0
"""Reads single lines of tile SRAM into reserved room."""

from amaranth import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.fifo import StreamFifo
from hw.noc_flit import LINE
from hw.ports import LINE_ADDRESS_BITS, SramClient


class LineReader(wiring.Component):
    """Line addresses in, lines with their scales out, in order; one per cycle.

    A read is requested only when one of the `depth` entries of the output FIFO is free for it. A
    line is on `line` in the cycle after the SRAM gave it. Depths from 5 keep up one line per cycle
    with `TileSram`.
    """

    def __init__(self, depth: int = 8):
        if not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth!r}")
        self.depth = depth
        super().__init__(
            {
                "address": In(stream.Signature(LINE_ADDRESS_BITS)),
                "memory": Out(SramClient(1)),
                "line": Out(stream.Signature(LINE)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.lines = lines = StreamFifo(LINE, self.depth)
        room = Signal(range(self.depth + 1), init=self.depth)
        memory = self.memory
        issue, taken = Signal(), Signal()
        m.d.comb += [
            memory.request.valid.eq(self.address.valid & (room != 0)),
            memory.request.payload.address.eq(self.address.payload),
            issue.eq(memory.request.valid & memory.request.ready),
            self.address.ready.eq(issue),
            lines.i.valid.eq(memory.valid),
            lines.i.payload.data.eq(memory.response.data),
            lines.i.payload.scale.eq(memory.response.scales),
            taken.eq(self.line.valid & self.line.ready),
        ]
        wiring.connect(m, lines.o, wiring.flipped(self.line))
        m.d.sync += room.eq(room - issue + taken)
        return m
