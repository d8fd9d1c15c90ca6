# SPDX-License-Identifier: Apache-2.0
"""Counters of what each unit of a tile did in every cycle of a run, and of errors."""

from collections.abc import Sequence

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw import isa

COUNTER_BITS = 32


class ActivityCounters(wiring.Component):
    """Per unit one counter per `isa.Activity`; each cycle of `running` adds one to one of them.

    A unit's four counters therefore add up to `total`. All wrap at 2^32.

    Parameters
    ----------
    names : the units (`isa.COUNTED` in a tile), in order of their ports.

    Members
    -------
    activity : one `isa.Activity` per unit.
    running : count in this cycle.
    clear : set every counter to 0; goes before counting.
    read_index, read_value : counter `4 * position + activity` of the unit at `position`; in the
        next cycle.
    total : cycles counted.
    """

    def __init__(self, names: Sequence[str]):
        if not names or len(set(names)) != len(names):
            raise ValueError(f"names must be different ones, not {names!r}")
        self.names = tuple(names)
        super().__init__(
            {
                "activity": In(isa.Activity).array(len(self.names)),
                "running": In(1),
                "clear": In(1),
                "read_index": In(range(len(self.names) * len(isa.Activity))),
                "read_value": Out(COUNTER_BITS),
                "total": Out(COUNTER_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        kinds = len(isa.Activity)
        counters = [
            Signal(COUNTER_BITS, name=f"{name.lower()}_{kind.name.lower()}")
            for name in self.names
            for kind in isa.Activity
        ]
        with m.If(self.running):
            m.d.sync += self.total.eq(self.total + 1)
            for position, activity in enumerate(self.activity):
                with m.Switch(activity):
                    for kind in isa.Activity:
                        counter = counters[position * kinds + kind]
                        with m.Case(kind):
                            m.d.sync += counter.eq(counter + 1)
        with m.If(self.clear):
            m.d.sync += [counter.eq(0) for counter in (self.total, *counters)]
        with m.Switch(self.read_index):
            for i, counter in enumerate(counters):
                with m.Case(i):
                    m.d.sync += self.read_value.eq(counter)
        return m


class SaturatingCounter(wiring.Component):
    """Adds `amount` (up to `most`) in every cycle, up to its largest value. `clear` goes first."""

    def __init__(self, most: int):
        if most < 1:
            raise ValueError(f"most must be at least 1, not {most!r}")
        super().__init__(
            {"amount": In(range(most + 1)), "clear": In(1), "value": Out(COUNTER_BITS)}
        )

    def elaborate(self, platform):
        m = Module()
        total = Signal(COUNTER_BITS + 1)
        m.d.comb += total.eq(self.value + self.amount)
        m.d.sync += self.value.eq(Mux(total[-1], (1 << COUNTER_BITS) - 1, total))
        with m.If(self.clear):
            m.d.sync += self.value.eq(0)
        return m
