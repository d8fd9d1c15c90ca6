# SPDX-License-Identifier: Apache-2.0
"""The engine of TOPK: the best k of the scores in tile SRAM."""

from amaranth import Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import Out

from hw import isa
from hw.config import TileConfig
from hw.fifo import StreamFifo
from hw.ports import GRANULES, LINE_BITS, EngineControl, SramClient
from hw.tile_sram import TileSram
from hw.topk_unit import SCORE_BITS, TopkUnit, first_pair

WORDS = LINE_BITS // SCORE_BITS  # scores, or ids, in a line
WORD_SHIFT = (WORDS - 1).bit_length()
WORD_GRANULES = GRANULES // WORDS


def command_cycles(
    count: int, k: int, *, biased: bool = False, groups: int = 1, latency: int = TileSram.LATENCY
) -> int:
    """Cycles of a TOPK command from its taking to `done` when the tile SRAM never stalls it.

    The first line of scores (with biases the first of these, one later) comes `latency` + 2 cycles
    after the command was taken; then one score per cycle, `first_pair`, a pair per cycle and two
    writes for each four of them, and the time in which the last write could fail.
    """
    start = latency + 1 + int(biased)
    unit = first_pair(k, biased=biased, groups=groups, group_size=count // groups)
    return start + count + unit + k + 2 * -(-k // WORDS) + latency


class TopkEngine(wiring.Component):
    """Executes TOPK: reads scores and biases, writes the best k and their positions.

    One score per cycle while the tile SRAM grants one line in four cycles, with biases two;
    `command_cycles` is what a command takes: count + k + 2 ceil(k / 4) + 7, with biases 4 more,
    with groups 7 + groups + groups * min(k, count / groups) more. One command at a time; the next
    is taken in the cycle after `done`.

    ILLEGAL_COMMAND: count of 0 or above max_experts, k of 0 or above max_topk, count or the scores
    of the kept groups, more groups than max_groups, groups of less than two scores or that do not
    divide the count, groups_kept of 0 or above the groups, an address that is not a multiple of
    16; such a command has no effect. ADDRESS_RANGE: an access was out of range; nothing is written
    when it was a read.

    Parameters
    ----------
    config : the tile; `max_topk`, `max_experts` and `max_groups` are used.

    Members
    -------
    control : `EngineControl` of TOPK.
    sram : tile SRAM. A last line of results that is not full is written in part.
    nan_row : pulses with `done` of a command whose scores of choice were all NaN; ids and scores
        are written as always and `error` stays RUNNING.
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
        # Lines that hide the latency at a line in four cycles; of biases no more than needed.
        depth, bias_depth = TileSram.LATENCY + 2, TileSram.LATENCY + 1
        id_bits = (config.max_experts - 1).bit_length()
        m.submodules.unit = unit = TopkUnit(config.max_topk, id_bits, config.max_groups)
        m.submodules.lines = lines = StreamFifo(LINE_BITS, depth)
        m.submodules.biases = biases = StreamFifo(LINE_BITS, bias_depth)
        offered = self.control.command.p
        command = Signal(isa.operand_layout(isa.TOPK), reset_less=True)
        legal = Signal()
        faulted = Signal()
        nan_row = Signal()
        request = self.sram.request
        moved = Signal()  # a score or a result went on in this cycle
        activity = Signal(isa.Activity)
        groups, group_size = Signal(5), Signal(id_bits + 1)  # of a count that is allowed
        allowed = Signal(16)  # the largest k
        group_fault = Signal()
        m.d.comb += [
            groups.eq(1 << offered.groups_log2),
            group_size.eq(offered.count >> offered.groups_log2),
            allowed.eq(offered.count),
            group_fault.eq(offered.groups_kept > 1),
        ]
        with m.If(offered.groups_log2 != 0):
            m.d.comb += [
                allowed.eq(offered.groups_kept * group_size),
                group_fault.eq(
                    (offered.groups_log2 > config.max_groups.bit_length() - 1)
                    | (offered.count & (groups - 1)).any()
                    | (group_size < 2)
                    | (offered.groups_kept > groups)
                ),
            ]
        m.d.comb += [
            legal.eq(
                (offered.count >= 1)
                & (offered.count <= config.max_experts)
                & (offered.k >= 1)
                & (offered.k <= config.max_topk)
                & (offered.k <= allowed)
                & ~group_fault
                & ~(offered.score_addr | offered.ids_addr | offered.scores_addr)[:4].any()
                & ~(offered.use_bias & offered.bias_addr[:4].any())
            ),
            self.control.activity.eq(activity),
        ]

        # Lines of scores still to ask for, and those asked for or held; behind each line of scores
        # the one of its biases is asked for.
        to_read = Signal(range(config.max_experts // WORDS + 1))
        read_line = Signal(request.p.address.shape(), reset_less=True)
        bias_line = Signal(request.p.address.shape(), reset_less=True)
        held, bias_held = Signal(range(depth + 1)), Signal(range(bias_depth + 1))
        bias_turn, bias_answer = Signal(), Signal()  # of the next request, of the next answer
        reading = Signal()
        read_taken, score_taken, bias_taken = Signal(), Signal(), Signal()
        m.d.comb += [
            reading.eq((to_read != 0) & Mux(bias_turn, bias_held != bias_depth, held != depth)),
            score_taken.eq(read_taken & ~bias_turn),
            bias_taken.eq(read_taken & bias_turn),
            lines.i.valid.eq(0),
            lines.i.payload.eq(self.sram.response.data[0]),
            biases.i.valid.eq(0),
            biases.i.payload.eq(self.sram.response.data[0]),
        ]
        m.d.sync += [
            held.eq(held + score_taken - (lines.o.valid & lines.o.ready)),
            bias_held.eq(bias_held + bias_taken - (biases.o.valid & biases.o.ready)),
        ]
        with m.If(score_taken):
            m.d.sync += [read_line.eq(read_line + 1), bias_turn.eq(command.use_bias)]
        with m.If(bias_taken):
            m.d.sync += [bias_line.eq(bias_line + 1), bias_turn.eq(0)]
        with m.If(read_taken & (bias_turn | ~command.use_bias)):
            m.d.sync += to_read.eq(to_read - 1)

        left = Signal(range(config.max_experts + 1))  # scores to come
        word = Signal(range(WORDS))
        with m.Switch(word):
            for i in range(WORDS):
                with m.Case(i):
                    m.d.comb += [
                        unit.input.p.score.eq(lines.o.payload.word_select(i, SCORE_BITS)),
                        unit.input.p.bias.eq(biases.o.payload.word_select(i, SCORE_BITS)),
                    ]
        chosen_size = Signal(id_bits + 1, reset_less=True)
        m.d.comb += [
            unit.k.eq(command.k),
            unit.biased.eq(command.use_bias),
            unit.groups.eq(1 << command.groups_log2),
            unit.groups_kept.eq(command.groups_kept),
            unit.group_size.eq(chosen_size),
            unit.input.p.last.eq(left == 1),
        ]

        slot = Signal(range(WORDS))  # of the lines of results
        ids = Signal(data.ArrayLayout(SCORE_BITS, WORDS), reset_less=True)
        scores = Signal(data.ArrayLayout(SCORE_BITS, WORDS), reset_less=True)
        mask = Signal(GRANULES)
        ids_line = Signal(request.p.address.shape(), reset_less=True)
        scores_line = Signal(request.p.address.shape(), reset_less=True)
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
                        ids_line.eq(offered.ids_addr[4:]),
                        scores_line.eq(offered.scores_addr[4:]),
                        mask.eq(0),
                        read_line.eq(offered.score_addr[4:]),
                        bias_line.eq(offered.bias_addr[4:]),
                        bias_turn.eq(0),
                        bias_answer.eq(0),
                        chosen_size.eq(group_size),
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
                    request.p.address.eq(Mux(bias_turn, bias_line, read_line)),
                    read_taken.eq(reading & request.ready),
                    lines.i.valid.eq(self.sram.valid & ~bias_answer),
                    biases.i.valid.eq(self.sram.valid & bias_answer),
                    unit.input.valid.eq(lines.o.valid & (biases.o.valid | ~command.use_bias)),
                    moved.eq(unit.input.valid & unit.input.ready),
                    lines.o.ready.eq(moved & ((word == WORDS - 1) | unit.input.p.last)),
                    biases.o.ready.eq(lines.o.ready & command.use_bias),
                    activity.eq(Mux(moved, isa.Activity.BUSY, isa.Activity.STARVED)),
                ]
                with m.If(self.sram.valid):
                    m.d.sync += bias_answer.eq(~bias_answer & command.use_bias)
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
            for state, following, line, values in (
                ("WRITE_IDS", "WRITE_SCORES", ids_line, ids),
                ("WRITE_SCORES", "RESULTS", scores_line, scores),
            ):
                with m.State(state):
                    m.d.comb += [
                        request.valid.eq(~faulted),
                        request.p.write.eq(1),
                        request.p.address.eq(line),
                        request.p.data[0].eq(values),
                        request.p.mask[0].eq(mask),
                        moved.eq(request.ready | faulted),
                        activity.eq(Mux(moved, isa.Activity.BUSY, isa.Activity.BLOCKED)),
                    ]
                    with m.If(moved):
                        m.d.sync += line.eq(line + 1)
                        m.next = following
                        if state == "WRITE_SCORES":
                            m.d.sync += flush.eq(TileSram.LATENCY)
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
