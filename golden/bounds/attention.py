# SPDX-License-Identifier: Apache-2.0
"""Reference and error bound of `golden.kernels.attention`."""

import numpy as np
from numpy.typing import NDArray

from golden.bounds.affine import Affine, Array, Noise
from golden.bounds.roundings import store_error, stored
from golden.bounds.softmax import CachedTokens, mixed, scores_of
from golden.formats import Format, bf16_to_float32
from golden.fp32 import Float32


def attention_bound(
    queries: Float32,
    keys: NDArray[np.uint16],
    values: NDArray[np.uint16],
    sinks: Float32,
    scale: float,
    valid: NDArray[np.bool_],
    out_format: Format = Format.BF16,
) -> tuple[Array, Array]:
    """(float64 attention [heads, D], largest error of the kernel's result [heads, D]).

    Arguments as `golden.kernels.attention.attention` takes them, with the slots [slots] that count.
    The bound holds for any machine and any chunks. `out_format` is BF16, an MX format or FP32.
    """
    heads, kv_heads = len(queries), keys.shape[1]
    if valid.shape != (len(keys),) or not valid.any():
        raise ValueError(f"valid must be [{len(keys)}] with a slot that counts, not {valid!r}")
    wide_keys = bf16_to_float32(keys[valid]).astype(np.float64)
    wide_values = bf16_to_float32(values[valid]).astype(np.float64)
    # Exact keys and values have no symbols, so that every head can have a count of its own.
    caches = [
        CachedTokens(
            [Affine.exact(key) for key in wide_keys[:, g]],
            [Affine.exact(value) for value in wide_values[:, g]],
            Noise(),
        )
        for g in range(kv_heads)
    ]
    reference, bound = [], []
    for head in range(heads):
        cache, noise = caches[head // (heads // kv_heads)], Noise()
        query = stored(Affine.exact(queries[head]), noise)
        scores = scores_of(query, cache, noise).times(scale)
        out = mixed(scores, float(sinks[head]), cache, len(keys), noise)
        if out_format is not Format.FP32:
            out = out.widened(store_error(out, out_format))
        reference.append(out.value)
        bound.append(out.bound)
    return np.stack(reference), np.stack(bound)
