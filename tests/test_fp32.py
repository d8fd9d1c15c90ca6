# SPDX-License-Identifier: Apache-2.0
"""FP32 golden arithmetic, and the adder, multiplier and comparator against it."""

from fractions import Fraction

import numpy as np
import pytest

from golden import fp32
from hw.fp32_add import Fp32Add
from hw.fp32_compare import Fp32Compare
from hw.fp32_multiply import Fp32Multiply
from tests.pipelined import run_pipeline
from tests.simulators import BOTH

SPECIAL = np.array(
    [0, 1, 0x7FFFFF, 0x800000, 0x800001, 0xFFFFFF, 0x1000000, 0x33800000, 0x33FFFFFF, 0x34000000]
    + [0x3EFFFFFF, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3FFFFFFF, 0x40000000, 0x4B7FFFFF]
    + [0x4B800000, 0x7EFFFFFF, 0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000],
    np.uint32,
)
SPECIAL = np.concatenate([SPECIAL, SPECIAL | np.uint32(1 << 31)])


def operand_pairs(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Patterns: all pairs of specials, raw bits, cancelling neighbours, products near subnormal."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    b = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    kind = rng.integers(0, 5, count)
    field = ((a >> 23) & 0xFF).astype(np.int64)
    distance = np.clip(field + rng.integers(-27, 28, count), 0, 254).astype(np.uint32)
    border = np.clip(127 - field + rng.integers(-26, 3, count), 0, 254).astype(np.uint32)
    neighbour = ((a.astype(np.int64) + rng.integers(-4, 5, count)) & 0xFFFFFFFF).astype(np.uint32)
    b = np.where(kind == 0, neighbour ^ (b & np.uint32(1 << 31)), b)
    b = np.where(kind == 1, (b & 0x807FFFFF) | (distance << 23), b)
    b = np.where(kind == 2, (b & 0x807FFFFF) | (border << 23), b)
    a = np.where(kind == 3, a & 0x807FFFFF, a)
    first, second = np.meshgrid(SPECIAL, SPECIAL)
    return np.concatenate([first.ravel(), a]), np.concatenate([second.ravel(), b])


def nearest(exact: Fraction) -> float:
    """Rounding to FP32 from first principles; for finite results."""
    if exact == 0:
        return 0.0
    magnitude = abs(exact)
    exponent = -149
    while magnitude / Fraction(2) ** exponent >= 1 << 24:
        exponent += 1
    scaled = magnitude / Fraction(2) ** exponent
    units = int(scaled)
    rest = scaled - units
    units += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and units % 2 == 1)
    return float((units if exact > 0 else -units) * Fraction(2) ** exponent)


def test_golden_against_exact_arithmetic():
    a, b = operand_pairs(600, 1)
    x, y = fp32.from_bits(a), fp32.from_bits(b)
    compared = 0
    for operation, exact in (
        (fp32.add, Fraction.__add__),
        (fp32.sub, Fraction.__sub__),
        (fp32.mul, Fraction.__mul__),
    ):
        result = operation(x, y)
        for i in np.flatnonzero(np.isfinite(result) & np.isfinite(x) & np.isfinite(y)):
            if abs(result[i]) < 2.0**20:
                assert float(result[i]) == nearest(
                    exact(Fraction(float(x[i])), Fraction(float(y[i])))
                )
                compared += 1
    assert compared > 1000


@pytest.mark.parametrize(
    ("operation", "a", "b", "expected"),
    [
        (fp32.add, np.inf, -np.inf, 0x7FC00000),
        (fp32.add, 1.0, -1.0, 0),
        (fp32.add, -0.0, -0.0, 1 << 31),
        (fp32.sub, -0.0, 0.0, 1 << 31),
        (fp32.mul, np.inf, 0.0, 0x7FC00000),
        (fp32.mul, -1.0, 0.0, 1 << 31),
        (fp32.mul, 2.0**-149, 0.5, 0),
        (fp32.minimum, 0.0, -0.0, 1 << 31),
        (fp32.maximum, -0.0, 0.0, 0),
        (fp32.maximum, np.nan, 1.0, 0x7FC00000),
        (fp32.minimum, -np.inf, np.nan, 0x7FC00000),
    ],
)
def test_golden_specials(operation, a, b, expected):
    assert int(fp32.bits(operation(np.float32(a), np.float32(b)))) == expected


