# SPDX-License-Identifier: Apache-2.0
"""The whole decoder in numpy: parameters by name, loss and gradients.

Names of parameters are those of the weight file (`golden.decoder`).
"""

import numpy as np
from numpy.typing import NDArray

from golden.decoder import EXPERTS, parameter_shapes
from golden.models import Gqa, ModelConfig
from golden.reference.attention import visible_keys
from golden.training import layers
from golden.training.layers import Array

Parameters = dict[str, Array]


def initial(config: ModelConfig, rng: np.random.Generator, dtype: type = np.float32) -> Parameters:
    """Random parameters; the last matrix of a layer's two halves is smaller, biases are zero."""
    made: Parameters = {}
    for name, shape in parameter_shapes(config).items():
        kind = name.rsplit(".", 1)[-1]
        if kind.endswith("norm"):
            values = np.ones(shape)
        elif kind.endswith("bias") or kind == "sinks":
            values = np.zeros(shape)
        else:
            scale = 1 / np.sqrt(shape[-1])
            if kind in ("output", "down"):
                scale /= np.sqrt(2 * config.layers)
            values = rng.standard_normal(shape) * (0.5 if kind == "embedding" else scale)
        made[name] = values.astype(dtype)
    return made


def loss_and_gradients(
    parameters: Parameters,
    config: ModelConfig,
    ids: NDArray[np.int64],
    balance: float = 0.0,
) -> tuple[float, float, Parameters]:
    """Mean loss in nats of predicting ids [B, T + 1] after the first of each row.

    `balance` weighs the loss that keeps the experts evenly used. Returns (loss, that loss, the
    gradients of their sum).
    """
    gqa, moe = config.attention, config.moe
    assert isinstance(gqa, Gqa)
    given, targets = ids[:, :-1], ids[:, 1:].ravel()
    batch, length = given.shape
    dtype = parameters["embedding"].dtype
    positions = np.arange(length)
    cos, sin = (table.astype(dtype) for table in config.rope.tables(positions))
    x = parameters["embedding"][given.ravel()]
    penalty, undo = 0.0, []
    for i in range(config.layers):
        p = {
            name.split(".", 2)[2]: value
            for name, value in parameters.items()
            if name.startswith(f"layers.{i}.")
        }
        allowed = visible_keys(positions, positions, config.window(i))
        normed, back_norm1 = layers.rms_norm(x, p["attention_norm"], config.norm_eps)
        qkv, back_qkv = layers.linear(normed, p["qkv"], p["qkv_bias"])
        mixed, back_attention = layers.attention(
            qkv.reshape(batch, length, -1),
            p["sinks"],
            cos,
            sin,
            allowed,
            gqa.kv_heads,
            gqa.scale,
        )
        added, back_output = layers.linear(
            mixed.reshape(batch * length, -1), p["output"], p["output_bias"]
        )
        x = x + added
        normed, back_norm2 = layers.rms_norm(x, p["moe_norm"], config.norm_eps)
        logits, back_router = layers.linear(normed, p["router"], p["router_bias"])
        (chosen, shares), extra, back_gate = layers.gate(logits, moe.topk, balance)
        penalty += float(extra)
        added, back_experts = layers.experts(normed, chosen, shares, *(p[name] for name in EXPERTS))
        x = x + added
        undo.append(
            (
                back_norm1,
                back_qkv,
                back_attention,
                back_output,
                back_norm2,
                back_router,
                back_gate,
                back_experts,
            )
        )
    normed, back_norm = layers.rms_norm(x, parameters["final_norm"], config.norm_eps)
    logits, back_logits = layers.linear(
        normed, parameters["unembedding"], np.zeros(config.vocab, dtype)
    )
    loss, back_loss = layers.cross_entropy(logits, targets)

    grads: Parameters = {}
    grad, grads["unembedding"], _ = back_logits(back_loss(np.ones((), dtype)))
    grad, grads["final_norm"] = back_norm(grad)
    for i in reversed(range(config.layers)):
        (
            back_norm1,
            back_qkv,
            back_attention,
            back_output,
            back_norm2,
            back_router,
            back_gate,
            back_experts,
        ) = undo[i]
        mine: Parameters = {}
        inner, d_shares, *parts = back_experts(grad)
        mine |= dict(zip(EXPERTS, parts, strict=True))
        routed, mine["router"], mine["router_bias"] = back_router(back_gate(d_shares))
        through, mine["moe_norm"] = back_norm2(inner + routed)
        grad = grad + through
        inner, mine["output"], mine["output_bias"] = back_output(grad)
        d_qkv, mine["sinks"] = back_attention(inner.reshape(batch, length, -1))
        inner, mine["qkv"], mine["qkv_bias"] = back_qkv(d_qkv.reshape(batch * length, -1))
        through, mine["attention_norm"] = back_norm1(inner)
        grad = grad + through
        grads |= {f"layers.{i}.{name}": value for name, value in mine.items()}
    embedding = np.zeros_like(parameters["embedding"])
    np.add.at(embedding, given.ravel(), grad)
    return loss, penalty, grads | {"embedding": embedding}
