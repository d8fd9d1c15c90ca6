# SPDX-License-Identifier: Apache-2.0
"""All tokens of a given text at once: bit for bit what `golden.kernels.decoder.step` computes for
one after the other, but for attention in products of many rows, which is several times faster.
"""

import numpy as np
from numpy.typing import NDArray

from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.attention import attend, chunks, exponent_factor, sink_starts, window_slots
from golden.kernels.decoder import DecoderWeights, head_logits
from golden.kernels.layer import LayerCache, LayerShape, LayerWeights, norm, rope_rows
from golden.kernels.moe import expert, gate
from golden.kernels.trace import Machine, Stored, Trace
from golden.vector import store, vector


def _bf16(values: Float32) -> Stored:
    return Stored(store(values, Format.BF16)[0], Format.BF16)


def _attention(
    machine: Machine,
    shape: LayerShape,
    weights: LayerWeights,
    x: Float32,
    cos: NDArray,
    sin: NDArray,
) -> Float32:
    """The output projection [S, hidden] of rows x [S, hidden]."""
    lanes, dim, heads, kv_heads = machine.lanes, shape.head_dim, shape.heads, shape.kv_heads
    normed = _bf16(norm(machine, Trace(), "norm", x, weights.attention_norm, shape.eps))
    qkv = weights.qkv.times(machine, normed).reshape(len(x), -1, dim)
    turning = heads + kv_heads
    tables = [rope_rows(c, s) for c, s in zip(cos, sin, strict=True)]
    cosine, sine = (np.repeat([pair[i] for pair in tables], turning, axis=0) for i in range(2))
    given = qkv[:, :turning].reshape(-1, dim)
    turned = vector(given, sine, lanes=lanes, permute=(dim // 2).bit_length(), mul=True, s2="b")[0]
    rotated = vector(given, cosine, turned, lanes=lanes, mul=True, s2="b", add=True, s3="d")[0]
    rotated = rotated.reshape(len(x), turning, dim)
    queries = _bf16(rotated).codes
    cache, group, scale = LayerCache.empty(shape), heads // kv_heads, dim**-0.5
    keys = weights.heads_of(shape, 0, cache.keys)
    values = weights.heads_of(shape, 1, cache.values)
    starts, factor = sink_starts(weights.sinks, scale), exponent_factor(scale)
    attended = np.zeros((len(x), heads, dim), np.float32)
    for t in range(len(x)):
        for g in range(kv_heads):
            keys[g].put(t % shape.ring, rotated[t, heads + g])
            values[g].put(t % shape.ring, qkv[t, turning + g])
        valid = window_slots(t + 1, shape.ring, shape.window)
        parts = chunks(len(valid), valid, shape.chunk)
        for g in range(kv_heads):
            mine = slice(g * group, (g + 1) * group)
            attended[t, mine] = attend(
                machine,
                Trace(),
                "g",
                queries[t, mine],
                keys[g],
                values[g],
                starts[mine],
                factor,
                parts,
            )
    return weights.output.times(machine, _bf16(attended.reshape(len(x), -1)))


def _experts(machine: Machine, shape: LayerShape, weights: LayerWeights, x: Float32) -> Float32:
    """Rows x [S, hidden] plus the weighted sum of their experts."""
    lanes, count = machine.lanes, shape.top_k
    normed = _bf16(norm(machine, Trace(), "norm", x, weights.moe_norm, shape.eps))
    logits = weights.router.times(machine, normed)
    gates = [gate(machine, Trace(), "gate", row, count) for row in logits]
    ids, shares = np.stack([i for i, _ in gates]), np.stack([s for _, s in gates])
    results = np.zeros((count, *x.shape), np.float32)
    for e in np.unique(ids):
        tokens, places = np.nonzero(ids == e)
        mine = Stored(normed.codes[tokens], normed.fmt)
        results[places, tokens] = expert(machine, Trace(), "expert", mine, weights.experts[e])
    for i, result in enumerate(results):
        x = vector(
            result, shares[:, i : i + 1], x, lanes=lanes, mul=True, s2="b", add=True, s3="d"
        )[0]
    return x


def all_logits(machine: Machine, weights: DecoderWeights, ids: NDArray[np.int64]) -> Float32:
    """Logits [S, vocab] behind each of ids [S], which start a text."""
    x = weights.embedding[ids]
    cos, sin = weights.cosines[: len(ids)], weights.sines[: len(ids)]
    for shape, mine in zip(weights.shapes, weights.layers, strict=True):
        added = _attention(machine, shape, mine, x, cos, sin)
        x = vector(x, added, lanes=machine.lanes, op1="add", s1="b")[0]
        x = _experts(machine, shape, mine, x)
    return head_logits(machine, Trace(), weights, x)
