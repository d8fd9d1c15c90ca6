# SPDX-License-Identifier: Apache-2.0
"""A chip: a mesh of tiles on the shared network-on-chip and the collective network."""

from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.config import ChipConfig
from hw.emit import place
from hw.mesh import connect_mesh
from hw.ports import Axi4, HostPort
from hw.stall_gate import STALL
from hw.tile import Tile
from hw.trace import TRACE


class Chip(wiring.Component):
    """Tile i = y * mesh_x + x has host port `host[i]` and HBM ports `axi[i * hbm_ports ...]`.

    `running[i]` is high while tile i runs its program. `command_trace[i]` is there when the tiles
    have it.
    """

    def __init__(self, config: ChipConfig):
        self.config = config
        self.counted, self.counter_line = Tile.counted, Tile.counter_line  # of every tile
        tile = config.tile
        super().__init__(
            {
                "host": Out(HostPort()).array(config.tiles),
                "axi": Out(Axi4(tile.hbm_port_bytes)).array(config.tiles * tile.hbm_ports),
                "running": Out(config.tiles),
            }
            | ({"stall": In(STALL)} if tile.stall_gates else {})
            | ({"command_trace": Out(TRACE).array(config.tiles)} if tile.trace else {})
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        points = connect_mesh(m, platform, config.mesh_x, config.mesh_y)
        for y in range(config.mesh_y):
            for x in range(config.mesh_x):
                i, point = y * config.mesh_x + x, points[y][x]
                tile = Tile(config.tile)
                place(m, platform, f"tile_{x}_{y}", tile)
                for field, value in point.position.items():
                    m.d.comb += tile.position[field].eq(value)
                wiring.connect(m, tile.noc, point.noc)
                wiring.connect(m, tile.collective, point.collective)
                wiring.connect(m, tile.host, wiring.flipped(self.host[i]))
                for p in range(config.tile.hbm_ports):
                    wiring.connect(
                        m, tile.axi[p], wiring.flipped(self.axi[i * config.tile.hbm_ports + p])
                    )
                m.d.comb += self.running[i].eq(tile.running)
                if config.tile.trace:
                    m.d.comb += self.command_trace[i].eq(tile.command_trace)
                if config.tile.stall_gates:
                    m.d.comb += [
                        tile.stall.probability.eq(self.stall.probability),
                        tile.stall.seed.eq(self.stall.seed ^ (i * 0x9E3779B9 & 0xFFFFFFFF)),
                    ]
        return m
