# SPDX-License-Identifier: Apache-2.0
"""A short stream FIFO of registers."""

from amaranth import Array, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out


class StreamFifo(wiring.Component):
    """FIFO of `depth` entries of `shape`; one cycle of latency, one entry per cycle.

    `i` is ready while an entry is free (not because one is being taken), `o` is valid while one is
    held.
    """

    def __init__(self, shape, depth: int):
        if not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth must be an integer of at least 1, not {depth!r}")
        self.shape, self.depth = shape, depth
        super().__init__(
            {
                "i": In(stream.Signature(shape)),
                "o": Out(stream.Signature(shape)),
                "level": Out(range(depth + 1)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        entries = Array(
            Signal(self.shape, name=f"entry{i}", reset_less=True) for i in range(self.depth)
        )
        head, tail = Signal(range(self.depth)), Signal(range(self.depth))
        put, take = Signal(), Signal()

        def following(pointer):
            return Mux(pointer == self.depth - 1, 0, pointer + 1)

        m.d.comb += [
            self.i.ready.eq(self.level != self.depth),
            self.o.valid.eq(self.level != 0),
            self.o.payload.eq(entries[head]),
            put.eq(self.i.valid & self.i.ready),
            take.eq(self.o.valid & self.o.ready),
        ]
        with m.If(put):
            m.d.sync += [entries[tail].eq(self.i.payload), tail.eq(following(tail))]
        with m.If(take):
            m.d.sync += head.eq(following(head))
        m.d.sync += self.level.eq(self.level + put - take)
        return m
