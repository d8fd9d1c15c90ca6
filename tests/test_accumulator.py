# SPDX-License-Identifier: Apache-2.0
"""The accumulator of a column: order of additions, spacing of commands, biases, result queue."""

import numpy as np
import pytest

from golden.matmul import add_ieee
from hw.accumulator import Accumulator
from tests.cell_vectors import random_psum
from tests.simulators import BOTH, Simulator

FIELDS = ("index", "first", "last", "use_bias", "bias_sel")


def run(commands, psums, biases=(0, 0), acc_rows=8, depth=16):
    """Results in order, of commands (dicts or None, one per cycle) with their partial sums."""
    dut = Accumulator(acc_rows, depth)
    found = []
    passed = []

    async def bench(ctx):
        for sel, value in enumerate(biases):
            ctx.set(dut.bias_write, 1)
            ctx.set(dut.bias_sel, sel)
            ctx.set(dut.bias, value)
            await ctx.tick()
        ctx.set(dut.bias_write, 0)
        expected = []  # cycle from which a result can be read
        address = 0
        pending = False
        for t in range(len(commands) + Accumulator.RESULT_AFTER + 3):
            command = commands[t] if t < len(commands) else None
            ctx.set(dut.command.valid, command is not None)
            for name in FIELDS:
                # Garbage where there is no command.
                ctx.set(dut.command[name], 1 if command is None else command[name])
            ctx.set(dut.psum, int(psums[t - 1]) if 1 <= t <= len(commands) else 0x12345678)
            passed.append((command is not None, ctx.get(dut.command_out.valid)))
            if command is not None and command["last"]:
                expected.append(t + Accumulator.RESULT_AFTER)
            if pending:
                found.append(ctx.get(dut.result))
            pending = bool(expected) and expected[0] <= t
            ctx.set(dut.result_en, pending)
            ctx.set(dut.result_addr, address % depth)
            if pending:
                expected.pop(0)
                address += 1
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    assert [out for _, out in passed[1:]] == [given for given, _ in passed[:-1]]
    return found


def model(commands, psums, biases):
    sums: dict[int, np.float32] = {}
    results = []
    for command, psum in zip(commands, psums, strict=True):
        if command is None:
            continue
        if command["first"]:
            bias = biases[command["bias_sel"]] if command["use_bias"] else 0
            base = np.uint32(bias).view(np.float32)
        else:
            base = sums[command["index"]]
        value = add_ieee(base, np.uint32(psum).view(np.float32))[()]
        if command["last"]:
            results.append(int(np.float32(value).view(np.uint32)))
        else:
            sums[command["index"]] = value
    return results


def random_commands(rng, cycles, acc_rows, spacing):
    """Chains of random length per index; an index is used again after `spacing` cycles or more."""
    free_at = [0] * acc_rows
    left = [0] * acc_rows
    commands = []
    for t in range(cycles):
        ready = [i for i in range(acc_rows) if free_at[i] <= t]
        if not ready or rng.random() < 0.1:
            commands.append(None)
            continue
        # The index that was used most recently, to find the shortest distance often.
        i = max(ready, key=lambda i: free_at[i]) if rng.random() < 0.6 else int(rng.choice(ready))
        first = left[i] == 0
        if first:
            left[i] = int(rng.integers(1, 6))
        left[i] -= 1
        commands.append({
            "index": i, "first": int(first), "last": int(left[i] == 0),
            "use_bias": int(rng.integers(2)), "bias_sel": int(rng.integers(2)),
        })  # fmt: skip
        free_at[i] = t + spacing
    return commands


@BOTH
@pytest.mark.parametrize("spacing", [0, 1, 2], ids=lambda s: f"latency+{s}")
def test_random_chains(spacing):
    seed = 30 + spacing
    print("seed", seed)
    rng = np.random.default_rng(seed)
    commands = random_commands(rng, 600, 8, Accumulator.LATENCY + spacing)
    psums = random_psum(rng, len(commands))
    biases = [int(b) for b in random_psum(rng, 2)]
    want = model(commands, psums, biases)
    assert len(want) > 50
    assert run(commands, psums, biases) == want


def command(index, first, last):
    return {"index": index, "first": first, "last": last, "use_bias": 0, "bias_sel": 0}


def two_adds(distance):
    """1 + 2 with `distance` cycles between the commands; the store held 64 before."""
    one, two, old = (int(np.float32(x).view(np.uint32)) for x in (1, 2, 64))
    commands = [command(3, 1, 0), *[None] * 10, command(3, 1, 0), *[None] * (distance - 1),
                command(3, 0, 1)]  # fmt: skip
    psums = [old, *[0] * 10, one, *[0] * (distance - 1), two]
    return np.uint32(run(commands, psums)[0]).view(np.float32)


@BOTH
def test_least_distance_is_the_latency():
    for distance in range(Accumulator.LATENCY, Accumulator.LATENCY + 4):
        assert two_adds(distance) == 3.0, distance
    assert two_adds(Accumulator.LATENCY - 1) != 3.0


@BOTH
def test_first_may_follow_at_once():
    """A chain may start while the one before it on the same index is still in the adder."""
    ones = int(np.float32(1).view(np.uint32))
    commands = [command(0, 1, 1), command(0, 1, 1), command(0, 1, 0), None, None, command(0, 0, 1)]
    assert run(commands, [ones] * 6) == [ones, ones, int(np.float32(2).view(np.uint32))]


def test_parameters():
    with pytest.raises(ValueError, match="acc_rows must be a power of two of at least 2, not 3"):
        Accumulator(3, 16)
    with pytest.raises(ValueError, match="result_depth must be a power of two of at least 2"):
        Accumulator(16, 1)
