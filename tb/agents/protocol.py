# SPDX-License-Identifier: Apache-2.0
"""Watches that a stream, once valid, stays valid with the same payload until taken."""

from dataclasses import dataclass
from typing import Any

import cocotb
from cocotb.triggers import RisingEdge

from tb.bench import cycle


@dataclass(frozen=True)
class Violation:
    """One broken rule: in which cycle, on which stream, and what happened."""

    cycle: int
    stream: str
    what: str

    def __str__(self) -> str:
        return f"cycle {self.cycle}: {self.stream}: {self.what}"


class ProtocolMonitor:
    """Watches the stream `name` of `dut`, an input or an output, and counts its cycles.

    `violations` lists broken rules, `handovers` counts words taken and `waits` cycles in which a
    word waited. Cycles in reset are not watched.
    """

    def __init__(self, dut: Any, name: str):
        self.name = name
        self.violations: list[Violation] = []
        self.handovers = self.waits = 0
        self._clock, self._reset = RisingEdge(dut.clk), dut.rst
        self._payload = getattr(dut, f"{name}__payload")
        self._valid, self._ready = getattr(dut, f"{name}__valid"), getattr(dut, f"{name}__ready")
        self._task = cocotb.start_soon(self._run())

    def check(self) -> None:
        """AssertionError when a rule was broken, or when no word was ever handed over."""
        assert not self.violations, "; ".join(str(v) for v in self.violations[:4])
        assert self.handovers, f"{self.name}: no word was handed over, so nothing was watched"

    async def _run(self) -> None:
        waiting = None
        while True:
            await self._clock
            if self._reset.value:
                waiting = None
                continue
            valid = bool(self._valid.value)
            payload = self._payload.value if valid else None
            if waiting is not None and not valid:
                self._violate("valid fell before the word was taken")
            elif waiting is not None and payload != waiting:
                self._violate(f"payload changed from {waiting} to {payload} before it was taken")
            taken = valid and bool(self._ready.value)
            self.handovers += taken
            self.waits += valid and not taken
            waiting = payload if valid and not taken else None

    def _violate(self, what: str) -> None:
        self.violations.append(Violation(cycle(), self.name, what))
