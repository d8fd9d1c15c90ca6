# SPDX-License-Identifier: Apache-2.0
"""The serving side of a tile's network port: remote writes, reads and semaphore posts."""

from amaranth import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.config import TileConfig
from hw.fifo import StreamFifo
from hw.isa import Status
from hw.line_reader import LineReader
from hw.noc_flit import FLIT, HEAD, PACKET_LINES, POSITION, Kind, head_of
from hw.packet_emitter import PacketEmitter
from hw.ports import GRANULES, LINE_ADDRESS_BITS, SramClient
from hw.semaphores import FIRST_REMOTE, POST_ONE


class NocTarget(wiring.Component):
    """Serves request packets one after the other, in order, one flit per cycle.

    WRITE: line i of the body goes to line `address` + i with its scale; a line outside of the SRAM
    is not written, and the packet is answered with ERROR, else ACK. READ: READ_DATA with `count`
    lines, or ERROR; 2 cycles and the SRAM's latency until the first flit. SEMAPHORE: `post` for one
    cycle, after every write of earlier packets has been taken by the SRAM, and ACK. Errors:
    ADDRESS_RANGE; ILLEGAL_COMMAND for unknown kinds, semaphores that are not remote ones and reads
    of no or too many lines; NO_DESTINATION for a packet that is not for this tile. A request waits
    only for the SRAM and for room for its response.

    Members
    -------
    position : of this tile.
    request, response : flits in and out.
    memory : tile SRAM; addresses are checked here, so that its `fault` stays low.
    post : semaphore to post in this cycle.
    active : a request or response is under way.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        super().__init__(
            {
                "position": In(POSITION),
                "request": In(stream.Signature(FLIT)),
                "response": Out(stream.Signature(FLIT)),
                "memory": Out(SramClient(1)),
                "post": Out(POST_ONE),
                "active": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        limit = self.config.sram_lines
        m.submodules.reader = reader = LineReader()
        m.submodules.replies = replies = StreamFifo(HEAD, 2)
        m.submodules.emitter = emitter = PacketEmitter()
        wiring.connect(m, replies.o, emitter.head)
        wiring.connect(m, reader.line, emitter.line)
        wiring.connect(m, emitter.flit, wiring.flipped(self.response))
        m.d.comb += emitter.body.eq(
            Mux(replies.o.payload.kind == Kind.READ_DATA, replies.o.payload.count, 0)
        )

        flit = self.request.payload
        current = Signal(HEAD, reset_less=True)  # of the packet under way
        head = Signal(HEAD)
        error = Signal(Status)
        failed = Signal(Status)  # what earlier flits of the packet found
        address = Signal(LINE_ADDRESS_BITS, reset_less=True)
        left = Signal(range(PACKET_LINES + 1), reset_less=True)  # lines to read
        taken = Signal()
        read_end = Signal(LINE_ADDRESS_BITS + 1)
        m.d.comb += [
            head.eq(Mux(flit.head, head_of(flit).as_value(), current.as_value())),
            taken.eq(self.request.valid & self.request.ready),
            read_end.eq(head.address + head.count),
        ]

        # The reply: to the source, with the request's tag.
        reply = replies.i.payload
        m.d.comb += [
            reply.x.eq(head.source_x),
            reply.y.eq(head.source_y),
            reply.source_x.eq(self.position.x),
            reply.source_y.eq(self.position.y),
            reply.tag.eq(head.tag),
            reply.status.eq(error),
            reply.count.eq(head.count),
            reply.semaphore.eq(head.semaphore),
            reply.address.eq(head.address),
        ]
        with m.If(error != Status.RUNNING):
            m.d.comb += reply.kind.eq(Kind.ERROR)
        with m.Elif(head.kind == Kind.READ):
            m.d.comb += reply.kind.eq(Kind.READ_DATA)
        with m.Else():
            m.d.comb += reply.kind.eq(Kind.ACK)

        # A packet is answered as its tail is taken.
        m.d.comb += replies.i.valid.eq(taken & flit.tail)

        memory = self.memory
        reading = Signal()
        m.d.comb += [
            memory.request.payload.address.eq(
                Mux(reading, reader.memory.request.payload.address, address)
            ),
            memory.request.payload.write.eq(~reading),
            # Nothing of a read's payload may move while it waits.
            memory.request.payload.data.eq(Mux(reading, 0, flit.data)),
            memory.request.payload.scales.eq(Mux(reading, 0, flit.scale)),
            memory.request.payload.mask.as_value().eq((~reading).replicate(GRANULES)),
            memory.request.payload.scale_mask.eq(~reading),
            reader.memory.request.ready.eq(memory.request.ready & reading),
            reader.memory.valid.eq(memory.valid),
            reader.memory.response.eq(memory.response),
            reader.address.payload.eq(address),
        ]

        with m.If(taken):
            m.d.sync += failed.eq(error)
        with m.FSM():
            with m.State("HEAD"):
                m.d.comb += self.request.ready.eq(replies.i.ready)
                with m.If((head.x != self.position.x) | (head.y != self.position.y)):
                    m.d.comb += error.eq(Status.NO_DESTINATION)
                with m.Else(), m.Switch(head.kind):
                    with m.Case(Kind.WRITE):
                        pass
                    with m.Case(Kind.READ):
                        with m.If((head.count == 0) | (head.count > PACKET_LINES)):
                            m.d.comb += error.eq(Status.ILLEGAL_COMMAND)
                        with m.Elif(read_end > limit):
                            m.d.comb += error.eq(Status.ADDRESS_RANGE)
                    with m.Case(Kind.SEMAPHORE):
                        with m.If(head.semaphore < FIRST_REMOTE):
                            m.d.comb += error.eq(Status.ILLEGAL_COMMAND)
                        with m.Else():
                            m.d.comb += [
                                self.post.semaphore.eq(head.semaphore),
                                self.post.en.eq(taken & flit.tail),
                            ]
                    with m.Default():
                        m.d.comb += error.eq(Status.ILLEGAL_COMMAND)
                with m.If(taken):
                    m.d.sync += [current.eq(head), address.eq(head.address), left.eq(head.count)]
                    with m.If(~flit.tail):
                        m.next = "BODY"
                    with m.Elif((head.kind == Kind.READ) & (error == Status.RUNNING)):
                        m.next = "READ"
            with m.State("BODY"):
                m.d.comb += error.eq(failed)
                room = Signal()
                m.d.comb += room.eq(~flit.tail | replies.i.ready)
                with m.If((failed == Status.NO_DESTINATION) | (failed == Status.ILLEGAL_COMMAND)):
                    m.d.comb += self.request.ready.eq(room)
                with m.Elif(head.kind != Kind.WRITE):
                    m.d.comb += [self.request.ready.eq(room), error.eq(Status.ILLEGAL_COMMAND)]
                with m.Elif(address >= limit):
                    m.d.comb += [self.request.ready.eq(room), error.eq(Status.ADDRESS_RANGE)]
                with m.Else():
                    m.d.comb += [
                        memory.request.valid.eq(self.request.valid & room),
                        self.request.ready.eq(memory.request.ready & room),
                    ]
                with m.If(taken):
                    m.d.sync += address.eq(address + 1)
                    with m.If(flit.tail):
                        m.next = "HEAD"
            with m.State("READ"):
                m.d.comb += [
                    reading.eq(1),
                    reader.address.valid.eq(1),
                    memory.request.valid.eq(reader.memory.request.valid),
                ]
                with m.If(reader.address.ready):
                    m.d.sync += [address.eq(address + 1), left.eq(left - 1)]
                    with m.If(left == 1):
                        m.next = "HEAD"
            m.d.comb += self.active.eq(
                self.request.valid
                | self.response.valid
                | reading
                | replies.o.valid
                | emitter.flit.valid
            )
        return m
