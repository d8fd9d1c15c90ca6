# SPDX-License-Identifier: Apache-2.0
"""DMA engine and weight stream on the HBM port, in simulation, against Python memories."""

from dataclasses import replace

import numpy as np
import pytest

from golden.hbm_layout import pack_lines, stream_bytes, unpack_lines
from hw.config import preset
from hw.isa import Activity, Direction, Status
from tb.hbm_bench import HbmBench
from tests.hbm_models import HbmWorld
from tests.simulators import BOTH, VERILOG_FIRST, Simulator, cases

TINY = replace(preset("tiny").tile, hbm_bytes=1 << 16, stream_rows=8)
WIDE = replace(TINY, rows=2, cols=16, sram_banks=16, result_depth=32, stream_rows=8)
CONFIGS = {
    "16": TINY,
    "64": replace(WIDE, hbm_port_bytes=64),
    "2x16": replace(WIDE, hbm_port_bytes=16, hbm_ports=2),
    "2x128": replace(WIDE, hbm_port_bytes=128, hbm_ports=2),
}
STALLS = {"free": 0.0, "stalled": 0.3}


def simulate(config, seed, process, **world):
    print(f"seed {seed}")
    bench = HbmBench(config)
    sim = Simulator(bench)
    sim.add_clock(1e-6)
    memories = HbmWorld(config, bench, seed, **world)
    memories.start(sim)

    async def testbench(ctx):
        await process(ctx, memories)

    sim.add_testbench(testbench)
    sim.run()
    return memories


def lines_of(world, address, lines, scaled):
    image = world.hbm[address : address + stream_bytes(lines, scaled)].tobytes()
    return unpack_lines(image, lines, scaled)


