# SPDX-License-Identifier: Apache-2.0
"""The KV SRAM: the KV cache, resident weights, and the ring of the weight stream."""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from golden.ecc import CODE_BITS
from hw.config import LINE_BYTES, TileConfig
from hw.ecc import EccEncoder
from hw.emit import place
from hw.hbm_channel import line_write
from hw.kv_bank import KvBank
from hw.kv_update import KvUpdate, append_layout
from hw.ports import LINE_ADDRESS_BITS, LINE_BITS, SCALE_BITS, WeightRead
from hw.wires import delayed, wire

# Two bits of a code word that the next host write flips, each if it is enabled.
INJECT = data.StructLayout({"first": 8, "first_en": 1, "second": 8, "second_en": 1})


class KvSram(wiring.Component):
    """`cols` banks of lines (128 bits and an 8-bit scale), one read and one write port each.

    A row is one line in every bank; line address = row * cols + bank. The array reads a row per
    cycle, column c's line c cycles after column 0's, so the read command moves along the banks.
    Rows beyond the memory read as zeros and pulse `read_fault`. A write takes one cycle; the
    writers go in the order append, stream, DMA, host, and are seen by reads that reach the bank in
    a later cycle. Requesters keep to the memory's range: address bits above it are ignored.
    Contents are undefined until written.

    A line is stored as a code word (`golden.ecc`): every read has a single flipped bit corrected;
    what is stored is not written back. Errors count for reads of the array in the first
    `command.columns` columns, since the others may be lines that were never written, and for lines
    that an append changes. The host's reads are corrected, and say what was found, but do not
    count.

    An append that changes an element reads its lines when the array leaves their banks' read ports
    free, each bank by itself, and is written `KvUpdate.LATENCY` cycles after it was taken; so a
    value element waits as long as the array reads its bank without a pause. Appends follow each
    other every cycle.

    Members
    -------
    read : rows for the array, one per cycle, never stalled
    read_error : a line of `read` that counts was not correctable, READ_LATENCY + 1 + its column
        cycles after its command
    stream_write, dma_write : lines of an HBM beat in neighbouring banks
    host_write : one line
    inject : bits to flip in the code word that `host_write` writes
    append : keys and value elements
    append_fault : a line that an append changes was not correctable; it is left as it was
    host_read : one line at a time, when array and append leave the bank's read port free
    corrected, uncorrectable : reads of this cycle that count and were corrected, or were not
        correctable
    """

    READ_LATENCY = KvBank.LATENCY

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
                "read_error": Out(1),
                "stream_write": In(stream.Signature(line_write(self.lines))),
                "append": In(stream.Signature(append_layout(config.cols))),
                "append_fault": Out(1),
                "dma_write": In(stream.Signature(line_write(self.lines))),
                "host_write": In(stream.Signature(line_write(1))),
                "inject": In(INJECT),
                "host_read": In(
                    wiring.Signature(
                        {
                            "request": Out(stream.Signature(LINE_ADDRESS_BITS)),
                            "response": In(
                                stream.Signature(
                                    data.StructLayout(
                                        {
                                            "data": LINE_BITS,
                                            "scale": SCALE_BITS,
                                            "corrected": 1,
                                            "double": 1,
                                        }
                                    )
                                )
                            ),
                        }
                    )
                ),
                "corrected": Out(range(config.cols + 1)),
                "uncorrectable": Out(range(config.cols + 1)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        cols, rows = self.config.cols, self.config.kv_rows
        col_bits, row_bits = cols.bit_length() - 1, rows.bit_length() - 1
        banks = [KvBank(rows) for _ in range(cols)]
        for c, bank in enumerate(banks):
            place(m, platform, f"bank{c}", bank)
        m.submodules.update = update = KvUpdate(cols, rows)
        reading, counted = self._reads(m, banks, row_bits)
        self._append(m, banks, update, reading)
        self._host_read(m, banks, reading, update, row_bits, col_bits)
        self._writes(m, platform, banks, update, row_bits, col_bits)
        self._count(m, banks, counted, update)
        return m

    def _reads(self, m, banks, row_bits):
        """The array's reads; for each bank whether it is read in this cycle, and whether what it
        gives in this cycle is for the array and counts.
        """
        reading, counted = [], []
        command = self.read.command
        m.d.sync += self.read_fault.eq(command.valid & command.row[row_bits:].any())
        for c, bank in enumerate(banks):
            column = self.read.column[c]
            outside = wire(m, f"outside{c}", command.row[row_bits:].any())
            used = wire(m, f"used{c}", command.valid & ~outside & (command.columns > c))
            late = self.READ_LATENCY
            away = delayed(m, f"away{c}", outside, late)
            m.d.comb += [
                bank.read_en.eq(command.valid),
                bank.read_addr.eq(command.row[:row_bits]),
                column.valid.eq(delayed(m, f"valid{c}", command.valid, late, reset=True)),
                column.meta.eq(delayed(m, f"meta{c}", command.meta, late)),
                column.line.eq(Mux(away, 0, bank.data[:LINE_BITS])),
                column.scale.eq(Mux(away, 0, bank.data[LINE_BITS:])),
            ]
            reading.append(command.valid)
            counted.append(delayed(m, f"counted{c}", used, late, reset=True))
            following = Signal(command.shape(), name=f"command{c + 1}")
            m.d.sync += following.eq(command)
            command = following
        return reading, counted

    def _append(self, m, banks, update, reading):
        wiring.connect(m, wiring.flipped(self.append), update.append)
        m.d.comb += [
            update.free.eq(~Cat(*reading)),
            self.append_fault.eq(update.fault),
        ]
        for c, bank in enumerate(banks):
            m.d.comb += [
                update.old[c].word.eq(bank.data),
                update.old[c].double.eq(bank.double),
            ]
            with m.If(update.read[c]):
                m.d.comb += [bank.read_en.eq(1), bank.read_addr.eq(update.row)]

    def _host_read(self, m, banks, reading, update, row_bits, col_bits):
        request, response = self.host_read.request, self.host_read.response
        bank_now, bank_then = Signal(col_bits), Signal(col_bits)
        busy, granted = Signal(), Signal()
        under_way = Signal(self.READ_LATENCY)
        held = Signal(response.payload.shape(), reset_less=True)
        m.d.comb += [
            bank_now.eq(request.payload[:col_bits]),
            busy.eq(under_way.any() | response.valid),
            request.ready.eq(granted),
            response.payload.eq(held),
        ]
        for c, bank in enumerate(banks):
            free = ~reading[c] & ~update.read[c]
            with m.If(request.valid & ~busy & (bank_now == c) & free):
                m.d.comb += [
                    granted.eq(1),
                    bank.read_en.eq(1),
                    bank.read_addr.eq(request.payload[col_bits : col_bits + row_bits]),
                ]
            with m.If(under_way[-1] & (bank_then == c)):
                m.d.sync += held.eq(Cat(bank.data, bank.corrected, bank.double))
        m.d.sync += under_way.eq(Cat(granted, under_way))
        with m.If(granted):
            m.d.sync += bank_then.eq(bank_now)
        with m.If(under_way[-1]):
            m.d.sync += response.valid.eq(1)
        with m.Elif(response.ready):
            m.d.sync += response.valid.eq(0)

    def _writes(self, m, platform, banks, update, row_bits, col_bits):
        """One writer per cycle, by priority; a word is encoded once for all banks of a lane."""
        line_writers = [
            (self.stream_write, self.lines),
            (self.dma_write, self.lines),
            (self.host_write, 1),
        ]
        granted = Signal(len(line_writers))
        before = update.write.valid
        row = Signal(row_bits)
        m.d.comb += row.eq(update.write.row)
        for i, (writer, _) in enumerate(line_writers):
            m.d.comb += [granted[i].eq(writer.valid & ~before), writer.ready.eq(granted[i])]
            before = wire(m, f"taken{i}", before | writer.valid)
            with m.If(granted[i]):
                m.d.comb += row.eq(writer.payload.address[col_bits : col_bits + row_bits])

        lanes = max(self.lines, update.lanes)
        codes = []
        for lane in range(lanes):
            encoder = EccEncoder()
            place(m, platform, f"encoder{lane}", encoder)
            m.d.comb += encoder.data.eq(update.write.words[lane % update.lanes])
            for i, (writer, lines) in enumerate(line_writers[:2]):
                payload, at = writer.payload, lane % lines
                with m.If(granted[i]):
                    m.d.comb += encoder.data.eq(Cat(payload.data[at], payload.scales[at]))
            codes.append(encoder.code)
        encoder = EccEncoder()
        place(m, platform, "host_encoder", encoder)
        host, flips = self.host_write.payload, Signal(CODE_BITS)
        m.d.comb += [
            encoder.data.eq(Cat(host.data[0], host.scales[0])),
            flips.eq(
                Cat(
                    (self.inject.first_en & (self.inject.first == b))
                    ^ (self.inject.second_en & (self.inject.second == b))
                    for b in range(CODE_BITS)
                )
            ),
        ]
        host_code = wire(m, "host_code", encoder.code ^ flips)

        for c, bank in enumerate(banks):
            write = Signal(name=f"write{c}")
            m.d.comb += [
                write.eq(update.write.valid & update.write.banks[c]),
                bank.write_en.eq(write),
                bank.write_addr.eq(row),
                bank.write_code.eq(Mux(granted[2], host_code, codes[c % lanes])),
            ]
            for i, (writer, lines) in enumerate(line_writers):
                lane, low = c % lines, lines.bit_length() - 1
                payload = writer.payload
                with m.If(granted[i]):
                    m.d.comb += write.eq(
                        payload.enable[lane] & (payload.address[low:col_bits] == c >> low)
                    )

    def _count(self, m, banks, counted, update):
        """What was found in the words that banks give in this cycle."""
        cols = self.config.cols
        changed = delayed(m, "changed", update.read, KvBank.LATENCY, reset=True)
        matters = wire(m, "matters", Cat(*counted) | changed)
        for name, found in (
            ("corrected", Cat(*(bank.corrected for bank in banks))),
            ("uncorrectable", Cat(*(bank.double for bank in banks))),
        ):
            level = [wire(m, f"{name}{c}", found[c] & matters[c]) for c in range(cols)]
            while len(level) > 1:
                level = [
                    wire(m, f"{name}_{len(level)}_{i}", level[i] + level[i + 1])
                    for i in range(0, len(level), 2)
                ]
            m.d.sync += getattr(self, name).eq(level[0])
        doubles = Cat(*(bank.double for bank in banks))
        m.d.sync += self.read_error.eq((doubles & Cat(*counted)).any())
