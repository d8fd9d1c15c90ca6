# SPDX-License-Identifier: Apache-2.0
"""First stage of a cell's dot product: slice selection, digit products, sums of four lanes,
exponents.
"""

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden.formats import Native
from hw.wires import wire

QUADS = 8  # sums of four lanes, the unit of alignment
QUAD_BITS = 11  # signed quad sum
PAIR_BITS = 7  # signed sum of two lanes where pairs are aligned on their own
EXPONENT_BITS = 9
SHIFT_BITS = 5
SCALE_SUM_BITS = 11  # signed

# Bias plus mantissa bits less one: makes the value of an element significand * 2^(field - offset).
# A product of E2M1 elements carries its exponents in the significand.
ACT_OFFSET = {Native.E2M1: 2, Native.E4M3: 10, Native.E5M2: 18, Native.BF16: 134}
WEIGHT_OFFSET = {Native.E2M1: 0, Native.E4M3: 10, Native.E5M2: 18, Native.BF16: 134}


def add_or_subtract(
    m: Module, name: str, a: Value, b: Value, subtract: Value, width: int
) -> Signal:
    """Signed a + b or a - b on one carry chain: the extra low bit is the carry in."""
    wide_a = wire(m, f"{name}_a", a, signed(width))
    wide_b = wire(m, f"{name}_b", b, signed(width))
    flipped = wire(m, f"{name}_flipped", wide_b ^ subtract.replicate(width))
    total = wire(m, f"{name}_carried", Cat(subtract, wide_a) + Cat(subtract, flipped), width + 1)
    return wire(m, name, total[1:], signed(width))


