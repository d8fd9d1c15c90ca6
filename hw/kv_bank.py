# SPDX-License-Identifier: Apache-2.0
"""A bank of the KV SRAM: code words in a memory, decoded as they are read."""

from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden.ecc import CODE_BITS, DATA_BITS
from hw.ecc import EccDecoder
from hw.emit import place
from hw.sram import Sram1R1W


class KvBank(wiring.Component):
    """`rows` code words, one read and one write per cycle.

    A read gives `data` LATENCY cycles later, corrected; `corrected` and `double` (see
    `hw.ecc.EccDecoder`) are high in that cycle only, `data` stays until the next read's. A read in
    the cycle of a write to its row gives the word before it.
    """

    LATENCY = 2  # the memory, the decoder's register

    def __init__(self, rows: int):
        if rows < 2:
            raise ValueError(f"rows must be at least 2, not {rows!r}")
        self.rows = rows
        address = (rows - 1).bit_length()
        super().__init__(
            {
                "write_en": In(1),
                "write_addr": In(address),
                "write_code": In(CODE_BITS),
                "read_en": In(1),
                "read_addr": In(address),
                "data": Out(DATA_BITS),
                "corrected": Out(1),
                "double": Out(1),
            }
        )

    @property
    def emit_name(self) -> str:
        return f"kv_bank_{self.rows}"

    def elaborate(self, platform):
        m = Module()
        m.submodules.memory = memory = Sram1R1W(CODE_BITS, self.rows)
        decoder = EccDecoder()
        place(m, platform, "decoder", decoder)
        read, word = Signal(), Signal(DATA_BITS, reset_less=True)
        m.d.comb += [
            memory.write_en.eq(self.write_en),
            memory.write_addr.eq(self.write_addr),
            memory.write_data.eq(self.write_code),
            memory.read_en.eq(self.read_en),
            memory.read_addr.eq(self.read_addr),
            decoder.code.eq(memory.read_data),
            self.data.eq(word),
        ]
        m.d.sync += [
            read.eq(self.read_en),
            word.eq(decoder.data),
            self.corrected.eq(read & decoder.corrected),
            self.double.eq(read & decoder.double),
        ]
        return m
