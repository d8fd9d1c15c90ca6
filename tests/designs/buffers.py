# SPDX-License-Identifier: Apache-2.0
"""Two shared buffers and an SRAM delay line in a row, and a wire that breaks the stream rules."""

from amaranth import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.emit import place
from hw.sram import Sram1R1W

WORD = data.StructLayout({"tag": 4, "value": data.ArrayLayout(6, 2)})


class Buffer(wiring.Component):
    """One-entry buffer, half rate; adds one to the tag."""

    input: In(stream.Signature(WORD))
    output: Out(stream.Signature(WORD))
    emit_name = "test_buffer"

    def elaborate(self, platform):
        m = Module()
        full = Signal()
        held = Signal(WORD, reset_less=True)
        m.d.comb += [
            self.input.ready.eq(~full),
            self.output.valid.eq(full),
            self.output.payload.eq(held),
        ]
        with m.If(self.input.valid & self.input.ready):
            m.d.sync += [
                held.eq(self.input.payload),
                held.tag.eq(self.input.payload.tag + 1),
                full.eq(1),
            ]
        with m.Elif(self.output.ready):
            m.d.sync += full.eq(0)
        return m


class Inverter(wiring.Component):
    """Shared block without registers."""

    a: In(4)
    y: Out(4)
    emit_name = "test_inverter"
    clocked = False

    def elaborate(self, platform):
        m = Module()
        m.d.comb += self.y.eq(~self.a)
        return m


class Pair(wiring.Component):
    """Two buffers in a row (so a tag rises by two), and an SRAM that remembers what passed.

    `seen` is the SRAM word of the tag `look`, one cycle later; `flipped` is that word inverted.
    """

    input: In(stream.Signature(WORD))
    output: Out(stream.Signature(WORD))
    look: In(4)
    seen: Out(12)
    flipped: Out(4)

    def elaborate(self, platform):
        m = Module()
        first, second, sram, inverter = Buffer(), Buffer(), Sram1R1W(12, 16), Inverter()
        place(m, platform, "first", first)
        place(m, platform, "second", second)
        place(m, platform, "inverter", inverter)
        m.submodules.sram = sram
        wiring.connect(m, wiring.flipped(self.input), first.input)
        wiring.connect(m, first.output, second.input)
        wiring.connect(m, second.output, wiring.flipped(self.output))
        m.d.comb += [
            sram.write_en.eq(self.input.valid & self.input.ready),
            sram.write_addr.eq(self.input.payload.tag),
            sram.write_data.eq(self.input.payload.value.as_value()),
            sram.read_en.eq(1),
            sram.read_addr.eq(self.look),
            self.seen.eq(sram.read_data),
            inverter.a.eq(sram.read_data[:4]),
            self.flipped.eq(inverter.y),
        ]
        return m


class Rude(wiring.Component):
    """Passes a stream on through a register that gives up after one cycle and changes its payload.

    `fault` 1 drops valid before the word was taken, 2 changes the payload while it waits.
    """

    input: In(stream.Signature(WORD))
    output: Out(stream.Signature(WORD))
    fault: In(2)

    def elaborate(self, platform):
        m = Module()
        full = Signal()
        held = Signal(WORD, reset_less=True)
        m.d.comb += [
            self.input.ready.eq(~full),
            self.output.valid.eq(full),
            self.output.payload.eq(held),
        ]
        with m.If(self.input.valid & self.input.ready):
            m.d.sync += [held.eq(self.input.payload), full.eq(1)]
        with m.Elif(self.output.ready | (self.fault == 1)):
            m.d.sync += full.eq(0)
        with m.Elif(self.fault == 2):
            m.d.sync += held.tag.eq(held.tag + 1)
        return m
