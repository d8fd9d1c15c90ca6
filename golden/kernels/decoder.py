# SPDX-License-Identifier: Apache-2.0
"""Bit-exact model of a whole decoder: a token's row of the embedding in, the next token out."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from golden.decoder import EXPERTS, Decoder
from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.layer import LayerCache, LayerShape, LayerWeights, layer, norm
from golden.kernels.moe import Expert, Matrix
from golden.kernels.trace import Machine, Trace
from golden.models import Gqa
from golden.topk import topk

HEAD = "head"  # the trace of what follows the layers


@dataclass(frozen=True)
class DecoderWeights:
    """What the tile holds, and `embedding` [vocab, hidden], of which the host gives it rows."""

    embedding: Float32
    shapes: list[LayerShape]
    layers: list[LayerWeights]
    final_norm: Float32
    unembedding: Matrix
    cosines: Float32  # [context, head_dim / 2]
    sines: Float32


@dataclass(frozen=True)
class Step:
    """One token: what each layer and the head left in memory, logits [vocab], and the best id."""

    traces: dict[str, Trace]
    logits: Float32
    best: int


def hardware_weights(decoder: Decoder, lanes: int, unit: int) -> DecoderWeights:
    """Experts in MXFP4 padded to `lanes`, matrices in BF16, vectors in FP32; every ring of the KV
    cache is a multiple of `unit` slots.
    """
    config, gqa = decoder.config, decoder.config.attention
    assert isinstance(gqa, Gqa)
    context = config.rope.max_positions
    shapes, layers = [], []
    for i in range(config.layers):
        p, window = decoder.layer(i), config.window(i)
        slots = context if window is None else window
        shapes.append(
            LayerShape(
                config.hidden,
                gqa.heads,
                gqa.kv_heads,
                gqa.head_dim,
                window,
                -(-slots // unit) * unit,
                config.moe.topk,
                config.norm_eps,
            )
        )
        layers.append(
            LayerWeights(
                p["attention_norm"].astype(np.float32),
                Matrix.of(p["qkv"], Format.BF16, p["qkv_bias"]),
                p["sinks"].astype(np.float32),
                Matrix.of(p["output"], Format.BF16, p["output_bias"]),
                p["moe_norm"].astype(np.float32),
                Matrix.of(p["router"], Format.BF16, p["router_bias"]),
                [
                    Expert.of(gate_up, gate_up_bias, down, down_bias, Format.MXFP4, lanes)
                    for gate_up, gate_up_bias, down, down_bias in zip(
                        *(p[name] for name in EXPERTS), strict=True
                    )
                ],
            )
        )
    cos, sin = config.rope.tables(np.arange(context))
    return DecoderWeights(
        decoder.values["embedding"].astype(np.float32),
        shapes,
        layers,
        decoder.values["final_norm"].astype(np.float32),
        Matrix.of(decoder.values["unembedding"], Format.BF16),
        cos.astype(np.float32),
        sin.astype(np.float32),
    )


def empty_caches(weights: DecoderWeights) -> list[LayerCache]:
    """One empty KV cache per layer."""
    return [LayerCache.empty(shape) for shape in weights.shapes]


def head_logits(machine: Machine, trace: Trace, weights: DecoderWeights, x: Float32) -> Float32:
    """Logits [M, vocab] of residual streams x [M, hidden]: final norm and unembedding."""
    eps = weights.shapes[-1].eps
    normed = trace.keep(
        "normed", norm(machine, trace, "norm", x, weights.final_norm, eps), Format.BF16
    )
    return trace.keep("logits", weights.unembedding.times(machine, normed)).values


def head(
    machine: Machine, trace: Trace, weights: DecoderWeights, x: Float32
) -> tuple[Float32, int]:
    """Logits [vocab] of a residual stream x [hidden], and the best id."""
    logits = head_logits(machine, trace, weights, x[None, :])[0]
    ids, best = topk(logits, 1)
    trace.codes("ids", ids.astype(np.uint32), Format.FP32)
    trace.keep("best", best)
    return logits, int(ids[0])


def step(machine: Machine, weights: DecoderWeights, caches: list[LayerCache], token: int) -> Step:
    """One token behind those that `caches` hold; they are updated."""
    position = caches[0].length
    if position >= len(weights.cosines):
        raise ValueError(f"context must be at most {len(weights.cosines)} tokens, not more")
    x = weights.embedding[token]
    cos, sin = weights.cosines[position], weights.sines[position]
    traces = {}
    for i, (shape, mine, cache) in enumerate(
        zip(weights.shapes, weights.layers, caches, strict=True)
    ):
        traces[f"layer{i}"] = Trace()
        x = layer(machine, traces[f"layer{i}"], shape, mine, cache, x, cos, sin)
    traces[HEAD] = Trace()
    logits, best = head(machine, traces[HEAD], weights, x)
    return Step(traces, logits, best)


def generate(
    machine: Machine, weights: DecoderWeights, prompt: NDArray[np.int64], tokens: int
) -> Iterator[tuple[int, Step, list[LayerCache]]]:
    """Greedy decoding of `tokens` ids behind a prompt: each id that is fed in, its step and the
    caches after it, which the next step changes. The last id, the best of the last step, is not
    fed in.
    """
    caches, best = empty_caches(weights), 0
    for position in range(len(prompt) + tokens - 1):
        token = int(prompt[position]) if position < len(prompt) else best
        done = step(machine, weights, caches, token)
        best = done.best
        yield token, done, caches
