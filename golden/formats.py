# SPDX-License-Identifier: Apache-2.0
"""Number formats of the matmul array: the one place that names and describes them.

OCP Microscaling (MX) v1.0 element formats, BF16 and FP32. The integer value of a `Format` is its
three-bit code in hardware commands. MX formats carry one E8M0 scale per block of 32 elements
along the contraction.

An element's value is s * m * 2^x with m the integer significand (hidden bit when the exponent
field is not 0) and x = max(field, 1) - bias - mantissa bits.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Format(IntEnum):
    """Element formats; the value is the three-bit code used in commands."""

    MXFP4 = 0  # E2M1
    MXFP6_E2M3 = 1
    MXFP6_E3M2 = 2
    MXFP8_E4M3 = 3
    MXFP8_E5M2 = 4
    MXINT8 = 5
    BF16 = 6
    FP32 = 7


class Native(IntEnum):
    """Formats that a cell computes in; the value is the two-bit code inside the array."""

    E2M1 = 0
    E4M3 = 1
    E5M2 = 2
    BF16 = 3


BLOCK = 32  # elements that share one E8M0 scale
LINE_BITS = 128  # a stored line of codes: one group of weights, or some activations
LANES = 32  # 2 x 2 bit multipliers of a cell
SCALE_ONE = 127  # E8M0 code of 1.0
SCALE_NAN = 0xFF  # E8M0 code of NaN
CANONICAL_NAN = 0x7FC00000  # the only FP32 NaN that is ever produced


@dataclass(frozen=True)
class FormatSpec:
    """Description of one element format.

    ``bits`` is the width of a code, ``storage_bits`` that of its container in memory (codes sit
    in the low bits). ``bias`` of MXINT8 is unused: its codes are two's complement, value code /
    64. ``digits`` counts the 2-bit digits of the significand of ``native``, the format the array
    recodes this one to (None: not for the array). ``max_code`` is the largest finite magnitude,
    ``max_exponent`` its floor(log2).
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    storage_bits: int
    native: Native | None
    max_code: int
    max_exponent: int
    has_infinity: bool = False
    has_nan: bool = False
    scaled: bool = True

    @property
    def digits(self) -> int:
        return 0 if self.native is None else DIGITS[self.native]

    @property
    def codes_per_line(self) -> int:
        return LINE_BITS // self.storage_bits


DIGITS = {Native.E2M1: 1, Native.E4M3: 2, Native.E5M2: 2, Native.BF16: 4}
NATIVE_FORMAT = {
    Native.E2M1: Format.MXFP4,
    Native.E4M3: Format.MXFP8_E4M3,
    Native.E5M2: Format.MXFP8_E5M2,
    Native.BF16: Format.BF16,
}
SPECS = {
    Format.MXFP4: FormatSpec("mxfp4", 4, 2, 1, 1, 4, Native.E2M1, 0x7, 2),
    Format.MXFP6_E2M3: FormatSpec("mxfp6-e2m3", 6, 2, 3, 1, 8, Native.E4M3, 0x1F, 2),
    Format.MXFP6_E3M2: FormatSpec("mxfp6-e3m2", 6, 3, 2, 3, 8, Native.E4M3, 0x1F, 4),
    Format.MXFP8_E4M3: FormatSpec("mxfp8-e4m3", 8, 4, 3, 7, 8, Native.E4M3, 0x7E, 8, has_nan=True),
    Format.MXFP8_E5M2: FormatSpec(
        "mxfp8-e5m2", 8, 5, 2, 15, 8, Native.E5M2, 0x7B, 15, has_infinity=True, has_nan=True
    ),
    Format.MXINT8: FormatSpec("mxint8", 8, 0, 7, 0, 8, Native.BF16, 0x7F, 0),
    Format.BF16: FormatSpec(
        "bf16", 16, 8, 7, 127, 16, Native.BF16, 0x7F7F, 127, True, True, scaled=False
    ),
    Format.FP32: FormatSpec(
        "fp32", 32, 8, 23, 127, 32, None, 0x7F7FFFFF, 127, True, True, scaled=False
    ),
}
ARRAY_FORMATS = tuple(f for f in Format if SPECS[f].native is not None)
MX_FORMATS = tuple(f for f in Format if SPECS[f].scaled)


