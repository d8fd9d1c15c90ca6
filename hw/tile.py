# SPDX-License-Identifier: Apache-2.0
"""A tile: command processor, engines, tile SRAM, KV SRAM, and ports to HBM, host and networks."""

from typing import Any

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.collective_node import CollectiveLocal
from hw.collective_port import CollectivePort
from hw.command_processor import CommandProcessor
from hw.config import TileConfig
from hw.counters import SaturatingCounter
from hw.dma import Dma
from hw.emit import place
from hw.hbm_port import HbmPort
from hw.host_adapter import (
    CORE_ANSWER,
    CORE_COMMAND,
    COUNTER_LINE,
    KV_LINE,
    SEMAPHORE_LINE,
    HostAdapter,
    Region,
)
from hw.isa import COUNTED, Engine
from hw.kv_append import KvAppend
from hw.kv_sram import KvSram
from hw.matrix_engine import MatrixEngine
from hw.noc_flit import POSITION
from hw.noc_port import NocPort
from hw.ports import Axi4, HostPort
from hw.router import LinkPair
from hw.stall_gate import STALL, StallGates, StallSource
from hw.tile_sram import TileSram
from hw.topk import TopkEngine
from hw.trace import TRACE
from hw.vector_engine import VectorEngine
from hw.weight_loader import load_meta
from hw.weight_stream import WeightStream

DMA_CHANNEL, STREAM_CHANNEL = 0, 1  # read channels of the HBM port


def _ports(config: TileConfig) -> dict[str, Any]:
    """Ports that the tile hands through to its core."""
    ports = {
        "axi": Out(Axi4(config.hbm_port_bytes)).array(config.hbm_ports),
        "noc": Out(LinkPair()),
        "collective": Out(CollectiveLocal()),
        "position": In(POSITION),
        "running": Out(1),
    }
    if config.stall_gates:
        ports["stall"] = In(STALL)
    if config.trace:
        # Not `trace`: a module that Verilator compiles on its own has a function of that name.
        ports["command_trace"] = Out(TRACE)
    return ports


