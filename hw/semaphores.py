# SPDX-License-Identifier: Apache-2.0
"""The tile's counting semaphores: atomic takes, and any number of posts in a cycle."""

from collections.abc import Sequence

from amaranth import Cat, Const, Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hw import isa

ID_BITS = (isa.SEMAPHORES - 1).bit_length()
COUNT_BITS = isa.SEMAPHORE_MAX.bit_length()
FIRST_REMOTE = isa.SEMAPHORES - isa.REMOTE_SEMAPHORES
ENGINE_BITS = 4

POST_PAIR = data.StructLayout({"post0": ID_BITS, "post0_en": 1, "post1": ID_BITS, "post1_en": 1})
POST_ONE = data.StructLayout({"semaphore": ID_BITS, "en": 1})


class TakeRequest(wiring.Signature):
    """Request to take up to two semaphores at once, seen from the requester.

    The request stands until `grant`, which is combinational and means that both have been taken in
    this cycle. With `wait0` equal to `wait1`, both enabled, two are taken from that semaphore.
    `missing_local` says that the request lacks a semaphore that only this tile posts.
    """

    def __init__(self):
        super().__init__(
            {
                "valid": Out(1),
                "wait0": Out(ID_BITS),
                "wait0_en": Out(1),
                "wait1": Out(ID_BITS),
                "wait1_en": Out(1),
                "grant": In(1),
                "missing_local": In(1),
            }
        )


