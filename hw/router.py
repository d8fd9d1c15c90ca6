# SPDX-License-Identifier: Apache-2.0
"""The router of the network-on-chip."""

from enum import IntEnum

from amaranth import Cat, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.emit import place
from hw.noc_flit import (
    FLIT,
    LINK_DEPTH,
    POSITION,
    Channel,
    LinkPair,
    LinkReceiver,
    LinkSender,
    head_of,
)


class Side(IntEnum):
    """Ports of a router. x grows to the east, y to the south."""

    LOCAL = 0
    EAST = 1
    WEST = 2
    NORTH = 3
    SOUTH = 4


# Turns that XY routing takes, by output: where its flits may come from.
SOURCES: dict[Side, tuple[Side, ...]] = {
    Side.LOCAL: (Side.LOCAL, Side.EAST, Side.WEST, Side.NORTH, Side.SOUTH),
    Side.EAST: (Side.LOCAL, Side.WEST),
    Side.WEST: (Side.LOCAL, Side.EAST),
    Side.NORTH: (Side.LOCAL, Side.EAST, Side.WEST, Side.SOUTH),
    Side.SOUTH: (Side.LOCAL, Side.EAST, Side.WEST, Side.NORTH),
}


class WormholeMerge(wiring.Component):
    """Packets of `inputs` streams onto one, whole packets only, round robin; combinational.

    The choice stands from the cycle in which it is made until the packet's tail is taken.
    """

    def __init__(self, inputs: int):
        if not isinstance(inputs, int) or inputs < 2:
            raise ValueError(f"inputs must be at least 2, not {inputs!r}")
        self.count = inputs
        super().__init__(
            {
                "input": In(stream.Signature(FLIT)).array(inputs),
                "output": Out(stream.Signature(FLIT)),
            }
        )

    @property
    def emit_name(self) -> str:
        return f"noc_wormhole_merge_{self.count}"

    def elaborate(self, platform):
        m = Module()
        count = self.count
        waiting = Signal(count)
        later = Signal(count)  # inputs behind the one served last, which come first
        preferred = Signal(count)
        first = Signal(count)
        owner = Signal(count)  # the input whose packet is under way
        grant = Signal(count)
        m.d.comb += [
            waiting.eq(Cat(i.valid for i in self.input)),
            preferred.eq(waiting & later),
            grant.eq(first),
        ]
        with m.If(preferred.any()):
            m.d.comb += first.eq(preferred & (~preferred + 1))
        with m.Else():
            m.d.comb += first.eq(waiting & (~waiting + 1))
        with m.If(owner.any()):
            m.d.comb += grant.eq(owner)
        for i, source in enumerate(self.input):
            with m.If(grant[i]):
                m.d.comb += [
                    self.output.valid.eq(source.valid),
                    self.output.payload.eq(source.payload),
                ]
            m.d.comb += source.ready.eq(grant[i] & self.output.ready)
        with m.If(self.output.valid & self.output.ready & self.output.payload.tail):
            m.d.sync += [owner.eq(0), later.eq(~(grant | (grant - 1)))]
        with m.Else():
            m.d.sync += owner.eq(grant)
        return m


