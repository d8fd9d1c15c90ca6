# SPDX-License-Identifier: Apache-2.0
"""FP32 partial sum plus a dot product with unbounded exponent: three combinational stages.

The second and third add any two aligned numbers: `hw.fp32_add` uses them too.
"""

from amaranth import Cat, Const, Module, Mux, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from golden.formats import CANONICAL_NAN
from hw.carry import add, increment, leading_zeros
from hw.dot_multiply import SCALE_SUM_BITS
from hw.dot_sum import SIGNIFICAND_BITS
from hw.wires import wire

GUARDED_BITS = SIGNIFICAND_BITS + 3  # guard, round, sticky
FRAME_BITS = GUARDED_BITS + 1  # and a carry
SUM_BLOCKS = (4, 5, 6, 6)
ROUND_BLOCKS = (4, 5, 5, 5)
COARSE = (16, 8, 4, 2)  # steps of normalisation in the second stage
FINE = (1,)  # and in the third, which corrects the count by one
EXPONENT_BITS = 10

ALIGNED = data.StructLayout(
    {
        "big": SIGNIFICAND_BITS,
        "small": GUARDED_BITS,  # inverted if the signs are opposite
        "exponent": EXPONENT_BITS,
        "sign": 1,  # of the big operand
        "opposite": 1,
        "infinite": 1,
        "nan": 1,
    }
)
SUMMED = data.StructLayout(
    {
        "frame": FRAME_BITS,
        "shift": len(FINE),
        "exponent": EXPONENT_BITS,  # once it is shifted
        "sign": 1,
        "negative": 1,  # the frame is the two's complement of the magnitude
        "infinite": 1,
        "nan": 1,
    }
)


class PsumAlign(wiring.Component):
    """First stage: orders the operands and moves the small one under the big one.

    The big operand has the larger magnitude unless it is a subnormal partial sum. The dot product
    is significand * 2^(exponent - 150) with significand 0 or at least 2^23.
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
        dot_big = wire(m, "dot_big", ~zero & ~above[-1] & (below[-1] | larger))
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
        opposite = wire(m, "opposite", (self.dot_sign ^ self.psum[31]) & ~infinite)
        m.d.comb += [
            self.aligned.big.eq(Mux(dot_big, self.dot_significand, psum_m)),
            self.aligned.small.eq(
                Mux(far, other.any(), Cat(sticky, moved)) ^ opposite.replicate(GUARDED_BITS)
            ),
            self.aligned.exponent.eq(Mux(dot_big, self.dot_exponent, psum_x)),
            # An infinite partial sum keeps its sign whatever the dot product is.
            self.aligned.sign.eq(Mux(dot_big & ~infinite, self.dot_sign, self.psum[31])),
            self.aligned.opposite.eq(opposite),
            self.aligned.infinite.eq(infinite),
            self.aligned.nan.eq((infinite & self.psum[:23].any()) | self.dot_nan),
        ]
        return m


class PsumSum(wiring.Component):
    """Second stage: the sum or difference, partly normalised.

    The top bit of the frame has the exponent e + 1, so the shift stops at e, which leaves a
    subnormal where it is. How far it goes is foreseen from the operands, exactly or one too
    short. Operands that cancel give +0. The difference is negative only if a subnormal partial
    sum meets a dot product below the normal numbers; what comes out is subnormal then.
    """

    def __init__(self) -> None:
        super().__init__({"aligned": In(ALIGNED), "summed": Out(SUMMED)})

    def elaborate(self, platform):
        m = Module()
        aligned, opposite = self.aligned, self.aligned.opposite
        big = wire(m, "big", Cat(Const(0, 3), aligned.big))
        small = aligned.small
        total = add(m, "total", big, small, opposite, blocks=SUM_BLOCKS)
        frame = wire(m, "frame", Cat(total[:-1], total[-1] & ~opposite))
        negative = wire(m, "negative", opposite & ~total[-1])

        # A difference in digits -1, 0, 1 begins with 1, -1, -1 ...: the last of these is the
        # leading place, or the one below it is. In a sum it is one of the top two.
        differs = wire(m, "differs", ~(big ^ small))
        minus = wire(m, "minus", ~(big | small))
        leading = wire(m, "leading", differs & ~Cat(Const(0, 1), minus[:-1]))
        stop = wire(m, "stop", Cat(
            aligned.exponent == FRAME_BITS - 1 - i for i in range(FRAME_BITS)))  # fmt: skip
        foreseen = Mux(opposite, leading, 0)
        marks = wire(m, "marks", Cat(foreseen, ~opposite) | stop)
        count = leading_zeros(m, "lead", marks)
        for step in COARSE:
            move = count[step.bit_length() - 1]
            moved = Cat(Const(0, step), frame[: FRAME_BITS - step])
            frame = wire(m, f"frame_{step}", Mux(move, moved, frame))
        m.d.comb += [
            self.summed.frame.eq(frame),
            self.summed.shift.eq(count),
            self.summed.exponent.eq(aligned.exponent - count),
            self.summed.sign.eq((aligned.sign ^ negative) & ~(opposite & ~total[:-1].any())),
            self.summed.negative.eq(negative),
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
        frame = summed.frame
        for step in FINE:
            move = summed.shift[step.bit_length() - 1]
            moved = Cat(Const(0, step), frame[: FRAME_BITS - step])
            frame = wire(m, f"frame_{step}", Mux(move, moved, frame))
        left = summed.exponent
        first = wire(m, "first", frame[-1])  # else the count was one too short or has stopped
        further = wire(m, "further", ~first & left.any())
        frame = wire(m, "frame_last", Mux(further, Cat(Const(0, 1), frame[:-1]), frame))
        # The increment of a negation and that of rounding are one: a negative frame's tail of t
        # of 16 parts is a magnitude's tail of 16 - t.
        kept_bits = wire(m, "kept", frame[4:-1] ^ summed.negative.replicate(23))
        half = wire(m, "half", frame[3])
        below = wire(m, "below", frame[:3].any())
        odd = kept_bits[0]
        up = wire(m, "up", Mux(
            summed.negative, ~half | (~below & odd), half & (below | odd)))  # fmt: skip
        mantissa = increment(m, "mantissa", kept_bits, up, blocks=ROUND_BLOCKS)
        # The field without and with a carry out of the mantissa, in parallel with it. Where
        # neither of the top two bits is set, the number is subnormal or zero.
        second = wire(m, "second", frame[-1])
        above = wire(m, "above", first & ~summed.negative)
        plain = wire(m, "plain", Mux(above, left + 1, Mux(second, left, 0)), EXPONENT_BITS)
        carried = wire(m, "carried", Mux(above, left + 2, Mux(second, left + 1, 1)), EXPONENT_BITS)
        carry = mantissa[-1]
        large = [wire(m, f"large_{name}", field[8:].any() | field[:8].all())
                 for name, field in (("plain", plain), ("carried", carried))]  # fmt: skip
        overflow = wire(m, "overflow", Mux(carry, large[1], large[0]) | summed.infinite)
        field = wire(m, "field", Mux(carry, carried, plain), 8)
        number = Mux(overflow, Const(0x7F800000, 31), Cat(mantissa[:23], field))
        m.d.comb += self.psum.eq(Mux(summed.nan, CANONICAL_NAN, Cat(number, summed.sign)))
        return m
