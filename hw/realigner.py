# SPDX-License-Identifier: Apache-2.0
"""Moves lines from the alignment of their source to that of their destination, scales aside."""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.hbm_channel import PIECE_BITS, line_beat, line_write
from hw.ports import LINE_ADDRESS_BITS, LINE_BITS, SCALE_BITS

RUN_LINES = 16  # data lines that share one line of scales
SCALE_ONE = 127  # E8M0 code of 1.0, the scale of lines that carry none

# What becomes of the next lines: `lines` data lines go to line address `address` and on.
MOVE = data.StructLayout(
    {"address": LINE_ADDRESS_BITS, "lines": PIECE_BITS, "scaled": 1, "last": 1}
)


def moved_lines(lines: int) -> data.StructLayout:
    """A write, `last` of a move that is marked `last`; `error`: some line came with an error."""
    return data.StructLayout({"write": line_write(lines), "last": 1, "error": 1})


def shift_down(m: Module, name: str, words: list, amount, count: int) -> list:
    """`count` words from index `amount` of `words`; words beyond the end are arbitrary."""
    for k in reversed(range(len(amount))):
        step = 1 << k
        need = count + step - 1  # what the smaller steps can still reach
        stage = []
        for i in range(min(len(words), need)):
            word = Signal(len(words[i]), name=f"{name}{k}_{i}")
            beyond = words[i + step] if i + step < len(words) else words[i]
            m.d.comb += word.eq(Mux(amount[k], beyond, words[i]))
            stage.append(word)
        words = stage
    return words[:count]


def shift_up(m: Module, name: str, words: list, amount, count: int) -> list:
    """`count` words of which index `amount` is words[0]; those before and after are arbitrary."""
    for k in range(len(amount)):
        step = 1 << k
        stage = []
        for i in range(min(count, len(words) + step)):
            word = Signal(len(words[0]), name=f"{name}{k}_{i}")
            stay = words[i] if i < len(words) else words[-1]
            moved = words[i - step] if i >= step else words[0]
            m.d.comb += word.eq(Mux(amount[k], moved, stay))
            stage.append(word)
        words = stage
    return words[:count]


