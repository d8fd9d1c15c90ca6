# SPDX-License-Identifier: Apache-2.0
"""Largest errors of storing in BF16 and in MX formats, and of the matmul array."""

import numpy as np
from numpy.typing import NDArray

from golden.bounds.affine import FLOAT64_ULP, FP32_TINY, Affine, Array, Noise, growth
from golden.formats import (
    BLOCK,
    SCALE_ONE,
    SPECS,
    Format,
    decode,
    group_elements,
    products_per_slice,
    slices,
)
from golden.matmul import WINDOW
from golden.quantise import expand_scales

BF16_UNIT = 2.0**-8  #: relative error of one rounding to BF16, which has 8 significant bits
BF16_LIMIT = (2 - 2.0**-8) * 2.0**127  #: the least magnitude that overflows in BF16


def binade(magnitude: Array) -> Array:
    """floor(log2(magnitude)) as integers; far below every format for 0."""
    return np.where(magnitude == 0, -2000, np.frexp(magnitude)[1].astype(np.int64) - 1)


def bf16_error(x: Affine) -> Array:
    """Half a unit in the last place of the largest magnitude within reach.

    ValueError where BF16 might overflow: no bound holds then.
    """
    magnitude = x.magnitude
    if not np.all(magnitude < BF16_LIMIT):
        raise ValueError(f"x must stay below {BF16_LIMIT!r}, not {magnitude.max()!r}")
    half = np.ldexp(1.0, np.maximum(binade(magnitude), -126) - 8)
    return np.where(magnitude == 0, 0.0, half)


def mx_error(x: Affine, fmt: Format) -> Array:
    """Largest error of x [..., K] stored in an MX format, blocks along K.

    Half a step of the block's scale at the element's magnitude; or, in the top binade of a block,
    the distance to the largest number (elements saturate), which is up to two steps in E4M3. The
    scale is that of the largest magnitude within reach: a smaller scale has smaller steps.
    """
    spec = SPECS[fmt]
    magnitude, length = x.magnitude, x.value.shape[-1]
    blocks = -(-length // BLOCK)
    padded = np.zeros((*magnitude.shape[:-1], blocks * BLOCK))
    padded[..., :length] = magnitude
    top = padded.reshape(*magnitude.shape[:-1], blocks, BLOCK).max(axis=-1)
    scale = np.maximum(binade(top) - spec.max_exponent, -SCALE_ONE)
    scale = np.repeat(scale, BLOCK, axis=-1)[..., :length]
    if fmt is Format.MXINT8:
        step = scale - 6
        largest = spec.max_code / 64
    else:
        step = np.maximum(binade(magnitude), scale + 1 - spec.bias) - spec.mantissa_bits
        significand = (spec.max_code & ((1 << spec.mantissa_bits) - 1)) | (1 << spec.mantissa_bits)
        largest = significand / (1 << spec.mantissa_bits)  # as a multiple of its binade
    lowest = np.maximum(np.abs(x.value) - x.radius, 0.0)
    unit = np.ldexp(1.0, binade(magnitude))
    saturated = np.maximum(magnitude - largest * unit, 0.0)
    below = np.where(binade(lowest) < binade(magnitude), (2 - largest) * unit / 2, 0.0)
    error = np.maximum(np.maximum(np.ldexp(1.0, step - 1), saturated), below)
    return np.where(magnitude == 0, 0.0, error)


def fixed_error(x: Affine, fmt: Format, scales: NDArray[np.uint8]) -> Array:
    """Largest error of x [..., K] stored with given scales in an MX float format.

    The scales are [..., ceil(K / 32)], or [ceil(K / 32)] for all rows.

    Half a step at the largest magnitude within reach, or the distance to the largest number.
    """
    spec = SPECS[fmt]
    if fmt is Format.MXINT8 or not spec.scaled:
        raise ValueError(f"fmt must be an MX float format, not {fmt!r}")
    magnitude = x.magnitude
    each = expand_scales(scales, (*scales.shape[:-1], magnitude.shape[-1])) - SCALE_ONE
    step = np.maximum(binade(magnitude), each + 1 - spec.bias) - spec.mantissa_bits
    largest = np.ldexp(float(decode(fmt, spec.max_code)), each)
    error = np.maximum(np.ldexp(1.0, step - 1), magnitude - largest)
    return np.where(magnitude == 0, 0.0, error)


def store_error(x: Affine, fmt: Format) -> Array:
    """Largest error of storing x [..., K] in BF16 or an MX format."""
    return bf16_error(x) if fmt is Format.BF16 else mx_error(x, fmt)


def stored(x: Affine, noise: Noise, fmt: Format = Format.BF16) -> Affine:
    """x after a store in `fmt`, its roundings new symbols."""
    return x.stored(noise, store_error(x, fmt))


def held(x: Affine, fmt: Format, scales: NDArray[np.uint8] | None, noise: Noise) -> Affine:
    """x [..., D] after it was stored in a cache: with given scales [..., ceil(D / 32)] in MX."""
    if scales is None:
        return stored(x, noise, fmt)
    return x.stored(noise, fixed_error(x, fmt, scales))


def significands(fmt: Format) -> tuple[int, int]:
    """Least and largest magnitude of a significand that is not 0; for BF16, of a normal number."""
    spec = SPECS[fmt]
    if fmt is Format.MXINT8:  # recoded to BF16: normal there
        return 1 << SPECS[Format.BF16].mantissa_bits, (2 << SPECS[Format.BF16].mantissa_bits) - 1
    least = 1 << spec.mantissa_bits if fmt is Format.BF16 else 1
    return least, (2 << spec.mantissa_bits) - 1


def array_error(
    act_fmt: Format, weight_fmt: Format, act: Array, weight: Array, bias: Array | None = None
) -> Array:
    """Largest error [..., N] of the array from the exact product, whatever its number of rows.

    `act` [..., K] and `weight` [N, K] are magnitudes, `bias` [N] that of the initial values. With R
    rows and G groups along K a product is rounded once in its dot, at most min(R, G) times in its
    chain and once per chain in the accumulator: at most 2 + slices * G times, which R = 1 reaches.
    A product that is flushed lies 2^(WINDOW + 1) below the largest of its slice by exponent, and is
    that far below it in value but for the significands; in terms of a subnormal BF16 number it is
    at most 2^-149 of the other operand.
    """
    magnitude = act @ weight.T
    if bias is not None:
        magnitude = magnitude + bias
    length = act.shape[-1]
    groups = -(-length // group_elements(weight_fmt))
    steps = 2 + slices(act_fmt, weight_fmt) * groups
    (act_least, act_most), (weight_least, weight_most) = map(significands, (act_fmt, weight_fmt))
    flushed = (
        (products_per_slice(act_fmt, weight_fmt) - 1)
        * 2.0 ** -(WINDOW + 1)
        * (act_most * weight_most)
        / (act_least * weight_least)
    )
    tiny = length * FP32_TINY * (np.max(act, initial=0.0) + np.max(weight, initial=0.0))
    reference = length * FLOAT64_ULP  # the exact product is a float64 one
    return magnitude * (growth(steps) + flushed + reference) + tiny + steps * FP32_TINY
