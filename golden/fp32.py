# SPDX-License-Identifier: Apache-2.0
"""Bit-exact FP32 arithmetic of the vector lanes, on numpy arrays.

Every function takes and gives `float32` arrays of any (broadcastable) shape. Rounding is to
nearest, ties to even; subnormals are kept; every NaN result is the canonical quiet NaN 0x7FC00000.
"""

import numpy as np
import numpy.typing as npt

from golden.formats import CANONICAL_NAN, bf16_to_float32, to_bf16_codes

Float32 = npt.NDArray[np.float32]

PARTIALS = 4  #: partial results of a reduction; covers the latency of the adder's loop


def bits(x: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """The bit patterns of float32 values."""
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).reshape(np.shape(x))


def from_bits(pattern: npt.ArrayLike) -> Float32:
    """The float32 values of bit patterns."""
    return np.ascontiguousarray(pattern, np.uint32).view(np.float32).reshape(np.shape(pattern))


def canonical(x: npt.ArrayLike) -> Float32:
    """`x` with every NaN replaced by the canonical one."""
    x = np.asarray(x, dtype=np.float32)
    return np.where(np.isnan(x), from_bits(CANONICAL_NAN), x)


def add(a: npt.ArrayLike, b: npt.ArrayLike) -> Float32:
    """a + b"""
    with np.errstate(all="ignore"):
        return canonical(np.asarray(a, np.float32) + np.asarray(b, np.float32))


def sub(a: npt.ArrayLike, b: npt.ArrayLike) -> Float32:
    """a - b"""
    with np.errstate(all="ignore"):
        return canonical(np.asarray(a, np.float32) - np.asarray(b, np.float32))


def mul(a: npt.ArrayLike, b: npt.ArrayLike) -> Float32:
    """a * b"""
    with np.errstate(all="ignore"):
        return canonical(np.asarray(a, np.float32) * np.asarray(b, np.float32))


def _order(x: Float32) -> npt.NDArray[np.int64]:
    """Integers ordered as the values are, with -0 below +0; NaN is not ordered by it."""
    pattern = bits(x).astype(np.int64)
    return np.where(pattern >> 31, -(pattern & 0x7FFFFFFF) - 1, pattern)


def _select(a: npt.ArrayLike, b: npt.ArrayLike, larger: bool) -> Float32:
    x, y = np.broadcast_arrays(np.asarray(a, np.float32), np.asarray(b, np.float32))
    take_x = (_order(x) > _order(y)) == larger
    return np.where(
        np.isnan(x) | np.isnan(y), from_bits(CANONICAL_NAN), np.where(take_x, x, y)
    ).astype(np.float32)


def minimum(a: npt.ArrayLike, b: npt.ArrayLike) -> Float32:
    """IEEE 754-2019 minimum: -0 < +0, a NaN operand gives NaN."""
    return _select(a, b, larger=False)


def maximum(a: npt.ArrayLike, b: npt.ArrayLike) -> Float32:
    """IEEE 754-2019 maximum: -0 < +0, a NaN operand gives NaN."""
    return _select(a, b, larger=True)


def less(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """a < b by value: -0 equals +0, false when either is NaN."""
    return np.less(np.asarray(a, np.float32), np.asarray(b, np.float32))


def equal(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """a == b by value: -0 equals +0, false when either is NaN."""
    return np.equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def unordered(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Whether a or b is NaN."""
    return np.isnan(np.asarray(a, np.float32)) | np.isnan(np.asarray(b, np.float32))


def to_bf16(x: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """BF16 codes: nearest even, overflow to infinity, NaN 0x7FC0."""
    return to_bf16_codes(x)


def from_bf16(code: npt.ArrayLike) -> Float32:
    """The float32 values of BF16 codes; NaN canonical."""
    return canonical(bf16_to_float32(code))


def _reduce(x: npt.ArrayLike, lanes: int, empty: float, combine) -> Float32:
    values = np.asarray(x, np.float32)
    if lanes < 1 or lanes & (lanes - 1):
        raise ValueError(f"lanes must be a power of two, not {lanes!r}")
    *outer, n = values.shape
    vectors = -(-n // lanes)
    padded = np.full((*outer, vectors * lanes), empty, np.float32)
    padded[..., :n] = values
    padded = padded.reshape(*outer, vectors, lanes)
    partial = np.full((*outer, PARTIALS, lanes), empty, np.float32)
    for i in range(vectors):
        slot = i % PARTIALS
        partial[..., slot, :] = combine(partial[..., slot, :], padded[..., i, :])
    while partial.shape[-2] > 1:
        partial = combine(partial[..., 0::2, :], partial[..., 1::2, :])
    row = partial[..., 0, :]
    while row.shape[-1] > 1:
        row = combine(row[..., 0::2], row[..., 1::2])
    return row[..., 0]


def reduce_sum(x: npt.ArrayLike, lanes: int) -> Float32:
    """Sums over the last axis, [..., n] to [...], in the order of the vector engine.

    The row is cut into vectors of `lanes` elements (a power of two); elements beyond n are +0.
    Vector i is added, lane by lane, to partial i mod 4; the four partials start at +0. Then the
    partials are added as (p0 + p1) + (p2 + p3), then the lanes as a balanced tree of adjacent
    pairs. No addition is left out, so a sum is never -0 (the sum of nothing, or of -0s, is +0).
    """
    return _reduce(x, lanes, 0.0, add)


def reduce_max(x: npt.ArrayLike, lanes: int) -> Float32:
    """Maxima over the last axis, [..., n] to [...]; -inf for n = 0, NaN when any element is NaN.

    The vector engine walks the row in the order of `reduce_sum`, with -inf for absent elements and
    at the start; a maximum does not depend on the order.
    """
    return _reduce(x, lanes, -np.inf, maximum)
