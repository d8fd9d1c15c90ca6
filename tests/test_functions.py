# SPDX-License-Identifier: Apache-2.0
"""Lane functions: accuracy, monotonicity and specials of the golden model; the unit against it."""

import numpy as np
import pytest

from golden import fp32, functions
from golden.function_tables import (
    EXP2_OFFSET_BITS,
    INVERSE_OFFSET_BITS,
    exp2_table,
    reciprocal_table,
    rsqrt_table,
)
from golden.functions import exp2_core, reciprocal_core, rsqrt_core
from hw.functions import FunctionUnit
from hw.isa import Function
from tests.pipelined import run_pipeline
from tests.simulators import BOTH

INF = np.inf
NAN = np.nan
TINY = 2.0**-149
NAMES = ["exp2", "reciprocal", "rsqrt", "sigmoid"]
GOLDEN = {
    Function.EXP2: functions.exp2,
    Function.RECIPROCAL: functions.reciprocal,
    Function.RSQRT: functions.rsqrt,
    Function.SIGMOID: functions.sigmoid,
}
# Exponents (of 2) whose every mantissa is swept.
SWEEPS = {
    "exp2": [-3, 0, 6],
    "reciprocal": [0, 126],
    "rsqrt": [0, 1],
    "sigmoid": [-2, 2, 6],
}


def true_value(name: str, x: np.ndarray) -> np.ndarray:
    """In extended precision (64 bits where the platform has them)."""
    wide = x.astype(np.longdouble)
    with np.errstate(all="ignore"):
        if name == "exp2":
            return np.exp2(wide)
        if name == "reciprocal":
            return 1 / wide
        if name == "rsqrt":
            return 1 / np.sqrt(wide)
        return 1 / (1 + np.exp(-wide))


def largest_error(name: str, x: np.ndarray) -> float:
    """Largest error in ulp of FP32; also checks overflow, and counts what was compared."""
    true = true_value(name, x)
    got = getattr(functions, name)(x)
    limit = np.longdouble(2.0**128) * (1 - np.longdouble(2.0**-25))
    finite = np.abs(true) < limit
    assert not np.isinf(got[finite & (np.abs(true) < limit * (1 - np.longdouble(2.0**-24)))]).any()
    assert np.isinf(got[np.abs(true) >= np.longdouble(2.0**128)]).all()
    compared = finite & np.isfinite(got)
    assert compared.sum() > len(x) // 4
    true, got = true[compared], got[compared]
    exponent = np.maximum(np.frexp(np.abs(true))[1] - 1, -126)
    return float((np.abs(got - true) / np.ldexp(np.longdouble(1), exponent - 23)).max())


def check_monotonic(name: str, x: np.ndarray) -> None:
    """x ascending and of one sign, without NaN."""
    got = getattr(functions, name)(x)
    got = got[~np.isnan(got)]
    earlier, later = got[:-1], got[1:]
    rising = name in ("exp2", "sigmoid")
    assert len(got) > 1
    assert (later >= earlier if rising else later <= earlier).all()


def mantissas(exponent: int, step: int = 1) -> np.ndarray:
    """Every `step`-th float32 in [2^exponent, 2^(exponent + 1)), ascending."""
    pattern = np.arange(0, 1 << 23, step, dtype=np.uint32) | np.uint32((exponent + 127) << 23)
    return fp32.from_bits(pattern)


