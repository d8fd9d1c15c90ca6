# SPDX-License-Identifier: Apache-2.0
"""First two stages of a cell's dot product: slice selection, digit products and their sums,
exponents.
"""

from typing import Any

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from golden.formats import SCALE_ONE, Native
from golden.matmul import WINDOW
from hw.arrangement import QUADS
from hw.carry import greater, kept
from hw.wires import wire

QUAD_BITS = 11  # signed sum of four lanes, the unit of alignment
LANE_PAIR_BITS = 10  # signed sum of two lanes
PAIR_BITS = 7  # the same where pairs are aligned on their own
EXPONENT_BITS = 9
SHIFT_BITS = 5
BIAS_BITS = 10  # signed
SCALE_SUM_BITS = 11  # signed
TOTAL_BITS = 49  # signed, of the window's exact sum

# Bias plus mantissa bits less one: makes the value of an element significand * 2^(field - offset).
# A product of E2M1 elements carries its exponents in the significand.
ACT_OFFSET = {Native.E2M1: 2, Native.E4M3: 10, Native.E5M2: 18, Native.BF16: 134}
WEIGHT_OFFSET = {Native.E2M1: 0, Native.E4M3: 10, Native.E5M2: 18, Native.BF16: 134}

# What a cell does with a slice, decoded once for all cells. Formats by digits of activation x
# weight; `upper`, `right`, `left`: which weights the slice meets (`hw.arrangement`).
CONTROL = data.StructLayout(
    {
        "act_e2m1": 1,  # 1 x 1
        "act_e5m2": 1,
        "act_bf16": 1,  # 4 x ...
        "by_pair": 1,  # 2 x 1
        "weight_e2m1": 1,
        "weight_e5m2": 1,
        "weight_bf16": 1,  # 4 x 4
        "upper": 1,
        "right": 1,
        "left": 1,
    }
)


def control_of(act: Native, weight: Native) -> dict[str, int]:
    """The part of CONTROL that depends on the formats alone."""
    return {
        "act_e2m1": act is Native.E2M1,
        "act_e5m2": act is Native.E5M2,
        "act_bf16": act is Native.BF16,
        "by_pair": act in (Native.E4M3, Native.E5M2) and weight is Native.E2M1,
        "weight_e2m1": weight is Native.E2M1,
        "weight_e5m2": weight is Native.E5M2,
        "weight_bf16": weight is Native.BF16,
    }


def bias_of(act: Native, weight: Native) -> int:
    """What a slice's scale needs so that it plus a weight's scale plus the largest exponent is the
    biased FP32 exponent of the total's top bit.
    """
    return TOTAL_BITS - 2 - WINDOW - SCALE_ONE - ACT_OFFSET[act] - WEIGHT_OFFSET[weight]


def select_slice(formats: Any, control: Any, index: Value) -> list[Any]:
    """Assigns the rest of `control`: `index` is j where there are four slices, 2 j where there are
    two. `formats` holds the part that depends on the formats.
    """
    return [
        control.upper.eq(index[1]),
        control.right.eq(formats.act_bf16 & index[0]),
        control.left.eq(formats.act_bf16 & ~index[0]),
    ]


