# SPDX-License-Identifier: Apache-2.0
"""Makes packets of heads and lines."""

from amaranth import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.noc_flit import FLIT, HEAD, LINE, PACKET_LINES


class PacketEmitter(wiring.Component):
    """Sends each head as a flit, then `body` lines of `line` as the packet's body; combinational.

    One flit per cycle while heads and lines come. `body` belongs to `head`; 0 means a head alone.
    """

    def __init__(self):
        super().__init__(
            {
                "head": In(stream.Signature(HEAD)),
                "body": In(range(PACKET_LINES + 1)),
                "line": In(stream.Signature(LINE)),
                "flit": Out(stream.Signature(FLIT)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        left = Signal.like(self.body)  # lines of the packet under way
        flit = self.flit.payload
        with m.If(left == 0):
            m.d.comb += [
                self.flit.valid.eq(self.head.valid),
                self.head.ready.eq(self.flit.ready),
                flit.data.eq(self.head.payload),
                flit.head.eq(1),
                flit.tail.eq(self.body == 0),
            ]
        with m.Else():
            m.d.comb += [
                self.flit.valid.eq(self.line.valid),
                self.line.ready.eq(self.flit.ready),
                flit.data.eq(self.line.payload.data),
                flit.scale.eq(self.line.payload.scale),
                flit.tail.eq(left == 1),
            ]
        with m.If(self.flit.valid & self.flit.ready):
            with m.If(left == 0):
                m.d.sync += left.eq(self.body)
            with m.Else():
                m.d.sync += left.eq(left - 1)
        return m
