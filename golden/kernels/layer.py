# SPDX-License-Identifier: Apache-2.0
"""Bit-exact model of the decoder-layer kernel: one token of a GPT-OSS layer."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from golden.formats import SPECS, Format
from golden.fp32 import Float32
from golden.kernels.attention import (
    attend,
    chunks,
    exponent_factor,
    sink_starts,
    window_slots,
)
from golden.kernels.kv import Held
from golden.kernels.moe import Expert, Matrix, expert, gate
from golden.kernels.trace import Machine, Stored, Trace
from golden.quantise import blocks_of
from golden.vector import row_sum, scale_rows, vector


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer. `window` None is full attention; `ring` slots hold the KV cache, in format
    `kv`.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    ring: int
    top_k: int
    eps: float
    chunk: int = 512
    kv: Format = Format.BF16


@dataclass(frozen=True)
class LayerWeights:
    """Norms are FP32 [hidden]; `qkv` [(heads + 2 kv_heads) head_dim, hidden]; sinks [heads].

    `kv_scales` [2, kv_heads] are the E8M0 codes of keys and of values in an MX cache.
    """

    attention_norm: Float32
    qkv: Matrix
    sinks: Float32
    output: Matrix
    moe_norm: Float32
    router: Matrix
    experts: list[Expert]
    kv_scales: NDArray[np.uint8] | None = None

    def heads_of(self, shape: LayerShape, which: int, codes: NDArray) -> list[Held]:
        """Keys (`which` 0) or values (1) [slots, kv_heads, head_dim] by head, as they are held."""
        if not SPECS[shape.kv].scaled:
            return [Held(codes[:, g], shape.kv) for g in range(shape.kv_heads)]
        if self.kv_scales is None or self.kv_scales.shape != (2, shape.kv_heads):
            raise ValueError(f"kv_scales must be [2, {shape.kv_heads}], not {self.kv_scales!r}")
        blocks = blocks_of(shape.head_dim)
        return [
            Held(codes[:, g], shape.kv, np.full(blocks, scale, np.uint8))
            for g, scale in enumerate(self.kv_scales[which])
        ]


@dataclass
class LayerCache:
    """Codes of keys and values [ring, kv_heads, head_dim] by slot, and the tokens appended so
    far.
    """

    keys: NDArray
    values: NDArray
    length: int = 0

    @classmethod
    def empty(cls, shape: LayerShape) -> "LayerCache":
        size = (shape.ring, shape.kv_heads, shape.head_dim)
        kind = np.uint16 if shape.kv is Format.BF16 else np.uint8
        return cls(np.zeros(size, kind), np.zeros(size, kind))


def rope_rows(cos: NDArray, sin: NDArray) -> tuple[Float32, Float32]:
    """Half-split tables [D/2] as the two rows [D] of the rotation: cosines, and signed sines."""
    cosine, sine = np.asarray(cos, np.float32), np.asarray(sin, np.float32)
    return np.concatenate([cosine, cosine]), np.concatenate([-sine, sine])


def norm(
    machine: Machine, trace: Trace, name: str, x: Float32, weight: Float32, eps: float
) -> Float32:
    """RMSNorm of rows x [M, hidden], before it is stored."""
    lanes = machine.lanes
    squares = trace.keep(f"{name}.squares", row_sum(x, lanes=lanes, mul=True, s2="x")).values
    inverse = trace.keep(
        f"{name}.inverse",
        vector(
            squares,
            np.float32(1.0 / x.shape[1]),
            np.float32(eps),
            lanes=lanes,
            mul=True,
            s2="b",
            add=True,
            s3="d",
            function="rsqrt",
        )[0],
    ).values
    return scale_rows(x, inverse[0], weight, lanes=lanes)


def layer(
    machine: Machine,
    trace: Trace,
    shape: LayerShape,
    weights: LayerWeights,
    cache: LayerCache,
    x: Float32,
    cos: NDArray,
    sin: NDArray,
) -> Float32:
    """One token: residual stream x [hidden] in, residual stream [hidden] out; `cache` is updated.

    `cos`, `sin` [head_dim / 2] are the token's RoPE tables.
    """
    lanes, dim = machine.lanes, shape.head_dim
    heads, kv_heads = shape.heads, shape.kv_heads
    stream = np.asarray(x, np.float32)[None, :]
    normed = trace.keep(
        "normed",
        norm(machine, trace, "norm1", stream, weights.attention_norm, shape.eps),
        Format.BF16,
    )
    qkv = trace.keep("qkv", weights.qkv.times(machine, normed)).values.reshape(-1, dim)
    cosine, sine = rope_rows(cos, sin)
    rotated_part = qkv[: heads + kv_heads]
    turned = trace.keep(
        "turned",
        vector(rotated_part, sine, lanes=lanes, permute=(dim // 2).bit_length(), mul=True, s2="b")[
            0
        ],
    ).values
    rotated = vector(rotated_part, cosine, turned, lanes=lanes, mul=True, s2="b", add=True, s3="d")[
        0
    ]
    # One command stores both, if both are BF16.
    queries = trace.keep("queries", rotated[:heads], Format.BF16)
    slot = cache.length % shape.ring
    keys = weights.heads_of(shape, 0, cache.keys)
    values = weights.heads_of(shape, 1, cache.values)
    for name, kept, rows in (
        ("key", keys, rotated[heads:]),
        ("value", values, qkv[heads + kv_heads :]),
    ):
        codes = np.concatenate([h.put(slot, row) for h, row in zip(kept, rows, strict=True)])
        scales = [h.scales for h in kept if h.scales is not None]
        trace.record(name, Stored(codes, shape.kv, np.stack(scales) if scales else None))
    cache.length += 1

    valid = window_slots(cache.length, shape.ring, shape.window)
    parts = chunks(len(valid), valid, shape.chunk)
    group = heads // kv_heads
    scale = dim**-0.5
    starts, factor = sink_starts(weights.sinks, scale), exponent_factor(scale)
    outputs = [
        attend(
            machine,
            trace,
            f"g{g}",
            queries.codes[g * group : (g + 1) * group],
            keys[g],
            values[g],
            starts[g * group : (g + 1) * group],
            factor,
            parts,
        )
        for g in range(kv_heads)
    ]
    attended = trace.keep("attended", np.concatenate(outputs), Format.BF16)
    flat = Stored(attended.codes.reshape(1, -1), Format.BF16)
    projected = trace.keep("projected", weights.output.times(machine, flat)).values
    middle = trace.keep(
        "middle", vector(stream, projected, lanes=lanes, op1="add", s1="b")[0]
    ).values

    x2 = trace.keep(
        "normed2", norm(machine, trace, "norm2", middle, weights.moe_norm, shape.eps), Format.BF16
    )
    logits = trace.keep("logits", weights.router.times(machine, x2)).values
    ids, shares = gate(machine, trace, "gate", logits[0], shape.top_k)
    total = middle
    for i, e in enumerate(ids):
        result = expert(machine, trace, f"e{i}", x2, weights.experts[e])
        total = trace.keep(
            f"e{i}.stream",
            vector(
                result,
                shares[i : i + 1, None],
                total,
                lanes=lanes,
                mul=True,
                s2="b",
                add=True,
                s3="d",
            )[0],
        ).values
    return total[0]
