# SPDX-License-Identifier: Apache-2.0
"""Every product of two codes, and every corner of scales and sums, on a simulated tile.

A product with K = 1 of all codes of one format by all codes of another gives each pair of codes one
result of its own, through edges, recoding, cells and accumulators.
"""

from itertools import product

import numpy as np
import pytest

from golden.formats import SPECS, Format
from tests.products import operand, run_products

FP6 = (Format.MXFP6_E2M3, Format.MXFP6_E3M2)
EIGHT = (Format.MXFP8_E4M3, Format.MXFP8_E5M2, Format.MXINT8)
SCALED = (Format.MXFP4, *FP6, *EIGHT)
EDGE_SCALES = (0, 1, 127, 254, 0xFF)


def all_codes(fmt: Format) -> np.ndarray:
    """Every code of a format, as a column."""
    return np.arange(1 << SPECS[fmt].bits)[:, None]


def check(result, at_least):
    assert result.mismatched == 0, result.differences
    assert result.compared >= at_least


def every_pair(act, weight, config="tiny"):
    a, w = all_codes(act), all_codes(weight)
    check(run_products([(operand(a, act), operand(w, weight))], config), len(a) * len(w))


@pytest.mark.parametrize(
    "act, weight",
    [
        pytest.param(a, w, marks=[] if a is w else [pytest.mark.slow])
        for a, w in product((Format.MXFP4, *FP6), repeat=2)
    ],
)
def test_every_pair_of_short_codes(act, weight):
    every_pair(act, weight)


@pytest.mark.slow
@pytest.mark.parametrize("act, weight", product(EIGHT, repeat=2))
def test_every_pair_of_eight_bit_codes(act, weight):
    every_pair(act, weight)


@pytest.mark.slow
@pytest.mark.parametrize("act, weight", [*product(EIGHT, (Format.MXFP4, *FP6)),
                                         *product((Format.MXFP4, *FP6), EIGHT)])  # fmt: skip
def test_every_pair_of_mixed_codes(act, weight):
    every_pair(act, weight)


def corners(fmt: Format) -> np.ndarray:
    """Codes of zero, the least and the largest magnitudes, and one of either sign, as a column."""
    spec = SPECS[fmt]
    if fmt is Format.MXINT8:
        return np.array([0, 1, 0x7F, 0x80, 0x81, 0xFF, 0x40])[:, None]
    sign = 1 << (spec.bits - 1)
    one = spec.bias << spec.mantissa_bits
    return np.array([0, sign, 1, sign | 1, spec.max_code, sign | spec.max_code, one])[:, None]


@pytest.mark.parametrize(
    "act, weight",
    [(f, SCALED[(i * 5 + 2) % 6]) for i, f in enumerate(SCALED)]
    + [pytest.param(f, f, marks=pytest.mark.slow) for f in SCALED],
)
def test_scales_at_their_edges(act, weight):
    """All pairs of edge scales with corner codes: overflow, underflow, subnormal and NaN results.

    K of 1, and of three blocks with unlike scales, whose sums leave the range of FP32 or cancel.
    """
    a, w = corners(act), corners(weight)
    grid_a, scale_a = np.repeat(a, len(EDGE_SCALES), 0), np.tile(EDGE_SCALES, len(a))[:, None]
    grid_w, scale_w = np.repeat(w, len(EDGE_SCALES), 0), np.tile(EDGE_SCALES, len(w))[:, None]
    single = operand(grid_a, act, scale_a), operand(grid_w, weight, scale_w)
    rng = np.random.default_rng(6)
    long_a = a[rng.integers(0, len(a), (24, 96)), 0]
    long_w = w[rng.integers(0, len(w), (13, 96)), 0]
    middle = rng.choice([*EDGE_SCALES[:4], 120, 130], (2, 24, 3))
    many = operand(long_a, act, middle[0]), operand(long_w, weight, middle[1, :13])
    result = run_products([single, many])
    check(result, len(grid_a) * len(grid_w) + 24 * 13)


SPECIALS = {
    Format.MXFP8_E4M3: (0x7F, 0xFF),
    Format.MXFP8_E5M2: (0x7C, 0xFC, 0x7E),
    Format.BF16: (0x7F80, 0xFF80, 0x7FC0, 0xFFFF),
}


@pytest.mark.parametrize("fmt", SPECIALS, ids=lambda f: f.name)
@pytest.mark.parametrize(
    "other",
    [
        Format.MXFP4,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (Format.MXFP8_E4M3, Format.BF16)),
    ],
    ids=str,
)
def test_special_values_in_every_position(fmt, other):
    """NaN, infinity and zeros of both signs at each element of two K tiles, on either side."""
    sign = 1 << (SPECS[fmt].bits - 1)
    length = 2 * 2 * 32 + 3  # two K tiles of two rows of groups of 32, and a little
    rng = np.random.default_rng(7)
    plain = rng.integers(0, 4, (6, length))
    base = rng.integers(0, 8, length)
    cases = [(0, sign)[p % 2] for p in range(length)]
    zeros = np.tile(base, (length, 1))
    zeros[np.arange(length), np.arange(length)] = cases
    special = np.tile(base, (length, 1))
    kinds = SPECIALS[fmt]
    special[np.arange(length), np.arange(length)] = [kinds[p % len(kinds)] for p in range(length)]
    pairs = []
    for codes in (zeros, special):
        pairs.append((operand(codes, fmt), operand(plain, other)))
        pairs.append((operand(plain, other), operand(codes, fmt)))
    check(run_products(pairs), 4 * 6 * length)


def test_signs_of_zero():
    """Products and sums that are zero, of all signs, and zero rows below them."""
    fmt = Format.MXFP8_E4M3
    codes = np.array([[0, 0x80], [0x80, 0x80], [0x38, 0xB8], [0xB8, 0x38], [1, 0x81]])
    pair = operand(codes, fmt, 0), operand(codes, fmt, 0)
    check(run_products([pair, (operand(codes, fmt), operand(codes, fmt))]), 50)


@pytest.mark.parametrize("k", [pytest.param(7168, marks=pytest.mark.slow), 18432])
def test_long_contractions(k):
    rng = np.random.default_rng(k)
    act = operand(rng.integers(0, 0x7F, (2, k)) | rng.integers(0, 2, (2, k)) << 7,
                  Format.MXFP8_E4M3, rng.integers(120, 135, (2, -(-k // 32))))  # fmt: skip
    weight = operand(rng.integers(0, 16, (4, k)), Format.MXFP4,
                     rng.integers(120, 135, (4, -(-k // 32))))  # fmt: skip
    check(run_products([(act, weight)]), 8)
