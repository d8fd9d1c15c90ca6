# SPDX-License-Identifier: Apache-2.0
"""Flits and links of the network-on-chip: layouts, the credit protocol, and both ends of a link.

A packet is a head flit and, for some kinds, body flits of one line each; `head` and `tail` mark its
ends. A link carries one flit per cycle of any of its two virtual channels. The sender holds one
credit per free entry of the receiver's FIFO of that channel; a pulse on `credit` gives one back.
"""

from enum import IntEnum

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw import isa
from hw.fifo import StreamFifo
from hw.ports import LINE_ADDRESS_BITS, LINE_BITS, SCALE_BITS

PACKET_LINES = 16  # most lines of a packet
TAG_BITS = 2
MESH_BITS = 4  # coordinates of tiles that exist; packets carry the wider ones of SEND
COORDINATE_BITS = 8
LINK_DEPTH = 4  # entries per channel: as long as the credit loop, so that a lone packet never waits


class Channel(IntEnum):
    """Virtual channels. Responses wait for nothing but SRAM accesses, so they always drain."""

    REQUEST = 0
    RESPONSE = 1


class Kind(IntEnum):
    """Kinds of packets; bit 2 tells responses."""

    WRITE = 0  # 1 to PACKET_LINES body flits, written to `address` and on
    READ = 1  # `count` lines from `address`
    SEMAPHORE = 2  # post `semaphore`
    ACK = 4  # a WRITE or SEMAPHORE has taken effect
    READ_DATA = 5  # `count` body flits
    ERROR = 6  # the request failed, `status` says why


POSITION = data.StructLayout(
    {"x": MESH_BITS, "y": MESH_BITS, "mesh_x": MESH_BITS + 1, "mesh_y": MESH_BITS + 1}
)
HEAD = data.StructLayout(
    {
        "x": COORDINATE_BITS,
        "y": COORDINATE_BITS,
        "source_x": COORDINATE_BITS,
        "source_y": COORDINATE_BITS,
        "kind": 3,
        "tag": TAG_BITS,
        "status": isa.Status,
        "semaphore": (isa.SEMAPHORES - 1).bit_length(),
        "count": range(PACKET_LINES + 1),
        "address": LINE_ADDRESS_BITS,
    }
)
LINE = data.StructLayout({"data": LINE_BITS, "scale": SCALE_BITS})
FLIT = data.StructLayout({"data": LINE_BITS, "scale": SCALE_BITS, "head": 1, "tail": 1})


def head_of(flit) -> data.View:
    """The head fields of a head flit: the low bits of its data."""
    return data.View(HEAD, flit.data[: HEAD.size])


class Link(wiring.Signature):
    """One direction of a link, seen from its sender; `valid` has at most one bit set."""

    def __init__(self):
        super().__init__(
            {"valid": Out(len(Channel)), "flit": Out(FLIT), "credit": In(len(Channel))}
        )


class LinkPair(wiring.Signature):
    """Both directions of a link, seen from one of its ends."""

    def __init__(self):
        super().__init__({"tx": Out(Link()), "rx": In(Link())})


def _check_depth(depth: int) -> None:
    if not isinstance(depth, int) or not 1 <= depth <= 64:
        raise ValueError(f"depth must be from 1 to 64, not {depth!r}")


class LinkReceiver(wiring.Component):
    """Receiving end: a FIFO of `depth` flits per channel.

    A flit on the link in one cycle is on `channel` in the next. Its credit is on the link in the
    cycle after it was taken. `empty`: no flit is held.
    """

    def __init__(self, depth: int = LINK_DEPTH):
        _check_depth(depth)
        self.depth = depth
        super().__init__(
            {
                "link": In(Link()),
                "channel": Out(stream.Signature(FLIT)).array(len(Channel)),
                "empty": Out(1),
            }
        )

    @property
    def emit_name(self) -> str:
        return f"noc_link_receiver_{self.depth}"

    def elaborate(self, platform):
        m = Module()
        levels = []
        for i, channel in enumerate(self.channel):
            m.submodules[f"fifo{i}"] = fifo = StreamFifo(FLIT, self.depth)
            m.d.comb += [
                fifo.i.valid.eq(self.link.valid[i]),
                fifo.i.payload.eq(self.link.flit),
                channel.valid.eq(fifo.o.valid),
                channel.payload.eq(fifo.o.payload),
                fifo.o.ready.eq(channel.ready),
            ]
            credit = Signal(name=f"credit{i}")
            m.d.sync += credit.eq(fifo.o.valid & channel.ready)
            m.d.comb += self.link.credit[i].eq(credit)
            levels.append(fifo.level)
        m.d.comb += self.empty.eq(~Cat(levels).any())
        return m


class LinkSender(wiring.Component):
    """Sending end: credits, the choice of a channel, and the register that drives the link.

    A flit taken in one cycle is on the link in the next, one per cycle. A channel without credit
    waits and does not hold up the other; when both can send, they take turns. `ready` of a channel
    follows its `valid`.
    """

    def __init__(self, depth: int = LINK_DEPTH):
        _check_depth(depth)
        self.depth = depth
        super().__init__(
            {
                "channel": In(stream.Signature(FLIT)).array(len(Channel)),
                "link": Out(Link()),
            }
        )

    @property
    def emit_name(self) -> str:
        return f"noc_link_sender_{self.depth}"

    def elaborate(self, platform):
        m = Module()
        able = Signal(len(Channel))
        chosen = Signal(len(Channel))
        last = Signal()  # the channel of the last flit
        for i, channel in enumerate(self.channel):
            credits = Signal(range(self.depth + 1), init=self.depth, name=f"credits{i}")
            m.d.sync += credits.eq(credits + self.link.credit[i] - chosen[i])
            m.d.comb += [able[i].eq(channel.valid & (credits != 0)), channel.ready.eq(chosen[i])]
        m.d.comb += [
            chosen[0].eq(able[0] & (~able[1] | last)),
            chosen[1].eq(able[1] & (~able[0] | ~last)),
        ]
        valid = Signal(len(Channel))
        flit = Signal(FLIT, reset_less=True)
        m.d.sync += valid.eq(chosen)
        with m.If(chosen.any()):
            m.d.sync += [
                last.eq(chosen[1]),
                flit.eq(
                    Mux(
                        chosen[1],
                        self.channel[1].payload.as_value(),
                        self.channel[0].payload.as_value(),
                    )
                ),
            ]
        m.d.comb += [self.link.valid.eq(valid), self.link.flit.eq(flit)]
        return m
