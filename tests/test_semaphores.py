# SPDX-License-Identifier: Apache-2.0
"""Semaphores against a model: atomic pairs, priorities, many posts at once, overflow; counters."""

import numpy as np
import pytest
from amaranth import sim as amaranth_sim

from hw import isa
from hw.counters import COUNTER_BITS, ActivityCounters, SaturatingCounter
from hw.semaphores import Semaphores
from tests.simulators import BOTH, Simulator

ENGINES = tuple(isa.Engine)
FIRST_REMOTE = 24


def simulate(dut, bench):
    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()


def grants_of(counts, requests):
    """In order: granted are those possible alone that share nothing with earlier possible ones."""
    claimed, granted = set(), []
    for wanted in requests:
        need = {s: wanted.count(s) for s in wanted}
        possible = all(counts[s] >= n for s, n in need.items())
        granted.append(possible and not claimed & set(need))
        if possible:
            claimed |= set(need)
    return granted


@BOTH
@pytest.mark.parametrize("semaphores,rate", [(32, 0.5), (4, 0.2), (2, 0.9)])
def test_random(semaphores, rate):
    rng = np.random.default_rng([semaphores, int(10 * rate)])
    dut = Semaphores(ENGINES)
    counts = [0] * isa.SEMAPHORES
    ids = rng.permutation(isa.SEMAPHORES)[:semaphores]
    granted_total = twice = contended = 0

    async def bench(ctx):
        nonlocal granted_total, twice, contended
        for _ in range(400):
            requests = []
            for take in dut.take:
                valid = rng.random() < 0.6
                pair = [int(rng.choice(ids)) for _ in range(2)]
                enables = [int(rng.random() < 0.6) for _ in range(2)]
                ctx.set(take.valid, valid)
                for i in range(2):
                    ctx.set(getattr(take, f"wait{i}"), pair[i])
                    ctx.set(getattr(take, f"wait{i}_en"), enables[i])
                requests.append(
                    [s for s, e in zip(pair, enables, strict=True) if e] if valid else None
                )
            posts = []
            for post in dut.post:
                for i in range(2):
                    s, enable = int(rng.choice(ids)), rng.random() < rate / 4
                    ctx.set(getattr(post, f"post{i}"), s)
                    ctx.set(getattr(post, f"post{i}_en"), enable)
                    posts += [s] if enable else []
            for post in (dut.post_sequencer, dut.post_remote):
                s, enable = int(rng.choice(ids)), rng.random() < rate
                ctx.set(post.semaphore, s)
                ctx.set(post.en, enable)
                posts += [s] if enable else []
            expected = iter(grants_of(counts, [r for r in requests if r is not None]))
            before = list(counts)
            for take, wanted in zip(dut.take, requests, strict=True):
                grant = wanted is not None and next(expected)
                assert ctx.get(take.grant) == grant
                missing = [s for s in wanted or () if before[s] < (wanted or []).count(s)]
                assert ctx.get(take.missing_local) == any(s < FIRST_REMOTE for s in missing)
                contended += wanted is not None and not missing and not grant
                if grant:
                    granted_total += 1
                    twice += len(wanted) == 2 and wanted[0] == wanted[1]
                    for s in wanted:
                        counts[s] -= 1
            assert min(counts) >= 0
            for s in posts:
                counts[s] += 1
            assert not ctx.get(dut.overflow)
            await ctx.tick()
            s = int(rng.choice(ids))
            ctx.set(dut.read_index, s)
            assert ctx.get(dut.read_value) == counts[s]
        ctx.set(dut.reset, 1)
        await ctx.tick()
        for s in range(isa.SEMAPHORES):
            ctx.set(dut.read_index, s)
            assert ctx.get(dut.read_value) == 0

    simulate(dut, bench)
    assert granted_total > 100 and twice and contended