def test_nan_is_canonical():
    a, b = operand_pairs(1000, 2)
    x, y = fp32.from_bits(a), fp32.from_bits(b)
    for operation in (fp32.add, fp32.sub, fp32.mul, fp32.minimum, fp32.maximum):
        result = operation(x, y)
        assert np.isnan(result).any()
        assert (fp32.bits(result)[np.isnan(result)] == 0x7FC00000).all()


@pytest.mark.parametrize("lanes", [1, 4, 16])
@pytest.mark.parametrize("n", [0, 1, 3, 4, 15, 16, 17, 63, 64, 65, 200])
def test_reduction_order(lanes, n):
    rng = np.random.default_rng(n * 100 + lanes)
    row = rng.normal(size=n).astype(np.float32)
    partial = [[np.float32(0)] * lanes for _ in range(4)]
    for i, value in enumerate(row):
        slot = i // lanes % 4
        partial[slot][i % lanes] = np.float32(partial[slot][i % lanes] + value)
    lane = [
        np.float32(np.float32(p[0] + p[1]) + np.float32(p[2] + p[3]))
        for p in zip(*partial, strict=True)
    ]
    while len(lane) > 1:
        lane = [np.float32(lane[i] + lane[i + 1]) for i in range(0, len(lane), 2)]
    batch = np.stack([row, -row])
    assert fp32.reduce_sum(batch, lanes).tolist() == [lane[0], -lane[0]]
    maximum = row.max() if n else -np.inf
    assert fp32.reduce_max(batch, lanes)[0] == maximum


def test_reduction_of_zeros_and_nan():
    assert int(fp32.bits(fp32.reduce_sum(np.full(5, -0.0, np.float32), 4))) == 0
    assert int(fp32.bits(fp32.reduce_max(np.array([-0.0, 0.0, -0.0], np.float32), 2))) == 0
    assert int(fp32.bits(fp32.reduce_max(np.array([1.0, np.nan], np.float32), 2))) == 0x7FC00000
    with pytest.raises(ValueError, match="lanes must be"):
        fp32.reduce_sum(np.zeros(4, np.float32), 3)


@BOTH
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("stalls", [None, 7], ids=["free", "stalls"])
def test_add(stalls, stages):
    a, b = operand_pairs(2000, 3)
    x, y = fp32.from_bits(a), fp32.from_bits(b)
    subtract = np.random.default_rng(4).integers(0, 2, len(a))
    expected = fp32.bits(np.where(subtract, fp32.sub(x, y), fp32.add(x, y)))
    inputs = {"a": a, "b": b, "subtract": subtract}
    result = run_pipeline(Fp32Add(stages), inputs, ["result"], stalls)["result"]
    assert len(result) == len(a)
    np.testing.assert_array_equal(result, expected)


def test_stages():
    with pytest.raises(ValueError, match="stages must be 2 or 3, not 4"):
        Fp32Add(4)


@BOTH
@pytest.mark.parametrize("stalls", [None, 8], ids=["free", "stalls"])
def test_multiply(stalls):
    a, b = operand_pairs(2000, 5)
    expected = fp32.bits(fp32.mul(fp32.from_bits(a), fp32.from_bits(b)))
    result = run_pipeline(Fp32Multiply(), {"a": a, "b": b}, ["result"], stalls)["result"]
    assert len(result) == len(a)
    np.testing.assert_array_equal(result, expected)


@BOTH
@pytest.mark.parametrize("stalls", [None, 9], ids=["free", "stalls"])
def test_compare(stalls):
    a, b = operand_pairs(2000, 6)
    x, y = fp32.from_bits(a), fp32.from_bits(b)
    expected = {
        "less": fp32.less(x, y),
        "equal": fp32.equal(x, y),
        "unordered": fp32.unordered(x, y),
        "minimum": fp32.bits(fp32.minimum(x, y)),
        "maximum": fp32.bits(fp32.maximum(x, y)),
    }
    result = run_pipeline(Fp32Compare(), {"a": a, "b": b}, list(expected), stalls)
    for name, column in expected.items():
        assert len(result[name]) == len(a)
        np.testing.assert_array_equal(result[name], column, err_msg=name)