class Semaphores(wiring.Component):
    """`isa.SEMAPHORES` counters of 16 bits that start at 0.

    Parameters
    ----------
    engines : the engines, in order of their ports.

    Members
    -------
    take : one `TakeRequest` per engine, the sequencer's last. Of requests that could be granted in
        a cycle and share a semaphore only the first is; so the lowest engine goes first.
    post : one POST_PAIR per engine: each enabled half adds one in this cycle.
    post_sequencer, post_remote : one POST_ONE each, of the sequencer and of the network.
    overflow : a counter would exceed SEMAPHORE_MAX in this cycle (it stays there);
        `overflow_semaphore` is the lowest such, `overflow_engine` the first engine that posts one
        of them, `isa.ENGINE_NONE` when it was the sequencer or the network.
    read_index, read_value : value of one counter, for the host; combinational.
    reset : sets all counters to 0.

    A post is seen by takes in the next cycle. No stalls.
    """

    def __init__(self, engines: Sequence[isa.Engine]):
        if not engines or len(set(engines)) != len(engines):
            raise ValueError(f"engines must be different ones, not {engines!r}")
        self.engines = tuple(engines)
        n = len(self.engines)
        super().__init__(
            {
                "take": In(TakeRequest()).array(n + 1),
                "post": In(POST_PAIR).array(n),
                "post_sequencer": In(POST_ONE),
                "post_remote": In(POST_ONE),
                "overflow": Out(1),
                "overflow_semaphore": Out(ID_BITS),
                "overflow_engine": Out(ENGINE_BITS),
                "read_index": In(ID_BITS),
                "read_value": Out(COUNT_BITS),
                "reset": In(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        width = isa.SEMAPHORES
        counts = [Signal(COUNT_BITS, name=f"count_{i}") for i in range(width)]

        def one_hot(name: str, enable, index) -> Signal:
            hot = Signal(width, name=name)
            with m.If(enable):
                m.d.comb += hot.eq(1 << index)
            return hot

        nonzero = Signal(width)
        several = Signal(width)
        m.d.comb += [
            nonzero.eq(Cat(c.any() for c in counts)),
            several.eq(Cat(c[1:].any() for c in counts)),
        ]

        # Takes. A request whose semaphores are there claims them against the later ones even when
        # an earlier request keeps it from its grant: that costs a cycle in rare cases, and saves
        # a chain of grants.
        claimed: Value = Const(0, width)
        taken: Value = Const(0, width)
        taken_twice: Value = Const(0, width)
        for i, take in enumerate(self.take):
            first = one_hot(f"take{i}_first", take.valid & take.wait0_en, take.wait0)
            second = one_hot(f"take{i}_second", take.valid & take.wait1_en, take.wait1)
            wanted = Signal(width, name=f"take{i}_wanted")
            missing = Signal(width, name=f"take{i}_missing")
            possible = Signal(name=f"take{i}_possible")
            m.d.comb += [
                wanted.eq(first | second),
                missing.eq((wanted & ~nonzero) | (first & second & ~several)),
                possible.eq(take.valid & ~missing.any()),
                take.grant.eq(possible & ~(wanted & claimed).any()),
                take.missing_local.eq(missing[:FIRST_REMOTE].any()),
            ]
            next_claimed = Signal(width, name=f"claimed_{i}")
            next_taken = Signal(width, name=f"taken_{i}")
            next_twice = Signal(width, name=f"taken_twice_{i}")
            m.d.comb += [
                next_claimed.eq(claimed | Mux(possible, wanted, 0)),
                next_taken.eq(taken | Mux(take.grant, wanted, 0)),
                next_twice.eq(taken_twice | Mux(take.grant, first & second, 0)),
            ]
            claimed, taken, taken_twice = next_claimed, next_taken, next_twice

        # Posts, added up for all semaphores at once by carry-save adders over one-hot masks:
        # planes[w] holds bit w of every semaphore's sum.
        sources = []
        by_engine = []
        for i, post in enumerate(self.post):
            pair = [
                one_hot(f"post{i}_0", post.post0_en, post.post0),
                one_hot(f"post{i}_1", post.post1_en, post.post1),
            ]
            by_engine.append(pair[0] | pair[1])
            sources += pair
        sources.append(one_hot("post_seq", self.post_sequencer.en, self.post_sequencer.semaphore))
        sources.append(one_hot("post_net", self.post_remote.en, self.post_remote.semaphore))
        planes: list[Signal] = []
        level = sources
        while level:
            carries: list[Signal] = []
            while len(level) > 1:
                a, b, *rest = level
                c = rest.pop(0) if rest else 0
                total = Signal(width, name=f"sum_{len(planes)}_{len(carries)}")
                carry = Signal(width, name=f"carry_{len(planes)}_{len(carries)}")
                m.d.comb += [total.eq(a ^ b ^ c), carry.eq((a & b) | (c & (a | b)))]
                carries.append(carry)
                level = [*rest, total]
            planes += level
            level = carries

        touched = Signal(width)
        overflows = Signal(width)
        m.d.comb += touched.eq(taken | Cat(Cat(p[i] for p in planes).any() for i in range(width)))
        for i, count in enumerate(counts):
            posted = Signal(len(planes), name=f"posted_{i}")
            total = Signal(COUNT_BITS + 1, name=f"total_{i}")
            with m.If(touched[i]):
                m.d.comb += [
                    posted.eq(Cat(p[i] for p in planes)),
                    total.eq(count + posted - taken[i] - taken_twice[i]),
                    overflows[i].eq(total[-1]),
                ]
                m.d.sync += count.eq(Mux(overflows[i], isa.SEMAPHORE_MAX, total))
        m.d.comb += [
            self.overflow.eq(overflows.any()),
            self.overflow_engine.eq(isa.ENGINE_NONE),
        ]
        with m.If(self.overflow):
            for i in reversed(range(width)):
                with m.If(overflows[i]):
                    m.d.comb += self.overflow_semaphore.eq(i)
            for engine, mask in reversed(list(zip(self.engines, by_engine, strict=True))):
                with m.If((mask & overflows).any()):
                    m.d.comb += self.overflow_engine.eq(engine)
        with m.Switch(self.read_index):
            for i, count in enumerate(counts):
                with m.Case(i):
                    m.d.comb += self.read_value.eq(count)
        return ResetInserter(self.reset)(m)
