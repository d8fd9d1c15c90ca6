# SPDX-License-Identifier: Apache-2.0
"""Bit-exact model of the gates: which experts a token goes to, and with which shares.

Softmax (GPT-OSS): the best logits, and the softmax over these alone. Sigmoid (DeepSeek, Kimi):
sigmoid scores, chosen with a bias that the shares do not see and among the best groups, then
divided by their sum + 1e-20 and multiplied by a factor.
"""

import numpy as np
from numpy.typing import NDArray

from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.attention import LOG2E
from golden.kernels.trace import Machine, Trace
from golden.models import GateSpec
from golden.topk import choose
from golden.vector import exponentials, row_sum, vector

EPSILON = 1e-20  #: what the sum of sigmoid scores is kept from zero by


def sum_constants(spec: GateSpec) -> tuple[np.float32, np.float32]:
    """(factor, addend) of each chosen sigmoid score as it is summed, both rounded to FP32.

    The sum is (the scores' sum + EPSILON) / scale, whose inverse times a score is its share: the
    scaling costs no command of its own.
    """
    return np.float32(1.0 / spec.scale), np.float32(EPSILON / (spec.scale * spec.top_k))


def gates(
    machine: Machine,
    trace: Trace,
    name: str,
    logits: Float32,
    spec: GateSpec,
    bias: Float32 | None = None,
) -> tuple[NDArray[np.int64], Float32]:
    """The experts of the tokens of logits [T, experts]: (ids [T, top_k], shares [T, top_k]).

    `bias` [experts] is the one of the choice, given if and only if `spec.bias` is "choice". Best
    first, by the score of choice. A NaN among the chosen makes all shares of its token NaN.
    """
    if (bias is not None) != (spec.bias == "choice"):
        raise ValueError(f"bias must be given for a bias of the choice only, not {bias!r}")
    if np.ndim(logits) != 2 or np.shape(logits)[-1] != spec.experts:
        raise ValueError(
            f"logits must be of tokens x {spec.experts} experts, not {np.shape(logits)}"
        )
    lanes = machine.lanes
    scores = logits
    if spec.scoring == "sigmoid":
        scores = trace.keep(
            f"{name}.scores", vector(logits, lanes=lanes, function="sigmoid")[0]
        ).values
    ids, best, _ = choose(
        scores, spec.top_k, bias=bias, groups=spec.groups, groups_kept=spec.groups_kept
    )
    trace.codes(f"{name}.ids", ids.astype(np.uint32), Format.FP32)
    parts = trace.keep(f"{name}.chosen", best).values
    if spec.scoring == "softmax":
        # The first of the chosen is the largest.
        terms, sums = exponentials(parts, parts[:, 0], LOG2E, lanes=lanes)
        parts = trace.keep(f"{name}.terms", terms).values
    else:
        factor, addend = sum_constants(spec)
        sums = row_sum(parts, lanes=lanes, b=factor, d=addend, mul=True, s2="b", add=True, s3="d")
    total = trace.keep(f"{name}.total", sums).values
    # x - x + total is the total, so one command inverts it and multiplies.
    shares = vector(
        parts,
        total[0][:, None],
        lanes=lanes,
        op1="sub",
        s1="x",
        add=True,
        s3="b",
        function="reciprocal",
        mul2=True,
        s4="x",
    )[0]
    return ids, trace.keep(f"{name}.shares", shares).values


def gate(
    machine: Machine, trace: Trace, name: str, logits: Float32, k: int
) -> tuple[NDArray[np.int64], Float32]:
    """The k experts of one row of logits [E] and their shares [k]: softmax over the chosen."""
    spec = GateSpec(len(logits), k, "softmax")
    ids, shares = gates(machine, trace, name, np.asarray(logits)[None, :], spec)
    return ids[0], shares[0]
