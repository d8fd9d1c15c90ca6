# SPDX-License-Identifier: Apache-2.0
"""Expert MLPs in float64: activations, routed experts of both families, shared and dense MLPs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from golden.reference.gate import sigmoid
from golden.reference.linear import linear


def clamped_swiglu(gate_up: np.ndarray, alpha: float = 1.702, limit: float = 7.0) -> np.ndarray:
    """GPT-OSS: [..., 2 I] with the gate on even and the linear part on odd places -> [..., I].

    g = min(g, limit), u = clamp(u, -limit, limit), result g * sigmoid(alpha g) * (u + 1).
    """
    gate_up = np.asarray(gate_up, np.float64)
    gate = np.minimum(gate_up[..., 0::2], limit)
    up = np.clip(gate_up[..., 1::2], -limit, limit)
    return gate * sigmoid(alpha * gate) * (up + 1.0)


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return np.asarray(x, np.float64) * sigmoid(x)


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    """DeepSeek and Kimi: [..., 2 I], the gate in the first half, -> silu(gate) * up [..., I]."""
    gate, up = np.split(np.asarray(gate_up, np.float64), 2, axis=-1)
    return silu(gate) * up


def routed_experts(
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    activation: Callable[[np.ndarray], np.ndarray],
    gate_up_bias: np.ndarray | None = None,
    down_bias: np.ndarray | None = None,
) -> np.ndarray:
    """Weighted sum of the chosen experts' MLPs: x [S, hidden] -> [S, hidden].

    ids, weights: [S, k]. gate_up [E, 2 I, hidden], down [E, hidden, I], biases [E, 2 I] and [E,
    hidden] inside the weighted sum. activation: `clamped_swiglu` (gate_up rows interleaved) or
    `swiglu` (gate rows first).
    """
    x = np.asarray(x, np.float64)
    out = np.zeros((len(x), down.shape[1]))
    for expert in np.unique(ids):
        tokens, slots = np.nonzero(ids == expert)
        up_bias = None if gate_up_bias is None else gate_up_bias[expert]
        out_bias = None if down_bias is None else down_bias[expert]
        hidden = activation(linear(x[tokens], gate_up[expert], up_bias))
        # A token chooses an expert at most once, so plain indexing adds every contribution.
        out[tokens] += weights[tokens, slots, None] * linear(hidden, down[expert], out_bias)
    return out


@dataclass(frozen=True)
class GatedMlpWeights:
    """A shared expert or a dense MLP; no biases."""

    gate: np.ndarray  # [I, hidden]
    up: np.ndarray  # [I, hidden]
    down: np.ndarray  # [hidden, I]


def gated_mlp(x: np.ndarray, weights: GatedMlpWeights) -> np.ndarray:
    """down (silu(gate x) * up x): x [S, hidden] -> [S, hidden]."""
    return linear(silu(linear(x, weights.gate)) * linear(x, weights.up), weights.down)
