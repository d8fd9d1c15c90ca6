# SPDX-License-Identifier: Apache-2.0
"""Collective network: meshes of ports and nodes against the golden model, with skew and stalls."""

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from golden import collective, fp32
from hw.collective_node import CollectiveLocal, CollectiveNode
from hw.collective_port import CollectivePort
from hw.config import TileConfig, preset
from hw.isa import COLLECTIVE, CollectiveOp, Scope, Status
from hw.mesh import connect_mesh
from hw.noc_flit import POSITION
from hw.ports import EngineControl, SramClient
from hw.verilog import emit
from tests.flat_bench import FlatBench
from tests.noc_bench import LINE_MASK, CommandDriver, MemoryModel, run_cycles
from tests.simulators import BOTH, cases

CONFIG = preset("tiny").tile
LINES = CONFIG.sram_lines
OPERANDS = [(op.name, op.width) for op in COLLECTIVE.operands]
SPECIAL = np.array(
    [
        0x00000000,
        0x80000000,
        0x3F800000,
        0xBF800000,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x7F800001,
        0xFFC12345,
        0x00000001,
        0x80000001,
        0x007FFFFF,
        0x00800000,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x33800000,
    ],
    np.uint32,
)


class Mesh(wiring.Component):
    """A mesh of collective ports; tile t is at x = t mod mesh_x."""

    def __init__(self, config: TileConfig, mesh_x: int, mesh_y: int):
        self.config, self.mesh_x, self.mesh_y = config, mesh_x, mesh_y
        tiles = mesh_x * mesh_y
        super().__init__(
            {
                "control": Out(EngineControl(COLLECTIVE)).array(tiles),
                "memory": Out(SramClient(1)).array(tiles),
            }
        )

    def elaborate(self, platform):
        m = Module()
        points = connect_mesh(m, platform, self.mesh_x, self.mesh_y)
        for t in range(self.mesh_x * self.mesh_y):
            point = points[t // self.mesh_x][t % self.mesh_x]
            m.submodules[f"port{t}"] = port = CollectivePort(self.config)
            connect(m, port.network, point.collective)
            connect(m, port.control, flipped(self.control[t]))
            connect(m, port.memory, flipped(self.memory[t]))
            for field, value in point.position.items():
                m.d.comb += port.position[field].eq(value)
        return m


class Bench:
    def __init__(self, mesh_x: int, mesh_y: int, seed: int, rate: float = 1.0, starts: float = 1.0):
        self.rng = np.random.default_rng(seed)
        self.mesh_x, self.mesh_y, self.tiles = mesh_x, mesh_y, mesh_x * mesh_y
        self.bench = FlatBench(Mesh(CONFIG, mesh_x, mesh_y))
        self.memories = [
            MemoryModel(self.bench, [f"memory__{t}"], LINES, self.rng, rate)
            for t in range(self.tiles)
        ]
        self.drivers = [
            CommandDriver(self.bench, f"control__{t}", OPERANDS, self.rng, starts)
            for t in range(self.tiles)
        ]

    def run(self, limit: int) -> None:
        self.bench.run(
            lambda b: run_cycles(
                b, [*self.memories, *self.drivers], lambda: all(d.idle for d in self.drivers), limit
            )
        )

    def read(self, t: int, line: int, lines: int) -> np.ndarray:
        words = [self.memories[t].lines[line + i] & LINE_MASK for i in range(lines)]
        return np.array([w >> 32 * k & 0xFFFFFFFF for w in words for k in range(4)], np.uint32)

    def write(self, t: int, line: int, values: np.ndarray) -> None:
        for i, four in enumerate(values.reshape(-1, 4)):
            scale = self.memories[t].lines[line + i] & ~LINE_MASK
            self.memories[t].lines[line + i] = scale | sum(
                int(v) << 32 * k for k, v in enumerate(four)
            )


def values(rng: np.random.Generator, count: int) -> np.ndarray:
    """Bit patterns: close in size so that sums round, any at all, and special ones."""
    near = fp32.bits(
        rng.normal(size=count).astype(np.float32)
        * np.float32(2.0) ** rng.integers(-12, 12, count).astype(np.float32)
    )
    wild = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    kind = rng.random(count)
    return np.where(kind < 0.6, near, np.where(kind < 0.8, wild, rng.choice(SPECIAL, count)))


def golden(parts: np.ndarray, op: CollectiveOp, scope: Scope, root: int) -> np.ndarray:
    x, name = fp32.from_bits(parts), scope.name.lower()
    if op is CollectiveOp.BROADCAST:
        return fp32.bits(collective.broadcast(x, root, name))
    if op is CollectiveOp.ALLREDUCE_SUM:
        return fp32.bits(collective.allreduce_sum(x, name))
    return fp32.bits(collective.allreduce_max(x, name))


def members(scope: Scope, mesh_x: int, mesh_y: int) -> int:
    return {Scope.MESH: mesh_x * mesh_y, Scope.ROW: mesh_x, Scope.COLUMN: mesh_y}[scope]


def check(mesh_x: int, mesh_y: int, operations: list, seed: int, rate: float, starts: float):
    """Runs (op, scope, lines) back to back on every tile and compares all results and scales."""
    print("seed", seed)
    bench = Bench(mesh_x, mesh_y, seed, rate, starts)
    rng = bench.rng
    line = 0
    expected = []
    for number, (op, scope, lines) in enumerate(operations):
        root = int(rng.integers(members(scope, mesh_x, mesh_y)))
        source = line
        line += lines
        target = source if number % 3 == 2 else line  # every third one in place
        line += lines
        parts = np.stack([values(rng, 4 * lines) for _ in range(bench.tiles)])
        results = golden(parts.reshape(mesh_y, mesh_x, -1), op, scope, root)
        for t in range(bench.tiles):
            bench.write(t, source, parts[t])
            bench.drivers[t].waiting.append(
                {
                    "src_addr": 16 * source,
                    "dst_addr": 16 * target,
                    "lines": lines,
                    "op": op,
                    "scope": scope,
                    "root": root,
                }
            )
        expected.append((target, lines, results.reshape(bench.tiles, -1)))
    before = [list(m.lines) for m in bench.memories]
    bench.run(400 * len(operations) + 40 * sum(n for _, _, n in operations))
    touched = set()
    for target, lines, results in expected:
        for t in range(bench.tiles):
            np.testing.assert_array_equal(bench.read(t, target, lines), results[t])
        touched |= set(range(target, target + lines))
    for t in range(bench.tiles):
        assert bench.drivers[t].done == [Status.RUNNING] * len(operations)
        for i in range(LINES):  # scales and all other lines stay
            now, then = bench.memories[t].lines[i], before[t][i]
            assert now >> 128 == then >> 128 and (i in touched or now == then)


ALL = [(op, scope) for op in CollectiveOp for scope in Scope]


@cases(
    "mesh, rate, starts",
    amaranth=[
        ((2, 2), 1.0, 1.0),
        ((3, 2), 0.5, 0.05),
        ((1, 3), 0.7, 0.2),
        ((3, 1), 1.0, 0.1),
        ((1, 1), 0.5, 1.0),
        pytest.param((3, 2), 1.0, 1.0, marks=pytest.mark.slow),
        pytest.param((2, 2), 0.4, 0.05, marks=pytest.mark.slow),
    ],
    verilator=[
        ((2, 2), 1.0, 1.0),
        ((2, 2), 0.4, 0.05),
        pytest.param((3, 2), 0.5, 0.05, marks=pytest.mark.slow),
        pytest.param((1, 3), 0.7, 0.2, marks=pytest.mark.slow),
    ],
)
def test_all_operations_back_to_back(simulator, mesh, rate, starts):
    seed = int(np.random.default_rng().integers(1 << 32))
    rng = np.random.default_rng(seed)
    operations = [(*ALL[i], int(rng.choice([1, 2, 3, 9]))) for i in rng.permutation(len(ALL))]
    check(*mesh, operations, seed, rate, starts)


@pytest.mark.slow
def test_4x4_sum_and_broadcast():
    seed = int(np.random.default_rng().integers(1 << 32))
    check(
        4,
        4,
        [(CollectiveOp.ALLREDUCE_SUM, Scope.MESH, 2), (CollectiveOp.BROADCAST, Scope.COLUMN, 1)],
        seed,
        0.8,
        0.2,
    )


@pytest.mark.slow
def test_4x4_all_operations():
    seed = int(np.random.default_rng().integers(1 << 32))
    rng = np.random.default_rng(seed)
    check(
        4,
        4,
        [(*ALL[i], int(rng.choice([1, 4, 9]))) for i in rng.permutation(len(ALL))],
        seed,
        0.6,
        0.1,
    )


def test_a_line_takes_two_cycles_of_the_sram():
    bench = Bench(2, 1, 0)
    for driver in bench.drivers:
        driver.waiting.append(
            {
                "src_addr": 0,
                "dst_addr": 0,
                "lines": 100,
                "op": CollectiveOp.ALLREDUCE_SUM,
                "scope": Scope.MESH,
            }
        )
    bench.run(300)
    assert max(d.cycles[0] for d in bench.drivers) < 2 * 100 + 30


WRONG = [
    {"op": 3},
    {"scope": 3},
    {"lines": 0},
    {"src_addr": 8},
    {"dst_addr": 1},
    {"op": CollectiveOp.BROADCAST, "root": 4},
    {"op": CollectiveOp.BROADCAST, "root": 255},
    {"op": CollectiveOp.BROADCAST, "scope": Scope.ROW, "root": 2},
    {"op": CollectiveOp.BROADCAST, "scope": Scope.COLUMN, "root": 2},
]


@BOTH
def test_illegal_commands():
    bench = Bench(2, 2, 3)
    good = {
        "src_addr": 0,
        "dst_addr": 64,
        "lines": 2,
        "op": CollectiveOp.ALLREDUCE_SUM,
        "scope": Scope.MESH,
        "root": 0,
    }
    parts = np.stack([bench.read(t, 0, 2) for t in range(4)])
    for driver in bench.drivers:
        driver.waiting += [*(good | wrong for wrong in WRONG), good]
    bench.run(400)
    want = golden(parts.reshape(2, 2, -1), CollectiveOp.ALLREDUCE_SUM, Scope.MESH, 0)
    for t, driver in enumerate(bench.drivers):
        assert driver.done == [Status.ILLEGAL_COMMAND] * len(WRONG) + [Status.RUNNING]
        np.testing.assert_array_equal(bench.read(t, 4, 2), want.reshape(4, -1)[t])


@BOTH
def test_bad_ranges_do_not_hang_the_others():
    """Tile 1 reads beyond the end, then writes beyond it: zeros are added, results dropped."""
    bench = Bench(2, 2, 4)
    lines = 3
    parts = np.stack([values(bench.rng, 4 * lines) for _ in range(4)])
    for t in range(4):
        bench.write(t, 0, parts[t])
        good = {
            "src_addr": 0,
            "dst_addr": 16 * 8,
            "lines": lines,
            "op": CollectiveOp.ALLREDUCE_SUM,
            "scope": Scope.MESH,
        }
        bench.drivers[t].waiting += [
            good | ({"src_addr": 16 * (LINES - 2)} if t == 1 else {}),
            good | {"dst_addr": 16 * (LINES - 2) if t == 1 else 16 * 16},
            good | {"dst_addr": (1 << 32) - 16 if t == 1 else 16 * 24},
        ]
    bench.run(800)
    with_zeros = parts.copy()
    with_zeros[1] = 0
    first = golden(with_zeros.reshape(2, 2, -1), CollectiveOp.ALLREDUCE_SUM, Scope.MESH, 0)
    second = golden(parts.reshape(2, 2, -1), CollectiveOp.ALLREDUCE_SUM, Scope.MESH, 0)
    for t, driver in enumerate(bench.drivers):
        assert driver.done == [Status.ADDRESS_RANGE if t == 1 else Status.RUNNING] * 3
        np.testing.assert_array_equal(bench.read(t, 8, lines), first.reshape(4, -1)[t])
        if t != 1:
            np.testing.assert_array_equal(bench.read(t, 16, lines), second.reshape(4, -1)[t])
            np.testing.assert_array_equal(bench.read(t, 24, lines), second.reshape(4, -1)[t])


class Single(wiring.Component):
    """One node alone, for its throughput."""

    position: In(POSITION)
    local: In(CollectiveLocal())

    def elaborate(self, platform):
        m = Module()
        m.submodules.node = node = CollectiveNode()
        connect(m, flipped(self.local), node.local)
        m.d.comb += node.position.eq(self.position)
        return m


@BOTH
def test_a_node_takes_a_line_per_cycle():
    bench = FlatBench(Single())
    bench.drive["position"] = 1 << 8 | 1 << 13  # (0, 0) in a mesh of 1 x 1
    seen = []

    async def run(b):
        b.drive["local__result__ready"] = 1
        b.drive["local__contribution__valid"] = 1
        for i in range(50):
            b.drive["local__contribution__payload"] = i
            b.settle()
            assert b["local__contribution__ready"]
            if b["local__result__valid"]:
                seen.append(b["local__result__payload"])
            await b.tick()

    bench.run(run)
    assert len(seen) >= 40 and seen == list(range(len(seen)))


def test_golden_order_and_checks():
    big = np.float32(2.0) ** 24
    parts = np.array([[[big], [1.0], [1.0]], [[-big], [0.5], [0.25]]], np.float32)
    # Row 0: (2^24 + 1) + 1 = 2^24; row 1: (-2^24 + 0.5) + 0.25, exact halves lost one by one.
    row0 = np.float32(np.float32(big + np.float32(1)) + np.float32(1))
    row1 = np.float32(np.float32(-big + np.float32(0.5)) + np.float32(0.25))
    sums = collective.allreduce_sum(parts)
    assert sums.shape == parts.shape and (sums == row0 + row1).all()
    assert (collective.allreduce_sum(parts, "row")[:, :, 0] == [[row0] * 3, [row1] * 3]).all()
    assert (collective.allreduce_max(parts, "column")[1, :, 0] == [big, 1.0, 1.0]).all()
    assert (collective.broadcast(parts, 4)[:, :, 0] == 0.5).all()
    with pytest.raises(ValueError, match="root must be"):
        collective.broadcast(parts, 3, "row")
    with pytest.raises(ValueError, match="scope must be"):
        collective.allreduce_sum(parts, "diagonal")
    with pytest.raises(ValueError, match="parts must have"):
        collective.allreduce_sum(parts[0])


def test_verilog_shares_nodes_and_routers():
    files = emit(Mesh(CONFIG, 2, 2), "mesh")
    assert {"noc_router_4.v", "collective_node.v", "collective_combine.v"} <= set(files)
    assert files["mesh.v"].count("collective_node ") == 4
    assert files["mesh.v"].count("noc_router_4 ") == 4
