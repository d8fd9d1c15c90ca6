# SPDX-License-Identifier: Apache-2.0
"""Addition, subtraction, maximum and minimum with one latency, for lanes and reductions."""

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.emit import place
from hw.fp32_add import Fp32Add
from hw.fp32_compare import Fp32Compare
from hw.isa import Op1


class VectorCombine(wiring.Component):
    """a + b (`Op1.ADD`, `Op1.NONE`), a - b, maximum or minimum of a and b, as in `golden.fp32`.

    Latency `LATENCY` cycles, one operation per cycle. While `enable` is low the whole pipeline
    stands still.

    Members
    -------
    enable : In(1)
    op : In(3)
        A `hw.isa.Op1`; must not change while operations are under way.
    a, b : In(32)
    result : Out(32)
    """

    LATENCY = Fp32Add.LATENCY
    emit_name = "vector_combine"

    def __init__(self) -> None:
        super().__init__(
            {
                "enable": In(1),
                "op": In(3),
                "a": In(32),
                "b": In(32),
                "result": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        adder, compare = Fp32Add(), Fp32Compare()
        place(m, platform, "adder", adder)
        place(m, platform, "compare", compare)
        larger, ordered = Signal(), Signal()
        m.d.comb += [
            larger.eq(self.op == Op1.MAX),
            ordered.eq(larger | (self.op == Op1.MIN)),
            adder.subtract.eq(self.op == Op1.SUB),
        ]
        for unit in (adder, compare):
            m.d.comb += [unit.enable.eq(self.enable), unit.a.eq(self.a), unit.b.eq(self.b)]
        value = Signal(32)
        m.d.comb += value.eq(Mux(larger, compare.maximum, compare.minimum))
        for age in range(Fp32Add.LATENCY - Fp32Compare.LATENCY):
            late = Signal(32, name=f"ordered_{age}", reset_less=True)
            with m.If(self.enable):
                m.d.sync += late.eq(value)
            value = late
        m.d.comb += self.result.eq(Mux(ordered, value, adder.result))
        return m
