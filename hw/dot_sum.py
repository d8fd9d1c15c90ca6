# SPDX-License-Identifier: Apache-2.0
"""Last two stages of a cell's dot product: the sum and its leading place, then its rounding."""

from amaranth import Cat, Const, Module, Mux, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.carry import add, increment, leading_zeros
from hw.dot_multiply import SCALE_SUM_BITS, TOTAL_BITS
from hw.wires import wire

SIGNIFICAND_BITS = 24
COUNT_BITS = 6
ROUND_BLOCKS = (4, 5, 5, 5)
SUM_BLOCKS = (5, 6, 7, 8, 8, 7)


class DotSum(wiring.Component):
    """Combinational. Adds sum and carry; counts the places that repeat the total's sign."""

    def __init__(self) -> None:
        super().__init__({
            "sum": In(TOTAL_BITS), "carry": In(TOTAL_BITS),
            "total": Out(TOTAL_BITS), "repeats": Out(COUNT_BITS),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        total = add(m, "added", self.sum, self.carry, blocks=SUM_BLOCKS)[:TOTAL_BITS]
        changes = wire(m, "changes", total[:-1] ^ total[1:])
        m.d.comb += [
            self.total.eq(total),
            self.repeats.eq(leading_zeros(m, "lead", changes)),
        ]
        return m


class DotRound(wiring.Component):
    """Combinational. Rounds once, to nearest even, to 24 bits with unbounded exponent.

    `lead` is the biased exponent of the total's top bit below the sign, `exponent` that of the
    significand's top bit. A zero has significand 0 and sign 0.
    """

    def __init__(self) -> None:
        super().__init__({
            "total": In(TOTAL_BITS), "repeats": In(COUNT_BITS), "lead": In(signed(SCALE_SUM_BITS)),
            "sign": Out(1),
            "significand": Out(SIGNIFICAND_BITS), "exponent": Out(signed(SCALE_SUM_BITS)),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        width = TOTAL_BITS - 1
        sign = self.total[-1]
        normal: Value = self.total[:-1]
        for k in reversed(range(COUNT_BITS)):
            step = 1 << k
            moved = Cat(Const(0, step), normal[: width - step])
            normal = wire(m, f"normal_{step}", Mux(self.repeats[k], moved, normal))
        # The magnitude is the complement plus one: that one and that of rounding are one, since a
        # negative tail of t of 16 parts is a magnitude's tail of 16 - t. A power of two comes out
        # as all ones, rounded up.
        cut = width - SIGNIFICAND_BITS
        significand = wire(m, "kept", normal[cut:] ^ sign.replicate(SIGNIFICAND_BITS))
        half = wire(m, "half", normal[cut - 1])
        below = wire(m, "below", normal[: cut - 1].any())
        up = wire(m, "up", Mux(
            sign, ~half | (~below & significand[0]), half & (below | significand[0])))  # fmt: skip
        rounded = increment(m, "rounded", significand, up, blocks=ROUND_BLOCKS)
        # Both exponents at once: neither waits for the carry.
        shape = signed(SCALE_SUM_BITS)
        plain = wire(m, "plain", self.lead - self.repeats, shape)
        carried = wire(m, "carried", self.lead + 1 - self.repeats, shape)
        carry = rounded[-1]
        m.d.comb += [
            self.sign.eq(sign),
            self.significand.eq(
                Cat(rounded[: SIGNIFICAND_BITS - 1], significand[-1] | carry)),
            self.exponent.eq(Mux(carry, carried, plain)),
        ]  # fmt: skip
        return m
