# SPDX-License-Identifier: Apache-2.0
"""Third stage of a cell's dot product: alignment to the largest exponent, and most of the sum."""

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden.matmul import WINDOW
from hw.arrangement import QUADS
from hw.dot_multiply import PAIR_BITS, QUAD_BITS, SHIFT_BITS, TOTAL_BITS
from hw.wires import wire

ALIGNED_BITS = QUAD_BITS + WINDOW
# Quads that hold equal digits of their products: those of digits 0, 1, 2, 3.
GROUPS = ((0, 1), (4, 5), (2, 3), (6, 7))


class DotAlign(wiring.Component):
    """Combinational. Shifts quads and pairs into the window and adds all up, in carry-save form.

    Members
    -------
    quad, inverted, odd_pair, shift, keep, odd_shift : In
        From `DotQuads` and `DotLanes`; a quad outside the window is zero.
    two_quads, four_quads : In(1)
        A product spreads over two quads (4 x 2 and 4 x 4), over four (4 x 4); here the weight's
        digits get their places.
    sum, carry : Out
        Add up to the total modulo 2^TOTAL_BITS.
    """

    def __init__(self) -> None:
        super().__init__({
            "quad": In(signed(QUAD_BITS)).array(QUADS),
            "inverted": In(QUADS),
            "odd_pair": In(signed(PAIR_BITS)).array(QUADS),
            "shift": In(SHIFT_BITS).array(QUADS), "keep": In(QUADS),
            "odd_shift": In(SHIFT_BITS).array(QUADS),
            "two_quads": In(1), "four_quads": In(1),
            "sum": Out(TOTAL_BITS), "carry": Out(TOTAL_BITS),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        quads: list[Signal] = []
        pairs: list[Signal] = []
        missing: list[Value] = []
        for q in range(QUADS):
            kept = wire(m, f"kept_{q}", Mux(self.keep[q], self.quad[q], 0), signed(QUAD_BITS))
            missing.append(wire(m, f"missing_{q}", self.inverted[q] & self.keep[q]))
            quads.append(shift_left(m, f"quad_{q}", kept, self.shift[q], missing[q]))
            pairs.append(
                shift_left(m, f"pair_{q}", self.odd_pair[q], self.odd_shift[q], Const(0, 1))
            )
        groups = []
        for k, (a, b) in enumerate(GROUPS):
            # Sign bits inverted are 2^(n - 1) too much, twice: ones above them make up for that
            # and take no adders, as copies of the signs would.
            first, second = (
                wire(m, f"unsigned_{q}", Cat(pairs[q][:-1], ~pairs[q][-1], extra), shape)
                for q, extra, shape in (
                    (a, Const(1, 1), signed(len(pairs[a]) + 1)),
                    (b, Const(0, 1), signed(len(pairs[b]) + 1)),
                )
            )
            total, carry = carry_save(m, f"first_{k}", quads[a], quads[b], first, missing[a])
            groups.append(carry_save(m, f"second_{k}", total, carry, second, missing[b]))
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
