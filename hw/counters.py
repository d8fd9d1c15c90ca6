# SPDX-License-Identifier: Apache-2.0
"""Counters of what each engine did in every cycle of a run."""

from collections.abc import Sequence
from enum import IntEnum

from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw import isa

COUNTER_BITS = 32


class ActivityCounters(wiring.Component):
    """Per engine one counter per `isa.Activity`; each cycle of `running` adds one to one of them.

    An engine's four counters therefore add up to `total`. All wrap at 2^32.

    Parameters
    ----------
    engines : the engines, in order of their ports.

    Members
    -------
    activity : one `isa.Activity` per engine.
    running : count in this cycle.
    clear : set every counter to 0; goes before counting.
    read_index, read_value : counter `4 * position + activity` of the engine at `position`; in the
        next cycle.
    total : cycles counted.
    """

    def __init__(self, engines: Sequence[IntEnum]):
        if not engines or len(set(engines)) != len(engines):
            raise ValueError(f"engines must be different ones, not {engines!r}")
        self.engines = tuple(engines)
        super().__init__(
            {
                "activity": In(isa.Activity).array(len(self.engines)),
                "running": In(1),
                "clear": In(1),
                "read_index": In(range(len(self.engines) * len(isa.Activity))),
                "read_value": Out(COUNTER_BITS),
                "total": Out(COUNTER_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        kinds = len(isa.Activity)
        counters = [
            Signal(COUNTER_BITS, name=f"{engine.name.lower()}_{kind.name.lower()}")
            for engine in self.engines
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