class Router(wiring.Component):
    """Router of a 2D mesh: XY wormhole routing, five ports, two virtual channels, credits.

    A flit on an input link in one cycle is in the channel's FIFO in the next, in which it is
    routed, arbitrated and sent through the crossbar, and on the output link in the cycle after: 2
    cycles per hop at zero load, one flit per cycle and link. Output channels are arbitrated round
    robin among packets and held from head to tail; channels share a link flit by flit, and one that
    waits does not stop the other.

    Loss and duplication: a flit is sent only against a credit. Interleaving: an output channel is
    held by one packet. Order: packets of one source, destination and channel stay in order.

    Deadlock: XY routing never turns from y to x, so the channels of one class can be numbered such
    that every packet takes them in ascending order (all of x, then all of y, each away from its
    start) and no cycle of waiting packets exists in it. The classes share no buffer, and a packet
    never changes class. A response is always taken at its destination without waiting for anything,
    so responses drain; a request is taken once its response has room, which the draining of
    responses brings; so requests drain too.

    A packet for a destination outside the mesh goes to the local port, that is, to the port that
    sent it, which answers with an error; `NocPort` does not send any.

    Parameters
    ----------
    depth : entries of an input FIFO; below LINK_DEPTH a link does not reach one flit per cycle.

    Members
    -------
    position : x, y and the mesh's size, constant.
    local : the tile's link, seen from the tile.
    north, east, south, west : links to the neighbours, seen from the router.
    """

    def __init__(self, depth: int = LINK_DEPTH):
        if not isinstance(depth, int) or not 1 <= depth <= 64:
            raise ValueError(f"depth must be from 1 to 64, not {depth!r}")
        self.depth = depth
        super().__init__(
            {
                "position": In(POSITION),
                "local": In(LinkPair()),
                **{side.name.lower(): Out(LinkPair()) for side in Side if side is not Side.LOCAL},
            }
        )

    @property
    def emit_name(self) -> str:
        return f"noc_router_{self.depth}"

    def _route(self, m: Module, head, name: str) -> Signal:
        """One bit per side, the way of a packet from here."""
        at = self.position
        route = Signal(len(Side), name=f"{name}_route")
        with m.If((head.x >= at.mesh_x) | (head.y >= at.mesh_y)):
            m.d.comb += route.eq(1 << Side.LOCAL)
        with m.Elif(head.x > at.x):
            m.d.comb += route.eq(1 << Side.EAST)
        with m.Elif(head.x < at.x):
            m.d.comb += route.eq(1 << Side.WEST)
        with m.Elif(head.y > at.y):
            m.d.comb += route.eq(1 << Side.SOUTH)
        with m.Elif(head.y < at.y):
            m.d.comb += route.eq(1 << Side.NORTH)
        with m.Else():
            m.d.comb += route.eq(1 << Side.LOCAL)
        return route

    def elaborate(self, platform):
        m = Module()
        receivers = {side: LinkReceiver(self.depth) for side in Side}
        merges = {}
        for side in Side:
            name = side.name.lower()
            receiver, sender = receivers[side], LinkSender(self.depth)
            place(m, platform, f"receive_{name}", receiver)
            place(m, platform, f"send_{name}", sender)
            if side is Side.LOCAL:
                wiring.connect(m, receiver.link, wiring.flipped(self.local.tx))
                wiring.connect(m, sender.link, wiring.flipped(self.local.rx))
            else:
                pair = getattr(self, name)
                wiring.connect(m, receiver.link, wiring.flipped(pair.rx))
                wiring.connect(m, sender.link, wiring.flipped(pair.tx))
            for channel in Channel:
                merge = WormholeMerge(len(SOURCES[side]))
                place(m, platform, f"merge_{name}_{channel.name.lower()}", merge)
                wiring.connect(m, merge.output, sender.channel[channel])
                merges[side, channel] = merge

        for side in Side:
            for channel in Channel:
                name = f"{side.name.lower()}_{channel.name.lower()}"
                source = receivers[side].channel[channel]
                route = self._route(m, head_of(source.payload), name)
                held = Signal(len(Side), name=f"{name}_held")  # route of the packet under way
                way = Signal(len(Side), name=f"{name}_way")
                m.d.comb += way.eq(held)
                with m.If(source.payload.head):
                    m.d.comb += way.eq(route)
                with m.If(source.valid & source.payload.head):
                    m.d.sync += held.eq(route)
                ready = []
                for output in Side:
                    if side not in SOURCES[output]:
                        continue
                    merge = merges[output, channel].input[SOURCES[output].index(side)]
                    m.d.comb += [
                        merge.valid.eq(source.valid & way[output]),
                        merge.payload.eq(source.payload),
                    ]
                    ready.append(way[output] & merge.ready)
                m.d.comb += source.ready.eq(Cat(ready).any())
        return m
