# SPDX-License-Identifier: Apache-2.0
"""Second and third stage of a cell's dot product: the largest exponent, then alignment."""

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
TOTAL_BITS = 49  # signed, of the window's exact sum


class DotAmounts(wiring.Component):
    """Combinational. The exponent that is aligned to the top of the window, and each quad's way
    there.

    `fixed` is set in 1 x 1 and 2 x 1, where nothing can lie outside: there a quad shifts by its
    exponent. `unit_in` and `unit` are the biased exponents of bit 0, before and after.
    """

    def __init__(self) -> None:
        super().__init__({
            "exponent": In(EXPONENT_BITS).array(QUADS), "fixed": In(1),
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
        top = wire(m, "top", Mux(self.fixed, WINDOW, largest[0]))
        for q in range(QUADS):
            below = wire(m, f"below_{q}", top - self.exponent[q], EXPONENT_BITS)
            m.d.comb += [
                self.keep[q].eq(~below[SHIFT_BITS:].any()),
                self.shift[q].eq(~below[:SHIFT_BITS]),
            ]
        m.d.comb += self.unit.eq(self.unit_in + top - WINDOW)
        return m


class DotAlign(wiring.Component):
    """Combinational. Shifts quads and pairs into the window and adds all up, in carry-save form.

    `two_quads`: a product spreads over two quads (4 x 2 and 4 x 4), `four_quads`: over four (4 x
    4); here the weight's digits get their places. A quad outside the window is zero. `sum` +
    `carry` is the total modulo 2^TOTAL_BITS.
    """

    def __init__(self) -> None:
        super().__init__({
            "quad": In(signed(QUAD_BITS)).array(QUADS),
            "inverted": In(QUADS),
            "shift": In(SHIFT_BITS).array(QUADS),
            "keep": In(QUADS),
            "pair": In(signed(PAIR_BITS)).array(QUADS),
            "pair_shift": In(SHIFT_BITS).array(QUADS),
            "two_quads": In(1), "four_quads": In(1),
            "sum": Out(TOTAL_BITS), "carry": Out(TOTAL_BITS),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        quads: list[Signal] = []
        pairs: list[Signal] = []
        missing: list[Value] = []
        for q in range(QUADS):
            aligned = shift_left(m, f"quad_{q}", self.quad[q], self.shift[q], self.inverted[q])
            quads.append(wire(m, f"kept_{q}", Mux(self.keep[q], aligned, 0), signed(ALIGNED_BITS)))
            missing.append(self.inverted[q] & self.keep[q])
            pairs.append(shift_left(m, f"pair_{q}", self.pair[q], self.pair_shift[q], Const(0, 1)))
        # Quads k and k + 4 hold equal digits of their products.
        groups = []
        for k in range(4):
            total, carry = carry_save(m, f"first_{k}", quads[k], quads[k + 4], pairs[k], missing[k])
            groups.append(carry_save(m, f"second_{k}", total, carry, pairs[k + 4], missing[k + 4]))
        halves = []
        for k in range(2):
            upper = _placed(m, f"digit_{k}", groups[2 * k + 1], self.two_quads, 2)
            halves.append(_four(m, f"half_{k}", groups[2 * k], upper))
        upper = _placed(m, "digits", halves[1], self.four_quads, 4)
        total, carry = _four(m, "whole", halves[0], upper)
        m.d.comb += [self.sum.eq(total), self.carry.eq(carry)]
        return m


Pair = tuple[Signal, Signal]


def _placed(m: Module, name: str, number: Pair, move: Value, by: int) -> Pair:
    """Sum and carry times 2^by if `move` is set."""
    placed = []
    for i, value in enumerate(number):
        shape = signed(min(len(value) + by, TOTAL_BITS))
        moved = wire(m, f"{name}_moved_{i}", Cat(Const(0, by), value), shape)
        stay = wire(m, f"{name}_stay_{i}", value, shape)
        placed.append(wire(m, f"{name}_{i}", Mux(move, moved, stay), shape))
    return placed[0], placed[1]


def _four(m: Module, name: str, a: Pair, b: Pair) -> Pair:
    """Sum and carry of two numbers in carry-save form, modulo 2^TOTAL_BITS."""
    total, carry = carry_save(m, f"{name}_first", a[0], a[1], b[0])
    total, carry = carry_save(m, f"{name}_second", total, carry, b[1])
    return total, wire(m, name, carry, signed(min(len(carry), TOTAL_BITS)))


def shift_left(m: Module, name: str, value: Value, amount: Value, fill: Value) -> Signal:
    """Signed value * 2^amount, with `fill` in the places that become free.

    Every stage is only as wide as it needs to be.
    """
    width = len(value)
    for k in range(len(amount)):
        step = 1 << k
        width += step
        moved = wire(m, f"{name}_moved_{k}", Cat(fill.replicate(step), value), signed(width))
        stay = wire(m, f"{name}_stay_{k}", value, signed(width))
        value = wire(m, f"{name}_shift_{k}", Mux(amount[k], moved, stay), signed(width))
    return value


def carry_save(
    m: Module, name: str, x: Value, y: Value, z: Value, unit: Value | int = 0
) -> tuple[Signal, Signal]:
    """Two signed numbers with the sum of three signed ones and of the bit `unit`."""
    width = max(len(x), len(y), len(z))
    a, b, c = (
        wire(m, f"{name}_{letter}", operand, signed(width))
        for letter, operand in zip("abc", (x, y, z), strict=True)
    )
    total = wire(m, f"{name}_sum", a ^ b ^ c, signed(width))
    majority = (a & b) | (c & (a ^ b))
    free = Value.cast(unit)[:1]  # the lowest carry's place is free
    return total, wire(m, f"{name}_carry", Cat(free, majority), signed(width + 1))
