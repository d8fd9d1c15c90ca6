# SPDX-License-Identifier: Apache-2.0
"""A tile's port on the collective network."""

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.collective_node import CollectiveLocal
from hw.config import TileConfig
from hw.isa import COLLECTIVE, Activity, CollectiveOp, Scope, Status, operand_layout
from hw.line_reader import LineReader
from hw.noc_flit import POSITION
from hw.ports import GRANULES, LINE_ADDRESS_BITS, EngineControl, SramClient


class CollectivePort(wiring.Component):
    """Executes COLLECTIVE, one command at a time.

    Lines of `src_addr` go into the network, results come back and are written at `dst_addr`, scales
    unchanged; the two may be the same place. Reads and writes share `memory`, so a line takes two
    of its cycles, one where only reads or writes happen; the network itself takes a line per cycle.
    A result goes before a read. With BROADCAST only the root reads; it also writes.

    ILLEGAL_COMMAND: unknown op or scope, a BROADCAST root outside of the scope, no lines, an
    address that is not a multiple of 16; the tile takes no part. ADDRESS_RANGE: the range at src or
    dst does not lie in the SRAM; then zeros are contributed, or results dropped, so that the other
    tiles finish.

    Members
    -------
    control, memory : command and tile SRAM; ranges are checked here, so that its `fault` stays low.
    position : x, y and the mesh's size, constant.
    network : the link to the node (its `local`). Activity: BUSY a line moves, BLOCKED the network
        does not take a contribution, STARVED otherwise.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        super().__init__(
            {
                "control": Out(EngineControl(COLLECTIVE)),
                "memory": Out(SramClient(1)),
                "position": In(POSITION),
                "network": Out(CollectiveLocal()),
            }
        )

    def elaborate(self, platform):
        m = Module()
        limit = self.config.sram_lines
        at = self.position
        m.submodules.reader = reader = LineReader()
        command = Signal(operand_layout(COLLECTIVE), reset_less=True)
        read_at = Signal(LINE_ADDRESS_BITS, reset_less=True)
        write_at = Signal(LINE_ADDRESS_BITS, reset_less=True)
        reads_left = Signal(16)
        sends_left = Signal(16)
        results_left = Signal(16)
        contributes = Signal(reset_less=True)  # real lines, not zeros
        stores = Signal(reset_less=True)
        error = Signal(Status)

        # Facts about the command.
        members = Signal(9)
        own_place = Signal(8)
        with m.Switch(command.scope):
            with m.Case(Scope.MESH):
                m.d.comb += [
                    members.eq(at.mesh_x * at.mesh_y),
                    own_place.eq(at.y * at.mesh_x + at.x),
                ]
            with m.Case(Scope.ROW):
                m.d.comb += [members.eq(at.mesh_x), own_place.eq(at.x)]
            with m.Default():
                m.d.comb += [members.eq(at.mesh_y), own_place.eq(at.y)]
        broadcast, illegal, source_ok, target_ok = Signal(), Signal(), Signal(), Signal()
        needs_source = Signal()
        m.d.comb += [
            broadcast.eq(command.op == CollectiveOp.BROADCAST),
            needs_source.eq(~broadcast | (command.root == own_place)),
            illegal.eq(
                (command.op > CollectiveOp.BROADCAST)
                | (command.scope > Scope.COLUMN)
                | (broadcast & (command.root >= members))
                | (command.lines == 0)
                | command.src_addr[:4].any()
                | command.dst_addr[:4].any()
            ),
            source_ok.eq((command.src_addr[4:] + command.lines <= limit) | ~needs_source),
            target_ok.eq(command.dst_addr[4:] + command.lines <= limit),
        ]

        with m.FSM() as fsm:
            with m.State("IDLE"):
                m.d.comb += self.control.command.ready.eq(1)
                m.d.sync += error.eq(Status.RUNNING)
                with m.If(self.control.command.valid):
                    m.d.sync += command.eq(self.control.command.payload)
                    m.next = "CHECK"
            with m.State("CHECK"):
                m.d.sync += [
                    read_at.eq(command.src_addr[4:]),
                    write_at.eq(command.dst_addr[4:]),
                    contributes.eq(needs_source & source_ok),
                    stores.eq(target_ok),
                ]
                with m.If(illegal):
                    m.d.sync += error.eq(Status.ILLEGAL_COMMAND)
                    m.next = "DONE"
                with m.Else():
                    m.d.sync += [
                        reads_left.eq(Mux(needs_source & source_ok, command.lines, 0)),
                        sends_left.eq(command.lines),
                        results_left.eq(command.lines),
                    ]
                    with m.If(~source_ok | ~target_ok):
                        m.d.sync += error.eq(Status.ADDRESS_RANGE)
                    m.next = "RUN"
            with m.State("RUN"):
                with m.If(results_left == 0):
                    m.next = "DONE"
            with m.State("DONE"):
                m.d.comb += [self.control.done.eq(1), self.control.error.eq(error)]
                m.next = "IDLE"

        # Contributions: lines read, or zeros.
        own = self.network.contribution
        sends = Signal()
        m.d.comb += [
            reader.address.valid.eq(reads_left != 0),
            reader.address.payload.eq(read_at),
            own.valid.eq((sends_left != 0) & (reader.line.valid | ~contributes)),
            own.payload.line.eq(Mux(contributes, reader.line.payload.data, 0)),
            own.payload.op.eq(command.op),
            own.payload.scope.eq(command.scope),
            sends.eq(own.valid & own.ready),
            reader.line.ready.eq(sends & contributes),
        ]
        with m.If(reader.address.valid & reader.address.ready):
            m.d.sync += [reads_left.eq(reads_left - 1), read_at.eq(read_at + 1)]
        with m.If(sends):
            m.d.sync += sends_left.eq(sends_left - 1)

        # The SRAM: a result goes first, but a read that waits stays on the port.
        memory, result = self.memory, self.network.result
        read = reader.memory.request
        read_waits = Signal()
        write = Signal()
        m.d.comb += [
            write.eq(result.valid & stores & ~read_waits),
            memory.request.valid.eq(write | read.valid),
            memory.request.payload.write.eq(write),
            memory.request.payload.address.eq(Mux(write, write_at, read.payload.address)),
            # Nothing of a read's payload may move while it waits.
            memory.request.payload.data.eq(Mux(write, result.payload, 0)),
            memory.request.payload.mask.as_value().eq(write.replicate(GRANULES)),
            read.ready.eq(memory.request.ready & ~write),
            reader.memory.valid.eq(memory.valid),
            reader.memory.response.eq(memory.response),
            result.ready.eq(Mux(stores, memory.request.ready & ~read_waits, 1)),
        ]
        m.d.sync += read_waits.eq(read.valid & ~write & ~memory.request.ready)
        with m.If(result.valid & result.ready):
            m.d.sync += [results_left.eq(results_left - 1), write_at.eq(write_at + 1)]

        with m.If(fsm.ongoing("IDLE")):
            m.d.comb += self.control.activity.eq(Activity.IDLE)
        with m.Elif(sends | (result.valid & result.ready)):
            m.d.comb += self.control.activity.eq(Activity.BUSY)
        with m.Elif(own.valid):
            m.d.comb += self.control.activity.eq(Activity.BLOCKED)
        with m.Else():
            m.d.comb += self.control.activity.eq(Activity.STARVED)
        return m
