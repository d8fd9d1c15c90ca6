# SPDX-License-Identifier: Apache-2.0
"""Element conversion of the vector engine: every code to FP32, FP32 to codes of every MX format."""

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden import fp32
from golden.formats import BLOCK, MX_FORMATS, SCALE_NAN, SPECS, Format
from golden.quantise import quantise
from golden.vector import load
from hw.vector_decode import VectorDecode
from hw.vector_encode import VectorEncode
from tests.pipelined import run_pipeline
from tests.simulators import BOTH


class FixedFormat(wiring.Component):
    """An encoder whose format holds still, as its contract asks."""

    LATENCY = VectorEncode.LATENCY

    def __init__(self, fmt: Format):
        self.fmt = fmt
        super().__init__(
            {"enable": In(1), "x": In(32), "scale": In(8), "blank": In(1), "code": Out(8)}
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.encode = encode = VectorEncode()
        m.d.comb += [
            encode.enable.eq(self.enable),
            encode.format.eq(self.fmt),
            encode.x.eq(self.x),
            encode.scale.eq(self.scale),
            encode.blank.eq(self.blank),
            self.code.eq(encode.code),
        ]
        return m


def ids(fmt: Format) -> str:
    return SPECS[fmt].name


@BOTH
@pytest.mark.parametrize("fmt", MX_FORMATS, ids=ids)
def test_decode_mx(fmt):
    """Every code, under scales at every edge of FP32."""
    codes = np.arange(1 << SPECS[fmt].bits, dtype=np.uint32)
    scales = np.array(
        [0, 1, 2, 7, 8, 15, 16, 17, 126, 127, 128, 238, 240, 246, 252, 253, 254, SCALE_NAN],
        np.uint8,
    )
    code, scale = (v.ravel() for v in np.meshgrid(codes, scales))
    dirt = np.uint32(0xA5A5A5A5) << np.uint32(SPECS[fmt].bits)
    got = run_pipeline(
        VectorDecode(),
        {"format": np.full(code.shape, int(fmt)), "code": code | dirt, "scale": scale},
        ["value"],
    )
    expected = fp32.bits(load(code[:, None], fmt, scale[:, None]))[:, 0]
    assert len(expected) == len(codes) * len(scales)
    np.testing.assert_array_equal(got["value"], expected)


@BOTH
@pytest.mark.parametrize("fmt", [Format.BF16, Format.FP32], ids=ids)
def test_decode_plain(fmt):
    rng = np.random.default_rng(1)
    bits = SPECS[fmt].storage_bits
    exponents = np.arange(512, dtype=np.uint64) << np.uint64(bits - 9)  # with the sign
    mantissas = np.array([0, 1, 1 << (bits - 10), (1 << (bits - 9)) - 1], np.uint64)
    codes = np.concatenate(
        [(exponents[:, None] | mantissas).ravel(), rng.integers(0, 1 << bits, 2000, np.uint64)]
    )
    got = run_pipeline(
        VectorDecode(),
        {
            "format": np.full(codes.shape, int(fmt)),
            "code": codes
            | (
                rng.integers(0, 1 << 32, len(codes), np.uint64) << np.uint64(bits)
                & np.uint64(0xFFFFFFFF)
            ),
            "scale": rng.integers(0, 256, len(codes)),
        },
        ["value"],
    )
    np.testing.assert_array_equal(got["value"], fp32.bits(load(codes.astype(np.uint32), fmt)))


def blocks(rng: np.random.Generator, count: int) -> np.ndarray:
    """[count, BLOCK] of bit patterns: random, near ties, tiny, zeros of both signs, special."""
    values = rng.integers(0, 1 << 32, (count, BLOCK), np.uint64).astype(np.uint32)
    kind = rng.integers(0, 8, count)
    # Exponents close to the block's largest, so that not all but one element vanish.
    top = rng.integers(0, 255, count)
    field = np.maximum(top[:, None] - rng.integers(0, 36, values.shape), 0).astype(np.uint32)
    close = values & np.uint32(0x807FFFFF) | field << np.uint32(23)
    values = np.where((kind >= 2)[:, None], close, values)
    # Few bits in the mantissa: ties.
    values = np.where(
        (kind >= 5)[:, None] & (rng.random(values.shape) < 0.8),
        values & np.uint32(0xFFF80000),
        values,
    )
    values = np.where((kind == 1)[:, None], values & np.uint32(0x80FFFFFF), values)
    values = np.where(rng.random(values.shape) < 0.05, values & np.uint32(0x80000000), values)
    blank = rng.random(count) < 0.05
    return np.where(blank[:, None], values & np.uint32(0x80000000), values)


@BOTH
@pytest.mark.parametrize("fmt", MX_FORMATS, ids=ids)
def test_encode(fmt):
    seed = 10 + fmt
    print("seed", seed)
    patterns = blocks(np.random.default_rng(seed), 120)
    codes, scales = quantise(fp32.from_bits(patterns), fmt)
    assert scales is not None
    finite = ((patterns >> 23 & 0xFF) != 0xFF).all(axis=1)
    zero = ((patterns & 0x7FFFFFFF) == 0).all(axis=1)
    blank = ~finite | zero
    assert blank.any() and len(np.unique(codes)) > 0.8 * (1 << SPECS[fmt].bits)
    got = run_pipeline(
        VectorEncode(),
        {
            "format": np.full(patterns.size, int(fmt)),
            "x": patterns.ravel(),
            "scale": np.repeat(scales.ravel(), BLOCK),
            "blank": np.repeat(blank, BLOCK),
        },
        ["code"],
    )
    np.testing.assert_array_equal(got["code"], codes.ravel())


@BOTH
def test_stalls():
    """Neither converter moves while it is not enabled."""
    rng = np.random.default_rng(3)
    fmt = Format.MXFP8_E4M3
    code, scale = rng.integers(0, 256, 300), rng.integers(0, 256, 300).astype(np.uint8)
    got = run_pipeline(
        VectorDecode(),
        {"format": np.full(300, int(fmt)), "code": code, "scale": scale},
        ["value"],
        seed=4,
    )
    np.testing.assert_array_equal(
        got["value"], fp32.bits(load(code[:, None], fmt, scale[:, None]))[:, 0]
    )
    patterns = blocks(rng, 10)
    codes, scales = quantise(fp32.from_bits(patterns), fmt)
    assert scales is not None
    blank = ((patterns >> 23 & 0xFF) == 0xFF).any(axis=1) | ((patterns & 0x7FFFFFFF) == 0).all(
        axis=1
    )
    got = run_pipeline(
        FixedFormat(fmt),
        {
            "x": patterns.ravel(),
            "scale": np.repeat(scales.ravel(), BLOCK),
            "blank": np.repeat(blank, BLOCK),
        },
        ["code"],
        seed=5,
    )
    np.testing.assert_array_equal(got["code"], codes.ravel())
