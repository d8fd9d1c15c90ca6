# SPDX-License-Identifier: Apache-2.0
"""Random stalls on a tile's inner streams, for verification: inserted when `stall_gates` is set."""

from typing import Any

from amaranth import Cat, Module, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

STALL = data.StructLayout({"probability": 8, "seed": 32})  # probability in 256ths


class StallSource(wiring.Component):
    """A linear-feedback shift register whose bits decide stalls; it restarts from `seed` while the
    probability is 0. `bits` change completely every cycle as seen through different windows.
    """

    WIDTH = 61  # taps 61, 60, 46, 45: the longest sequence

    def __init__(self) -> None:
        super().__init__({"stall": In(STALL), "bits": Out(self.WIDTH)})

    def elaborate(self, platform):
        m = Module()
        state = Signal(self.WIDTH, init=1)
        step = state
        for i in range(8):
            following = Signal(self.WIDTH, name=f"step{i}")
            m.d.comb += following.eq(Cat(step[60] ^ step[59] ^ step[45] ^ step[44], step[:60]))
            step = following
        with m.If(self.stall.probability == 0):
            m.d.sync += state.eq(Cat(self.stall.seed, 1))
        with m.Else():
            m.d.sync += state.eq(step)
        m.d.comb += self.bits.eq(state)
        return m


class StallGates:
    """Hands out gates. `connect` joins two streams, through a gate if there is a source."""

    def __init__(self, m: Module, source: StallSource | None):
        self.m, self.source = m, source
        self.count = 0

    def connect(self, name: str, sender: Any, receiver: Any) -> None:
        """`sender` and `receiver` are stream interfaces with payload, valid and ready.

        A gate is shut at random, but not between the offer of a payload and its transfer.
        """
        m = self.m
        m.d.comb += receiver.payload.eq(sender.payload)
        if self.source is None:
            m.d.comb += [receiver.valid.eq(sender.valid), sender.ready.eq(receiver.ready)]
            return
        start = self.count * 13 % self.source.WIDTH
        window = [self.source.bits[(start + 7 * i) % self.source.WIDTH] for i in range(8)]
        self.count += 1
        drawn = Signal(8, name=f"{name}_drawn")
        shut, offered = Signal(name=f"{name}_shut"), Signal(name=f"{name}_offered")
        m.d.comb += [
            drawn.eq(Cat(*window)),
            receiver.valid.eq(sender.valid & ~shut),
            sender.ready.eq(receiver.ready & ~shut),
            offered.eq(receiver.valid & ~receiver.ready),
        ]
        m.d.sync += shut.eq(~offered & (drawn < self.source.stall.probability))
