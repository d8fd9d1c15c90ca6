# SPDX-License-Identifier: Apache-2.0
"""Every product of two codes, and every corner of scales and sums, on a simulated tile.

A product with K = 1 of all codes of one format by all codes of another gives each pair of codes one
result of its own, through edges, recoding, cells and accumulators. Cases share a simulation.
"""

from itertools import product

import numpy as np
import pytest

from golden.formats import SPECS, Format
from golden.kernels.trace import Stored
from sim.kernels.gemm import operand as random_operand
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


def every_pair(*pairs: tuple[Format, Format]) -> None:
    products = [(operand(all_codes(a), a), operand(all_codes(w), w)) for a, w in pairs]
    check(run_products(products), sum(len(a.codes) * len(w.codes) for a, w in products))


def test_every_pair_of_codes_of_one_short_format():
    every_pair(*((f, f) for f in (Format.MXFP4, *FP6)))


@pytest.mark.slow
def test_every_pair_of_codes_of_two_short_formats():
    every_pair(*((a, w) for a, w in product((Format.MXFP4, *FP6), repeat=2) if a is not w))


@pytest.mark.slow
@pytest.mark.parametrize("act", EIGHT, ids=lambda f: f.name)
def test_every_pair_of_eight_bit_codes(act):
    every_pair(*((act, weight) for weight in EIGHT))


@pytest.mark.slow
@pytest.mark.parametrize("short", (Format.MXFP4, *FP6), ids=lambda f: f.name)
def test_every_pair_of_mixed_codes(short):
    every_pair(*((short, f) for f in EIGHT), *((f, short) for f in EIGHT))


def corners(fmt: Format) -> np.ndarray:
    """Codes of zero, the least and the largest magnitudes, and one of either sign, as a column."""
    spec = SPECS[fmt]
    if fmt is Format.MXINT8:
        return np.array([0, 1, 0x7F, 0x80, 0x81, 0xFF, 0x40])[:, None]
    sign = 1 << (spec.bits - 1)
    one = spec.bias << spec.mantissa_bits
    return np.array([0, sign, 1, sign | 1, spec.max_code, sign | spec.max_code, one])[:, None]


def edge_scales(act: Format, weight: Format) -> list[tuple[Stored, Stored]]:
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
    return [single, many]


@pytest.mark.parametrize(
    "other",
    [lambda i: SCALED[(i * 5 + 2) % 6], pytest.param(lambda i: SCALED[i], marks=pytest.mark.slow)],
    ids=["another format", "the same format"],
)
def test_scales_at_their_edges(other):
    pairs = [pair for i, f in enumerate(SCALED) for pair in edge_scales(f, other(i))]
    compared = sum(len(a.codes) * len(w.codes) for a, w in pairs)
    assert compared > 6 * 35 * 35
    check(run_products(pairs), compared)


SPECIALS = {
    Format.MXFP8_E4M3: (0x7F, 0xFF),
    Format.MXFP8_E5M2: (0x7C, 0xFC, 0x7E),
    Format.BF16: (0x7F80, 0xFF80, 0x7FC0, 0xFFFF),
}


def specials(fmt: Format, other: Format) -> list[tuple[Stored, Stored]]:
    """NaN, infinity and zeros of both signs at each element of two K tiles, on either side."""
    sign = 1 << (SPECS[fmt].bits - 1)
    length = 2 * 2 * 32 + 3  # two K tiles of two rows of groups of 32, and a little
    rng = np.random.default_rng(7)
    plain = rng.integers(0, 4, (6, length))
    base = rng.integers(0, 8, length)
    places = np.arange(length)
    kinds = SPECIALS[fmt]
    pairs = []
    for values in ((0, sign), kinds):
        codes = np.tile(base, (length, 1))
        codes[places, places] = [values[p % len(values)] for p in range(length)]
        pairs.append((operand(codes, fmt), operand(plain, other)))
        pairs.append((operand(plain, other), operand(codes, fmt)))
    return pairs


@pytest.mark.parametrize(
    "other",
    [
        Format.MXFP4,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (Format.MXFP8_E4M3, Format.BF16)),
    ],
    ids=lambda f: f.name,
)
def test_special_values_in_every_position(other):
    pairs = [pair for fmt in SPECIALS for pair in specials(fmt, other)]
    check(run_products(pairs), len(SPECIALS) * 4 * 6 * 131)


def zeros() -> list[tuple[Stored, Stored]]:
    """Products and sums that are zero, of all signs, and zero rows below them."""
    fmt = Format.MXFP8_E4M3
    codes = np.array([[0, 0x80], [0x80, 0x80], [0x38, 0xB8], [0xB8, 0x38], [1, 0x81]])
    return [(operand(codes, fmt, scale), operand(codes, fmt, scale)) for scale in (0, 127)]


def long(k: int) -> tuple[Stored, Stored]:
    rng = np.random.default_rng(k)
    act = operand(rng.integers(0, 0x7F, (2, k)) | rng.integers(0, 2, (2, k)) << 7,
                  Format.MXFP8_E4M3, rng.integers(120, 135, (2, -(-k // 32))))  # fmt: skip
    weight = operand(rng.integers(0, 16, (4, k)), Format.MXFP4,
                     rng.integers(120, 135, (4, -(-k // 32))))  # fmt: skip
    return act, weight


def test_signs_of_zero_and_long_contractions():
    check(run_products([*zeros(), long(7168), long(18432)]), 2 * 25 + 2 * 8)


@pytest.mark.slow
def test_long_contractions_of_all_formats():
    """Each format once as activations and once as weights, of random values in their own scales."""
    formats = [f for f in Format if f is not Format.FP32]
    rng, pairs = np.random.default_rng(1), []
    for act, weight in zip(formats, formats[1:] + formats[:1], strict=True):
        for k in (7168, 18432):
            pairs.append((random_operand(rng, 1, k, act), random_operand(rng, 3, k, weight)))
    check(run_products(pairs), 2 * 3 * len(formats))
