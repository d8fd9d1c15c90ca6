# SPDX-License-Identifier: Apache-2.0
"""Blocks of a GPT-OSS-shaped decoder and their gradients, in numpy.

Every function returns (result, backward): `backward` takes the gradient of the loss with respect
to the result and returns those with respect to the arguments that are named in its docstring. The
precision is that of the arguments: float32 in training, float64 in the tests. What the blocks
compute is defined by `golden.reference`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Backward = Callable[[Array], Any]

ALPHA = 1.702
LIMIT = 7.0


def linear(x: Array, weight: Array, bias: Array) -> tuple[Array, Backward]:
    """x [N, in] times weight [out, in] transposed plus bias [out]; backward: (x, weight, bias)."""

    def backward(grad: Array) -> tuple[Array, Array, Array]:
        return grad @ weight, grad.T @ x, grad.sum(axis=0)

    return x @ weight.T + bias, backward


def rms_norm(x: Array, weight: Array, eps: float) -> tuple[Array, Backward]:
    """RMSNorm of rows x [N, H]; backward: (x, weight)."""
    width = x.shape[1]
    inverse = 1 / np.sqrt(np.einsum("nh,nh->n", x, x) / width + eps)[:, None]
    normed = x * inverse

    def backward(grad: Array) -> tuple[Array, Array]:
        inner = grad * weight
        along = np.einsum("nh,nh->n", inner, normed)[:, None] / width
        return (inner - normed * along) * inverse, np.einsum("nh,nh->h", grad, normed)

    return normed * weight, backward


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Half-split RoPE of x [B, heads, T, D] by tables [T, D / 2]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(
    qkv: Array,
    sinks: Array,
    cos: Array,
    sin: Array,
    allowed: NDArray[np.bool_],
    kv_heads: int,
    scale: float,
) -> tuple[Array, Backward]:
    """Causal attention with sinks: qkv [B, T, (heads + 2 kv_heads) D] to [B, T, heads D].

    `allowed` [T, T] says which keys a query sees. backward: (qkv, sinks).
    """
    batch, length, width = qkv.shape
    heads = len(sinks)
    dim = width // (heads + 2 * kv_heads)
    group = heads // kv_heads
    split = np.ascontiguousarray(qkv.reshape(batch, length, -1, dim).transpose(0, 2, 1, 3))
    turned = rotate(split[:, : heads + kv_heads], cos, sin)
    # The queries of a KV head's group are the rows of one matrix.
    q = (turned[:, :heads] * qkv.dtype.type(scale)).reshape(batch, kv_heads, group * length, dim)
    k, v = np.ascontiguousarray(turned[:, heads:]), split[:, heads + kv_heads :]
    scores = (q @ k.swapaxes(2, 3)).reshape(batch, heads, length, length)
    scores += np.where(allowed, 0, -np.inf).astype(qkv.dtype)
    column = sinks[:, None, None]
    top = np.maximum(scores.max(axis=-1, keepdims=True), column)
    scores -= top
    probs = np.exp(scores, out=scores)
    rest = np.exp(column - top)
    total = probs.sum(axis=-1, keepdims=True) + rest
    probs /= total
    rest /= total
    grouped = probs.reshape(batch, kv_heads, group * length, length)
    out = (grouped @ v).reshape(batch, heads, length, dim)

    def backward(grad: Array) -> tuple[Array, Array]:
        d_out = np.ascontiguousarray(grad.reshape(batch, length, heads, dim).transpose(0, 2, 1, 3))
        flat = d_out.reshape(batch, kv_heads, group * length, dim)
        d_v = grouped.swapaxes(2, 3) @ flat
        # The sum over keys of p dp is that over dimensions of out d_out.
        mean = np.einsum("bhtd,bhtd->bht", out, d_out)[..., None]
        d_scores = (flat @ v.swapaxes(2, 3)).reshape(probs.shape)
        d_scores -= mean
        d_scores *= probs
        d_sinks = -(rest * mean).sum(axis=(0, 2, 3))
        d_scores = d_scores.reshape(grouped.shape)
        d_q = (d_scores @ k).reshape(batch, heads, length, dim) * qkv.dtype.type(scale)
        d_k = d_scores.swapaxes(2, 3) @ q
        d_turned = rotate(np.concatenate([d_q, d_k], axis=1), cos, -sin)
        d_split = np.concatenate([d_turned, d_v], axis=1)
        return d_split.transpose(0, 2, 1, 3).reshape(batch, length, width), d_sinks

    return out.transpose(0, 2, 1, 3).reshape(batch, length, heads * dim), backward


def clamped_swiglu(both: Array) -> tuple[Array, Backward]:
    """GPT-OSS's activation of interleaved rows [N, 2 I] (even gate, odd up); backward: both."""
    raw_gate, raw_up = both[:, 0::2], both[:, 1::2]
    gate, up = np.minimum(raw_gate, LIMIT), np.clip(raw_up, -LIMIT, LIMIT)
    share = 1 / (1 + np.exp(-ALPHA * gate))
    gated = gate * share

    def backward(grad: Array) -> Array:
        result = np.empty_like(both)
        slope = share * (1 + ALPHA * gate * (1 - share))
        result[:, 0::2] = grad * (up + 1) * slope * (raw_gate < LIMIT)
        result[:, 1::2] = grad * gated * (np.abs(raw_up) < LIMIT)
        return result

    return gated * (up + 1), backward


