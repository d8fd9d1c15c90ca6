# SPDX-License-Identifier: Apache-2.0
"""The routers in float64: which experts a token goes to, and with which weights.

Every choice is that of `golden.topk`: descending, lower index on ties, NaN only when nothing else
is left.
"""

import numpy as np

from golden.topk import topk


def router_logits(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x [S, hidden] times the router [E, hidden] transposed, plus bias [E]: logits [S, E].

    Every expert's products are added in the same order, so that equal rows give equal logits and a
    tie stays one; a BLAS product does not promise that.
    """
    wide = np.asarray(weight, np.float64)
    logits = np.empty((len(x), len(wide)))
    for token, row in enumerate(np.asarray(x, np.float64)):
        logits[token] = (wide * row).sum(axis=-1)
    return logits if bias is None else logits + np.asarray(bias, np.float64)


def softmax_gate(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """GPT-OSS: the k largest logits of [S, E], weighted by the softmax over those k alone.

    Returns (ids [S, k], weights [S, k]), best first.
    """
    ids, chosen = topk(np.asarray(logits, np.float64), k)
    terms = np.exp(chosen - chosen[..., :1])
    return ids, terms / terms.sum(axis=-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow at either end."""
    x = np.asarray(x, np.float64)
    tail = np.exp(-np.abs(x))
    return np.where(x < 0, tail, 1.0) / (1.0 + tail)


def sigmoid_gate(
    logits: np.ndarray,
    bias: np.ndarray,
    k: int,
    *,
    groups: int = 1,
    groups_kept: int = 1,
    scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """DeepSeek and Kimi: sigmoid scores, chosen with a bias [E] that the weights do not see.

    logits: [S, E]. The experts stand in `groups` equal runs; a group's score is the sum of its two
    best biased scores, and only the best `groups_kept` groups take part (the others are masked with
    -inf: biased scores can be negative, so 0 would let them win). Weights are the unbiased scores
    of the chosen, divided by their sum + 1e-20, times `scale`. Returns (ids [S, k], weights [S, k])
    in descending order of the biased score.
    """
    scores = sigmoid(logits)
    biased = scores + np.asarray(bias, np.float64)
    ids, _ = topk(mask_groups(biased, groups, groups_kept), k)
    chosen = np.take_along_axis(scores, ids, axis=-1)
    return ids, chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-20) * scale


def group_scores(biased: np.ndarray, groups: int) -> np.ndarray:
    """The sum of the two best biased scores of each group: [S, E] -> [S, groups]."""
    tokens, experts = biased.shape
    if groups < 1 or experts % groups or experts // groups < 2:
        raise ValueError(
            f"groups must split {experts} experts evenly in twos or more, not {groups!r}"
        )
    _, best = topk(biased.reshape(tokens, groups, -1), 2)
    return best.sum(axis=-1)


def mask_groups(biased: np.ndarray, groups: int, groups_kept: int) -> np.ndarray:
    """The biased scores [S, E], -inf for the experts outside each token's best groups."""
    if not 1 <= groups_kept <= groups:
        raise ValueError(f"groups_kept must be 1 to {groups}, not {groups_kept!r}")
    if groups == 1:
        return biased
    kept, _ = topk(group_scores(biased, groups), groups_kept)
    keep = np.zeros((len(biased), groups), bool)
    np.put_along_axis(keep, kept, True, axis=-1)
    return np.where(np.repeat(keep, biased.shape[-1] // groups, axis=-1), biased, -np.inf)
