# SPDX-License-Identifier: Apache-2.0
"""The block table: the first KV SRAM row of each block of paged KV caches (BLOCKTABLE)."""

from amaranth import Array, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.config import TileConfig
from hw.isa import Status
from hw.ports import SramClient
from hw.sram import Sram1R1W

ENTRY_BITS = 17  # the first entry of a MATMUL plus its blocks, before the check against the table
FILL_LAYOUT = data.StructLayout({"addr": 32, "table": 16, "count": 16})


class BlockTable(wiring.Component):
    """`block_entries` rows of the KV SRAM in an SRAM of its own, filled from the tile SRAM.

    An entry keeps a bit that says whether its word was a row of the KV SRAM at all; what is not,
    is `outside` when it is looked up. Entries are undefined until they are filled.

    Members
    -------
    lookup : {valid, entry}, one per cycle, never stalled.
    row, outside : answer of the lookup a cycle before; `outside`: no entry of the table, or none
        that is a row of the KV SRAM.
    fill : a BLOCKTABLE command, taken when the one before is done; nothing is looked up meanwhile.
    done, error : one pulse per command, with its reason to fail or Status.RUNNING. Illegal: count
        of 0, an address that is no multiple of 4. A source beyond the tile SRAM, entries beyond the
        table: an address error; nothing is written then.
    memory : the tile SRAM, a vector of `cols` words at a time: 3 cycles and one per word when it
        is granted at once.
    """

    LATENCY = 1  # of a lookup

    def __init__(self, config: TileConfig):
        self.config = config
        self.row_bits = config.kv_rows.bit_length() - 1
        super().__init__(
            {
                "lookup": In(data.StructLayout({"valid": 1, "entry": ENTRY_BITS})),
                "row": Out(self.row_bits),
                "outside": Out(1),
                "fill": In(stream.Signature(FILL_LAYOUT)),
                "done": Out(1),
                "error": Out(Status),
                "memory": Out(SramClient(config.vector_lines)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config, row_bits = self.config, self.row_bits
        cols, entries = config.cols, config.block_entries
        index_bits, word_bits = entries.bit_length() - 1, cols.bit_length() - 1
        m.submodules.table = table = Sram1R1W(row_bits + 1, entries)

        beyond = Signal(reset_less=True)  # the lookup's entry is none of the table
        m.d.sync += beyond.eq(self.lookup.entry[index_bits:].any())
        m.d.comb += [
            table.read_en.eq(self.lookup.valid),
            table.read_addr.eq(self.lookup.entry[:index_bits]),
            self.row.eq(table.read_data[:row_bits]),
            self.outside.eq(beyond | table.read_data[row_bits]),
        ]

        given = self.fill.payload
        vector = Signal(28 - config.vector_lines.bit_length() + 1, reset_less=True)
        word, entry = Signal(word_bits, reset_less=True), Signal(index_bits, reset_less=True)
        left = Signal(16, reset_less=True)
        held = Array(Signal(row_bits + 1, name=f"word{i}", reset_less=True) for i in range(cols))
        legal, in_range = Signal(), Signal()
        reason = Signal(Status)
        request = self.memory.request
        m.d.comb += [
            legal.eq((given.count != 0) & ~given.addr[:2].any()),
            in_range.eq(
                (given.table + given.count <= entries)
                & (given.addr[2:] + given.count <= config.sram_bytes // 4)
            ),
            request.payload.address.eq(vector << (config.vector_lines.bit_length() - 1)),
            table.write_addr.eq(entry),
            table.write_data.eq(held[word]),
        ]
        with m.If(self.memory.valid):
            for i in range(cols):
                value = self.memory.response.data[i // 4].word_select(i % 4, 32)
                m.d.sync += held[i].eq(value[:row_bits] | (value[row_bits:].any() << row_bits))

        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.fill.ready.eq(1)
                m.d.sync += [
                    vector.eq(given.addr[2 + word_bits :]),
                    word.eq(given.addr[2 : 2 + word_bits]),
                    entry.eq(given.table),
                    left.eq(given.count),
                    reason.eq(Status.RUNNING),
                ]
                with m.If(self.fill.valid):
                    with m.If(legal & in_range):
                        m.next = "READ"
                    with m.Else():
                        m.d.sync += reason.eq(
                            Mux(legal, Status.ADDRESS_RANGE, Status.ILLEGAL_COMMAND)
                        )
                        m.next = "DONE"
            with m.State("READ"):
                m.d.comb += request.valid.eq(1)
                with m.If(request.ready):
                    m.next = "WAIT"
            with m.State("WAIT"):
                with m.If(self.memory.valid):
                    m.next = "WRITE"
            with m.State("WRITE"):
                m.d.comb += table.write_en.eq(1)
                m.d.sync += [word.eq(word + 1), entry.eq(entry + 1), left.eq(left - 1)]
                with m.If(left == 1):
                    m.next = "DONE"
                with m.Elif(word.all()):
                    m.d.sync += vector.eq(vector + 1)
                    m.next = "READ"
            with m.State("DONE"):
                m.d.comb += [self.done.eq(1), self.error.eq(reason)]
                m.next = "IDLE"
        return m
