# SPDX-License-Identifier: Apache-2.0
"""The command queue in front of an engine: order, semaphores, and what is in flight."""

from collections.abc import Sequence

from amaranth import Module, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.fifo import SyncFIFO
from amaranth.lib.wiring import In, Out

from hw import isa
from hw.ports import EngineControl
from hw.semaphores import POST_PAIR, TakeRequest


def queue_status(pc_bits: int) -> data.StructLayout:
    """What a queue tells the sequencer.

    idle: nothing queued and nothing in flight.
    stuck: nothing in flight, and the queue is empty or its head lacks a semaphore that only this
    tile posts.
    failed, reason, pc: the oldest command in flight failed in this cycle. `pc` is that command's
    beat address whenever something is in flight.
    """
    return data.StructLayout(
        {"idle": 1, "stuck": 1, "failed": 1, "reason": isa.Status, "pc": pc_bits}
    )


class CommandQueue(wiring.Component):
    """Holds an engine's commands in order and starts each when its semaphores are there.

    The head takes its semaphores, both at once, and is then offered to the engine; the engine may
    take commands before earlier ones are done, up to `in_flight`. On `done` the command's posts
    are made in the same cycle, unless it failed: then the failure is reported instead.

    Parameters
    ----------
    commands : those that the engine executes.
    depth : commands that wait.
    pc_bits : width of the beat address.
    in_flight : commands that the engine may hold.

    Members
    -------
    input : `isa.queue_entry(commands, pc_bits)`.
    engine : the other side of the engine's `EngineControl`; `done` comes at least one cycle after
        its command was taken.
    take, post : to the semaphores.
    status : `queue_status`.
    waiting : the head waits for semaphores; `waiting_remote`: for those of other tiles only.
    flying : commands in flight.
    taken : the engine takes the head in this cycle; done: the oldest in flight ends without an
        error in this cycle.
    run : low keeps the head from taking semaphores; a command already offered stays offered.
    reset : forgets everything.

    A command is offered two cycles after `input` took it at the earliest; one command per two
    cycles. `input` is ready whenever there is room.
    """

    def __init__(
        self, commands: Sequence[isa.Command], depth: int, pc_bits: int, in_flight: int = 4
    ):
        if not commands:
            raise ValueError(f"commands must be at least one, not {commands!r}")
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth!r}")
        if pc_bits < 1:
            raise ValueError(f"pc_bits must be at least 1, not {pc_bits!r}")
        if in_flight < 1:
            raise ValueError(f"in_flight must be at least 1, not {in_flight!r}")
        self.commands, self.depth, self.pc_bits = tuple(commands), depth, pc_bits
        self.in_flight = in_flight
        super().__init__(
            {
                "input": In(stream.Signature(isa.queue_entry(commands, pc_bits))),
                "engine": In(EngineControl(*commands)),
                "take": Out(TakeRequest()),
                "post": Out(POST_PAIR),
                "status": Out(queue_status(pc_bits)),
                "waiting": Out(1),
                "waiting_remote": Out(1),
                "flying": Out(range(in_flight + 1)),
                "taken": Out(1),
                "done": Out(1),
                "run": In(1),
                "reset": In(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        entry = isa.queue_entry(self.commands, self.pc_bits)
        flight_entry = data.StructLayout({"post": POST_PAIR, "pc": self.pc_bits})
        m.submodules.queue = queue = SyncFIFO(width=entry.size, depth=self.depth)
        m.submodules.flight = flight = SyncFIFO(width=flight_entry.size, depth=self.in_flight)
        head = data.View(entry, queue.r_data)
        leaving = data.View(flight_entry, flight.w_data)
        oldest = data.View(flight_entry, flight.r_data)
        offered = Signal()  # the head has its semaphores
        finished = Signal()

        m.d.comb += [
            queue.w_data.eq(self.input.payload),
            queue.w_en.eq(self.input.valid),
            self.input.ready.eq(queue.w_rdy),
            self.take.valid.eq(queue.r_rdy & ~offered & flight.w_rdy & self.run),
            self.take.wait0.eq(head.sync.wait0),
            self.take.wait0_en.eq(head.sync.wait0_en),
            self.take.wait1.eq(head.sync.wait1),
            self.take.wait1_en.eq(head.sync.wait1_en),
            self.engine.command.valid.eq(offered),
            self.engine.command.payload.eq(head.operands),
            queue.r_en.eq(offered & self.engine.command.ready),
            flight.w_en.eq(queue.r_en),
            leaving.post.post0.eq(head.sync.post0),
            leaving.post.post0_en.eq(head.sync.post0_en),
            leaving.post.post1.eq(head.sync.post1),
            leaving.post.post1_en.eq(head.sync.post1_en),
            leaving.pc.eq(head.pc),
            finished.eq(self.engine.done & flight.r_rdy),
            flight.r_en.eq(finished),
            self.status.idle.eq(~queue.r_rdy & ~flight.r_rdy),
            self.status.stuck.eq(
                ~flight.r_rdy & ~offered & (~queue.r_rdy | self.take.missing_local)
            ),
            self.status.failed.eq(finished & (self.engine.error != isa.Status.RUNNING)),
            self.status.reason.eq(self.engine.error),
            self.status.pc.eq(oldest.pc),
            self.waiting.eq(self.take.valid & ~self.take.grant),
            self.waiting_remote.eq(self.waiting & ~self.take.missing_local),
            self.flying.eq(flight.level),
            self.taken.eq(queue.r_en),
            self.done.eq(finished & ~self.status.failed),
        ]
        with m.If(self.done):
            m.d.comb += self.post.eq(oldest.post)
        with m.If(queue.r_en):
            m.d.sync += offered.eq(0)
        with m.Elif(self.take.grant):
            m.d.sync += offered.eq(1)
        return ResetInserter(self.reset)(m)
