# SPDX-License-Identifier: Apache-2.0
"""A bench that drives all inputs and reads all outputs of a component as two numbers per cycle.

Amaranth's simulator settles the design after each assignment of a testbench; one wide assignment
per cycle is an order of magnitude faster than one per field.
"""

from collections.abc import Callable
from typing import Any

from amaranth.lib import wiring

from sim.lockstep import Flat
from tests.simulators import Simulator


def pack(*fields: tuple[int, int]) -> int:
    """(value, width) pairs, the first in the low bits."""
    result = position = 0
    for value, width in fields:
        result |= (int(value) & ((1 << width) - 1)) << position
        position += width
    return result


class FlatBench:
    """Each cycle: put inputs into `drive`, `settle()`, read outputs by name, `await tick()`.

    Port names are those of the Verilog (`client__request__payload`). An input keeps its value until
    it is changed.
    """

    def __init__(self, dut: wiring.Component):
        self.dut = dut
        self.cycle = 0
        self._flat = Flat(dut)
        self._inputs, self._outputs = self._flat.inputs, self._flat.outputs
        self.drive = dict.fromkeys(self._inputs, 0)
        self._ctx: Any = None
        self._seen = 0

    def settle(self) -> None:
        word = 0
        for name, (position, width) in self._inputs.items():
            word |= (self.drive[name] & ((1 << width) - 1)) << position
        self._ctx.set(self._flat.stimulus, word)
        self._seen = self._ctx.get(self._flat.observed)

    def __getitem__(self, name: str) -> int:
        position, width = self._outputs[name]
        return self._seen >> position & ((1 << width) - 1)

    async def tick(self) -> None:
        self.cycle += 1
        await self._ctx.tick()

    def run(self, bench: Callable[["FlatBench"], Any]) -> None:
        async def testbench(ctx: Any) -> None:
            self._ctx = ctx
            await bench(self)

        simulator = Simulator(self._flat)
        simulator.add_clock(1e-6)
        simulator.add_testbench(testbench)
        simulator.run()
