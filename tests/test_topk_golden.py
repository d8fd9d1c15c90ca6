# SPDX-License-Identifier: Apache-2.0
"""The bit-exact top-k model against a plain selection loop, and its edges."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden.topk import choose, topk


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


# Bias and groups


def ranked(left: list[int], better) -> int:
    """The best of `left` (ascending): the first that no other beats."""
    best = left[0]
    for index in left[1:]:
        if better(index, best):
            best = index
    return best


def choose_plainly(
    scores: np.ndarray, bias: np.ndarray, k: int, groups: int, kept: int
) -> list[int]:
    """The rules in words, one choice at a time."""
    with np.errstate(all="ignore"):
        choice = [np.float32(s + b) for s, b in zip(scores, bias, strict=True)]
    size = len(choice) // groups
    open_groups = list(range(groups))
    if groups > 1:
        sums = []
        for g in range(groups):
            first, second = select(np.array(choice[g * size : (g + 1) * size]), 2)
            with np.errstate(all="ignore"):
                sums.append(np.float32(choice[g * size + first] + choice[g * size + second]))
        open_groups = select(np.array(sums, np.float32), kept)

    def better(challenger: int, holder: int) -> bool:
        a, b = choice[challenger], choice[holder]
        if math.isnan(a) or math.isnan(b):
            return math.isnan(b) and not math.isnan(a)
        a_open, b_open = challenger // size in open_groups, holder // size in open_groups
        return a_open > b_open if a_open != b_open else bool(a > b)

    left, chosen = list(range(len(choice))), []
    for _ in range(k):
        chosen.append(ranked(left, better))
        left.remove(chosen[-1])
    return chosen


VALUES = [0.0, -0.0, 1.0, -1.0, 1.5, -2.0, 1e-45, math.inf, -math.inf, math.nan, 3e38]
gated_rows = st.integers(0, 3).flatmap(
    lambda log2: st.integers(2, 6).flatmap(
        lambda size: st.tuples(
            st.just(1 << log2),
            st.lists(st.sampled_from(VALUES), min_size=size << log2, max_size=size << log2),
            st.lists(st.sampled_from(VALUES[:6]), min_size=size << log2, max_size=size << log2),
            st.integers(1, 1 << log2),
            st.integers(1, 8),
        )
    )
)


@settings(max_examples=300, deadline=None)
@given(gated_rows)
def test_choice_by_bias_and_groups(row) -> None:
    groups, values, biases, kept, k = row
    scores, bias = np.array(values, np.float32), np.array(biases, np.float32)
    k = min(k, len(scores) // groups * kept)
    ids, chosen, nan_row = choose(scores, k, bias=bias, groups=groups, groups_kept=kept)
    assert ids.tolist() == choose_plainly(scores, bias, k, groups, kept)
    np.testing.assert_array_equal(chosen.view(np.uint32), scores[ids].view(np.uint32))
    with np.errstate(all="ignore"):
        choice = scores + bias
    assert nan_row == np.isnan(choice).all()
    numbers = np.count_nonzero(~np.isnan(choice))
    assert not np.isnan(choice[ids[:numbers]]).any()  # a NaN only when nothing else is left


@pytest.mark.parametrize("experts, groups, kept, k", [(256, 8, 4, 8), (512, 8, 3, 8)])
def test_dropped_groups_stay_out_although_all_scores_are_negative(
    experts: int, groups: int, kept: int, k: int
) -> None:
    rng = np.random.default_rng(experts)
    scores = rng.random((20, experts)).astype(np.float32)
    bias = np.full(experts, -3, np.float32)
    ids, _, _ = choose(scores, k, bias=bias, groups=groups, groups_kept=kept)
    runs = np.sort((scores + bias).reshape(20, groups, -1), axis=-1)
    best = np.argsort(-(runs[..., -1] + runs[..., -2]), axis=-1)[:, :kept]
    for row, allowed in zip(ids, best, strict=True):
        assert set(row // (experts // groups)) <= set(allowed)


def test_the_bias_only_chooses() -> None:
    scores = np.array([0.5, 0.25, 0.125, -0.0], np.float32)
    bias = np.array([0, 0, 1, 2], np.float32)
    ids, chosen, nan_row = choose(scores, 3, bias=bias)
    assert ids.tolist() == [3, 2, 0] and chosen.tolist() == [0, 0.125, 0.5]
    assert np.signbit(chosen[0]) and not nan_row
    # Only the FP32 sum counts: the last bit of 1 + 2^-24 is lost, and the lower index goes first.
    tied = np.array([1, 1 + 2.0**-23], np.float32)
    assert choose(tied, 2, bias=np.full(2, 8, np.float32))[0].tolist() == [0, 1]
    assert choose(tied, 2)[0].tolist() == [1, 0]


def test_nan_rows_give_valid_ids() -> None:
    scores = np.full((2, 16), np.nan, np.float32)
    scores[1, 13] = -np.inf
    ids, _, nan_row = choose(scores, 4, groups=4, groups_kept=1)
    assert ids.tolist() == [[0, 1, 2, 3], [13, 0, 1, 2]] and nan_row.tolist() == [True, False]
    assert choose(np.zeros(4, np.float32), 2, bias=np.full(4, np.nan, np.float32))[2]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"groups": 3}, "groups must split 8"),
        ({"groups": 8}, "groups must split 8"),
        ({"groups": 2, "groups_kept": 0}, "groups_kept must be 1 to 2"),
        ({"groups": 2, "groups_kept": 3}, "groups_kept must be 1 to 2"),
        ({"groups_kept": 2}, "groups_kept must be 1 to 1"),
        ({"groups": 4}, "k must be 1 to the 2 experts of the kept groups, not 3"),
    ],
)
def test_impossible_groups_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(np.zeros(8, np.float32), 3, **options)


@pytest.mark.parametrize("shape", [(), (7,), (1, 8)])
def test_a_bias_of_another_shape_is_refused(shape: tuple) -> None:
    with pytest.raises(ValueError, match="bias must be"):
        choose(np.zeros((2, 8), np.float32), 3, bias=np.zeros(shape, np.float32))


def test_no_rows() -> None:
    ids, scores, nan = choose(np.zeros((0, 8), np.float32), 3, groups=4, groups_kept=2)
    assert ids.shape == scores.shape == (0, 3) and nan.shape == (0,)
