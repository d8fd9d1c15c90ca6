# SPDX-License-Identifier: Apache-2.0
"""FP32 partial sum plus a dot product with unbounded exponent: three combinational stages."""

from amaranth import Cat, Const, Module, Mux, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from golden.formats import CANONICAL_NAN
from hw.bits import leading_zeros
from hw.dot_multiply import SCALE_SUM_BITS
from hw.dot_sum import SIGNIFICAND_BITS
from hw.wires import wire

GUARDED_BITS = SIGNIFICAND_BITS + 3  # guard, round, sticky
FRAME_BITS = GUARDED_BITS + 1  # and a carry
COUNT_BITS = 5
EXPONENT_BITS = 10

ALIGNED = data.StructLayout({
    "big": SIGNIFICAND_BITS,
    "small": GUARDED_BITS,
    "exponent": EXPONENT_BITS,
    "sign": 1,  # of the larger operand
    "opposite": 1,
    "infinite": 1,
    "nan": 1,
})
SUMMED = data.StructLayout({
    "magnitude": FRAME_BITS,
    "shift": COUNT_BITS,
    "exponent": EXPONENT_BITS,
    "sign": 1,
    "infinite": 1,
    "nan": 1,
})


class PsumAlign(wiring.Component):
    """First stage: orders the operands by magnitude and moves the smaller one under the other.

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
        # Both differences at once: no carry chain waits for the other's sign.
        shape = signed(SCALE_SUM_BITS + 1)
        above = wire(m, "above", self.dot_exponent - psum_x, shape)
        below = wire(m, "below", psum_x - self.dot_exponent, shape)
        zero = wire(m, "zero", ~self.dot_significand[-1])
        larger = wire(m, "larger", self.dot_significand >= psum_m)
        dot_big = wire(
            m, "dot_big", ~zero & ~above[-1] & (below[-1] | larger)
        )
        distance = wire(m, "distance", Mux(above[-1], below, above))
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
            # An infinite partial sum keeps its sign whatever the dot product is.
            self.aligned.sign.eq(Mux(dot_big & ~infinite, self.dot_sign, self.psum[31])),
            self.aligned.opposite.eq((self.dot_sign ^ self.psum[31]) & ~infinite),
            self.aligned.infinite.eq(infinite),
            self.aligned.nan.eq((infinite & self.psum[:23].any()) | self.dot_nan),
        ]
        return m


class PsumSum(wiring.Component):
    """Second stage: the sum or difference, and how far it is from normal.

    The top bit of the frame has the exponent e + 1, so `shift` stops at e, which leaves a subnormal where it is.
    Operands that cancel give +0.
    """

    def __init__(self) -> None:
        super().__init__({"aligned": In(ALIGNED), "summed": Out(SUMMED)})

    def elaborate(self, platform):
        m = Module()
        aligned, opposite = self.aligned, self.aligned.opposite
        # One carry chain: the extra low bit is the carry in of the two's complement.
        big = wire(m, "big", Cat(opposite, Const(0, 3), aligned.big))
        small = wire(m, "small", Cat(opposite, aligned.small ^ opposite.replicate(GUARDED_BITS)))
        total = wire(m, "total", big + small, GUARDED_BITS + 2)
        magnitude = wire(m, "magnitude", Cat(total[1:-1], total[-1] & ~opposite))
        # A one at the place where the shift has to stop.
        stop = wire(m, "stop", Cat(
            aligned.exponent == FRAME_BITS - 1 - i for i in range(FRAME_BITS)))  # fmt: skip
        m.d.comb += [
            self.summed.magnitude.eq(magnitude),
            self.summed.shift.eq(leading_zeros(m, "lead", magnitude | stop)),
            self.summed.sign.eq(aligned.sign & ~(opposite & ~magnitude.any())),
            self.summed.exponent.eq(aligned.exponent),
            self.summed.infinite.eq(aligned.infinite),
            self.summed.nan.eq(aligned.nan),
        ]
        return m


class PsumRound(wiring.Component):
    """Third stage: normalises, rounds to nearest even and packs."""

    def __init__(self) -> None:
        super().__init__({"summed": In(SUMMED), "psum": Out(32)})

    def elaborate(self, platform):
        m = Module()
        summed = self.summed
        frame = summed.magnitude
        for k in reversed(range(COUNT_BITS)):
            step = 1 << k
            moved = Cat(Const(0, step), frame[: FRAME_BITS - step])
            frame = wire(m, f"frame_{step}", Mux(summed.shift[k], moved, frame))
        normal = frame[-1]
        up = wire(m, "up", frame[3] & (frame[4] | frame[:3].any()))
        mantissa = wire(m, "mantissa", frame[4:-1] + up, 24)
        # The field without and with a carry out of the mantissa, in parallel with it.
        plain = wire(m, "plain", summed.exponent - summed.shift + 1, EXPONENT_BITS)
        carried = wire(m, "carried", summed.exponent - summed.shift + 2, EXPONENT_BITS)
        field = wire(m, "field", Mux(
            mantissa[-1], Mux(normal, carried, 1), Mux(normal, plain, 0)))  # fmt: skip
        overflow = wire(m, "overflow", field[8:].any() | field[:8].all())
        number = Mux(
            overflow | summed.infinite, Const(0x7F800000, 31), Cat(mantissa[:23], field[:8])
        )
        m.d.comb += self.psum.eq(Mux(summed.nan, CANONICAL_NAN, Cat(number, summed.sign)))
        return m