def parse_format(name: str) -> Format:
    """The format of a command-line name such as ``mxfp8-e4m3``."""
    for fmt, spec in SPECS.items():
        if spec.name == name:
            return fmt
    known = ", ".join(spec.name for spec in SPECS.values())
    raise ValueError(f"format must be one of {known}, not {name!r}")


# ---- decoding


def fields(fmt: Format, codes: ArrayLike) -> tuple[NDArray, NDArray, NDArray]:
    """Signed significand m (int64), exponent x of its unit (int64), NaN-or-infinity flag (bool)
    of each code.

    Bits above the element's width are ignored. The significand of a NaN or infinity has no
    meaning.
    """
    spec = SPECS[fmt]
    code = np.asarray(codes).astype(np.int64) & ((1 << spec.bits) - 1)
    if fmt is Format.MXINT8:
        return (code ^ 0x80) - 0x80, np.full(code.shape, -6), np.zeros(code.shape, bool)
    magnitude = code & ((1 << (spec.bits - 1)) - 1)
    mantissa = magnitude & ((1 << spec.mantissa_bits) - 1)
    field = magnitude >> spec.mantissa_bits
    significand = np.where(field != 0, mantissa | (1 << spec.mantissa_bits), mantissa)
    negative = (code >> (spec.bits - 1)) != 0
    exponent = np.maximum(field, 1) - spec.bias - spec.mantissa_bits
    return np.where(negative, -significand, significand), exponent, magnitude > spec.max_code


def decode(fmt: Format, codes: ArrayLike) -> NDArray[np.float64]:
    """Values of element codes (no scale applied), with signed zeros, infinities and NaN."""
    spec = SPECS[fmt]
    significand, exponent, special = fields(fmt, codes)
    value = np.ldexp(significand.astype(np.float64), exponent)
    if fmt is Format.MXINT8:
        return value
    code = np.asarray(codes).astype(np.int64)
    negative = (code >> (spec.bits - 1)) & 1 != 0
    if spec.has_infinity:
        infinite = (code & ((1 << (spec.bits - 1)) - 1)) == spec.max_code + 1
        value = np.where(infinite, np.inf, np.where(special, np.nan, np.abs(value)))
    elif spec.has_nan:
        value = np.where(special, np.nan, np.abs(value))
    return np.copysign(value, np.where(negative, -1.0, 1.0))


def decode_scale(codes: ArrayLike) -> NDArray[np.float64]:
    """Values of E8M0 codes: 2^(code - 127), NaN for 0xFF."""
    code = np.asarray(codes).astype(np.int64)
    return np.where(code == SCALE_NAN, np.nan, np.ldexp(1.0, code - SCALE_ONE))


# ---- encoding


