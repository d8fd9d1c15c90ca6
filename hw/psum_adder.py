# SPDX-License-Identifier: Apache-2.0
"""FP32 partial sum plus a dot product with unbounded exponent: three combinational stages."""

from amaranth import Cat, Const, Module, Mux, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from golden.formats import CANONICAL_NAN
from hw.dot_multiply import SCALE_SUM_BITS
from hw.dot_sum import SIGNIFICAND_BITS
from hw.wires import wire

GUARDED_BITS = SIGNIFICAND_BITS + 3  # guard, round, sticky
EXPONENT_BITS = 10

ALIGNED = data.StructLayout({
    "big": SIGNIFICAND_BITS,
    "small": GUARDED_BITS,
    "exponent": EXPONENT_BITS,
    "sign": 1,  # of the operand with the larger exponent
    "opposite": 1,
    "infinite": 1,
    "psum_sign": 1,
    "nan": 1,
})
SUMMED = data.StructLayout({
    "magnitude": GUARDED_BITS + 1,
    "exponent": EXPONENT_BITS,
    "sign": 1,
    "infinite": 1,
    "psum_sign": 1,
    "nan": 1,
})


class PsumAlign(wiring.Component):
    """First stage: the operand with the smaller exponent moves under the other.

    The dot product is significand * 2^(exponent - 150) with significand 0 or at least 2^23.
    """

    def __init__(self) -> None:
        super().__init__({
            "psum": In(32),
            "dot_sign": In(1), "dot_significand": In(SIGNIFICAND_BITS),
            "dot_exponent": In(signed(SCALE_SUM_BITS)), "dot_nan": In(1),
            "aligned": Out(ALIGNED),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        field = self.psum[23:31]
        normal = wire(m, "normal", field.any())
        psum_x = wire(m, "psum_x", Cat(field[0] | ~normal, field[1:]))
        psum_m = wire(m, "psum_m", Cat(self.psum[:23], normal))
        difference = wire(m, "difference", self.dot_exponent - psum_x, signed(12))
        zero = wire(m, "zero", ~self.dot_significand[-1])
        dot_big = wire(m, "dot_big", ~difference[-1] & ~zero)
        distance = wire(m, "distance", Mux(difference[-1], -difference, difference), 12)
        other = wire(m, "other", Mux(dot_big, psum_m, self.dot_significand))
        moved, sticky = Cat(Const(0, 2), other), Const(0, 1)
        for k in range(5):
            step = 1 << k
            lost = distance[k] & moved[:step].any()
            sticky = wire(m, f"sticky_{step}", sticky | lost)
            moved = wire(m, f"moved_{step}", Mux(distance[k], moved >> step, moved), 26)
        far = wire(m, "far", distance[5:].any())
        infinite = wire(m, "infinite", field.all())
        m.d.comb += [
            self.aligned.big.eq(Mux(dot_big, self.dot_significand, psum_m)),
            self.aligned.small.eq(Mux(far, other.any(), Cat(sticky, moved))),
            self.aligned.exponent.eq(Mux(dot_big, self.dot_exponent, psum_x)),
            self.aligned.sign.eq(Mux(dot_big, self.dot_sign, self.psum[31])),
            self.aligned.opposite.eq(self.dot_sign ^ self.psum[31]),
            self.aligned.infinite.eq(infinite),
            self.aligned.psum_sign.eq(self.psum[31]),
            self.aligned.nan.eq((infinite & self.psum[:23].any()) | self.dot_nan),
        ]
        return m


class PsumSum(wiring.Component):
    """Second stage: the sum or difference as sign and magnitude. Operands that cancel give +0."""

    def __init__(self) -> None:
        super().__init__({"aligned": In(ALIGNED), "summed": Out(SUMMED)})

    def elaborate(self, platform):
        m = Module()
        aligned, opposite = self.aligned, self.aligned.opposite
        big = wire(m, "big", Cat(Const(0, 3), aligned.big), signed(GUARDED_BITS + 2))
        small = wire(m, "small", aligned.small ^ opposite.replicate(GUARDED_BITS))
        extended = wire(m, "extended", Cat(small, opposite, opposite))
        total = wire(m, "total", big + extended + opposite, signed(GUARDED_BITS + 2))
        magnitude = wire(m, "magnitude", Mux(total[-1], -total, total), GUARDED_BITS + 1)
        m.d.comb += [
            self.summed.magnitude.eq(magnitude),
            self.summed.sign.eq(Mux(
                total.any(), aligned.sign ^ total[-1], aligned.sign & ~opposite)),
            self.summed.exponent.eq(aligned.exponent),
            self.summed.infinite.eq(aligned.infinite),
            self.summed.psum_sign.eq(aligned.psum_sign),
            self.summed.nan.eq(aligned.nan),
        ]  # fmt: skip
        return m


class PsumRound(wiring.Component):
    """Third stage: normalises, rounds to nearest even and packs."""

    def __init__(self) -> None:
        super().__init__({"summed": In(SUMMED), "psum": Out(32)})

    def elaborate(self, platform):
        m = Module()
        # The top bit of the frame has exponent e + 1; the shift to the left stops at e, which leaves
        # a subnormal where it is.
        width = GUARDED_BITS + 1
        frame, left = self.summed.magnitude, self.summed.exponent
        for k in reversed(range(5)):
            step = 1 << k
            move = wire(m, f"move_{step}", ~frame[width - step :].any() & (left >= step))
            moved = Cat(Const(0, step), frame[: width - step])
            frame = wire(m, f"frame_{step}", Mux(move, moved, frame))
            left = wire(m, f"left_{step}", left - (move << k), EXPONENT_BITS)
        up = wire(m, "up", frame[3] & (frame[4] | frame[:3].any()))
        field = wire(m, "field", Mux(frame[-1], left + 1, 0), EXPONENT_BITS)
        packed = wire(m, "packed", Cat(frame[4:-1], field) + up, 23 + EXPONENT_BITS)
        overflow = wire(m, "overflow", packed[23:] >= 255)
        infinity = Const(0x7F800000, 31)
        finite = Mux(overflow, infinity, packed[:31])
        m.d.comb += self.psum.eq(Mux(
            self.summed.nan, CANONICAL_NAN,
            Mux(self.summed.infinite, Cat(infinity, self.summed.psum_sign),
                Cat(finite, self.summed.sign))))  # fmt: skip
        return m
