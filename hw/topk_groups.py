# SPDX-License-Identifier: Apache-2.0
"""The best scores of each group, kept until all groups have been ranked."""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hw.sram import Sram1R1W
from hw.topk_list import KEY_BITS, entry_layout


class TopkGroups(wiring.Component):
    """Stores the list of each group, gives the best two of each, then the lists in order.

    Per row: `store` for each group, `start` with the last one; then two pairs of keys per group
    are at `sum`, one per cycle, from 2 cycles after `start`; then, from 2 cycles after `ranked`,
    the best min(k, group_size) of every group are at `feed`, one per cycle, those of kept groups
    with the top bit of their rank set unless they are NaN. Never stalls.

    Parameters
    ----------
    size : entries of a list.
    id_bits : width of an entry's id.
    max_groups : the most groups, 2 to size.

    Members
    -------
    k, groups, groups_kept, group_size : as in `TopkUnit`.
    entries : the list, best first.
    store : in the next cycle `entries` are the best of the next group.
    start : with `store`: of the last group.
    ranked : in the next cycle the ids of `entries` are the groups, best first.
    sum : keys of the two best of group `id`; `last` with the last group.
    feed : an entry; `last` with the last one of the row.
    """

    def __init__(self, size: int, id_bits: int, max_groups: int):
        if not 2 <= max_groups <= size:
            raise ValueError(f"max_groups must be from 2 to size = {size}, not {max_groups!r}")
        self.size, self.id_bits, self.max_groups = size, id_bits, max_groups
        layout = entry_layout(id_bits)
        super().__init__(
            {
                "k": In(range(size + 1)),
                "groups": In(range(max_groups + 1)),
                "groups_kept": In(range(max_groups + 1)),
                "group_size": In(id_bits + 1),
                "entries": In(data.ArrayLayout(layout, size)),
                "store": In(1),
                "start": In(1),
                "ranked": In(1),
                "sum": Out(
                    data.StructLayout(
                        {
                            "valid": 1,
                            "best": KEY_BITS,
                            "second": KEY_BITS,
                            "id": range(max_groups),
                            "last": 1,
                        }
                    )
                ),
                "feed": Out(data.StructLayout({"valid": 1, "entry": layout, "last": 1})),
            }
        )

    def elaborate(self, platform):
        m = Module()
        # An entry without the top bit of its rank, which only feeding decides.
        stored_entry = data.StructLayout({"key": KEY_BITS, "score": 32, "id": self.id_bits})
        row = data.ArrayLayout(stored_entry, self.size)
        m.submodules.memory = memory = Sram1R1W(row.size, self.max_groups)
        entries = [self.entries[i] for i in range(self.size)]
        storing = Signal()
        stored = Signal(range(self.max_groups))  # the next group to store
        m.d.sync += storing.eq(self.store)
        m.d.comb += [
            memory.write_en.eq(storing),
            memory.write_addr.eq(stored),
            memory.write_data.eq(Cat(Cat(e.rank[:KEY_BITS], e.score, e.id) for e in entries)),
        ]
        with m.If(storing):
            m.d.sync += stored.eq(stored + 1)

        group, following = Signal(range(self.max_groups)), Signal(range(self.max_groups))
        place = Signal(range(self.size))  # of an entry in its list
        length = Signal(range(self.size + 1))
        final_group, final_place = Signal(), Signal()
        kept = Signal(self.max_groups)  # bit 0: the group that is fed
        held, chosen = Signal(row), Signal(stored_entry)
        m.d.comb += [
            following.eq(group + 1),
            length.eq(Mux(self.group_size < self.k, self.group_size, self.k)),
            final_group.eq(group == self.groups - 1),
            final_place.eq(place == length - 1),
            held.eq(memory.read_data),
            memory.read_addr.eq(group),
        ]
        with m.Switch(place):
            for i in range(self.size):
                with m.Case(i):
                    m.d.comb += chosen.eq(held[i])
        summing, summed, summed_last = Signal(), Signal.like(group), Signal()
        m.d.sync += [summing.eq(0), summed.eq(group), summed_last.eq(final_group)]
        m.d.comb += [
            self.sum.valid.eq(summing),
            self.sum.id.eq(summed),
            self.sum.last.eq(summed_last),
            self.sum.best.eq(held[0].key),
            self.sum.second.eq(held[1].key),
            self.feed.entry.rank.eq(Cat(chosen.key, kept[0] & chosen.key.any())),
            self.feed.entry.score.eq(chosen.score),
            self.feed.entry.id.eq(chosen.id),
            self.feed.last.eq(final_group & final_place),
        ]
        with m.FSM():
            with m.State("STORE"):
                with m.If(self.start):
                    m.d.sync += group.eq(0)
                    m.next = "SUM"
            with m.State("SUM"):
                m.d.comb += memory.read_en.eq(1)
                m.d.sync += [summing.eq(1), group.eq(following), stored.eq(0)]
                with m.If(final_group):
                    m.d.sync += group.eq(0)
                    m.next = "RANK"
            with m.State("RANK"):
                with m.If(self.ranked):
                    m.next = "KEEP"
            with m.State("KEEP"):
                m.d.comb += memory.read_en.eq(1)
                m.d.sync += place.eq(0)
                ranks = range(self.max_groups)
                for g in ranks:
                    m.d.sync += kept[g].eq(
                        Cat((i < self.groups_kept) & (entries[i].id == g) for i in ranks).any()
                    )
                m.next = "FEED"
            with m.State("FEED"):
                m.d.comb += [
                    self.feed.valid.eq(1),
                    memory.read_en.eq(final_place),
                    memory.read_addr.eq(following),
                ]
                m.d.sync += place.eq(place + 1)
                with m.If(final_place):
                    m.d.sync += [place.eq(0), group.eq(following), kept.eq(kept[1:])]
                    with m.If(final_group):
                        m.next = "STORE"
        return m
