# SPDX-License-Identifier: Apache-2.0
"""The SEND engine: commands to write packets, acknowledgements to completions."""

from amaranth import Array, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.config import TileConfig
from hw.fifo import StreamFifo
from hw.isa import SEND, Activity, Status, operand_layout
from hw.line_reader import LineReader
from hw.noc_flit import FLIT, HEAD, PACKET_LINES, POSITION, TAG_BITS, Kind
from hw.packet_emitter import PacketEmitter
from hw.ports import LINE_ADDRESS_BITS, EngineControl, SramClient
from hw.semaphores import FIRST_REMOTE

REPLY = data.StructLayout({"valid": 1, "tag": TAG_BITS, "status": Status})
FLIGHTS = 1 << TAG_BITS  # commands under way
UNANSWERED_BITS = 8


class NocSender(wiring.Component):
    """Executes SEND; up to FLIGHTS commands are under way, done in order.

    A row goes as packets of up to PACKET_LINES lines, a flit for the head and one per line, each
    one cycle; about three cycles pass between commands, hidden while the link is behind. Addresses
    are checked, here too, for every packet before it is made: the first one out of range at either
    end stops the command with ADDRESS_RANGE, and no semaphore is posted. The semaphore's packet
    follows the last write on the same way, so it arrives behind it. A command is done when every
    packet of it has been answered.

    ILLEGAL_COMMAND: no rows or lines, an address that is not a multiple of 16, a semaphore that is
    not a remote one. NO_DESTINATION: x, y is no tile of the mesh. Neither sends anything.

    Members
    -------
    control, source : command and reads of the tile SRAM.
    position : of this tile.
    request : flits of request packets.
    reply : answer to one packet in each cycle with `valid`; RUNNING means success.
    active : a command is under way.
    Activity: BUSY a flit leaves, BLOCKED a flit waits, STARVED waiting for lines or answers.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        super().__init__(
            {
                "control": Out(EngineControl(SEND)),
                "source": Out(SramClient(1)),
                "position": In(POSITION),
                "request": Out(stream.Signature(FLIT)),
                "reply": In(REPLY),
                "active": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.reader = reader = LineReader()
        m.submodules.heads = heads = StreamFifo(HEAD, 4)
        m.submodules.emitter = emitter = PacketEmitter()
        wiring.connect(m, reader.memory, wiring.flipped(self.source))
        wiring.connect(m, reader.line, emitter.line)
        wiring.connect(m, heads.o, emitter.head)
        wiring.connect(m, emitter.flit, wiring.flipped(self.request))
        m.d.comb += emitter.body.eq(heads.o.payload.count)

        # Commands under way, a ring.
        walked = Array(Signal(name=f"walked{i}") for i in range(FLIGHTS))  # every packet is made
        unanswered = Array(Signal(UNANSWERED_BITS, name=f"unanswered{i}") for i in range(FLIGHTS))
        error = Array(Signal(Status, name=f"error{i}") for i in range(FLIGHTS))
        newest = Signal(TAG_BITS)  # the one being walked, or the next
        oldest = Signal(TAG_BITS)
        flying = Signal(range(FLIGHTS + 1))

        command = Signal(operand_layout(SEND), reset_less=True)
        row_source = Signal(LINE_ADDRESS_BITS, reset_less=True)
        row_target = Signal(LINE_ADDRESS_BITS, reset_less=True)
        read_at = Signal(LINE_ADDRESS_BITS, reset_less=True)
        write_at = Signal(LINE_ADDRESS_BITS, reset_less=True)
        lines_left = Signal(16, reset_less=True)  # of the row
        rows_left = Signal(16, reset_less=True)
        reads_left = Signal(range(PACKET_LINES + 1), reset_less=True)  # of the packet
        count = Signal(range(PACKET_LINES + 1))
        stop = Signal()
        reason = Signal(Status)
        made = Signal()  # a packet
        walk_done = Signal()

        head = heads.i.payload
        m.d.comb += [
            count.eq(Mux(lines_left > PACKET_LINES, PACKET_LINES, lines_left)),
            head.x.eq(command.x),
            head.y.eq(command.y),
            head.source_x.eq(self.position.x),
            head.source_y.eq(self.position.y),
            head.tag.eq(newest),
            head.address.eq(write_at),
            head.semaphore.eq(command.semaphore),
            head.status.eq(error[newest]),
            reader.address.payload.eq(read_at),
            made.eq(heads.i.valid & heads.i.ready),
        ]
        room = Signal()  # for one more unanswered packet
        m.d.comb += room.eq(~unanswered[newest].all())
        source_end = Signal(LINE_ADDRESS_BITS + 1)
        target_end = Signal(LINE_ADDRESS_BITS + 1)
        outside = Signal()
        m.d.comb += [
            source_end.eq(read_at + count),
            target_end.eq(write_at + count),
            outside.eq(
                (source_end > self.config.sram_lines) | (target_end > self.config.sram_lines)
            ),
        ]

        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.control.command.ready.eq(flying != FLIGHTS)
                with m.If(self.control.command.valid & self.control.command.ready):
                    m.d.sync += [
                        command.eq(self.control.command.payload),
                        walked[newest].eq(0),
                        error[newest].eq(Status.RUNNING),
                    ]
                    m.next = "CHECK"
            with m.State("CHECK"):
                m.d.sync += [
                    row_source.eq(command.src_addr[4:]),
                    read_at.eq(command.src_addr[4:]),
                    row_target.eq(command.dst_addr[4:]),
                    write_at.eq(command.dst_addr[4:]),
                    lines_left.eq(command.lines),
                    rows_left.eq(command.rows),
                ]
                m.next = "PACKET"
                with m.If(
                    (command.lines == 0)
                    | (command.rows == 0)
                    | command.src_addr[:4].any()
                    | command.dst_addr[:4].any()
                    | (command.post & (command.semaphore < FIRST_REMOTE))
                ):
                    m.d.comb += [stop.eq(1), reason.eq(Status.ILLEGAL_COMMAND)]
                    m.next = "IDLE"
                with m.Elif(
                    (command.x >= self.position.mesh_x) | (command.y >= self.position.mesh_y)
                ):
                    m.d.comb += [stop.eq(1), reason.eq(Status.NO_DESTINATION)]
                    m.next = "IDLE"
            with m.State("PACKET"):
                m.d.comb += [head.kind.eq(Kind.WRITE), head.count.eq(count)]
                with m.If(error[newest] != Status.RUNNING):  # told by an answer
                    m.d.comb += walk_done.eq(1)
                    m.next = "IDLE"
                with m.Elif(outside):
                    m.d.comb += [stop.eq(1), reason.eq(Status.ADDRESS_RANGE)]
                    m.next = "IDLE"
                with m.Else():
                    m.d.comb += heads.i.valid.eq(room)
                    with m.If(made):
                        m.d.sync += [
                            reads_left.eq(count),
                            lines_left.eq(lines_left - count),
                            write_at.eq(write_at + count),
                        ]
                        m.next = "READ"
            with m.State("READ"):
                m.d.comb += reader.address.valid.eq(1)
                with m.If(reader.address.ready):
                    m.d.sync += [reads_left.eq(reads_left - 1), read_at.eq(read_at + 1)]
                    with m.If(reads_left == 1):
                        m.next = "PACKET"
                        with m.If(lines_left == 0):
                            m.d.sync += [
                                row_source.eq(row_source + command.src_stride),
                                read_at.eq(row_source + command.src_stride),
                                row_target.eq(row_target + command.dst_stride),
                                write_at.eq(row_target + command.dst_stride),
                                lines_left.eq(command.lines),
                                rows_left.eq(rows_left - 1),
                            ]
                            with m.If(rows_left == 1):
                                m.next = "POST"
            with m.State("POST"):
                m.d.comb += head.kind.eq(Kind.SEMAPHORE)
                with m.If(~command.post | (error[newest] != Status.RUNNING)):
                    m.d.comb += walk_done.eq(1)
                    m.next = "IDLE"
                with m.Else():
                    m.d.comb += heads.i.valid.eq(room)
                    with m.If(made):
                        m.d.comb += walk_done.eq(1)
                        m.next = "IDLE"

        done = Signal()
        m.d.comb += [
            done.eq((flying != 0) & walked[oldest] & (unanswered[oldest] == 0)),
            self.control.done.eq(done),
            self.control.error.eq(error[oldest]),
            self.active.eq(self.control.activity != Activity.IDLE),
        ]
        with m.If(
            self.reply.valid
            & (self.reply.status != Status.RUNNING)
            & (error[self.reply.tag] == Status.RUNNING)
        ):
            m.d.sync += error[self.reply.tag].eq(self.reply.status)
        with m.If(stop):
            m.d.sync += error[newest].eq(reason)
        with m.If(stop | walk_done):
            m.d.sync += [walked[newest].eq(1), newest.eq(newest + 1)]
        with m.If(done):
            m.d.sync += oldest.eq(oldest + 1)
        for i in range(FLIGHTS):
            m.d.sync += unanswered[i].eq(
                unanswered[i] + (made & (newest == i)) - (self.reply.valid & (self.reply.tag == i))
            )
        # A command counts from its acceptance, so that `newest` stays free while it is walked.
        accepted = Signal()
        m.d.comb += accepted.eq(self.control.command.valid & self.control.command.ready)
        m.d.sync += flying.eq(flying + accepted - done)

        with m.If(self.request.valid & self.request.ready):
            m.d.comb += self.control.activity.eq(Activity.BUSY)
        with m.Elif(self.request.valid):
            m.d.comb += self.control.activity.eq(Activity.BLOCKED)
        with m.Elif(flying != 0):
            m.d.comb += self.control.activity.eq(Activity.STARVED)
        return m
