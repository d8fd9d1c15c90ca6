# SPDX-License-Identifier: Apache-2.0
"""The order in which experts are chosen, exactly: the bit-exact model of the top-k unit.

Scores rank in descending order; equal scores (-0 equals +0) rank by lower index first; a NaN of
either sign ranks below everything, -inf included, so it is chosen only when nothing else is left,
lower index first again.
"""

import numpy as np


def topk(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The `k` best of the scores along the last axis, best first.

    scores: float32 [..., E] for what the hardware does, float64 for references; any values.
    Returns (ids int64 [..., k], scores [..., k]); the scores are the given ones, bits unchanged: a
    chosen -0 stays -0 and a NaN keeps its payload. Raises ValueError unless 1 <= k <= E.
    """
    if scores.dtype not in (np.float32, np.float64):
        raise ValueError(f"scores must be float32 or float64, not {scores.dtype}")
    if scores.ndim < 1 or not 1 <= k <= scores.shape[-1]:
        raise ValueError(f"k must be 1 to the size of the last axis of {scores.shape}, not {k!r}")
    # numpy sorts NaN last and compares -0 and +0 as equal; a stable sort keeps the lower index
    # first.
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    return ids, np.take_along_axis(scores, ids, axis=-1)
