# SPDX-License-Identifier: Apache-2.0
"""A bench that drives all inputs and reads all outputs of a component as two numbers per cycle.

Amaranth's simulator settles the design after each assignment of a testbench; one wide assignment
per cycle is an order of magnitude faster than one per field.
"""

from collections.abc import Callable
from typing import Any

from amaranth import Cat, Module, Signal, Value
from amaranth.lib import wiring
from amaranth.sim import Simulator

from hw.emit import flat_ports


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
        self.drive: dict[str, int] = {}
        self.cycle = 0
        self._inputs: dict[str, tuple[int, int]] = {}
        self._outputs: dict[str, tuple[int, int]] = {}
        inputs, outputs = [], []
        for name, is_input, value in flat_ports(dut):
            value = Value.cast(value)
            place, values = (self._inputs, inputs) if is_input else (self._outputs, outputs)
            place[name] = (sum(len(v) for v in values), len(value))
            values.append(value)
            if is_input:
                self.drive[name] = 0
        self._stimulus = Signal(sum(len(v) for v in inputs))
        self._observed = Signal(sum(len(v) for v in outputs))
        self._module = Module()
        self._module.submodules.dut = dut
        self._module.d.comb += [Cat(inputs).eq(self._stimulus), self._observed.eq(Cat(outputs))]
        self._ctx: Any = None
        self._seen = 0

    def settle(self) -> None:
        word = 0
        for name, (position, width) in self._inputs.items():
            word |= (self.drive[name] & ((1 << width) - 1)) << position
        self._ctx.set(self._stimulus, word)
        self._seen = self._ctx.get(self._observed)

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

        simulator = Simulator(self._module)
        simulator.add_clock(1e-6)
        simulator.add_testbench(testbench)
        simulator.run()
