# SPDX-License-Identifier: Apache-2.0
"""Bit-exact model of the matmul array, and the float64 reference that says what is meant.

The array's arithmetic:

1. K is cut into groups of G weights, groups into P slices of N products (`golden.formats`), and
   into tiles of R groups.
2. A NaN or infinite element or a scale of 0xFF flags its slice (activation) or group (weight); a
   flagged slice x group gives NaN. Elements beyond K are zero on both sides.
3. Products m_a * m_w are exact with exponent x_a + x_w; those more than 31 below the largest
   exponent of a product that is not zero count as zero; the sum of the rest is exact, scaled by
   both scales, and rounded once to nearest even to 24 significant bits with unbounded exponent. A
   zero sum is +0.
4. A partial sum plus a dot is exact, rounded once to FP32 to nearest even; every NaN is
   0x7FC00000.
5. Each slice of a K tile is a chain from +0 over the R rows; the accumulator adds the chains of
   slices 0 .. P-1 of K tile 0, then of K tile 1, and so on, onto the initial value in IEEE FP32.

Everything here is int64 and float64: a slice's sum has at most 48 bits, so a float64 holds it,
and so that no order of additions changes it.
"""

import numpy as np
from numpy.typing import NDArray

from golden.formats import (
    NATIVE_FORMAT,
    SCALE_NAN,
    SCALE_ONE,
    SPECS,
    Format,
    Native,
    fields,
    group_elements,
    native_pair,
    products_per_slice,
    recode_table,
    slices,
)
from golden.quantise import dequantise, expand_scales

WINDOW = 31  # a product this far below the largest exponent still counts
_NO_PRODUCT = -(1 << 20)
_COLUMNS_AT_ONCE = 1 << 16  # results worked on together: they stay in the cache


