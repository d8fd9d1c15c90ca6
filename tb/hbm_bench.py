# SPDX-License-Identifier: Apache-2.0
"""The DMA engine and the weight stream on an HBM port, without the rest of a tile."""

from amaranth import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.config import TileConfig
from hw.dma import Dma
from hw.hbm_channel import line_write
from hw.hbm_port import HbmPort
from hw.isa import DMA, STREAM
from hw.ports import Axi4, EngineControl, SramClient
from hw.weight_stream import WeightStream

DMA_CHANNEL, STREAM_CHANNEL = 0, 1


class HbmBench(wiring.Component):
    """The ports of the three blocks that lead elsewhere, under the blocks' own names."""

    def __init__(self, config: TileConfig):
        self.dma, self.stream = Dma(config), WeightStream(config)
        self.port = HbmPort(config)
        lines = self.port.lines
        super().__init__(
            {
                "axi": Out(Axi4(config.hbm_port_bytes)).array(config.hbm_ports),
                "dma_control": Out(EngineControl(DMA)),
                "stream_control": Out(EngineControl(STREAM)),
                "sram": Out(SramClient(lines)),
                "kv_write": Out(stream.Signature(line_write(lines))),
                "stream_write": Out(stream.Signature(line_write(lines))),
                "available": Out(range(config.stream_rows + 1)),
                "taken": In(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.dma = dma = self.dma
        m.submodules.stream = weights = self.stream
        m.submodules.port = port = self.port
        wiring.connect(m, dma.hbm_read, port.read[DMA_CHANNEL])
        wiring.connect(m, dma.hbm_write, port.write)
        wiring.connect(m, weights.hbm, port.read[STREAM_CHANNEL])
        for inner, outer in (
            (dma.control, self.dma_control),
            (weights.control, self.stream_control),
            (dma.sram, self.sram),
            (dma.kv_write, self.kv_write),
            (weights.write, self.stream_write),
            *zip(port.axi, self.axi, strict=True),
        ):
            wiring.connect(m, inner, wiring.flipped(outer))
        m.d.comb += [self.available.eq(weights.available), weights.taken.eq(self.taken)]
        return m
