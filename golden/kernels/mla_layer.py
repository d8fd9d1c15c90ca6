# SPDX-License-Identifier: Apache-2.0
"""Bit-exact model of a decoder layer of DeepSeek R1 or Kimi K2.5: multi-head latent attention, then
experts or, in a model's first layers, one dense MLP.

Decode and prefill are one function, as in `golden.kernels.mla`. A token's result does not depend on
the other tokens of its step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.layer import norm
from golden.kernels.mla import MlaCache, MlaMatrices, MlaShape, mla
from golden.kernels.moe import Expert, Matrix, MixtureWeights, expert, moe
from golden.kernels.trace import Machine, Trace
from golden.models import GateSpec
from golden.reference.layer import DeepseekLayerWeights, DeepseekMoeWeights
from golden.vector import vector


@dataclass(frozen=True)
class MlaLayerShape:
    """Sizes of a layer. `eps` is that of its two norms; `gate` is None in a dense layer.

    `act` is the format of the MLP's activations.
    """

    attention: MlaShape
    eps: float
    gate: GateSpec | None = None
    act: Format = Format.BF16


@dataclass(frozen=True)
class MlaLayerWeights:
    """Norms are FP32 [hidden]; `mlp` is one gated MLP in a dense layer."""

    attention_norm: Float32
    attention: MlaMatrices
    mlp_norm: Float32
    mlp: MixtureWeights | Expert

    @classmethod
    def of(
        cls,
        weights: DeepseekLayerWeights,
        shape: MlaShape,
        lanes: int,
        fmt: Format = Format.BF16,
        shared: Format = Format.BF16,
    ) -> "MlaLayerWeights":
        """Rounds a model's weights: routed experts to `fmt`, shared expert or dense MLP to
        `shared`, the rest to BF16.
        """
        mlp = weights.mlp
        made: MixtureWeights | Expert
        if isinstance(mlp, DeepseekMoeWeights):
            halves = (np.split(rows, 2) for rows in mlp.gate_up)
            experts = [
                Expert.gated(gate, up, down, fmt, lanes)
                for (gate, up), down in zip(halves, mlp.down, strict=True)
            ]
            one = mlp.shared
            made = MixtureWeights(
                Matrix.of(mlp.router, Format.BF16),
                np.asarray(mlp.router_bias, np.float32),
                experts,
                Expert.gated(one.gate, one.up, one.down, shared, lanes),
            )
        else:
            made = Expert.gated(mlp.gate, mlp.up, mlp.down, shared, lanes)
        return cls(
            np.asarray(weights.attention_norm, np.float32),
            MlaMatrices.of(weights.attention, shape),
            np.asarray(weights.mlp_norm, np.float32),
            made,
        )


def mla_layer(
    machine: Machine,
    trace: Trace,
    shape: MlaLayerShape,
    weights: MlaLayerWeights,
    cache: MlaCache,
    x: Float32,
    cos: NDArray,
    sin: NDArray,
) -> Float32:
    """Residual stream x [T, hidden] of T new tokens in, residual stream [T, hidden] out.

    The tokens follow those in `cache`, which is updated. cos, sin: tables [T, rope / 2].

    Buffers, FP32 [T, hidden] if nothing is said, besides those of `mla` (whose x is the normed
    stream) and of `moe` (onto the stream `middle`) or, under `mlp`, of `expert`:

        norm1.*, norm2.*  squares, inverse [1, T]
        middle            the stream after attention
        normed2           in a dense layer in the format `act`
        dense             a dense layer's result
    """
    lanes = machine.lanes
    stream = np.asarray(x, np.float32)
    normed = norm(machine, trace, "norm1", stream, weights.attention_norm, shape.eps)
    attended = mla(machine, trace, shape.attention, weights.attention, cache, normed, cos, sin)
    middle = trace.keep("middle", vector(stream, attended, lanes=lanes, op1="add")[0]).values
    normed = norm(machine, trace, "norm2", middle, weights.mlp_norm, shape.eps)
    mlp = weights.mlp
    if isinstance(mlp, Expert):
        result = expert(machine, trace, "mlp", trace.keep("normed2", normed, shape.act), mlp)
        return trace.keep("dense", vector(middle, result, lanes=lanes, op1="add")[0]).values
    if shape.gate is None:
        raise ValueError("gate must be given for a layer with experts, not None")
    given = trace.keep("normed2", normed).values
    return moe(
        machine,
        trace,
        given,
        mlp.router,
        mlp.experts,
        shape.gate,
        shape.act,
        mlp.choice_bias,
        mlp.shared,
        middle,
    )
