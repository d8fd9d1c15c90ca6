# SPDX-License-Identifier: Apache-2.0
"""Bit-exact model of the mixture-of-experts kernel (GPT-OSS: biased router, top-k, softmax over the
chosen, clamped SwiGLU, weighted sum).
"""

from dataclasses import dataclass

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
    [hidden, intermediate].
    """

    gate_up: Matrix
    down: Matrix
    intermediate: int

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
        size = len(gate_up) // 2
        padded = -(-size // lanes) * lanes
        rows = np.zeros((2 * padded, gate_up.shape[1]), np.float32)
        bias = np.zeros(2 * padded, np.float32)
        for half in range(2):
            rows[half * padded : half * padded + size] = gate_up[half::2]
            bias[half * padded : half * padded + size] = gate_up_bias[half::2]
        return cls(Matrix.of(rows, fmt, bias), Matrix.of(down, fmt, down_bias), size)


def expert(machine: Machine, trace: Trace, name: str, x: Stored, weights: Expert) -> Float32:
    """One expert on activations [M, hidden]: FP32 [M, hidden]."""
    lanes, size = machine.lanes, weights.intermediate
    both = trace.keep(f"{name}.gate_up", weights.gate_up.times(machine, x)).values
    half = both.shape[1] // 2
    gated = trace.keep(
        f"{name}.gated",
        vector(
            both[:, :size],
            np.float32(ALPHA),
            lanes=lanes,
            clamp=LIMIT,
            clamp_hi=True,
            mul=True,
            s2="b",
            function="sigmoid",
            mul2=True,
            s4="x",
        )[0],
    ).values
    hidden = trace.keep(
        f"{name}.hidden",
        vector(
            both[:, half : half + size],
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
        )[0],
        x.fmt,
    )
    return trace.keep(f"{name}.down", weights.down.times(machine, hidden)).values


def moe(
    machine: Machine,
    trace: Trace,
    x: Float32,
    router: Matrix,
    experts: list[Expert],
    k: int,
    act: Format = Format.BF16,
) -> Float32:
    """The experts' weighted sum [tokens, hidden] of normed activations x [tokens, hidden], FP32."""
    lanes = machine.lanes
    rounded = trace.keep("x_bf16", x, Format.BF16)
    given = rounded if act is Format.BF16 else trace.keep("x_act", x, act)
    logits = trace.keep("logits", router.times(machine, rounded)).values
    out = np.zeros(np.shape(x), np.float32)
    spec = GateSpec(logits.shape[1], k, "softmax")
    chosen, weights = gates(machine, trace, "gate", logits, spec)
    for t, (ids, shares) in enumerate(zip(chosen, weights, strict=True)):
        scales = None if given.scales is None else given.scales[t : t + 1]
        token = Stored(given.codes[t : t + 1], given.fmt, scales)
        for i, e in enumerate(ids):
            result = expert(machine, trace, f"t{t}.e{i}", token, experts[e])
            share = shares[i : i + 1, None]
            if i == 0:
                out[t] = vector(result, share, lanes=lanes, mul=True, s2="b")[0][0]
            else:
                out[t] = vector(
                    result, share, out[t : t + 1], lanes=lanes, mul=True, s2="b", add=True, s3="d"
                )[0][0]
    return trace.keep("moe", out).values
