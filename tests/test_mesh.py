# SPDX-License-Identifier: Apache-2.0
"""Meshes of routers and ports: random SENDs, all to all, semaphores behind data, bad targets."""

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import Out, connect, flipped

from hw.config import TileConfig, preset
from hw.isa import SEMAPHORES, SEND, Status
from hw.mesh import connect_mesh
from hw.noc_port import NocPort
from hw.ports import EngineControl, SramClient
from hw.semaphores import FIRST_REMOTE, POST_ONE
from tests.flat_bench import FlatBench
from tests.noc_bench import CommandDriver, MemoryModel, run_cycles
from tests.simulators import BOTH, cases

CONFIG = preset("tiny").tile
LINES = CONFIG.sram_lines
OPERANDS = [(op.name, op.width) for op in SEND.operands]


class Mesh(wiring.Component):
    """A mesh of network ports; tile t is at x = t mod mesh_x."""

    def __init__(self, config: TileConfig, mesh_x: int, mesh_y: int):
        self.config, self.mesh_x, self.mesh_y = config, mesh_x, mesh_y
        tiles = mesh_x * mesh_y
        super().__init__(
            {
                "control": Out(EngineControl(SEND)).array(tiles),
                "source": Out(SramClient(1)).array(tiles),
                "target": Out(SramClient(1)).array(tiles),
                "post": Out(POST_ONE).array(tiles),
                "active": Out(tiles),
            }
        )

    def elaborate(self, platform):
        m = Module()
        points = connect_mesh(m, platform, self.mesh_x, self.mesh_y)
        for t in range(self.mesh_x * self.mesh_y):
            point = points[t // self.mesh_x][t % self.mesh_x]
            m.submodules[f"port{t}"] = port = NocPort(self.config)
            connect(m, port.network, point.noc)
            connect(m, port.control, flipped(self.control[t]))
            connect(m, port.source, flipped(self.source[t]))
            connect(m, port.target, flipped(self.target[t]))
            m.d.comb += [self.post[t].eq(port.post), self.active[t].eq(port.active)]
            for field, value in point.position.items():
                m.d.comb += port.position[field].eq(value)
        return m


class Bench:
    def __init__(self, mesh_x: int, mesh_y: int, seed: int, rate: float):
        self.rng = np.random.default_rng(seed)
        self.mesh_x, self.mesh_y, self.tiles = mesh_x, mesh_y, mesh_x * mesh_y
        self.bench = FlatBench(Mesh(CONFIG, mesh_x, mesh_y))
        self.memories = [
            MemoryModel(self.bench, [f"source__{t}", f"target__{t}"], LINES, self.rng, rate)
            for t in range(self.tiles)
        ]
        self.drivers = [
            CommandDriver(self.bench, f"control__{t}", OPERANDS, self.rng, rate)
            for t in range(self.tiles)
        ]
        self.posts: list[list[int]] = [[] for _ in range(self.tiles)]
        self.on_post = lambda tile, semaphore: None

    def drive(self) -> None:
        pass

    def sample(self) -> None:
        for t in range(self.tiles):
            post = self.bench[f"post__{t}"]
            if post >> 5:
                self.posts[t].append(post & 31)
                self.on_post(t, post & 31)

    def run(self, limit: int) -> None:
        async def run(b):
            await run_cycles(
                b,
                [*self.memories, *self.drivers, self],
                lambda: all(d.idle for d in self.drivers),
                limit,
            )
            b.settle()
            assert b["active"] == 0

        self.bench.run(run)


@cases(
    "mesh, rate",
    amaranth=[
        ((2, 2), 1.0),
        ((2, 2), 0.5),
        ((4, 1), 0.7),
        ((1, 1), 1.0),
        pytest.param((3, 3), 0.6, marks=pytest.mark.slow),
        pytest.param((3, 3), 1.0, marks=pytest.mark.slow),
        pytest.param((4, 4), 0.6, marks=pytest.mark.slow),
    ],
    verilator=[
        ((2, 2), 1.0),
        ((2, 2), 0.5),
        pytest.param((3, 3), 0.6, marks=pytest.mark.slow),
        pytest.param((4, 4), 0.6, marks=pytest.mark.slow),
    ],
)
def test_random_sends(simulator, mesh, rate):
    """Every tile sends to all, itself too, some of it wrong; memories end up as the model's."""
    seed = int(np.random.default_rng().integers(1 << 32))
    print("seed", seed)
    bench = Bench(*mesh, seed, rate)
    rng, tiles = bench.rng, bench.tiles
    model = [list(m.lines) for m in bench.memories]
    errors: list[list[Status]] = [[] for _ in range(tiles)]
    waiting_for: dict[tuple[int, int], list] = {}  # (tile, semaphore): what a post must follow
    posted = [0] * tiles
    region = 60  # lines of each sender at each target; sources lie behind all regions
    for s in range(tiles):
        for target in [*rng.permutation(tiles), None]:
            lines, rows = int(rng.choice([1, 3, 16, 21])), int(rng.choice([1, 2]))
            base = region * s
            semaphore = FIRST_REMOTE + s % (SEMAPHORES - FIRST_REMOTE)
            command = {
                "lines": lines,
                "rows": rows,
                "src_stride": lines,
                "dst_stride": lines + 3,
                "src_addr": 16 * (2000 + int(rng.integers(1000))),
                "dst_addr": 16 * base,
                "semaphore": semaphore,
                "post": 1,
            }
            if target is None:
                kind = int(rng.integers(3))
                if kind == 0:
                    command |= {"x": bench.mesh_x, "y": 0}
                    errors[s].append(Status.NO_DESTINATION)
                elif kind == 1:
                    command |= {"x": 0, "y": 200}
                    errors[s].append(Status.NO_DESTINATION)
                else:
                    command |= {"x": 0, "y": 0, "dst_addr": 16 * LINES}
                    errors[s].append(Status.ADDRESS_RANGE)
                bench.drivers[s].waiting.append(command)
                continue
            target = int(target)
            command |= {"x": target % bench.mesh_x, "y": target // bench.mesh_x}
            check = []
            for row in range(rows):
                for i in range(lines):
                    word = model[s][command["src_addr"] // 16 + row * lines + i]
                    address = base + row * (lines + 3) + i
                    model[target][address] = word
                    check.append((address, word))
            waiting_for[target, s] = check
            posted[target] += 1
            errors[s].append(Status.RUNNING)
            bench.drivers[s].waiting.append(command)

    seen = [set() for _ in range(tiles)]

    def on_post(tile: int, semaphore: int) -> None:
        # Senders s and s + 8 share a semaphore: it must be one whose data has arrived completely.
        candidates = [
            s
            for s in range(tiles)
            if s not in seen[tile] and FIRST_REMOTE + s % (SEMAPHORES - FIRST_REMOTE) == semaphore
        ]
        ready = [
            s
            for s in candidates
            if all(bench.memories[tile].lines[a] == w for a, w in waiting_for[tile, s])
        ]
        assert ready, "a semaphore came before its data"
        seen[tile].add(ready[0])

    bench.on_post = on_post
    bench.run(20_000)
    assert [d.done for d in bench.drivers] == errors
    assert [len(p) for p in bench.posts] == posted == [tiles] * tiles
    assert [m.lines for m in bench.memories] == model


@BOTH
@pytest.mark.slow
def test_all_to_all_of_long_rows():
    """Heavy load on every link in both channels; ends, and no slower than the busiest link says."""
    bench = Bench(3, 3, 11, 1.0)
    lines = 48
    model = [list(m.lines) for m in bench.memories]
    for s in range(9):
        for k in range(9):
            t = (s + k) % 9
            bench.drivers[s].waiting.append(
                {
                    "x": t % 3,
                    "y": t // 3,
                    "src_addr": 16 * 1000,
                    "dst_addr": 16 * lines * s,
                    "lines": lines,
                    "rows": 1,
                }
            )
            model[t][lines * s : lines * (s + 1)] = model[s][1000 : 1000 + lines]
    bench.run(9 * 51 * 3)  # an ideal network needs 9 x 51 cycles at each tile's link
    assert [m.lines for m in bench.memories] == model


def test_round_trip():
    """One line, there and back: 2 cycles per router each way and a fixed cost at the ends."""
    bench = Bench(4, 1, 0, 1.0)
    driver, memories = bench.drivers[0], bench.memories
    starts = []

    async def run(b):
        for target in range(4):
            starts.append(b.cycle)
            driver.waiting.append({"x": target, "lines": 1, "rows": 1})
            await run_cycles(b, [*memories, *bench.drivers], lambda: driver.idle, 100)

    bench.bench.run(run)
    for target, (start, end) in enumerate(zip(starts, driver.cycles, strict=True)):
        assert end - start <= 2 * 2 * (target + 1) + 14


def test_parameters():
    with pytest.raises(ValueError, match="mesh_x must be"):
        connect_mesh(Module(), None, 0, 1)
    with pytest.raises(ValueError, match="mesh_y must be"):
        connect_mesh(Module(), None, 1, 17)
