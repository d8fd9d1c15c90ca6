# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding with YaRN scaling (arXiv 2309.00071): frequencies, tables, layouts.

Frequencies and angles are rounded to float32 step by step, as every published implementation does.
That is part of the models: at position 131071 a float32 angle has an ulp of 2^-7, so a float64
angle would be a different table. The power alone is taken in float64 and rounded once, because
float32 powers differ between platforms by an ulp.
"""

import math

import numpy as np


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention factor, 0.1 mscale ln(factor) + 1 (1 when nothing is stretched)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def yarn_ramp(
    dim: int,
    theta: float,
    original_positions: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> tuple[float, float]:
    """The two pair indices between which YaRN goes from unscaled to interpolated frequencies.

    They are those that turn `beta_fast` and `beta_slow` times within `original_positions`;
    `truncate` rounds them outwards to integers.
    """

    def pair(turns: float) -> float:
        return dim * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(beta_fast), pair(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def yarn_inv_freq(
    dim: int,
    theta: float,
    factor: float,
    original_positions: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> np.ndarray:
    """The rotation per position of each of the dim / 2 pairs, in radians: float32 [dim / 2]."""
    if dim <= 0 or dim % 2:
        raise ValueError(f"dim must be even and positive, not {dim!r}")
    f32 = np.float32
    exponent = np.arange(0, dim, 2, dtype=f32) / f32(dim)
    period = np.power(np.float64(theta), exponent.astype(np.float64)).astype(f32)
    unscaled = f32(1) / period
    interpolated = f32(1) / (f32(factor) * period)
    low, high = yarn_ramp(dim, theta, original_positions, beta_fast, beta_slow, truncate)
    width = high - low if high != low else 0.001
    ramp = (np.arange(dim // 2, dtype=f32) - f32(low)) / f32(width)
    keep = f32(1) - np.clip(ramp, f32(0), f32(1))
    return interpolated * (f32(1) - keep) + unscaled * keep


def rope_tables(
    positions: np.ndarray, inv_freq: np.ndarray, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), each float64 [S, dim / 2] and multiplied by `scale`, for integer positions [S].

    The angle position * inv_freq is rounded to float32 (see the module), its cosine is not.
    """
    angle = np.asarray(positions, np.float32)[:, None] * np.asarray(inv_freq, np.float32)
    wide = angle.astype(np.float64)
    return np.cos(wide) * scale, np.sin(wide) * scale


def _rotate(
    a: np.ndarray, b: np.ndarray, cos: np.ndarray, sin: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Turn the pairs (a, b), each [S, ..., dim / 2], by the tables [S, dim / 2]."""
    shape = (cos.shape[0], *(1,) * (a.ndim - 2), cos.shape[1])
    c, s = cos.reshape(shape), sin.reshape(shape)
    return a * c - b * s, b * c + a * s


def rope_half_split(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate x [S, ..., dim] whose pair i is (x[i], x[i + dim / 2]): the layout of GPT-OSS."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    return np.concatenate(_rotate(x[..., :half], x[..., half:], cos, sin), axis=-1)


def rope_interleaved(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate x [S, ..., dim] whose pair i is (x[2 i], x[2 i + 1]): that of DeepSeek and Kimi."""
    x = np.asarray(x, np.float64)
    return np.stack(_rotate(x[..., 0::2], x[..., 1::2], cos, sin), axis=-1).reshape(x.shape)
