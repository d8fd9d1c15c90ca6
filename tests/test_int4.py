# SPDX-License-Identifier: Apache-2.0
"""Kimi's INT4 weights: packing and values as in the vector, and the loss of each conversion."""

import numpy as np
import pytest

from golden.formats import Format
from golden.int4 import TARGETS, convert, loss, pack, round_to_int4, unpack, values_of
from golden.quantise import dequantise
from tests.kernel_checks import load, rng_of


def test_the_vector() -> None:
    arrays, _ = load("fmt_int4_group32")
    q = unpack(arrays["weight_packed"], 96)
    np.testing.assert_array_equal(q, arrays["q_int8"])
    np.testing.assert_array_equal(pack(q), arrays["weight_packed"])
    np.testing.assert_array_equal(values_of(q, arrays["weight_scale"]), arrays["dequant"])
    ours, scales = round_to_int4(arrays["w"])
    np.testing.assert_array_equal(scales, arrays["weight_scale"])
    np.testing.assert_array_equal(ours, q)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 31, 33, 96])
def test_packing_of_any_length(length: int) -> None:
    q = rng_of(length).integers(-8, 8, (3, length))
    words = pack(q)
    assert words.dtype == np.int32 and words.shape == (3, -(-length // 8))
    np.testing.assert_array_equal(unpack(words, length), q)
    np.testing.assert_array_equal(unpack(words.view(np.uint32), length), q)


def test_values_are_exact() -> None:
    rng = rng_of(1)
    q = np.tile(np.arange(-8, 8), 2)[None]
    for code in rng.integers(0x3000, 0x4000, 50):  # BF16 from 2^-31 to 2
        scale = dequantise(np.array([[code]], np.uint16), None, Format.BF16)
        exact = q.astype(np.float64) * scale
        np.testing.assert_array_equal(values_of(q, scale).astype(np.float64), exact)


def test_powers_of_two_lose_nothing_where_the_elements_reach() -> None:
    """With scales 2^n the elements are integers of four bits: E4M3 and INT8 hold them."""
    q = np.tile(np.arange(-8, 8), 2)[None]
    for fmt in (Format.MXFP8_E4M3, Format.MXFP6_E2M3, Format.MXINT8, Format.BF16):
        codes, scales = convert(q, [[0.25]], fmt)
        np.testing.assert_array_equal(dequantise(codes, scales, fmt), q * 0.25)
        assert loss(q, [[0.25]], fmt) == (0.0, 0.0)
    assert loss(q, [[0.25]], Format.MXFP4)[0] > 0.02  # 5 and 7 are not E2M1 numbers


# Relative root mean square and largest error, of normal weights, as docs/numerics.md states.
STATED = {
    Format.MXFP4: (0.116, 0.25),
    Format.MXFP6_E2M3: (0.028, 0.0625),
    Format.MXFP8_E4M3: (0.031, 0.125),
    Format.MXINT8: (0.0077, 0.0079),
    Format.BF16: (0.0015, 0.0040),
}


@pytest.mark.parametrize("fmt", TARGETS)
def test_losses_are_as_stated(fmt: Format) -> None:
    q, scales = round_to_int4(rng_of(0).standard_normal((256, 512)))
    relative, largest = loss(q, scales, fmt)
    assert 0.9 * STATED[fmt][0] <= relative <= 1.05 * STATED[fmt][0]
    assert 0.8 * STATED[fmt][1] <= largest <= STATED[fmt][1]


def test_zeros_and_bad_arguments() -> None:
    q, scales = round_to_int4(np.zeros((2, 40)))
    assert not q.any() and np.all(scales > 0)
    assert loss(q, scales, Format.MXFP4) == (0.0, 0.0)
    with pytest.raises(ValueError, match="q must be"):
        pack([8])
    with pytest.raises(ValueError, match="words must be"):
        unpack(np.zeros((1, 2), np.int32), 33)
    with pytest.raises(ValueError, match="scales must be"):
        values_of(np.zeros((1, 33)), np.ones((1, 1)))
