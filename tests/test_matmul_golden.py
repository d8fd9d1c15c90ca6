# SPDX-License-Identifier: Apache-2.0
"""The bit-exact matmul model against exact rationals written from the definition, and its bound."""

import time
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import pytest

from golden.formats import (
    ARRAY_FORMATS,
    NATIVE_FORMAT,
    SPECS,
    Format,
    Native,
    decode,
    group_elements,
    native_pair,
    products_per_slice,
    slices,
)
from golden.matmul import add_fp32, add_ieee, cell, matmul, matmul_bound, matmul_reference
from golden.quantise import blocks_of, quantise
from tests.cell_vectors import NATIVE_PAIRS, cell_vectors, random_psum

PAIRS = list(product(ARRAY_FORMATS, ARRAY_FORMATS))


def nearest_even(x: Fraction) -> int:
    return round(x)  # Python rounds an exact tie to even


def round_24(x: Fraction) -> Fraction:
    """To 24 significant bits, exponent unbounded."""
    if x == 0:
        return x
    scale = Fraction(1)
    while abs(x) * scale >= 1 << 24:
        scale /= 2
    while abs(x) * scale < 1 << 23:
        scale *= 2
    return nearest_even(x * scale) / scale


def to_fp32_bits(x: Fraction, zero_sign: int) -> int:
    """FP32 nearest-even encoding of an exact value."""
    if x == 0:
        return zero_sign << 31
    sign, magnitude = int(x < 0) << 31, abs(x)
    exponent = 127
    while magnitude < Fraction(2) ** exponent and exponent > -126:
        exponent -= 1
    mantissa = nearest_even(magnitude / Fraction(2) ** (exponent - 23))
    if mantissa >= 1 << 24:
        mantissa, exponent = mantissa // 2, exponent + 1
    if exponent > 127:
        return sign | 0x7F800000
    if mantissa < 1 << 23:
        return sign | mantissa
    return sign | ((exponent + 127) << 23) + (mantissa - (1 << 23))


def exact_add(psum: int, addend: Fraction, nan: bool) -> int:
    """psum bits + addend, rounded once."""
    value = np.uint32(psum).view(np.float32)
    if nan or np.isnan(value):
        return 0x7FC00000
    if np.isinf(value):
        return psum
    return to_fp32_bits(Fraction(float(value)) + addend, 0)


def element(native: Native, code: int) -> tuple[int, int, int, bool]:
    """Sign, significand, exponent of its unit, special."""
    spec = SPECS[NATIVE_FORMAT[native]]
    field = code >> spec.mantissa_bits & ((1 << spec.exponent_bits) - 1)
    mantissa = code & ((1 << spec.mantissa_bits) - 1)
    m = mantissa + (1 << spec.mantissa_bits) * (field > 0)
    full = field == (1 << spec.exponent_bits) - 1
    special = {
        Native.E2M1: False,
        Native.E4M3: full and mantissa == 7,
        Native.E5M2: full,
        Native.BF16: full,
    }[native]
    return code >> (spec.bits - 1) & 1, m, max(field, 1) - spec.bias - spec.mantissa_bits, special


def exact_cell(act, weight, a_codes, w_codes, a_scale, w_scale, psum: int) -> int:
    """Definition, steps 1 to 4, in integers and rationals."""
    a = [element(act, int(c)) for c in a_codes]
    w = [element(weight, int(c)) for c in w_codes]
    nan = any(e[3] for e in a + w) or 255 in (a_scale, w_scale)
    products = [
        ((-1) ** (x[0] ^ y[0]) * x[1] * y[1], x[2] + y[2]) for x, y in zip(a, w, strict=True)
    ]
    present = [p for p in products if p[0]]
    total = Fraction(0)
    if present and not nan:
        largest = max(e for _, e in present)
        for p, e in present:
            if largest - e <= 31:
                total += p * Fraction(2) ** e
        total *= Fraction(2) ** (int(a_scale) + int(w_scale) - 254)
    return exact_add(psum, round_24(total), nan)


@pytest.mark.parametrize("pair", NATIVE_PAIRS, ids=lambda p: f"{p[0].name}-{p[1].name}")
def test_cell_against_rationals(pair):
    act, weight = pair
    seed = 100 + 10 * act + weight
    print("seed", seed)
    count = 600
    a, w, sa, sw, psum, special = cell_vectors(np.random.default_rng(seed), act, weight, count)
    got = cell(act, weight, a, w, sa, sw, special, psum.view(np.float32)).view(np.uint32)
    want = [exact_cell(act, weight, a[i], w[i], sa[i], sw[i], int(psum[i])) for i in range(count)]
    assert got.tolist() == want
    assert len(set(want)) > count // 4  # the cases are not all NaN or infinity


