# SPDX-License-Identifier: Apache-2.0
"""Reference and error bound of `golden.kernels.mla`: tokens in turn from an empty cache."""

import numpy as np
from numpy.typing import NDArray

from golden.bounds.affine import Affine, Array, Noise
from golden.bounds.layer import norm, rotate, stack
from golden.bounds.moe import times
from golden.bounds.roundings import held, stored
from golden.bounds.softmax import CachedTokens, mixed, scores_of
from golden.fp32 import Float32
from golden.kernels.mla import MlaCache, MlaMatrices, MlaShape, rope_rows


def mla_bound(
    shape: MlaShape,
    weights: MlaMatrices,
    cache: MlaCache,
    xs: Float32,
    cos: NDArray,
    sin: NDArray,
    first: int = 0,
) -> tuple[Array, Array]:
    """(float64 attention [T, hidden], largest error of the kernel's results [T, hidden]).

    Normed activations xs [T, hidden] with tables [T, rope / 2] (as rounded to FP32). `weights` are
    exact as quantised, all else is unrounded in the reference; of `cache` only its format and
    scales matter. The bound holds for any machine, any chunks, and decode as well as prefill.
    Tokens before `first` are only attended to: results are [T - first, hidden].
    """
    if not 0 <= first < len(xs):
        raise ValueError(f"first must be 0 to {len(xs) - 1}, not {first!r}")
    tokens: list[Affine] = []
    reference, bound = [], []
    tables = zip(*rope_rows(cos, sin), strict=True)
    for x, table in zip(np.asarray(xs, np.float64), tables, strict=True):
        noise = Noise()
        given = stored(Affine.exact(x), noise)
        tokens.append(key_form(shape, weights, cache, given, *table, noise))
        if len(tokens) <= first:
            continue
        out = attend(shape, weights, cache, given, tokens, *table, noise)
        projected = times(weights.output, out)
        reference.append(projected.value)
        bound.append(projected.bound)
    return np.stack(reference), np.stack(bound)


def key_form(
    shape: MlaShape,
    weights: MlaMatrices,
    cache: MlaCache,
    x: Affine,
    cosine: NDArray,
    sine: NDArray,
    noise: Noise,
) -> Affine:
    """What the cache holds [kv_lora + rope] of stored activations x [hidden]."""
    kv_a = times(weights.kv_a, x)
    latent = norm(kv_a[: shape.kv_lora], weights.kv_a_norm, shape.eps)
    rope = rotate(
        kv_a[shape.kv_lora :],
        np.asarray(cosine, np.float64),
        np.asarray(sine, np.float64),
        interleaved=True,
    )
    return held(stack([latent, rope]), cache.keys.fmt, cache.keys.scales, noise)


def attend(
    shape: MlaShape,
    weights: MlaMatrices,
    cache: MlaCache,
    x: Affine,
    tokens: list[Affine],
    cosine: NDArray,
    sine: NDArray,
    noise: Noise,
) -> Affine:
    """Attention's stored output [heads * v] of stored activations x on cached `tokens`."""
    compressed = stored(norm(times(weights.q_a, x), weights.q_a_norm, shape.eps), noise)
    nope = stored(times(weights.q_nope, compressed), noise).reshape(shape.heads, shape.nope)
    rope = times(weights.q_rope, compressed).reshape(shape.heads, shape.rope)
    rotated = rotate(
        rope, np.asarray(cosine, np.float64), np.asarray(sine, np.float64), interleaved=True
    )
    latents = [token[: shape.kv_lora] for token in tokens]
    kept = CachedTokens(tokens, latents, noise, cache.keys.fmt)
    outputs = []
    for h in range(shape.heads):
        query = stored(stack([times(weights.absorb[h], nope[h]), rotated[h]]), noise)
        scores = scores_of(query, kept, noise).times(shape.scale)
        out = stored(mixed(scores, -np.inf, kept, len(tokens), noise), noise)
        outputs.append(stored(times(weights.expand[h], out), noise))
    return stack(outputs)