class DotLanes(wiring.Component):
    """Combinational. 32 lanes of E2M1 multipliers, two lanes to a pair, two pairs to a quad.

    Digits of two bits are E2M1 codes below 4, digits times 4 are codes too. Where they come from,
    by digits of activation x weight:

    - 1 x 1: every lane is a product; all share one exponent, the quads are plain sums.
    - 2 x 1: a pair is a product and is aligned on its own.
    - 2 x 2, 4 x 1: a quad is a product.
    - 4 x 2, 4 x 4: two or four quads are a product, their digits' weights are applied while
      summing: quads 4 .. 7 hold digit 1, or 1 and 3, of which quads 6 and 7 hold 3.

    Members
    -------
    act, weight : In(128)
        The slice and the whole group as `hw.arrangement` places them.
    control : In(CONTROL)
    pair : Out
        Signed sums of two lanes: a negative second lane lacks a one.
    missing : Out
        Which pairs lack one.
    exponent : Out
        Exponent of each quad, 0 where its product is zero and in 1 x 1. In 2 x 1: the low bits are
        the way of the even pair; the others, and `odd_shift` on top, that of the odd one.
    above : Out
        Which odd quads' exponents are larger than those of the quads before them.
    """

    def __init__(self) -> None:
        super().__init__({
            "act": In(128), "weight": In(128), "control": In(CONTROL),
            "pair": Out(signed(LANE_PAIR_BITS)).array(2 * QUADS),
            "missing": Out(2 * QUADS),
            "exponent": Out(EXPONENT_BITS).array(QUADS),
            "odd_shift": Out(QUADS),
            "above": Out(QUADS // 2),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        control = self.control
        act_e2m1, act_bf16, by_pair = control.act_e2m1, control.act_bf16, control.by_pair
        weight_e2m1, weight_bf16 = control.weight_e2m1, control.weight_bf16
        # E2M1 weights that meet wider activations leave their exponent to alignment.
        normalised = wire(m, "normalised", weight_e2m1 & ~act_e2m1)

        halves = []
        for q in range(QUADS):
            lower, upper = self.weight[16 * q : 16 * q + 8], self.weight[16 * q + 8 : 16 * q + 16]
            halves.append(wire(m, f"half_{q}", Mux(control.upper, upper, lower)))
        chosen = []
        for q in range(QUADS):
            swap = control.right if q < 4 else control.left
            chosen.append(wire(m, f"chosen_{q}", Mux(swap, halves[q ^ 4], halves[q])))

        for q in range(QUADS):
            even, odd = self.act[16 * q : 16 * q + 8], self.act[16 * q + 8 : 16 * q + 16]
            byte = chosen[q]
            # Bytes that hold a BF16 weight's low and high bits.
            low, high = chosen[q & ~2], chosen[q | 2]

            # Exponents, max(field, 1), and hidden bits.
            act_field = _field(m, f"act_{q}", even, odd, control.act_e5m2, act_bf16)
            odd_field = _field(m, f"odd_{q}", odd, None, control.act_e5m2, None)
            own = byte if q & 2 == 0 else Mux(weight_bf16, low, byte)
            weight_field = _field(
                m, f"weight_{q}", wire(m, f"own_{q}", own), high, control.weight_e5m2, weight_bf16
            )
            act_hidden = wire(m, f"act_hidden_{q}", act_field.any())
            odd_hidden = wire(m, f"odd_hidden_{q}", odd_field.any())
            weight_hidden = wire(m, f"weight_hidden_{q}", weight_field.any())

            # Digits of weights.
            zero_digit = wire(m, f"low_digit_{q}", Cat(
                byte[0] & ~control.weight_e5m2, byte[1] | (byte[2] & normalised)))  # fmt: skip
            plain = weight_e2m1 | weight_bf16 if q & 2 == 0 else weight_e2m1
            one_digit = wire(m, f"high_digit_{q}", Cat(
                byte[4], Mux(plain, byte[5] | (byte[6] & normalised), weight_hidden)))  # fmt: skip
            # The pairs' nibbles where weights are E2M1.
            nibbles = [byte[:4], byte[4:]]
            if q < 4:
                digits = [zero_digit, Mux(act_bf16, zero_digit, one_digit)]
                nibble = wire(m, f"nibble_{q}", byte[:4])
            else:
                digits = [Mux(act_bf16, one_digit, zero_digit), one_digit]
                nibble = wire(m, f"nibble_{q}", Mux(act_bf16, byte[4:], byte[:4]))

            # Signs: of each lane in 1 x 1, else of each pair.
            act_sign = [wire(m, f"act_sign_{q}", Mux(act_bf16, odd[7], even[7])), odd[7]]
            wide_sign = byte[7] if q & 2 else Mux(weight_bf16, high[7], byte[7])
            for half, act_byte in enumerate((even, odd)):
                u = 2 * q + half
                if (half == 0) == (q < 4):
                    nibble_sign = nibbles[half][3]
                else:
                    nibble_sign = Mux(act_bf16, nibbles[1 - half][3], nibbles[half][3])
                pair_sign = wire(m, f"sign_{u}", act_sign[half] ^ Mux(
                    weight_e2m1, nibble_sign, wide_sign))  # fmt: skip
                digit = wire(m, f"digit_{u}", digits[half])
                hidden = act_hidden if half == 0 else Mux(act_bf16, act_hidden, odd_hidden)
                top = Mux(act_bf16, act_byte[5], hidden) if half == 0 else hidden
                second = wire(m, f"second_{u}", Cat(act_byte[4], top))
                raw = self.weight[16 * q + 8 + 4 * half : 16 * q + 12 + 4 * half]
                lanes = [
                    (
                        Cat(act_byte[0] & ~control.act_e5m2, act_byte[1], act_byte[2] & act_e2m1),
                        Cat(digit, nibbles[half][2] & act_e2m1),
                        Mux(act_e2m1, act_byte[3] ^ nibbles[half][3], pair_sign),
                    ),
                    (
                        Mux(act_e2m1, act_byte[4:7], Cat(second.all(), second[1], second.any())),
                        Cat(Mux(act_e2m1, raw[:2], digit), raw[2] & act_e2m1),
                        Mux(act_e2m1, act_byte[7] ^ raw[3], pair_sign),
                    ),
                ]
                terms = []
                signs = []
                for k, (x, y, sign) in enumerate(lanes):
                    name = f"{u}_{k}"
                    signs.append(wire(m, f"lane_sign_{name}", sign))
                    product = _times(m, name, wire(m, f"x_{name}", x), wire(m, f"y_{name}", y))
                    flipped = Cat(product, Const(0, 1)) ^ signs[k].replicate(9)
                    terms.append(wire(m, f"term_{name}", flipped, signed(9)))
                wide = [Cat(term, term[-1]) for term in terms]
                total = wire(
                    m,
                    f"total_{u}",
                    (Cat(signs[0], wide[0]) + Cat(signs[0], wide[1]))[1:],
                    LANE_PAIR_BITS,
                )
                m.d.comb += [
                    self.pair[u].eq(total[:LANE_PAIR_BITS].as_signed()),
                    self.missing[u].eq(signs[1]),
                ]

            # Exponents of products.
            act_x = Cat(act_field[0] | ~act_hidden, act_field[1:])
            wide_x = Cat(weight_field[0] | ~weight_hidden, weight_field[1:])
            weight_x = wire(m, f"weight_x_{q}", Mux(
                weight_e2m1, _nibble_exponent(nibble, EXPONENT_BITS), wide_x),
                EXPONENT_BITS)  # fmt: skip
            total = wire(m, f"exponent_sum_{q}", act_x + weight_x, EXPONENT_BITS)
            act_some = wire(m, f"act_some_{q}", Cat(
                act_hidden, even[0] & ~control.act_e5m2, even[1], even[4],
                act_bf16 & Cat(even[5], odd[0], odd[1], odd[4]).any()).any())  # fmt: skip
            weight_some = wire(m, f"weight_some_{q}", Mux(
                weight_e2m1, nibble[:3].any(), Cat(
                    weight_hidden, byte[0] & ~control.weight_e5m2, byte[1], byte[4],
                    weight_bf16 & Cat(low[5], low[0], low[1], low[4], high[0], high[1],
                                      high[4]).any()).any()))  # fmt: skip
            some = wire(m, f"some_{q}", (act_some & weight_some & ~act_e2m1) | by_pair)
            odd_x = Cat(odd_field[0] | ~odd_hidden, odd_field[1:5])
            odd_shift = wire(
                m, f"odd_shift_{q}", odd_x + _nibble_exponent(byte[4:], SHIFT_BITS), SHIFT_BITS
            )
            upper = Mux(by_pair, odd_shift[:4], total[SHIFT_BITS:])
            m.d.comb += [
                self.exponent[q].eq(Mux(some, Cat(total[:SHIFT_BITS], upper), 0)),
                self.odd_shift[q].eq(odd_shift[4]),
            ]
        for i in range(QUADS // 2):
            a, b = self.exponent[2 * i + 1], self.exponent[2 * i]
            m.d.comb += self.above[i].eq(greater(m, f"above_{i}", a, b))
        return m


class DotQuads(wiring.Component):
    """Combinational. Sums of quads, and of the pairs that are aligned on their own; the largest
    exponent.

    Members
    -------
    pair, missing, exponent, above : In
        From `DotLanes`.
    all_one : In(1)
        1 x 1.
    by_pair : In(1)
        2 x 1.
    four_digits : In(1)
        4 x ...
    quad : Out
        Signed sums; a quad that is `inverted` lacks a one.
    odd_pair : Out
        Signed sums in 2 x 1, else 0.
    shift, keep : Out
        Each quad's way to the largest exponent at the top of the window, and whether it lies
        inside. In 2 x 1 nothing can lie outside, and a quad shifts by its exponent.
    top : Out
        The exponent that is aligned to the top of the window.
    """

    def __init__(self) -> None:
        super().__init__({
            "pair": In(signed(LANE_PAIR_BITS)).array(2 * QUADS),
            "missing": In(2 * QUADS),
            "exponent": In(EXPONENT_BITS).array(QUADS),
            "above": In(QUADS // 2),
            "all_one": In(1), "by_pair": In(1), "four_digits": In(1),
            "quad": Out(signed(QUAD_BITS)).array(QUADS),
            "inverted": Out(QUADS),
            "odd_pair": Out(signed(PAIR_BITS)).array(QUADS),
            "shift": Out(SHIFT_BITS).array(QUADS), "keep": Out(QUADS),
            "top": Out(EXPONENT_BITS),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        for q in range(QUADS):
            first, second = self.pair[2 * q], self.pair[2 * q + 1]
            last = self.missing[2 * q + 1]
            # Ones below a negative number: it still lacks just a one.
            by_four = wire(m, f"by_four_{q}", Cat(last.replicate(4), second[:7]), signed(QUAD_BITS))
            by_two = wire(m, f"by_two_{q}", Cat(last.replicate(2), second[:7]), signed(9))
            alike = wire(m, f"alike_{q}", second, signed(QUAD_BITS))
            two = wire(m, f"two_{q}", by_two, signed(QUAD_BITS))
            placed = Mux(self.all_one, alike, Mux(self.four_digits, by_four, two))
            placed = wire(m, f"placed_{q}", Mux(self.by_pair, 0, placed), QUAD_BITS)
            wide = wire(m, f"wide_{q}", first, signed(QUAD_BITS))
            carry = self.missing[2 * q]
            total = wire(m, f"total_{q}", Cat(carry, wide) + Cat(carry, placed), QUAD_BITS + 1)
            alone = wire(m, f"alone_{q}", Mux(self.by_pair, second[:PAIR_BITS], 0))
            m.d.comb += [
                self.quad[q].eq(total[1:].as_signed()),
                self.inverted[q].eq(last & ~self.by_pair),
                self.odd_pair[q].eq((alone + (last & self.by_pair))[:PAIR_BITS].as_signed()),
            ]
        largest: list[Value] = [
            wire(m, f"largest_0_{i}",
                 Mux(self.above[i], self.exponent[2 * i + 1], self.exponent[2 * i]))
            for i in range(QUADS // 2)
        ]  # fmt: skip
        a, b = (
            wire(m, f"largest_1_{i}", Mux(greater(m, f"above_1_{i}", x, y), x, y))
            for i, (x, y) in enumerate(zip(largest[::2], largest[1::2], strict=True))
        )
        first = greater(m, "above_2", a, b)
        a, b = (
            wire(m, f"aligned_{i}", Mux(self.by_pair, WINDOW, value))
            for i, value in enumerate((a, b))
        )
        top = wire(m, "aligned", Mux(first, a, b))
        m.d.comb += self.top.eq(top)
        for q in range(QUADS):
            # exponent - top - 1: 32 below the shift, or less for a lost quad.
            here, whole = self.exponent[q], self.exponent[q][SHIFT_BITS:]
            way = wire(m, f"way_{q}", here[:SHIFT_BITS] + ~top[:SHIFT_BITS], SHIFT_BITS + 1)
            same = kept(m, f"same_{q}", whole == top[SHIFT_BITS:])
            next_to = kept(m, f"next_{q}", (whole + 1)[:-1] == top[SHIFT_BITS:])
            m.d.comb += [
                self.shift[q].eq(way),
                self.keep[q].eq(Mux(way[-1], next_to, same) | self.by_pair),
            ]
        return m


def _field(
    m: Module, name: str, byte: Value, high: Value | None, e5m2: Value, bf16: Value | None
) -> Signal:
    """Exponent field of a code as `hw.arrangement` places it: eight bits, or five of a byte."""
    fifth = byte[0] & e5m2
    if high is None or bf16 is None:
        return wire(m, f"{name}_field", Cat(byte[5], byte[2], byte[3], byte[6], fifth))
    rest = Cat(high[3], high[5], high[6]) & bf16.replicate(3)
    return wire(m, f"{name}_field", Cat(
        Mux(bf16, byte[7], byte[5]), byte[2], byte[3], byte[6], Mux(bf16, high[2], fifth), rest,
    ))  # fmt: skip


def _nibble_exponent(nibble: Value, width: int) -> Value:
    """max(field, 1) - 2 of an E2M1 code: -1, 0 or 1."""
    return Cat(~nibble[2] | nibble[1], (~nibble[2]).replicate(width - 1))


def _times(m: Module, name: str, a: Value, b: Value) -> Signal:
    """Product of two magnitudes as E2M1 codes, in quarters: at most 144.

    A code is a significand 0 .. 3 and a shift 0, 1 or 2.
    """
    significands = [Cat(c[0], c[1] | c[2]) for c in (a, b)]
    shifts = [(~c[2], c[2] & ~c[1], c[2] & c[1]) for c in (a, b)]
    product = wire(m, f"product_{name}", significands[0] * significands[1], 4)
    result: Value = Const(0, 8)
    for s in range(5):
        here = Cat(shifts[0][i] & shifts[1][s - i] for i in range(3) if 0 <= s - i < 3).any()
        chosen = wire(m, f"by_{name}_{s}", here)
        result = result | Cat(Const(0, s), product & chosen.replicate(4))
    return wire(m, f"lane_{name}", result, 8)
