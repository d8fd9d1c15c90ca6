# SPDX-License-Identifier: Apache-2.0
"""A tile's port on the network-on-chip."""

from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from hw.config import TileConfig
from hw.isa import SEND
from hw.noc_flit import POSITION, Channel, Kind, LinkPair, LinkReceiver, LinkSender, head_of
from hw.noc_sender import NocSender
from hw.noc_target import NocTarget
from hw.ports import EngineControl, SramClient
from hw.semaphores import POST_ONE


class NocPort(wiring.Component):
    """The SEND engine, and the server of what other tiles send.

    Both sides run on their own, each at one flit per cycle: 16 lines in 17 cycles. See `NocSender`
    and `NocTarget` for commands, packets and errors. A tile may send to itself; that goes through
    its router. Responses are taken as they come, whatever else the port does. READ_DATA is dropped:
    the port asks for none.

    Members
    -------
    control : SEND.
    source : reads of what is sent.
    target : writes of what comes, and reads for other tiles, in order.
    position : x, y and the mesh's size, constant.
    network : the link to the router (its `local`).
    post : remote semaphore to post in this cycle.
    active : a command, request or response is under way here.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        super().__init__(
            {
                "control": Out(EngineControl(SEND)),
                "source": Out(SramClient(1)),
                "target": Out(SramClient(1)),
                "position": In(POSITION),
                "network": Out(LinkPair()),
                "post": Out(POST_ONE),
                "active": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.receiver = receiver = LinkReceiver()
        m.submodules.link_sender = link_sender = LinkSender()
        m.submodules.sender = sender = NocSender(self.config)
        m.submodules.server = server = NocTarget(self.config)
        connect(m, receiver.link, flipped(self.network.rx))
        connect(m, link_sender.link, flipped(self.network.tx))
        connect(m, sender.control, flipped(self.control))
        connect(m, sender.source, flipped(self.source))
        connect(m, server.memory, flipped(self.target))
        connect(m, sender.request, link_sender.channel[Channel.REQUEST])
        connect(m, server.response, link_sender.channel[Channel.RESPONSE])
        connect(m, receiver.channel[Channel.REQUEST], server.request)

        response = receiver.channel[Channel.RESPONSE]
        head = head_of(response.payload)
        m.d.comb += [
            sender.position.eq(self.position),
            server.position.eq(self.position),
            self.post.eq(server.post),
            response.ready.eq(1),
            sender.reply.valid.eq(
                response.valid & response.payload.head & (head.kind != Kind.READ_DATA)
            ),
            sender.reply.tag.eq(head.tag),
            sender.reply.status.eq(head.status),
            self.active.eq(sender.active | server.active | ~receiver.empty),
        ]
        return m
