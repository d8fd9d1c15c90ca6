# SPDX-License-Identifier: Apache-2.0
"""A whole GPT-OSS-shaped decoder in float64: ids in, logits out, and its loss."""

import numpy as np
from numpy.typing import NDArray

from golden.decoder import Decoder
from golden.models import Gqa
from golden.reference.attention import GqaWeights, KvCache
from golden.reference.layer import GptOssLayerWeights, GptOssMoeWeights, gptoss_layer
from golden.reference.linear import linear
from golden.reference.norm import rms_norm


def layer_weights(decoder: Decoder, index: int) -> GptOssLayerWeights:
    """One layer's weights as `golden.reference.layer` takes them."""
    p, gqa = decoder.layer(index), decoder.config.attention
    assert isinstance(gqa, Gqa)
    ends = np.cumsum([gqa.heads * gqa.head_dim, gqa.kv_heads * gqa.head_dim])
    q, k, v = np.split(p["qkv"], ends)
    q_bias, k_bias, v_bias = np.split(p["qkv_bias"], ends)
    attention = GqaWeights(
        q, q_bias, k, k_bias, v, v_bias, p["output"], p["output_bias"], p["sinks"]
    )
    moe = GptOssMoeWeights(
        p["router"], p["router_bias"], p["gate_up"], p["gate_up_bias"], p["down"], p["down_bias"]
    )
    return GptOssLayerWeights(p["attention_norm"], attention, p["moe_norm"], moe)


def logits(decoder: Decoder, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Logits [S, vocab] of the next id behind each of ids [S], which start a text."""
    config = decoder.config
    gqa = config.attention
    assert isinstance(gqa, Gqa)
    positions = np.arange(len(ids))
    cos, sin = config.rope.tables(positions)
    x = decoder.values["embedding"][ids]
    for i in range(config.layers):
        x, _ = gptoss_layer(
            x,
            layer_weights(decoder, i),
            cos,
            sin,
            positions,
            KvCache.empty(gqa.kv_heads, gqa.head_dim),
            topk=config.moe.topk,
            scale=gqa.scale,
            window=config.window(i),
            eps=config.norm_eps,
        )
    normed = rms_norm(x, decoder.values["final_norm"], config.norm_eps)
    return linear(normed, decoder.values["unembedding"])


def bits(logits: NDArray, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Bits [S] that each of ids [S] costs under logits [S, vocab]: -log2 of its softmax."""
    wide = np.asarray(logits, np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    norm = np.log(np.exp(shifted).sum(axis=-1))
    return (norm - shifted[np.arange(len(ids)), ids]) / np.log(2)
