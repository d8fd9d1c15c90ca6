# SPDX-License-Identifier: Apache-2.0
"""Utilisation of the array, by its counters, from the first command to the last result.

Operands start in tile SRAM and KV SRAM (or stream from HBM), BF16 results are left in tile SRAM.
"""

from functools import cache

import numpy as np
import pytest

from golden.formats import Format, group_elements, parse_format, products_per_slice
from hw.config import preset
from sim.kernels import KERNELS
from sim.kernels.gemm import operand
from sim.kernels.types import KernelRequest, KernelResult
from tests.products import run_products

FP4, FP8, BF16 = "mxfp4", "mxfp8-e4m3", "bf16"
CLASSES = ((FP4, FP4), (FP8, FP4), (FP8, FP8), (BF16, FP4), (BF16, FP8), (BF16, BF16))
slow = pytest.mark.slow


@cache
def gemm(config: str, m: int, n: int, k: int, act: str, weight: str, weights="sram"):
    kernel = KERNELS["gemm"]
    sizes = {"m": str(m), "n": str(n), "k": str(k)}
    settings = kernel.settings(sizes | {"act": act, "weight": weight, "weights": weights})
    result = kernel.run(KernelRequest(preset(config), "gpt-oss", settings))
    assert result.passed, result.differences
    return result


def load_busy(result: KernelResult) -> float:
    """Part of the cycles that load a weight row, from the description of the first tile on, which
    is a cycle before the first row, to the last row.
    """
    load = result.counters["load"]
    return load["busy"] / (load["busy"] + load["starved"] + load["blocked"])


@slow
@pytest.mark.parametrize(
    "k, weights, least", [(2816, "sram", 0.98), (2880, "sram", 0.9375 * 0.99), (2816, "hbm", 0.97)]
)
def test_dense(k, weights, least):
    fraction = gemm("small", 128, 512, k, FP8, FP4, weights).fraction_of_peak
    print(f"{fraction:.2%}")
    assert fraction >= least


def k_of(weight: str, groups: int) -> int:
    return groups * group_elements(parse_format(weight))


def steady(act: str, weight: str) -> float:
    """Products per cycle in steady state: of twice the columns, what comes on top. K is four tiles,
    so that results come often.
    """
    k = k_of(weight, 4 * preset("small").tile.rows)
    once, twice = (gemm("small", 128, n, k, act, weight) for n in (128, 256))
    return 128 * 128 * k / (twice.cycles - once.cycles)


@slow
@pytest.mark.parametrize("act, weight", CLASSES)
def test_steady_state(act, weight):
    tile = preset("small").tile
    products = products_per_slice(parse_format(act), parse_format(weight))
    fraction = steady(act, weight) / (tile.rows * tile.cols * products)
    print(f"{fraction:.2%}")
    assert 0.99 <= fraction <= 1.01  # the ends of the two runs differ by some cycles


@slow
def test_published_rates():
    """MXFP4 x MXFP4 : MXFP8 x MXFP4 : MXFP8 x MXFP8 = 4 : 2 : 1, measured."""
    rates = [steady(*pair) for pair in CLASSES[:3]]
    print([f"{rate:.1f}" for rate in rates])
    assert [rate / rates[2] for rate in rates] == pytest.approx([4, 2, 1], rel=0.015)


@slow
@pytest.mark.parametrize(
    "act, weight, k", [*((a, w, k_of(w, 128)) for a, w in CLASSES), (FP8, FP4, 2816)]
)
def test_one_row_is_held_by_the_load_port(act, weight, k):
    """4,096 rows of weights, and the 2,816 of the dense cases with one row of activations.

    What is lost between the rows is lost at the end: see docs/matmul_array.md.
    """
    result = gemm("small", 1, 512, k, act, weight)
    load = result.counters["load"]
    assert load["busy"] == 512 // preset("small").tile.cols * k // k_of(weight, 1)
    print(f"{load_busy(result):.2%}, {load['starved'] + load['blocked']} cycles without")
    assert load_busy(result) >= 0.995


@slow
def test_one_row_is_held_by_hbm():
    result = gemm("small", 1, 512, 2816, FP8, FP4, "hbm")
    print(f"{result.fraction_of_roofline:.2%}")
    assert result.roofline.startswith("hbm") and result.fraction_of_roofline >= 0.995


@slow
@pytest.mark.parametrize("extra", [0, 1])
def test_weight_tiles_at_the_floor(extra):
    """Tiles of as many slices as the array has rows, and of one more, follow without a bubble."""
    rows = preset("small").tile.rows
    once, twice = (gemm("small", rows + extra, n, 1024, FP4, FP4) for n in (256, 512))
    tiles = 256 // preset("small").tile.cols * 1024 // (32 * rows)
    assert twice.cycles - once.cycles == tiles * (rows + extra)


@slow
@pytest.mark.parametrize("m", range(2, 9))
def test_few_rows_without_waiting_for_the_accumulators(m):
    result = gemm("small", m, 256, 512, BF16, BF16)
    floor = max(result.counters["matrix"]["busy"], result.counters["load"]["busy"])
    assert result.cycles - floor <= 100


def test_weight_tiles_at_the_floor_of_a_tiny_array():
    """Four runs in one simulation."""
    tile = preset("tiny").tile
    rng = np.random.default_rng(0)
    pairs = [
        (operand(rng, m, 256, Format.MXFP4), operand(rng, n, 256, Format.MXFP4))
        for m in (tile.rows, tile.rows + 1)
        for n in (32, 64)
    ]
    result = run_products(pairs)
    assert result.compared > 0 and result.mismatched == 0, result.differences
    tiles = 32 // tile.cols * 256 // (32 * tile.rows)
    once, twice, once_more, twice_more = result.cycles
    assert twice - once == tiles * tile.rows
    assert twice_more - once_more == tiles * (tile.rows + 1)