class Realigner(wiring.Component):
    """Beats of W lines in, writes of W lines at the alignment of the destination out.

    The lines of the beats, in order, are one sequence; each `move` consumes its lines from it
    (scaled: runs of one line of scales and up to 16 data lines) and writes them. A write is made
    when all its lines are there, so each aligned word of the destination is written once (scaled:
    once per run that touches it).

    One beat in and one write out per cycle, a line of scales included for W > 1; for W = 1 a line
    of scales costs the cycle in which it arrives. Latency two cycles. Stalls only through its
    streams.
    """

    def __init__(self, lines: int):
        if lines < 1 or lines > RUN_LINES or lines & (lines - 1):
            raise ValueError(f"lines must be a power of two from 1 to {RUN_LINES}, not {lines!r}")
        self.lines = lines
        super().__init__(
            {
                "beat": In(stream.Signature(line_beat(lines))),
                "move": In(stream.Signature(MOVE)),
                "out": Out(stream.Signature(moved_lines(lines))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        lines = self.lines
        shift = (lines - 1).bit_length()
        capacity = 2 * lines

        # The window holds the next `count` lines, each with its error bit on top.
        window = [
            Signal(LINE_BITS + 1, name=f"window{i}", reset_less=True) for i in range(capacity)
        ]
        count = Signal(range(capacity + 1))
        taken = Signal(range(lines + 2))
        kept = Signal(range(capacity + 1))
        arriving = Signal(range(lines + 1))
        load = Signal()
        m.d.comb += [
            kept.eq(count - taken),
            arriving.eq(self.beat.p.end - self.beat.p.start),
            self.beat.ready.eq(kept <= capacity - lines),
            load.eq(self.beat.valid & self.beat.ready),
        ]
        m.d.sync += count.eq(kept + Mux(load, arriving, 0))
        beat = [Cat(self.beat.p.data[i], self.beat.p.error) for i in range(lines)]
        beat = shift_down(m, "beat", beat, self.beat.p.start[:shift], lines)
        place = shift_up(m, "place", beat, kept[: (lines).bit_length()], capacity)
        rest = shift_down(m, "rest", window, taken, capacity)
        for i in range(capacity):
            with m.If(i < kept):
                m.d.sync += window[i].eq(rest[i] if i < len(rest) else window[i])
            with m.Else():
                m.d.sync += window[i].eq(place[i])

        # The current move.
        active = Signal()
        address = Signal(LINE_ADDRESS_BITS, reset_less=True)
        left = Signal(PIECE_BITS, reset_less=True)
        scaled = Signal(reset_less=True)
        last = Signal(reset_less=True)
        run_left = Signal(range(RUN_LINES + 1))
        scale_line = Signal(LINE_BITS, reset_less=True)
        error = Signal()

        # What the next write takes.
        offset = Signal(range(lines + 1))
        room = Signal(range(lines + 1))
        run = Signal(range(RUN_LINES + 1))
        in_run = Signal(range(lines + 1))
        size = Signal(range(lines + 1))
        heads = Signal()  # a line of scales comes first
        final = Signal()
        go = Signal()
        m.d.comb += [
            heads.eq(scaled & (run_left == 0)),
            offset.eq(address[:shift]),
            room.eq(lines - offset),
            run.eq(Mux(run_left == 0, RUN_LINES, run_left)),
            in_run.eq(Mux(scaled & (run < room), run, room)),
            final.eq(left <= in_run),
            size.eq(Mux(final, left, in_run)),
            go.eq(active & (count >= size + heads) & (~self.out.valid | self.out.ready)),
        ]
        with m.If(go):
            m.d.comb += taken.eq(size + heads)

        # Lines and scales at the destination's alignment.
        heading = [Signal(LINE_BITS + 1, name=f"heading{i}") for i in range(lines)]
        for i in range(lines):
            m.d.comb += heading[i].eq(Mux(heads, window[i + 1], window[i]))
        data_lines = shift_up(m, "line", heading, offset[:shift], lines)
        scale_bytes = Signal(LINE_BITS)
        m.d.comb += scale_bytes.eq(Mux(heads, window[0], scale_line))
        position = Signal(4)
        m.d.comb += position.eq(RUN_LINES - run)
        scales = [scale_bytes.word_select(i, SCALE_BITS) for i in range(RUN_LINES)]
        scales = shift_down(m, "scale", scales, position, lines)
        scales = shift_up(m, "slot", scales, offset[:shift], lines)
        wrong = Signal(capacity)
        for i in range(min(capacity, lines + 1)):
            m.d.comb += wrong[i].eq(window[i][-1] & (i < taken))

        with m.If(self.out.ready):
            m.d.sync += self.out.valid.eq(0)
        with m.If(go):
            write = self.out.p.write
            m.d.sync += [
                self.out.valid.eq(1),
                self.out.p.last.eq(last & final),
                self.out.p.error.eq(error | wrong.any()),
                error.eq((error | wrong.any()) & ~(last & final)),
                write.address.eq(address - offset),
                address.eq(address + size),
                left.eq(left - size),
                run_left.eq(Mux(scaled & ~final, run - size, 0)),
            ]
            for i in range(lines):
                m.d.sync += [
                    write.data[i].eq(data_lines[i]),
                    write.scales[i].eq(Mux(scaled, scales[i], SCALE_ONE)),
                    write.enable[i].eq((i >= offset) & (i < offset + size)),
                ]
            with m.If(heads):
                m.d.sync += scale_line.eq(window[0])
        m.d.comb += self.move.ready.eq(~active | (go & final))
        with m.If(self.move.valid & self.move.ready):
            m.d.sync += [
                active.eq(1),
                address.eq(self.move.p.address),
                left.eq(self.move.p.lines),
                scaled.eq(self.move.p.scaled),
                last.eq(self.move.p.last),
            ]
        with m.Elif(go & final):
            m.d.sync += active.eq(0)
        return m