def encode(fmt: Format, values: ArrayLike) -> NDArray:
    """Element codes of values (exact in float64): nearest, ties to even.

    MX elements saturate, infinity included; BF16 and FP32 overflow to infinity. MXINT8 gives -127
    .. 127. NaN raises ValueError in the formats that have none. uint8 for MX, uint16 for BF16,
    uint32 for FP32.
    """
    spec = SPECS[fmt]
    value = np.asarray(values, np.float64)
    nan = np.isnan(value)
    if nan.any() and not spec.has_nan:
        raise ValueError(f"values must not be NaN for {spec.name}")
    dtype = {8: np.uint8, 16: np.uint16, 32: np.uint32}[max(spec.storage_bits, 8)]
    if fmt is Format.MXINT8:
        rounded = np.rint(np.clip(value, -2.0, 2.0) * 64)
        return (np.clip(rounded, -127, 127).astype(np.int64) & 0xFF).astype(dtype)
    limit = 2.0 ** (spec.max_exponent + 1)
    magnitude = np.minimum(np.where(nan, 0.0, np.abs(value)), limit)
    lowest = 1 - spec.bias
    exponent = np.frexp(magnitude)[1].astype(np.int64) - 1
    exponent = np.where(magnitude == 0, lowest, np.maximum(exponent, lowest))
    significand = np.rint(np.ldexp(magnitude, spec.mantissa_bits - exponent)).astype(np.int64)
    # A subnormal has no hidden bit to take away; a carry out of the rounding moves on to the next
    # exponent.
    code = ((exponent + spec.bias - 1) << spec.mantissa_bits) + significand
    code = np.minimum(code, spec.max_code if spec.scaled else spec.max_code + 1)
    if spec.has_nan:
        quiet = (1 << (spec.bits - 1)) - 1
        if spec.has_infinity:
            quiet = spec.max_code + 1 + (1 << (spec.mantissa_bits - 1))
        code = np.where(nan, quiet, code)
    sign = np.signbit(value) & ~(nan & (not spec.scaled))
    return (code | (sign.astype(np.int64) << (spec.bits - 1))).astype(dtype)


def to_bf16_codes(values: ArrayLike) -> NDArray[np.uint16]:
    """BF16 codes of FP32 values: nearest even, overflow to infinity, every NaN 0x7FC0."""
    value = np.asarray(values, np.float32)
    bits = value.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FC0), rounded)


def bf16_to_float32(codes: ArrayLike) -> NDArray[np.float32]:
    """FP32 values of BF16 codes, exact, NaN payloads kept."""
    return (np.asarray(codes, np.uint16).astype(np.uint32) << 16).view(np.float32)


# ---- what the array makes of a pair of formats


def native_pair(act: Format, weight: Format) -> tuple[Native, Native]:
    """Formats that the array's edge recodes activations and weights to.

    A weight goes to its own native format, an activation to its own or, when that has fewer
    digits than the weight's, to the weight's class: E4M3 against eight-bit weights, BF16 against
    BF16-class ones.
    """
    act_native, weight_native = SPECS[act].native, SPECS[weight].native
    if act_native is None or weight_native is None:
        raise ValueError(f"formats must be of the array, not {act!r} and {weight!r}")
    if DIGITS[act_native] >= DIGITS[weight_native]:
        return act_native, weight_native
    wide = Native.BF16 if weight_native is Native.BF16 else Native.E4M3
    return wide, weight_native


def products_per_slice(act: Format, weight: Format) -> int:
    """N: products that a cell makes in one cycle, and activations in one slice."""
    act_native, weight_native = native_pair(act, weight)
    return LANES // (DIGITS[act_native] * DIGITS[weight_native])


def slices(act: Format, weight: Format) -> int:
    """P: slices (cycles, partial-sum chains) that a group takes."""
    return DIGITS[native_pair(act, weight)[0]]


def group_elements(weight: Format) -> int:
    """G: elements along K of one group, that is of one stationary weight word of a cell."""
    return LANES // SPECS[weight].digits


@cache
def recode_table(source: Format, target: Native) -> NDArray[np.uint16]:
    """Code of `target` for every code of `source` with the same value; NaN and infinity give a
    NaN or infinity.

    Raises ValueError where a value of `source` does not exist in `target`.
    """
    codes = np.arange(1 << SPECS[source].bits)
    native = NATIVE_FORMAT[target]
    if source is native:
        return codes.astype(np.uint16)
    value = decode(source, codes)
    special = ~np.isfinite(value)
    if special.any() and not SPECS[native].has_nan:
        raise ValueError(f"{target!r} must hold NaN to take {source!r}")
    table = encode(native, np.where(special, np.nan, value)).astype(np.uint16)
    back = decode(native, table)
    if not np.array_equal(back[~special], value[~special]):
        raise ValueError(f"{target!r} must hold every value of {source!r}")
    return table
