# SPDX-License-Identifier: Apache-2.0
"""Decoder layers in float64: pre-norm attention and MLP, each added to the residual stream."""

from dataclasses import dataclass

import numpy as np

from golden.reference.attention import GqaWeights, KvCache, gqa_attention
from golden.reference.experts import clamped_swiglu, routed_experts
from golden.reference.gate import router_logits, softmax_gate
from golden.reference.norm import rms_norm


@dataclass(frozen=True)
class GptOssMoeWeights:
    """Router and experts of one GPT-OSS layer."""

    router: np.ndarray  # [E, hidden]
    router_bias: np.ndarray  # [E]
    gate_up: np.ndarray  # [E, 2 I, hidden], rows interleaved: even gate, odd linear
    gate_up_bias: np.ndarray  # [E, 2 I]
    down: np.ndarray  # [E, hidden, I]
    down_bias: np.ndarray  # [E, hidden]


@dataclass(frozen=True)
class GptOssLayerWeights:
    """One GPT-OSS decoder layer."""

    attention_norm: np.ndarray  # [hidden]
    attention: GqaWeights
    moe_norm: np.ndarray  # [hidden]
    moe: GptOssMoeWeights


def gptoss_moe(x: np.ndarray, weights: GptOssMoeWeights, topk: int) -> np.ndarray:
    """Router and experts of GPT-OSS: x [S, hidden], already normed, -> [S, hidden]."""
    logits = router_logits(x, weights.router, weights.router_bias)
    ids, shares = softmax_gate(logits, topk)
    return routed_experts(
        x,
        ids,
        shares,
        weights.gate_up,
        weights.down,
        clamped_swiglu,
        weights.gate_up_bias,
        weights.down_bias,
    )


def gptoss_layer(
    x: np.ndarray,
    weights: GptOssLayerWeights,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    cache: KvCache,
    *,
    topk: int,
    scale: float,
    window: int | None,
    eps: float,
) -> tuple[np.ndarray, KvCache]:
    """One GPT-OSS decoder layer on the new tokens x [S, hidden]; arguments as in `gqa_attention`.

    Returns (residual stream [S, hidden], the cache with the new tokens).
    """
    normed = rms_norm(x, weights.attention_norm, eps)
    attended, cache = gqa_attention(
        normed, weights.attention, cos, sin, positions, cache, scale=scale, window=window
    )
    x = np.asarray(x, np.float64) + attended
    return x + gptoss_moe(rms_norm(x, weights.moe_norm, eps), weights.moe, topk), cache