class TileCore(wiring.Component):
    """All of a tile that its host can reset. `access` is the host's, from `HostAdapter`."""

    def __init__(self, config: TileConfig):
        self.config = config
        super().__init__(
            _ports(config)
            | {
                "access": In(CORE_COMMAND),
                "access_ready": Out(1),
                "answer": Out(CORE_ANSWER),
                "answer_valid": Out(1),
            }
        )

    @property
    def emit_name(self) -> str:
        return f"tile_core_{self.config.rows}x{self.config.cols}"

    def elaborate(self, platform):
        m = Module()
        config = self.config
        m.submodules.processor = processor = CommandProcessor(config, Tile.engines)
        m.submodules.sram = sram = TileSram(config)
        m.submodules.kv_sram = kv = KvSram(config, load_meta(config.rows).size)
        m.submodules.hbm = hbm = HbmPort(config)
        matrix, vector, topk = MatrixEngine(config), VectorEngine(config), TopkEngine(config)
        dma, stream, append = Dma(config), WeightStream(config), KvAppend(config)
        noc, collective = NocPort(config), CollectivePort(config)
        engines: dict[Engine, wiring.Component] = {
            Engine.MATRIX: matrix,
            Engine.VECTOR: vector,
            Engine.TOPK: topk,
            Engine.DMA: dma,
            Engine.STREAM: stream,
            Engine.KV: append,
            Engine.NOC: noc,
            Engine.COLLECTIVE: collective,
        }
        source = None
        if config.stall_gates:
            m.submodules.stall_source = source = StallSource()
            m.d.comb += source.stall.eq(self.stall)
        gates = StallGates(m, source)
        for engine, component in engines.items():
            name = engine.name.lower()
            m.submodules[f"{name}_engine"] = component
            control = getattr(processor, f"engine_{name}")
            gates.connect(f"{name}_command", control.command, component.control.command)
            m.d.comb += [
                control.done.eq(component.control.done),
                control.error.eq(component.control.error),
                control.activity.eq(component.control.activity),
            ]

        def client(name, engine_side, sram_side):
            gates.connect(f"{name}_request", engine_side.request, sram_side.request)
            m.d.comb += [
                engine_side.valid.eq(sram_side.valid),
                engine_side.response.eq(sram_side.response),
                engine_side.fault.eq(sram_side.fault),
            ]

        for name, engine_side, sram_side in (
            ("activation", matrix.activation, sram.activation),
            ("matrix", matrix.memory, sram.matrix),
            ("vector_a", vector.a, sram.vector_a),
            ("vector_b", vector.b, sram.vector_b),
            ("vector_out", vector.out, sram.vector_out),
            ("dma", dma.sram, sram.dma),
            ("kv", append.source, sram.kv),
            ("topk", topk.sram, sram.topk),
            ("noc_out", noc.source, sram.noc_out),
            ("noc_in", noc.target, sram.noc_in),
            ("collective", collective.memory, sram.collective),
            ("sequencer", processor.load, sram.sequencer),
        ):
            client(name, engine_side, sram_side)

        # KV SRAM: weights to the array, streams and appends into it.
        wiring.connect(m, matrix.weights, kv.read)
        wiring.connect(m, append.append, kv.append)
        gates.connect("stream_write", stream.write, kv.stream_write)
        gates.connect("dma_kv_write", dma.kv_write, kv.dma_write)
        m.d.comb += [
            matrix.weights_fault.eq(kv.read_fault),
            matrix.weights_error.eq(kv.read_error),
            append.fault.eq(kv.append_fault),
            processor.load_activity.eq(matrix.load_activity),
            matrix.available.eq(stream.available),
            stream.taken.eq(matrix.taken),
        ]

        # HBM.
        wiring.connect(m, dma.hbm_read, hbm.read[DMA_CHANNEL])
        wiring.connect(m, stream.hbm, hbm.read[STREAM_CHANNEL])
        wiring.connect(m, dma.hbm_write, hbm.write)
        for p in range(config.hbm_ports):
            wiring.connect(m, hbm.axi[p], wiring.flipped(self.axi[p]))

        # Networks.
        wiring.connect(m, noc.network, wiring.flipped(self.noc))
        wiring.connect(m, collective.network, wiring.flipped(self.collective))
        m.d.comb += [
            noc.position.eq(self.position),
            collective.position.eq(self.position),
            processor.post_remote.eq(noc.post),
            processor.network_active.eq(noc.active),
            self.running.eq(processor.running),
        ]
        if config.trace:
            m.d.comb += self.command_trace.eq(processor.trace)

        nan_row = Signal()  # a top-k row was all NaN since the start
        with m.If(processor.start):
            m.d.sync += nan_row.eq(0)
        with m.Elif(topk.nan_row):
            m.d.sync += nan_row.eq(1)
        self._host(m, processor, sram, kv, nan_row, self._kv_register(m, processor, kv))
        return m

    def _kv_register(self, m, processor, kv):
        """The host's view of errors in the KV SRAM, and the bits that its next write flips."""
        access, read = self.access, kv.host_read.response
        value = Signal(66)
        for i, name in enumerate(("corrected", "uncorrectable")):
            counter = SaturatingCounter(self.config.cols)
            m.submodules[f"kv_{name}"] = counter
            m.d.comb += [
                counter.amount.eq(getattr(kv, name)),
                counter.clear.eq(processor.start),
                value[32 * i : 32 * (i + 1)].eq(counter.value),
            ]
        last = Signal(2)  # of the last host read
        with m.If(read.valid):
            m.d.sync += last.eq(Cat(read.payload.corrected, read.payload.double))
        m.d.comb += value[64:].eq(last)
        inject = Signal(kv.inject.shape())
        m.d.comb += kv.inject.eq(inject)
        with m.If(access.valid & access.write & (access.region == Region.REGISTERS)):
            with m.If(access.address == KV_LINE):
                m.d.sync += inject.eq(access.data)
        with m.Elif(kv.host_write.valid & kv.host_write.ready):
            m.d.sync += inject.eq(0)
        return value

    def _host(self, m, processor, sram, kv, nan_row, kv_register):
        """The host's accesses: one at a time, `access_ready` in the cycle in which one is done."""
        access = self.access
        # Which register a read a cycle ago meant: status, counter, semaphore, KV SRAM.
        register = Signal(2)
        register_read, program_read = Signal(), Signal()
        chosen = {region: Signal(name=f"host_{region.name.lower()}") for region in Region}
        for region, signal in chosen.items():
            m.d.comb += signal.eq(access.valid & (access.region == region))
        write = chosen[Region.REGISTERS] & access.write & (access.address == 0)
        m.d.comb += [
            processor.start.eq(write & access.data[0]),
            processor.reset.eq(write & access.data[1]),
            processor.start_pc.eq(access.data[32:64]),
            processor.cycle_limit.eq(access.data[64:96]),
            processor.program_write_en.eq(chosen[Region.PROGRAM] & access.write),
            processor.program_read_en.eq(chosen[Region.PROGRAM] & ~access.write),
            processor.program_addr.eq(access.address),
            processor.program_write_data.eq(access.data),
            processor.counter_index.eq(access.address - COUNTER_LINE),
            sram.host.request.valid.eq(chosen[Region.TILE_SRAM]),
            sram.host.request.payload.address.eq(access.address),
            sram.host.request.payload.write.eq(access.write),
            sram.host.request.payload.data.eq(access.data),
            sram.host.request.payload.scales.eq(access.scale),
            sram.host.request.payload.mask.eq(-1),
            sram.host.request.payload.scale_mask.eq(1),
            kv.host_write.valid.eq(chosen[Region.KV_SRAM] & access.write),
            kv.host_write.payload.address.eq(access.address),
            kv.host_write.payload.data.eq(access.data),
            kv.host_write.payload.scales.eq(access.scale),
            kv.host_write.payload.enable.eq(1),
            kv.host_read.request.valid.eq(chosen[Region.KV_SRAM] & ~access.write),
            kv.host_read.request.payload.eq(access.address),
            kv.host_read.response.ready.eq(1),
        ]
        with m.Switch(access.region):
            with m.Case(Region.TILE_SRAM):
                m.d.comb += self.access_ready.eq(sram.host.request.ready)
            with m.Case(Region.KV_SRAM):
                with m.If(access.write):
                    m.d.comb += self.access_ready.eq(kv.host_write.ready)
                with m.Else():
                    m.d.comb += self.access_ready.eq(kv.host_read.request.ready)
            with m.Default():
                m.d.comb += self.access_ready.eq(1)

        semaphore_id = Signal.like(processor.semaphore_index)
        m.d.sync += [
            register_read.eq(chosen[Region.REGISTERS] & ~access.write),
            program_read.eq(chosen[Region.PROGRAM] & ~access.write),
            register.eq(
                Mux(
                    access.address == KV_LINE,
                    3,
                    (access.address >= COUNTER_LINE) + (access.address >= SEMAPHORE_LINE),
                )
            ),
            semaphore_id.eq(access.address - SEMAPHORE_LINE),
        ]
        m.d.comb += processor.semaphore_index.eq(semaphore_id)
        m.d.comb += self.answer_valid.eq(
            register_read | program_read | sram.host.valid | kv.host_read.response.valid
        )
        answer = self.answer
        with m.If(register_read):
            with m.Switch(register):
                with m.Case(0):
                    m.d.comb += [
                        answer.data[0:8].eq(processor.status),
                        answer.data[8:16].eq(processor.status_engine),
                        answer.data[16:24].eq(processor.status_semaphore),
                        answer.data[31].eq(processor.running),
                        answer.data[32:64].eq(processor.status_pc),
                        answer.data[64:96].eq(processor.cycles),
                        answer.data[96].eq(nan_row),
                    ]
                with m.Case(1):
                    m.d.comb += answer.data.eq(processor.counter_value)
                with m.Case(2):
                    m.d.comb += answer.data.eq(processor.semaphore_value)
                with m.Default():
                    m.d.comb += answer.data.eq(kv_register)
        with m.Elif(program_read):
            m.d.comb += answer.data.eq(processor.program_read_data)
        with m.Elif(sram.host.valid):
            m.d.comb += [
                answer.data.eq(sram.host.response.data),
                answer.scale.eq(sram.host.response.scales),
            ]
        with m.Else():
            m.d.comb += [
                answer.data.eq(kv.host_read.response.payload.data),
                answer.scale.eq(kv.host_read.response.payload.scale),
            ]


