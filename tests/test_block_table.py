# SPDX-License-Identifier: Apache-2.0
"""The block table alone: fills from a tile SRAM that stalls, lookups, errors, order."""

from dataclasses import replace

import numpy as np
import pytest
from amaranth.sim import Simulator

from hw.block_table import BlockTable
from hw.config import preset
from hw.isa import Status
from hw.tile_sram import TileSram

TINY = preset("tiny").tile
WIDE = replace(TINY, cols=16, sram_banks=16, result_depth=32)
ENTRIES = 32


def run(config, fills, sram, ready, seed):
    """Fills (addr, table, count) one after the other; statuses, cycles of each, and then what every
    lookup from 0 on answers, beyond the table too: (row, outside), one per cycle.
    """
    config = replace(config, block_entries=ENTRIES)
    dut = BlockTable(config)
    rng = np.random.default_rng(seed)
    statuses, took, answers, busy = [], [], [], []

    async def memory(ctx):
        waiting = []
        cycle = 0
        while True:
            client = dut.memory
            take = rng.random() < ready
            ctx.set(client.request.ready, take)
            due = [at for at, _ in waiting if at == cycle]
            ctx.set(client.valid, bool(due))
            words = waiting.pop(0)[1] if due else rng.integers(1 << 32, size=config.cols)
            for i in range(config.vector_lines):
                line = sum(int(w) << 32 * j for j, w in enumerate(words[4 * i : 4 * i + 4]))
                ctx.set(client.response.data[i], line)
            if take and ctx.get(client.request.valid):
                line = ctx.get(client.request.payload.address)
                assert line % config.vector_lines == 0 and not ctx.get(client.request.payload.write)
                waiting.append((cycle + TileSram.LATENCY, sram[4 * line :][: config.cols]))
            await ctx.tick()
            cycle += 1

    async def drive(ctx):
        for addr, table, count in fills:
            ctx.set(dut.fill.payload, {"addr": addr, "table": table, "count": count})
            ctx.set(dut.fill.valid, 1)
            await ctx.tick().until(dut.fill.ready)
            ctx.set(dut.fill.valid, int(rng.integers(2)))  # the next one may be offered at once
            for t in range(10_000):
                if ctx.get(dut.done):
                    statuses.append(Status(ctx.get(dut.error)))
                    took.append(t)
                    break
                busy.append(ctx.get(dut.fill.ready))
                await ctx.tick()
        ctx.set(dut.fill.valid, 0)
        for entry in [*range(2 * ENTRIES), (1 << 17) - 1, None]:
            ctx.set(dut.lookup, {"valid": int(entry is not None), "entry": entry or 0})
            await ctx.tick()
            answers.append((ctx.get(dut.row), ctx.get(dut.outside)))

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(drive)
    simulator.add_testbench(memory, background=True)
    simulator.run()
    assert len(statuses) == len(fills) and not any(busy)
    return statuses, took, answers[:-1]


@pytest.mark.parametrize("ready", [1.0, 0.3])
@pytest.mark.parametrize("config", [TINY, WIDE], ids=["cols4", "cols16"])
def test_fills_and_lookups(config, ready):
    seed = 11
    print("seed", seed, ready)
    rng = np.random.default_rng(seed)
    words = config.sram_bytes // 4
    sram = rng.integers(config.kv_rows, size=words).astype(np.uint32)
    far = rng.random(words) < 0.2
    sram[far] = rng.integers(config.kv_rows, 1 << 32, size=far.sum())
    fills, table = [(4 * (words - ENTRIES), 0, ENTRIES)], np.zeros(ENTRIES, np.uint32)
    for _ in range(25):
        first = int(rng.integers(ENTRIES))
        count = int(rng.integers(1, ENTRIES - first + 1))
        fills.append((4 * int(rng.integers(words - count + 1)), first, count))
    for addr, first, count in fills:
        table[first : first + count] = sram[addr // 4 :][:count]
    statuses, took, answers = run(config, fills, sram, ready, seed)
    assert statuses == [Status.RUNNING] * len(fills)
    for entry, (row, outside) in enumerate(answers):
        known = entry < ENTRIES and table[entry] < config.kv_rows
        assert outside == (not known), entry
        assert not known or row == table[entry], entry
    assert any(outside for _, outside in answers[:ENTRIES])
    if ready == 1.0:
        for (addr, _, count), cycles in zip(fills, took, strict=True):
            lead = addr // 4 % config.cols
            assert cycles == count + 3 * -(-(lead + count) // config.cols)


def test_refused_fills_change_nothing():
    sram = np.arange(TINY.sram_bytes // 4, dtype=np.uint32) % TINY.kv_rows
    end = TINY.sram_bytes
    good = (4 * 100, 0, ENTRIES)
    bad = {
        (400, 0, 0): Status.ILLEGAL_COMMAND,
        (401, 0, 1): Status.ILLEGAL_COMMAND,
        (402, 0, 1): Status.ILLEGAL_COMMAND,
        (0, ENTRIES, 1): Status.ADDRESS_RANGE,
        (0, ENTRIES - 1, 2): Status.ADDRESS_RANGE,
        (0, 0xFFFF, 1): Status.ADDRESS_RANGE,
        (0, 0, 0xFFFF): Status.ADDRESS_RANGE,
        (0, 0xFFFF, 0xFFFF): Status.ADDRESS_RANGE,
        (end, 0, 1): Status.ADDRESS_RANGE,
        (end - 4, 0, 2): Status.ADDRESS_RANGE,
        (0xFFFF_FFFC, 0, 2): Status.ADDRESS_RANGE,
    }
    statuses, _, answers = run(TINY, [good, *bad], sram, 1.0, 1)
    assert statuses == [Status.RUNNING, *bad.values()]
    assert answers[:ENTRIES] == [(100 + i, 0) for i in range(ENTRIES)]
    assert all(outside for _, outside in answers[ENTRIES:])
