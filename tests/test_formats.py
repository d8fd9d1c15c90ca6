# SPDX-License-Identifier: Apache-2.0
"""Number formats: every code against ml_dtypes, encodings against reference vectors, recoding, MX
blocks.
"""

from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from golden.formats import (
    ARRAY_FORMATS,
    DIGITS,
    MX_FORMATS,
    NATIVE_FORMAT,
    SPECS,
    Format,
    Native,
    bf16_to_float32,
    decode,
    decode_scale,
    encode,
    fields,
    group_elements,
    native_pair,
    parse_format,
    products_per_slice,
    recode_table,
    slices,
    to_bf16_codes,
)
from golden.quantise import dequantise, quantise

VECTORS = Path(__file__).parent / "vectors"
DTYPES = {
    Format.MXFP4: ml_dtypes.float4_e2m1fn,
    Format.MXFP6_E2M3: ml_dtypes.float6_e2m3fn,
    Format.MXFP6_E3M2: ml_dtypes.float6_e3m2fn,
    Format.MXFP8_E4M3: ml_dtypes.float8_e4m3fn,
    Format.MXFP8_E5M2: ml_dtypes.float8_e5m2,
    Format.BF16: ml_dtypes.bfloat16,
}
NAMES = [f.name for f in ARRAY_FORMATS]


