# SPDX-License-Identifier: Apache-2.0
"""The k best of a stream of scores, with a bias of the choice and a choice of groups."""

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.emit import place
from hw.fp32_add import Fp32Add
from hw.topk_groups import TopkGroups
from hw.topk_list import TopkList, entry_layout
from hw.wires import delayed, wire

SCORE_BITS = 32
PASS_LATENCY = 2  # from a score to the list that holds it


def first_pair(k: int, *, biased: bool = False, groups: int = 1, group_size: int = 0) -> int:
    """Cycles from a row's last score to its first pair (`TopkUnit`)."""
    latency = PASS_LATENCY + (Fp32Add.LATENCY if biased else 0)
    if groups > 1:
        latency += 4 + Fp32Add.LATENCY + groups + groups * min(k, group_size)
    return latency


def score_of(key: Value) -> Value:
    """The score that a key was made of; NaN of 0, +0 of either zero."""
    return Mux(key[-1], key[:-1], ~key)


class TopkUnit(wiring.Component):
    """Gives the `k` best of a row of FP32 scores, best first, with their positions.

    As `golden.topk.choose`: the choice goes by score, or with `biased` by the FP32 sum score +
    bias. Descending; of equal ones (-0 equals +0) the earlier goes first; a NaN is below everything
    and comes only when nothing else is left, the earlier first again. With several groups those
    of the best `groups_kept` come before all others; a group's score is the FP32 sum of its best
    two. Scores keep their bits.

    Parameters
    ----------
    k_max : entries, the largest k.
    id_bits : width of a position; a row has at most 2^id_bits scores.
    max_groups : the most groups, at most k_max.

    Members
    -------
    k : 1 to k_max and at most the scores of the row (of the kept groups).
    biased : add the biases.
    groups : 1 to max_groups, equal runs of the row.
    groups_kept : 1 to groups; not used for one group.
    group_size : scores of a group, 2 or more; not used for one group.
    input : scores in order; `last` ends the row.
    output : `k` pairs; `last` with the final one.
    nan_row : every score of choice is a NaN; true while the row's first pair is at `output`.

    All but the streams are constant from the row's first score to its last result.

    One score per cycle; the first pair is at `output` `first_pair` cycles after the last score: 2,
    and 3 more with biases (the adder). Groups take 7 + groups + groups * min(k, group_size) more:
    each group's best wait in a memory; after the row the groups are summed and ranked, one per
    cycle, and then the best of all groups, one per cycle, with kept groups ahead. `input` is not
    ready from the last score until the last pair has been taken; never stalls otherwise.
    """

    def __init__(self, k_max: int, id_bits: int = 9, max_groups: int = 1):
        if k_max < 1:
            raise ValueError(f"k_max must be at least 1, not {k_max!r}")
        if id_bits < 1:
            raise ValueError(f"id_bits must be at least 1, not {id_bits!r}")
        if not 1 <= max_groups <= k_max:
            raise ValueError(f"max_groups must be from 1 to k_max = {k_max}, not {max_groups!r}")
        self.k_max, self.id_bits, self.max_groups = k_max, id_bits, max_groups
        super().__init__(
            {
                "k": In(range(k_max + 1)),
                "biased": In(1),
                "groups": In(range(max_groups + 1)),
                "groups_kept": In(range(max_groups + 1)),
                "group_size": In(id_bits + 1),
                "input": In(
                    stream.Signature(
                        data.StructLayout({"score": SCORE_BITS, "bias": SCORE_BITS, "last": 1})
                    )
                ),
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
        # What a score of choice belongs to; `end`: the last of its group or pass.
        tag = data.StructLayout({"score": SCORE_BITS, "id": self.id_bits, "end": 1, "last": 1})
        m.submodules.list = best = TopkList(self.k_max, self.id_bits)
        adder = Fp32Add()
        place(m, platform, "adder", adder)
        grouped = wire(m, "grouped", self.groups != 1)
        closed = Signal()  # from the row's last score to its last pair
        position, member = Signal(self.id_bits), Signal(self.id_bits)
        take, taken = Signal(), Signal(tag)
        m.d.comb += [
            self.input.ready.eq(~closed),
            take.eq(self.input.valid & self.input.ready),
            taken.score.eq(self.input.p.score),
            taken.id.eq(position),
            taken.end.eq(self.input.p.last | (grouped & (member == self.group_size - 1))),
            taken.last.eq(self.input.p.last),
        ]
        with m.If(take):
            m.d.sync += [
                position.eq(Mux(taken.last, 0, position + 1)),
                member.eq(Mux(taken.end, 0, member + 1)),
                closed.eq(taken.last),
            ]

        # Groups: their sums go the way of biased scores, their best straight into the list.
        entry = entry_layout(self.id_bits)
        store, start, ranked = Signal(), Signal(), Signal()
        summing, feeding = Signal(), Signal()
        first, second = Signal(SCORE_BITS), Signal(SCORE_BITS)
        group_tag, fed, fed_last = Signal(tag), Signal(entry), Signal()
        if self.max_groups > 1:
            m.submodules.groups = groups = TopkGroups(self.k_max, self.id_bits, self.max_groups)
            m.d.comb += [
                groups.k.eq(self.k),
                groups.groups.eq(self.groups),
                groups.groups_kept.eq(self.groups_kept),
                groups.group_size.eq(self.group_size),
                groups.entries.eq(best.entries),
                groups.store.eq(store),
                groups.start.eq(start),
                groups.ranked.eq(ranked),
                summing.eq(groups.sum.valid),
                first.eq(score_of(groups.sum.best)),
                second.eq(score_of(groups.sum.second)),
                group_tag.id.eq(groups.sum.id),
                group_tag.end.eq(groups.sum.last),
                group_tag.last.eq(groups.sum.last),
                feeding.eq(groups.feed.valid),
                fed.eq(groups.feed.entry),
                fed_last.eq(groups.feed.last),
            ]

        # Stage 1: what the choice goes by.
        adding, added = Signal(), Signal(tag)
        m.d.comb += [
            adding.eq((take & self.biased) | summing),
            added.eq(Mux(summing, group_tag, taken)),
            adder.enable.eq(1),
            adder.a.eq(Mux(summing, first, self.input.p.score)),
            adder.b.eq(Mux(summing, second, self.input.p.bias)),
        ]
        late = delayed(m, "late", added, Fp32Add.LATENCY)
        late_valid = delayed(m, "late_valid", adding, Fp32Add.LATENCY, reset=True)
        choice, chosen = Signal(SCORE_BITS), Signal(tag)
        m.d.comb += [
            choice.eq(Mux(late_valid, adder.result, self.input.p.score)),
            chosen.eq(Mux(late_valid, late, taken)),
        ]

        # Stage 2: a key that orders as an unsigned number; 0, which no number has, for NaN.
        key = Signal(SCORE_BITS)
        magnitude = choice[:-1]
        with m.If(magnitude > 0x7F80_0000):
            m.d.comb += key.eq(0)
        with m.Elif(choice[-1] & magnitude.any()):
            m.d.comb += key.eq(~choice)
        with m.Else():
            m.d.comb += key.eq(Cat(magnitude, 1))
        new = Signal(entry_layout(self.id_bits), reset_less=True)
        new_valid, new_end, new_last = Signal(), Signal(), Signal()
        m.d.sync += [
            new_valid.eq((take & ~self.biased) | late_valid | feeding),
            new.rank.eq(Mux(feeding, fed.rank, key)),
            new.score.eq(Mux(feeding, fed.score, chosen.score)),
            new.id.eq(Mux(feeding, fed.id, chosen.id)),
            new_end.eq(Mux(feeding, fed_last, chosen.end)),
            new_last.eq(Mux(feeding, fed_last, chosen.last)),
        ]

        # Stage 3: the list.
        given = Signal(range(self.k_max + 1))
        giving, shift = Signal(), Signal()
        m.d.comb += [
            best.new.eq(new),
            best.insert.eq(new_valid),
            best.restart.eq(new_end),
            best.shift.eq(shift),
            self.output.valid.eq(giving),
            self.output.p.score.eq(best.entries[0].score),
            self.output.p.id.eq(best.entries[0].id),
            self.output.p.last.eq(given == self.k),
            self.nan_row.eq(giving & (given == 1) & (best.entries[0].rank == 0)),
            shift.eq(giving & self.output.ready),
        ]
        passed = wire(m, "passed", new_valid & new_last)
        with m.FSM():
            with m.State("SCORES"):
                m.d.comb += store.eq(new_valid & new_end & grouped)
                with m.If(passed):
                    m.d.sync += given.eq(1)
                    m.next = "GIVE"
                    if self.max_groups > 1:
                        with m.If(grouped):
                            m.d.comb += start.eq(1)
                            m.next = "GROUPS"
            if self.max_groups > 1:
                with m.State("GROUPS"):
                    with m.If(passed):
                        m.d.comb += ranked.eq(1)
                        m.next = "FEED"
                with m.State("FEED"):
                    with m.If(passed):
                        m.next = "GIVE"
            with m.State("GIVE"):
                m.d.comb += giving.eq(1)
                with m.If(shift):
                    m.d.sync += given.eq(given + 1)
                    with m.If(self.output.p.last):
                        m.d.sync += closed.eq(0)
                        m.next = "SCORES"
        return m
