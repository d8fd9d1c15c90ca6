# SPDX-License-Identifier: Apache-2.0
"""FP32 to BF16, combinational: round to nearest even, overflow to infinity, NaN to 0x7FC0."""

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out


class Bf16Round(wiring.Component):
    """`o` is `i` rounded to BF16 in the same cycle."""

    clocked = False

    def __init__(self) -> None:
        super().__init__({"i": In(32), "o": Out(16)})

    def elaborate(self, platform):
        m = Module()
        up, nan = Signal(), Signal()
        m.d.comb += [
            up.eq(self.i[15] & (self.i[16] | self.i[:15].any())),
            nan.eq(self.i[23:31].all() & self.i[:23].any()),
            self.o.eq(Mux(nan, 0x7FC0, self.i[16:] + up)),
        ]
        return m
