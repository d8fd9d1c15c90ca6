# SPDX-License-Identifier: Apache-2.0
"""FP32 comparison, minimum and maximum."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden.formats import CANONICAL_NAN


class Fp32Compare(wiring.Component):
    """Comparison, minimum and maximum of a and b, as `less`, `equal`, `unordered`, `minimum` and
    `maximum` of `golden.fp32`.

    `less` and `equal` go by value (-0 equals +0) and are low when an operand is NaN. Minimum and
    maximum are those of IEEE 754-2019: -0 < +0, NaN propagates as 0x7FC00000.

    Latency `LATENCY` cycles, one comparison per cycle. While `enable` is low the outputs
    stand still.

    Members
    -------
    enable : In(1)
    a, b : In(32)
    less, equal, unordered : Out(1)
    minimum, maximum : Out(32)
        All outputs are registered and undefined until the first operands come through.
    """

    LATENCY = 1
    emit_name = "fp32_compare"

    def __init__(self) -> None:
        super().__init__(
            {
                "enable": In(1),
                "a": In(32),
                "b": In(32),
                "less": Out(1),
                "equal": Out(1),
                "unordered": Out(1),
                "minimum": Out(32),
                "maximum": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        a, b = self.a, self.b
        a_key = Signal(32)
        b_key = Signal(32)
        below = Signal()  # in the total order in which -0 < +0
        nan = Signal()
        zeros = Signal()
        m.d.comb += [
            # Keys that are ordered as unsigned numbers.
            a_key.eq(Cat(a[:31] ^ a[31].replicate(31), ~a[31])),
            b_key.eq(Cat(b[:31] ^ b[31].replicate(31), ~b[31])),
            below.eq(a_key < b_key),
            nan.eq((a[:31] > 0x7F800000) | (b[:31] > 0x7F800000)),
            zeros.eq(~(a[:31].any() | b[:31].any())),
        ]
        less = Signal(reset_less=True)
        equal = Signal(reset_less=True)
        unordered = Signal(reset_less=True)
        minimum = Signal(32, reset_less=True)
        maximum = Signal(32, reset_less=True)
        with m.If(self.enable):
            m.d.sync += [
                less.eq(below & ~zeros & ~nan),
                equal.eq(((a == b) | zeros) & ~nan),
                unordered.eq(nan),
                minimum.eq(Mux(nan, CANONICAL_NAN, Mux(below, a, b))),
                maximum.eq(Mux(nan, CANONICAL_NAN, Mux(below, b, a))),
            ]
        m.d.comb += [
            self.less.eq(less),
            self.equal.eq(equal),
            self.unordered.eq(unordered),
            self.minimum.eq(minimum),
            self.maximum.eq(maximum),
        ]
        return m
