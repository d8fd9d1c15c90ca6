# SPDX-License-Identifier: Apache-2.0
"""Decoder layers in float64: pre-norm attention and MLP, each added to the residual stream."""

from dataclasses import dataclass

import numpy as np

from golden.reference.attention import GqaWeights, KvCache, gqa_attention
from golden.reference.experts import (
    GatedMlpWeights,
    clamped_swiglu,
    gated_mlp,
    routed_experts,
    swiglu,
)
from golden.reference.gate import router_logits, sigmoid_gate, softmax_gate
from golden.reference.mla import MlaCache, MlaWeights, mla_attention
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


@dataclass(frozen=True)
class DeepseekMoeWeights:
    """Router, routed experts and the shared expert of one DeepSeek or Kimi layer."""

    router: np.ndarray  # [E, hidden]
    router_bias: np.ndarray  # [E], for the choice only
    gate_up: np.ndarray  # [E, 2 I, hidden], gate rows first
    down: np.ndarray  # [E, hidden, I]
    shared: GatedMlpWeights


@dataclass(frozen=True)
class DeepseekLayerWeights:
    """One DeepSeek or Kimi decoder layer, dense or with experts."""

    attention_norm: np.ndarray  # [hidden]
    attention: MlaWeights
    mlp_norm: np.ndarray  # [hidden]
    mlp: DeepseekMoeWeights | GatedMlpWeights


def deepseek_moe(
    x: np.ndarray,
    weights: DeepseekMoeWeights,
    *,
    topk: int,
    groups: int = 1,
    groups_kept: int = 1,
    gate_scale: float = 1.0,
) -> np.ndarray:
    """Router, routed and shared experts: x [S, hidden], already normed, -> [S, hidden]."""
    ids, shares = sigmoid_gate(
        router_logits(x, weights.router),
        weights.router_bias,
        topk,
        groups=groups,
        groups_kept=groups_kept,
        scale=gate_scale,
    )
    routed = routed_experts(x, ids, shares, weights.gate_up, weights.down, swiglu)
    return routed + gated_mlp(x, weights.shared)


def deepseek_layer(
    x: np.ndarray,
    weights: DeepseekLayerWeights,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    cache: MlaCache,
    *,
    heads: int,
    scale: float,
    eps: float,
    latent_eps: float,
    topk: int = 1,
    groups: int = 1,
    groups_kept: int = 1,
    gate_scale: float = 1.0,
    absorbed: bool = True,
) -> tuple[np.ndarray, MlaCache]:
    """One DeepSeek or Kimi decoder layer on the new tokens x [S, hidden].

    Arguments as in `mla_attention` and `deepseek_moe` (those of the gate are unused by a dense
    layer); eps: of the layer's norms, latent_eps: of the two inside attention. Returns (residual
    stream [S, hidden], the cache with the new tokens).
    """
    attended, cache = mla_attention(
        rms_norm(x, weights.attention_norm, eps),
        weights.attention,
        cos,
        sin,
        positions,
        cache,
        heads=heads,
        scale=scale,
        eps=latent_eps,
        absorbed=absorbed,
    )
    x = np.asarray(x, np.float64) + attended
    normed = rms_norm(x, weights.mlp_norm, eps)
    if isinstance(weights.mlp, GatedMlpWeights):
        return x + gated_mlp(normed, weights.mlp), cache
    out = deepseek_moe(
        normed,
        weights.mlp,
        topk=topk,
        groups=groups,
        groups_kept=groups_kept,
        gate_scale=gate_scale,
    )
    return x + out, cache
