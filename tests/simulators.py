# SPDX-License-Identifier: Apache-2.0
"""One testbench in both simulators: `Simulator` is Amaranth's or `sim.lockstep`'s.

A test (or the `pytestmark` of a module) that is marked `BOTH` runs in one and then in the other;
`VERILOG_FIRST` leaves Amaranth's simulator, where it is slow, to `make test-all`, and `cases` gives
each simulator parameters of its own.
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


def cases(names: str, *, amaranth: list[Any], verilator: list[Any]) -> Any:
    """Mark like `pytest.mark.parametrize(names, ...)`, with cases of its own for each simulator."""
    chosen_cases = [
        pytest.param(simulator, *case.values, marks=case.marks)
        for simulator, given in (("amaranth", amaranth), ("verilator", verilator))
        for case in (c if hasattr(c, "marks") else pytest.param(*c) for c in given)
    ]
    mark = pytest.mark.parametrize(
        f"simulator, {names}", chosen_cases, indirect=["simulator"], ids=str
    )
    return mark


chosen = "amaranth"


def Simulator(dut: wiring.Component, ports: Iterable[Any] = ()) -> Any:
    """The chosen simulator; `ports` are interfaces inside `dut` that testbenches use."""
    if chosen == "verilator":
        return lockstep.Simulator(dut, ports)
    return amaranth_sim.Simulator(dut)