@pytest.mark.parametrize(("name", "exponent"), [(n, e) for n in NAMES for e in SWEEPS[n]])
def test_mantissas(name, exponent):
    x = mantissas(exponent, 5)
    assert largest_error(name, x) < 0.7
    check_monotonic(name, x)
    if name != "rsqrt":
        assert largest_error(name, -x) < 0.7
        check_monotonic(name, -x[::-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_mantissa(name):
    narrow = name in ("reciprocal", "rsqrt")
    for exponent in (-126, -1, 0, 1, 126) if narrow else (-26, -24, -16, -8, *range(-4, 9)):
        x = mantissas(exponent)
        for values in (x, -x[::-1]) if name != "rsqrt" else (x,):
            check_monotonic(name, values)
            inside = np.abs(values) < 120
            if narrow:
                assert largest_error(name, values) < 0.7
            elif inside.any():
                assert largest_error(name, values[inside]) < 0.7


@pytest.mark.parametrize("name", NAMES)
def test_random(name):
    seed = 11
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    raw = fp32.from_bits(rng.integers(0, 1 << 32, 300_000, dtype=np.uint64).astype(np.uint32))
    near = rng.uniform(-160, 160, 300_000).astype(np.float32)
    subnormal = fp32.from_bits(rng.integers(0, 1 << 23, 20_000, dtype=np.uint32))
    x = np.concatenate([raw, near, subnormal, -subnormal])
    x = np.sort(x[~np.isnan(x)])
    used = x[x > 0] if name == "rsqrt" else x
    assert largest_error(name, used) < 0.7
    check_monotonic(name, x[x > 0])
    if name != "rsqrt":
        check_monotonic(name, x[x < 0])


def test_cores_are_monotonic():
    """Inside an interval by the size of the slope, from one to the next by looking."""
    index = np.arange(256)
    first, last = index << EXP2_OFFSET_BITS, ((index + 1) << EXP2_OFFSET_BITS) - 1
    value = exp2_core(np.stack([first, last], axis=1)).ravel()
    assert (np.diff(value) >= 0).all()
    assert value[0] == 1 << 34 and value[-1] < 1 << 35

    first, last = index << INVERSE_OFFSET_BITS, ((index + 1) << INVERSE_OFFSET_BITS) - 1
    value = reciprocal_core(np.stack([first, last], axis=1)).ravel()
    assert (np.diff(value) <= 0).all()
    assert value[0] == 1 << 34 and value[-1] >= 1 << 33

    mantissa = (index & 127) << 16
    value = rsqrt_core(np.stack([mantissa, mantissa | 0xFFFF], axis=1), index[:, None] >> 7).ravel()
    assert (np.diff(value) <= 0).all()
    assert value[0] == 1 << 34 and value[-1] >= 1 << 33

    # A falling slope falls by at most 1 per step of the offset, so |slope| above the largest offset
    # makes every step go down; a rising slope only grows.
    for table in (reciprocal_table(), rsqrt_table()):
        assert max(table.c2) < 1 << INVERSE_OFFSET_BITS
        slopes = np.array(table.c1) - np.array(table.c2)
        assert slopes.min() > 1 << INVERSE_OFFSET_BITS
    assert min(exp2_table().c1) > 0


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("exp2", 0.0, 1.0),
        ("exp2", -0.0, 1.0),
        ("exp2", TINY, 1.0),
        ("exp2", -TINY, 1.0),
        ("exp2", INF, INF),
        ("exp2", -INF, 0.0),
        ("exp2", 128.0, INF),
        ("exp2", 3e38, INF),
        ("exp2", -3e38, 0.0),
        ("exp2", -149.0, TINY),
        ("exp2", -149.99998, TINY),
        ("exp2", -150.0, 0.0),
        ("exp2", NAN, NAN),
        ("reciprocal", 0.0, INF),
        ("reciprocal", -0.0, -INF),
        ("reciprocal", INF, 0.0),
        ("reciprocal", -INF, -0.0),
        ("reciprocal", 2.0**-128, INF),
        ("reciprocal", -TINY, -INF),
        ("reciprocal", 2.0**127, 2.0**-127),
        ("reciprocal", NAN, NAN),
        ("rsqrt", 0.0, INF),
        ("rsqrt", -0.0, -INF),
        ("rsqrt", INF, 0.0),
        ("rsqrt", -INF, NAN),
        ("rsqrt", -1.0, NAN),
        ("rsqrt", -TINY, NAN),
        ("rsqrt", 2.0**-148, 2.0**74),
        ("rsqrt", NAN, NAN),
        ("sigmoid", 0.0, 0.5),
        ("sigmoid", -0.0, 0.5),
        ("sigmoid", INF, 1.0),
        ("sigmoid", -INF, 0.0),
        ("sigmoid", 3e38, 1.0),
        ("sigmoid", -3e38, 0.0),
        ("sigmoid", -104.0, 0.0),
        ("sigmoid", -103.0, TINY),
        ("sigmoid", TINY, 0.5),
        ("sigmoid", NAN, NAN),
    ],
)
def test_specials(name, x, expected):
    got = fp32.bits(getattr(functions, name)(np.float32(x)))
    assert int(got) == int(fp32.bits(fp32.canonical(np.float32(expected))))


def test_exact_where_the_answer_is():
    n = np.arange(-149, 128)
    power = np.ldexp(1.0, n)
    np.testing.assert_array_equal(functions.exp2(n), power.astype(np.float32))
    k = np.arange(-127, 128)
    x = np.ldexp(1.0, k)
    np.testing.assert_array_equal(functions.reciprocal(x), (1 / x).astype(np.float32))
    np.testing.assert_array_equal(functions.reciprocal(-x), (-1 / x).astype(np.float32))
    k = np.arange(-74, 64)
    np.testing.assert_array_equal(functions.rsqrt(np.ldexp(1.0, 2 * k)), np.ldexp(1.0, -k))


def test_shape_is_kept():
    for name in NAMES:
        assert getattr(functions, name)(np.ones((2, 3, 4))).shape == (2, 3, 4)
        assert getattr(functions, name)(np.float32(1)).shape == ()


def unit_operands(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    kind = rng.integers(0, 5, count)
    field = rng.integers(90, 136, count).astype(np.uint32)
    x = np.where(kind < 2, (x & 0x807FFFFF) | (field << 23), x)
    x = np.where(kind == 2, fp32.bits(rng.uniform(-160, 160, count).astype(np.float32)), x)
    x = np.where(kind == 3, x & 0x80FFFFFF, x)
    edges = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F7FFFFF, 0x40000000, 0x42FFFFFF, 0x43000000]
    edges += [0x4315FFFF, 0x43160000, 0x437FFFFF, 0x43800000, 0x7E800000, 0x7F000000, 0x7F7FFFFF]
    edges += [0x7F800000, 0x7F800001, 0x7FC00000, 0xFFC12345 & 0x7FFFFFFF]
    corner = np.array(edges + [edge | 1 << 31 for edge in edges], np.uint32)
    x = np.concatenate([np.repeat(corner, len(Function)), x])
    function = np.concatenate(
        [np.tile(np.arange(len(Function)), len(corner)), rng.integers(0, len(Function), count)]
    )
    return x, function


@BOTH
@pytest.mark.parametrize("stalls", [None, 3], ids=["free", "stalls"])
def test_unit(stalls):
    x, function = unit_operands(2500 if stalls is None else 800, 21)
    expected = x.copy()
    for code, golden in GOLDEN.items():
        chosen = function == code
        assert chosen.sum() > 100
        expected[chosen] = fp32.bits(golden(fp32.from_bits(x[chosen])))
    inputs = {"x": x, "function": function}
    result = run_pipeline(FunctionUnit(), inputs, ["result"], stalls)["result"]
    assert len(result) == len(x)
    np.testing.assert_array_equal(result, expected)
