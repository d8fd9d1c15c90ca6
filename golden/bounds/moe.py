# SPDX-License-Identifier: Apache-2.0
"""Reference and error bound of `golden.kernels.moe`."""

import numpy as np
from numpy.typing import NDArray

from golden.bounds.affine import Affine, Array, Noise, growth
from golden.bounds.roundings import array_error, store_error, stored
from golden.bounds.softmax import shares_of
from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.moe import LIMIT, Expert, Matrix
from golden.quantise import dequantise
from golden.reference.gate import sigmoid

SWISH = 1.702  #: alpha of the clamped SwiGLU, which the kernel rounds to FP32


def times(weights: Matrix, x: Affine, act: Format = Format.BF16) -> Affine:
    """Products [N] of stored activations x [K] with a matrix, plus its bias."""
    values, bias = (
        dequantise(weights.codes, weights.scales, weights.fmt),
        np.asarray(weights.bias, np.float64),
    )
    error = array_error(act, weights.fmt, x.magnitude, np.abs(values), np.abs(bias))
    return (x.matrix(values) + Affine.exact(bias)).widened(error)


def check_choice(logits: Affine, ids: NDArray[np.int64]) -> None:
    """ValueError unless the errors of logits [E] allow that `ids` were computed as the best."""
    chosen = np.zeros(len(logits.value), bool)
    chosen[ids] = True
    if chosen.sum() != len(ids):
        raise ValueError(f"ids must differ, not {ids!r}")
    if chosen.all():
        return
    reach = logits.bound
    worst = (logits.value + reach)[chosen].min()
    best = (logits.value - reach)[~chosen].max()
    if worst < best:
        raise ValueError(f"ids must be the best experts, not {ids!r}")


def swish(gate: Affine) -> Affine:
    """g sigmoid(alpha g) in FP32, of gate [I].

    With s the logistic function and t = alpha g, f' is s + t s' and f'' is alpha s' (2 + t (1 - 2
    s)), which on either side falls from alpha / 2 at 0 to -0.037 alpha and then rises to 0. The
    argument is off by 2 units (alpha and the product), which changes s by |t| s' <= 0.224 of that;
    s is 1 ulp, 2 units, and the product rounds once.
    """
    argument = SWISH * gate.value
    share = sigmoid(argument)
    slope = share + argument * share * (1 - share)
    nearest = SWISH * np.maximum(np.abs(gate.value) - gate.radius, 0.0)
    near = sigmoid(nearest)
    curvature = np.maximum(near * (1 - near) * (2 + nearest * (1 - 2 * near)), 0.037)
    exact = gate.function(gate.value * share, slope, SWISH * curvature)
    return exact.widened(gate.magnitude * (0.224 * growth(2) + growth(2))).rounded()


def expert_form(x: Affine, act: Format, weights: Expert) -> Affine:
    """One expert's output [hidden] for stored activations x [hidden]."""
    both = times(weights.gate_up, x, act)
    size, half = weights.intermediate, len(both.value) // 2
    gated = swish(both[:size].clamped(-np.inf, LIMIT))
    up = both[half : half + size].clamped(-LIMIT, LIMIT)
    hidden = gated.product((up + Affine.exact(1.0)).rounded()).rounded()
    # These roundings meet one matrix only: they need no symbols.
    return times(weights.down, hidden.widened(store_error(hidden, act)), act)


def weighted_experts(
    total: Affine,
    x: Affine,
    act: Format,
    logits: Affine,
    experts: list[Expert],
    ids: NDArray[np.int64],
) -> Affine:
    """`total` [hidden] plus the chosen experts' outputs by share, FP32 throughout."""
    check_choice(logits, ids)
    shares = shares_of(logits[ids])
    for i, e in enumerate(ids):
        result = expert_form(x, act, experts[e])
        total = (total + result.product(shares[i]).rounded()).rounded()
    return total


def moe_bound(
    x: Float32,
    router: Matrix,
    experts: list[Expert],
    k: int,
    ids: NDArray[np.int64],
    act: Format = Format.BF16,
) -> tuple[Array, Array]:
    """(float64 mixture [tokens, hidden], largest error of the kernel's result [tokens, hidden]).

    `router` and `experts` are exact as quantised; x [tokens, hidden] and the hidden layer are not
    rounded in the reference. `ids` [tokens, k] are the kernel's choices: ValueError if the
    reference's logits, within their error, speak against one. The bound holds for any machine.
    """
    if np.shape(ids) != (len(x), k):
        raise ValueError(f"ids must be {(len(x), k)}, not {np.shape(ids)}")
    reference, bound = [], []
    for row, chosen in zip(np.asarray(x, np.float64), np.asarray(ids), strict=True):
        noise = Noise()
        token = Affine.exact(row)
        rounded = stored(token, noise)
        given = rounded if act is Format.BF16 else stored(token, noise, act)
        out = weighted_experts(
            Affine.exact(np.zeros(len(row))), given, act, times(router, rounded), experts, chosen
        )
        reference.append(out.value)
        bound.append(out.bound)
    return np.stack(reference), np.stack(bound)
