# SPDX-License-Identifier: Apache-2.0
"""The KV engine: appends a token's key and value to a KV cache (KVAPPEND)."""

from amaranth import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from golden.formats import SCALE_ONE, Format
from hw.config import TileConfig
from hw.fifo import StreamFifo
from hw.isa import KVAPPEND, Activity, Status
from hw.kv_update import ROW_BITS, KvUpdate, append_layout, append_width
from hw.ports import LINE_BITS, SCALE_BITS, EngineControl, SramClient

BUFFER = 8  # lines between tile SRAM and KV SRAM
LINE = data.StructLayout({"data": LINE_BITS, "scale": SCALE_BITS})


class KvAppend(wiring.Component):
    """With E elements to a line (8 BF16, 16 MXFP8 E4M3), key: line p of the token in slot s goes to
    bank s mod cols, row k_base + (s div cols) * (head_dim / E) + p. Value: element d goes to bank d
    mod cols, row v_base + (s div E) * ceil(head_dim / cols) + d div cols, element s mod E.

    Scales: 1.0 for BF16, else that of the source line. A value line has one scale for its E tokens,
    which is that of the token appended last; so a head's values all have the same scale, and its
    keys may differ from line to line.

    The slots of a line of values are filled in order. The first one, a multiple of E, writes the
    line whole, with zeros for the tokens to come; the others, and with `wrapped` the first one too,
    change their element and keep the rest (`hw.kv_update`). A ring that is full sets `wrapped` on
    each later lap; without it the E - 1 tokens after that slot would be lost.

    One line per cycle (a value with fewer than E columns: E / cols cycles), about 12 cycles per
    command besides; BLOCKED while an element waits for the array to leave a bank's read port free,
    which a resident weight matrix that is loaded without a pause never does. Illegal: head_dim of 0
    or no multiple of E, another format, misaligned addresses, neither key nor value. A source
    beyond the tile SRAM, rows at or beyond the weight stream's ring: an address error; nothing is
    written then. `fault`, from the KV SRAM: KV_ERROR; the line at fault is left as it was.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        super().__init__(
            {
                "control": Out(EngineControl(KVAPPEND)),
                "source": Out(SramClient(1)),
                "append": Out(stream.Signature(append_layout(config.cols))),
                "fault": In(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config, cols = self.config, self.config.cols
        col_bits = cols.bit_length() - 1
        command = Signal(self.control.command.payload.shape(), reset_less=True)
        given = self.control.command.payload
        legal, in_range = Signal(), Signal()
        lines, tiles = Signal(13, reset_less=True), Signal(16, reset_less=True)
        key_row, value_row = (
            Signal(ROW_BITS + 16, reset_less=True),
            Signal(ROW_BITS + 16, reset_less=True),
        )
        m.submodules.buffer = buffer = StreamFifo(LINE, BUFFER)
        reading, read_value = Signal(), Signal()
        read_line = Signal(13, reset_less=True)
        in_flight = Signal(range(BUFFER + 1))
        write_value = Signal()
        write_line, element = Signal(13, reset_less=True), Signal(4)
        settle = Signal(range(KvUpdate.LATENCY + 1))
        eight, faulty = Signal(), Signal()
        given_eight = Signal()

        m.d.comb += [
            eight.eq(command.format == Format.MXFP8_E4M3),
            given_eight.eq(given.format == Format.MXFP8_E4M3),
            legal.eq(
                (given.head_dim != 0)
                & ~given.head_dim[:3].any()
                & ((given.format == Format.BF16) | (given_eight & ~given.head_dim[3]))
                & ~given.k_addr[:4].any()
                & ~given.v_addr[:4].any()
                & (given.keys | given.values)
            ),
            in_range.eq(
                (
                    ~command.keys
                    | (
                        (key_row + lines <= config.stream_base)
                        & (command.k_addr[4:] + lines <= config.sram_lines)
                    )
                )
                & (
                    ~command.values
                    | (
                        (value_row + tiles <= config.stream_base)
                        & (command.v_addr[4:] + lines <= config.sram_lines)
                    )
                )
            ),
        ]

        # Reads: key lines, then value lines, as far as the buffer has room.
        request, granted = self.source.request, Signal()
        address = Mux(read_value, command.v_addr[4:], command.k_addr[4:])
        m.d.comb += [
            request.valid.eq(reading & (in_flight + buffer.level < BUFFER)),
            request.payload.address.eq(address + read_line),
            granted.eq(request.valid & request.ready),
            buffer.i.valid.eq(self.source.valid),
            buffer.i.payload.data.eq(self.source.response.data[0]),
            buffer.i.payload.scale.eq(Mux(eight, self.source.response.scales[0], SCALE_ONE)),
        ]
        m.d.sync += in_flight.eq(in_flight + granted - self.source.valid)
        with m.If(granted):
            with m.If(read_line == lines - 1):
                m.d.sync += [read_line.eq(0), read_value.eq(1)]
                with m.If(read_value | ~command.values):
                    m.d.sync += reading.eq(0)
            with m.Else():
                m.d.sync += read_line.eq(read_line + 1)

        # Writes.
        append = self.append.payload
        last_element, width = Signal(4), Signal(5)
        with m.If(eight):
            m.d.comb += [width.eq(append_width(cols, True)), last_element.eq(16 - width)]
        with m.Else():
            m.d.comb += [width.eq(append_width(cols)), last_element.eq(8 - width)]
        place = Signal(16)  # element of the value that the write starts with
        taken, last_part, last_line = Signal(), Signal(), Signal()
        running = Signal()
        m.d.comb += [
            place.eq(Mux(eight, write_line << 4, write_line << 3) + element),
            last_part.eq(~write_value | (element == last_element)),
            last_line.eq(last_part & (write_line == lines - 1)),
            self.append.valid.eq(running & buffer.o.valid),
            append.key.eq(~write_value),
            append.row.eq(Mux(write_value, value_row + (place >> col_bits), key_row + write_line)),
            append.bank.eq(Mux(write_value, place[:col_bits], command.slot[:col_bits])),
            append.eight.eq(eight),
            append.place.eq(Mux(eight, command.slot[:4], command.slot[:3])),
            append.fresh.eq((append.place == 0) & ~command.wrapped),
            append.line.eq(buffer.o.payload.data >> Mux(eight, element << 3, element << 4)),
            append.scale.eq(buffer.o.payload.scale),
            taken.eq(self.append.valid & self.append.ready),
            buffer.o.ready.eq(taken & last_part),
        ]
        finished = Signal()
        m.d.comb += finished.eq(taken & last_line & (write_value | ~command.values))
        with m.If(taken):
            with m.If(write_value):
                m.d.sync += element.eq(Mux(last_part, 0, element + width))
            with m.If(last_part):
                m.d.sync += write_line.eq(Mux(last_line, 0, write_line + 1))
            with m.If(last_line):
                m.d.sync += write_value.eq(1)

        with m.FSM() as fsm:
            with m.State("IDLE"):
                m.d.comb += self.control.command.ready.eq(1)
                with m.If(self.control.command.valid):
                    m.d.sync += [
                        command.eq(given),
                        lines.eq(Mux(given_eight, given.head_dim >> 4, given.head_dim >> 3)),
                        tiles.eq((given.head_dim + (cols - 1)) >> col_bits),
                    ]
                    m.next = "ROWS"
                    with m.If(~legal):
                        m.next = "ILLEGAL"
            with m.State("ILLEGAL"):
                m.d.comb += [self.control.done.eq(1), self.control.error.eq(Status.ILLEGAL_COMMAND)]
                m.next = "IDLE"
            with m.State("ROWS"):
                m.d.sync += [
                    key_row.eq(command.k_base + (command.slot >> col_bits) * lines),
                    value_row.eq(
                        command.v_base + Mux(eight, command.slot >> 4, command.slot >> 3) * tiles
                    ),
                ]
                m.next = "CHECK"
            with m.State("CHECK"):
                m.d.sync += [
                    read_line.eq(0),
                    read_value.eq(~command.keys),
                    write_line.eq(0),
                    write_value.eq(~command.keys),
                    element.eq(0),
                    settle.eq(0),
                    faulty.eq(0),
                ]
                with m.If(in_range):
                    m.d.sync += reading.eq(1)
                    m.next = "RUN"
                with m.Else():
                    m.next = "RANGE"
            with m.State("RANGE"):
                m.d.comb += [self.control.done.eq(1), self.control.error.eq(Status.ADDRESS_RANGE)]
                m.next = "IDLE"
            with m.State("RUN"):
                m.d.comb += running.eq(1)
                with m.If(finished):
                    m.next = "SETTLE"
            with m.State("SETTLE"):
                m.d.sync += settle.eq(settle + 1)
                with m.If(settle == KvUpdate.LATENCY):
                    m.d.comb += self.control.done.eq(1)
                    with m.If(faulty):
                        m.d.comb += self.control.error.eq(Status.KV_ERROR)
                    m.next = "IDLE"

        with m.If(self.fault):
            m.d.sync += faulty.eq(1)
        activity = self.control.activity
        with m.If(fsm.ongoing("IDLE")):
            m.d.comb += activity.eq(Activity.IDLE)
        with m.Elif(~running | taken):
            m.d.comb += activity.eq(Activity.BUSY)
        with m.Elif(self.append.valid):
            m.d.comb += activity.eq(Activity.BLOCKED)
        with m.Else():
            m.d.comb += activity.eq(Activity.STARVED)
        return m
