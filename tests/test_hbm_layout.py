# SPDX-License-Identifier: Apache-2.0
"""Layout of weights and activations in HBM: against a plain description, and round trips."""

import numpy as np
import pytest

from golden.formats import ARRAY_FORMATS, BLOCK, MX_FORMATS, SPECS, Format
from golden.hbm_layout import (
    activation_rows,
    pack_codes,
    pack_lines,
    stream_bytes,
    unpack_codes,
    unpack_lines,
    weight_rows,
)


def random_codes(rng, shape, fmt):
    return rng.integers(0, 1 << SPECS[fmt].bits, shape, dtype=np.uint64)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("n_lines", [0, 1, 15, 16, 17, 32, 100])
def test_pack_lines(n_lines, scaled):
    rng = np.random.default_rng(n_lines)
    lines = rng.integers(0, 256, (n_lines, 16), dtype=np.uint8)
    scales = rng.integers(0, 256, n_lines, dtype=np.uint8)
    image = pack_lines(lines, scales if scaled else None)
    expected = []
    for run in range(0, n_lines, 16):
        if scaled:
            expected += [*scales[run : run + 16].tolist(), *[0] * max(0, run + 16 - n_lines)]
        expected += lines[run : run + 16].reshape(-1).tolist()
    assert list(image) == expected
    assert len(image) == stream_bytes(n_lines, scaled)
    back, back_scales = unpack_lines(image + b"\xa5" * 16, n_lines, scaled)
    assert np.array_equal(back, lines)
    assert np.array_equal(back_scales, scales if scaled else np.full(n_lines, 127))


@pytest.mark.parametrize("fmt", ARRAY_FORMATS)
@pytest.mark.parametrize("n,k,cols", [(1, 1, 4), (5, 33, 4), (8, 64, 4), (17, 100, 16), (3, 31, 8)])
def test_weight_rows(fmt, n, k, cols):
    rng = np.random.default_rng(1000 * n + k)
    codes = random_codes(rng, (n, k), fmt)
    scales = None
    if fmt in MX_FORMATS:
        scales = rng.integers(0, 256, (n, -(-k // BLOCK)), dtype=np.uint8)
    lines, line_scales = weight_rows(codes, scales, fmt, cols)
    width = SPECS[fmt].storage_bits
    per_line = 128 // width
    position = 0
    for tile in range(-(-n // cols)):
        for group in range(-(-k // per_line)):
            for column in range(tile * cols, (tile + 1) * cols):
                word = 0
                for i in range(per_line):
                    element = group * per_line + i
                    if column < n and element < k:
                        word |= int(codes[column, element]) << (i * width)
                assert int.from_bytes(lines[position].tobytes(), "little") == word
                scale = 127
                if scales is not None and column < n:
                    scale = scales[column, group * per_line // BLOCK]
                assert line_scales[position] == scale
                position += 1
    assert position == len(lines) == len(line_scales) > 0


@pytest.mark.parametrize("fmt", Format)
def test_activation_rows(fmt):
    rng = np.random.default_rng(int(fmt))
    m, k = 3, 75
    codes = random_codes(rng, (m, k), fmt)
    scales = None
    if fmt in MX_FORMATS:
        scales = rng.integers(0, 256, (m, -(-k // BLOCK)), dtype=np.uint8)
    lines, line_scales = activation_rows(codes, scales, fmt)
    per_line = SPECS[fmt].codes_per_line
    assert lines.shape == (m, -(-k // per_line), 16) and line_scales.shape == lines.shape[:2]
    back = unpack_codes(lines, fmt)
    assert np.array_equal(back[:, :k], codes) and not back[:, k:].any()
    for line in range(lines.shape[1]):
        expected = 127 if scales is None else scales[:, line * per_line // BLOCK]
        assert np.all(line_scales[:, line] == expected)


def test_order_in_a_line():
    assert pack_codes([0x3, 0xA], Format.MXFP4)[0, 0] == 0xA3
    assert bytes(pack_codes([0x1234, 0x5678], Format.BF16)[0, :4]) == b"\x34\x12\x78\x56"


def test_wrong_shapes():
    with pytest.raises(ValueError, match="lines must"):
        pack_lines(np.zeros((3, 15), np.uint8))
    with pytest.raises(ValueError, match="scales must"):
        pack_lines(np.zeros((3, 16), np.uint8), np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="image must"):
        unpack_lines(b"\0" * 16, 1, True)
    with pytest.raises(ValueError, match="scales must"):
        weight_rows(np.zeros((2, 33)), np.zeros((2, 1)), Format.MXFP4, 4)
    with pytest.raises(ValueError, match="scales must be None"):
        weight_rows(np.zeros((2, 8)), np.zeros((2, 1)), Format.BF16, 4)
    with pytest.raises(ValueError, match="fmt must"):
        weight_rows(np.zeros((2, 8)), None, Format.FP32, 4)
    with pytest.raises(ValueError, match="cols must"):
        weight_rows(np.zeros((2, 8)), None, Format.BF16, 0)
