# SPDX-License-Identifier: Apache-2.0
"""The DMA engine: rows of lines between the HBM slice and the SRAMs."""

from amaranth import Cat, Const, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import Out

from hw.config import LINE_BYTES, TileConfig
from hw.hbm_channel import HbmRead, HbmWrite, line_write
from hw.isa import DMA, Activity, Direction, Status
from hw.line_fifo import LineFifo
from hw.ports import GRANULES, LINE_ADDRESS_BITS, EngineControl, SramClient
from hw.realigner import MOVE, RUN_LINES, Realigner
from hw.sram_reader import SramReader

COMMANDS = 8  # commands towards the SRAMs whose rows may be on their way
MOVES = 32  # rows that may be on their way
WRITE_DELAY = 2  # cycles from the acceptance of a write until a read sees it, generously


class Dma(wiring.Component):
    """Executes DMA commands, W = `hbm_beat_bytes` / 16 lines per cycle at most.

    Commands towards the SRAMs overlap: the bursts of the next one are asked for while the data of
    the former arrive. A command of another direction, or towards HBM, starts when all former ones
    are done. Rows without scales write scale 127 into the SRAMs. `done` comes two cycles after the
    last write was accepted, or when HBM has answered every write burst; the first row's burst is
    asked for five cycles after the command was taken. Stalls through its ports.

    ILLEGAL_COMMAND: no lines or rows, an HBM address, stride or tile SRAM address that is not a
    multiple of 16, an unknown direction, a scaled write to HBM. ADDRESS_RANGE: some line beyond the
    HBM slice, the tile SRAM or the KV SRAM rows below the weight stream's ring. Both are found
    before anything is moved. HBM_ERROR: the HBM slice answered with an error.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        self.lines = config.hbm_beat_bytes // LINE_BYTES
        super().__init__(
            {
                "control": Out(EngineControl(DMA)),
                "hbm_read": Out(HbmRead(self.lines)),
                "hbm_write": Out(HbmWrite(self.lines)),
                "sram": Out(SramClient(self.lines)),
                "kv_write": Out(stream.Signature(line_write(self.lines))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        command = self.control.command
        m.submodules.realigner = realigner = Realigner(self.lines)
        m.submodules.moves = moves = LineFifo(MOVE, MOVES)
        m.submodules.reader = reader = SramReader(self.lines)
        wiring.connect(m, moves.output, realigner.move)

        # Registers of the command that is being issued.
        operands = Signal.like(command.p, reset_less=True)
        direction = Signal(2)
        to_hbm, to_kv = Signal(), Signal()
        local = Signal(32)  # line address
        m.d.comb += [
            direction.eq(operands.direction),
            to_hbm.eq(direction == Direction.SRAM_TO_HBM),
            to_kv.eq(direction == Direction.HBM_TO_KV),
            local.eq(Mux(to_kv, operands.local_addr, operands.local_addr[4:])),
        ]
        runs = Signal(24)
        fetch = Signal(25, reset_less=True)  # lines of a row in HBM
        stride = Signal(LINE_ADDRESS_BITS)
        hbm_span = Signal(LINE_ADDRESS_BITS + 16, reset_less=True)
        local_span = Signal(24 + 16, reset_less=True)
        hbm_end = Signal(LINE_ADDRESS_BITS + 18)
        local_end = Signal(24 + 18)
        local_limit = Signal(32)
        further = Signal(16)
        m.d.comb += [
            runs.eq((operands.lines + (RUN_LINES - 1))[4:]),
            stride.eq(operands.hbm_stride[4:]),
            further.eq(operands.rows - 1),
            hbm_end.eq(operands.hbm_addr[4:] + hbm_span + fetch),
            local_end.eq(local + local_span + operands.lines),
            local_limit.eq(Mux(to_kv, config.stream_base * config.cols, config.sram_lines)),
        ]
        illegal, beyond = Signal(), Signal()
        m.d.comb += [
            illegal.eq(
                (operands.lines == 0)
                | (operands.rows == 0)
                | (direction == 3)
                | (operands.scaled & to_hbm)
                | operands.hbm_addr[:4].any()
                | operands.hbm_stride[:4].any()
                | (~to_kv & operands.local_addr[:4].any())
            ),
            beyond.eq((hbm_end > config.hbm_bytes // LINE_BYTES) | (local_end > local_limit)),
        ]

        # Rows: a request to the source, one to the destination, and the move between them.
        hbm_row = Signal(LINE_ADDRESS_BITS, reset_less=True)
        local_row = Signal(LINE_ADDRESS_BITS, reset_less=True)
        rows_left = Signal(16, reset_less=True)
        last_row = Signal()
        m.d.comb += [
            last_row.eq(rows_left == 1),
            self.hbm_read.request.p.address.eq(hbm_row),
            self.hbm_read.request.p.lines.eq(fetch),
            self.hbm_write.request.p.address.eq(hbm_row),
            self.hbm_write.request.p.lines.eq(operands.lines),
            reader.piece.p.address.eq(local_row),
            reader.piece.p.lines.eq(operands.lines),
            moves.input.p.address.eq(Mux(to_hbm, hbm_row, local_row)),
            moves.input.p.lines.eq(operands.lines),
            moves.input.p.scaled.eq(operands.scaled),
            moves.input.p.last.eq(last_row),
        ]
        ports = [self.hbm_read.request, self.hbm_write.request, reader.piece, moves.input]
        wanted = Signal(4)
        sent = Signal(4)
        ready = Signal(4)
        rows_go, row_sent = Signal(), Signal()
        m.d.comb += [
            wanted.eq(Mux(to_hbm, Const(0b1110, 4), Const(0b1001, 4))),
            row_sent.eq(rows_go & (sent | ready | ~wanted).all()),
        ]
        for i, port in enumerate(ports):
            m.d.comb += [port.valid.eq(rows_go & wanted[i] & ~sent[i]), ready[i].eq(port.ready)]
        with m.If(rows_go):
            m.d.sync += sent.eq(Mux(row_sent, 0, sent | ready))
        with m.If(row_sent):
            m.d.sync += [
                hbm_row.eq(hbm_row + stride),
                local_row.eq(local_row + operands.local_stride),
                rows_left.eq(rows_left - 1),
            ]

        # Commands. `target` is the direction of those on their way, `pending` their number.
        target = Signal(2)
        pending = Signal(range(COMMANDS + 1))
        started, landed = Signal(), Signal()
        refusal = Signal(Status, reset_less=True)
        fail, written = Signal(), Signal()
        write_error = Signal()
        idle = Signal()
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += [command.ready.eq(pending != COMMANDS), idle.eq(pending == 0)]
                m.d.sync += operands.eq(command.p)
                with m.If(command.valid & command.ready):
                    m.next = "COUNT"
            with m.State("COUNT"):
                m.d.sync += [
                    fetch.eq(operands.lines + Mux(operands.scaled, runs, 0)),
                    hbm_span.eq(further * stride),
                    local_span.eq(further * operands.local_stride),
                    hbm_row.eq(operands.hbm_addr[4:]),
                    local_row.eq(local),
                    rows_left.eq(operands.rows),
                    write_error.eq(0),
                ]
                m.next = "CHECK"
            with m.State("CHECK"):
                m.d.sync += refusal.eq(Mux(illegal, Status.ILLEGAL_COMMAND, Status.ADDRESS_RANGE))
                with m.If(illegal | beyond):
                    m.next = "FAIL"
                with m.Else():
                    m.next = "START"
            with m.State("START"):
                with m.If((pending == 0) | ((direction == target) & ~to_hbm)):
                    m.d.comb += started.eq(1)
                    m.d.sync += target.eq(direction)
                    m.next = "ROWS"
            with m.State("ROWS"):
                m.d.comb += rows_go.eq(1)
                with m.If(row_sent & last_row):
                    m.next = "IDLE"
                    with m.If(to_hbm):
                        m.next = "ANSWER"
            with m.State("ANSWER"):
                with m.If((pending == 0) & self.hbm_write.idle):
                    m.d.comb += written.eq(1)
                    m.next = "IDLE"
            with m.State("FAIL"):
                with m.If(pending == 0):
                    m.d.comb += fail.eq(1)
                    m.next = "IDLE"
        with m.If(self.hbm_write.error):
            m.d.sync += write_error.eq(1)

        # Data: from the HBM slice or the tile SRAM, through the realigner, to the destination.
        out = realigner.out
        write = out.p.write
        from_sram = Signal()
        m.d.comb += [
            from_sram.eq(target == Direction.SRAM_TO_HBM),
            realigner.beat.valid.eq(Mux(from_sram, reader.beat.valid, self.hbm_read.data.valid)),
            realigner.beat.p.eq(Mux(from_sram, reader.beat.p, self.hbm_read.data.p)),
            reader.beat.ready.eq(from_sram & realigner.beat.ready),
            self.hbm_read.data.ready.eq(~from_sram & realigner.beat.ready),
            reader.valid.eq(self.sram.valid),
            reader.response.eq(self.sram.response),
            self.kv_write.p.eq(write),
            self.hbm_write.data.p.data.eq(write.data),
            self.hbm_write.data.p.enable.eq(write.enable),
        ]
        request = self.sram.request
        m.d.comb += [
            request.p.data.eq(write.data),
            request.p.scales.eq(write.scales),
            request.p.scale_mask.eq(write.enable),
        ]
        for i in range(self.lines):
            m.d.comb += request.p.mask[i].eq(write.enable[i].replicate(GRANULES))
        with m.Switch(target):
            with m.Case(Direction.SRAM_TO_HBM):
                m.d.comb += [
                    request.valid.eq(reader.address.valid),
                    request.p.address.eq(reader.address.p),
                    reader.address.ready.eq(request.ready),
                    self.hbm_write.data.valid.eq(out.valid),
                    out.ready.eq(self.hbm_write.data.ready),
                ]
            with m.Case(Direction.HBM_TO_KV):
                m.d.comb += [
                    self.kv_write.valid.eq(out.valid),
                    out.ready.eq(self.kv_write.ready),
                ]
            with m.Default():
                m.d.comb += [
                    request.valid.eq(out.valid),
                    request.p.address.eq(write.address),
                    request.p.write.eq(1),
                    out.ready.eq(request.ready),
                ]

        # Completion.
        late = Signal(WRITE_DELAY)
        error_late = Signal(WRITE_DELAY)
        m.d.comb += landed.eq(late[0])
        m.d.sync += [
            late.eq(Cat(late[1:], out.valid & out.ready & out.p.last)),
            error_late.eq(Cat(error_late[1:], out.p.error)),
            pending.eq(pending + started - landed),
            self.control.done.eq(fail | written | (landed & ~from_sram)),
            self.control.error.eq(Status.RUNNING),
        ]
        with m.If(fail):
            m.d.sync += self.control.error.eq(refusal)
        with m.Elif(Mux(from_sram, write_error | self.hbm_write.error, error_late[0])):
            m.d.sync += self.control.error.eq(Status.HBM_ERROR)

        with m.If(out.valid & out.ready):
            m.d.comb += self.control.activity.eq(Activity.BUSY)
        with m.Elif(out.valid):
            m.d.comb += self.control.activity.eq(Activity.BLOCKED)
        with m.Elif(~idle):
            m.d.comb += self.control.activity.eq(Activity.STARVED)
        return m
