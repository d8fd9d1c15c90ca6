# SPDX-License-Identifier: Apache-2.0
"""Softmax attention in float64: masks, sinks, and grouped-query attention (GPT-OSS).

Prefill and decode are one function: it appends the new tokens to a cache and attends to what the
cache holds.
"""

from dataclasses import dataclass

import numpy as np

from golden.reference.linear import linear
from golden.reference.rope import rope_half_split


def visible_keys(
    q_positions: np.ndarray, k_positions: np.ndarray, window: int | None = None
) -> np.ndarray:
    """Which keys each query sees: bool [S, T].

    Causal, itself included; with a window of n, a query at position i sees the n positions i - n +
    1 .. i.
    """
    distance = np.asarray(q_positions)[:, None] - np.asarray(k_positions)[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def softmax_with_sinks(
    scores: np.ndarray, allowed: np.ndarray, sinks: np.ndarray | None = None
) -> np.ndarray:
    """Softmax over the last axis of scores [S, heads, T], over the allowed [S, T] keys only.

    A sink [heads] is one more logit per head that takes its share and contributes no value, so rows
    add up to less than 1. A row that sees no key is all zeros, with or without a sink.
    """
    scores = np.where(allowed[:, None, :], np.asarray(scores, np.float64), -np.inf)
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    if sinks is None:
        sink = np.full_like(top, -np.inf)
    else:
        sink = np.broadcast_to(np.asarray(sinks, np.float64)[:, None], top.shape)
    top = np.maximum(top, sink)
    top = np.where(np.isneginf(top), 0.0, top)
    terms = np.exp(scores - top)
    total = terms.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    return np.divide(terms, total, out=np.zeros_like(terms), where=total != 0)


def _only_seen(tokens: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Keys or values [T, ...] with zeros where no query of allowed [S, T] looks."""
    seen = np.any(allowed, axis=0).reshape(-1, *(1,) * (tokens.ndim - 1))
    return np.where(seen, np.asarray(tokens, np.float64), 0.0)


def attention_probs(
    q: np.ndarray,
    k: np.ndarray,
    allowed: np.ndarray,
    scale: float,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention weights [S, heads, T] of q [S, heads, D] on k [T, kv_heads, D].

    Query head h reads KV head h // (heads / kv_heads). A key that no query sees may hold anything,
    NaN included.
    """
    queries, heads, dim = q.shape
    kv_heads = k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads {kv_heads}, not {heads}")
    grouped = np.asarray(q, np.float64).reshape(queries, kv_heads, heads // kv_heads, dim)
    keys = _only_seen(k, allowed)
    scores = np.einsum("sghd,tgd->sght", grouped, keys, optimize=True) * scale
    return softmax_with_sinks(scores.reshape(queries, heads, -1), allowed, sinks)


def attention_core(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    allowed: np.ndarray,
    scale: float,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """softmax(q k^T scale) v: [S, heads, Dv] of q [S, heads, D].

    k: [T, kv_heads, D]; v: [T, kv_heads, Dv]; allowed: bool [S, T] (`visible_keys`); sinks:
    [heads], not scaled. A query that sees nothing gives zeros.
    """
    probs = attention_probs(q, k, allowed, scale, sinks)
    queries, heads, keys = probs.shape
    kv_heads, v_dim = v.shape[1:]
    values = _only_seen(v, allowed)
    grouped = probs.reshape(queries, kv_heads, heads // kv_heads, keys)
    core = np.einsum("sght,tgd->sghd", grouped, values, optimize=True)
    return core.reshape(queries, heads, v_dim)


@dataclass(frozen=True)
class KvCache:
    """Rotated keys [T, kv_heads, D], values [T, kv_heads, Dv] and their positions [T]."""

    keys: np.ndarray
    values: np.ndarray
    positions: np.ndarray

    @classmethod
    def empty(cls, kv_heads: int, head_dim: int, v_dim: int | None = None) -> "KvCache":
        """A cache without tokens."""
        value_shape = (0, kv_heads, head_dim if v_dim is None else v_dim)
        return cls(np.zeros((0, kv_heads, head_dim)), np.zeros(value_shape), np.zeros(0, np.int64))

    def append(self, keys: np.ndarray, values: np.ndarray, positions: np.ndarray) -> "KvCache":
        """A new cache with these tokens behind the old ones."""
        return KvCache(
            np.concatenate([self.keys, keys]),
            np.concatenate([self.values, values]),
            np.concatenate([self.positions, positions]),
        )

    def last(self, tokens: int) -> "KvCache":
        """The newest `tokens` of this cache: what a ring buffer of that size still holds."""
        start = max(len(self.positions) - tokens, 0)
        return KvCache(self.keys[start:], self.values[start:], self.positions[start:])


@dataclass(frozen=True)
class GqaWeights:
    """Projections [out, in] with their biases [out], and one sink logit per query head."""

    q: np.ndarray  # [heads * D, hidden]
    q_bias: np.ndarray
    k: np.ndarray  # [kv_heads * D, hidden]
    k_bias: np.ndarray
    v: np.ndarray  # [kv_heads * D, hidden]
    v_bias: np.ndarray
    o: np.ndarray  # [hidden, heads * D]
    o_bias: np.ndarray
    sinks: np.ndarray  # [heads]


def gqa_project(
    x: np.ndarray, weights: GqaWeights, head_dim: int, cos: np.ndarray, sin: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rotated q [S, heads, D], rotated k and plain v [S, kv_heads, D] of x [S, hidden]."""
    q = linear(x, weights.q, weights.q_bias).reshape(len(x), -1, head_dim)
    k = linear(x, weights.k, weights.k_bias).reshape(len(x), -1, head_dim)
    v = linear(x, weights.v, weights.v_bias).reshape(len(x), -1, head_dim)
    return rope_half_split(q, cos, sin), rope_half_split(k, cos, sin), v


def gqa_attention(
    x: np.ndarray,
    weights: GqaWeights,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    cache: KvCache,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[np.ndarray, KvCache]:
    """Attention of the new tokens x [S, hidden] at `positions` [S] on the cache and themselves.

    cos, sin: tables [S, D / 2] of these positions. Prefill starts from an empty cache, decode
    passes one token at a time. Returns (output [S, hidden], the cache with the new tokens).
    """
    head_dim = cache.keys.shape[-1]
    q, k, v = gqa_project(x, weights, head_dim, cos, sin)
    cache = cache.append(k, v, positions)
    allowed = visible_keys(positions, cache.positions, window)
    core = attention_core(q, cache.keys, cache.values, allowed, scale, weights.sinks)
    return linear(core.reshape(len(x), -1), weights.o, weights.o_bias), cache
