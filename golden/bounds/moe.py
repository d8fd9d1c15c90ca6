# SPDX-License-Identifier: Apache-2.0
"""Reference and error bound of `golden.kernels.moe`."""

import numpy as np
from numpy.typing import NDArray

from golden.bounds.affine import FP32_TINY, Affine, Array, NoBound, Noise, growth
from golden.bounds.roundings import array_error, store_error, stored
from golden.bounds.softmax import shares_of
from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.gate import EPSILON
from golden.kernels.moe import LIMIT, Expert, Matrix
from golden.models import GateSpec
from golden.quantise import dequantise
from golden.reference.gate import sigmoid

SWISH = 1.702  #: alpha of the clamped SwiGLU, which the kernel rounds to FP32
BEND = (
    0.09623  #: more than the largest |second derivative| of the logistic function, 1 / (6 sqrt 3)
)


def times(weights: Matrix, x: Affine, act: Format = Format.BF16) -> Affine:
    """Products [N] of stored activations x [K] with a matrix, plus its bias."""
    values, bias = (
        dequantise(weights.codes, weights.scales, weights.fmt),
        np.asarray(weights.bias, np.float64),
    )
    error = array_error(act, weights.fmt, x.magnitude, np.abs(values), np.abs(bias))
    return (x.matrix(values) + Affine.exact(bias)).widened(error)


