# SPDX-License-Identifier: Apache-2.0
"""The weight stream: weight rows from the HBM slice into the ring of the KV SRAM."""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.config import LINE_BYTES, TileConfig
from hw.hbm_channel import HbmRead, line_write
from hw.isa import STREAM, Activity, Status
from hw.line_fifo import LineFifo
from hw.ports import LINE_ADDRESS_BITS, EngineControl
from hw.realigner import MOVE, RUN_LINES, Realigner

COMMANDS = 4  # commands whose rows may be on their way
WRITE_DELAY = 2  # cycles from the acceptance of a write until a read sees it, generously


class WeightStream(wiring.Component):
    """Executes STREAM commands: `rows` rows of `cols` lines go into the ring in order.

    The ring is the `stream_rows` KV SRAM rows from `stream_base`; its write pointer persists from
    command to command. A row that is complete counts in `available` two cycles after its last write
    was accepted, until `taken` releases it; nothing is written into a row that is not released.
    Rows are offered even when HBM answered with an error; the command then ends with HBM_ERROR.

    Up to four commands are accepted ahead, and their bursts follow each other without a pause: a
    line per HBM line and cycle, W = `hbm_beat_bytes` / 16 lines per cycle at most. A command is
    done, in order, when its last row counts in `available`. Stalls through `write` and the ring.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        self.lines = config.hbm_beat_bytes // LINE_BYTES
        if self.lines > config.cols:
            raise ValueError(
                f"hbm_beat_bytes must be at most cols lines = "
                f"{config.cols * LINE_BYTES}, not {config.hbm_beat_bytes!r}"
            )
        super().__init__(
            {
                "control": Out(EngineControl(STREAM)),
                "hbm": Out(HbmRead(self.lines)),
                "write": Out(stream.Signature(line_write(self.lines))),
                "available": Out(range(config.stream_rows + 1)),
                "taken": In(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        row_shift = (config.cols - 1).bit_length()
        ring_bits = (config.stream_rows * config.cols - 1).bit_length()
        command = self.control.command

        m.submodules.realigner = realigner = Realigner(self.lines)
        m.submodules.moves = moves = LineFifo(MOVE, COMMANDS)
        wiring.connect(m, wiring.flipped(self.hbm.data), realigner.beat)
        wiring.connect(m, moves.output, realigner.move)

        # Acceptance: check, then hand the piece to the HBM port and the move to the realigner.
        address = Signal(32, reset_less=True)
        rows = Signal(24, reset_less=True)
        scaled = Signal(reset_less=True)
        lines = Signal(24 + row_shift)
        fetch = Signal(24 + row_shift + 1, reset_less=True)
        end = Signal(max(len(fetch), LINE_ADDRESS_BITS) + 1)  # in lines; any address may come
        pointer = Signal(ring_bits)  # ring line that the next command starts with
        pending = Signal(range(COMMANDS + 1))
        m.d.comb += [
            lines.eq(rows << row_shift),
            end.eq(fetch + address[4:]),
            self.hbm.request.p.address.eq(address[4:]),
            self.hbm.request.p.lines.eq(fetch),
            moves.input.p.address.eq(pointer),
            moves.input.p.lines.eq(lines),
            moves.input.p.scaled.eq(scaled),
            moves.input.p.last.eq(1),
        ]
        requested, moved = Signal(), Signal()
        accept, fail = Signal(), Signal()
        refusal = Signal(Status, reset_less=True)
        idle = Signal()
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += [command.ready.eq(pending != COMMANDS), idle.eq(pending == 0)]
                m.d.sync += [
                    address.eq(command.p.hbm_addr),
                    rows.eq(command.p.rows),
                    scaled.eq(command.p.scaled),
                ]
                with m.If(command.valid & command.ready):
                    m.next = "COUNT"
            with m.State("COUNT"):
                runs = Signal(24 + row_shift)
                m.d.comb += runs.eq((lines + (RUN_LINES - 1))[4:])
                m.d.sync += fetch.eq(lines + Mux(scaled, runs, 0))
                m.next = "CHECK"
            with m.State("CHECK"):
                with m.If((rows == 0) | address[:4].any()):
                    m.d.sync += refusal.eq(Status.ILLEGAL_COMMAND)
                    m.next = "FAIL"
                with m.Elif(end > config.hbm_bytes // LINE_BYTES):
                    m.d.sync += refusal.eq(Status.ADDRESS_RANGE)
                    m.next = "FAIL"
                with m.Else():
                    m.next = "SEND"
            with m.State("SEND"):
                request = self.hbm.request
                m.d.comb += [
                    request.valid.eq(~requested),
                    moves.input.valid.eq(~moved),
                    accept.eq((requested | request.ready) & (moved | moves.input.ready)),
                ]
                m.d.sync += [
                    requested.eq((requested | request.ready) & ~accept),
                    moved.eq((moved | moves.input.ready) & ~accept),
                ]
                with m.If(accept):
                    m.d.sync += pointer.eq(pointer + lines)
                    m.next = "IDLE"
            with m.State("FAIL"):
                with m.If(pending == 0):
                    m.d.comb += fail.eq(1)
                    m.next = "IDLE"

        # Writes, as long as the row they belong to is released. No write spans two rows.
        out = realigner.out
        held = Signal(range(config.stream_rows + 1))  # complete rows that are not released
        room = Signal()
        complete = Signal()
        m.d.comb += [
            room.eq(held != config.stream_rows),
            self.write.valid.eq(out.valid & room),
            out.ready.eq(self.write.ready & room),
            self.write.p.eq(out.p.write),
            self.write.p.address.eq(
                (config.stream_base << row_shift) + out.p.write.address[:ring_bits]
            ),
        ]
        row_end = Signal()
        m.d.comb += [
            row_end.eq(
                out.p.write.enable[-1]
                & (out.p.write.address[:row_shift] == config.cols - self.lines)
            ),
            complete.eq(out.valid & out.ready & row_end),
        ]
        m.d.sync += held.eq(held + complete - self.taken)

        # What has been written is reported when it can be read.
        rows_late = Signal(WRITE_DELAY)
        done_late = Signal(WRITE_DELAY)
        error_late = Signal(WRITE_DELAY)
        m.d.sync += [
            rows_late.eq(Cat(rows_late[1:], complete)),
            done_late.eq(Cat(done_late[1:], complete & out.p.last)),
            error_late.eq(Cat(error_late[1:], out.p.error)),
            self.available.eq(self.available + rows_late[0] - self.taken),
            self.control.done.eq(done_late[0] | fail),
            self.control.error.eq(
                Mux(fail, refusal, Mux(error_late[0], Status.HBM_ERROR, Status.RUNNING))
            ),
            pending.eq(pending + accept - done_late[0]),
        ]

        with m.If(self.write.valid & self.write.ready):
            m.d.comb += self.control.activity.eq(Activity.BUSY)
        with m.Elif(out.valid):
            m.d.comb += self.control.activity.eq(Activity.BLOCKED)
        with m.Elif(~idle):
            m.d.comb += self.control.activity.eq(Activity.STARVED)
        return m
