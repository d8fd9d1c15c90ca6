# SPDX-License-Identifier: Apache-2.0
"""The model of the VECTOR command against plain numpy, and its corner cases by hand."""

import numpy as np
import pytest

from golden import fp32, functions
from golden.formats import CANONICAL_NAN, MX_FORMATS, Format
from golden.vector import (
    counted,
    exponentials,
    load,
    rotate,
    rounded,
    row_max,
    row_sum,
    scale_rows,
    square_sum,
    store,
    vector,
)

SEED = 20_261_130


@pytest.fixture
def rng():
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def test_every_stage_in_order(rng):
    a, b, d = (normal(rng, 5, 12) for _ in range(3))
    out, reduced = vector(
        a,
        b,
        d,
        lanes=4,
        clamp=1.5,
        clamp_hi=True,
        clamp_lo=True,
        op1="sub",
        s1="b",
        mul=True,
        s2="d",
        add=True,
        s3="x",
        function="sigmoid",
        mul2=True,
        s4="x",
        reduce="sum",
    )
    x = np.clip(a, np.float32(-1.5), np.float32(1.5))
    expected = functions.sigmoid((x - b) * d + x) * x
    assert np.array_equal(out, expected)
    assert np.array_equal(reduced, fp32.reduce_sum(expected, 4))


@pytest.mark.parametrize("op1", ["add", "sub", "max", "min"])
def test_op1(rng, op1):
    a, b = normal(rng, 3, 8), normal(rng, 8)
    plain = {"add": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum}[op1]
    assert np.array_equal(vector(a, b, lanes=4, op1=op1)[0], plain(a, b))


def test_no_stage_is_a_copy_with_canonical_nan():
    a = fp32.from_bits(np.array([[0x7F800001, 0xFFC00000, 0x80000000, 1]], np.uint32))
    out, reduced = vector(a, lanes=4)
    assert fp32.bits(out).tolist() == [[CANONICAL_NAN, CANONICAL_NAN, 0x80000000, 1]]
    assert reduced is None


@pytest.mark.parametrize("permute", [1, 2, 3, 4])
def test_permute_is_its_own_inverse(rng, permute):
    a = normal(rng, 2, 32)
    once = vector(a, lanes=4, permute=permute)[0]
    assert np.array_equal(once[0, 0], a[0, 1 << (permute - 1)])
    assert np.array_equal(vector(once, lanes=4, permute=permute)[0], a)


def test_mask_ranges():
    assert counted(5, 1, 3).tolist() == [False, True, True, False, False]
    assert counted(5, 3, 1).tolist() == [True, False, False, True, True]
    assert not counted(5, 2, 2).any()
    assert counted(5, 0, 100).all()


def test_masked_elements_are_positive_zero_and_do_not_reduce():
    a = np.array([[np.nan, -3.0, -2.0, np.inf]], np.float32)
    out, largest = vector(a, lanes=4, mask=True, mask_lo=1, mask_hi=3, reduce="max")
    assert fp32.bits(out).tolist() == [[0, 0xC0400000, 0xC0000000, 0]]
    assert largest.tolist() == [-2.0]
    assert vector(a, lanes=4, mask=True, mask_lo=1, mask_hi=3, reduce="sum")[1].tolist() == [-5.0]
    empty = {"lanes": 4, "mask": True, "mask_lo": 2, "mask_hi": 2}
    assert vector(a, reduce="max", **empty)[1].tolist() == [-np.inf]
    assert fp32.bits(vector(a, reduce="sum", **empty)[1]).tolist() == [0]


def test_clamp_takes_only_the_sides_asked_for():
    a = np.array([[-9.0, 9.0]], np.float32)
    assert vector(a, lanes=4, clamp=7.0, clamp_hi=True)[0].tolist() == [[-9.0, 7.0]]
    assert vector(a, lanes=4, clamp=7.0, clamp_lo=True)[0].tolist() == [[-7.0, 9.0]]


@pytest.mark.parametrize("fmt", list(Format))
def test_load_undoes_store(rng, fmt):
    values = normal(rng, 3, 70)
    codes, scales = store(values, fmt)
    once = load(codes, fmt, scales)
    assert np.array_equal(rounded(once, fmt), once)
    assert np.abs(once - values).max() <= np.abs(values).max() / 4
    assert (scales is not None) == (fmt in MX_FORMATS)


def test_wrappers(rng):
    a, weight = normal(rng, 3, 20), normal(rng, 20)
    assert np.array_equal(row_max(a, lanes=4), a.max(axis=1))
    assert np.allclose(row_sum(a, lanes=4), a.sum(axis=1), atol=1e-5)
    assert np.allclose(square_sum(a, lanes=4), (a * a).sum(axis=1), atol=1e-5)
    out, total = exponentials(a, a.max(axis=1), 1.4426950408889634, lanes=4)
    assert np.allclose(out, np.exp(a - a.max(axis=1, keepdims=True)), rtol=1e-5)
    assert np.array_equal(total, fp32.reduce_sum(out, 4))
    factors = normal(rng, 3)
    assert np.array_equal(scale_rows(a, factors, weight, lanes=4), (a * factors[:, None]) * weight)
    assert np.array_equal(scale_rows(a, factors, lanes=4), a * factors[:, None])


def test_rotate_both_layouts(rng):
    angle = normal(rng, 8)
    a = normal(rng, 2, 16)
    first, second = a[:, :8], a[:, 8:]
    cosine, sine = np.cos(angle), np.sin(angle)
    turned = np.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=1
    )
    half = rotate(a, np.tile(cosine, 2), np.concatenate([-sine, sine]), 4, lanes=4)
    assert np.allclose(half, turned, atol=1e-6)
    order = np.arange(16).reshape(2, 8).T.reshape(-1)  # half-split to interleaved pairs
    pairs = rotate(
        a[:, order], np.repeat(cosine, 2), np.stack([-sine, sine], 1).reshape(-1), 1, lanes=4
    )
    assert np.array_equal(pairs, half[:, order])


def test_illegal_commands_are_refused(rng):
    a = normal(rng, 2, 6)
    for bad in (
        {"permute": 3},
        {"permute": -1},
        {"op1": "div"},
        {"function": "log"},
        {"reduce": "min"},
        {"op1": "add", "s1": "c"},
        {"mul": True, "s2": "d"},
    ):
        with pytest.raises(ValueError, match="must"):
            vector(a, lanes=4, **bad)
    with pytest.raises(ValueError, match="a must be"):
        vector(a[:0], lanes=4)
