# SPDX-License-Identifier: Apache-2.0
"""Writes of KVAPPEND into the KV SRAM: whole lines, or one element of a line in each of some banks.

A line is one code word, so an element is written by reading its line, changing it and writing it
back. Other elements of the line may never have been written, and then it need not be a code word;
so the first token of a line is appended with `fresh`, which writes the line without reading it, and
zeros in the other elements.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from golden.ecc import DATA_BITS
from hw.kv_bank import KvBank
from hw.ports import LINE_BITS, SCALE_BITS
from hw.wires import wire

ROW_BITS = 24
NARROW, WIDE = 8, 16  # elements of a line in BF16 and in eight bits


def append_width(cols: int, eight: bool = False) -> int:
    """Elements of a value that one append write carries: one for each of so many banks."""
    return min(WIDE if eight else NARROW, cols)


def append_layout(cols: int) -> data.StructLayout:
    """A write of KVAPPEND. `key`: `line` to bank `bank`; else element i of `line` (`append_width`
    of them, of 8 bits if `eight`, else 16) to element `place` of bank `bank` + i, `bank` being a
    multiple of that number; the line's other elements become zero if `fresh`. `scale` goes to every
    line that is written.
    """
    return data.StructLayout(
        {
            "row": ROW_BITS,
            "bank": (cols - 1).bit_length(),
            "key": 1,
            "eight": 1,
            "fresh": 1,
            "place": (WIDE - 1).bit_length(),
            "line": LINE_BITS,
            "scale": SCALE_BITS,
        }
    )


class KvUpdate(wiring.Component):
    """Turns append writes into writes of whole words.

    Banks are read as each is `free`, the row `row` of those in `read`; `old` is what they give.
    `append` is taken when the last of its banks is read, or at once if it reads none; its word is
    in `write` LATENCY cycles later and must be written in that cycle. One append per cycle. One
    waits for a bank that is not free, and up to LATENCY cycles for an earlier one to the same line.

    `fault` pulses beside `write` when an old line was not correctable; that line is left as it was.
    """

    LATENCY = KvBank.LATENCY + 1

    def __init__(self, cols: int, rows: int):
        for name, value in (("cols", cols), ("rows", rows)):
            if value < 4 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two of at least 4, not {value!r}")
        self.cols, self.row_bits = cols, rows.bit_length() - 1
        self.lanes = append_width(cols, eight=True)
        super().__init__(
            {
                "append": In(stream.Signature(append_layout(cols))),
                "free": In(cols),
                "read": Out(cols),
                "row": Out(self.row_bits),
                "old": In(
                    data.ArrayLayout(data.StructLayout({"word": DATA_BITS, "double": 1}), cols)
                ),
                "write": Out(
                    data.StructLayout(
                        {
                            "valid": 1,
                            "row": self.row_bits,
                            "banks": cols,
                            "words": data.ArrayLayout(DATA_BITS, self.lanes),
                        }
                    )
                ),
                "fault": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        cols = self.cols
        now = self.append.payload
        token = data.StructLayout(
            {
                "row": self.row_bits,
                "banks": cols,
                "whole": 1,
                "key": 1,
                "eight": 1,
                "place": now.place.shape(),
                "line": LINE_BITS,
                "scale": SCALE_BITS,
            }
        )
        first = Signal(token)
        groups = [
            [now.bank[low:] == c >> low for c in range(cols)]
            for low in (append_width(cols, eight).bit_length() - 1 for eight in (False, True))
        ]
        banks = [
            Mux(now.key, now.bank == c, Mux(now.eight, groups[1][c], groups[0][c]))
            for c in range(cols)
        ]
        had, wanted, clash = Signal(cols), Signal(cols), Signal()
        taken = Signal()
        m.d.comb += [
            first.row.eq(now.row),
            first.banks.eq(Cat(*banks)),
            first.whole.eq(now.key | now.fresh),
            first.key.eq(now.key),
            first.eight.eq(now.eight),
            first.place.eq(now.place),
            first.line.eq(now.line),
            first.scale.eq(now.scale),
            wanted.eq(Mux(first.whole, 0, first.banks & ~had)),
            self.row.eq(now.row),
            self.read.eq(Mux(self.append.valid & ~clash, wanted & self.free, 0)),
            self.append.ready.eq(~clash & ~(wanted & ~self.free).any()),
            taken.eq(self.append.valid & self.append.ready),
        ]
        m.d.sync += had.eq(Mux(taken, 0, had | self.read))

        # Appends under way.
        stages, valids, clashes = [first], [taken], []
        for i in range(self.LATENCY):
            stage = Signal(token, name=f"stage{i}", reset_less=True)
            valid = Signal(name=f"valid{i}")
            m.d.sync += [stage.eq(stages[-1]), valid.eq(valids[-1])]
            stages.append(stage)
            valids.append(valid)
            clashes.append(
                valid & (stage.row == first.row) & (stage.banks & first.banks).any() & ~first.whole
            )
        m.d.comb += clash.eq(Cat(*clashes).any())
        last = stages[-1]

        # Old words, by lane: bank c is in lane c mod lanes.
        reading = self.read
        for i in range(KvBank.LATENCY):
            following = Signal(cols, name=f"reading{i}")
            m.d.sync += following.eq(reading)
            reading = following
        doubles = []
        for lane in range(self.lanes):
            held = Signal(DATA_BITS, name=f"held{lane}", reset_less=True)
            double = Signal(name=f"double{lane}", reset_less=True)
            for c in range(lane, cols, self.lanes):
                with m.If(reading[c]):
                    m.d.sync += [held.eq(self.old[c].word), double.eq(self.old[c].double)]
            doubles.append(double)
            self._merge(m, lane, last, held)

        bad = wire(
            m,
            "bad",
            Cat(*(last.banks[c] & doubles[c % self.lanes] & ~last.whole for c in range(cols))),
        )
        m.d.comb += [
            self.write.valid.eq(valids[-1]),
            self.write.row.eq(last.row),
            self.write.banks.eq(last.banks & ~bad),
            self.fault.eq(valids[-1] & bad.any()),
        ]
        return m

    def _merge(self, m, lane, token, held):
        """The lane's new word: the whole line, or the old one with one element replaced."""
        old = wire(m, f"old{lane}", Mux(token.whole, 0, held[:LINE_BITS]))
        changed = []
        for eight, elements in ((False, NARROW), (True, WIDE)):
            bits = LINE_BITS // elements
            index = lane % append_width(self.cols, eight)
            element = token.line[index * bits : (index + 1) * bits]
            changed.append(
                wire(
                    m,
                    f"changed{lane}_{bits}",
                    Cat(
                        Mux(token.place == e, element, old[e * bits : (e + 1) * bits])
                        for e in range(elements)
                    ),
                )
            )
        line = Mux(token.key, token.line, Mux(token.eight, changed[1], changed[0]))
        m.d.comb += self.write.words[lane].eq(Cat(line, token.scale))