def gate(
    logits: Array, k: int, balance: float
) -> tuple[tuple[NDArray[np.intp], Array], Array, Backward]:
    """Ids and shares [N, k] of logits [N, E]: the softmax over the k largest.

    Also returns the balancing loss `balance` * E * sum over experts of (share of the choices) *
    (mean softmax over all experts), whose gradient `backward` adds. backward: logits.
    """
    rows, experts = logits.shape
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    chosen = np.take_along_axis(logits, ids, axis=1)
    shares = np.exp(chosen - chosen[:, :1])
    shares /= shares.sum(axis=1, keepdims=True)
    spread = np.exp(logits - chosen[:, :1])
    spread /= spread.sum(axis=1, keepdims=True)
    load = (np.bincount(ids.ravel(), minlength=experts) / ids.size).astype(logits.dtype)
    penalty = logits.dtype.type(balance) * experts * (load * spread.mean(axis=0)).sum()

    def backward(grad: Array) -> Array:
        inner = shares * (grad - (shares * grad).sum(axis=1, keepdims=True))
        factor = logits.dtype.type(balance * experts / rows)
        result = factor * spread * (load - (spread @ load)[:, None])
        np.put_along_axis(result, ids, np.take_along_axis(result, ids, axis=1) + inner, axis=1)
        return result

    return (ids, shares), penalty, backward


def experts(
    x: Array,
    ids: NDArray[np.intp],
    shares: Array,
    gate_up: Array,
    gate_up_bias: Array,
    down: Array,
    down_bias: Array,
) -> tuple[Array, Backward]:
    """Weighted sum [N, H] of the chosen experts on x [N, H].

    backward: (x, shares, gate_up, gate_up_bias, down, down_bias).
    """
    out = np.zeros_like(x)
    steps = []
    for e in range(len(gate_up)):
        tokens, places = np.nonzero(ids == e)
        both, back_up = linear(x[tokens], gate_up[e], gate_up_bias[e])
        hidden, back_act = clamped_swiglu(both)
        result, back_down = linear(hidden, down[e], down_bias[e])
        out[tokens] += shares[tokens, places, None] * result  # a token chooses an expert once
        steps.append((tokens, places, result, back_up, back_act, back_down))

    def backward(grad: Array) -> tuple[Array, ...]:
        d_x, d_shares = np.zeros_like(x), np.zeros_like(shares)
        parts = [np.zeros_like(p) for p in (gate_up, gate_up_bias, down, down_bias)]
        for e, (tokens, places, result, back_up, back_act, back_down) in enumerate(steps):
            mine = grad[tokens]
            d_shares[tokens, places] = np.einsum("nh,nh->n", mine, result)
            d_hidden, parts[2][e], parts[3][e] = back_down(shares[tokens, places, None] * mine)
            inner, parts[0][e], parts[1][e] = back_up(back_act(d_hidden))
            d_x[tokens] += inner
        return d_x, d_shares, *parts

    return out, backward


def cross_entropy(logits: Array, targets: NDArray[np.intp]) -> tuple[float, Backward]:
    """Mean loss in nats of logits [N, V]; backward (of a scalar): logits."""
    rows = np.arange(len(targets))
    shifted = logits - logits.max(axis=1, keepdims=True)
    probs = np.exp(shifted)
    total = probs.sum(axis=1, keepdims=True)
    loss = float((np.log(total[:, 0]) - shifted[rows, targets]).mean())

    def backward(grad: Array) -> Array:
        result = probs / total
        result[rows, targets] -= 1
        return result * (grad / len(targets))

    return loss, backward
