# SPDX-License-Identifier: Apache-2.0
"""The array of the `slice` preset: 65,536 FP4 multiply-accumulates a cycle, built and run."""

import resource
import time

import numpy as np
import pytest

from golden.formats import Format, group_elements
from hw.config import FP4_PER_GROUP, preset
from hw.verilog import emit
from tests.test_array import Bench, random_operand

TILE = preset("slice").tile
GENERATE_S = 120
BUILD_CPU_S = 600
BUILD_BYTES = 8 << 30


def bench() -> Bench:
    return Bench(TILE.rows, TILE.cols, depth=TILE.result_depth, acc_rows=TILE.acc_rows)


@pytest.mark.slow
def test_generates_in_time():
    start = time.monotonic()
    files = emit(bench().array, "array")
    assert time.monotonic() - start <= GENERATE_S
    assert any(name.startswith("cell") for name in files)


@pytest.mark.slow
@pytest.mark.parametrize("simulator", ["verilator"], indirect=True)
def test_builds_and_multiplies(simulator, tmp_path, monkeypatch):
    assert TILE.rows * TILE.cols * FP4_PER_GROUP == 65_536
    monkeypatch.setenv("JALAPENO_CACHE", str(tmp_path))  # so that the build is not a cached one
    rng = np.random.default_rng(8)
    tried = bench()
    for act_fmt, weight_fmt, m in (
        (Format.MXFP4, Format.MXFP4, 3),
        (Format.MXFP8_E4M3, Format.MXFP4, 2),
        (Format.BF16, Format.BF16, 1),
    ):
        k = TILE.rows * group_elements(weight_fmt) - 5
        act, act_scales = random_operand(rng, m, k, act_fmt)
        weight, weight_scales = random_operand(rng, TILE.cols, k, weight_fmt)
        tried.tile(m, act, act_scales, act_fmt, weight, weight_scales, weight_fmt)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = tried.run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    expected = np.array(tried.expected)
    assert len(expected) == 6 and np.array_equal(found, expected)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"build and run: {cpu:.0f} CPU-seconds, {after.ru_maxrss / 2**20:.1f} GiB at most")
    assert 0 < cpu <= BUILD_CPU_S
    assert after.ru_maxrss * 1024 <= BUILD_BYTES
