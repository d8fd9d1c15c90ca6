# SPDX-License-Identifier: Apache-2.0
"""The function unit of a vector lane: exp2, reciprocal, reciprocal square root, sigmoid."""

from amaranth.hdl import Cat, Const, Module, Mux, Shape, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from golden.formats import CANONICAL_NAN
from golden.function_tables import (
    C0_BITS,
    C1_BITS,
    C2_BITS,
    EXP2_OFFSET_BITS,
    FRACTION_BITS,
    INDEX_BITS,
    INVERSE_OFFSET_BITS,
    Table,
    exp2_table,
    reciprocal_table,
    rsqrt_table,
)
from golden.functions import ARGUMENT_BITS, ARGUMENT_LIMIT, LOG2_E, ONE, POSITIVE_INFINITY
from hw.isa import Function

_FP32_ONE = 0x3F800000
_ARGUMENT_INTEGER_BITS = 9  # |x| * log2(e) < 512 for |x| < 256
_EXPONENT = signed(10)
_TAG = data.StructLayout({"function": 3, "sign": 1, "bypass": 1, "special": 32})


class CoefficientRom(wiring.Component):
    """Combinational table of polynomial coefficients; `tables` lie one behind the other.

    Members
    -------
    index : In
        Table number above INDEX_BITS bits of interval number.
    c0, c1, c2 : Out
    """

    def __init__(self, *tables: Table) -> None:
        if len(tables) not in (1, 2):
            raise ValueError(f"tables must be one or two, not {tables!r}")
        self.tables = tables
        super().__init__(
            {
                "index": In(INDEX_BITS + len(tables) - 1),
                "c0": Out(C0_BITS),
                "c1": Out(C1_BITS),
                "c2": Out(C2_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        rows = [row for t in self.tables for row in zip(t.c0, t.c1, t.c2, strict=True)]
        # In two levels, which simulators walk faster than one long list.
        with m.Switch(self.index[4:]):
            for high in range(len(rows) // 16):
                with m.Case(high):
                    with m.Switch(self.index[:4]):
                        for low in range(16):
                            c0, c1, c2 = rows[16 * high + low]
                            with m.Case(low):
                                m.d.comb += [self.c0.eq(c0), self.c1.eq(c1), self.c2.eq(c2)]
        return m


class FunctionUnit(wiring.Component):
    """One of the functions of `golden.functions` of x, equal to it in every bit.

    `Function.NONE` gives x itself, a NaN's payload included.

    Latency `LATENCY` cycles for every function, one operation per cycle, functions mixed at will.
    While `enable` is low the whole pipeline stands still.

    exp2 and sigmoid go through a first polynomial (2^f), reciprocal, rsqrt and sigmoid through a
    second one (1 / m or 1 / sqrt(m)); specials travel beside them.

    Members
    -------
    enable : In(1)
    function : In(3)
        A `hw.isa.Function`, sampled with x. Others are undefined.
    x : In(32)
    result : Out(32)
        Registered; undefined until the first operand comes through.
    """

    LATENCY = 14
    emit_name = "function_unit"

    def __init__(self) -> None:
        super().__init__(
            {
                "enable": In(1),
                "function": In(3),
                "x": In(32),
                "result": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()

        def register(name: str, value, shape: Shape | int | None = None) -> Signal:
            signal = Signal(
                len(Value.cast(value)) if shape is None else shape, name=name, reset_less=True
            )
            with m.If(self.enable):
                m.d.sync += signal.eq(value)
            return signal

        def wire(name: str, value, shape: Shape | int) -> Signal:
            signal = Signal(shape, name=name)
            m.d.comb += signal.eq(value)
            return signal

        def tag_register(stage: int, value: data.View) -> data.View:
            return data.View(_TAG, register(f"tag_{stage}", value.as_value()))

        # Stage 1: specials, and |x| times the factor of the argument of 2^t.
        x = self.x
        field = x[23:31]
        normal = wire("normal", field.any(), 1)
        large = wire("large", field >= 127 + ARGUMENT_LIMIT, 1)
        zero = wire("zero", ~x[:31].any(), 1)
        infinite = wire("infinite", x[:31] == POSITIVE_INFINITY, 1)
        tag = Signal(_TAG)
        m.d.comb += [tag.function.eq(self.function), tag.sign.eq(x[31])]
        with m.Switch(self.function):
            with m.Case(Function.NONE):
                m.d.comb += [tag.bypass.eq(1), tag.special.eq(x)]
            with m.Case(Function.EXP2):
                m.d.comb += [
                    tag.bypass.eq(large),
                    tag.special.eq(Mux(x[31], 0, POSITIVE_INFINITY)),
                ]
            with m.Case(Function.RECIPROCAL):
                m.d.comb += [
                    tag.bypass.eq(zero | infinite),
                    tag.special.eq(Cat(Mux(zero, Const(POSITIVE_INFINITY, 31), 0), x[31])),
                ]
            with m.Case(Function.RSQRT):
                m.d.comb += tag.bypass.eq(zero | infinite | x[31])
                with m.If(zero):
                    m.d.comb += tag.special.eq(Cat(Const(POSITIVE_INFINITY, 31), x[31]))
                with m.Elif(x[31]):
                    m.d.comb += tag.special.eq(CANONICAL_NAN)
            with m.Case(Function.SIGMOID):
                m.d.comb += [
                    tag.bypass.eq(large),
                    tag.special.eq(Mux(x[31], 0, _FP32_ONE)),
                ]
        with m.If((x[:31] > POSITIVE_INFINITY) & (self.function != Function.NONE)):
            m.d.comb += [tag.bypass.eq(1), tag.special.eq(CANONICAL_NAN)]
        tag_1 = tag_register(1, tag)
        significand = wire("significand", Cat(x[:23], normal), 24)
        factor = wire("factor", Mux(self.function == Function.SIGMOID, LOG2_E, ONE), C0_BITS)
        scaled = wire("scaled", significand * factor, 24 + C0_BITS)
        argument_bits = _ARGUMENT_INTEGER_BITS + ARGUMENT_BITS
        scaled_1 = register("scaled_1", scaled[24 + C0_BITS - argument_bits :])
        distance_1 = register("distance_1", 126 + ARGUMENT_LIMIT - (field | ~normal), 8)
        significand_1 = register("significand_1", significand)
        exponent_1 = register("exponent_1", (field | ~normal) - 127, _EXPONENT)

        # Stage 2: the argument in fixed point; beside it, a subnormal normalised.
        magnitude = wire(
            "magnitude",
            Mux(distance_1[6:].any(), 0, scaled_1 >> distance_1[:6]),
            argument_bits,
        )
        negate = wire("negate", (tag_1.function == Function.EXP2) & tag_1.sign, 1)
        argument = wire(
            "argument",
            (Cat(magnitude, Const(0, 1)) ^ negate.replicate(argument_bits + 1)) + negate,
            argument_bits + 1,
        )
        shifted, exponent = significand_1, exponent_1
        for k in reversed(range(5)):
            distance = 1 << k
            move = wire(f"move_{distance}", ~shifted[24 - distance :].any(), 1)
            shifted = wire(
                f"shifted_{distance}",
                Mux(move, Cat(Const(0, distance), shifted[: 24 - distance]), shifted),
                24,
            )
            exponent = wire(f"exponent_{distance}", exponent - Mux(move, distance, 0), _EXPONENT)
        tag_2 = tag_register(2, tag_1)
        fraction_2 = register("fraction_2", argument[:ARGUMENT_BITS])
        power_2 = register("power_2", argument[ARGUMENT_BITS:], _EXPONENT)
        mantissa_2 = register("mantissa_2", shifted[:23])
        exponent_2 = register("exponent_2", exponent, _EXPONENT)

        # Stage 3: coefficients of 2^f; the exponent of the result (of u, for sigmoid).
        m.submodules.exp2_rom = exp2_rom = CoefficientRom(exp2_table())
        m.d.comb += exp2_rom.index.eq(fraction_2[EXP2_OFFSET_BITS:])
        half_exponent = wire("half_exponent", exponent_2 >> 1, _EXPONENT)
        exponent = Signal(_EXPONENT, name="result_exponent")
        with m.Switch(tag_2.function):
            with m.Case(Function.RECIPROCAL):
                m.d.comb += exponent.eq(-exponent_2)
            with m.Case(Function.RSQRT):
                m.d.comb += exponent.eq(-half_exponent)
            with m.Default():
                m.d.comb += exponent.eq(power_2)
        tag_3 = tag_register(3, tag_2)
        exponent_3 = register("exponent_3", exponent, _EXPONENT)
        mantissa_3 = register("mantissa_3", mantissa_2)
        odd_3 = register("odd_3", exponent_2[0])
        offset_3 = register("offset_3", fraction_2[:EXP2_OFFSET_BITS])
        c0_3 = register("c0_3", exp2_rom.c0)
        c1_3 = register("c1_3", exp2_rom.c1)
        c2_3 = register("c2_3", exp2_rom.c2)

        # Stages 4, 5, 6: the polynomial, rising.
        square = wire("square", c2_3 * offset_3, C2_BITS + EXP2_OFFSET_BITS)
        tag_4 = tag_register(4, tag_3)
        exponent_4 = register("exponent_4", exponent_3, _EXPONENT)
        mantissa_4 = register("mantissa_4", mantissa_3)
        odd_4 = register("odd_4", odd_3)
        offset_4 = register("offset_4", offset_3)
        c0_4 = register("c0_4", c0_3)
        slope_4 = register("slope_4", c1_3 + square[EXP2_OFFSET_BITS:], C1_BITS + 1)

        rise = wire("rise", slope_4 * offset_4, C1_BITS + 1 + EXP2_OFFSET_BITS)
        tag_5 = tag_register(5, tag_4)
        exponent_5 = register("exponent_5", exponent_4, _EXPONENT)
        mantissa_5 = register("mantissa_5", mantissa_4)
        odd_5 = register("odd_5", odd_4)
        c0_5 = register("c0_5", c0_4)
        rise_5 = register("rise_5", rise[EXP2_OFFSET_BITS:])

        tag_6 = tag_register(6, tag_5)
        exponent_6 = register("exponent_6", exponent_5, _EXPONENT)
        mantissa_6 = register("mantissa_6", mantissa_5)
        odd_6 = register("odd_6", odd_5)
        power_6 = register("power_6", c0_5 + rise_5, C0_BITS)
        # 1 at the scale of 2^f; its exponent is not negative where it is used.
        unit_6 = register("unit_6", Const(ONE, C0_BITS) >> exponent_5[:9], C0_BITS)

        # Stage 7: 1 + u, normalised; choice of the second polynomial's argument.
        total = wire("total", power_6 + unit_6, C0_BITS + 1)
        carry = wire("carry", total[C0_BITS], 1)
        index = Signal(INDEX_BITS + 1)
        offset = Signal(INVERSE_OFFSET_BITS)
        spare = FRACTION_BITS - INDEX_BITS - INVERSE_OFFSET_BITS
        exponent = Signal(_EXPONENT, name="exponent_inverse")
        m.d.comb += exponent.eq(exponent_6)
        with m.Switch(tag_6.function):
            with m.Case(Function.SIGMOID):
                m.d.comb += [
                    Cat(offset, index).eq(Mux(carry, total[spare + 1 : -1], total[spare:-2])),
                    exponent.eq(exponent_6 + carry),
                ]
            with m.Case(Function.RSQRT):
                m.d.comb += Cat(offset, index).eq(
                    Cat(Const(0, INVERSE_OFFSET_BITS - 16), mantissa_6, odd_6, Const(1, 1))
                )
            with m.Default():
                m.d.comb += Cat(offset, index).eq(
                    Cat(Const(0, INVERSE_OFFSET_BITS + INDEX_BITS - 23), mantissa_6)
                )
        tag_7 = tag_register(7, tag_6)
        exponent_7 = register("exponent_7", exponent, _EXPONENT)
        power_7 = register("power_7", power_6)
        index_7 = register("index_7", index)
        offset_7 = register("offset_7", offset)

        # Stage 8: coefficients of 1 / m and 1 / sqrt(m).
        m.submodules.inverse_rom = inverse_rom = CoefficientRom(reciprocal_table(), rsqrt_table())
        m.d.comb += inverse_rom.index.eq(index_7)
        tag_8 = tag_register(8, tag_7)
        exponent_8 = register("exponent_8", exponent_7, _EXPONENT)
        power_8 = register("power_8", power_7)
        offset_8 = register("offset_8", offset_7)
        c0_8 = register("c0_8", inverse_rom.c0)
        c1_8 = register("c1_8", inverse_rom.c1)
        c2_8 = register("c2_8", inverse_rom.c2)

        # Stages 9, 10, 11: the polynomial, falling.
        bend = wire("bend", c2_8 * offset_8, C2_BITS + INVERSE_OFFSET_BITS)
        tag_9 = tag_register(9, tag_8)
        exponent_9 = register("exponent_9", exponent_8, _EXPONENT)
        power_9 = register("power_9", power_8)
        offset_9 = register("offset_9", offset_8)
        c0_9 = register("c0_9", c0_8)
        slope_9 = register("slope_9", c1_8 - bend[INVERSE_OFFSET_BITS:], C1_BITS)

        fall = wire("fall", slope_9 * offset_9, C1_BITS + INVERSE_OFFSET_BITS)
        tag_10 = tag_register(10, tag_9)
        exponent_10 = register("exponent_10", exponent_9, _EXPONENT)
        exp2_10 = wire("exp2_10", tag_10.function == Function.EXP2, 1)
        # exp2 has no second polynomial: its value takes the place of c0, and nothing is subtracted.
        base_10 = register("base_10", Mux(tag_9.function == Function.EXP2, power_9, c0_9))
        fall_10 = register("fall_10", fall[INVERSE_OFFSET_BITS:])

        tag_11 = tag_register(11, tag_10)
        exponent_11 = register("exponent_11", exponent_10, _EXPONENT)
        value_11 = register("value_11", base_10 - Mux(exp2_10, 0, fall_10), C0_BITS)

        # Stage 12: sigmoid takes its place: y * 2^-k, or 1 - y * 2^-k.
        share = wire(
            "share",
            Mux(exponent_11[6:].any(), 0, value_11 >> exponent_11[:6]),
            C0_BITS,
        )
        value = Signal(C0_BITS, name="placed_value")
        exponent = Signal(_EXPONENT, name="placed_exponent")
        m.d.comb += [value.eq(value_11), exponent.eq(exponent_11)]
        with m.If(tag_11.function == Function.SIGMOID):
            with m.If(tag_11.sign):
                m.d.comb += exponent.eq(-exponent_11)
            with m.Else():
                m.d.comb += [value.eq(ONE - share), exponent.eq(0)]
        tag_12 = tag_register(12, tag_11)
        value_12 = register("value_12", value)
        exponent_12 = register("exponent_12", exponent, _EXPONENT)

        # Stage 13: a value in [0.5, 1) is doubled; 24 bits, a guard and a sticky bit are kept, and
        # moved to the right when the result is subnormal.
        small = wire("small", ~value_12[FRACTION_BITS], 1)
        kept = wire("kept", Mux(small, Cat(Const(0, 1), value_12[:-1]), value_12), C0_BITS)
        biased = wire("biased", exponent_12 + 127 - small, signed(11))
        below = wire("below", 1 - biased, signed(11))
        tiny = wire("tiny", biased < 1, 1)
        guard = FRACTION_BITS - 24
        frame, sticky = kept[guard:], kept[:guard].any()
        for k in range(5):
            distance = 1 << k
            move = tiny & below[k]
            sticky = wire(f"sticky_{distance}", sticky | (move & frame[:distance].any()), 1)
            frame = wire(f"frame_{distance}", Mux(move, frame[distance:], frame), 25)
        gone = wire("gone", tiny & below[5:].any(), 1)
        tag_13 = tag_register(13, tag_12)
        frame_13 = register("frame_13", Mux(gone, 0, frame))
        sticky_13 = register("sticky_13", sticky)
        biased_13 = register("biased_13", biased, 9)

        # Stage 14: round.
        up = wire("up", frame_13[0] & (frame_13[1] | sticky_13), 1)
        rounded = wire("rounded", Cat(frame_13[1:24], Mux(frame_13[24], biased_13, 0)) + up, 32)
        finite = wire("finite", rounded[23:] < 0xFF, 1)
        sign = wire("sign", tag_13.sign & (tag_13.function == Function.RECIPROCAL), 1)
        result = register(
            "result_14",
            Mux(
                tag_13.bypass,
                tag_13.special,
                Cat(Mux(finite, rounded[:31], Const(POSITIVE_INFINITY, 31)), sign),
            ),
            32,
        )
        m.d.comb += self.result.eq(result)
        return m
