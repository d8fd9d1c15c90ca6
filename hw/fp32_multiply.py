# SPDX-License-Identifier: Apache-2.0
"""FP32 multiplier."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden.formats import CANONICAL_NAN


class Fp32Multiply(wiring.Component):
    """a * b, as `golden.fp32.mul`.

    IEEE 754, round to nearest even, subnormals kept, every NaN result 0x7FC00000.

    Latency `LATENCY` cycles from operands to result, one operation per cycle. While `enable` is low
    the whole pipeline stands still.

    Members
    -------
    enable : In(1)
    a, b : In(32)
    result : Out(32)
        Registered; undefined until the first operands come through.
    """

    LATENCY = 3
    emit_name = "fp32_multiply"

    def __init__(self) -> None:
        super().__init__(
            {
                "enable": In(1),
                "a": In(32),
                "b": In(32),
                "result": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()

        # Stage 1: significands multiplied as they are, subnormals not normalised.
        a_normal = Signal()
        b_normal = Signal()
        a_special = Signal()
        b_special = Signal()
        a_zero = Signal()
        b_zero = Signal()
        a_exponent = Signal(8)
        b_exponent = Signal(8)
        m.d.comb += [
            a_normal.eq(self.a[23:31].any()),
            b_normal.eq(self.b[23:31].any()),
            a_special.eq(self.a[23:31].all()),
            b_special.eq(self.b[23:31].all()),
            a_zero.eq(~self.a[:31].any()),
            b_zero.eq(~self.b[:31].any()),
            a_exponent.eq(self.a[23:31] | ~a_normal),
            b_exponent.eq(self.b[23:31] | ~b_normal),
        ]
        product_1 = Signal(48, reset_less=True)
        # Biased exponent of the product's top bit.
        exponent_1 = Signal(signed(10), reset_less=True)
        sign_1 = Signal(reset_less=True)
        infinite_1 = Signal(reset_less=True)
        nan_1 = Signal(reset_less=True)
        with m.If(self.enable):
            m.d.sync += [
                product_1.eq(Cat(self.a[:23], a_normal) * Cat(self.b[:23], b_normal)),
                exponent_1.eq(a_exponent + b_exponent - 126),
                sign_1.eq(self.a[31] ^ self.b[31]),
                infinite_1.eq(a_special | b_special),
                nan_1.eq(
                    (a_special & (self.a[:23].any() | b_zero))
                    | (b_special & (self.b[:23].any() | a_zero))
                ),
            ]

        # Stage 2: bring the product to its place in a frame whose top bit has an exponent of 1 or
        # more: to the left as far as that allows, or to the right into the subnormals.
        room = Signal(9)
        below = Signal(10)
        tiny = Signal()
        m.d.comb += [
            tiny.eq(exponent_1 < 1),
            room.eq(Mux(tiny, 0, exponent_1 - 1)),
            below.eq(1 - exponent_1),
        ]
        value, remaining = product_1, room
        for k in reversed(range(5)):
            distance = 1 << k
            shift = Signal(name=f"shift_{distance}")
            shifted = Signal(48, name=f"normal_{distance}")
            left = Signal(9, name=f"remaining_{distance}")
            m.d.comb += [
                shift.eq(~value[48 - distance :].any() & (remaining >= distance)),
                shifted.eq(Mux(shift, Cat(Const(0, distance), value[: 48 - distance]), value)),
                left.eq(remaining - Mux(shift, distance, 0)),
            ]
            value, remaining = shifted, left
        # Only 26 bits and a sticky bit of the shift to the right matter.
        small, lost = product_1[22:], product_1[:22].any()
        for k in range(5):
            distance = 1 << k
            shifted = Signal(26, name=f"right_{distance}")
            dropped = Signal(name=f"dropped_{distance}")
            m.d.comb += [
                shifted.eq(Mux(below[k], small[distance:], small)),
                dropped.eq(lost | (below[k] & small[:distance].any())),
            ]
            small, lost = shifted, dropped
        frame_2 = Signal(27, reset_less=True)
        exponent_2 = Signal(9, reset_less=True)
        sign_2 = Signal(reset_less=True)
        infinite_2 = Signal(reset_less=True)
        nan_2 = Signal(reset_less=True)
        frame = Signal(27)
        with m.If(~tiny):
            m.d.comb += frame.eq(Cat(value[:22].any(), value[22:]))
        with m.Elif(below[5:].any()):
            m.d.comb += frame.eq(product_1.any())
        with m.Else():
            m.d.comb += frame.eq(Cat(lost, small))
        with m.If(self.enable):
            m.d.sync += [
                frame_2.eq(frame),
                exponent_2.eq(remaining + 1),
                sign_2.eq(sign_1),
                infinite_2.eq(infinite_1),
                nan_2.eq(nan_1),
            ]

        # Stage 3: round.
        round_up = Signal()
        field = Signal(9)
        rounded = Signal(32)
        overflow = Signal()
        result = Signal(32, reset_less=True)
        m.d.comb += [
            round_up.eq(frame_2[2] & (frame_2[3] | frame_2[:2].any())),
            field.eq(Mux(frame_2[26], exponent_2, 0)),
            rounded.eq(Cat(frame_2[3:26], field) + round_up),
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
