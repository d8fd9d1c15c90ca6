# SPDX-License-Identifier: Apache-2.0
"""The weight loader by itself: a swap never passes a row whose weights are not there."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from amaranth import Module, ResetInserter
from amaranth.lib import wiring
from amaranth.lib.wiring import In
from amaranth.sim import Simulator

from golden.formats import Format, group_elements
from hw.array import MatmulArray
from hw.config import PRESETS, TileConfig
from hw.isa import MATMUL, Activity, operand_layout
from hw.kv_sram import KvSram
from hw.matrix_job import PairDecoder
from hw.slice_issuer import ISSUE_LATENCY
from hw.weight_loader import WeightLoader

FORMATS = [f for f in Format if f is not Format.FP32]


def config(rows: int) -> TileConfig:
    return replace(PRESETS["tiny"].tile, rows=rows, sram_banks=4 * rows)


class Bench(wiring.Component):
    """The loader as the engine has it, with its reset; `command` is that of a job."""

    def __init__(self, tile: TileConfig):
        self.loader = WeightLoader(
            tile, ISSUE_LATENCY - KvSram.READ_LATENCY - WeightLoader.CHOICE_LATENCY
        )
        super().__init__({"command": In(operand_layout(MATMUL)), "reset": In(1)})

    def elaborate(self, platform):
        m = Module()
        loader, pair = self.loader, PairDecoder()
        m.submodules.loader, m.submodules.pair = ResetInserter(self.reset)(loader), pair
        m.d.comb += [
            loader.job.payload.command.eq(self.command),
            pair.act_format.eq(self.command.act_format),
            pair.weight_format.eq(self.command.weight_format),
            loader.job.payload.pair.eq(pair.pair),
        ]
        return m


@dataclass(frozen=True)
class Job:
    """What the loader needs of a MATMUL; `gap`: cycles before it comes, behind the one before."""

    n: int
    k: int
    weight: Format
    act: Format = Format.BF16
    stream: bool = False
    paged: bool = False
    gap: int = 0

    def command(self) -> dict[str, int]:
        block = {"paged": 1, "page_k": 1, "block_log2": 5} if self.paged else {}
        return block | {
            "m": 1,
            "n": self.n,
            "k": self.k,
            "weight_gstride": 1,
            "weight_nstride": -(-self.k // group_elements(self.weight)),
            "act_format": int(self.act),
            "weight_format": int(self.weight),
            "stream": int(self.stream),
        }

    def tiles(self, tile: TileConfig) -> Iterator[list[tuple[int, int, int]]]:
        """The rows of each weight tile: row, its elements, columns."""
        group = group_elements(self.weight)
        for column in range(0, self.n, tile.cols):
            for start in range(0, self.k, group * tile.rows):
                left = min(self.k - start, group * tile.rows)
                yield [
                    (r, min(group, left - r * group), min(tile.cols, self.n - column))
                    for r in range(-(-left // group))
                ]


@dataclass
class Run:
    """Cycles in which rows were chosen and tiles swapped.

    `loads`: cycle, row, elements, columns. `activity` is that of each cycle.
    """

    loads: list[tuple[int, int, int, int]] = field(default_factory=list)
    swaps: list[int] = field(default_factory=list)
    activity: list[Activity] = field(default_factory=list)

    def lost(self) -> int:
        """Cycles between the first row and the last that load none."""
        first, last = self.loads[0][0], self.loads[-1][0]
        return last - first + 1 - len(self.loads)


def simulate(
    tile: TileConfig, jobs: list[Job], slices, grant, arrival, limit=20_000, broken_off=0
) -> Run:
    """Runs jobs; slices(): cycles from a swap to the next at least, grant(): whether a swap that
    may be is issued in this cycle, arrival(): stream rows that come in it, broken_off: cycles of a
    long job which a reset ends before `jobs` begin.
    """
    bench, run = Bench(tile), Run()
    loader = bench.loader
    wanted = sum(len(list(job.tiles(tile))) for job in jobs)

    async def drive(ctx):
        sent, gap, available, queue, hold = 0, jobs[0].gap, 0, 0, 0
        ctx.set(loader.tile.ready, 1)
        if broken_off:
            ctx.set(bench.command, Job(8 * tile.cols, 64 * tile.rows, Format.BF16).command())
            ctx.set(loader.job.valid, 1)
            for _ in range(broken_off):
                swap = bool(ctx.get(loader.swap_ready) and hold == 0 and grant())
                ctx.set(loader.swap, swap)
                hold = slices() - 1 if swap else max(0, hold - 1)
                await ctx.tick()
            ctx.set(loader.swap, 0)
            ctx.set(bench.reset, 1)
            await ctx.tick()
            ctx.set(bench.reset, 0)
            hold = 0
        for t in range(limit):
            offered = sent < len(jobs) and gap == 0
            ctx.set(loader.job.valid, offered)
            if offered:
                ctx.set(bench.command, jobs[sent].command())
            # The queue of tiles in the engine holds one more than are described ahead of a swap.
            may = ctx.get(loader.swap_ready) and queue > 0 and hold == 0
            swap = bool(may and grant())
            ctx.set(loader.swap, swap)
            ctx.set(loader.available, available)
            pushed = ctx.get(loader.tile.valid)
            if swap:
                run.swaps.append(t)
            if ctx.get(loader.command.valid):
                meta = loader.meta.from_bits(ctx.get(loader.command.meta))
                columns = ctx.get(loader.command.columns)
                chosen = t - WeightLoader.CHOICE_LATENCY
                run.loads.append((chosen, meta.row, meta.length, columns))
            run.activity.append(Activity(ctx.get(loader.activity)))
            taken, done = ctx.get(loader.taken), ctx.get(loader.job.ready)
            queue += bool(pushed) - swap
            hold = slices() - 1 if swap else max(0, hold - 1)
            gap = max(0, gap - 1)
            if offered and done:
                sent += 1
                gap = jobs[sent].gap if sent < len(jobs) else 0
            await ctx.tick()
            available += min(arrival(), tile.stream_rows - available) - taken
            # The rest of what the last swap was promised comes yet.
            if len(run.swaps) == wanted and t >= run.swaps[-1] + 5 * tile.rows:
                break

    simulator = Simulator(bench)
    simulator.add_clock(1e-9)
    simulator.add_testbench(drive)
    simulator.run()
    assert len(run.swaps) == wanted, "the loader hangs"
    return run


def check(tile: TileConfig, jobs: list[Job], run: Run) -> None:
    """Every row is loaded once for each tile, behind the swap before and in time for its own."""
    tiles = [rows for job in jobs for rows in job.tiles(tile)]
    of_row = [
        [(i, row) for i, rows in enumerate(tiles) for row in rows if row[0] == r]
        for r in range(tile.rows)
    ]
    for r, expected in enumerate(of_row):
        loads = [load for load in run.loads if load[1] == r]
        assert [load[1:] for load in loads] == [row for _, row in expected]
        for (chosen, *_), (i, _) in zip(loads, expected, strict=True):
            arrives = chosen + WeightLoader.CHOICE_LATENCY + KvSram.READ_LATENCY
            before = run.swaps[i - 1] + ISSUE_LATENCY if i else -(10**6)
            swap = run.swaps[i] + ISSUE_LATENCY
            assert arrives - before >= MatmulArray.load_after_swap(r), (i, r)
            assert swap - arrives >= MatmulArray.swap_after_load(r), (i, r)


@pytest.mark.parametrize("rows", [2, 8])
def test_one_activation_row_keeps_the_load_port_busy(rows):
    """From the first row of weights to the last, with tiles that wait for nothing else."""
    tile = config(rows)
    jobs = [Job(4 * tile.cols, 8 * 8 * rows, Format.BF16)]
    run = simulate(tile, jobs, lambda: 4 if rows > 4 else 1, lambda: True, lambda: 0)
    check(tile, jobs, run)
    assert len(run.loads) == 32 * rows
    # The last tile's rows become free every ROW_HOP cycles, when no other is left to load.
    assert run.lost() <= rows - 1


def random_jobs(rng: np.random.Generator, tile: TileConfig, count: int) -> list[Job]:
    """Short and long, of one K tile and more, in any format, resident, paged and from HBM, close
    together and apart.
    """
    jobs = []
    for _ in range(count):
        weight = FORMATS[rng.integers(len(FORMATS))]
        depth = group_elements(weight) * tile.rows
        kind = rng.integers(3)
        jobs.append(
            Job(
                n=int(rng.integers(1, 3 * tile.cols)),
                k=int(rng.integers(1, depth + 1 if rng.integers(2) else 4 * depth)),
                weight=weight,
                act=FORMATS[rng.integers(len(FORMATS))],
                stream=kind == 1,
                paged=kind == 2,
                gap=int(rng.choice([0, 0, 1, 2, 3, rng.integers(5 * tile.rows)])),
            )
        )
    return jobs


@pytest.mark.parametrize(
    "rows, count, seeds",
    [
        (2, 25, 6),
        (4, 15, 4),
        (8, 12, 4),
        pytest.param(8, 50, 16, marks=pytest.mark.slow),
        pytest.param(16, 30, 8, marks=pytest.mark.slow),
        pytest.param(32, 12, 3, marks=pytest.mark.slow),
    ],
)
def test_a_swap_never_passes_a_row_that_is_not_loaded(rows, count, seeds):
    """Swaps as early as they may be, or late at random; stream rows one by one or in bursts."""
    tile = config(rows)
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        jobs = random_jobs(rng, tile, count)
        eager, fast = rng.choice([1.0, 0.9, 0.2]), rng.choice([1.0, 0.7, 0.1])
        most, burst = int(rng.choice([1, rows, 4 * rows])), int(rng.choice([1, 2 * rows]))
        print("seed", seed, "eager", eager, "fast", fast, "slices", most, "burst", burst)
        run = simulate(
            tile,
            jobs,
            slices=lambda r=rng, most=most: int(r.integers(1, most + 1)),
            grant=lambda r=rng, p=eager: r.random() < p,
            arrival=lambda r=rng, p=fast, n=burst: n * int(r.random() < p),
            limit=200_000,
        )
        check(tile, jobs, run)


@pytest.mark.parametrize("rows", [2, 4])
def test_the_first_tile_after_a_reset_is_loaded_in_time(rows):
    """A row that waited when the reset came has no precedence over row 0 after it."""
    tile = config(rows)
    jobs = [Job(1, 8 * rows, Format.BF16)]
    apart = -(-rows // MatmulArray.ROW_HOP) * MatmulArray.ROW_HOP  # frees two rows in one cycle
    for phase in range(apart):
        run = simulate(
            tile, jobs, lambda: apart, lambda: True, lambda: 0, broken_off=8 * apart + phase
        )
        check(tile, jobs, run)
