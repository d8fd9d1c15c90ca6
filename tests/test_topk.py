# SPDX-License-Identifier: Apache-2.0
"""The top-k engine equals golden/topk.py in every bit, and takes the cycles that it states."""

from dataclasses import replace

import numpy as np
import pytest

from golden.models import MODELS
from hw import isa
from hw.config import preset
from hw.topk import TopkEngine, command_cycles
from tests.simulators import BOTH, Simulator
from tests.test_topk_unit import expected, random_case, rows

CONFIG = replace(preset("tiny").tile, max_topk=8, max_experts=64)
LINES = 2048
LATENCY = 2


def run_engine(commands, memory, seed=0, stall=0.0, config=CONFIG):
    """Runs commands on `memory` (uint32 [LINES, 4], changed); one (error, nan_row, cycles) each.

    Also counts the cycles of each activity.
    """
    dut = TopkEngine(config)
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


def command(score_addr=0, count=8, k=4, ids_addr=0x800, scores_addr=0xC00, **operands):
    return {
        "score_addr": score_addr,
        "count": count,
        "k": k,
        "ids_addr": ids_addr,
        "scores_addr": scores_addr,
        "bias_addr": 0,
        "groups_log2": 0,
        "groups_kept": 0,
        "use_bias": 0,
    } | operands


def gate_command(case, score_addr, bias_addr, ids_addr, scores_addr):
    """The command of a `random_case`."""
    bits, bias, k, groups, kept = case
    return command(
        score_addr,
        len(bits),
        k,
        ids_addr,
        scores_addr,
        bias_addr=bias_addr if bias is not None else 4,  # not used, so not looked at
        use_bias=int(bias is not None),
        groups_log2=groups.bit_length() - 1,
        groups_kept=kept if groups > 1 else kept % 2,
    )


def check_cases(cases, config, stall, seed):
    """Runs each case on scores of its own; results and cycles are those of the model."""
    unit = 4 * config.max_experts
    memory = np.random.default_rng(seed).integers(1 << 32, size=(LINES, 4), dtype=np.uint32)
    flat, commands, nan_rows = memory.reshape(-1), [], []
    for i, case in enumerate(cases):
        bits, bias, *_ = case
        base = 2 * unit * i
        flat[base // 4 :][: len(bits)] = bits
        if bias is not None:
            flat[(base + unit) // 4 :][: len(bits)] = bias
        results = 2 * unit * len(cases) + 0x80 * i
        commands.append(gate_command(case, base, base + unit, results, results + 0x40))
    wanted = flat.copy()
    for c, case in zip(commands, cases, strict=True):
        ids, scores, nan_row = expected(*case)
        nan_rows.append(int(nan_row))
        wanted[c["ids_addr"] // 4 :][: c["k"]] = ids
        wanted[c["scores_addr"] // 4 :][: c["k"]] = scores
    results, activities = run_engine(commands, memory, seed, stall, config)
    assert len(results) == len(cases) > 0
    assert (flat == wanted).all()
    for (bits, bias, k, groups, _), nan_row, (error, flag, cycles) in zip(
        cases, nan_rows, results, strict=True
    ):
        assert error == isa.Status.RUNNING and flag == nan_row
        least = command_cycles(len(bits), k, biased=bias is not None, groups=groups)
        assert cycles == least if not stall else cycles >= least
    assert activities[isa.Activity.BUSY] > 100
    assert bool(activities[isa.Activity.BLOCKED]) == bool(stall)


@BOTH
@pytest.mark.parametrize("stall", [0.0, 0.6])
def test_engine(stall):
    rng = np.random.default_rng(int(10 * stall))
    cases = [random_case(rng, 64, 8, 8) for _ in range(10)]
    for count in (1, 4, 5, 63, 64):
        bias = rows(rng, count, 0) if count % 2 else None
        cases.append((rows(rng, count), bias, min(count, 8), 1, 1))
    check_cases(cases, CONFIG, stall, seed=int(10 * stall))


CYCLES = {"gpt-oss": 128 + 4 + 2 + 7, "deepseek-r1": 256 + 8 + 4 + 11 + 79}
CYCLES["kimi-k2.5"] = 384 + 8 + 4 + 11


@BOTH
def test_gates_of_the_models():
    """One score per cycle, and what a command takes beyond that."""
    rng = np.random.default_rng(2)
    cases = []
    for name, model in MODELS.items():
        spec = model.moe.gate_spec
        biased = spec.bias == "choice"
        scores, bias = rng.random((2, spec.experts)).astype(np.float32).view(np.uint32)
        cases.append((scores, bias if biased else None, spec.top_k, spec.groups, spec.groups_kept))
        assert CYCLES[name] == command_cycles(
            spec.experts, spec.top_k, biased=biased, groups=spec.groups
        )
    check_cases(cases, preset("tiny").tile, 0.0, seed=2)


@BOTH
def test_nan_row_is_flagged():
    memory = np.full((LINES, 4), 0x7FC0_0001, np.uint32)
    memory[8:10] = 0x3F80_0000
    by_bias = command(score_addr=0x80, use_bias=1, ids_addr=0x900)
    grouped = command(groups_log2=2, groups_kept=2, ids_addr=0xA00)
    number = command(score_addr=0x40, count=20, ids_addr=0xB00)
    results, _ = run_engine([command(), command(count=5, k=5), by_bias, grouped, number], memory)
    assert [r[:2] for r in results] == [(isa.Status.RUNNING, 1)] * 4 + [(isa.Status.RUNNING, 0)]
    assert memory[0x80].tolist() == [0, 1, 2, 3] and memory[0x81, 0] == 4
    assert memory[0x90].tolist() == memory[0xA0].tolist() == [0, 1, 2, 3]
    assert memory[0xB0].tolist() == [16, 17, 18, 19]


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
        command(use_bias=1, bias_addr=12),
        command(groups_kept=2),
        command(groups_log2=1),  # none kept
        command(groups_log2=1, groups_kept=3),
        command(groups_log2=4, groups_kept=4, count=64),
        command(groups_log2=2, groups_kept=1, count=14, k=1),
        command(groups_log2=3, groups_kept=8, count=8),  # of one score each
        command(groups_log2=2, groups_kept=1, count=8, k=3),
        command(groups_log2=2, groups_kept=31, count=64),
    ]
    ranges = [
        command(score_addr=16 * LINES - 16),
        command(score_addr=0xFFFF_FFF0),
        command(use_bias=1, bias_addr=16 * LINES - 16),
    ]
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