def check_choice(
    scores: Affine, ids: NDArray[np.int64], groups: int = 1, groups_kept: int = 1
) -> None:
    """ValueError unless the errors of scores of choice [E] allow that `ids` were the best.

    With groups, an id speaks against another expert only where that one's group is surely kept.
    """
    count = len(scores.value)
    chosen = np.zeros(count, bool)
    chosen[ids] = True
    if chosen.sum() != len(ids):
        raise ValueError(f"ids must differ, not {ids!r}")
    low, high = scores.value - scores.bound, scores.value + scores.bound
    kept = chosen.reshape(groups, -1).any(axis=1)
    if groups > 1:
        least, most = (
            np.sort(ends.reshape(groups, -1), axis=1)[:, -2:].sum(axis=1) for ends in (low, high)
        )
        better = (least[None, :] > most[:, None]).sum(axis=1)  # surely better groups than each
        if (better[kept] >= groups_kept).any():
            raise ValueError(f"ids must be of the best groups, not {ids!r}")
        rivals = (most[None, :] >= least[:, None]).sum(axis=1) - 1
        kept = kept | (rivals < groups_kept)
    rest = np.repeat(kept, count // groups) & ~chosen
    if rest.any() and high[chosen].min() < low[rest].max():
        raise ValueError(f"ids must be the best experts, not {ids!r}")


def sigmoid_scores(logits: Affine) -> Affine:
    """sigmoid(logits), 1 ulp (2 units) off."""
    value = sigmoid(logits.value)
    return logits.function(value, value * (1 - value), np.full(value.shape, BEND)).rounded(2)


def gate_shares(
    logits: Affine, ids: NDArray[np.int64], spec: GateSpec, bias: Float32 | None = None
) -> Affine:
    """Shares [top_k] of the chosen `ids`, which the errors of logits [E] must allow.

    Sigmoid scoring: the units are those of `golden.bounds.gate.shares_bound` but for the scores',
    and one more since a denominator too small by e makes its inverse too large by e / (1 - e).
    """
    if spec.scoring == "softmax":
        check_choice(logits, ids)
        return shares_of(logits[ids])
    scores = sigmoid_scores(logits)
    offset = Affine.exact(np.zeros(spec.experts) if bias is None else np.asarray(bias, np.float64))
    check_choice((scores + offset).rounded(), ids, spec.groups, spec.groups_kept)
    chosen = scores[ids]
    total = Affine(
        np.array([chosen.value.sum() + EPSILON]),
        chosen.terms.sum(axis=1, keepdims=True),
        np.array([chosen.rest.sum()]),
    )
    least = total.value - total.radius
    if least <= 0:
        raise NoBound(f"logits must be near enough for a bound, not {logits.radius.max():.3g} off")
    inverse = total.function(1 / total.value, -1 / total.value**2, 2 / least**3)
    exact = chosen.product(inverse).times(spec.scale)
    tiny = 2 * spec.scale * FP32_TINY * (1 + spec.top_k) / least
    return exact.rounded((2 + 3 + spec.top_k) + 2 + 1 + 1).widened(tiny)


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


def silu(gate: Affine) -> Affine:
    """g sigmoid(g) in FP32, of gate [I]: `swish` with alpha 1, whose argument has no rounding."""
    share = sigmoid(gate.value)
    slope = share + gate.value * share * (1 - share)
    nearest = np.maximum(np.abs(gate.value) - gate.radius, 0.0)
    near = sigmoid(nearest)
    curvature = np.maximum(near * (1 - near) * (2 + nearest * (1 - 2 * near)), 0.037)
    exact = gate.function(gate.value * share, slope, curvature)
    return exact.widened(gate.magnitude * growth(2)).rounded()


def expert_form(x: Affine, act: Format, weights: Expert) -> Affine:
    """One expert's output [hidden] for stored activations x [hidden]."""
    both = times(weights.gate_up, x, act)
    size, half = weights.intermediate, len(both.value) // 2
    gate, up = both[:size], both[half : half + size]
    if weights.activation == "clamped-swiglu":
        gated = swish(gate.clamped(-np.inf, LIMIT))
        up = (up.clamped(-LIMIT, LIMIT) + Affine.exact(1.0)).rounded()
    else:
        gated = silu(gate)
    hidden = gated.product(up).rounded()
    # These roundings meet one matrix only: they need no symbols.
    return times(weights.down, hidden.widened(store_error(hidden, act)), act)


def weighted_experts(
    total: Affine,
    x: Affine,
    act: Format,
    experts: list[Expert],
    ids: NDArray[np.int64],
    shares: Affine,
) -> Affine:
    """`total` [hidden] plus the outputs of the experts `ids` by share, FP32 throughout."""
    for i, e in enumerate(ids):
        result = expert_form(x, act, experts[e])
        total = (total + result.product(shares[i]).rounded()).rounded()
    return total


def mixture_form(
    token: Affine,
    router: Matrix,
    experts: list[Expert],
    spec: GateSpec,
    ids: NDArray[np.int64],
    act: Format,
    bias: Float32 | None,
    shared: Expert | None,
    base: Affine | None,
    noise: Noise,
) -> Affine:
    """The mixture [hidden] of one normed token, onto the residual stream `base` if there is one.

    The other arguments are those of `moe_bound`; `ids` [top_k].
    """
    rounded = stored(token, noise)
    given = rounded if act is Format.BF16 else stored(token, noise, act)
    shares = gate_shares(times(router, rounded), ids, spec, bias)
    order = np.argsort(ids)  # the kernel's
    total = Affine.exact(np.zeros(len(token.value))) if base is None else base
    if shared is not None:
        result = expert_form(given, act, shared)
        total = result if base is None else (base + result).rounded()
    return weighted_experts(total, given, act, experts, ids[order], shares[order])


def moe_bound(
    x: Float32,
    router: Matrix,
    experts: list[Expert],
    spec: GateSpec,
    ids: NDArray[np.int64],
    act: Format = Format.BF16,
    bias: Float32 | None = None,
    shared: Expert | None = None,
) -> tuple[Array, Array]:
    """(float64 mixture [tokens, hidden], largest error of the kernel's result [tokens, hidden]).

    `router` and `experts` are exact as quantised; x [tokens, hidden] and the hidden layer are not
    rounded in the reference. `ids` [tokens, top_k] are the kernel's choices: ValueError if the
    reference's logits, within their error, speak against one. The bound holds for any machine.
    """
    if np.shape(ids) != (len(x), spec.top_k):
        raise ValueError(f"ids must be {(len(x), spec.top_k)}, not {np.shape(ids)}")
    reference, bound = [], []
    for row, chosen in zip(np.asarray(x, np.float64), np.asarray(ids), strict=True):
        given = Affine.exact(row), router, experts, spec, chosen, act, bias, shared
        out = mixture_form(*given, None, Noise())
        reference.append(out.value)
        bound.append(out.bound)
    return np.stack(reference), np.stack(bound)
