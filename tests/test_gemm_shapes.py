# SPDX-License-Identifier: Apache-2.0
"""Matrix products of every size around the array's edges, many in a program without waits.

With A the size of the array along a dimension (columns for N, rows x group for K, and for M once
its rows and once the accumulators' rows), each size is 1, A - 1, A, A + 1 or 2 A + 1.
"""

from itertools import product

import numpy as np
import pytest

from golden.formats import Format, group_elements
from golden.kernels.trace import Stored
from hw.config import preset
from sim.kernels.gemm import operand, placed
from sim.kernels.types import STALLS
from sim.programs.memory import TileMemory
from tests.products import Job, run_jobs

TILE = preset("tiny").tile
FORMATS = [f for f in Format if f is not Format.FP32]
PAIRS = list(product(FORMATS, repeat=2))
slow = pytest.mark.slow


def edges(size: int) -> list[int]:
    return sorted({1, size - 1, size, size + 1, 2 * size + 1})


Shape = tuple[int, int, int, Format, Format, bool]


def sweep(first_pair: int) -> list[Shape]:
    """Every M, N and K around the edges, weights in KV SRAM or HBM; pairs of formats go round from
    `first_pair` on, once with each place of the weights.
    """
    shapes = []
    indices = product(edges(TILE.rows), edges(TILE.cols), range(5))
    for i, (m, n, k) in enumerate(indices, first_pair):
        act, weight = PAIRS[i * 10 % len(PAIRS)]  # 10 has no factor in common with 49
        stream = bool(i // len(PAIRS) & 1)
        shapes.append((m, n, edges(TILE.rows * group_elements(weight))[k], act, weight, stream))
    return shapes


def jobs(rng: np.random.Generator, shapes: list[Shape]) -> list[Job]:
    """In random order, so that every kind follows every other; some with bias."""
    made = []
    for i in rng.permutation(len(shapes)):
        m, n, k, act, weight, stream = shapes[i]
        bias = rng.standard_normal(n).astype(np.float32) if rng.random() < 0.3 else None
        out = (Format.BF16, Format.FP32)[rng.integers(2)]
        made.append(Job(operand(rng, m, k, act), operand(rng, n, k, weight), out, bias, stream))
    return made


def check(shapes: list[Shape], stall: str, seed: int) -> None:
    print("stall", stall, "seed", seed)
    made = jobs(np.random.default_rng(seed), shapes)
    result = run_jobs(made, stall=stall, seed=seed)
    assert result.mismatched == 0, result.differences
    assert result.compared == sum(m * n for m, n, *_ in shapes) > 0


@pytest.mark.parametrize("stall", STALLS)
def test_sizes_around_the_edges(stall):
    first = 100 * list(STALLS).index(stall)
    shapes = sweep(first)
    assert {each[3:] for each in shapes} == {(*p, s) for p in PAIRS for s in (False, True)}
    check(shapes, stall, first)


@slow
@pytest.mark.parametrize("stall", STALLS)
@pytest.mark.parametrize("seed", range(1, 4))
def test_other_pairs_at_every_size(stall, seed):
    check(sweep(17 * seed), stall, seed)


@pytest.mark.parametrize(
    "stall", ["light", *(pytest.param(s, marks=slow) for s in STALLS if s != "light")]
)
def test_as_many_rows_as_accumulators(stall):
    """M around and beyond what the accumulators hold; beyond it the weights pass again."""
    kinds = [(5, 65, Format.MXFP4), (3, 33, Format.MXFP8_E4M3), (4, 32, Format.MXFP6_E2M3)]
    sizes = product(edges(TILE.acc_rows)[1:], kinds)
    shapes = [(m, n, k, act, Format.MXFP4, False) for m, (n, k, act) in sizes]
    check(shapes, stall, 5)


@pytest.mark.parametrize("stall", ["none", pytest.param("heavy", marks=slow)])
def test_one_row_with_a_new_weight_tile_as_often_as_it_loads(stall):
    """M = 1 over many weight tiles: each tile is used for one row only."""
    pairs = [(a, w) for a in (Format.MXFP4, Format.MXFP8_E5M2, Format.BF16) for w in FORMATS]
    check([(1, 5 * TILE.cols - 1, 250, act, weight, False) for act, weight in pairs], stall, 6)


@pytest.mark.parametrize("k, stride", [(2816, 2816), (2560, 2816), (2880, 3072)])
def test_rows_are_padded_unless_only_bare_ones_fit(k, stride):
    """In pieces of 256 bytes: an odd number of them, but 12 where 13 do not fit."""
    memory = TileMemory(preset("small").tile)
    act, weight = (
        Stored(np.zeros((rows, k), np.uint8), fmt, np.full((rows, k // 32), 127, np.uint8))
        for rows, fmt in ((128, Format.MXFP8_E4M3), (512, Format.MXFP4))
    )
    placed(memory, act, weight, Format.BF16)
    assert memory.buffers["act"].stride == stride
