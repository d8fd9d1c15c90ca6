# SPDX-License-Identifier: Apache-2.0
"""The configurations of the three models: GPT-OSS 120B, DeepSeek R1 and Kimi K2.5 (text).

From the public configurations and reference code of openai/gpt-oss, deepseek-ai/DeepSeek-V3 and
moonshotai/Kimi-K2.5. This is the only place that states them; what follows from them in bytes,
parameters and FLOPs is in `golden.traffic`.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from golden.reference.rope import rope_tables, yarn_inv_freq, yarn_mscale


@dataclass(frozen=True)
class WeightFormat:
    """How a weight matrix [out, in] is stored: elements, and one scale per block of them.

    A block is `block_out` x `block_in` elements; edges that do not fill a block have a scale too.
    """

    name: str
    bits: int
    scale_bits: int = 0
    block_out: int = 1
    block_in: int = 1

    def matrix_bytes(self, out: int, contraction: int) -> int:
        """Bytes of a matrix [out, contraction], scales included."""
        blocks = -(-out // self.block_out) * -(-contraction // self.block_in)
        return (out * contraction * self.bits + blocks * self.scale_bits) // 8


BF16 = WeightFormat("bf16", 16)
FP32 = WeightFormat("fp32", 32)
MXFP4 = WeightFormat("mxfp4", 4, scale_bits=8, block_in=32)
FP8_128X128 = WeightFormat("fp8-e4m3-128x128", 8, scale_bits=32, block_out=128, block_in=128)
INT4_32 = WeightFormat("int4-32", 4, scale_bits=16, block_in=32)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding with YaRN; `dim` elements of a head are rotated."""

    dim: int
    layout: Literal["half-split", "interleaved"]
    theta: float
    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool  # round the ends of YaRN's ramp outwards to whole pairs
    table_scale: float  # cosines and sines are multiplied by this
    max_positions: int

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"dim must be even and positive, not {self.dim!r}")
        if self.max_positions != self.factor * self.original_positions:
            raise ValueError(
                f"max_positions must be factor * original_positions, not {self.max_positions!r}"
            )

    def inv_freq(self) -> np.ndarray:
        """Radians per position of each pair: float32 [dim / 2]."""
        return yarn_inv_freq(
            self.dim,
            self.theta,
            self.factor,
            self.original_positions,
            self.beta_fast,
            self.beta_slow,
            self.truncate,
        )

    def tables(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(cos, sin), float64 [S, dim / 2] each, scaled, for positions [S]."""
        return rope_tables(positions, self.inv_freq(), self.table_scale)


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention with a sink per query head and biases on all projections."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int  # keys that a query of a sliding layer sees, itself included
    scale: float  # of the scores; sinks are not scaled

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide {self.heads} heads, not {self.kv_heads!r}")


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention; a head's query and key have nope + rope elements."""

    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int
    norm_eps: float  # of the two norms inside
    scale: float  # of the scores, YaRN's square included


@dataclass(frozen=True)
class GateSpec:
    """How a token's experts are chosen and weighted.

    `scoring` softmax: the best logits, softmax over these alone. Sigmoid: sigmoid scores, divided
    by the sum of the chosen + 1e-20, times `scale`. `bias` says where a bias per expert counts:
    as part of the logits, or in the choice alone. The experts stand in `groups` equal runs, scored
    by their best two; only the best `groups_kept` take part.
    """

    experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    bias: Literal["logits", "choice"] = "logits"
    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring must be softmax or sigmoid, not {self.scoring!r}")
        if self.bias not in ("logits", "choice"):
            raise ValueError(f"bias must be logits or choice, not {self.bias!r}")
        if self.groups < 1 or self.experts < 1 or self.experts % self.groups:
            raise ValueError(f"groups must divide {self.experts} experts, not {self.groups!r}")
        size = self.experts // self.groups
        if self.groups > 1 and size < 2:
            raise ValueError(f"groups must have two experts or more, not {size!r}")
        if not 1 <= self.groups_kept <= self.groups:
            raise ValueError(f"groups_kept must be 1 to {self.groups}, not {self.groups_kept!r}")
        if not 1 <= self.top_k <= size * self.groups_kept:
            raise ValueError(
                f"top_k must be 1 to the {size * self.groups_kept} experts of the kept groups, "
                f"not {self.top_k!r}"
            )
        if not self.scale > 0 or (self.scoring == "softmax" and self.scale != 1):
            raise ValueError(
                f"scale must be positive, and 1 for softmax scoring, not {self.scale!r}"
            )
        if self.scoring == "softmax" and (self.bias, self.groups) != ("logits", 1):
            # Its shares lean on the first of the chosen being the largest.
            raise ValueError("scoring must be sigmoid for groups or a bias of the choice")


@dataclass(frozen=True)
class Moe:
    """Routed and shared experts of one layer."""

    experts: int
    topk: int
    shared: int
    intermediate: int  # of one expert, routed or shared
    gate: Literal["softmax", "sigmoid"]
    activation: Literal["clamped-swiglu", "swiglu"]
    groups: int = 1
    groups_kept: int = 1
    gate_scale: float = 1.0  # on the weights of the chosen
    swiglu_alpha: float = 1.0  # inside the sigmoid
    swiglu_limit: float = float("inf")
    expert_bias: bool = False  # on both matrices of an expert
    router_bias_bits: int = 16  # of the gate's bias per expert

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= self.experts:
            raise ValueError(f"topk must be 1 to {self.experts}, not {self.topk!r}")
        if self.groups < 1 or self.experts % self.groups:
            raise ValueError(f"groups must divide {self.experts} experts, not {self.groups!r}")
        if not 1 <= self.groups_kept <= self.groups:
            raise ValueError(f"groups_kept must be 1 to {self.groups}, not {self.groups_kept!r}")

    @property
    def gate_spec(self) -> GateSpec:
        """The gate of one layer."""
        return GateSpec(
            self.experts,
            self.topk,
            self.gate,
            "choice" if self.gate == "sigmoid" else "logits",
            self.groups,
            self.groups_kept,
            self.gate_scale,
        )


@dataclass(frozen=True)
class ModelConfig:
    """One model, with the weight formats of its published checkpoint (the rest is BF16)."""

    name: str
    title: str
    layers: int
    dense_layers: int  # the first layers, with a dense MLP in place of experts
    dense_intermediate: int  # of that MLP
    hidden: int
    vocab: int
    attention: Gqa | Mla
    moe: Moe
    rope: Rope
    norm_eps: float
    attention_format: WeightFormat
    dense_format: WeightFormat
    routed_format: WeightFormat
    shared_format: WeightFormat
    mtp_layers: int = 0  # extra layers for multi-token prediction, not counted in `layers`

    def __post_init__(self) -> None:
        if not 0 <= self.dense_layers <= self.layers:
            raise ValueError(f"dense_layers must be 0 to {self.layers}, not {self.dense_layers!r}")

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    def window(self, layer: int) -> int | None:
        """Keys that a query of this layer sees at most, None for all: even GPT-OSS layers slide."""
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer must be 0 to {self.layers - 1}, not {layer!r}")
        return self.attention.window if isinstance(self.attention, Gqa) and not layer % 2 else None


GPT_OSS_120B = ModelConfig(
    name="gpt-oss",
    title="GPT-OSS 120B",
    layers=36,
    dense_layers=0,
    dense_intermediate=0,
    hidden=2880,
    vocab=201088,
    attention=Gqa(heads=64, kv_heads=8, head_dim=64, window=128, scale=0.125),
    moe=Moe(
        experts=128,
        topk=4,
        shared=0,
        intermediate=2880,
        gate="softmax",
        activation="clamped-swiglu",
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        expert_bias=True,
    ),
    rope=Rope(
        dim=64,
        layout="half-split",
        theta=150000.0,
        factor=32.0,
        original_positions=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        table_scale=yarn_mscale(32.0),
        max_positions=131072,
    ),
    norm_eps=1e-5,
    attention_format=BF16,
    dense_format=BF16,
    routed_format=MXFP4,
    shared_format=BF16,
)

DEEPSEEK_R1 = ModelConfig(
    name="deepseek-r1",
    title="DeepSeek R1",
    layers=61,
    dense_layers=3,
    dense_intermediate=18432,
    hidden=7168,
    vocab=129280,
    attention=Mla(
        heads=128,
        q_lora=1536,
        kv_lora=512,
        nope=128,
        rope=64,
        v=128,
        norm_eps=1e-6,
        scale=192**-0.5 * yarn_mscale(40.0) ** 2,
    ),
    moe=Moe(
        experts=256,
        topk=8,
        shared=1,
        intermediate=2048,
        gate="sigmoid",
        activation="swiglu",
        groups=8,
        groups_kept=4,
        gate_scale=2.5,
        router_bias_bits=32,
    ),
    rope=Rope(
        dim=64,
        layout="interleaved",
        theta=10000.0,
        factor=40.0,
        original_positions=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
        table_scale=1.0,
        max_positions=163840,
    ),
    norm_eps=1e-6,
    attention_format=FP8_128X128,
    dense_format=FP8_128X128,
    routed_format=FP8_128X128,
    shared_format=FP8_128X128,
    mtp_layers=1,
)

KIMI_K25 = ModelConfig(
    name="kimi-k2.5",
    title="Kimi K2.5",
    layers=61,
    dense_layers=1,
    dense_intermediate=18432,
    hidden=7168,
    vocab=163840,
    attention=Mla(
        heads=64,
        q_lora=1536,
        kv_lora=512,
        nope=128,
        rope=64,
        v=128,
        # The reference code leaves these two norms at its default, whatever norm_eps is.
        norm_eps=1e-6,
        scale=192**-0.5 * yarn_mscale(64.0) ** 2,
    ),
    moe=Moe(
        experts=384,
        topk=8,
        shared=1,
        intermediate=2048,
        gate="sigmoid",
        activation="swiglu",
        gate_scale=2.827,
        router_bias_bits=32,
    ),
    rope=Rope(
        dim=64,
        layout="interleaved",
        theta=50000.0,
        factor=64.0,
        original_positions=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
        table_scale=1.0,
        max_positions=262144,
    ),
    norm_eps=1e-5,
    attention_format=BF16,
    dense_format=BF16,
    routed_format=INT4_32,
    shared_format=BF16,
)

MODELS = {model.name: model for model in (GPT_OSS_120B, DEEPSEEK_R1, KIMI_K25)}
"""The models by their names on the command line."""
