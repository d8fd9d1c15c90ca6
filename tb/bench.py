# SPDX-License-Identifier: Apache-2.0
"""What every bench needs inside the simulator: parameters, clock, reset and handing results out."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles
from cocotb.utils import get_sim_time

from sim.runner import ARRAYS, PARAMETERS, REPORT, REPORT_ARRAYS

CYCLE_NS = 1  # so that the time in waves and logs counts cycles
RESET_CYCLES = 4


@cache
def parameters() -> dict[str, Any]:
    """The parameters that `sim.runner.run` was given."""
    return json.loads(Path(PARAMETERS).read_text())


@cache
def arrays() -> dict[str, np.ndarray]:
    """The arrays that `sim.runner.run` was given."""
    with np.load(ARRAYS) as stored:
        return {name: stored[name] for name in stored.files}


def report(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
    """Hand `values` (JSON) and `arrays` out; another call adds to what was handed out before."""
    file = Path(REPORT)
    before = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(before | dict(values)))
    if arrays:
        np.savez(REPORT_ARRAYS, **dict(arrays))  # type: ignore[arg-type]


def rng(stream: int = 0) -> np.random.Generator:
    """Random numbers of this run's seed; another `stream` gives other ones."""
    return np.random.default_rng([cocotb.RANDOM_SEED & 0x7FFF_FFFF, stream])


async def start(dut: Any, cycles: int = RESET_CYCLES) -> None:
    """Start the clock, hold reset for `cycles`, and return just after the edge that ends it."""
    dut.rst.value = 1
    Clock(dut.clk, CYCLE_NS, unit="ns").start()
    await ClockCycles(dut.clk, cycles)
    dut.rst.value = 0


def cycle() -> int:
    """Clock cycles since the start of the simulation."""
    return int(get_sim_time("ns")) // CYCLE_NS
