# SPDX-License-Identifier: Apache-2.0
"""Conversion between FP32 arrays and blocks of the Microscaling formats (OCP MX v1.0, section
6.3).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from golden.formats import (
    BLOCK,
    SCALE_NAN,
    SCALE_ONE,
    SPECS,
    Format,
    FormatSpec,
    decode,
    decode_scale,
    encode,
    to_bf16_codes,
)


def blocks_of(length: int) -> int:
    """Scales of a vector of `length` elements: the last block may be short."""
    return -(-length // BLOCK)


def scale_operand(spec: FormatSpec, scale: int) -> int:
    """`scale` if a command may give it for a result of that format; else ValueError."""
    if not spec.scaled:
        raise ValueError(f"fixed_scale must be None for {spec.name}, not {scale!r}")
    if not 0 <= scale < SCALE_NAN:
        raise ValueError(f"fixed_scale must be an E8M0 code from 0 to 254, not {scale!r}")
    return scale


def quantise_fixed(values: ArrayLike, fmt: Format, scale: int) -> tuple[NDArray, NDArray[np.uint8]]:
    """Codes [..., K] of FP32 values [..., K] / 2^(scale - 127), and `scale` [..., ceil(K / 32)].

    Elements round to nearest even and saturate, infinity included; each stands for itself. NaN
    gives the format's positive quiet NaN (E4M3 0x7F, E5M2 0x7E), in a format that has none the
    largest positive code.
    """
    spec = SPECS[fmt]
    exponent = scale_operand(spec, scale) - SCALE_ONE
    value = np.asarray(values, np.float32).astype(np.float64)
    stand_in = np.nan if spec.has_nan else np.inf
    codes = encode(fmt, np.ldexp(np.where(np.isnan(value), stand_in, value), -exponent))
    return codes, np.full((*value.shape[:-1], blocks_of(value.shape[-1])), scale, np.uint8)


def quantise(
    values: ArrayLike, fmt: Format, fixed_scale: int | None = None
) -> tuple[NDArray, NDArray[np.uint8] | None]:
    """Codes [..., K] and E8M0 scales [..., ceil(K / 32)] of FP32 values [..., K].

    The shared exponent is floor(log2(max |x|)) less the element format's largest exponent,
    clamped to -127 .. 127; elements round to nearest even and saturate. A block of zeros gets
    scale code 0, a block that holds NaN or infinity 0xFF, both with all codes 0. BF16 has no
    scales: the second result is None. With `fixed_scale`: see `quantise_fixed`.
    """
    if fixed_scale is not None:
        return quantise_fixed(values, fmt, fixed_scale)
    value = np.asarray(values, np.float32)
    if fmt is Format.BF16:
        return to_bf16_codes(value), None
    spec = SPECS[fmt]
    if not spec.scaled:
        raise ValueError(f"fmt must be an MX format or BF16, not {fmt!r}")
    length = value.shape[-1]
    blocks = blocks_of(length)
    padded = np.zeros((*value.shape[:-1], blocks * BLOCK), np.float64)
    padded[..., :length] = value
    padded = padded.reshape(*value.shape[:-1], blocks, BLOCK)
    largest = np.abs(padded).max(axis=-1)  # NaN if the block holds one
    bad = ~np.isfinite(largest)
    zero = largest == 0
    exponent = np.frexp(np.where(bad, 1.0, largest))[1].astype(np.int64) - 1 - spec.max_exponent
    exponent = np.clip(exponent, -SCALE_ONE, SCALE_ONE)
    blank = (bad | zero)[..., None]
    codes = encode(fmt, np.ldexp(np.where(blank, 0.0, padded), -exponent[..., None]))
    scales = np.where(bad, SCALE_NAN, np.where(zero, 0, exponent + SCALE_ONE)).astype(np.uint8)
    return codes.reshape(*value.shape[:-1], blocks * BLOCK)[..., :length], scales


def expand_scales(scales: NDArray[np.uint8] | None, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """E8M0 codes per element [..., K] from codes per block, 127 throughout when there are none."""
    if scales is None:
        return np.full(shape, SCALE_ONE, np.int64)
    if scales.shape != (*shape[:-1], blocks_of(shape[-1])):
        raise ValueError(f"scales must be one per block of {shape}, not {scales.shape}")
    return np.repeat(scales.astype(np.int64), BLOCK, axis=-1)[..., : shape[-1]]


def dequantise(
    codes: NDArray, scales: NDArray[np.uint8] | None, fmt: Format
) -> NDArray[np.float64]:
    """Values [..., K], exact, of codes [..., K] and scales [..., ceil(K / 32)] (None: all 1.0)."""
    return decode(fmt, codes) * decode_scale(expand_scales(scales, codes.shape))
