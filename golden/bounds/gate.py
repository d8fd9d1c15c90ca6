# SPDX-License-Identifier: Apache-2.0
"""Reference and error bound of the shares that `golden.kernels.gate` computes."""

import numpy as np
from numpy.typing import NDArray

from golden.bounds.affine import FP32_TINY, Affine, Array, growth
from golden.bounds.softmax import shares_of
from golden.fp32 import Float32
from golden.kernels.gate import EPSILON
from golden.models import GateSpec
from golden.reference.gate import sigmoid


def shares_bound(logits: Float32, ids: NDArray[np.int64], spec: GateSpec) -> tuple[Array, Array]:
    """(float64 shares [T, top_k] of the chosen `ids`, largest error of the kernel's shares).

    Finite logits [T, experts] without error; `ids` [T, top_k] are the kernel's choices. Sigmoid
    scoring, in units of 2^-24: a score is off by 2 (1 ulp); in the sum by 1 for the factor, 1 for
    the product, 1 for the addend and at most top_k for the additions; the reciprocal takes 2, the
    product with the score 1. Scores may besides be off by the least subnormal.
    """
    chosen = np.take_along_axis(np.asarray(logits, np.float64), ids, axis=-1)
    if spec.scoring == "softmax":
        forms = [shares_of(Affine.exact(row)) for row in chosen]
        return np.stack([f.value for f in forms]), np.stack([f.bound for f in forms])
    scores = sigmoid(chosen)
    total = scores.sum(axis=-1, keepdims=True) + EPSILON
    reference = scores / total * spec.scale
    units = 2 + (2 + 3 + spec.top_k) + 2 + 1
    tiny = spec.scale * FP32_TINY * (1 + spec.top_k) / total
    # Of a denominator that may be too small by e the inverse may be too large by e / (1 - e).
    relative = growth(units) / (1 - growth(units))
    return reference, relative * reference + 2 * tiny + FP32_TINY
