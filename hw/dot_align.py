# SPDX-License-Identifier: Apache-2.0
"""Second and third stage of a cell's dot product: shift amounts, then alignment and first sums."""

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden.matmul import WINDOW
from hw.dot_multiply import (
    EXPONENT_BITS,
    PAIR_BITS,
    QUAD_BITS,
    QUADS,
    SCALE_SUM_BITS,
    SHIFT_BITS,
)
from hw.wires import wire

ALIGNED_BITS = QUAD_BITS + WINDOW
QUARTER_BITS = ALIGNED_BITS + 2  # four aligned sums together


class DotAmounts(wiring.Component):
    """Combinational. How far each quad shifts to the left, and which lie outside the window.

    `no_shift` is set in 1 x 1, `by_pair` in 2 x 1, where the exponents are the shifts and nothing can
    lie outside. `unit_in` and `unit` are the biased exponents of bit 0, before and after.
    """

    def __init__(self) -> None:
        super().__init__({
            "exponent": In(EXPONENT_BITS).array(QUADS),
            "no_shift": In(1), "by_pair": In(1),
            "unit_in": In(signed(SCALE_SUM_BITS)),
            "shift": Out(SHIFT_BITS).array(QUADS),
            "keep": Out(QUADS),
            "unit": Out(signed(SCALE_SUM_BITS)),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        level, largest = 0, list(self.exponent)
        while len(largest) > 1:
            largest = [
                wire(m, f"largest_{level}_{i}", Mux(a > b, a, b))
                for i, (a, b) in enumerate(zip(largest[::2], largest[1::2], strict=True))
            ]
            level += 1
        fixed = wire(m, "fixed", self.no_shift | self.by_pair)
        for q in range(QUADS):
            below = wire(m, f"below_{q}", largest[0] - self.exponent[q], EXPONENT_BITS)
            m.d.comb += [
                self.keep[q].eq(fixed | ~below[SHIFT_BITS:].any()),
                self.shift[q].eq(Mux(
                    fixed, Mux(self.no_shift, 0, self.exponent[q]), ~below[:SHIFT_BITS])),
            ]  # fmt: skip
        m.d.comb += self.unit.eq(self.unit_in + Mux(fixed, 0, largest[0] - WINDOW))
        return m


class DotAlign(wiring.Component):
    """Combinational. Shifts quads and pairs and adds them up to four sums, of equal weight digits."""

    def __init__(self) -> None:
        super().__init__({
            "quad": In(signed(QUAD_BITS)).array(QUADS),
            "shift": In(SHIFT_BITS).array(QUADS),
            "pair": In(signed(PAIR_BITS)).array(QUADS),
            "pair_shift": In(SHIFT_BITS).array(QUADS),
            "quarter": Out(signed(QUARTER_BITS)).array(QUADS // 2),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        halves = []
        for q in range(QUADS):
            quad = shift_left(m, f"quad_{q}", self.quad[q], self.shift[q])
            pair = shift_left(m, f"pair_{q}", self.pair[q], self.pair_shift[q])
            halves.append(wire(m, f"half_{q}", quad + pair, signed(ALIGNED_BITS + 1)))
        for k in range(QUADS // 2):
            m.d.comb += self.quarter[k].eq(halves[k] + halves[k + QUADS // 2])
        return m


def shift_left(m: Module, name: str, value: Value, amount: Value) -> Signal:
    """Signed value * 2^amount; every stage is only as wide as it needs to be."""
    width = len(value)
    for k in range(len(amount)):
        width += 1 << k
        moved = wire(m, f"{name}_moved_{k}", Cat(Const(0, 1 << k), value), signed(width))
        stay = wire(m, f"{name}_stay_{k}", value, signed(width))
        value = wire(m, f"{name}_shift_{k}", Mux(amount[k], moved, stay), signed(width))
    return value
