# SPDX-License-Identifier: Apache-2.0
"""The k best of a stream of scores, and the engine that does so on tile SRAM."""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw import isa
from hw.config import TileConfig
from hw.fifo import StreamFifo
from hw.ports import GRANULES, LINE_BITS, EngineControl, SramClient
from hw.tile_sram import TileSram

SCORE_BITS = 32
WORDS = LINE_BITS // SCORE_BITS  # scores, or ids, in a line
WORD_SHIFT = (WORDS - 1).bit_length()
WORD_GRANULES = GRANULES // WORDS


class TopkUnit(wiring.Component):
    """Gives the `k` best of a row of FP32 scores, best first, with their positions.

    Descending; of equal scores (-0 equals +0) the earlier goes first; a NaN is below everything and
    comes only when nothing else is left, the earlier first again. Scores keep their bits.

    Parameters
    ----------
    k_max : entries, the largest k.
    id_bits : width of a position; a row has at most 2^id_bits scores.

    Members
    -------
    k : 1 to k_max and at most the scores of the row; constant from the row's first score to its
        last result.
    input : scores in order; `last` ends the row.
    output : `k` pairs; `last` with the final one.
    nan_row : every score of the row is a NaN; true while the row's first pair is at `output`.

    An insertion network: one score per cycle, the first pair 2 cycles after the last score. `input`
    is not ready from the last score until the last pair has been taken; never stalls otherwise.
    """

    def __init__(self, k_max: int, id_bits: int = 9):
        if k_max < 1:
            raise ValueError(f"k_max must be at least 1, not {k_max!r}")
        if id_bits < 1:
            raise ValueError(f"id_bits must be at least 1, not {id_bits!r}")
        self.k_max, self.id_bits = k_max, id_bits
        super().__init__(
            {
                "k": In(range(k_max + 1)),
                "input": In(stream.Signature(data.StructLayout({"score": SCORE_BITS, "last": 1}))),
                "output": Out(
                    stream.Signature(
                        data.StructLayout({"score": SCORE_BITS, "id": id_bits, "last": 1})
                    )
                ),
                "nan_row": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        pair = data.StructLayout({"key": SCORE_BITS, "score": SCORE_BITS, "id": self.id_bits})
        entries = [Signal(pair, name=f"entry{i}", reset_less=True) for i in range(self.k_max)]
        filled = Signal(self.k_max)
        giving = Signal()  # the row is complete, its pairs leave
        given = Signal(range(self.k_max + 1))

        # Stage 1: a key that orders as an unsigned number; 0, which no number has, for NaN.
        score = self.input.p.score
        key = Signal(SCORE_BITS)
        new = Signal(pair, reset_less=True)
        new_valid, new_last = Signal(), Signal()
        position = Signal(self.id_bits)
        magnitude = score[:-1]
        with m.If(magnitude > 0x7F80_0000):
            m.d.comb += key.eq(0)
        with m.Elif(score[-1] & magnitude.any()):
            m.d.comb += key.eq(~score)
        with m.Else():
            m.d.comb += key.eq(Cat(magnitude, 1))
        m.d.comb += self.input.ready.eq(~giving & ~(new_valid & new_last))
        m.d.sync += new_valid.eq(self.input.valid & self.input.ready)
        with m.If(self.input.valid & self.input.ready):
            m.d.sync += [
                new.key.eq(key),
                new.score.eq(score),
                new.id.eq(position),
                new_last.eq(self.input.p.last),
                position.eq(Mux(self.input.p.last, 0, position + 1)),
            ]

        # Stage 2: entries are in order, so those that the new one beats are the last ones.
        beaten = Signal(self.k_max)
        m.d.comb += beaten.eq(
            Cat(~filled[i] | (new.key > entry.key) for i, entry in enumerate(entries))
        )
        with m.If(new_valid):
            m.d.sync += filled.eq(Cat(1, filled))
            for i, entry in enumerate(entries):
                with m.If(beaten[i]):
                    m.d.sync += entry.eq(new)
                    if i:
                        with m.If(beaten[i - 1]):
                            m.d.sync += entry.eq(entries[i - 1])
            with m.If(new_last):
                m.d.sync += [giving.eq(1), given.eq(1)]

        m.d.comb += [
            self.output.valid.eq(giving),
            self.output.p.score.eq(entries[0].score),
            self.output.p.id.eq(entries[0].id),
            self.output.p.last.eq(given == self.k),
            self.nan_row.eq(giving & (given == 1) & (entries[0].key == 0)),
        ]
        with m.If(giving & self.output.ready):
            m.d.sync += given.eq(given + 1)
            for entry, following in zip(entries, entries[1:], strict=False):
                m.d.sync += entry.eq(following)
            with m.If(self.output.p.last):
                m.d.sync += [giving.eq(0), filled.eq(0)]
        return m


class TopkEngine(wiring.Component):
    """Executes TOPK: reads scores, writes the best k and their positions.

    One score per cycle while the tile SRAM grants one line in four cycles; a command takes
    count + k + 2 ceil(k / 4) + 7 cycles from its taking to `done` when the SRAM never stalls it.
    One command at a time; the next is taken in the cycle after `done`.

    ILLEGAL_COMMAND: count of 0 or above max_experts, k of 0 or above max_topk or count, an address
    that is not a multiple of 16; such a command has no effect. ADDRESS_RANGE: an access was out of
    range; nothing is written when it was a read.

    Parameters
    ----------
    config : the tile; `max_topk` and `max_experts` are used.

    Members
    -------
    control : `EngineControl` of TOPK.
    sram : tile SRAM. A last line of results that is not full is written in part.
    nan_row : pulses with `done` of a command whose scores were all NaN; ids and scores are
        written as always and `error` stays RUNNING.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        super().__init__(
            {
                "control": Out(EngineControl(isa.TOPK)),
                "sram": Out(SramClient(1)),
                "nan_row": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        depth = TileSram.LATENCY + 2  # lines that hide the latency at a line in four cycles
        id_bits = (config.max_experts - 1).bit_length()
        m.submodules.unit = unit = TopkUnit(config.max_topk, id_bits)
        m.submodules.lines = lines = StreamFifo(LINE_BITS, depth)
        offered = self.control.command.p
        command = Signal(isa.operand_layout(isa.TOPK), reset_less=True)
        legal = Signal()
        faulted = Signal()
        nan_row = Signal()
        request = self.sram.request
        moved = Signal()  # a score or a result went on in this cycle
        activity = Signal(isa.Activity)
        m.d.comb += [
            legal.eq(
                (offered.count >= 1)
                & (offered.count <= config.max_experts)
                & (offered.k >= 1)
                & (offered.k <= config.max_topk)
                & (offered.k <= offered.count)
                & ~(offered.score_addr | offered.ids_addr | offered.scores_addr)[:4].any()
            ),
            self.control.activity.eq(activity),
        ]

        # Lines of scores still to ask for, and those asked for or held.
        to_read = Signal(range(config.max_experts // WORDS + 1))
        read_line = Signal(request.p.address.shape(), reset_less=True)
        held = Signal(range(depth + 1))
        reading = Signal()
        read_taken = Signal()
        m.d.comb += [
            reading.eq((to_read != 0) & (held != depth)),
            lines.i.valid.eq(0),
            lines.i.payload.eq(self.sram.response.data[0]),
        ]
        m.d.sync += held.eq(held + read_taken - (lines.o.valid & lines.o.ready))
        with m.If(read_taken):
            m.d.sync += [to_read.eq(to_read - 1), read_line.eq(read_line + 1)]

        left = Signal(range(config.max_experts + 1))  # scores to come
        word = Signal(range(WORDS))
        with m.Switch(word):
            for i in range(WORDS):
                with m.Case(i):
                    m.d.comb += unit.input.p.score.eq(lines.o.payload.word_select(i, SCORE_BITS))
        m.d.comb += [
            unit.k.eq(command.k),
            unit.input.p.last.eq(left == 1),
        ]

        slot = Signal(range(WORDS))  # of the lines of results
        ids = Signal(data.ArrayLayout(SCORE_BITS, WORDS), reset_less=True)
        scores = Signal(data.ArrayLayout(SCORE_BITS, WORDS), reset_less=True)
        mask = Signal(GRANULES)
        line = Signal(range((config.max_topk + WORDS - 1) // WORDS + 1))
        final = Signal()  # the lines hold the row's last results
        flush = Signal(range(TileSram.LATENCY + 1))

        with m.If(self.sram.fault):
            m.d.sync += faulted.eq(1)

        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.control.command.ready.eq(1)
                with m.If(self.control.command.valid):
                    m.d.sync += [
                        command.eq(offered),
                        faulted.eq(0),
                        nan_row.eq(0),
                        word.eq(0),
                        slot.eq(0),
                        line.eq(0),
                        mask.eq(0),
                        read_line.eq(offered.score_addr[4:]),
                        left.eq(offered.count),
                    ]
                    m.next = "ILLEGAL"
                    with m.If(legal):
                        m.d.sync += to_read.eq((offered.count + (WORDS - 1))[WORD_SHIFT:])
                        m.next = "READ"
            with m.State("ILLEGAL"):
                m.d.comb += [
                    self.control.done.eq(1),
                    activity.eq(isa.Activity.BUSY),
                    self.control.error.eq(isa.Status.ILLEGAL_COMMAND),
                ]
                m.next = "IDLE"
            with m.State("READ"):
                m.d.comb += [
                    request.valid.eq(reading),
                    request.p.address.eq(read_line),
                    read_taken.eq(reading & request.ready),
                    lines.i.valid.eq(self.sram.valid),
                    unit.input.valid.eq(lines.o.valid),
                    moved.eq(unit.input.valid & unit.input.ready),
                    lines.o.ready.eq(moved & ((word == WORDS - 1) | unit.input.p.last)),
                    activity.eq(Mux(moved, isa.Activity.BUSY, isa.Activity.STARVED)),
                ]
                with m.If(moved):
                    m.d.sync += [word.eq(word + 1), left.eq(left - 1)]
                    with m.If(unit.input.p.last):
                        m.next = "RESULTS"
            with m.State("RESULTS"):
                m.d.comb += [unit.output.ready.eq(1), activity.eq(isa.Activity.BUSY)]
                with m.If(unit.output.valid):
                    m.d.sync += [
                        nan_row.eq(nan_row | unit.nan_row),
                        slot.eq(slot + 1),
                        final.eq(unit.output.p.last),
                    ]
                    with m.Switch(slot):
                        for i in range(WORDS):
                            with m.Case(i):
                                m.d.sync += [
                                    ids[i].eq(unit.output.p.id),
                                    scores[i].eq(unit.output.p.score),
                                    mask.eq((1 << WORD_GRANULES * (i + 1)) - 1),
                                ]
                    with m.If((slot == WORDS - 1) | unit.output.p.last):
                        m.next = "WRITE_IDS"
            for state, following, base, values in (
                ("WRITE_IDS", "WRITE_SCORES", command.ids_addr, ids),
                ("WRITE_SCORES", "RESULTS", command.scores_addr, scores),
            ):
                with m.State(state):
                    m.d.comb += [
                        request.valid.eq(~faulted),
                        request.p.write.eq(1),
                        request.p.address.eq(base[4:] + line),
                        request.p.data[0].eq(values),
                        request.p.mask[0].eq(mask),
                        moved.eq(request.ready | faulted),
                        activity.eq(Mux(moved, isa.Activity.BUSY, isa.Activity.BLOCKED)),
                    ]
                    with m.If(moved):
                        m.next = following
                        if state == "WRITE_SCORES":
                            m.d.sync += [line.eq(line + 1), flush.eq(TileSram.LATENCY)]
                            with m.If(final):
                                m.next = "FLUSH"
            with m.State("FLUSH"):  # until a fault of the last write would have been told
                m.d.comb += activity.eq(isa.Activity.BUSY)
                m.d.sync += flush.eq(flush - 1)
                with m.If(flush == 0):
                    m.d.comb += [
                        self.control.done.eq(1),
                        self.control.error.eq(
                            Mux(faulted, isa.Status.ADDRESS_RANGE, isa.Status.RUNNING)
                        ),
                        self.nan_row.eq(nan_row & ~faulted),
                    ]
                    m.next = "IDLE"
        return m
