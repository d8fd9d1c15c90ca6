# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (DeepSeek, Kimi) in float64, naive and absorbed.

The cache holds one normed latent and one rotated key part per token, shared by all heads. Naive
expands them to keys and values per head; absorbed moves that expansion to the queries and the
output, so that all heads attend to the cache as it is (one KV head of kv_lora + rope elements,
whose first kv_lora are the values). Both give the same result.
"""

from dataclasses import dataclass

import numpy as np

from golden.reference.attention import attention_core, visible_keys
from golden.reference.linear import linear
from golden.reference.norm import rms_norm
from golden.reference.rope import rope_interleaved


@dataclass(frozen=True)
class MlaWeights:
    """Projections [out, in] and the two inner norms; no biases."""

    q_a: np.ndarray  # [q_lora, hidden]
    q_a_norm: np.ndarray  # [q_lora]
    q_b: np.ndarray  # [heads * (nope + rope), q_lora], per head nope rows, then rope rows
    kv_a: np.ndarray  # [kv_lora + rope, hidden]
    kv_a_norm: np.ndarray  # [kv_lora]
    kv_b: np.ndarray  # [heads * (nope + v), kv_lora], per head nope rows, then v rows
    o: np.ndarray  # [hidden, heads * v]


@dataclass(frozen=True)
class MlaCache:
    """Normed latents [T, kv_lora], rotated key parts [T, rope] and their positions [T]."""

    latent: np.ndarray
    k_rope: np.ndarray
    positions: np.ndarray

    @classmethod
    def empty(cls, kv_lora: int, rope: int) -> "MlaCache":
        """A cache without tokens."""
        return cls(np.zeros((0, kv_lora)), np.zeros((0, rope)), np.zeros(0, np.int64))

    def append(self, latent: np.ndarray, k_rope: np.ndarray, positions: np.ndarray) -> "MlaCache":
        """A new cache with these tokens behind the old ones."""
        return MlaCache(
            np.concatenate([self.latent, latent]),
            np.concatenate([self.k_rope, k_rope]),
            np.concatenate([self.positions, positions]),
        )


def mla_queries(
    x: np.ndarray,
    weights: MlaWeights,
    cos: np.ndarray,
    sin: np.ndarray,
    *,
    heads: int,
    eps: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Queries of x [S, hidden]: (nope part [S, heads, nope], rotated part [S, heads, rope])."""
    compressed = rms_norm(linear(x, weights.q_a), weights.q_a_norm, eps)
    q = linear(compressed, weights.q_b).reshape(len(x), heads, -1)
    nope = q.shape[-1] - 2 * cos.shape[-1]
    return q[..., :nope], rope_interleaved(q[..., nope:], cos, sin)


def mla_latents(
    x: np.ndarray, weights: MlaWeights, cos: np.ndarray, sin: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """What the cache stores of x [S, hidden]: (latent [S, kv_lora], k_rope [S, rope])."""
    kv_lora = len(weights.kv_a_norm)
    both = linear(x, weights.kv_a)
    latent = rms_norm(both[:, :kv_lora], weights.kv_a_norm, eps)
    return latent, rope_interleaved(both[:, kv_lora:], cos, sin)


def _expansion(weights: MlaWeights, heads: int, nope: int) -> tuple[np.ndarray, np.ndarray]:
    """kv_b by head: latent to keys [heads, nope, kv_lora], latent to values [heads, v, kv_lora]."""
    per_head = np.asarray(weights.kv_b, np.float64).reshape(heads, -1, weights.kv_b.shape[-1])
    return per_head[:, :nope], per_head[:, nope:]


def mla_core_naive(
    q_nope: np.ndarray,
    q_rope: np.ndarray,
    weights: MlaWeights,
    cache: MlaCache,
    allowed: np.ndarray,
    scale: float,
) -> np.ndarray:
    """Attention per head on expanded keys and values: [S, heads, v]; allowed: bool [S, T]."""
    heads, nope = q_nope.shape[1:]
    to_key, to_value = _expansion(weights, heads, nope)
    k_nope = np.einsum("tl,hdl->thd", cache.latent, to_key, optimize=True)
    v = np.einsum("tl,hdl->thd", cache.latent, to_value, optimize=True)
    shared = np.repeat(cache.k_rope[:, None, :], heads, axis=1)
    q = np.concatenate([q_nope, q_rope], axis=-1)
    k = np.concatenate([k_nope, shared], axis=-1)
    return attention_core(q, k, v, allowed, scale)


def mla_core_absorbed(
    q_nope: np.ndarray,
    q_rope: np.ndarray,
    weights: MlaWeights,
    cache: MlaCache,
    allowed: np.ndarray,
    scale: float,
) -> np.ndarray:
    """The same on the cache as stored: scores over kv_lora + rope, values of kv_lora."""
    heads, nope = q_nope.shape[1:]
    to_key, to_value = _expansion(weights, heads, nope)
    q_latent = np.einsum("shd,hdl->shl", q_nope, to_key, optimize=True)
    q = np.concatenate([q_latent, q_rope], axis=-1)
    k = np.concatenate([cache.latent, cache.k_rope], axis=-1)[:, None, :]
    mixed = attention_core(q, k, cache.latent[:, None, :], allowed, scale)
    return np.einsum("shl,hdl->shd", mixed, to_value, optimize=True)


def mla_attention(
    x: np.ndarray,
    weights: MlaWeights,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    cache: MlaCache,
    *,
    heads: int,
    scale: float,
    eps: float,
    absorbed: bool = True,
) -> tuple[np.ndarray, MlaCache]:
    """Attention of the new tokens x [S, hidden] at `positions` [S] on the cache and themselves.

    cos, sin: tables [S, rope / 2] of these positions; scale: of the softmax, with YaRN's square
    included; eps: of the two inner norms. Prefill starts from an empty cache, decode passes one
    token at a time. Returns (output [S, hidden], the cache with the new tokens).
    """
    q_nope, q_rope = mla_queries(x, weights, cos, sin, heads=heads, eps=eps)
    cache = cache.append(*mla_latents(x, weights, cos, sin, eps), positions)
    allowed = visible_keys(positions, cache.positions)
    attend = mla_core_absorbed if absorbed else mla_core_naive
    core = attend(q_nope, q_rope, weights, cache, allowed, scale)
    return linear(core.reshape(len(x), -1), weights.o), cache
