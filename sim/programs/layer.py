# SPDX-License-Identifier: Apache-2.0
"""A GPT-OSS decoder layer, one token: norm, QKV, RoPE, append, attention, output projection, MoE
(`golden.kernels.layer`).
"""

from dataclasses import dataclass

from golden.formats import Format
from golden.kernels.attention import Chunk, exponent_factor
from golden.kernels.layer import LayerShape
from sim.programs.attention import decode, interleave
from sim.programs.builder import TileProgram
from sim.programs.memory import Buffer, Weights
from sim.programs.moe import ExpertImage, expert, gate
from sim.programs.regions import KvRegion
from sim.programs.resident import ResidentExperts
from sim.programs.resident import experts as resident_experts


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer's weights lie: norm weights, biases, `sink_starts` [kv_heads, group] in
    tile SRAM.
    """

    attention_norm: Buffer
    qkv: Weights
    qkv_bias: Buffer
    sinks: Buffer
    output: Weights
    output_bias: Buffer
    moe_norm: Buffer
    router: Weights
    router_bias: Buffer
    experts: ExpertImage | ResidentExperts
    regions: list[KvRegion]


def norm(p: TileProgram, name: str, x: Buffer, weight: Buffer, eps: float, out: Buffer) -> None:
    """RMSNorm of the rows of x."""
    squares = p.memory.scalars(f"{name}.squares", x.rows)
    inverse = p.memory.scalars(f"{name}.inverse", x.rows)
    p.vector(x, mul=True, s2="x", reduce="sum", into=squares)
    p.vector(squares, inverse, b=1.0 / x.cols, d=eps, mul=True, add=True, s3="d", function="rsqrt")
    p.vector(x, out, b=inverse, b_row=True, d=weight, mul=True, mul2=True, s4="d")


def layer(
    p: TileProgram,
    shape: LayerShape,
    place: LayerPlace,
    x: Buffer,
    cosine: Buffer,
    sine: Buffer,
    token: int,
    parts: list[Chunk],
) -> Buffer:
    """New residual stream of the token in `x` [1, hidden] with its RoPE rows [1, head_dim]."""
    memory, bf16 = p.memory, Format.BF16
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    normed = memory.buffer("normed", 1, shape.hidden, bf16, weight=bf16)
    norm(p, "norm1", x, place.attention_norm, shape.eps, normed)
    qkv = memory.packed("qkv", heads + 2 * kv_heads, dim, Format.FP32)
    p.matmul(
        normed,
        place.qkv,
        Buffer(qkv.name, qkv.address, 1, qkv.rows * dim, qkv.fmt, 0),
        place.qkv_bias,
    )

    def heads_of(buffer: Buffer, first: int, count: int) -> Buffer:
        return Buffer(buffer.name, buffer.at(first), count, dim, buffer.fmt, buffer.stride)

    both = heads_of(qkv, 0, heads + kv_heads)
    turned = memory.buffer("turned", heads + kv_heads, dim)
    rotated = memory.buffer("rotated", heads + kv_heads, dim, bf16, weight=bf16)
    p.vector(both, turned, b=sine, mul=True, permute=(dim // 2).bit_length())
    p.vector(both, rotated, b=cosine, d=turned, mul=True, add=True, s3="d")
    queries = memory.part("queries", rotated, 0, heads)
    key = memory.part("key", rotated, heads, kv_heads)
    value = memory.buffer("value", kv_heads, dim, bf16)
    p.vector(heads_of(qkv, heads + kv_heads, kv_heads), value)
    for g, region in enumerate(place.regions):
        region.append(p, key.row(g), value.row(g), token)
    attended = memory.packed("attended", heads, dim, bf16, weight=bf16)
    factor = exponent_factor(dim**-0.5)
    interleave(decode(p, queries, place.sinks, place.regions, factor, parts, attended))
    projected = memory.buffer("projected", 1, shape.hidden)
    p.matmul(
        Buffer(attended.name, attended.address, 1, heads * dim, bf16, 0),
        place.output,
        projected,
        place.output_bias,
    )
    middle = memory.buffer("middle", 1, shape.hidden)
    p.vector(x, middle, b=projected, op1="add")

    normed2 = memory.buffer("normed2", 1, shape.hidden, bf16, weight=place.experts.gate_up.fmt)
    norm(p, "norm2", middle, place.moe_norm, shape.eps, normed2)
    logits = memory.buffer("logits", 1, place.router.n)
    p.matmul(normed2, place.router, logits, place.router_bias)
    ids, shares = gate(p, "gate", logits, shape.top_k)
    total = middle
    if isinstance(place.experts, ResidentExperts):
        results = resident_experts(p, normed2, place.experts, ids, shape.top_k)
    for i in range(shape.top_k):
        if isinstance(place.experts, ResidentExperts):
            result = results[i]
        else:
            result = expert(p, f"e{i}", normed2, place.experts, ids, i)
        share = Buffer("share", shares.at(0, i), 1, 1, Format.FP32, 4)
        after = memory.buffer(f"e{i}.stream", 1, shape.hidden)
        p.vector(result, after, b=share, b_row=True, d=total, mul=True, add=True, s3="d")
        total = after
    return total
