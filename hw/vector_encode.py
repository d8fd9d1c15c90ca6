# SPDX-License-Identifier: Apache-2.0
"""From FP32 to an element code of a Microscaling format, the block's scale being known."""

from amaranth import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden.formats import MX_FORMATS, SPECS, Format

KEPT = 8  # leading bits of the significand that can matter; a sticky bit stands for the rest


def fraction_bits(fmt: Format) -> int:
    """Bits behind the leading one of a normal element; those of MXINT8 in [1, 2) for MXINT8."""
    return 6 if fmt is Format.MXINT8 else SPECS[fmt].mantissa_bits


def bias(fmt: Format) -> int:
    """One less the exponent of the smallest normal element; MXINT8 behaves as if it were 0."""
    return 1 if fmt is Format.MXINT8 else SPECS[fmt].bias


def positive_nan(fmt: Format) -> int:
    """Code that a NaN becomes: the positive quiet NaN, else the largest value."""
    spec = SPECS[fmt]
    if not spec.has_nan:
        return spec.max_code
    if spec.has_infinity:
        return spec.max_code + 1 + (1 << (spec.mantissa_bits - 1))
    return (1 << (spec.bits - 1)) - 1


class VectorEncode(wiring.Component):
    """The code of x / 2^(scale - 127), nearest, ties to even, saturating.

    As `golden.quantise.quantise`: `scale` is the code of x's own block, and `blank` (a block of
    zeros, or one that holds NaN or infinity) gives code 0. Without `blank` any `scale` but 0xFF
    serves, as in `golden.quantise.quantise_fixed`: infinity saturates, NaN gives the format's
    positive NaN or, where there is none, the largest code. Latency `LATENCY` cycles, one element
    per cycle. While `enable` is low the whole pipeline stands still.

    Members
    -------
    enable : In(1)
    format : In(Format)
        An MX format; must not change while elements are under way.
    x : In(32)
    scale : In(8)
    blank : In(1)
    code : Out(8)
        Registered; undefined until the first element comes through.
    """

    LATENCY = 2
    emit_name = "vector_encode"

    def __init__(self) -> None:
        super().__init__(
            {
                "enable": In(1),
                "format": In(Format),
                "x": In(32),
                "scale": In(8),
                "blank": In(1),
                "code": Out(8),
            }
        )

    def elaborate(self, platform):
        m = Module()

        # Stage 1: normalise, subnormals of FP32 too.
        field = self.x[23:31]
        frame = Signal(24)
        exponent = Signal(signed(10))
        m.d.comb += [
            frame.eq(Cat(self.x[:23], field.any())),
            exponent.eq((field | ~field.any()) - self.scale),
        ]
        for distance in (16, 8, 4, 2, 1):
            empty = Signal(name=f"empty_{distance}")
            shifted = Signal(24, name=f"normal_{distance}")
            left = Signal(signed(10), name=f"exponent_{distance}")
            m.d.comb += [
                empty.eq(~frame[24 - distance :].any()),
                shifted.eq(Mux(empty, Cat(Const(0, distance), frame[: 24 - distance]), frame)),
                left.eq(exponent - Mux(empty, distance, 0)),
            ]
            frame, exponent = shifted, left
        kept = Signal(KEPT, reset_less=True)
        sticky = Signal(reset_less=True)
        power = Signal(signed(10), reset_less=True)
        sign = Signal(reset_less=True)
        special = Signal(reset_less=True)
        nan = Signal(reset_less=True)
        blank = Signal(reset_less=True)
        not_number = Signal()
        m.d.comb += not_number.eq(field.all() & self.x[:23].any())
        with m.If(self.enable):
            m.d.sync += [
                kept.eq(frame[24 - KEPT :]),
                sticky.eq(frame[: 24 - KEPT].any()),
                power.eq(exponent),
                sign.eq(self.x[31] & ~not_number),
                special.eq(field.all()),
                nan.eq(not_number),
                blank.eq(self.blank),
            ]

        # Stage 2: down to the fraction bits, and further below the smallest normal; round.
        lowest = Signal(signed(6))
        bits = Signal(3)
        offset = Signal(5)
        limit = Signal(7)
        highest = Signal(4)
        nan_code = Signal(7)
        with m.Switch(self.format):
            for fmt in MX_FORMATS:
                with m.Case(fmt):
                    m.d.comb += [
                        lowest.eq(1 - bias(fmt)),
                        offset.eq(bias(fmt) - 1),
                        bits.eq(fraction_bits(fmt)),
                        limit.eq(SPECS[fmt].max_code),
                        highest.eq(SPECS[fmt].max_exponent),
                        nan_code.eq(positive_nan(fmt)),
                    ]
        normal = Signal()
        depth = Signal(signed(11))
        drop = Signal(4)
        m.d.comb += [
            normal.eq(power >= lowest),
            depth.eq(lowest - power),
            # One more than KEPT leaves nothing but the sticky bit.
            drop.eq(KEPT - 1 - bits + Mux(normal, 0, Mux(depth > KEPT, KEPT, depth))),
        ]
        wide = Signal(2 * KEPT + 1)
        down = Signal(2 * KEPT + 1)
        away = Signal()
        up = Signal()
        rounded = Signal(KEPT + 1)
        magnitude = Signal(KEPT + 8)
        m.d.comb += [
            wide.eq(Cat(Const(0, KEPT + 1), kept)),
            down.eq(wide >> drop),
            away.eq(sticky | (drop > KEPT + 1)),
            up.eq(down[KEPT] & (down[KEPT + 1] | down[:KEPT].any() | away)),
            rounded.eq(down[KEPT + 1 :] + up),
        ]
        top = Signal(6)
        m.d.comb += [
            top.eq(Mux(normal, power + offset, 0)),
            magnitude.eq(rounded + (top << bits)),
        ]
        # Beyond the highest exponent `top` has no meaning; a fixed scale lets x go there.
        beyond = Signal()
        saturated = Signal(7)
        m.d.comb += beyond.eq(special | (power > highest) | (magnitude > limit))
        with m.If(nan):
            m.d.comb += saturated.eq(nan_code)
        with m.Elif(beyond):
            m.d.comb += saturated.eq(limit)
        with m.Else():
            m.d.comb += saturated.eq(magnitude)
        code = Signal(8, reset_less=True)
        with m.If(self.enable):
            with m.If(blank):
                m.d.sync += code.eq(0)
            with m.Elif(self.format == Format.MXINT8):
                m.d.sync += code.eq(Mux(sign, -saturated, saturated))
            with m.Else(), m.Switch(self.format):
                for fmt in MX_FORMATS:
                    if fmt is not Format.MXINT8:
                        magnitude_bits = SPECS[fmt].bits - 1
                        with m.Case(fmt):
                            m.d.sync += code.eq(Cat(saturated[:magnitude_bits], sign))
        m.d.comb += self.code.eq(code)
        return m
