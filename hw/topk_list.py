# SPDX-License-Identifier: Apache-2.0
"""The best entries of a sequence, in order."""

from amaranth import Cat, Module, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

KEY_BITS = 32  # of a score, ordered as an unsigned number
RANK_BITS = KEY_BITS + 1  # a key, and above it whether it comes before all others


def entry_layout(id_bits: int) -> data.StructLayout:
    """`rank` orders, as an unsigned number; `score` and `id` go along."""
    return data.StructLayout({"rank": RANK_BITS, "score": 32, "id": id_bits})


class TopkList(wiring.Component):
    """An insertion network: holds the `size` best entries since the last start, best first.

    Of equal ranks the earlier entry goes first. One insertion per cycle; what was inserted is seen
    in the next cycle. Never stalls.

    Members
    -------
    insert, new : an entry.
    restart : with `insert`: the sequence ends with this entry. `entries` keeps it all until the
        next insertion, which is the first of a new sequence.
    shift : drops the first entry; not together with `insert`.
    entries : as many as were inserted, at most `size`; those behind are undefined.
    """

    def __init__(self, size: int, id_bits: int):
        if size < 1:
            raise ValueError(f"size must be at least 1, not {size!r}")
        self.size, self.id_bits = size, id_bits
        layout = entry_layout(id_bits)
        super().__init__(
            {
                "insert": In(1),
                "restart": In(1),
                "new": In(layout),
                "shift": In(1),
                "entries": Out(data.ArrayLayout(layout, size)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        layout = entry_layout(self.id_bits)
        entries = [Signal(layout, name=f"entry{i}", reset_less=True) for i in range(self.size)]
        filled = Signal(self.size)
        beaten = Signal(self.size)
        m.d.comb += [
            self.entries.eq(Cat(entries)),
            # Entries are in order, so those that the new one beats are the last ones.
            beaten.eq(
                Cat(~filled[i] | (self.new.rank > entry.rank) for i, entry in enumerate(entries))
            ),
        ]
        with m.If(self.insert):
            m.d.sync += filled.eq(Cat(1, filled))
            with m.If(self.restart):
                m.d.sync += filled.eq(0)
            for i, entry in enumerate(entries):
                with m.If(beaten[i]):
                    m.d.sync += entry.eq(self.new)
                    if i:
                        with m.If(beaten[i - 1]):
                            m.d.sync += entry.eq(entries[i - 1])
        with m.Elif(self.shift):
            for entry, following in zip(entries, entries[1:], strict=False):
                m.d.sync += entry.eq(following)
        return m