@BOTH
def test_overflow():
    dut = Semaphores(ENGINES)

    async def bench(ctx):
        # 18 posts per cycle to one semaphore, up to the limit.
        for post in dut.post:
            for i in range(2):
                ctx.set(getattr(post, f"post{i}"), 9)
                ctx.set(getattr(post, f"post{i}_en"), 1)
        for post in (dut.post_sequencer, dut.post_remote):
            ctx.set(post.semaphore, 9)
            ctx.set(post.en, 1)
        ctx.set(dut.read_index, 9)
        full, rest = divmod(isa.SEMAPHORE_MAX, 18)
        for _ in range(full):
            assert not ctx.get(dut.overflow)
            await ctx.tick()
        assert ctx.get(dut.read_value) == 18 * full
        for post in dut.post:
            for i in range(2):
                ctx.set(getattr(post, f"post{i}_en"), 0)
        ctx.set(dut.post_sequencer.en, 0)
        for _ in range(rest):
            assert not ctx.get(dut.overflow)
            await ctx.tick()
        assert ctx.get(dut.read_value) == isa.SEMAPHORE_MAX
        assert ctx.get(dut.overflow)
        assert ctx.get(dut.overflow_semaphore) == 9
        assert ctx.get(dut.overflow_engine) == isa.ENGINE_NONE
        ctx.set(dut.post[5].post1_en, 1)
        assert ctx.get(dut.overflow_engine) == isa.Engine.KV
        ctx.set(dut.post[2].post0_en, 1)
        assert ctx.get(dut.overflow_engine) == isa.Engine.TOPK
        await ctx.tick()
        assert ctx.get(dut.read_value) == isa.SEMAPHORE_MAX
        # A take in the same cycle makes room for one post.
        ctx.set(dut.post[5].post1_en, 0)
        ctx.set(dut.post_remote.en, 0)
        ctx.set(dut.take[0].valid, 1)
        ctx.set(dut.take[0].wait0, 9)
        ctx.set(dut.take[0].wait0_en, 1)
        assert ctx.get(dut.take[0].grant) and not ctx.get(dut.overflow)
        await ctx.tick()
        assert ctx.get(dut.read_value) == isa.SEMAPHORE_MAX

    simulate(dut, bench)


@BOTH
def test_activity_counters():
    rng = np.random.default_rng(3)
    dut = ActivityCounters(["VECTOR", "DMA", "LOAD"])
    model = np.zeros((3, 4), int)
    read = []

    async def bench(ctx):
        nonlocal model
        total = 0
        for cycle in range(300):
            running, clear = rng.random() < 0.7, cycle == 100
            ctx.set(dut.running, running)
            ctx.set(dut.clear, clear)
            for i in range(3):
                kind = int(rng.integers(4))
                ctx.set(dut.activity[i], isa.Activity(kind))
                model[i, kind] += running
            total += running
            if clear:
                model, total = np.zeros((3, 4), int), 0
            await ctx.tick()
            assert ctx.get(dut.total) == total
        ctx.set(dut.running, 0)
        for i in range(12):
            ctx.set(dut.read_index, i)
            await ctx.tick()
            read.append(ctx.get(dut.read_value))

    simulate(dut, bench)
    assert read == model.reshape(-1).tolist() and sum(read) > 300


def test_parameters():
    for engines in ((), (isa.Engine.DMA, isa.Engine.DMA)):
        with pytest.raises(ValueError, match="engines must be different ones"):
            Semaphores(engines)
    for names in ([], ["DMA", "DMA"]):
        with pytest.raises(ValueError, match="names must be different ones"):
            ActivityCounters(names)


def test_saturating_counter():
    """Adds any amount, stays at the largest number, and clearing goes first."""
    dut = SaturatingCounter(64)
    top = (1 << COUNTER_BITS) - 1
    seen = []

    async def bench(ctx):
        for amount, clear in ((3, 0), (64, 0), (0, 0), (5, 1), (1, 0)):
            ctx.set(dut.amount, amount)
            ctx.set(dut.clear, clear)
            await ctx.tick()
            seen.append(ctx.get(dut.value))
        ctx.set(dut.value, top - 60)
        for amount in (59, 64, 64, 0):
            ctx.set(dut.amount, amount)
            await ctx.tick()
            seen.append(ctx.get(dut.value))

    simulator = amaranth_sim.Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    assert seen == [3, 67, 67, 0, 1, top - 1, top, top, top]
    with pytest.raises(ValueError, match="most must be at least 1"):
        SaturatingCounter(0)