def all_codes(fmt: Format) -> np.ndarray:
    bits = SPECS[fmt].bits
    return np.arange(1 << bits, dtype=np.uint16 if bits > 8 else np.uint8)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal values, signs of zero included, NaN equal to NaN."""
    nan = np.isnan(a) & np.isnan(b)
    return bool(np.all(nan | ((a == b) & (np.signbit(a) == np.signbit(b)))))


@pytest.mark.parametrize("fmt", DTYPES, ids=lambda f: f.name)
def test_decode_every_code(fmt):
    codes = all_codes(fmt)
    assert same(decode(fmt, codes), codes.view(DTYPES[fmt]).astype(np.float64))


def test_decode_int8_and_scales():
    codes = all_codes(Format.MXINT8)
    assert np.array_equal(decode(Format.MXINT8, codes), codes.view(np.int8) / 64)
    assert same(decode_scale(codes), codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64))


@pytest.mark.parametrize("fmt", ARRAY_FORMATS, ids=NAMES)
def test_fields_make_the_value(fmt):
    codes = all_codes(fmt)
    m, x, special = fields(fmt, codes)
    value = decode(fmt, codes)
    assert np.array_equal(special, ~np.isfinite(value))
    assert np.array_equal(np.ldexp(m.astype(float), x)[~special], value[~special])


@pytest.mark.parametrize("fmt", ARRAY_FORMATS, ids=NAMES)
def test_encode_is_the_inverse(fmt):
    codes = all_codes(fmt)
    value = decode(fmt, codes)
    finite = np.isfinite(value)
    if fmt is Format.MXINT8:
        finite &= codes != 0x80  # -128 only decodes
    assert np.array_equal(encode(fmt, value[finite]), codes[finite])


@pytest.mark.parametrize("fmt", ARRAY_FORMATS, ids=NAMES)
def test_encode_ties_and_neighbours(fmt):
    """Midpoints go to the even code and the float64 values beside them to the nearest one."""
    codes = np.arange(SPECS[fmt].max_code, dtype=np.int64)
    low, high = decode(fmt, codes), decode(fmt, codes + 1)
    middle = (low + high) / 2
    for sign in (0, 1):
        if fmt is Format.MXINT8:

            def signed(code, sign=sign):
                return (-code if sign else code) & 0xFF
        else:

            def signed(code, sign=sign):
                return code | sign << (SPECS[fmt].bits - 1)

        factor = -1.0 if sign else 1.0
        assert np.array_equal(encode(fmt, factor * middle), signed(codes + (codes & 1)))
        assert np.array_equal(encode(fmt, factor * np.nextafter(middle, 0)), signed(codes))
        assert np.array_equal(encode(fmt, factor * np.nextafter(middle, 1e300)), signed(codes + 1))


def test_encode_beyond_the_range():
    for fmt in MX_FORMATS:
        top = SPECS[fmt].max_code
        minus = -top & 0xFF if fmt is Format.MXINT8 else top | 1 << (SPECS[fmt].bits - 1)
        largest = decode(fmt, np.array([top]))[0]
        values = np.array([largest * 1.01, largest * 1000, np.inf, -largest * 3, -np.inf])
        assert encode(fmt, values).tolist() == [top, top, top, minus, minus]
    assert encode(Format.BF16, np.array([3.4e38, 1e300, -np.inf])).tolist() == [
        0x7F80, 0x7F80, 0xFF80,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="must not be NaN for mxfp4"):
        encode(Format.MXFP4, np.array([np.nan]))
    assert np.isnan(decode(Format.MXFP8_E4M3, encode(Format.MXFP8_E4M3, np.array([np.nan]))))
    assert np.isnan(decode(Format.MXFP8_E5M2, encode(Format.MXFP8_E5M2, np.array([np.nan]))))


@pytest.mark.parametrize(
    "fmt, file",
    [
        (Format.MXFP4, "fmt_encode_e2m1fn"),
        (Format.MXFP8_E4M3, "fmt_encode_e4m3fn"),
        (Format.MXFP8_E5M2, "fmt_encode_e5m2"),
    ],
    ids=["e2m1", "e4m3", "e5m2"],
)
def test_encode_vectors(fmt, file):
    data = np.load(VECTORS / f"{file}.npz")
    x = data["x"].astype(np.float64)
    usable = ~np.isnan(x)
    value = decode(fmt, encode(fmt, x[usable]))
    assert usable.sum() > 1000
    assert np.array_equal(value, data["value_gfloat_saturating"][usable].astype(np.float64))


def test_decode_vectors():
    data = np.load(VECTORS / "fmt_decode_tables.npz")
    tables = {"e2m1fn": Format.MXFP4, "e4m3fn": Format.MXFP8_E4M3, "e5m2": Format.MXFP8_E5M2}
    for name, fmt in tables.items():
        assert same(decode(fmt, all_codes(fmt)), data[f"decode_{name}"].astype(np.float64))
    scales = data["decode_e8m0fnu"].astype(np.float64)
    assert same(decode_scale(np.arange(256)), scales)


def test_bf16_vectors_and_random():
    data = np.load(VECTORS / "fmt_encode_bf16_fp16.npz")
    x, code = data["x"], data["bf16_code"]
    number = ~np.isnan(x)
    assert np.array_equal(to_bf16_codes(x[number]), code[number])
    assert (to_bf16_codes(x[~number]) == 0x7FC0).all()
    seed = 7
    print("seed", seed)
    bits = np.random.default_rng(seed).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = x[~np.isnan(x)]
    assert np.array_equal(to_bf16_codes(x), x.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.array_equal(encode(Format.BF16, x), to_bf16_codes(x))
    codes = all_codes(Format.BF16)
    assert np.array_equal(bf16_to_float32(codes).view(np.uint32) >> 16, codes)


def test_parse_format():
    assert [parse_format(SPECS[f].name) for f in Format] == list(Format)
    with pytest.raises(ValueError, match="not 'mxfp5'"):
        parse_format("mxfp5")


PAIRS = list(product(ARRAY_FORMATS, ARRAY_FORMATS))


@pytest.mark.parametrize("act, weight", PAIRS, ids=[f"{a.name}-{w.name}" for a, w in PAIRS])
def test_pairs(act, weight):
    """Digits, slices and products agree, and both operands recode without loss."""
    natives = native_pair(act, weight)
    assert DIGITS[natives[0]] >= DIGITS[natives[1]]
    n, p, g = products_per_slice(act, weight), slices(act, weight), group_elements(weight)
    assert n * p == g and n in (2, 4, 8, 16, 32) and g in (8, 16, 32)
    # A slice's raw codes fit one line, and whole slices fill it.
    assert n * SPECS[act].storage_bits <= 128 and 128 % (n * SPECS[act].storage_bits) == 0
    for fmt, native in zip((act, weight), natives, strict=True):
        codes = all_codes(fmt)
        value, back = decode(fmt, codes), decode(NATIVE_FORMAT[native], recode_table(fmt, native))
        finite = np.isfinite(value)
        assert np.array_equal(value[finite], back[finite])
        assert not np.isfinite(back[~finite]).any()


def test_rates():
    f4, f8, b16 = Format.MXFP4, Format.MXFP8_E4M3, Format.BF16
    expected = {
        (f4, f4): (32, 1), (f8, f4): (16, 2), (f8, f8): (8, 2), (f4, f8): (8, 2),
        (b16, f4): (8, 4), (b16, f8): (4, 4), (b16, b16): (2, 4), (f4, b16): (2, 4),
    }  # fmt: skip
    for (act, weight), want in expected.items():
        assert (products_per_slice(act, weight), slices(act, weight)) == want
    assert native_pair(Format.MXINT8, Format.MXINT8) == (Native.BF16, Native.BF16)
    with pytest.raises(ValueError, match="must hold every value"):
        recode_table(Format.BF16, Native.E4M3)
    with pytest.raises(ValueError, match="must be of the array"):
        native_pair(Format.FP32, Format.BF16)


# ---- MX blocks


def test_mxfp4_blocks_vector():
    data = np.load(VECTORS / "fmt_mxfp4_blocks.npz")
    blocks = data["blocks"]
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:2], -1)
    value = dequantise(codes, data["scales"], Format.MXFP4)
    assert np.array_equal(value, data["dequant_rows"].astype(np.float64))


def plain_quantise(block: np.ndarray, fmt: Format) -> tuple[list[int], int]:
    """One block by the letter of the definition, element by element."""
    largest = max(abs(float(x)) for x in block)
    if not all(np.isfinite(block)):
        return [0] * len(block), 0xFF
    if largest == 0:
        return [0] * len(block), 0
    shared = int(np.floor(np.log2(largest))) - SPECS[fmt].max_exponent
    shared = max(-127, min(127, shared))
    codes = np.arange(SPECS[fmt].max_code + 1)
    table = decode(fmt, codes)
    out = []
    for x in block:
        scaled = abs(float(x)) * 2.0**-shared
        distance = np.abs(table - scaled)
        near = codes[distance == distance.min()]
        code = int(near[0] if len(near) == 1 else near[near % 2 == 0][0])
        if np.signbit(x):
            code = -code & 0xFF if fmt is Format.MXINT8 else code | 1 << (SPECS[fmt].bits - 1)
        out.append(code)
    return out, shared + 127


@pytest.mark.parametrize("fmt", MX_FORMATS, ids=lambda f: f.name)
def test_quantise(fmt):
    seed = 11
    print("seed", seed)
    rng = np.random.default_rng(seed)
    spread = np.exp2(rng.integers(-20, 20, (40, 1)) + rng.integers(-6, 6, (40, 80)))
    x = (rng.standard_normal((40, 80)) * spread).astype(np.float32)
    x[0] = 0
    x[1, :32] = -0.0
    x[2, 5], x[2, 40], x[2, 70] = np.nan, np.inf, -np.inf
    x[3] *= np.float32(1e-38)
    x[4] = np.float32(1e-45)
    x[5, 3], x[5, 33] = np.finfo(np.float32).max, -np.finfo(np.float32).max
    x[6] = rng.integers(-8, 9, 80) / 4  # many ties
    codes, scales = quantise(x, fmt)
    assert codes.shape == (40, 80) and scales.shape == (40, 3)
    for i, b in product(range(40), range(3)):
        want_codes, want_scale = plain_quantise(x[i, 32 * b : 32 * b + 32], fmt)
        assert scales[i, b] == want_scale, (i, b)
        assert codes[i, 32 * b : 32 * b + 32].tolist() == want_codes, (i, b)
    assert codes[0].max() == 0 and codes[1, :32].max() == 0 and scales[2].tolist() == [255] * 3
    assert np.isnan(dequantise(codes, scales, fmt)[2]).all()


@pytest.mark.parametrize("fmt", MX_FORMATS, ids=lambda f: f.name)
def test_quantise_is_idempotent(fmt):
    seed = 12
    print("seed", seed)
    x = np.random.default_rng(seed).standard_normal((8, 65)).astype(np.float32)
    codes, scales = quantise(x, fmt)
    value = dequantise(codes, scales, fmt)
    again = quantise(value.astype(np.float32), fmt)
    assert np.array_equal(dequantise(*again, fmt), value)
    assert np.max(np.abs(value - x)) < np.abs(x).max() / 4


def test_quantise_bf16():
    codes, scales = quantise(np.array([1.0, -2.5], np.float32), Format.BF16)
    assert scales is None and codes.tolist() == [0x3F80, 0xC020]
    assert dequantise(codes, None, Format.BF16).tolist() == [1.0, -2.5]
    with pytest.raises(ValueError, match="must be an MX format"):
        quantise(np.ones(3), Format.FP32)
    with pytest.raises(ValueError, match="one per block"):
        dequantise(np.zeros((1, 33), np.uint8), np.zeros((1, 1), np.uint8), Format.MXFP4)
