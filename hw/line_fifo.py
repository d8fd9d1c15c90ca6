# SPDX-License-Identifier: Apache-2.0
"""A stream FIFO of any payload on the SRAM macro."""

from amaranth import Module, Shape, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.sram import Sram1R1W


class LineFifo(wiring.Component):
    """FIFO of `depth` payloads; one in and one out per cycle, latency two cycles.

    The memory's read register is the output stage, so up to `depth` + 1 payloads are held. Stalls
    only through its streams: `input` is refused when full, `output` is held until taken.
    """

    def __init__(self, shape, depth: int):
        if depth < 2 or depth & (depth - 1):
            raise ValueError(f"depth must be a power of two of at least 2, not {depth!r}")
        self.shape, self.depth = shape, depth
        super().__init__(
            {
                "input": In(stream.Signature(shape)),
                "output": Out(stream.Signature(shape)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        width = Shape.cast(self.shape).width
        m.submodules.memory = memory = Sram1R1W(width, self.depth)
        level = Signal(range(self.depth + 1))
        write_addr = Signal(range(self.depth))
        read_addr = Signal(range(self.depth))
        held = Signal()  # the memory's read register holds the oldest payload
        write, read = Signal(), Signal()
        m.d.comb += [
            self.input.ready.eq(level != self.depth),
            write.eq(self.input.valid & self.input.ready),
            read.eq((level != 0) & (~held | self.output.ready)),
            memory.write_en.eq(write),
            memory.write_addr.eq(write_addr),
            memory.write_data.eq(self.input.p),
            memory.read_en.eq(read),
            memory.read_addr.eq(read_addr),
            self.output.valid.eq(held),
            Value.cast(self.output.p).eq(memory.read_data),
        ]
        m.d.sync += level.eq(level + write - read)
        with m.If(write):
            m.d.sync += write_addr.eq(write_addr + 1)
        with m.If(read):
            m.d.sync += [read_addr.eq(read_addr + 1), held.eq(1)]
        with m.Elif(self.output.ready):
            m.d.sync += held.eq(0)
        return m
