# SPDX-License-Identifier: Apache-2.0
"""The order in which experts are chosen, exactly: the bit-exact model of the top-k unit.

Scores rank in descending order; equal scores (-0 equals +0) rank by lower index first; a NaN of
either sign ranks below everything, -inf included, so it is chosen only when nothing else is left,
lower index first again. Experts, groups and the best two of a group are all chosen by this rule.
"""

import numpy as np

from golden import fp32


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


def kept_groups(choice: fp32.Float32, groups: int, groups_kept: int) -> np.ndarray:
    """Which groups take part, bool [..., groups], by the scores of choice float32 [..., E].

    The experts stand in `groups` equal runs of two or more. A group's score is the FP32 sum of its
    best two, the better one first; the best `groups_kept` groups are kept.
    """
    experts = choice.shape[-1]
    if groups < 1 or experts % groups or experts // groups < 2:
        raise ValueError(
            f"groups must split {experts} experts evenly in twos or more, not {groups!r}"
        )
    if not 1 <= groups_kept <= groups:
        raise ValueError(f"groups_kept must be 1 to {groups}, not {groups_kept!r}")
    _, best = topk(choice.reshape(*choice.shape[:-1], groups, experts // groups), 2)
    ids, _ = topk(fp32.add(best[..., 0], best[..., 1]), groups_kept)
    kept = np.zeros((*choice.shape[:-1], groups), bool)
    np.put_along_axis(kept, ids, True, axis=-1)
    return kept


def choose(
    scores: fp32.Float32,
    k: int,
    *,
    bias: fp32.Float32 | None = None,
    groups: int = 1,
    groups_kept: int = 1,
) -> tuple[np.ndarray, fp32.Float32, np.ndarray]:
    """What TOPK does to float32 scores [..., E]: the `k` chosen experts, best first.

    The choice goes by scores + bias (FP32; bias [E] or None). With more than one group the experts
    of the kept groups come before all others, whatever the signs of their scores; those of dropped
    groups follow in an order of their own when the kept groups have fewer than k numbers, for a NaN
    comes only when the row has no number left.

    Returns (ids int64 [..., k], scores [..., k], nan_row bool [...]): the scores are those without
    the bias, bits unchanged; `nan_row` says that every score of choice is NaN. Raises ValueError
    unless 1 <= k <= the experts of the kept groups.
    """
    scores = np.asarray(scores)
    if scores.dtype != np.float32:
        raise ValueError(f"scores must be float32, not {scores.dtype}")
    if bias is not None and (scores.ndim < 1 or np.shape(bias) != scores.shape[-1:]):
        raise ValueError(f"bias must be of {scores.shape[-1:]}, not {np.shape(bias)}")
    choice = scores if bias is None else fp32.add(scores, np.asarray(bias, np.float32))
    nan = np.isnan(choice)
    if groups == 1:
        if groups_kept != 1:
            raise ValueError(f"groups_kept must be 1 to 1, not {groups_kept!r}")
        ids, _ = topk(choice, k)
    else:
        size = choice.shape[-1] // groups if groups > 0 else 0
        kept = np.repeat(kept_groups(choice, groups, groups_kept), size, axis=-1)
        if not 1 <= k <= size * groups_kept:
            raise ValueError(
                f"k must be 1 to the {size * groups_kept} experts of the kept groups, not {k!r}"
            )
        rank = np.where(nan, 2, np.where(kept, 0, 1))
        # The last key is the first to decide; lexsort is stable.
        ids = np.lexsort((np.where(nan, np.float32(0), -choice), rank), axis=-1)[..., :k]
    return ids, np.take_along_axis(scores, ids, axis=-1), np.asarray(nan.all(axis=-1))
