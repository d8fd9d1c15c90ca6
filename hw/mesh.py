# SPDX-License-Identifier: Apache-2.0
"""The chip's networks: routers and collective nodes in a mesh, and their links."""

from dataclasses import dataclass
from typing import Any

from amaranth import Module
from amaranth.lib import wiring

from hw.collective_node import CollectiveNode
from hw.emit import place
from hw.router import Router


@dataclass(frozen=True)
class MeshPoint:
    """What a tile at (x, y) is connected to.

    `position` is the constant for the tile's `position` input, `noc` goes to its `NocPort.network`
    and `collective` to its `CollectivePort.network`, by `amaranth.lib.wiring.connect`.
    """

    position: dict[str, int]
    noc: Any
    collective: Any


def connect_mesh(m: Module, platform: Any, mesh_x: int, mesh_y: int) -> list[list[MeshPoint]]:
    """Put the routers and collective nodes of a mesh into `m` and join neighbours; result [y][x].

    Links at the edges stay unconnected: XY routing and the nodes, who know their position, do not
    use them.
    """
    for name, value in (("mesh_x", mesh_x), ("mesh_y", mesh_y)):
        if not isinstance(value, int) or not 1 <= value <= 16:
            raise ValueError(f"{name} must be from 1 to 16, not {value!r}")
    routers = [[Router() for _ in range(mesh_x)] for _ in range(mesh_y)]
    nodes = [[CollectiveNode() for _ in range(mesh_x)] for _ in range(mesh_y)]
    points: list[list[MeshPoint]] = []
    for y in range(mesh_y):
        points.append([])
        for x in range(mesh_x):
            router, node = routers[y][x], nodes[y][x]
            place(m, platform, f"router_{x}_{y}", router)
            place(m, platform, f"node_{x}_{y}", node)
            position = {"x": x, "y": y, "mesh_x": mesh_x, "mesh_y": mesh_y}
            for field, value in position.items():
                m.d.comb += [router.position[field].eq(value), node.position[field].eq(value)]
            points[y].append(MeshPoint(position, router.local, node.local))
            if x:
                _join(m, routers[y][x - 1].east, router.west)
                wiring.connect(m, nodes[y][x - 1].reduce_east, node.reduce_west)
                wiring.connect(m, node.result_west, nodes[y][x - 1].result_east)
            if y:
                _join(m, routers[y - 1][x].south, router.north)
                wiring.connect(m, nodes[y - 1][x].reduce_south, node.reduce_north)
                wiring.connect(m, node.result_north, nodes[y - 1][x].result_south)
    return points


def _join(m: Module, a: Any, b: Any) -> None:
    """Connect two ends of a link: what one sends the other receives."""
    wiring.connect(m, a.tx, b.rx)
    wiring.connect(m, b.tx, a.rx)
