# SPDX-License-Identifier: Apache-2.0
"""The lane functions exp2, reciprocal, rsqrt and sigmoid, bit by bit.

All take and give float32 arrays of any shape. Each result is within 1 ulp of the true value, over
the whole range and with subnormals kept, and each function is monotonic. 2^n, 1 / 2^k,
1 / sqrt(4^k) and sigmoid(0) = 0.5 are exact. A NaN input gives 0x7FC00000, the only NaN.

| x            | exp2(x)       | reciprocal(x)         | rsqrt(x)       | sigmoid(x)     |
|--------------|---------------|-----------------------|----------------|----------------|
| +0, -0       | 1             | +inf, -inf            | +inf, -inf     | 0.5            |
| +-subnormal  | 1             | finite from 2^-128 on | finite; - NaN  | 0.5            |
| +inf         | +inf          | +0                    | +0             | 1              |
| -inf         | +0            | -0                    | NaN            | +0             |
| negative     | by value      | by value              | NaN            | by value       |
| out of range | +inf at 128, +0 at -150 | by rounding | does not occur | by rounding    |

The arithmetic is of integers. A table gives a quadratic for each of 256 intervals
(`function_tables`); fixed-point values have 34 fraction bits unless said
otherwise, and every right shift drops bits.

1. exp2: |x| is cut to 28 fraction bits, giving x = n + f after the sign is applied; 2^f is the
   polynomial at f (8 index bits, 20 offset bits); the result is 2^n * 2^f.
2. reciprocal, rsqrt: x = m * 2^e with m in [1, 2). 1 / m (8 index bits, 22 offset bits) or, for e
   even and odd, 1 / sqrt(m) and 1 / sqrt(2 m) (7 index bits, 22 offset bits); the exponent is -e or
   -floor(e / 2).
3. sigmoid: t = |x| * log2(e), with log2(e) to 34 fraction bits, is cut to 28 fraction bits; u = 2^t
   as in 1.; 1 + u is normalised to d * 2^k with d cut to 30 fraction bits; y = 1 / d as in 2. Then
   sigmoid(-|x|) = y * 2^-k and sigmoid(|x|) = 1 - y * 2^-k, the latter in 34 fraction bits.
4. The result is rounded once, to nearest even, to FP32: subnormals kept, overflow to infinity.

The cores (the polynomials) are monotonic as integers, and so is every later step.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from golden.formats import CANONICAL_NAN
from golden.fp32 import Float32, bits, from_bits
from golden.function_tables import (
    EXP2_OFFSET_BITS,
    FRACTION_BITS,
    INVERSE_OFFSET_BITS,
    Table,
    exp2_table,
    reciprocal_table,
    rsqrt_table,
)

Int64 = npt.NDArray[np.int64]

ARGUMENT_BITS = 28  #: fraction bits of the argument of 2^x
ARGUMENT_LIMIT = 8  #: an |x| of 2^ARGUMENT_LIMIT or more is out of every range
MANTISSA_BITS = 30  #: fraction bits of the argument of 1 / m
LOG2_E = 24785312075  #: log2(e) in units of 2^-FRACTION_BITS, to nearest
POSITIVE_INFINITY = 0x7F800000
ONE = 1 << FRACTION_BITS


def _rising(table: Table, index: Int64, offset: Int64, offset_bits: int) -> Int64:
    c0, c1, c2 = (np.array(c, np.int64)[index] for c in (table.c0, table.c1, table.c2))
    slope = c1 + ((c2 * offset) >> offset_bits)
    return c0 + ((slope * offset) >> offset_bits)


def _falling(table: Table, index: Int64, offset: Int64, offset_bits: int) -> Int64:
    c0, c1, c2 = (np.array(c, np.int64)[index] for c in (table.c0, table.c1, table.c2))
    slope = c1 - ((c2 * offset) >> offset_bits)
    return c0 - ((slope * offset) >> offset_bits)


def exp2_core(fraction: Int64) -> Int64:
    """2^f in [1, 2), 34 fraction bits, of f in [0, 1) with 28."""
    index = fraction >> EXP2_OFFSET_BITS
    return _rising(exp2_table(), index, fraction & ((1 << EXP2_OFFSET_BITS) - 1), EXP2_OFFSET_BITS)


def reciprocal_core(mantissa: Int64) -> Int64:
    """1 / m in (0.5, 1], 34 fraction bits, of m - 1 in [0, 1) with 30."""
    index = mantissa >> INVERSE_OFFSET_BITS
    offset = mantissa & ((1 << INVERSE_OFFSET_BITS) - 1)
    return _falling(reciprocal_table(), index, offset, INVERSE_OFFSET_BITS)


def rsqrt_core(mantissa: Int64, odd: Int64) -> Int64:
    """1 / sqrt(m * 2^odd) in (0.5, 1], 34 fraction bits, of m - 1 in [0, 1) with 23."""
    index = (odd << 7) | (mantissa >> 16)
    offset = (mantissa & 0xFFFF) << (INVERSE_OFFSET_BITS - 16)
    return _falling(rsqrt_table(), index, offset, INVERSE_OFFSET_BITS)


def _shift_right(value: Int64, amount: Int64) -> Int64:
    return value >> np.minimum(amount, 63)


def _argument(pattern: Int64, factor: int) -> Int64:
    """|x| * factor, `factor` with 34 fraction bits, cut to 28 fraction bits; for |x| < 256."""
    field = (pattern >> 23) & 0xFF
    significand = (pattern & 0x7FFFFF) | ((field != 0).astype(np.int64) << 23)
    return _shift_right((significand * factor) >> 22, 134 - np.clip(field, 1, 134))


def _normalise(pattern: Int64) -> tuple[Int64, Int64]:
    """m - 1 with 23 fraction bits, and e, of a finite non-zero |x| = m * 2^e."""
    field = (pattern >> 23) & 0xFF
    fraction = pattern & 0x7FFFFF
    length = np.frexp(np.maximum(fraction, 1).astype(np.float64))[1].astype(np.int64)
    subnormal = field == 0
    mantissa = np.where(subnormal, (fraction << (24 - length)) & 0x7FFFFF, fraction)
    return mantissa, np.where(subnormal, length - 150, field - 127)


def _round(value: Int64, exponent: Int64) -> Int64:
    """FP32 pattern of value * 2^(exponent - 34), `value` in [2^33, 2^35): once, to nearest even."""
    small = (value < ONE).astype(np.int64)
    significand = value << small
    field = exponent - small + 127
    drop = np.minimum(FRACTION_BITS - 23 + np.maximum(1 - field, 0), 40)
    kept = significand >> drop
    rest = significand - (kept << drop)
    half = np.int64(1) << (drop - 1)
    up = (rest > half) | ((rest == half) & (kept & 1 == 1))
    pattern = (np.maximum(field - 1, 0) << 23) + kept + up
    return np.minimum(pattern, POSITIVE_INFINITY)


def _apply(x: npt.ArrayLike, evaluate: Callable[[Int64], Int64]) -> Float32:
    value = np.asarray(x, np.float32)
    result = evaluate(bits(value).astype(np.int64))
    return from_bits(np.where(np.isnan(value), CANONICAL_NAN, result).astype(np.uint32))


def _exp2(pattern: Int64) -> Int64:
    magnitude = _argument(pattern, ONE)
    argument = np.where(pattern >> 31, -magnitude, magnitude)
    result = _round(exp2_core(argument & ((1 << ARGUMENT_BITS) - 1)), argument >> ARGUMENT_BITS)
    large = ((pattern >> 23) & 0xFF) >= 127 + ARGUMENT_LIMIT
    return np.where(large, np.where(pattern >> 31, 0, POSITIVE_INFINITY), result)


def _reciprocal(pattern: Int64) -> Int64:
    sign = pattern & (1 << 31)
    magnitude = pattern & 0x7FFFFFFF
    mantissa, exponent = _normalise(magnitude)
    result = _round(reciprocal_core(mantissa << (MANTISSA_BITS - 23)), -exponent)
    result = np.where(magnitude == 0, POSITIVE_INFINITY, result)
    return sign | np.where(magnitude == POSITIVE_INFINITY, 0, result)


def _rsqrt(pattern: Int64) -> Int64:
    sign = pattern & (1 << 31)
    magnitude = pattern & 0x7FFFFFFF
    mantissa, exponent = _normalise(magnitude)
    result = _round(rsqrt_core(mantissa, exponent & 1), -(exponent >> 1))
    result = np.where(magnitude == POSITIVE_INFINITY, 0, result)
    result = np.where(sign != 0, CANONICAL_NAN, result)
    return np.where(magnitude == 0, sign | POSITIVE_INFINITY, result)


def _sigmoid(pattern: Int64) -> Int64:
    negative = (pattern >> 31) != 0
    argument = _argument(pattern, LOG2_E)
    power = argument >> ARGUMENT_BITS
    total = exp2_core(argument & ((1 << ARGUMENT_BITS) - 1)) + _shift_right(
        np.full_like(power, ONE), power
    )
    carry = (total >= 2 * ONE).astype(np.int64)
    exponent = power + carry
    mantissa = (total - (ONE << carry)) >> (carry + FRACTION_BITS - MANTISSA_BITS)
    inverse = reciprocal_core(mantissa)
    value = np.where(negative, inverse, ONE - _shift_right(inverse, exponent))
    result = _round(value, np.where(negative, -exponent, 0))
    large = ((pattern >> 23) & 0xFF) >= 127 + ARGUMENT_LIMIT
    return np.where(large, np.where(negative, 0, 0x3F800000), result)


def exp2(x: npt.ArrayLike) -> Float32:
    """2^x"""
    return _apply(x, _exp2)


def reciprocal(x: npt.ArrayLike) -> Float32:
    """1 / x"""
    return _apply(x, _reciprocal)


def rsqrt(x: npt.ArrayLike) -> Float32:
    """1 / sqrt(x)"""
    return _apply(x, _rsqrt)


def sigmoid(x: npt.ArrayLike) -> Float32:
    """1 / (1 + e^-x)"""
    return _apply(x, _sigmoid)
