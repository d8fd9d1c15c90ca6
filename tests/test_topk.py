# SPDX-License-Identifier: Apache-2.0
"""The top-k unit and engine equal golden/topk.py in every bit."""

from dataclasses import replace

import numpy as np
import pytest

from golden.topk import topk
from hw import isa
from hw.config import preset
from hw.topk import TopkEngine, TopkUnit
from tests.simulators import BOTH, Simulator

CONFIG = replace(preset("tiny").tile, max_topk=8, max_experts=64)
LINES = 256
LATENCY = 2
SPECIAL = np.array(
    [
        0,
        0x8000_0000,
        1,
        0x8000_0001,
        0x7F80_0000,
        0xFF80_0000,
        0x7FC0_0000,
        0xFFC0_1234,
        0x7F80_0001,
        0x3F80_0000,
        0xBF80_0000,
        0x7F7F_FFFF,
    ],
    np.uint32,
)


def rows(rng, count):
    """Bits of a row of random kind: random, few values, specials, all NaN, zeros, equal, sorted."""
    kind = rng.integers(7)
    if kind == 0:
        return rng.integers(1 << 32, size=count, dtype=np.uint32)
    if kind == 1:
        return rng.integers(-2, 3, size=count).astype(np.float32).view(np.uint32)
    if kind == 2:
        return rng.choice(SPECIAL, size=count)
    if kind == 3:
        return rng.choice(SPECIAL[6:9], size=count)
    if kind == 4:
        return rng.choice(SPECIAL[[0, 1, 3, 6]], size=count)  # zeros of both signs on top
    if kind == 5:
        return np.full(count, rng.choice(SPECIAL))
    values = np.sort(rng.standard_normal(count).astype(np.float32))
    return (values if rng.random() < 0.5 else values[::-1]).copy().view(np.uint32)


def expected(bits, k):
    ids, scores = topk(bits.view(np.float32), k)
    return ids.tolist(), scores.view(np.uint32).tolist()


@BOTH
@pytest.mark.parametrize("k_max", [1, 3, 8])
@pytest.mark.parametrize("stall", [0.0, 0.4])
def test_unit(k_max, stall):
    rng = np.random.default_rng([k_max, int(10 * stall)])
    dut = TopkUnit(k_max, id_bits=6)
    tests = []
    for i in range(60):
        count = int(rng.choice([1, 2, 64])) if i % 3 == 0 else int(rng.integers(1, 65))
        tests.append((rows(rng, count), int(rng.integers(1, min(k_max, count) + 1))))

    async def bench(ctx):
        for bits, k in tests:
            ctx.set(dut.k, k)
            sent, ids, scores, cycles = 0, [], [], 0
            while len(ids) < k:
                ctx.set(dut.input.valid, sent < len(bits) and rng.random() >= stall)
                if sent < len(bits):
                    ctx.set(dut.input.p.score, int(bits[sent]))
                    ctx.set(dut.input.p.last, sent == len(bits) - 1)
                ctx.set(dut.output.ready, rng.random() >= stall)
                taken = ctx.get(dut.input.valid) and ctx.get(dut.input.ready)
                if ctx.get(dut.output.valid) and ctx.get(dut.output.ready):
                    assert sent == len(bits)
                    if not ids:
                        assert ctx.get(dut.nan_row) == np.isnan(bits.view(np.float32)).all()
                    ids.append(ctx.get(dut.output.p.id))
                    scores.append(ctx.get(dut.output.p.score))
                    assert ctx.get(dut.output.p.last) == (len(ids) == k)
                sent += taken
                cycles += 1
                assert cycles < 2000
                await ctx.tick()
            assert (ids, scores) == expected(bits, k)
            if not stall:
                assert cycles == len(bits) + k + 1

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()


def run_engine(commands, memory, seed=0, stall=0.0):
    """Runs commands on `memory` (uint32 [LINES, 4], changed); one (error, nan_row, cycles) each.

    Also counts the cycles of each activity.
    """
    dut = TopkEngine(CONFIG)
    rng = np.random.default_rng(seed)
    results = []
    activities = dict.fromkeys(isa.Activity, 0)

    async def bench(ctx):
        control, sram = dut.control, dut.sram
        answers = []  # (cycle, line or None for a write, fault)
        started, next_command = [], 0
        cycle = 0
        while len(results) < len(commands):
            ctx.set(control.command.valid, next_command < len(commands))
            if next_command < len(commands):
                for name, value in commands[next_command].items():
                    ctx.set(getattr(control.command.p, name), value)
            ctx.set(sram.valid, 0)
            ctx.set(sram.fault, 0)
            if answers and answers[0][0] == cycle:
                _, words, fault = answers.pop(0)
                ctx.set(sram.fault, fault)
                if words is not None:
                    ctx.set(sram.valid, 1)
                    ctx.set(
                        sram.response.data[0], sum(int(w) << 32 * i for i, w in enumerate(words))
                    )
            ctx.set(sram.request.ready, rng.random() >= stall)
            if ctx.get(sram.request.valid) and ctx.get(sram.request.ready):
                at = ctx.get(sram.request.p.address)
                fault = at >= LINES
                if ctx.get(sram.request.p.write):
                    value, mask = ctx.get(sram.request.p.data[0]), ctx.get(sram.request.p.mask[0])
                    assert not ctx.get(sram.request.p.scale_mask)
                    for i in range(4):
                        pair = mask >> 2 * i & 3
                        assert pair in (0, 3)
                        if pair and not fault:
                            memory[at, i] = value >> 32 * i & 0xFFFF_FFFF
                    answers.append((cycle + LATENCY, None, fault))
                else:
                    words = np.zeros(4, np.uint32) if fault else memory[at].copy()
                    answers.append((cycle + LATENCY, words, fault))
            if ctx.get(control.done):
                assert not answers
                results.append(
                    (
                        isa.Status(ctx.get(control.error)),
                        ctx.get(dut.nan_row),
                        cycle - started[len(results)],
                    )
                )
            else:
                assert not ctx.get(dut.nan_row)
            activities[isa.Activity(ctx.get(control.activity))] += 1
            if ctx.get(control.command.valid) and ctx.get(control.command.ready):
                started.append(cycle)
                next_command += 1
            cycle += 1
            assert cycle < 20_000
            await ctx.tick()
        assert sum(activities.values()) == cycle

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return results, activities


