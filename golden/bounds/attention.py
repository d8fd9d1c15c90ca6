# SPDX-License-Identifier: Apache-2.0
"""References and error bounds of `golden.kernels.attention` and `golden.kernels.prefill`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from golden.bounds.affine import Affine, Array, Noise
from golden.bounds.roundings import store_error, stored
from golden.bounds.softmax import CachedTokens, mixed, scores_of
from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.kv import Held, held_heads


def attention_bound(
    queries: Float32,
    keys: Sequence[Held] | NDArray[np.uint16],
    values: Sequence[Held] | NDArray[np.uint16],
    sinks: Float32 | None,
    scale: float,
    valid: NDArray[np.bool_],
    out_format: Format = Format.BF16,
) -> tuple[Array, Array]:
    """(float64 attention [heads, D], largest error of the kernel's result [heads, D]).

    Arguments as `golden.kernels.attention.attention` takes them, with the slots [slots] that count.
    Keys and values are exact as stored. The bound holds for any machine and any chunks.
    `out_format` is BF16, an MX format or FP32.
    """
    key_heads, value_heads = held_heads(keys), held_heads(values)
    heads, kv_heads, slots = len(queries), len(key_heads), len(key_heads[0].codes)
    if valid.shape != (slots,):
        raise ValueError(f"valid must be [{slots}], not {valid.shape}")
    if not valid.any():  # zeros, exactly
        nothing = np.zeros((heads, value_heads[0].codes.shape[1]))
        return nothing, nothing
    # Exact keys and values have no symbols, so that every head can have a count of its own.
    caches = [
        CachedTokens(
            [Affine.exact(row) for row in key.values[valid]],
            [Affine.exact(row) for row in value.values[valid]],
            Noise(),
            key.fmt,
        )
        for key, value in zip(key_heads, value_heads, strict=True)
    ]
    reference, bound = [], []
    for head in range(heads):
        cache, noise = caches[head // (heads // kv_heads)], Noise()
        query = stored(Affine.exact(queries[head]), noise)
        scores = scores_of(query, cache, noise).times(scale)
        sink = -np.inf if sinks is None else float(sinks[head])
        out = mixed(scores, sink, cache, slots, noise)
        if out_format is not Format.FP32:
            out = out.widened(store_error(out, out_format))
        reference.append(out.value)
        bound.append(out.bound)
    return np.stack(reference), np.stack(bound)


def prefill_bound(
    queries: Float32,
    keys: Sequence[Held] | NDArray[np.uint16],
    values: Sequence[Held] | NDArray[np.uint16],
    sinks: Float32 | None,
    scale: float,
    allowed: NDArray[np.bool_],
    out_format: Format = Format.BF16,
) -> tuple[Array, Array]:
    """(float64 attention [Q, heads * Dv], largest error of `golden.kernels.prefill.prefill`).

    `allowed` [Q, slots] are the slots that each query sees.
    """
    rows = [
        attention_bound(query, keys, values, sinks, scale, seen, out_format)
        for query, seen in zip(queries, allowed, strict=True)
    ]
    reference, bound = (
        np.stack(part).reshape(len(queries), -1) for part in zip(*rows, strict=True)
    )
    return reference, bound
