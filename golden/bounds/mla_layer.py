# SPDX-License-Identifier: Apache-2.0
"""Reference and error bound of `golden.kernels.mla_layer`: tokens in turn from an empty cache."""

import numpy as np
from numpy.typing import NDArray

from golden.bounds.affine import Affine, Array, Noise
from golden.bounds.layer import norm
from golden.bounds.mla import attend, key_form
from golden.bounds.moe import expert_form, mixture_form, times
from golden.bounds.roundings import stored
from golden.fp32 import Float32
from golden.kernels.mla import MlaCache, rope_rows
from golden.kernels.mla_layer import MlaLayerShape, MlaLayerWeights
from golden.kernels.moe import Expert


def mla_layer_bound(
    shape: MlaLayerShape,
    weights: MlaLayerWeights,
    cache: MlaCache,
    xs: Float32,
    cos: NDArray,
    sin: NDArray,
    ids: NDArray[np.int64] | None = None,
    first: int = 0,
) -> tuple[Array, Array]:
    """(float64 residual stream [T - first, hidden], largest error of the kernel's results).

    Tokens xs [T, hidden]; arguments and what is exact as in `mla_bound`. `ids` [T - first, top_k]
    are the kernel's experts, checked as in `moe_bound`; None for a dense layer.
    """
    if not 0 <= first < len(xs):
        raise ValueError(f"first must be 0 to {len(xs) - 1}, not {first!r}")
    tokens: list[Affine] = []
    reference, bound = [], []
    tables = zip(*rope_rows(cos, sin), strict=True)
    for t, (x, table) in enumerate(zip(np.asarray(xs, np.float64), tables, strict=True)):
        noise = Noise()
        stream = Affine.exact(x)
        given = stored(norm(stream, weights.attention_norm, shape.eps), noise)
        inside = shape.attention, weights.attention, cache
        tokens.append(key_form(*inside, given, *table, noise))
        if t < first:
            continue
        attended = attend(*inside, given, tokens, *table, noise)
        middle = (stream + times(weights.attention.output, attended)).rounded()
        normed = norm(middle, weights.mlp_norm, shape.eps)
        mlp = weights.mlp
        if isinstance(mlp, Expert):
            result = expert_form(stored(normed, noise, shape.act), shape.act, mlp)
            out = (middle + result).rounded()
        else:
            if shape.gate is None or ids is None:
                raise ValueError("gate and ids must be given for a layer with experts, not None")
            out = mixture_form(
                normed,
                mlp.router,
                mlp.experts,
                shape.gate,
                np.asarray(ids[t - first]),
                shape.act,
                mlp.choice_bias,
                mlp.shared,
                middle,
                noise,
            )
        reference.append(out.value)
        bound.append(out.bound)
    return np.stack(reference), np.stack(bound)
