# SPDX-License-Identifier: Apache-2.0
"""The KV SRAM: the KV cache, resident weights, and the ring of the weight stream."""

from amaranth import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.config import LINE_BYTES, TileConfig
from hw.hbm_channel import line_write
from hw.ports import GRANULE_BITS, GRANULES, LINE_ADDRESS_BITS, LINE_BITS, SCALE_BITS, WeightRead
from hw.sram import Sram1R1W

WORD_BITS = LINE_BITS + SCALE_BITS
ENABLES = WORD_BITS // 8
ROW_BITS = 24
SCALE_ONE = 127


def append_width(cols: int) -> int:
    """Elements of a value that one append write carries: one for each of so many banks."""
    return min(GRANULES, cols)


def append_layout(cols: int) -> data.StructLayout:
    """A write of KVAPPEND. `key`: `line` to bank `bank`; else element i of `line` (`append_width`
    of them) to granule `granule` of bank `bank` + i.
    """
    return data.StructLayout(
        {
            "row": ROW_BITS,
            "bank": (cols - 1).bit_length(),
            "key": 1,
            "granule": (GRANULES - 1).bit_length(),
            "line": LINE_BITS,
        }
    )


class KvSram(wiring.Component):
    """`cols` banks of lines (128 bits and an 8-bit scale), one read and one write port each.

    A row is one line in every bank; line address = row * cols + bank. The array reads a row per
    cycle, column c's line c cycles after column 0's, so the read command moves along the banks.
    Rows beyond the memory read as zeros and pulse `read_fault`. A write takes one cycle; the
    writers go in the order stream, append, DMA, host, and are seen by reads that reach the bank in
    a later cycle. Requesters keep to the memory's range: address bits above it are ignored.
    Contents are undefined until written.

    Members
    -------
    read : rows for the array, one per cycle, never stalled
    stream_write, dma_write : lines of an HBM beat in neighbouring banks
    host_write : one line
    append : keys and value elements
    host_read : one line at a time, when the array leaves the bank's read port free
    """

    READ_LATENCY = 1

    def __init__(self, config: TileConfig, meta_bits: int):
        self.lines = config.hbm_beat_bytes // LINE_BYTES
        if self.lines > config.cols:
            raise ValueError(
                f"cols must be at least the {self.lines} lines of an HBM beat, not {config.cols!r}"
            )
        if meta_bits < 1:
            raise ValueError(f"meta_bits must be at least 1, not {meta_bits!r}")
        self.config, self.meta_bits = config, meta_bits
        super().__init__(
            {
                "read": In(WeightRead(config.cols, meta_bits)),
                "read_fault": Out(1),
                "stream_write": In(stream.Signature(line_write(self.lines))),
                "append": In(stream.Signature(append_layout(config.cols))),
                "dma_write": In(stream.Signature(line_write(self.lines))),
                "host_write": In(stream.Signature(line_write(1))),
                "host_read": In(
                    wiring.Signature(
                        {
                            "request": Out(stream.Signature(LINE_ADDRESS_BITS)),
                            "response": In(
                                stream.Signature(
                                    data.StructLayout({"data": LINE_BITS, "scale": SCALE_BITS})
                                )
                            ),
                        }
                    )
                ),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        cols, rows = config.cols, config.kv_rows
        col_bits, row_bits = cols.bit_length() - 1, rows.bit_length() - 1
        banks = []
        for c in range(cols):
            m.submodules[f"bank{c}"] = bank = Sram1R1W(WORD_BITS, rows, granularity=8)
            banks.append(bank)
        reading = self._reads(m, banks, row_bits)
        self._host_read(m, banks, reading, row_bits, col_bits)
        self._writes(m, banks, row_bits, col_bits)
        return m

    def _reads(self, m, banks, row_bits):
        """The array's reads; gives for each bank whether it is read in this cycle."""
        reading = []
        command = self.read.command
        m.d.sync += self.read_fault.eq(command.valid & command.row[row_bits:].any())
        for c, bank in enumerate(banks):
            column = self.read.column[c]
            outside = Signal(name=f"outside{c}")
            m.d.sync += [
                column.valid.eq(command.valid),
                column.meta.eq(command.meta),
                outside.eq(command.row[row_bits:].any()),
            ]
            m.d.comb += [
                bank.read_en.eq(command.valid),
                bank.read_addr.eq(command.row[:row_bits]),
                column.line.eq(Mux(outside, 0, bank.read_data[:LINE_BITS])),
                column.scale.eq(Mux(outside, 0, bank.read_data[LINE_BITS:])),
            ]
            reading.append(command.valid)
            following = Signal(command.shape(), name=f"command{c + 1}")
            m.d.sync += following.eq(command)
            command = following
        return reading

    def _host_read(self, m, banks, reading, row_bits, col_bits):
        request, response = self.host_read.request, self.host_read.response
        bank_now, bank_then = Signal(col_bits), Signal(col_bits)
        busy, arriving, granted = Signal(), Signal(), Signal()
        held = Signal(WORD_BITS, reset_less=True)
        m.d.comb += [
            bank_now.eq(request.payload[:col_bits]),
            busy.eq(arriving | response.valid),
            request.ready.eq(granted),
            response.payload.data.eq(held[:LINE_BITS]),
            response.payload.scale.eq(held[LINE_BITS:]),
        ]
        for c, bank in enumerate(banks):
            with m.If(request.valid & ~busy & (bank_now == c) & ~reading[c]):
                m.d.comb += [
                    granted.eq(1),
                    bank.read_en.eq(1),
                    bank.read_addr.eq(request.payload[col_bits : col_bits + row_bits]),
                ]
            with m.If(arriving & (bank_then == c)):
                m.d.sync += held.eq(bank.read_data)
        m.d.sync += [arriving.eq(granted), bank_then.eq(bank_now)]
        with m.If(arriving):
            m.d.sync += response.valid.eq(1)
        with m.Elif(response.ready):
            m.d.sync += response.valid.eq(0)

    def _writes(self, m, banks, row_bits, col_bits):
        """One writer per cycle, by priority."""
        writers = (self.stream_write, self.append, self.dma_write, self.host_write)
        granted = Signal(len(writers))
        before = Const(0, 1)
        for i, writer in enumerate(writers):
            m.d.comb += [granted[i].eq(writer.valid & ~before), writer.ready.eq(granted[i])]
            taken = Signal(name=f"taken{i}")
            m.d.comb += taken.eq(before | writer.valid)
            before = taken

        row = Signal(row_bits)
        line_writers = [
            (0, self.stream_write, self.lines),
            (2, self.dma_write, self.lines),
            (3, self.host_write, 1),
        ]
        for i, writer, _ in line_writers:
            with m.If(granted[i]):
                m.d.comb += row.eq(writer.payload.address[col_bits : col_bits + row_bits])
        append = self.append.payload
        with m.If(granted[1]):
            m.d.comb += row.eq(append.row)
        width = append_width(len(banks))
        width_bits = width.bit_length() - 1
        for c, bank in enumerate(banks):
            m.d.comb += bank.write_addr.eq(row)
            for i, writer, lines in line_writers:
                lane, low = c % lines, lines.bit_length() - 1
                payload = writer.payload
                with m.If(
                    granted[i] & payload.enable[lane] & (payload.address[low:col_bits] == c >> low)
                ):
                    m.d.comb += [
                        bank.write_data.eq(Cat(payload.data[lane], payload.scales[lane])),
                        bank.write_en.eq(-1),
                    ]
            with m.If(granted[1]):
                with m.If(append.key):
                    with m.If(append.bank == c):
                        m.d.comb += [
                            bank.write_data.eq(Cat(append.line, Const(SCALE_ONE, SCALE_BITS))),
                            bank.write_en.eq(-1),
                        ]
                with m.Elif(append.bank[width_bits:] == c >> width_bits):
                    element = append.line.word_select(c % width, GRANULE_BITS)
                    m.d.comb += bank.write_data.eq(
                        Cat(element.replicate(GRANULES), Const(SCALE_ONE, SCALE_BITS))
                    )
                    for g in range(GRANULES):
                        m.d.comb += bank.write_en[2 * g : 2 * g + 2].eq(
                            (append.granule == g).replicate(2)
                        )
                    m.d.comb += bank.write_en[-1].eq(1)
