# SPDX-License-Identifier: Apache-2.0
"""One testbench in both simulators: `Simulator` is Amaranth's or `sim.lockstep`'s.

A test (or the `pytestmark` of a module) that is marked `BOTH` runs in one and then in the other;
`VERILOG_FIRST` leaves Amaranth's simulator, where it is slow, to `make test-all`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from amaranth import sim as amaranth_sim
from amaranth.lib import wiring

from sim import lockstep

NAMES = ("amaranth", "verilator")
BOTH = pytest.mark.usefixtures("simulator")  # the fixture of conftest.py has both as parameters


def VERILOG_FIRST(test: Callable[..., None]) -> Callable[..., None]:
    """Mark of a test that is slow in Amaranth's simulator."""
    names = [pytest.param("amaranth", marks=pytest.mark.slow), "verilator"]
    return BOTH(pytest.mark.parametrize("simulator", names, indirect=True)(test))


chosen = "amaranth"


def Simulator(dut: wiring.Component, ports: Iterable[Any] = ()) -> Any:
    """The chosen simulator; `ports` are interfaces inside `dut` that testbenches use."""
    if chosen == "verilator":
        return lockstep.Simulator(dut, ports)
    return amaranth_sim.Simulator(dut)
