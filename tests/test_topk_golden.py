# SPDX-License-Identifier: Apache-2.0
"""The bit-exact top-k model against a plain selection loop, and its edges."""

import math

import numpy as np
import pytest

from golden.topk import topk


def select(scores: np.ndarray, k: int) -> list[int]:
    """Take the best remaining score k times, in the words of the definition."""
    left = list(range(len(scores)))
    chosen = []
    for _ in range(k):
        best = left[0]
        for index in left[1:]:
            challenger, holder = float(scores[index]), float(scores[best])
            if challenger > holder or (math.isnan(holder) and not math.isnan(challenger)):
                best = index
        chosen.append(best)
        left.remove(best)
    return chosen


@pytest.mark.parametrize("seed", range(8))
def test_random_scores_with_ties_and_specials(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    specials = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45], np.float32)
    compared = 0
    for _ in range(60):
        experts = int(rng.integers(1, 65))
        scores = rng.integers(-6, 6, experts).astype(np.float32)
        odd = rng.random(experts) < rng.choice([0.0, 0.3, 1.0])
        scores[odd] = rng.choice(specials, np.count_nonzero(odd))
        k = int(rng.integers(1, experts + 1))
        ids, chosen = topk(scores, k)
        assert ids.tolist() == select(scores, k)
        assert chosen.dtype == np.float32
        np.testing.assert_array_equal(chosen.view(np.uint32), scores[ids].view(np.uint32))
        compared += k
    assert compared > 100


def test_random_bit_patterns() -> None:
    rng = np.random.default_rng(99)
    for experts, k in ((128, 4), (256, 8), (384, 8), (512, 512)):
        scores = rng.integers(0, 1 << 32, experts, np.uint32).view(np.float32)
        assert topk(scores, k)[0].tolist() == select(scores, k)


def test_both_zeros_are_equal_and_keep_their_bits() -> None:
    ids, scores = topk(np.array([-1.0, -0.0, 0.0, -0.0], np.float32), 3)
    assert ids.tolist() == [1, 2, 3]
    assert np.signbit(scores).tolist() == [True, False, True]


def test_nan_is_last_even_after_minus_infinity() -> None:
    payload = np.array([0xFFC00001, 0x7F800001], np.uint32).view(np.float32)
    scores = np.array([payload[0], -np.inf, payload[1], -3.0], np.float32)
    scores[[0, 2]] = payload
    ids, chosen = topk(scores, 4)
    assert ids.tolist() == [3, 1, 0, 2]
    np.testing.assert_array_equal(chosen[2:].view(np.uint32), payload.view(np.uint32))


def test_leading_axes_are_independent() -> None:
    rng = np.random.default_rng(5)
    scores = rng.integers(-3, 3, (2, 3, 16)).astype(np.float32)
    ids, chosen = topk(scores, 4)
    assert ids.shape == chosen.shape == (2, 3, 4)
    for row in np.ndindex(2, 3):
        assert ids[row].tolist() == select(scores[row], 4)


@pytest.mark.parametrize("k", [0, -1, 5])
def test_impossible_k_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="k must be"):
        topk(np.zeros(4, np.float32), k)


def test_integer_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="scores must be"):
        topk(np.zeros(4, np.int32), 1)
