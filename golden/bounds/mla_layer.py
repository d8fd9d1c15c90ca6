# SPDX-License-Identifier: Apache-2.0
"""Reference and error bound of `golden.kernels.mla_layer`: tokens in turn from an empty cache."""

from collections.abc import Iterable, Iterator

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


def middle_forms(
    shape: MlaLayerShape,
    weights: MlaLayerWeights,
    cache: MlaCache,
    xs: Float32,
    cos: NDArray,
    sin: NDArray,
    first: int,
) -> Iterator[tuple[Affine, Noise]]:
    """The residual stream [hidden] after attention of each token from `first` on."""
    tokens: list[Affine] = []
    inside = shape.attention, weights.attention, cache
    tables = zip(*rope_rows(cos, sin), strict=True)
    for x, table in zip(np.asarray(xs, np.float64), tables, strict=True):
        noise = Noise()
        stream = Affine.exact(x)
        given = stored(norm(stream, weights.attention_norm, shape.eps), noise)
        tokens.append(key_form(*inside, given, *table, noise))
        if len(tokens) > first:
            attended = attend(*inside, given, tokens, *table, noise)
            yield (stream + times(weights.attention.output, attended)).rounded(), noise


def mlp_form(
    shape: MlaLayerShape,
    weights: MlaLayerWeights,
    middle: Affine,
    ids: NDArray[np.int64] | None,
    noise: Noise,
) -> Affine:
    """A token's result [hidden] from its stream after attention; `ids` [top_k] are its experts."""
    normed = norm(middle, weights.mlp_norm, shape.eps)
    mlp = weights.mlp
    if isinstance(mlp, Expert):
        result = expert_form(stored(normed, noise, shape.act), shape.act, mlp)
        return (middle + result).rounded()
    if shape.gate is None or ids is None:
        raise ValueError("gate and ids must be given for a layer with experts, not None")
    return mixture_form(
        normed,
        mlp.router,
        mlp.experts,
        shape.gate,
        ids,
        shape.act,
        mlp.choice_bias,
        mlp.shared,
        middle,
        noise,
    )


def ends(forms: Iterable[Affine]) -> tuple[Array, Array]:
    """(values, bounds) of rows."""
    rows = list(forms)
    return np.stack([row.value for row in rows]), np.stack([row.bound for row in rows])


def each_token(ids: NDArray[np.int64] | None, count: int) -> list[NDArray[np.int64] | None]:
    """The ids of each of `count` tokens; all None for a dense layer."""
    if ids is not None and len(ids) != count:
        raise ValueError(f"ids must be of {count} tokens, not {len(ids)}")
    return [None] * count if ids is None else list(np.asarray(ids))


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

    Worst cases multiply along a layer: of more than some tokens or for wide layers little is left,
    and ValueError may say that the shares could be anything. `middle_bound` and `mlp_bound` bound
    its two halves.
    """
    if not 0 <= first < len(xs):
        raise ValueError(f"first must be 0 to {len(xs) - 1}, not {first!r}")
    forms = middle_forms(shape, weights, cache, xs, cos, sin, first)
    tokens = each_token(ids, len(xs) - first)
    return ends(
        mlp_form(shape, weights, middle, own, noise)
        for (middle, noise), own in zip(forms, tokens, strict=True)
    )


def middle_bound(
    shape: MlaLayerShape,
    weights: MlaLayerWeights,
    cache: MlaCache,
    xs: Float32,
    cos: NDArray,
    sin: NDArray,
    first: int = 0,
) -> tuple[Array, Array]:
    """The same of the residual stream after attention."""
    if not 0 <= first < len(xs):
        raise ValueError(f"first must be 0 to {len(xs) - 1}, not {first!r}")
    return ends(form for form, _ in middle_forms(shape, weights, cache, xs, cos, sin, first))


def mlp_bound(
    shape: MlaLayerShape,
    weights: MlaLayerWeights,
    middle: Float32,
    ids: NDArray[np.int64] | None = None,
) -> tuple[Array, Array]:
    """(float64 result, largest error) of the layer's second half on the streams [T, hidden] that
    the kernel's own attention has left.
    """
    tokens = each_token(ids, len(middle))
    return ends(
        mlp_form(shape, weights, Affine.exact(row), own, Noise())
        for row, own in zip(np.asarray(middle, np.float64), tokens, strict=True)
    )
