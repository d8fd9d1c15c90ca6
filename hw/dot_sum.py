# SPDX-License-Identifier: Apache-2.0
"""Last stages of a cell's dot product: the sum, its magnitude, and its rounding."""

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.dot_align import TOTAL_BITS
from hw.dot_multiply import SCALE_SUM_BITS
from hw.wires import wire

SIGNIFICAND_BITS = 24
COUNT_BITS = 6


def leading_zeros(m: Module, name: str, value: Value) -> Signal:
    """Number of zeros above the top one; for zero, the width or more."""
    bits = (len(value) - 1).bit_length()
    rest = Cat(Const(1).replicate((1 << bits) - len(value)), value)
    count: list[Value] = []
    for k in reversed(range(bits)):
        half = 1 << k
        empty = wire(m, f"{name}_empty_{half}", ~rest[half:].any())
        rest = wire(m, f"{name}_rest_{half}", Mux(empty, rest[:half], rest[half:]))
        count.insert(0, empty)
    return wire(m, f"{name}_count", Cat(count))


class DotSum(wiring.Component):
    """Combinational. Adds sum and carry."""

    def __init__(self) -> None:
        super().__init__({
            "sum": In(TOTAL_BITS), "carry": In(TOTAL_BITS), "total": Out(signed(TOTAL_BITS)),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        m.d.comb += self.total.eq(self.sum + self.carry)
        return m


class DotMagnitude(wiring.Component):
    """Combinational. Sign and magnitude of the sum, and the zeros above the magnitude's top one.

    `zeros` is one too many for -2^k: it is counted before the negation's carry.
    """

    def __init__(self) -> None:
        super().__init__({
            "total": In(signed(TOTAL_BITS)),
            "sign": Out(1), "magnitude": Out(TOTAL_BITS - 1), "zeros": Out(COUNT_BITS),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        flipped = wire(m, "flipped", self.total[:-1] ^ self.sign.replicate(TOTAL_BITS - 1))
        m.d.comb += [
            self.sign.eq(self.total[-1]),
            self.magnitude.eq(Mux(self.sign, -self.total, self.total)),
            self.zeros.eq(leading_zeros(m, "lead", flipped)),
        ]
        return m


class DotRound(wiring.Component):
    """Combinational. Rounds once, to nearest even, to 24 bits with unbounded exponent.

    `unit` is the biased exponent of the magnitude's bit 0, `exponent` that of the significand's
    top bit. A zero has significand 0.
    """

    def __init__(self) -> None:
        super().__init__({
            "sign": In(1), "magnitude": In(TOTAL_BITS - 1), "zeros": In(COUNT_BITS),
            "unit": In(signed(SCALE_SUM_BITS)),
            "significand": Out(SIGNIFICAND_BITS), "exponent": Out(signed(SCALE_SUM_BITS)),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        width = TOTAL_BITS - 1
        normal: Value = self.magnitude
        for k in reversed(range(COUNT_BITS)):
            step = 1 << k
            moved = Cat(Const(0, step), normal[: width - step])
            normal = wire(m, f"normal_{step}", Mux(self.zeros[k], moved, normal))
        cut = width - SIGNIFICAND_BITS
        up = wire(m, "up", normal[cut - 1] & (normal[cut] | normal[: cut - 1].any()))
        rounded = wire(m, "rounded", normal[cut:] + up, SIGNIFICAND_BITS + 1)
        # A power of two: all ones rounded up, or a negative one, shifted out.
        power = wire(m, "power", rounded[-1] | (self.sign & ~normal[-1]))
        top = wire(m, "top", self.unit + (width - 1) - self.zeros, signed(SCALE_SUM_BITS))
        m.d.comb += [
            self.significand.eq(Cat(rounded[: SIGNIFICAND_BITS - 1], normal[-1] | power)),
            self.exponent.eq(top + power),
        ]
        return m
