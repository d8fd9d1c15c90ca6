# SPDX-License-Identifier: Apache-2.0
"""Fixed delays: short ones as registers, long ones as a memory with a rotating pointer."""

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.emit import place
from hw.sram import Sram1R1W
from hw.wires import delayed

REGISTERS_UP_TO = 8  # cycles


class Delay(wiring.Component):
    """`o` is `i` of `cycles` cycles ago; undefined for that long after reset."""

    def __init__(self, width: int, cycles: int):
        if width < 1:
            raise ValueError(f"width must be at least 1, not {width!r}")
        if cycles < 0:
            raise ValueError(f"cycles must be at least 0, not {cycles!r}")
        self.width, self.cycles = width, cycles
        super().__init__({"i": In(width), "o": Out(width)})

    @property
    def emit_name(self) -> str:
        return f"delay_{self.width}x{self.cycles}"

    @property
    def clocked(self) -> bool:
        return self.cycles > 0

    def elaborate(self, platform):
        m = Module()
        if self.cycles <= REGISTERS_UP_TO:
            m.d.comb += self.o.eq(delayed(m, "stage", self.i, self.cycles))
            return m
        # A word is read in the cycle in which its place is written anew, and comes out one cycle
        # later.
        depth = self.cycles - 1
        memory = Sram1R1W(self.width, depth)
        place(m, platform, "memory", memory)
        pointer = Signal(range(depth))
        m.d.sync += pointer.eq(Mux(pointer == depth - 1, 0, pointer + 1))
        m.d.comb += [
            memory.write_en.eq(1),
            memory.write_addr.eq(pointer),
            memory.write_data.eq(self.i),
            memory.read_en.eq(1),
            memory.read_addr.eq(pointer),
            self.o.eq(memory.read_data),
        ]
        return m