def round_significand(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Nearest even to 24 significant bits, exponent unbounded (within float64); -0 gives +0."""
    bits = np.ascontiguousarray(value).view(np.int64)
    bits = (bits + 0x0FFFFFFF + ((bits >> 29) & 1)) & ~0x1FFFFFFF
    return bits.view(np.float64) + 0.0


def add_fp32(psum: NDArray[np.float64], dot: NDArray[np.float64]) -> NDArray[np.float64]:
    """Exact psum + dot rounded once to FP32, as float64. psum is FP32, dot has a 24-bit
    significand.

    The float64 sum is not exact when one operand is 2^29 times the other, but then the larger one
    is representable in FP32 (or overflows) and nowhere near a tie, so that rounding twice does no
    harm.
    """
    with np.errstate(all="ignore"):
        return (psum + dot).astype(np.float32).astype(np.float64)


def add_ieee(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """IEEE FP32 sum with the canonical NaN: what an accumulator does."""
    with np.errstate(all="ignore"):
        total = np.asarray(a + b, np.float32)
    return np.where(np.isnan(total), np.float32(np.nan), total)


def dot(
    act: Native,
    weight: Native,
    act_codes: NDArray,
    weight_codes: NDArray,
    act_scale: NDArray,
    weight_scale: NDArray,
) -> NDArray[np.float64]:
    """Dot product of slices [..., N] of native codes with E8M0 scales [...], by the definition,
    flags aside.
    """
    act_m, act_x, _ = fields(NATIVE_FORMAT[act], act_codes)
    weight_m, weight_x, _ = fields(NATIVE_FORMAT[weight], weight_codes)
    product, exponent = act_m * weight_m, act_x + weight_x
    largest = np.where(product != 0, exponent, _NO_PRODUCT).max(axis=-1)
    below = largest[..., None] - exponent
    keep = (product != 0) & (below <= WINDOW)
    shifted = np.where(keep, product << np.clip(WINDOW - below, 0, 62), 0)
    total = shifted.sum(axis=-1)
    scale = np.asarray(act_scale, np.int64) + np.asarray(weight_scale, np.int64) - 2 * SCALE_ONE
    unit = np.where(total != 0, largest - WINDOW + scale, 0)
    return round_significand(np.ldexp(total.astype(np.float64), unit))


def cell(
    act: Native,
    weight: Native,
    act_codes: NDArray,
    weight_codes: NDArray,
    act_scale: NDArray,
    weight_scale: NDArray,
    nan: NDArray,
    psum: NDArray[np.float32],
) -> NDArray[np.float32]:
    """One cell: psum [...] plus the dot product of slices [..., N]; `nan` [...] is either
    operand's flag.
    """
    value = dot(act, weight, act_codes, weight_codes, act_scale, weight_scale)
    with np.errstate(invalid="ignore"):
        total = add_fp32(psum.astype(np.float64), value).astype(np.float32)
    return np.where(nan | np.isnan(total), np.float32(np.nan), total)


class _Operand:
    """One side of the product, recoded and cut: arrays [lines, groups, P, N], flags [lines,
    groups, P].
    """

    def __init__(
        self,
        codes: NDArray,
        scales: NDArray[np.uint8] | None,
        fmt: Format,
        native: Native,
        group: int,
        chains: int,
    ):
        lines, length = codes.shape
        groups = -(-length // group)
        table = recode_table(fmt, native)
        spec = SPECS[fmt]
        recoded = table[np.asarray(codes).astype(np.int64) & ((1 << spec.bits) - 1)]
        m, x, special = fields(NATIVE_FORMAT[native], recoded)
        scale = expand_scales(scales, codes.shape)
        special = special | (scale == SCALE_NAN)
        value = np.ldexp(np.where(special, 0, m).astype(np.float64), x + scale - SCALE_ONE)

        def cut(array: NDArray) -> NDArray:
            padded = np.zeros((lines, groups * group), array.dtype)
            padded[:, :length] = array
            return padded.reshape(lines, groups, chains, group // chains)

        self.values = cut(value)
        self.exponents = cut(x)
        self.nan: NDArray[np.bool_] = np.any(cut(special), axis=-1)
        present = self.values != 0
        high = np.where(present, self.exponents, _NO_PRODUCT).max(axis=-1)
        low = np.where(present, self.exponents, -_NO_PRODUCT).min(axis=-1)
        self.spread = np.where(high > _NO_PRODUCT, high - low, 0)


def _slice_dots(act: _Operand, weight: _Operand, g: int, j: int, columns: slice) -> NDArray:
    """Dots [M, columns] of slice j of group g, flags aside."""
    a, w = act.values[:, g, j], weight.values[columns, g, j]
    total = a @ w.T
    wide = np.flatnonzero(act.spread[:, g, j] + weight.spread[columns, g, j].max() > WINDOW)
    for line in wide:  # some product may lie outside the window: sum by the definition
        product = a[line] * w
        exponent = act.exponents[line, g, j] + weight.exponents[columns, g, j]
        largest = np.where(product != 0, exponent, _NO_PRODUCT).max(axis=1, keepdims=True)
        total[line] = np.where(largest - exponent <= WINDOW, product, 0.0).sum(axis=1)
    return round_significand(total)


def matmul(
    act_codes: NDArray,
    act_scales: NDArray[np.uint8] | None,
    act_fmt: Format,
    weight_codes: NDArray,
    weight_scales: NDArray[np.uint8] | None,
    weight_fmt: Format,
    rows: int,
    init: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """What an array of `rows` rows makes of act_codes [M, K] times weight_codes [N, K]
    transposed: FP32 [M, N].

    Scales are E8M0 codes [M or N, ceil(K / 32)], None for 1.0 throughout (always None for BF16).
    `init`, [M, N] or [N], is what the accumulators start from, +0 if None. The result depends on
    `rows` because K is cut there.
    """
    _check(act_codes, act_scales, act_fmt, weight_codes, weight_scales, weight_fmt)
    if rows < 1:
        raise ValueError(f"rows must be at least 1, not {rows!r}")
    group, chains = group_elements(weight_fmt), slices(act_fmt, weight_fmt)
    if chains * products_per_slice(act_fmt, weight_fmt) != group:
        raise ValueError(f"{act_fmt!r} and {weight_fmt!r} must cut a group into whole slices")
    act_native, weight_native = native_pair(act_fmt, weight_fmt)
    act = _Operand(act_codes, act_scales, act_fmt, act_native, group, chains)
    weight = _Operand(weight_codes, weight_scales, weight_fmt, weight_native, group, chains)
    weight_nan = np.asarray(weight.nan.any(axis=-1))  # a weight's flag holds for its whole group
    lines, count, groups = len(act_codes), len(weight_codes), act.values.shape[1]
    result = np.zeros((lines, count), np.float32)
    if init is not None:
        result[:] = init
    step = max(1, _COLUMNS_AT_ONCE // lines)
    for start in range(0, count, step):
        columns = slice(start, min(start + step, count))
        total = result[:, columns]
        for first in range(0, groups, rows):
            tile = range(first, min(first + rows, groups))
            for j in range(chains):
                psum = np.zeros(total.shape)
                for g in tile:
                    psum = add_fp32(psum, _slice_dots(act, weight, g, j, columns))
                    if act.nan[:, g, j].any() or weight_nan[columns, g].any():
                        psum[act.nan[:, g, j][:, None] | weight_nan[columns, g]] = np.nan
                if len(tile) < rows:
                    psum = psum + 0.0  # rows without weights add +0, which a -0 does not survive
                total = add_ieee(total, psum.astype(np.float32))
        result[:, columns] = total
    return result


def matmul_reference(
    act_codes: NDArray,
    act_scales: NDArray[np.uint8] | None,
    act_fmt: Format,
    weight_codes: NDArray,
    weight_scales: NDArray[np.uint8] | None,
    weight_fmt: Format,
    init: NDArray | None = None,
) -> NDArray[np.float64]:
    """What is meant: the float64 product [M, N] of the operands' exact values, each product
    exact.
    """
    _check(act_codes, act_scales, act_fmt, weight_codes, weight_scales, weight_fmt)
    with np.errstate(invalid="ignore"):
        act = dequantise(act_codes, act_scales, act_fmt)
        weight = dequantise(weight_codes, weight_scales, weight_fmt)
        total = act @ weight.T
    return total if init is None else total + np.asarray(init, np.float64)


def matmul_bound(
    act_codes: NDArray,
    act_scales: NDArray[np.uint8] | None,
    act_fmt: Format,
    weight_codes: NDArray,
    weight_scales: NDArray[np.uint8] | None,
    weight_fmt: Format,
    rows: int,
    init: NDArray | None = None,
) -> NDArray[np.float64]:
    """Largest distance [M, N] of `matmul` from `matmul_reference`, finite results and normal
    operands assumed.

    A product passes through the rounding of its dot, at most `rows` of its chain and one per
    chain in the accumulator, each relative 2^-24 of at most the sum of the magnitudes (or 2^-150
    where a result is subnormal); a product outside the window is below 2^-30 of the largest in
    its slice, and a slice drops at most N - 1.
    """
    with np.errstate(invalid="ignore"):
        act = np.abs(dequantise(act_codes, act_scales, act_fmt))
        weight = np.abs(dequantise(weight_codes, weight_scales, weight_fmt))
        magnitude = act @ weight.T
    if init is not None:
        magnitude = magnitude + np.abs(np.asarray(init, np.float64))
    groups = -(-act_codes.shape[1] // group_elements(weight_fmt))
    chains = slices(act_fmt, weight_fmt) * -(-groups // rows)
    steps = 1 + min(rows, groups) + chains
    relative = (1 + 2.0**-24) ** steps - 1
    dropped = (products_per_slice(act_fmt, weight_fmt) - 1) * 2.0**-30
    # The float64 reference rounds as well: one part in 2^53 per element of K.
    reference = act_codes.shape[1] * 2.0**-52
    roundings = chains * (1 + min(rows, groups))
    return magnitude * (relative + dropped + reference) + roundings * 2.0**-150


def _check(
    act_codes: NDArray,
    act_scales: NDArray[np.uint8] | None,
    act_fmt: Format,
    weight_codes: NDArray,
    weight_scales: NDArray[np.uint8] | None,
    weight_fmt: Format,
) -> None:
    if act_codes.ndim != 2 or weight_codes.ndim != 2 or act_codes.shape[1] != weight_codes.shape[1]:
        raise ValueError(
            f"codes must be [M, K] and [N, K], not {act_codes.shape} and {weight_codes.shape}"
        )
    if 0 in act_codes.shape or 0 in weight_codes.shape:
        raise ValueError("M, N and K must be at least 1")
    for scales, fmt in ((act_scales, act_fmt), (weight_scales, weight_fmt)):
        if scales is not None and not SPECS[fmt].scaled:
            raise ValueError(f"scales must be None for {fmt!r}")
