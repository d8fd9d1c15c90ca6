# SPDX-License-Identifier: Apache-2.0
"""Bit-exact model of the mixture-of-experts kernel of all three models: router, gate, the chosen
experts' gated MLPs, a shared expert if there is one, weighted sum.

A token's experts are added in ascending order of their ids, onto the shared expert's output, the
residual stream, both, or zeros. So a batch visits each expert once, and a token's result is the
same in any batch.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from golden.formats import Format, to_bf16_codes
from golden.fp32 import Float32
from golden.kernels.gate import gate as gate
from golden.kernels.gate import gates
from golden.kernels.trace import Machine, Stored, Trace
from golden.matmul import matmul
from golden.models import GateSpec
from golden.quantise import quantise
from golden.vector import vector

ALPHA = float(np.float32(1.702))
LIMIT = 7.0


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [N, K] as the array takes it, with an FP32 bias [N]."""

    codes: NDArray
    scales: NDArray[np.uint8] | None
    fmt: Format
    bias: Float32

    @classmethod
    def of(cls, weights: NDArray, fmt: Format, bias: NDArray | None = None) -> "Matrix":
        """Rounds real weights [N, K] to `fmt`; no bias means zeros."""
        values = np.asarray(weights, np.float32)
        zeros = np.zeros(len(values), np.float32)
        given = zeros if bias is None else np.asarray(bias, np.float32)
        if fmt is Format.BF16:
            return cls(to_bf16_codes(values), None, fmt, given)
        codes, scales = quantise(values, fmt)
        return cls(codes, scales, fmt, given)

    def times(self, machine: Machine, act: Stored) -> Float32:
        """FP32 [M, N] of activations [M, K]."""
        return matmul(
            act.codes,
            act.scales,
            act.fmt,
            self.codes,
            self.scales,
            self.fmt,
            machine.rows,
            self.bias,
        )


@dataclass(frozen=True)
class Expert:
    """`gate_up` [2 P, hidden]: gate rows, then up rows, each padded with zero rows to P; `down`
    [hidden, intermediate]. The biases of `swiglu` experts are zeros: their models have none.
    """

    gate_up: Matrix
    down: Matrix
    intermediate: int
    activation: Literal["clamped-swiglu", "swiglu"] = "clamped-swiglu"

    @property
    def biased(self) -> bool:
        """Whether the model gives biases."""
        return self.activation == "clamped-swiglu"

    @classmethod
    def of(
        cls,
        gate_up: NDArray,
        gate_up_bias: NDArray,
        down: NDArray,
        down_bias: NDArray,
        fmt: Format,
        lanes: int,
    ) -> "Expert":
        """From GPT-OSS's interleaved rows (even gate, odd up) [2 I, hidden] and [hidden, I]."""
        halves = [(gate_up[half::2], gate_up_bias[half::2]) for half in range(2)]
        size = len(gate_up) // 2
        padded = [padded_rows(rows, bias, lanes) for rows, bias in halves]
        rows, biases = (np.concatenate(parts) for parts in zip(*padded, strict=True))
        return cls(Matrix.of(rows, fmt, biases), Matrix.of(down, fmt, down_bias), size)

    @classmethod
    def gated(cls, gate: NDArray, up: NDArray, down: NDArray, fmt: Format, lanes: int) -> "Expert":
        """DeepSeek's and Kimi's: silu(gate x) * up x, no biases; [I, hidden] twice, [hidden, I]."""
        none = np.zeros(len(gate), np.float32)
        rows = np.concatenate([padded_rows(part, none, lanes)[0] for part in (gate, up)])
        return cls(Matrix.of(rows, fmt), Matrix.of(down, fmt), len(gate), "swiglu")


@dataclass(frozen=True)
class MixtureWeights:
    """Router, the bias [experts] of the choice, routed experts, shared expert; None: the model has
    none.
    """

    router: Matrix
    choice_bias: Float32 | None
    experts: list[Expert]
    shared: Expert | None


def padded_rows(rows: NDArray, bias: NDArray, lanes: int) -> tuple[Float32, Float32]:
    """Rows [I, K] and their bias [I], with zeros up to a multiple of `lanes` rows."""
    size = -(-len(rows) // lanes) * lanes
    wide, biases = np.zeros((size, rows.shape[1]), np.float32), np.zeros(size, np.float32)
    wide[: len(rows)], biases[: len(rows)] = rows, bias
    return wide, biases


def expert(machine: Machine, trace: Trace, name: str, x: Stored, weights: Expert) -> Float32:
    """One expert on activations [M, hidden]: FP32 [M, hidden]."""
    lanes, size = machine.lanes, weights.intermediate
    both = trace.keep(f"{name}.gate_up", weights.gate_up.times(machine, x)).values
    half = both.shape[1] // 2
    gates, ups = both[:, :size], both[:, half : half + size]
    if weights.activation == "clamped-swiglu":
        activated = vector(
            gates,
            np.float32(ALPHA),
            lanes=lanes,
            clamp=LIMIT,
            clamp_hi=True,
            mul=True,
            s2="b",
            function="sigmoid",
            mul2=True,
            s4="x",
        )[0]
    else:
        activated = vector(gates, lanes=lanes, function="sigmoid", mul2=True, s4="x")[0]
    gated = trace.keep(f"{name}.gated", activated).values
    if weights.activation == "clamped-swiglu":
        product = vector(
            ups,
            np.float32(1.0),
            gated,
            lanes=lanes,
            clamp=LIMIT,
            clamp_hi=True,
            clamp_lo=True,
            op1="add",
            s1="b",
            mul=True,
            s2="d",
        )[0]
    else:
        product = vector(ups, None, gated, lanes=lanes, mul=True, s2="d")[0]
    hidden = trace.keep(f"{name}.hidden", product, x.fmt)
    return trace.keep(f"{name}.down", weights.down.times(machine, hidden)).values


def moe(
    machine: Machine,
    trace: Trace,
    x: Float32,
    router: Matrix,
    experts: list[Expert],
    spec: GateSpec,
    act: Format = Format.BF16,
    bias: Float32 | None = None,
    shared: Expert | None = None,
    base: Float32 | None = None,
) -> Float32:
    """The experts' weighted sum [tokens, hidden] of normed activations x [tokens, hidden], FP32.

    `bias` [experts] is that of the choice, see `gates`; `shared` is an expert that every token
    takes with share 1. `base` [tokens, hidden] is a residual stream that all of it is added to.
    """
    lanes = machine.lanes
    rounded = trace.keep("x_bf16", x, Format.BF16)
    given = rounded if act is Format.BF16 else trace.keep("x_act", x, act)
    logits = trace.keep("logits", router.times(machine, rounded)).values
    chosen, weights = gates(machine, trace, "gate", logits, spec, bias)
    out = np.zeros(np.shape(x), np.float32) if base is None else np.array(base, np.float32)
    if shared is not None:
        result = expert(machine, trace, "shared", given, shared)
        out = result.copy() if base is None else vector(out, result, lanes=lanes, op1="add")[0]
    for e in np.unique(chosen):
        tokens, places = np.nonzero(chosen == e)
        scales = None if given.scales is None else given.scales[tokens]
        rows = Stored(given.codes[tokens], given.fmt, scales)
        result = expert(machine, trace, f"e{e}", rows, experts[e])
        shares = weights[tokens, places][:, None]
        out[tokens] = vector(
            result, shares, out[tokens], lanes=lanes, mul=True, s2="b", add=True, s3="d"
        )[0]
    return trace.keep("moe", out).values
