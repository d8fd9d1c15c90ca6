# SPDX-License-Identifier: Apache-2.0
"""FP32 adder and subtracter."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden.formats import CANONICAL_NAN


class Fp32Add(wiring.Component):
    """a + b, or a - b, as `golden.fp32.add` and `golden.fp32.sub`.

    IEEE 754, round to nearest even, subnormals kept, every NaN result 0x7FC00000.

    Latency `LATENCY` cycles from operands to result, one operation per cycle. While `enable` is low
    the whole pipeline stands still.

    Members
    -------
    enable : In(1)
    a, b : In(32)
    subtract : In(1)
        Sampled with the operands.
    result : Out(32)
        Registered; undefined until the first operands come through.
    """

    LATENCY = 3
    emit_name = "fp32_add"

    def __init__(self) -> None:
        super().__init__(
            {
                "enable": In(1),
                "a": In(32),
                "b": In(32),
                "subtract": In(1),
                "result": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()

        # Stage 1: order by magnitude, align the smaller operand with guard, round and sticky bits.
        b_sign = Signal()
        swap = Signal()
        big = Signal(32)
        small = Signal(32)
        m.d.comb += [
            b_sign.eq(self.b[31] ^ self.subtract),
            swap.eq(self.a[:31] < self.b[:31]),
            big.eq(Mux(swap, Cat(self.b[:31], b_sign), self.a)),
            small.eq(Mux(swap, self.a, Cat(self.b[:31], b_sign))),
        ]
        big_normal = Signal()
        small_normal = Signal()
        big_exponent = Signal(8)
        difference = Signal(8)
        m.d.comb += [
            big_normal.eq(big[23:31].any()),
            small_normal.eq(small[23:31].any()),
            # Subnormals have the exponent of field 1.
            big_exponent.eq(big[23:31] | ~big_normal),
            difference.eq(big_exponent - (small[23:31] | ~small_normal)),
        ]
        aligned = Signal(26)
        sticky = Signal()
        value, lost = Cat(Const(0, 2), small[:23], small_normal), Const(0, 1)
        for k in range(5):
            distance = 1 << k
            shifted = Signal(26, name=f"align_{distance}")
            dropped = Signal(name=f"dropped_{distance}")
            m.d.comb += [
                shifted.eq(Mux(difference[k], value[distance:], value)),
                dropped.eq(lost | (difference[k] & value[:distance].any())),
            ]
            value, lost = shifted, dropped
        far = Signal()
        m.d.comb += [
            far.eq(difference[5:].any()),
            aligned.eq(Mux(far, 0, value)),
            sticky.eq(Mux(far, small[:31].any(), lost)),
        ]

        big_1 = Signal(24, reset_less=True)
        small_1 = Signal(27, reset_less=True)
        exponent_1 = Signal(8, reset_less=True)
        sign_1 = Signal(reset_less=True)
        opposite_1 = Signal(reset_less=True)
        infinite_1 = Signal(reset_less=True)
        nan_1 = Signal(reset_less=True)
        a_special = Signal()
        b_special = Signal()
        m.d.comb += [
            a_special.eq(self.a[23:31].all()),
            b_special.eq(self.b[23:31].all()),
        ]
        with m.If(self.enable):
            m.d.sync += [
                big_1.eq(Cat(big[:23], big_normal)),
                small_1.eq(Cat(sticky, aligned)),
                exponent_1.eq(big_exponent),
                sign_1.eq(big[31]),
                opposite_1.eq(big[31] ^ small[31]),
                infinite_1.eq(a_special | b_special),
                nan_1.eq(
                    (a_special & self.a[:23].any())
                    | (b_special & self.b[:23].any())
                    | (a_special & b_special & (self.a[31] ^ b_sign))
                ),
            ]

        # Stage 2: add or subtract. The bigger operand comes first, so the sum is never negative.
        total = Signal(28)
        carried = Signal(29)
        m.d.comb += [
            # One carry chain: the extra low bit is the carry in of the two's complement.
            carried.eq(
                Cat(opposite_1, Const(0, 3), big_1)
                + Cat(opposite_1, small_1 ^ opposite_1.replicate(27))
            ),
            total.eq(Cat(carried[1:28], carried[28] & ~opposite_1)),
        ]
        total_2 = Signal(28, reset_less=True)
        exponent_2 = Signal(8, reset_less=True)
        sign_2 = Signal(reset_less=True)
        infinite_2 = Signal(reset_less=True)
        nan_2 = Signal(reset_less=True)
        with m.If(self.enable):
            m.d.sync += [
                total_2.eq(total),
                exponent_2.eq(exponent_1),
                # Operands that cancel give +0; a sum of two zeros has their sign.
                sign_2.eq(sign_1 & ~(opposite_1 & ~total.any())),
                infinite_2.eq(infinite_1),
                nan_2.eq(nan_1),
            ]

        # Stage 3: normalise and round. The top bit of the 28-bit frame has the exponent e + 1; the
        # shift to the left stops at e, which leaves a subnormal at its place.
        frame, remaining = total_2, exponent_2
        for k in reversed(range(5)):
            distance = 1 << k
            shift = Signal(name=f"shift_{distance}")
            shifted = Signal(28, name=f"normal_{distance}")
            left = Signal(8, name=f"remaining_{distance}")
            m.d.comb += [
                shift.eq(~frame[28 - distance :].any() & (remaining >= distance)),
                shifted.eq(Mux(shift, Cat(Const(0, distance), frame[: 28 - distance]), frame)),
                left.eq(remaining - Mux(shift, distance, 0)),
            ]
            frame, remaining = shifted, left
        round_up = Signal()
        field = Signal(9)
        rounded = Signal(32)
        m.d.comb += [
            round_up.eq(frame[3] & (frame[4] | frame[:3].any())),
            field.eq(Mux(frame[27], remaining + 1, 0)),
            rounded.eq(Cat(frame[4:27], field) + round_up),
        ]
        overflow = Signal()
        result = Signal(32, reset_less=True)
        m.d.comb += [
            overflow.eq((rounded[23:] >= 0xFF) | infinite_2),
            self.result.eq(result),
        ]
        with m.If(self.enable):
            m.d.sync += result.eq(
                Mux(
                    nan_2,
                    CANONICAL_NAN,
                    Cat(Mux(overflow, Const(0x7F800000, 31), rounded[:31]), sign_2),
                )
            )
        return m