def random_dma(rng, config, direction):
    """A random legal command."""
    scaled = int(direction != Direction.SRAM_TO_HBM and rng.random() < 0.5)
    rows = int(rng.integers(1, 6))
    lines = int(rng.choice([1, 2, 15, 16, 17, 33, rng.integers(1, 60)]))
    need = stream_bytes(lines, bool(scaled))
    hbm_stride = need + 16 * int(rng.integers(0, 4))
    local_stride = lines + int(rng.integers(0, 4))
    limit = config.sram_lines
    if direction == Direction.HBM_TO_KV:
        limit = config.stream_base * config.cols
    hbm_addr = 16 * int(rng.integers(0, (config.hbm_bytes - (rows * hbm_stride)) // 16 + 1))
    local = int(rng.integers(0, limit - rows * local_stride + 1))
    return dict(
        hbm_addr=hbm_addr,
        hbm_stride=hbm_stride,
        lines=lines,
        rows=rows,
        direction=int(direction),
        local_addr=local if direction == Direction.HBM_TO_KV else 16 * local,
        local_stride=local_stride,
        scaled=scaled,
    )


def apply_dma(world, hbm, sram, kv, command):
    """The command's effect on copies of the memories: `hbm`, `sram` and `kv` (lines, scales)."""
    c = command
    target = kv if c["direction"] == Direction.HBM_TO_KV else sram
    base = c["local_addr"] if c["direction"] == Direction.HBM_TO_KV else c["local_addr"] // 16
    for row in range(c["rows"]):
        address = c["hbm_addr"] + row * c["hbm_stride"]
        line = base + row * c["local_stride"]
        if c["direction"] == Direction.SRAM_TO_HBM:
            data = np.frombuffer(pack_lines(sram[0][line : line + c["lines"]]), np.uint8)
            hbm[address : address + len(data)] = data
        else:
            need = stream_bytes(c["lines"], bool(c["scaled"]))
            lines, scales = unpack_lines(
                hbm[address : address + need].tobytes(), c["lines"], bool(c["scaled"])
            )
            target[0][line : line + c["lines"]] = lines
            target[1][line : line + c["lines"]] = scales


@cases(
    "name, stall",
    amaranth=[("16", stall) for stall in STALLS],
    verilator=[
        pytest.param(name, stall, marks=[] if name in ("16", "2x128") else [pytest.mark.slow])
        for name in CONFIGS
        for stall in STALLS
    ],
)
def test_dma_random(simulator, name, stall):
    """Random commands of all directions, back to back, do what the golden layout says."""
    config, count = CONFIGS[name], 16

    async def process(ctx, world):
        hbm = world.hbm.copy()
        sram = world.sram.copy(), world.sram_scales.copy()
        kv = world.kv.copy(), world.kv_scales.copy()
        rng = np.random.default_rng(7)
        for _ in range(count):
            command = random_dma(rng, config, Direction(int(rng.integers(0, 3))))
            apply_dma(world, hbm, sram, kv, command)
            world.issue("dma", **command)
        await world.finished(ctx, "dma", count)
        assert world.done["dma"] == [Status.RUNNING] * count
        assert np.array_equal(world.hbm, hbm)
        assert np.array_equal(world.sram, sram[0]) and np.array_equal(world.sram_scales, sram[1])
        assert np.array_equal(world.kv, kv[0]) and np.array_equal(world.kv_scales, kv[1])

    world = simulate(config, 11, process, stall=STALLS[stall])
    assert len(world.bursts) > count and sum(world.activity["dma"]) > 100


@VERILOG_FIRST
@pytest.mark.parametrize("stall", STALLS.values(), ids=STALLS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_stream_order(config, stall):
    """Several commands fill the ring in order, wrap it, and wait for rows to be released."""
    cols, ring = config.cols, config.stream_rows
    jobs = [(0x40, 3, 1), (0x1FF0, 2, 0), (0x2340, 5, 1), (0x10, 1, 1), (0x30, 2, 0)]

    async def process(ctx, world):
        world.take_after = ring  # nothing is released
        for address, rows, scaled in jobs:
            world.issue("stream", hbm_addr=address, rows=rows, scaled=scaled)
        await ctx.tick().repeat(1500)
        assert ctx.get(world.bench.available) == ring
        rows = [(address, row, n, scaled) for address, n, scaled in jobs for row in range(n)]

        def check(first, count):
            base = config.stream_base * cols
            for index in range(first, first + count):
                address, row, n, scaled = rows[index]
                lines, scales = lines_of(world, address, n * cols, bool(scaled))
                slot = base + index % ring * cols
                at = slice(row * cols, (row + 1) * cols)
                assert np.array_equal(world.kv[slot : slot + cols], lines[at]), index
                assert np.array_equal(world.kv_scales[slot : slot + cols], scales[at]), index

        check(0, ring)
        assert len(world.done["stream"]) == 2
        world.take_after = 0
        await world.finished(ctx, "stream", len(jobs))
        await ctx.tick().repeat(20)
        assert world.taken_rows == len(rows) and ctx.get(world.bench.available) == 0
        check(len(rows) - ring, ring)
        assert world.done["stream"] == [Status.RUNNING] * len(jobs)

    simulate(config, 5, process, stall=stall)


@BOTH
def test_stream_does_not_block_dma():
    """With the ring full and more rows asked for, the DMA still runs, and the other way round."""

    async def process(ctx, world):
        world.take_after = TINY.stream_rows
        world.issue("stream", hbm_addr=0, rows=200, scaled=0)
        await ctx.tick().repeat(1200)
        world.issue(
            "dma",
            hbm_addr=0x100,
            hbm_stride=0,
            local_addr=0,
            local_stride=0,
            lines=300,
            rows=1,
            direction=0,
            scaled=1,
        )
        await world.finished(ctx, "dma", 1, limit=1000)
        assert np.array_equal(world.sram[:300], lines_of(world, 0x100, 300, True)[0])
        world.take_after = 0
        await world.finished(ctx, "stream", 1)
        assert world.activity["stream"][Activity.BLOCKED] > 1000

    simulate(TINY, 3, process)


@BOTH
@pytest.mark.parametrize("config", [TINY, CONFIGS["2x128"]], ids=["16", "2x128"])
def test_refused(config):
    """Illegal commands and addresses out of range have no effect; the next command works."""
    top, kv_top = config.hbm_bytes, config.stream_base * config.cols
    good = dict(
        hbm_addr=0x20,
        hbm_stride=0x40,
        local_addr=0x30,
        local_stride=4,
        lines=2,
        rows=2,
        direction=0,
        scaled=0,
    )
    last = dict(good, hbm_addr=top - 0x60, local_addr=config.sram_bytes - 0x60)
    illegal, beyond = Status.ILLEGAL_COMMAND, Status.ADDRESS_RANGE
    cases = [
        (dict(good, lines=0), illegal),
        (dict(good, rows=0), illegal),
        (dict(good, direction=3), illegal),
        (dict(good, direction=1, scaled=1), illegal),
        (dict(good, hbm_addr=0x28), illegal),
        (dict(good, hbm_stride=0x48), illegal),
        (dict(good, local_addr=0x38), illegal),
        (last, Status.RUNNING),
        (dict(last, hbm_addr=top - 0x50), beyond),
        (dict(last, rows=3), beyond),
        (dict(last, local_addr=config.sram_bytes - 0x50), beyond),
        (dict(last, scaled=1), beyond),
        (dict(good, direction=2, local_addr=kv_top - 5), beyond),
        (dict(good, direction=2, local_addr=kv_top - 6), Status.RUNNING),
        (dict(good, hbm_addr=0xFFFFFFF0), beyond),
        (dict(good, local_addr=0xFFFFFFF0), beyond),
        (dict(good, hbm_stride=0xFFFFFFF0, rows=0xFFFF), beyond),
        (dict(good, local_stride=0xFFFFFF, rows=0xFFFF), beyond),
        (good, Status.RUNNING),
    ]
    streams = [
        (dict(hbm_addr=0, rows=0, scaled=0), illegal),
        (dict(hbm_addr=8, rows=1, scaled=0), illegal),
        (dict(hbm_addr=0, rows=0xFFFFFF, scaled=1), beyond),
        (dict(hbm_addr=0xFFFFFFF0, rows=1, scaled=0), beyond),
        (dict(hbm_addr=0xFFFFFFF0, rows=0xFFFFFF, scaled=1), beyond),
        (dict(hbm_addr=top - 16 * config.cols, rows=1, scaled=1), beyond),
        (dict(hbm_addr=top - 16 * config.cols, rows=1, scaled=0), Status.RUNNING),
    ]

    async def process(ctx, world):
        sram = world.sram.copy()
        for operands, _ in cases:
            world.issue("dma", **operands)
        for operands, _ in streams:
            world.issue("stream", **operands)
        await world.finished(ctx, "dma", len(cases))
        await world.finished(ctx, "stream", len(streams))
        assert world.done["dma"] == [status for _, status in cases]
        assert world.done["stream"] == [status for _, status in streams]
        changed = np.flatnonzero((world.sram != sram).any(axis=1))
        end = config.sram_lines
        assert set(changed) == {3, 4, 7, 8, end - 6, end - 5, end - 2, end - 1}

    simulate(config, 9, process)


@VERILOG_FIRST
@pytest.mark.parametrize("config", [TINY, CONFIGS["2x128"]], ids=["16", "2x128"])
def test_hbm_errors(config):
    """An error response is told by the command it belongs to, and by no other."""

    async def process(ctx, world):
        plain = dict(hbm_stride=0, local_addr=0, local_stride=0, lines=20, rows=1, scaled=0)
        good, bad = Status.RUNNING, Status.HBM_ERROR
        expected = []
        for address, direction, status in (
            (0x0, 0, good),
            (0x4000, 0, bad),
            (0x2000, 0, good),
            (0x4000, 1, bad),
            (0x2000, 1, good),
            (0x4000, 2, bad),
            (0x1000, 2, good),
        ):
            world.issue("dma", hbm_addr=address, direction=direction, **plain)
            expected.append(status)
        for address in (0, 0x4000, 0):
            world.issue("stream", hbm_addr=address, rows=1, scaled=0)
        await world.finished(ctx, "dma", len(expected))
        await world.finished(ctx, "stream", 3)
        assert world.done["dma"] == expected
        assert world.done["stream"] == [good, bad, good]

    simulate(config, 2, process, errors=(0x4000, 0x4010))


@BOTH
def test_full_rate():
    """Back-to-back weight streams move a line of HBM in every cycle once the first has arrived."""
    rows, count = 32, 6

    async def process(ctx, world):
        start = world.now
        for i in range(count):
            world.issue("stream", hbm_addr=4096 * i, rows=rows, scaled=1)
        await world.finished(ctx, "stream", count)
        cycles = world.now - start - world.latency
        lines = count * stream_bytes(rows * TINY.cols, True) // 16
        assert lines <= cycles <= lines + 24, (lines, cycles)

    simulate(TINY, 1, process, latency=160)
