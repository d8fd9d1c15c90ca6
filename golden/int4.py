# SPDX-License-Identifier: Apache-2.0
"""Weights in Kimi's INT4 format, and what they lose on the way to a format of the array.

An INT4 weight is q * scale with q from -8 to 7 and one BF16 scale per 32 weights along the input
dimension. Eight of them lie in a 32-bit word as q + 8, the first in the lowest four bits. The array
has no scales but powers of two, so a conversion rounds q * scale, which is exact in FP32, to one of
its formats: nothing is free, for the scale's eight significant bits must go into the elements.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from golden.formats import BLOCK, Format
from golden.fp32 import Float32
from golden.quantise import dequantise, quantise

PER_WORD = 8
ZERO = 8  #: the nibble of q = 0
TARGETS = (Format.MXFP4, Format.MXFP6_E2M3, Format.MXFP8_E4M3, Format.MXINT8, Format.BF16)


def unpack(words: ArrayLike, length: int) -> NDArray[np.int8]:
    """q [..., length] of words [..., ceil(length / 8)] (int32 or uint32)."""
    packed = np.asarray(words).astype(np.int64) & 0xFFFF_FFFF
    if packed.shape[-1] != -(-length // PER_WORD):
        raise ValueError(f"words must be {-(-length // PER_WORD)} per row, not {packed.shape[-1]}")
    nibbles = packed[..., None] >> (4 * np.arange(PER_WORD)) & 15
    return (nibbles.reshape(*packed.shape[:-1], -1)[..., :length] - ZERO).astype(np.int8)


def pack(q: ArrayLike) -> NDArray[np.int32]:
    """Words [..., ceil(K / 8)] of q [..., K]; missing ones of the last word are q = 0."""
    given = np.asarray(q, np.int64)
    if given.size and not -8 <= given.min() <= given.max() <= 7:
        raise ValueError(f"q must be from -8 to 7, not {given.min()} to {given.max()}")
    words = -(-given.shape[-1] // PER_WORD)
    nibbles = np.full((*given.shape[:-1], words * PER_WORD), ZERO, np.int64)
    nibbles[..., : given.shape[-1]] = given + ZERO
    parts = nibbles.reshape(*given.shape[:-1], words, PER_WORD) << (4 * np.arange(PER_WORD))
    return parts.sum(axis=-1).astype(np.uint32).view(np.int32)


def values_of(q: ArrayLike, scales: ArrayLike) -> Float32:
    """q * scale [..., K], exact: q [..., K] and BF16 values [..., ceil(K / 32)]."""
    given, factors = np.asarray(q, np.float32), np.asarray(scales, np.float32)
    if factors.shape != (*given.shape[:-1], -(-given.shape[-1] // BLOCK)):
        raise ValueError(f"scales must be one per 32 of {given.shape}, not {factors.shape}")
    return given * np.repeat(factors, BLOCK, axis=-1)[..., : given.shape[-1]]


def round_to_int4(weights: ArrayLike) -> tuple[NDArray[np.int8], Float32]:
    """(q, BF16 scales) of real weights [..., K]: scale = max |w| / 7.5 per 32, as in the vector."""
    w = np.asarray(weights, np.float32)
    blocks = -(-w.shape[-1] // BLOCK)
    padded = np.zeros((*w.shape[:-1], blocks * BLOCK), np.float32)
    padded[..., : w.shape[-1]] = w
    largest = np.abs(padded).reshape(*w.shape[:-1], blocks, BLOCK).max(axis=-1)
    codes, _ = quantise(np.where(largest == 0, 1, largest) / np.float32(7.5), Format.BF16)
    scales = dequantise(codes, None, Format.BF16).astype(np.float32)
    each = np.repeat(scales, BLOCK, axis=-1)[..., : w.shape[-1]]
    return np.clip(np.rint(w / each), -8, 7).astype(np.int8), scales


def convert(
    q: ArrayLike, scales: ArrayLike, fmt: Format
) -> tuple[NDArray, NDArray[np.uint8] | None]:
    """INT4 weights in a format of the array: codes [..., K], E8M0 scales as of `quantise`."""
    return quantise(values_of(q, scales), fmt)


def loss(q: ArrayLike, scales: ArrayLike, fmt: Format) -> tuple[float, float]:
    """(root mean square error, largest error) of `convert`, the first relative to the root mean
    square of the weights, the second to the largest weight of its block of 32.
    """
    exact = values_of(q, scales).astype(np.float64)
    error = dequantise(*convert(q, scales, fmt), fmt) - exact
    length = exact.shape[-1]
    padded = np.zeros((2, *exact.shape[:-1], -(-length // BLOCK) * BLOCK))
    padded[0, ..., :length], padded[1, ..., :length] = np.abs(error), np.abs(exact)
    most, top = padded.reshape(2, *exact.shape[:-1], -1, BLOCK).max(axis=-1)
    share = np.where(top == 0, 0.0, most / np.where(top == 0, 1.0, top))
    size = float(np.sqrt(np.mean(exact**2))) or 1.0
    return float(np.sqrt(np.mean(error**2))) / size, float(share.max())
