# SPDX-License-Identifier: Apache-2.0
"""Reference and error bound of `golden.kernels.layer`: tokens decoded from an empty cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from golden.bounds.affine import Affine, Array, Noise
from golden.bounds.moe import gate_shares, times, weighted_experts
from golden.bounds.roundings import held, stored
from golden.bounds.softmax import CachedTokens, mixed, scores_of
from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.attention import window_slots
from golden.kernels.layer import LayerShape, LayerWeights, rope_rows
from golden.models import GateSpec
from golden.quantise import blocks_of


@dataclass(frozen=True)
class TokenCache:
    """A token's stored key and value [kv_heads, D], with symbols of its own."""

    key: Affine
    value: Affine


def norm(x: Affine, weight: Float32, eps: float) -> Affine:
    """RMSNorm of x [hidden] in FP32, before it is stored.

    A sum of n squares takes at most n - 1 additions; 1 / n and eps are rounded.
    """
    n = len(x.value)
    squares = x.product(x)
    mean = Affine(squares.value.mean(), squares.terms.mean(axis=1), squares.rest.mean())
    biased = (mean.rounded(n + 2) + Affine.exact(eps)).rounded(2)
    # No computed mean is below 0.
    least = max(float(biased.value - biased.radius), eps / 2)
    if least <= 0:
        raise ValueError(f"eps must be above 0 for a row that may be all zeros, not {eps!r}")
    mid = float(biased.value)
    inverse = biased.function(
        np.asarray(mid**-0.5), np.asarray(-0.5 * mid**-1.5), np.asarray(0.75 * least**-2.5)
    )
    return x.product(inverse.rounded(2)).rounded().times(weight).rounded()


def rotate(x: Affine, cos: Array, sin: Array, interleaved: bool = False) -> Affine:
    """RoPE of x [..., D] by FP32 tables [D]: two products and an addition, rounded.

    The pair of element i is i + D / 2 modulo D, or i XOR 1 if `interleaved`.
    """
    dim = x.value.shape[-1]
    pairs = np.arange(dim) ^ 1 if interleaved else np.roll(np.arange(dim), dim // 2)
    turned = x[..., pairs].times(sin).rounded()
    return (x.times(cos).rounded() + turned).rounded()


def stack(parts: Sequence[Affine]) -> Affine:
    """Forms [D] of one token's symbols, one behind the other."""
    count = max(len(part.terms) for part in parts)
    terms = [
        np.concatenate([part.terms, np.zeros((count - len(part.terms), *part.value.shape))])
        for part in parts
    ]
    return Affine(
        np.concatenate([part.value for part in parts]),
        np.concatenate(terms, axis=1),
        np.concatenate([part.rest for part in parts]),
    )


def layer_bound(
    shape: LayerShape,
    weights: LayerWeights,
    xs: Float32,
    cos: NDArray,
    sin: NDArray,
    ids: NDArray[np.int64] | Sequence[NDArray[np.int64]],
) -> tuple[Array, Array]:
    """(float64 residual stream [T, hidden], largest error of the kernel's results [T, hidden]).

    Tokens xs [T, hidden] with RoPE tables [T, D / 2] (as rounded to FP32) are decoded from an empty
    cache. `weights` are exact as quantised, all else is unrounded in the reference. `ids` holds the
    kernel's experts [top_k] of each token, checked as in `moe_bound`. The bound holds for any
    machine and chunk size.
    """
    lengths = len(xs), len(cos), len(sin), len(ids)
    if len(set(lengths)) != 1:
        raise ValueError(f"xs, cos, sin and ids must be of equal length, not {lengths}")
    cache: list[TokenCache] = []
    reference, bound = [], []
    for t, x in enumerate(np.asarray(xs, np.float64)):
        noise = Noise()
        cosine, sine = (np.asarray(row, np.float64) for row in rope_rows(cos[t], sin[t]))
        attended = attend(shape, weights, cache, x, cosine, sine, noise)
        projected = times(weights.output, stored(attended, noise))
        middle = (Affine.exact(x) + projected).rounded()
        normed = stored(norm(middle, weights.moe_norm, shape.eps), noise)
        logits = times(weights.router, normed)
        chosen = np.asarray(ids[t])
        shares = gate_shares(logits, chosen, GateSpec(len(logits.value), len(chosen), "softmax"))
        out = weighted_experts(middle, normed, Format.BF16, weights.experts, chosen, shares)
        reference.append(out.value)
        bound.append(out.bound)
    return np.stack(reference), np.stack(bound)


def attend(
    shape: LayerShape,
    weights: LayerWeights,
    cache: list[TokenCache],
    x: Array,
    cosine: Array,
    sine: Array,
    noise: Noise,
) -> Affine:
    """Attention's output [heads * D], not yet stored, of the token x [hidden].

    `cache` gets the token's key and value.
    """
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    normed = stored(norm(Affine.exact(x), weights.attention_norm, shape.eps), noise)
    qkv = times(weights.qkv, normed).reshape(heads + 2 * kv_heads, dim)
    rotated = rotate(qkv[: heads + kv_heads], cosine, sine)
    # Keys and values first: their symbols then are few, and go into the cache with them.
    blocks = blocks_of(dim)
    key_scales, value_scales = (
        (None, None)
        if weights.kv_scales is None
        else (np.repeat(part[:, None], blocks, axis=1) for part in weights.kv_scales)
    )
    key = held(rotated[heads:], shape.kv, key_scales, noise)
    value = held(qkv[heads + kv_heads :], shape.kv, value_scales, noise)
    cache.append(TokenCache(key, value))
    queries = stored(rotated[:heads], noise)

    slots = len(window_slots(len(cache), shape.ring, shape.window))
    seen = cache[-slots if shape.window is None else -min(shape.window, len(cache)) :]
    group, outputs = heads // kv_heads, []
    for g in range(kv_heads):
        tokens = CachedTokens(
            [one.key[g] for one in seen], [one.value[g] for one in seen], noise, shape.kv
        )
        for head in range(g * group, (g + 1) * group):
            scores = scores_of(queries[head], tokens, noise).times(dim**-0.5)
            outputs.append(mixed(scores, float(weights.sinks[head]), tokens, slots, noise))
    return stack(outputs)
