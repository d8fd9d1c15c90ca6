# SPDX-License-Identifier: Apache-2.0
"""Arrays of several sizes: the result depends on R, where K is cut, and on nothing else."""

import numpy as np
import pytest

from golden.formats import Format, group_elements
from golden.matmul import matmul
from tests.test_array import Bench, random_operand

FP4, FP6, FP8, BF16 = Format.MXFP4, Format.MXFP6_E3M2, Format.MXFP8_E4M3, Format.BF16
PAIRS = ((FP4, FP4), (FP8, FP4), (FP8, FP6), (BF16, FP8), (Format.MXINT8, BF16))
ACT_ROWS, OUT_COLS = 5, 7
slow = pytest.mark.slow


def multiply(bench: Bench, act, weight, act_fmt, weight_fmt, rows_at_once: int) -> None:
    """Adds the tiles of a product, column tile by column tile, some activation rows at a time."""
    (act_codes, act_scales), (codes, scales) = act, weight
    cols = bench.array.cols
    for start in range(0, len(codes), cols):
        take = np.arange(start, start + cols) % len(codes)  # columns beyond the end: of no interest
        for first in range(0, len(act_codes), rows_at_once):
            part = slice(first, first + rows_at_once)
            bench.tile(
                len(act_codes[part]),
                act_codes[part],
                None if act_scales is None else act_scales[part],
                act_fmt,
                codes[take],
                None if scales is None else scales[take],
                weight_fmt,
            )


@pytest.mark.parametrize("simulator", ["verilator"], indirect=True)
@pytest.mark.parametrize(
    "rows, cols",
    [
        (3, 4),
        *(pytest.param(r, c, marks=slow) for r, c in ((3, 1), (3, 7), (2, 5), (5, 2), (8, 3))),
    ],
)
def test_same_result_for_every_width_schedule_and_stall_pattern(simulator, rows, cols):
    """One product, whole or cut along M, with and without stalls, equals the model of its R."""
    rng = np.random.default_rng(12)
    products = []
    for act_fmt, weight_fmt in PAIRS:
        k = rows * group_elements(weight_fmt) - 3
        act = random_operand(rng, ACT_ROWS, k, act_fmt)
        weight = random_operand(rng, OUT_COLS, k, weight_fmt)
        products.append((act, weight, act_fmt, weight_fmt))
    for rows_at_once, stall in ((ACT_ROWS, 0.0), (1, 0.0), (2, 0.6)):
        bench = Bench(rows, cols)
        for each in products:
            multiply(bench, *each, rows_at_once)
        found = bench.run(stall, np.random.default_rng(13))
        column_tiles = -(-OUT_COLS // cols)
        results = found.reshape(len(PAIRS), column_tiles, ACT_ROWS, cols)
        results = results.transpose(0, 2, 1, 3).reshape(len(PAIRS), ACT_ROWS, -1)
        for (act, weight, act_fmt, weight_fmt), result in zip(products, results, strict=True):
            expected = matmul(*act, act_fmt, *weight, weight_fmt, rows).view(np.uint32)
            assert np.array_equal(result[:, :OUT_COLS], expected)
