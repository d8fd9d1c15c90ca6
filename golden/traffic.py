# SPDX-License-Identifier: Apache-2.0
"""What a model weighs and moves: parameters, bytes and FLOPs, all derived from a list of tensors.

Per-token figures are those of one decoded token at batch 1. Everything is an exact integer: bytes,
parameters, or FLOPs (a multiply and an add count two).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from golden.models import BF16, FP32, Gqa, Mla, ModelConfig, WeightFormat


class Part(StrEnum):
    """Where a weight belongs in the roofline."""

    ATTENTION = "attention"
    DENSE = "dense MLP"
    ROUTED = "routed experts"
    SHARED = "shared expert"
    OTHER = "router, biases, norms, embedding row"
    HEAD = "lm_head"


@dataclass(frozen=True)
class Tensor:
    """Equal tensors of a model; a bias or norm is a matrix of one row that multiplies nothing."""

    part: Part
    name: str
    out: int
    contraction: int
    copies: int  # in the whole model
    used: int  # of them read per token
    format: WeightFormat = BF16
    multiplies: bool = True  # a matrix product, so that it costs FLOPs

    @property
    def parameters(self) -> int:
        """Weights in one copy, scales not counted."""
        return self.out * self.contraction

    @property
    def bytes(self) -> int:
        """Bytes of one copy, scales included."""
        return self.format.matrix_bytes(self.out, self.contraction)


def _vector(part: Part, name: str, size: int, copies: int, used: int | None = None) -> Tensor:
    return Tensor(part, name, 1, size, copies, copies if used is None else used, multiplies=False)


def _attention(model: ModelConfig, layers: int) -> Iterator[Tensor]:
    part, a, hidden = Part.ATTENTION, model.attention, model.hidden
    if isinstance(a, Gqa):
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
        for name, (out, _) in shapes.items():
            yield _vector(part, f"{name} bias", out, layers)
        yield _vector(part, "sinks", a.heads, layers)
    else:
        shapes = {
            "q_a": (a.q_lora, hidden),
            "q_b": (a.heads * (a.nope + a.rope), a.q_lora),
            "kv_a": (a.kv_lora + a.rope, hidden),
            "kv_b": (a.heads * (a.nope + a.v), a.kv_lora),
            "o": (hidden, a.heads * a.v),
        }
        yield _vector(Part.OTHER, "q_a norm", a.q_lora, layers)
        yield _vector(Part.OTHER, "kv_a norm", a.kv_lora, layers)
    for name, (out, contraction) in shapes.items():
        yield Tensor(part, name, out, contraction, layers, layers, model.attention_format)


def _moe(model: ModelConfig, layers: int) -> Iterator[Tensor]:
    moe, hidden = model.moe, model.hidden
    copies, used = layers * moe.experts, layers * moe.topk
    for part, count, read, weight_format in (
        (Part.ROUTED, copies, used, model.routed_format),
        (Part.SHARED, layers * moe.shared, layers * moe.shared, model.shared_format),
    ):
        for name in ("gate", "up"):
            yield Tensor(part, name, moe.intermediate, hidden, count, read, weight_format)
        yield Tensor(part, "down", hidden, moe.intermediate, count, read, weight_format)
    if moe.expert_bias:
        yield _vector(Part.OTHER, "gate and up bias", 2 * moe.intermediate, copies, used)
        yield _vector(Part.OTHER, "down bias", hidden, copies, used)
    yield Tensor(Part.OTHER, "router", moe.experts, hidden, layers, layers)
    bias_format = FP32 if moe.router_bias_bits == 32 else BF16
    yield Tensor(
        Part.OTHER, "router bias", 1, moe.experts, layers, layers, bias_format, multiplies=False
    )


def tensors(model: ModelConfig) -> list[Tensor]:
    """Every weight of the model without its layers for multi-token prediction."""
    hidden, inner, dense = model.hidden, model.dense_intermediate, model.dense_layers
    found = [*_attention(model, model.layers), *_moe(model, model.moe_layers)]
    if dense:
        for name, out, contraction in (
            ("gate", inner, hidden),
            ("up", inner, hidden),
            ("down", hidden, inner),
        ):
            found.append(
                Tensor(Part.DENSE, name, out, contraction, dense, dense, model.dense_format)
            )
    found.append(_vector(Part.OTHER, "layer norms", hidden, 2 * model.layers))
    found.append(_vector(Part.OTHER, "final norm", hidden, 1))
    found.append(_vector(Part.OTHER, "embedding row", hidden, model.vocab, 1))
    found.append(Tensor(Part.HEAD, "lm_head", model.vocab, hidden, 1, 1))
    return found


def mtp_tensors(model: ModelConfig) -> list[Tensor]:
    """Weights of the multi-token prediction layers; the checkpoint repeats embedding and head."""
    count, hidden = model.mtp_layers, model.hidden
    if not count:
        return []
    return [
        *_attention(model, count),
        *_moe(model, count),
        # Two norms of the layer, one on each input of the projection, one before the head.
        _vector(Part.OTHER, "norms", hidden, 5 * count),
        Tensor(Part.OTHER, "input projection", hidden, 2 * hidden, count, count),
        _vector(Part.OTHER, "embedding row", hidden, model.vocab * count, count),
        Tensor(Part.HEAD, "lm_head", model.vocab, hidden, count, count),
    ]


def total_parameters(model: ModelConfig) -> int:
    """All parameters, without multi-token prediction."""
    return sum(t.parameters * t.copies for t in tensors(model))


def active_parameters(model: ModelConfig) -> int:
    """Parameters that one token uses: the head counts, the embedding does not."""
    return sum(t.parameters * t.used for t in tensors(model) if t.name != "embedding row")


def checkpoint_bytes(model: ModelConfig, mtp: bool = False) -> int:
    """Bytes of all weights in their published formats, on request with multi-token prediction."""
    listed = tensors(model) + (mtp_tensors(model) if mtp else [])
    return sum(t.bytes * t.copies for t in listed)


def weight_bytes_per_token(model: ModelConfig) -> dict[Part, int]:
    """Bytes of weights read for one token, by part; every part is present."""
    read = dict.fromkeys(Part, 0)
    for tensor in tensors(model):
        read[tensor.part] += tensor.bytes * tensor.used
    return read


def kv_elements_per_layer(model: ModelConfig) -> int:
    """Elements that one layer caches of one token."""
    a = model.attention
    return 2 * a.kv_heads * a.head_dim if isinstance(a, Gqa) else a.kv_lora + a.rope


def kv_bytes_stored(model: ModelConfig, element_bytes: int = 2) -> int:
    """Bytes that one token of context adds to the cache, were no layer to forget any."""
    return model.layers * kv_elements_per_layer(model) * element_bytes


def keys_seen(model: ModelConfig, context: int) -> int:
    """Keys that one query reads, added over the layers; `context` counts its own token."""
    if context < 1:
        raise ValueError(f"context must be at least 1, not {context!r}")
    windows = (model.window(layer) for layer in range(model.layers))
    return sum(context if window is None else min(context, window) for window in windows)


def kv_bytes_read(model: ModelConfig, context: int, element_bytes: int = 2) -> int:
    """Bytes of cache that one token reads at this length of context."""
    return keys_seen(model, context) * kv_elements_per_layer(model) * element_bytes


def bytes_per_token(model: ModelConfig, context: int) -> int:
    """Weights as published plus a BF16 cache, read for one token."""
    return sum(weight_bytes_per_token(model).values()) + kv_bytes_read(model, context)


def linear_flops(model: ModelConfig) -> int:
    """FLOPs of one token in matrix products with weights."""
    return sum(2 * t.parameters * t.used for t in tensors(model) if t.multiplies)


def attention_flops(model: ModelConfig, context: int) -> int:
    """FLOPs of one token in scores and values; MLA in absorbed form."""
    a = model.attention
    if isinstance(a, Mla):
        per_key = a.heads * 2 * (a.kv_lora + a.rope + a.kv_lora)
    else:
        per_key = a.heads * 4 * a.head_dim
    return per_key * keys_seen(model, context)
