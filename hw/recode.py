# SPDX-License-Identifier: Apache-2.0
"""Lossless change of element formats, as combinational logic."""

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed

from golden.formats import NATIVE_FORMAT, SPECS, Format, Native
from hw.wires import wire


def recode(m: Module, name: str, code: Value, source: Format, target: Native) -> Signal:
    """`code` of `source` in `target`, which must hold all its finite values
    (`golden.formats.recode_table`).

    NaN and infinity come out as some number: see `is_special`.
    """
    source_spec, target_spec = SPECS[source], SPECS[NATIVE_FORMAT[target]]
    if source_spec.bits == target_spec.bits and source is not Format.MXINT8:
        return wire(m, name, code[: source_spec.bits])
    sign = code[source_spec.bits - 1]
    if source is Format.MXINT8:
        number = wire(m, f"{name}_number", code[:8], signed(8))
        significand = wire(m, f"{name}_significand", Mux(sign, -number, number), 8)
        unit: Value = Const(target_spec.bias - 6)
    else:
        mantissa_bits = source_spec.mantissa_bits
        field = code[mantissa_bits : source_spec.bits - 1]
        normal = wire(m, f"{name}_normal", field.any())
        significand = wire(m, f"{name}_significand", Cat(code[:mantissa_bits], normal))
        rebias = target_spec.bias - source_spec.bias - mantissa_bits
        unit = Cat(field[0] | ~normal, field[1:]) + rebias
    # The leading one becomes the hidden bit.
    out_field = Signal(target_spec.exponent_bits, name=f"{name}_field")
    out_mantissa = Signal(target_spec.mantissa_bits, name=f"{name}_mantissa")
    width = len(significand)
    with m.Switch(significand):
        for top in reversed(range(width)):
            with m.Case("0" * (width - 1 - top) + "1" + "-" * top):
                space = Const(0, target_spec.mantissa_bits - top)
                m.d.comb += [
                    out_field.eq(unit + top),
                    out_mantissa.eq(Cat(space, significand[:top])),
                ]
    return wire(m, name, Cat(out_mantissa, out_field, sign))


def is_special(code: Value, fmt: Format) -> Value:
    """Whether `code` is NaN or infinite."""
    if fmt is Format.MXFP8_E4M3:
        return code[:7].all()
    spec = SPECS[fmt]
    if not spec.has_nan:
        return Const(0, 1)
    return code[spec.mantissa_bits : spec.bits - 1].all()
