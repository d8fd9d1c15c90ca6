# SPDX-License-Identifier: Apache-2.0
"""The control side of a tile as one block: sequencer, queues, semaphores, counters."""

from collections.abc import Sequence

from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from hw import isa
from hw.command_queue import CommandQueue
from hw.config import TileConfig
from hw.counters import COUNTER_BITS, ActivityCounters
from hw.ports import LINE_BITS, EngineControl, SramClient
from hw.semaphores import COUNT_BITS, ENGINE_BITS, ID_BITS, POST_ONE, Semaphores
from hw.sequencer import Sequencer, pc_bits
from hw.trace import TRACE


class CommandProcessor(wiring.Component):
    """Sequencer, command queues, semaphores and activity counters of one tile.

    Parameters
    ----------
    config : the tile; `program_beats` and `queue_depth` are used.
    engines : the engines that the tile has.

    Members
    -------
    engine_<name> : the other side of each engine's `EngineControl`.
    load : tile SRAM, for LOAD.
    post_remote : posts that arrive from the network.
    network_active : something is on its way to this tile; holds back the deadlock status.
    program_*, start, start_pc, cycle_limit, reset, status*, cycles, running : as in `Sequencer`;
        `reset` also empties the queues and clears the semaphores and counters. Engines with
        commands in flight must be reset by the tile in the same cycle.
    semaphore_index, semaphore_value : as `read_*` of `Semaphores`.
    counter_index, counter_value : as `read_*` of `ActivityCounters`; they count a run and are
        cleared by its start.

    trace : `hw.trace.TRACE`, of these engines only.

    A command reaches its engine four cycles after its last beat was read, at the earliest.
    """

    def __init__(self, config: TileConfig, engines: Sequence[isa.Engine]):
        self.config = config
        self.engines = tuple(engines)
        self.sequencer = Sequencer(config, engines)
        self.counters = ActivityCounters([*(engine.name for engine in engines), "LOAD"])
        self.pc_bits = pc_bits(config)
        super().__init__(
            {
                "load": Out(SramClient(1)),
                "post_remote": In(POST_ONE),
                "network_active": In(1),
                "program_write_en": In(1),
                "program_addr": In(range(config.program_beats)),
                "program_write_data": In(LINE_BITS),
                "program_read_en": In(1),
                "program_read_data": Out(LINE_BITS),
                "start": In(1),
                "start_pc": In(self.pc_bits),
                "cycle_limit": In(32),
                "reset": In(1),
                "status": Out(isa.Status),
                "status_engine": Out(ENGINE_BITS),
                "status_pc": Out(self.pc_bits),
                "status_semaphore": Out(ID_BITS),
                "cycles": Out(32),
                "running": Out(1),
                "semaphore_index": In(ID_BITS),
                "semaphore_value": Out(COUNT_BITS),
                "counter_index": In(self.counters.read_index.shape()),
                "counter_value": Out(COUNTER_BITS),
                "load_activity": In(isa.Activity),
                "trace": Out(TRACE),
            }
            | {
                f"engine_{e.name.lower()}": In(EngineControl(*isa.BY_ENGINE[e]))
                for e in self.engines
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.sequencer = sequencer = self.sequencer
        m.submodules.counters = counters = self.counters
        m.submodules.semaphores = semaphores = Semaphores(self.engines)
        connect(m, sequencer.load, flipped(self.load))
        connect(m, sequencer.take, semaphores.take[len(self.engines)])
        m.d.comb += [
            semaphores.reset.eq(self.reset),
            semaphores.post_sequencer.eq(sequencer.post),
            semaphores.post_remote.eq(self.post_remote),
            semaphores.read_index.eq(self.semaphore_index),
            self.semaphore_value.eq(semaphores.read_value),
            sequencer.overflow.eq(semaphores.overflow),
            sequencer.overflow_semaphore.eq(semaphores.overflow_semaphore),
            sequencer.overflow_engine.eq(semaphores.overflow_engine),
            counters.running.eq(self.running),
            counters.clear.eq(self.reset | sequencer.started),
            counters.read_index.eq(self.counter_index),
            counters.activity[len(self.engines)].eq(self.load_activity),
            self.counter_value.eq(counters.read_value),
            self.trace.started.eq(sequencer.started),
            self.trace.beat.eq(sequencer.trace),
        ]
        for name in (
            "network_active",
            "program_write_en",
            "program_addr",
            "program_write_data",
            "program_read_en",
            "start",
            "start_pc",
            "cycle_limit",
            "reset",
        ):
            m.d.comb += getattr(sequencer, name).eq(getattr(self, name))
        for name in (
            "program_read_data",
            "status",
            "status_engine",
            "status_pc",
            "status_semaphore",
            "cycles",
            "running",
        ):
            m.d.comb += getattr(self, name).eq(getattr(sequencer, name))
        for i, e in enumerate(self.engines):
            name = e.name.lower()
            queue = CommandQueue(isa.BY_ENGINE[e], self.config.queue_depth, self.pc_bits)
            m.submodules[f"queue_{name}"] = queue
            engine = getattr(self, f"engine_{name}")
            connect(m, getattr(sequencer, f"issue_{name}"), queue.input)
            connect(m, queue.engine, flipped(engine))
            connect(m, queue.take, semaphores.take[i])
            m.d.comb += [
                queue.run.eq(self.running),
                queue.reset.eq(self.reset),
                semaphores.post[i].eq(queue.post),
                sequencer.queue[i].eq(queue.status),
                counters.activity[i].eq(engine.activity),
                self.trace.taken[e].eq(queue.taken),
                self.trace.done[e].eq(queue.done),
            ]
        return m