def command(score_addr=0, count=8, k=4, ids_addr=0x800, scores_addr=0xC00):
    return {
        "score_addr": score_addr,
        "count": count,
        "k": k,
        "ids_addr": ids_addr,
        "scores_addr": scores_addr,
    }


@BOTH
@pytest.mark.parametrize("stall", [0.0, 0.6])
def test_engine(stall):
    rng = np.random.default_rng(int(10 * stall))
    memory = rng.integers(1 << 32, size=(LINES, 4), dtype=np.uint32)
    flat = memory.reshape(-1)
    commands, wanted = [], flat.copy()
    for i in range(20):
        count = (1, 4, 5, 63, 64)[i] if i < 5 else int(rng.integers(1, 65))
        k = min(count, 8) if i < 5 else int(rng.integers(1, min(count, 8) + 1))
        base = 0x100 * (i % 8)
        commands.append(command(base, count, k, 0x800 + 0x20 * i, 0xC00 + 0x20 * i))
    for i in range(8):
        flat[64 * i : 64 * i + 64] = wanted[64 * i : 64 * i + 64] = rows(rng, 64)
    nan_rows = []
    for c in commands:
        bits = wanted[c["score_addr"] // 4 :][: c["count"]].copy()
        ids, scores = expected(bits, c["k"])
        nan_rows.append(int(np.isnan(bits.view(np.float32)).all()))
        wanted[c["ids_addr"] // 4 :][: c["k"]] = ids
        wanted[c["scores_addr"] // 4 :][: c["k"]] = scores
    results, activities = run_engine(commands, memory, stall=stall)
    assert (flat == wanted).all()
    for c, nan_row, (error, flag, cycles) in zip(commands, nan_rows, results, strict=True):
        assert error == isa.Status.RUNNING and flag == nan_row
        if not stall:
            assert cycles == c["count"] + c["k"] + 2 * -(-c["k"] // 4) + 7
    assert activities[isa.Activity.BUSY] > 100
    assert bool(activities[isa.Activity.BLOCKED]) == bool(stall)


@BOTH
def test_nan_row_is_flagged():
    memory = np.full((LINES, 4), 0x7FC0_0001, np.uint32)
    results, _ = run_engine([command(), command(count=5, k=5)], memory)
    assert [r[:2] for r in results] == [(isa.Status.RUNNING, 1)] * 2
    assert memory[0x80].tolist() == [0, 1, 2, 3] and memory[0x81, 0] == 4


@BOTH
def test_errors_have_no_effect():
    memory = np.arange(LINES * 4, dtype=np.uint32).reshape(LINES, 4)
    before = memory.copy()
    illegal = [
        command(count=0),
        command(count=65),
        command(k=0),
        command(k=9, count=20),
        command(k=5, count=4),
        command(score_addr=4),
        command(ids_addr=8),
        command(scores_addr=1),
    ]
    ranges = [command(score_addr=16 * LINES - 16), command(score_addr=0xFFFF_FFF0)]
    results, _ = run_engine(illegal + ranges, memory)
    assert [r[0] for r in results] == (
        [isa.Status.ILLEGAL_COMMAND] * len(illegal) + [isa.Status.ADDRESS_RANGE] * len(ranges)
    )
    assert (memory == before).all()
    results, _ = run_engine(
        [command(scores_addr=16 * LINES), command(ids_addr=16 * LINES), command()], memory
    )
    assert [r[0] for r in results] == [
        isa.Status.ADDRESS_RANGE,
        isa.Status.ADDRESS_RANGE,
        isa.Status.RUNNING,
    ]


def test_parameters():
    with pytest.raises(ValueError, match="k_max must be at least 1"):
        TopkUnit(0)
    with pytest.raises(ValueError, match="id_bits must be at least 1"):
        TopkUnit(4, 0)
