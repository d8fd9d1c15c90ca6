# SPDX-License-Identifier: Apache-2.0
"""From a stored element to FP32."""

from amaranth import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden.formats import CANONICAL_NAN, MX_FORMATS, SCALE_NAN, SPECS, Format

MAGNITUDE_BITS = 8  # of an MX significand: 128 of MXINT8


class VectorDecode(wiring.Component):
    """The FP32 value of an element, as `golden.vector.load`.

    Exact, save that what exceeds FP32 becomes infinite; NaN canonical. Latency `LATENCY` cycles,
    one element per cycle. While `enable` is low the output stands still.

    Members
    -------
    enable : In(1)
    format : In(Format)
    code : In(32)
        The element in the low bits; bits above it are ignored.
    scale : In(8)
        E8M0 code of its line, for MX formats.
    value : Out(32)
        Registered; undefined until the first element comes through.
    """

    LATENCY = 1
    emit_name = "vector_decode"

    def __init__(self) -> None:
        super().__init__(
            {
                "enable": In(1),
                "format": In(Format),
                "code": In(32),
                "scale": In(8),
                "value": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        code = self.code
        sign = Signal()
        significand = Signal(MAGNITUDE_BITS)
        # Biased FP32 exponent of the significand's top bit, that is of 2^7 units.
        exponent = Signal(signed(11))
        infinite = Signal()
        nan = Signal()
        with m.Switch(self.format):
            for fmt in MX_FORMATS:
                spec = SPECS[fmt]
                with m.Case(fmt):
                    m.d.comb += sign.eq(code[spec.bits - 1])
                    if fmt is Format.MXINT8:
                        m.d.comb += [
                            significand.eq(Mux(code[7], -code[:8], code[:8])),
                            exponent.eq(self.scale + 1),  # codes count 64ths
                        ]
                        continue
                    magnitude = code[: spec.bits - 1]
                    field = magnitude[spec.mantissa_bits :]
                    top = MAGNITUDE_BITS - 1 - spec.bias - spec.mantissa_bits
                    m.d.comb += [
                        significand.eq(Cat(magnitude[: spec.mantissa_bits], field.any())),
                        exponent.eq(self.scale + (field | ~field.any()) + top),
                    ]
                    if spec.has_infinity:
                        m.d.comb += infinite.eq(magnitude == spec.max_code + 1)
                    if spec.has_nan:
                        m.d.comb += nan.eq(magnitude > spec.max_code)

        # Normalise; then down into the subnormals, where nothing is lost.
        value, scaled = significand, exponent
        for distance in (4, 2, 1):
            empty = Signal(name=f"empty_{distance}")
            shifted = Signal(MAGNITUDE_BITS, name=f"normal_{distance}")
            left = Signal(signed(11), name=f"exponent_{distance}")
            m.d.comb += [
                empty.eq(~value[MAGNITUDE_BITS - distance :].any()),
                shifted.eq(Mux(empty, Cat(Const(0, distance), value[:-distance]), value)),
                left.eq(scaled - Mux(empty, distance, 0)),
            ]
            value, scaled = shifted, left
        tiny = Signal()
        below = Signal(5)
        frame = Signal(24)
        field = Signal(8)
        overflow = Signal()
        m.d.comb += [
            tiny.eq(scaled < 1),
            below.eq(Mux(tiny, 1 - scaled, 0)),
            frame.eq(Cat(Const(0, 16), value) >> below),
            field.eq(Mux(tiny | ~value[-1], 0, scaled[:8])),
            overflow.eq(infinite | ((scaled >= 0xFF) & value[-1])),
        ]
        scaled_value = Signal(32)
        with m.If((self.scale == SCALE_NAN) | (nan & ~infinite)):
            m.d.comb += scaled_value.eq(CANONICAL_NAN)
        with m.Elif(overflow):
            m.d.comb += scaled_value.eq(Cat(Const(0x7F800000, 31), sign))
        with m.Else():
            m.d.comb += scaled_value.eq(Cat(frame[:23], field, sign))

        plain = Signal(32)
        is_plain = Signal()
        m.d.comb += [
            is_plain.eq((self.format == Format.FP32) | (self.format == Format.BF16)),
            plain.eq(Mux(self.format == Format.BF16, Cat(Const(0, 16), code[:16]), code)),
        ]
        result = Signal(32, reset_less=True)
        with m.If(self.enable):
            with m.If(~is_plain):
                m.d.sync += result.eq(scaled_value)
            with m.Elif(plain[:31] > 0x7F800000):
                m.d.sync += result.eq(CANONICAL_NAN)
            with m.Else():
                m.d.sync += result.eq(plain)
        m.d.comb += self.value.eq(result)
        return m
