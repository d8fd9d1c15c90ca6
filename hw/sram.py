# SPDX-License-Identifier: Apache-2.0
"""The two SRAM macros that every memory of the design is made of.

In Amaranth's simulator they are `amaranth.lib.memory`; in Verilog they are instances of modules
named by their size, whose files, made from those in `hw/verilog/`, a memory compiler's output
replaces. Contents are undefined at power-up.
"""

from amaranth import ClockSignal, Instance, Module, Mux, Signal
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from hw.emit import VerilogPlatform


def _check(width: int, depth: int, granularity: int | None) -> None:
    if width < 1:
        raise ValueError(f"width must be at least 1, not {width!r}")
    if depth < 2:
        raise ValueError(f"depth must be at least 2, not {depth!r}")
    if granularity is not None and (granularity < 1 or width % granularity):
        raise ValueError(f"granularity must divide width {width}, not {granularity!r}")


def macro_name(kind: str, width: int, depth: int, granularity: int) -> str:
    """Module of an SRAM of `depth` words of `width` bits, written `granularity` bits at least."""
    parts = "" if granularity == width else f"_by{granularity}"
    return f"jalapeno_sram_{kind}_{depth}x{width}{parts}"


class Sram1R1W(wiring.Component):
    """One read and one write port; a read returns the contents before a write in the same cycle.

    `read_data` holds the word of the last cycle in which `read_en` was high; one read and one write
    per cycle. `write_en` has one bit per `granularity` bits of the word.
    """

    def __init__(self, width: int, depth: int, granularity: int | None = None):
        _check(width, depth, granularity)
        self.width, self.depth = width, depth
        self.granularity = width if granularity is None else granularity
        address = (depth - 1).bit_length()
        super().__init__(
            {
                "write_en": In(width // self.granularity),
                "write_addr": In(address),
                "write_data": In(width),
                "read_en": In(1),
                "read_addr": In(address),
                "read_data": Out(width),
            }
        )

    def elaborate(self, platform):
        m = Module()
        if isinstance(platform, VerilogPlatform):
            m.submodules.macro = Instance(
                macro_name("1r1w", self.width, self.depth, self.granularity),
                i_clk=ClockSignal(),
                i_write_en=self.write_en,
                i_write_addr=self.write_addr,
                i_write_data=self.write_data,
                i_read_en=self.read_en,
                i_read_addr=self.read_addr,
                o_read_data=self.read_data,
            )
            return m
        m.submodules.memory = mem = memory.Memory(shape=self.width, depth=self.depth, init=[])
        write = mem.write_port(granularity=self.granularity)
        read = mem.read_port()
        m.d.comb += [
            write.en.eq(self.write_en),
            write.addr.eq(self.write_addr),
            write.data.eq(self.write_data),
            read.en.eq(self.read_en),
            read.addr.eq(self.read_addr),
            self.read_data.eq(read.data),
        ]
        return m


class Sram1RW(wiring.Component):
    """One port, read or write in each cycle.

    With `en` high and every `write_en` bit low the word at `addr` is read and appears on
    `read_data` in the next cycle, held until the next read; with any `write_en` bit high those
    parts of the word are written.
    """

    def __init__(self, width: int, depth: int, granularity: int | None = None):
        _check(width, depth, granularity)
        self.width, self.depth = width, depth
        self.granularity = width if granularity is None else granularity
        super().__init__(
            {
                "en": In(1),
                "write_en": In(width // self.granularity),
                "addr": In((depth - 1).bit_length()),
                "write_data": In(width),
                "read_data": Out(width),
            }
        )

    def elaborate(self, platform):
        m = Module()
        if isinstance(platform, VerilogPlatform):
            m.submodules.macro = Instance(
                macro_name("1rw", self.width, self.depth, self.granularity),
                i_clk=ClockSignal(),
                i_en=self.en,
                i_write_en=self.write_en,
                i_addr=self.addr,
                i_write_data=self.write_data,
                o_read_data=self.read_data,
            )
            return m
        m.submodules.memory = mem = memory.Memory(shape=self.width, depth=self.depth, init=[])
        write = mem.write_port(granularity=self.granularity)
        read = mem.read_port()
        enable = Signal(len(self.write_en))
        m.d.comb += [
            enable.eq(Mux(self.en, self.write_en, 0)),
            write.en.eq(enable),
            write.addr.eq(self.addr),
            write.data.eq(self.write_data),
            read.en.eq(self.en & ~self.write_en.any()),
            read.addr.eq(self.addr),
            self.read_data.eq(read.data),
        ]
        return m