class Tile(wiring.Component):
    """A tile. `host` is its host port, `running` is high from start to stop.

    A reset by the host puts everything but the memories into its first state; the networks must be
    quiet then, since what is on its way to or from the tile is lost.
    """

    engines = tuple(Engine)  # that execute commands
    counted = COUNTED  # whose cycles it counts, in the order of the counters
    counter_line = COUNTER_LINE  # line of the host map with the first counter
    kv_line = KV_LINE  # and that with the counts of flipped bits in the KV SRAM

    def __init__(self, config: TileConfig):
        self.config = config
        super().__init__(_ports(config) | {"host": Out(HostPort())})

    @property
    def emit_name(self) -> str:
        c = self.config
        return f"tile_{c.rows}x{c.cols}"

    def elaborate(self, platform):
        m = Module()
        m.submodules.host_adapter = adapter = HostAdapter(self.config)
        core = TileCore(self.config)
        place(m, platform, "core", core, reset=adapter.soft_reset)
        wiring.connect(m, adapter.host, wiring.flipped(self.host))
        for name in _ports(self.config):
            if name in ("position", "stall"):
                m.d.comb += getattr(core, name).eq(getattr(self, name))
            elif name in ("running", "command_trace"):
                m.d.comb += getattr(self, name).eq(getattr(core, name))
            elif name == "axi":
                for p in range(self.config.hbm_ports):
                    wiring.connect(m, core.axi[p], wiring.flipped(self.axi[p]))
            else:
                wiring.connect(m, getattr(core, name), wiring.flipped(getattr(self, name)))
        m.d.comb += [
            core.access.eq(adapter.access),
            adapter.access_ready.eq(core.access_ready),
            adapter.answer.eq(core.answer),
            adapter.answer_valid.eq(core.answer_valid),
        ]
        return m
