# SPDX-License-Identifier: Apache-2.0
"""The array of the `slice` preset: 65,536 FP4 multiply-accumulates a cycle, built and run."""

import resource
import time
from resource import RUSAGE_CHILDREN, RUSAGE_SELF

import numpy as np
import pytest

from golden.formats import Format, group_elements, slices
from hw.config import FP4_PER_GROUP, preset
from hw.verilog import emit
from tests import simulators
from tests.test_array import Bench, random_operand

TILE = preset("slice").tile
GENERATE_CPU_S = 120
BUILD_CPU_S = 600
BUILD_BYTES = 8 << 30
FP4, FP8, BF16 = Format.MXFP4, Format.MXFP8_E4M3, Format.BF16
CLASSES = ((FP4, FP4), (FP8, FP4), (FP8, FP8), (BF16, FP4), (BF16, FP8), (BF16, BF16))
TILES, ROWS = 4, 40  # weight tiles of each class, and their activation rows


def bench() -> Bench:
    return Bench(TILE.rows, TILE.cols, depth=TILE.result_depth, acc_rows=TILE.acc_rows)


@pytest.mark.slow
def test_generates_in_time():
    start = time.process_time()
    files = emit(bench().array, "array")
    taken = time.process_time() - start
    print(f"generated in {taken:.0f} CPU-seconds")
    assert taken <= GENERATE_CPU_S
    assert any(name.startswith("cell") for name in files)


def add_tile(rng, tried: Bench, act_fmt: Format, weight_fmt: Format, m: int, k: int) -> None:
    act, act_scales = random_operand(rng, m, k, act_fmt)
    weight, weight_scales = random_operand(rng, TILE.cols, k, weight_fmt)
    tried.tile(m, act, act_scales, act_fmt, weight, weight_scales, weight_fmt)


def cpu_seconds(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize("simulator", ["verilator"], indirect=True)
def test_builds_multiplies_and_keeps_busy(simulator, tmp_path, monkeypatch):
    """Builds within its limits, gives every bit, and takes a slice in every cycle."""
    assert TILE.rows * TILE.cols * FP4_PER_GROUP == 65_536
    monkeypatch.setenv("JALAPENO_CACHE", str(tmp_path))  # so that the build is not a cached one
    tried = bench()
    before = cpu_seconds(RUSAGE_CHILDREN)
    simulators.Simulator(tried.array).build()
    cpu = cpu_seconds(RUSAGE_CHILDREN) - before
    largest = resource.getrusage(RUSAGE_CHILDREN).ru_maxrss << 10
    print(f"built in {cpu:.0f} CPU-seconds and {largest / 2**30:.1f} GiB at most")
    assert 0 < cpu <= BUILD_CPU_S
    assert largest <= BUILD_BYTES

    rng = np.random.default_rng(8)
    for act_fmt, weight_fmt in CLASSES:
        for _ in range(TILES):
            k = TILE.rows * group_elements(weight_fmt)
            add_tile(rng, tried, act_fmt, weight_fmt, ROWS, k)
    odd = (FP4, FP4, 3), (FP8, FP4, 2), (BF16, BF16, 1)
    for act_fmt, weight_fmt, m in odd:
        add_tile(rng, tried, act_fmt, weight_fmt, m, TILE.rows * group_elements(weight_fmt) - 5)
    before = cpu_seconds(RUSAGE_SELF), cpu_seconds(RUSAGE_CHILDREN)
    found = tried.run()
    python = cpu_seconds(RUSAGE_SELF) - before[0]
    model = cpu_seconds(RUSAGE_CHILDREN) - before[1]
    expected = np.array(tried.expected)
    assert len(expected) == 6 + len(CLASSES) * TILES * ROWS and np.array_equal(found, expected)

    for i, (act_fmt, weight_fmt) in enumerate(CLASSES):
        first = i * TILES * ROWS
        taken = tried.times[first + (TILES - 1) * ROWS] - tried.times[first]
        least = (TILES - 1) * ROWS * slices(act_fmt, weight_fmt)
        print(f"{act_fmt.name} x {weight_fmt.name}: {least / taken:.1%} of the cycles")
        assert 0.99 <= least / taken <= 1
    cycles = tried.times[-1]
    print(f"cycles per CPU-second: {cycles / (model + python):.0f}, {cycles / model:.0f} in C++")
    assert python < model