@cache
def code_of_value(native: Native) -> dict[tuple[float, bool], int]:
    """Code by value and sign; one NaN or infinity stands for all."""
    codes = np.arange(1 << SPECS[NATIVE_FORMAT[native]].bits)
    values = decode(NATIVE_FORMAT[native], codes)
    table = {(v, bool(np.signbit(v))): int(c) for c, v in zip(codes, values, strict=True)}
    table[(np.inf, False)] = int(codes[~np.isfinite(values)][0]) if native else 0
    return table


def recode(fmt: Format, native: Native, code: int) -> int:
    value = float(decode(fmt, np.array([code]))[0])
    key = (value, bool(np.signbit(value))) if np.isfinite(value) else (np.inf, False)
    return code_of_value(native)[key]


def exact_matmul(a, a_scale, act, w, w_scale, weight, rows, init):
    """The whole definition for one result: recoding by value, K cut, chains."""
    act_native, weight_native = native_pair(act, weight)
    n, chains, group = products_per_slice(act, weight), slices(act, weight), group_elements(weight)

    length = len(a)
    a = [recode(act, act_native, c) for c in a]
    w = [recode(weight, weight_native, c) for c in w]
    total = init
    groups = -(-length // group)
    for first in range(0, groups, rows):
        for j in range(chains):
            psum = 0
            for g in range(first, first + rows):
                low = g * group + j * n
                present = range(low, min(low + n, length))
                if g < groups:
                    sa = 127 if a_scale is None else int(a_scale[g * group // 32])
                    sw = 127 if w_scale is None else int(w_scale[g * group // 32])
                    whole = w[g * group : (g + 1) * group]
                    flagged = sw == 255 or any(element(weight_native, c)[3] for c in whole)
                    if flagged or (present and sa == 255):
                        psum = 0x7FC00000
                        continue
                    psum = exact_cell(
                        act_native, weight_native,
                        [a[k] for k in present], [w[k] for k in present], sa, sw, psum,
                    )  # fmt: skip
                else:
                    psum = exact_add(psum, Fraction(0), False)
            x = np.uint32(total).view(np.float32)
            y = np.uint32(psum).view(np.float32)
            if np.isnan(x) or np.isnan(y) or (np.isinf(x) and np.isinf(y) and x != y):
                total = 0x7FC00000
            elif np.isinf(x) or np.isinf(y):
                total = total if np.isinf(x) else psum
            else:
                zero = (total & psum) >> 31
                total = to_fp32_bits(Fraction(float(x)) + Fraction(float(y)), zero)
    return total


def random_operand(rng, fmt, lines, length, special=True):
    """Codes and scales of one side, some lines with wild exponents, NaN or infinity."""
    codes = rng.integers(0, 1 << SPECS[fmt].bits, (lines, length))
    magnitude = codes & ((1 << (SPECS[fmt].bits - 1)) - 1)
    if fmt is not Format.MXINT8:
        keep = (magnitude <= SPECS[fmt].max_code) | (special & (rng.random(codes.shape) < 0.03))
        codes = np.where(keep, codes, 0)
    if fmt is Format.BF16:
        narrow = rng.random((lines, 1)) < 0.7
        near = codes & 0x807F | (rng.integers(115, 135, codes.shape) << 7)
        codes = np.where(narrow, near, codes)
    codes = codes.astype(np.uint16 if fmt is Format.BF16 else np.uint8)
    if not SPECS[fmt].scaled:
        return codes, None
    scales = rng.integers(110, 140, (lines, blocks_of(length)))
    if special:
        wild = rng.random(scales.shape) < 0.1
        scales = np.where(wild, rng.choice([0, 1, 254, 255], scales.shape), scales)
    return codes, scales.astype(np.uint8)


@pytest.mark.parametrize("pair", PAIRS, ids=[f"{a.name}-{w.name}" for a, w in PAIRS])
def test_matmul_against_rationals(pair):
    act, weight = pair
    seed = 1000 + 10 * act + weight
    print("seed", seed)
    rng = np.random.default_rng(seed)
    finite = 0
    for length, rows in ((1, 1), (33, 2), (70, 3)):
        a, sa = random_operand(rng, act, 2, length)
        w, sw = random_operand(rng, weight, 2, length)
        init = random_psum(rng, 4).reshape(2, 2)
        got = matmul(a, sa, act, w, sw, weight, rows, init.view(np.float32)).view(np.uint32)
        for i, j in product(range(2), range(2)):
            want = exact_matmul(
                a[i], None if sa is None else sa[i], act,
                w[j], None if sw is None else sw[j], weight, rows, int(init[i, j]),
            )  # fmt: skip
            assert got[i, j] == want, (length, rows, i, j)
            finite += bool(want & 0x7F800000 != 0x7F800000)
    assert finite > 0 or Format.MXFP8_E5M2 in pair or Format.BF16 in pair


@pytest.mark.parametrize("pair", PAIRS, ids=[f"{a.name}-{w.name}" for a, w in PAIRS])
def test_bound(pair):
    """Bit-exact model within its bound of the float64 reference on quantised random data."""
    act, weight = pair
    seed = 2000 + 10 * act + weight
    print("seed", seed)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((5, 200)).astype(np.float32)
    y = rng.standard_normal((7, 200)).astype(np.float32)
    a, w = quantise(x, act), quantise(y, weight)
    init = rng.standard_normal(7).astype(np.float32)
    operands = (*a, act, *w, weight)
    got = matmul(*operands, 4, init)
    want = matmul_reference(*operands, init)
    assert (np.abs(got - want) <= matmul_bound(*operands, 4, init)).all()
    assert np.abs(want).max() > 1
    # One long K tile or many short ones: the same values within both bounds, but other roundings.
    other = matmul(*operands, 1, init)
    assert (np.abs(other - want) <= matmul_bound(*operands, 1, init)).all()


def test_signed_zero_in_rows_without_weights():
    """A negative dot that underflows gives -0, which survives only if no +0 is added after it."""
    tiny = (np.full((1, 8), 0x8001, np.uint16), None, Format.BF16)
    one = (np.full((1, 8), 0x0001, np.uint16), None, Format.BF16)
    minus_zero = np.array([-0.0], np.float32)
    assert np.signbit(matmul(*tiny, *one, 1, minus_zero)[0, 0])
    assert not np.signbit(matmul(*tiny, *one, 2, minus_zero)[0, 0])


def test_add_fp32_is_numpy_where_numpy_can():
    seed = 5
    print("seed", seed)
    rng = np.random.default_rng(seed)
    a, b = (random_psum(rng, 200_000).view(np.float32) for _ in range(2))
    keep = np.isfinite(b) & (b != 0)
    a, b = a[keep], b[keep]
    with np.errstate(all="ignore"):
        want = a + b
        got = add_fp32(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)
    number = ~np.isnan(a)
    assert number.sum() > 50_000
    exact_zero = want == 0  # numpy keeps -0 + -0; a dot is never -0
    same = (got.view(np.uint32) == want.view(np.uint32)) | exact_zero
    assert same[number].all()
    inf = np.array([np.inf, -np.inf, np.nan], np.float32)
    opposite = np.array([-np.inf, 1.0, 2.0], np.float32)
    bits = add_ieee(inf, opposite).view(np.uint32).tolist()
    assert bits == [0x7FC00000, 0xFF800000, 0x7FC00000]


def test_elements_beyond_k_do_not_matter():
    """Zeros appended to both sides change nothing unless they make more rows or K tiles."""
    seed = 6
    print("seed", seed)
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, 3, 40)).astype(np.float32)
    for act, weight in ((Format.BF16, Format.MXFP4), (Format.MXFP8_E4M3, Format.MXFP8_E4M3)):
        a, sa = quantise(x, act)
        w, sw = quantise(y, weight)
        short = matmul(a, sa, act, w, sw, weight, 4)
        long = matmul(
            np.pad(a, ((0, 0), (0, 8))), sa, act, np.pad(w, ((0, 0), (0, 8))), sw, weight, 4
        )
        assert np.array_equal(short, long)


def test_errors():
    a = np.zeros((2, 3), np.uint8)
    for bad in (np.zeros((2, 4), np.uint8), np.zeros(3, np.uint8)):
        with pytest.raises(ValueError, match=r"codes must be \[M, K\]"):
            matmul(a, None, Format.MXFP4, bad, None, Format.MXFP4, 1)
    with pytest.raises(ValueError, match="rows must be at least 1"):
        matmul(a, None, Format.MXFP4, a, None, Format.MXFP4, 0)
    with pytest.raises(ValueError, match="must be None"):
        matmul(a, np.zeros((2, 1), np.uint8), Format.BF16, a, None, Format.BF16, 1)
    with pytest.raises(ValueError, match="at least 1"):
        matmul(a[:0], None, Format.MXFP4, a, None, Format.MXFP4, 1)


def test_speed():
    """A decoder-sized product takes seconds."""
    seed = 8
    print("seed", seed)
    rng = np.random.default_rng(seed)
    a = quantise(rng.standard_normal((64, 2880)).astype(np.float32), Format.BF16)
    w = quantise(rng.standard_normal((128, 2880)).astype(np.float32), Format.MXFP4)
    start = time.process_time()
    result = matmul(*a, Format.BF16, *w, Format.MXFP4, 8)
    assert np.isfinite(result).all()
    assert time.process_time() - start < 20