class DotMultiply(wiring.Component):
    """Combinational. 32 lanes of 2 x 2 bit multipliers, two lanes to a pair, two pairs to a quad.

    Where the lanes' digits come from, by digits of activation x weight:

    - 1 x 1: every lane is a product; all share one exponent, the quads are plain sums.
    - 2 x 1: a pair is a product and is aligned on its own: the even one in `quad`, the odd one in
      `pair`.
    - 2 x 2, 4 x 1: a quad is a product.
    - 4 x 2, 4 x 4: two or four quads are a product, their digits' weights are applied while
      summing.

    Members ------- act : In(128) Codes of the slice, each repeated as often as the weight has
    digits. weight : In(128) Codes of the whole group. index : In(2) Slice in the top bits: j, or
    2 j where there are two slices. act_native, weight_native : In(Native) act_scale, weight_scale
    : In(8) quad, pair : Out Signed sums. `pair` is zero except in 2 x 1. inverted : Out Which
    quads lack a one: they are all bits of a negated sum inverted. exponent : Out Exponent of each
    quad, 0 where its product is zero (but not in 2 x 1) and in 1 x 1. pair_shift : Out Alignment
    of each `pair`. scale : Out(signed) Biased FP32 exponent of an aligned one with exponent 0.
    """

    def __init__(self) -> None:
        super().__init__({
            "act": In(128), "weight": In(128), "index": In(2),
            "act_native": In(2), "weight_native": In(2),
            "act_scale": In(8), "weight_scale": In(8),
            "quad": Out(signed(QUAD_BITS)).array(QUADS),
            "inverted": Out(QUADS),
            "pair": Out(signed(PAIR_BITS)).array(QUADS),
            "exponent": Out(EXPONENT_BITS).array(QUADS),
            "pair_shift": Out(SHIFT_BITS).array(QUADS),
            "scale": Out(signed(SCALE_SUM_BITS)),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        act, weight = self.act, self.weight
        act_e2m1 = wire(m, "act_e2m1", self.act_native == Native.E2M1)
        act_e5m2 = wire(m, "act_e5m2", self.act_native == Native.E5M2)
        act_bf16 = wire(m, "act_bf16", self.act_native == Native.BF16)
        weight_e2m1 = wire(m, "weight_e2m1", self.weight_native == Native.E2M1)
        weight_e5m2 = wire(m, "weight_e5m2", self.weight_native == Native.E5M2)
        weight_bf16 = wire(m, "weight_bf16", self.weight_native == Native.BF16)
        by_pair = wire(m, "by_pair", ~act_e2m1 & ~act_bf16 & weight_e2m1)
        half = wire(m, "half", Mux(self.index[1], weight[64:], weight[:64]))
        quarter = wire(m, "quarter", Mux(self.index[0], half[32:], half[:32]))

        for q in range(QUADS):
            # The quad's operands in the eight- and sixteen-bit formats.
            act_16 = act[16 * q : 16 * q + 16]
            weight_16 = quarter[16 * (q >> 2) : 16 * (q >> 2) + 16]
            narrow = quarter[8 * (q >> 1) : 8 * (q >> 1) + 8]
            weight_8 = wire(m, f"weight_8_{q}", Mux(act_bf16, narrow, half[8 * q : 8 * q + 8]))
            weight_m4 = wire(m, f"weight_m4_{q}", _m4(weight_8, weight_e5m2))
            act_m8 = wire(m, f"act_m8_{q}", _m8(act_16))
            weight_m8 = wire(m, f"weight_m8_{q}", _m8(weight_16))
            sums, signs, act_8s, nibbles = [], [], [], []
            for u in (2 * q, 2 * q + 1):
                odd = u & 1
                act_8 = act[8 * u : 8 * u + 8]
                act_4 = [act[8 * u + 4 * k : 8 * u + 4 * k + 4] for k in range(2)]
                single = Mux(act_bf16, quarter[4 * q : 4 * q + 4], half[4 * u : 4 * u + 4])
                weight_4 = [
                    wire(m, f"weight_4_{u}_0", Mux(act_e2m1, weight[8 * u : 8 * u + 4], single))
                ]
                weight_4.append(
                    wire(m, f"weight_4_{u}_1",
                         Mux(act_e2m1, weight[8 * u + 4 : 8 * u + 8], weight_4[0]))
                )  # fmt: skip
                act_m4 = wire(m, f"act_m4_{u}", _m4(act_8, act_e5m2))
                wide = wire(m, f"act_wide_{u}",
                            Mux(act_bf16, act_m8[4 * odd : 4 * odd + 4], act_m4))  # fmt: skip
                digit_8 = Mux(
                    act_bf16,
                    weight_m4[2 * (q & 1) : 2 * (q & 1) + 2],
                    weight_m4[2 * odd : 2 * odd + 2],
                )
                digit = wire(m, f"digit_{u}", Mux(
                    weight_bf16, weight_m8[2 * (q & 3) : 2 * (q & 3) + 2], digit_8))  # fmt: skip
                act_sign = Mux(act_bf16, act_16[15], act_8[7])
                weight_sign = Mux(
                    weight_e2m1, weight_4[0][3], Mux(weight_bf16, weight_16[15], weight_8[7])
                )
                sign = wire(m, f"sign_{u}", act_sign ^ weight_sign)
                terms, lane_signs = [], []
                for k in range(2):
                    x = wire(m, f"x_{u}_{k}",
                             Mux(act_e2m1, _m2(act_4[k]), wide[2 * k : 2 * k + 2]))  # fmt: skip
                    y = wire(m, f"y_{u}_{k}", Mux(weight_e2m1, _m2(weight_4[k]), digit))
                    exponent = _x2(act_4[k]) + _x2(weight_4[k])
                    shift = wire(m, f"shift_{u}_{k}", Mux(act_e2m1, exponent, 2 * k), 3)
                    terms.append(wire(m, f"term_{u}_{k}", (x * y) << shift, 8))
                    lane = Mux(act_e2m1, act_4[k][3] ^ weight_4[k][3], sign)
                    lane_signs.append(wire(m, f"lane_sign_{u}_{k}", lane))
                # The sign of the first lane is left out of the pair and comes back with the quad.
                opposite = wire(m, f"opposite_{u}", lane_signs[0] ^ lane_signs[1])
                sums.append(add_or_subtract(m, f"sum_{u}", terms[0], terms[1], opposite, 10))
                signs.append(lane_signs[0])
                act_8s.append(act_8)
                nibbles.append(weight_4[0])
            odd_sum = sums[1]
            placed = Mux(act_e2m1, odd_sum, Mux(act_bf16, odd_sum << 4, odd_sum << 2))
            second = wire(m, f"second_{q}", Mux(by_pair, 0, placed), signed(QUAD_BITS))
            differ = wire(m, f"differ_{q}", signs[0] ^ signs[1])
            magnitude = add_or_subtract(m, f"four_{q}", sums[0], second, differ, QUAD_BITS)
            alone = wire(m, f"alone_{q}", Mux(by_pair, odd_sum, 0), signed(PAIR_BITS))
            zero = Const(0, signed(2))
            m.d.comb += [
                self.quad[q].eq(magnitude ^ signs[0].replicate(QUAD_BITS)),
                self.inverted[q].eq(signs[0]),
                self.pair[q].eq(
                    add_or_subtract(m, f"pair_{q}", zero, alone, signs[1], PAIR_BITS)),
                self.pair_shift[q].eq(_x4(act_8s[1], act_e5m2) + _x2(nibbles[1]) - 1),
            ]  # fmt: skip

            act_x = wire(m, f"act_x_{q}",
                         Mux(act_bf16, _x8(act_16), _x4(act_8s[0], act_e5m2)), 9)  # fmt: skip
            weight_x = wire(m, f"weight_x_{q}", Mux(
                weight_e2m1, _x2(nibbles[0]) - 1,
                Mux(weight_bf16, _x8(weight_16), _x4(weight_8, weight_e5m2))), 9)  # fmt: skip
            act_some = Mux(act_bf16, act_m8.any(), _m4(act_8s[0], act_e5m2).any())
            weight_some = Mux(
                weight_e2m1, _m2(nibbles[0]).any(),
                Mux(weight_bf16, weight_m8.any(), weight_m4.any()))  # fmt: skip
            some = wire(m, f"some_{q}", (act_some & weight_some & ~act_e2m1) | by_pair)
            total = wire(m, f"total_x_{q}", act_x + weight_x, EXPONENT_BITS)
            m.d.comb += self.exponent[q].eq(Mux(some, total, 0))

        offset = Signal(9)
        with m.Switch(Cat(self.act_native, self.weight_native)):
            for a in Native:
                for w in Native:
                    with m.Case(a | w << 2):
                        m.d.comb += offset.eq(ACT_OFFSET[a] + WEIGHT_OFFSET[w])
        m.d.comb += self.scale.eq(self.act_scale + self.weight_scale - 127 - offset)
        return m


# Significands m and exponents x = max(field, 1) of the formats; E2M1's exponent is one less.


def _m2(code: Value) -> Value:
    return Cat(code[0], code[1:3].any())


def _x2(code: Value) -> Value:
    return Cat(code[2] & ~code[1], code[2] & code[1])


def _m4(code: Value, e5m2: Value) -> Value:
    e4m3 = Cat(code[:3], code[3:7].any())
    return Mux(e5m2, Cat(Const(0, 1), code[:2], code[2:7].any()), e4m3)


def _x4(code: Value, e5m2: Value) -> Value:
    e4m3 = Cat(code[3] | ~code[3:7].any(), code[4:7], Const(0, 1))
    return Mux(e5m2, Cat(code[2] | ~code[2:7].any(), code[3:7]), e4m3)


def _m8(code: Value) -> Value:
    return Cat(code[:7], code[7:15].any())


def _x8(code: Value) -> Value:
    return Cat(code[7] | ~code[7:15].any(), code[8:15])
