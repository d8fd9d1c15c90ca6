# SPDX-License-Identifier: Apache-2.0
"""Last stages of a cell's dot product: the sum, its magnitude, and its rounding."""

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.dot_align import QUARTER_BITS
from hw.dot_multiply import SCALE_SUM_BITS
from hw.wires import wire

SUM_BITS = 49  # signed, of the window's exact sum
SIGNIFICAND_BITS = 24


class DotSum(wiring.Component):
    """Combinational. Adds the four sums, with the places of weight digits spread over quads.

    `two_quads`: a product spreads over two quads (4 x 2 and 4 x 4), `four_quads`: over four (4 x 4).
    """

    def __init__(self) -> None:
        super().__init__({
            "quarter": In(signed(QUARTER_BITS)).array(4),
            "two_quads": In(1), "four_quads": In(1),
            "total": Out(signed(SUM_BITS)),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        shape = signed(SUM_BITS)
        halves = []
        for k in range(2):
            low, high = self.quarter[2 * k], self.quarter[2 * k + 1]
            placed = wire(m, f"placed_{k}", Mux(self.two_quads, high << 2, high), shape)
            halves.append(wire(m, f"half_{k}", low + placed, shape))
        placed = wire(m, "placed", Mux(self.four_quads, halves[1] << 4, halves[1]), shape)
        m.d.comb += self.total.eq(halves[0] + placed)
        return m


class DotMagnitude(wiring.Component):
    """Combinational. Sign and magnitude of the sum."""

    def __init__(self) -> None:
        super().__init__({
            "total": In(signed(SUM_BITS)),
            "sign": Out(1), "magnitude": Out(SUM_BITS - 1),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        m.d.comb += [
            self.sign.eq(self.total[-1]),
            self.magnitude.eq(Mux(self.sign, -self.total, self.total)),
        ]
        return m


def normalise(m: Module, name: str, value: Value) -> tuple[Signal, Signal]:
    """`value` shifted until its top bit is set, and by how much (all ones at most, for zero)."""
    width = len(value)
    count: list[Signal] = []
    for k in reversed(range((width - 1).bit_length())):
        step = 1 << k
        empty = wire(m, f"{name}_empty_{step}", ~value[width - step :].any())
        moved = Cat(Const(0, step), value[: width - step])
        value = wire(m, f"{name}_{step}", Mux(empty, moved, value))
        count.insert(0, empty)
    return value, wire(m, f"{name}_count", Cat(count))


class DotRound(wiring.Component):
    """Combinational. Rounds once, to nearest even, to 24 bits with unbounded exponent.

    `unit` is the biased exponent of the magnitude's bit 0, `exponent` that of the significand's top bit. A
    zero has significand 0.
    """

    def __init__(self) -> None:
        super().__init__({
            "magnitude": In(SUM_BITS - 1), "unit": In(signed(SCALE_SUM_BITS)),
            "significand": Out(SIGNIFICAND_BITS), "exponent": Out(signed(SCALE_SUM_BITS)),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        width = SUM_BITS - 1
        normal, count = normalise(m, "normal", self.magnitude)
        cut = width - SIGNIFICAND_BITS
        up = wire(m, "up", normal[cut - 1] & (normal[cut] | normal[: cut - 1].any()))
        rounded = wire(m, "rounded", normal[cut:] + up, SIGNIFICAND_BITS + 1)
        m.d.comb += [
            # All ones round up to a power of two: only the top bit stays.
            self.significand.eq(Cat(rounded[:23], rounded[23] | rounded[24])),
            self.exponent.eq(self.unit + (width - 1) - count + rounded[24]),
        ]
        return m
