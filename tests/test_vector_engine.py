# SPDX-License-Identifier: Apache-2.0
"""The vector engine against `golden.vector`: random commands, orders, rates, illegal ones, faults."""

import numpy as np
import pytest

from golden import fp32
from golden.formats import MX_FORMATS, Format
from hw.config import preset
from hw.isa import Activity, Function, Kind, Op1, Reduce, Select, Status
from hw.vector_engine import VectorEngine
from tests.vector_bench import Memory, Result, apply, blank, random_command, run

SIZE = 1 << 15
CONFIGS = {4: preset("tiny").tile, 8: preset("mesh4").tile, 16: preset("small").tile}


def compare(lanes: int, make, count: int, memory: Memory, *, stall: float, seed: int) -> Result:
    """Runs `count` commands from `make(i)`, each prepared in the memory, equal in every byte."""
    expected: list[Memory] = []
    commands: list[dict[str, int]] = []
    changed = 0

    def prepare(i: int) -> dict[str, int]:
        command = make(i)
        after = memory.copy()
        apply(after, command, lanes)
        nonlocal changed
        changed += int((after.data != memory.data).any())
        commands.append(command)
        expected.append(after)
        return command

    def check(i: int) -> None:
        context = f"command {i}: { {k: v for k, v in commands[i].items() if v} }"
        np.testing.assert_array_equal(memory.data, expected[i].data, context)
        np.testing.assert_array_equal(memory.scales, expected[i].scales, context)

    result = run(VectorEngine(CONFIGS[lanes]), memory, [{}] * count, stall=stall, seed=seed,
                 limit=100_000, prepare=prepare, check=check)
    assert result.errors == [Status.RUNNING] * count
    assert changed > 0.6 * count
    return result


def columns(lanes: int) -> list[int]:
    return [1, lanes - 1, lanes, lanes + 1, 2 * lanes, 2 * lanes + 1, 5 * lanes]


def run_random(lanes: int, count: int, stall: float, seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    memory = Memory(SIZE, rng)

    def make(_: int) -> dict[str, int]:
        return random_command(
            rng, memory, lanes, int(rng.integers(1, 10)), int(rng.choice(columns(lanes))))

    compare(lanes, make, count, memory, stall=stall, seed=seed)


@pytest.mark.parametrize("lanes, count, stall", [(4, 16, 0.0), (4, 12, 0.4), (16, 3, 0.2)])
def test_random_commands(lanes, count, stall):
    run_random(lanes, count, stall, int(1000 * stall) + lanes)


@pytest.mark.slow
@pytest.mark.parametrize("lanes, count", [(4, 300), (8, 100), (16, 60)])
@pytest.mark.parametrize("stall", [0.0, 0.2, 0.8])
def test_many_random_commands(lanes, count, stall):
    run_random(lanes, count, stall, int(1000 * stall) + 100 + lanes)


def place(memory: Memory, address: int, values) -> None:
    raw = np.asarray(values, np.float32).ravel().view(np.uint8)
    memory.data[address: address + len(raw)] = raw


@pytest.mark.parametrize("stall", [0.0, pytest.param(0.4, marks=pytest.mark.slow)])
def test_back_to_back(stall):
    """Commands that wait already, each reading what the one before wrote."""
    lanes, count, cols = 4, 6, 9
    rng = np.random.default_rng(7)
    memory = Memory(SIZE, rng)
    pitch = 48
    place(memory, 0, rng.standard_normal(3 * pitch // 4))
    commands = []
    for i in range(count):
        command = blank() | {
            "rows": 3, "cols": cols, "a_addr": 1024 * i, "a_stride": pitch // 4,
            "a_format": Format.FP32, "out_addr": 1024 * (i + 1), "out_stride": pitch // 4,
            "out_format": Format.FP32, "store": 1, "mul": 1, "s2": Select.B,
            "b_kind": Kind.IMMEDIATE, "b_addr": int(fp32.bits(np.float32(1.25))),
            "reduce": (Reduce.SUM, Reduce.NONE, Reduce.MAX)[i % 3],
            "reduce_addr": 1024 * (i + 1) + 512 + 4 * i,
            # With and without a function: the longest pipeline before the shortest.
            "function": (Function.SIGMOID, Function.NONE)[i % 2],
        }
        if i % 3 == 1:
            # The row's reduction of the former command is this one's operand.
            command |= {"d_kind": Kind.ROW, "d_stride": 1, "add": 1, "s3": Select.D,
                        "d_addr": 1024 * i + 512 + 4 * (i - 1)}
        commands.append({k: int(v) for k, v in command.items()})
    expected = memory.copy()
    for command in commands:
        apply(expected, command, lanes)
    result = run(VectorEngine(CONFIGS[lanes]), memory, commands, stall=stall, seed=3)
    assert result.errors == [Status.RUNNING] * count
    np.testing.assert_array_equal(memory.data, expected.data)


def simple(lanes: int, rows: int, cols: int, **more: int) -> dict[str, int]:
    """FP32 copy from 0 to half of the memory, rows one after another."""
    pitch = -(-cols // lanes) * lanes
    return blank() | {
        "rows": rows, "cols": cols, "a_addr": 0, "a_stride": pitch, "a_format": int(Format.FP32),
        "out_addr": SIZE // 2, "out_stride": pitch, "out_format": int(Format.FP32), "store": 1,
    } | {k: int(v) for k, v in more.items()}


def cycles(commands: list[dict[str, int]], lanes: int = 4) -> list[int]:
    """From the cycle each command was taken, or the one before it was done, to its own `done`."""
    memory = Memory(SIZE, np.random.default_rng(1))
    memory.data[: SIZE // 2] = np.tile(np.float32(1.5).reshape(1).view(np.uint8), SIZE // 8)
    result = run(VectorEngine(CONFIGS[lanes]), memory, commands)
    assert result.errors == [Status.RUNNING] * len(commands)
    before = [0, *result.done[:-1]]
    return [d - max(t, b) for d, t, b in zip(result.done, result.taken, before, strict=True)]


VECTOR_B = {"b_kind": Kind.VECTOR, "b_addr": SIZE // 4, "b_format": Format.FP32,
            "op1": Op1.ADD, "s1": Select.B}
VECTOR_D = {"d_kind": Kind.VECTOR, "d_addr": SIZE // 8, "d_format": Format.FP32,
            "mul": 1, "s2": Select.D}
ROW_B = {"b_kind": Kind.ROW, "b_addr": SIZE // 4, "b_stride": 1, "op1": Op1.SUB, "s1": Select.B}


RATES: list[tuple[str, dict[str, int], int]] = [
    ("a", {}, 1), ("bf16", {"a_format": Format.BF16, "out_format": Format.BF16}, 1),
    ("a and b", VECTOR_B, 1), ("a, b and d", VECTOR_B | VECTOR_D, 2),
    ("a and rows", ROW_B, 1), ("reduced", {"reduce": Reduce.SUM, "reduce_addr": SIZE - 1024}, 1),
    ("function", {"function": Function.EXP2}, 1),
    ("mx", {"a_format": Format.MXFP8_E4M3, "out_format": Format.MXFP4}, 1),
]


@pytest.mark.parametrize(
    "cols", [13, pytest.param(4, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow)])
def test_rate(cols):
    """So many cycles for a vector more, in short rows and in long ones."""
    lanes = 4
    vectors = -(-cols // lanes)
    few, many = 4 + 24 // vectors, 4 + 64 // vectors
    pitch = vectors * lanes
    commands = [simple(lanes, rows, cols, **({"b_stride": pitch, "d_stride": pitch} | more))
                for _, more, _ in RATES for rows in (few, many)]
    taken = cycles(commands)
    for i, (name, _, per_vector) in enumerate(RATES):
        extra = (many - few) * vectors * per_vector
        if name == "reduced":
            # Writes of reductions, `lanes` rows at a time, share the port with the results.
            extra += (many - few) // lanes
        assert taken[2 * i + 1] - taken[2 * i] == pytest.approx(extra, abs=4), name


def test_turnaround():
    """A command of one vector, alone and in a queue of its like."""
    one = simple(4, 1, 4)
    alone, *queued, function, reduced = cycles([
        one, one, one, simple(4, 1, 4, function=Function.EXP2),
        simple(4, 1, 4, reduce=Reduce.SUM, reduce_addr=SIZE - 64)])
    print("one vector", alone, "queued", queued, "function", function, "reduced", reduced)
    assert len(set(queued)) == 1
    assert queued[0] <= alone <= 36
    assert function - queued[0] == 14
    assert 0 < reduced - queued[0] <= 24


ILLEGAL: list[dict[str, int]] = [
    {"rows": 0}, {"cols": 0}, {"op1": 5}, {"op1": 7}, {"function": 5}, {"reduce": 3}, {"mul": 1},
    {"add": 1, "s3": Select.D}, {"mul2": 1, "s4": 3, "b_kind": Kind.IMMEDIATE},
    {"op1": Op1.ADD, "s1": Select.B}, {"permute": 4}, {"permute": 15}, {"a_addr": 8},
    {"a_addr": 4}, {"a_stride": 6}, {"out_addr": SIZE // 2 + 4}, {"out_stride": 9},
    {"out_addr": SIZE // 2 + 8, "out_format": Format.MXFP8_E4M3},
    {"out_stride": 6, "out_format": Format.MXFP4},
    {"a_addr": 2, "a_format": Format.MXFP8_E4M3}, {"a_addr": 1, "a_format": Format.MXFP4},
    {"reduce": Reduce.SUM, "reduce_addr": SIZE - 62}, {"b_kind": Kind.ROW, "b_addr": 6},
    {"b_kind": Kind.VECTOR, "b_addr": 8, "b_format": Format.FP32},
    {"d_kind": Kind.VECTOR, "d_stride": 2, "d_format": Format.FP32},
]


def test_illegal():
    """No effect, an error, and the next command goes on as if nothing had been."""
    lanes = 4
    memory = Memory(SIZE, np.random.default_rng(2))
    expected = memory.copy()
    good = simple(lanes, 2, 12)
    commands = []
    for i, fault in enumerate(ILLEGAL):
        commands += [good | {k: int(v) for k, v in fault.items()}] + [good] * (i % 6 == 5)

    def check(i: int) -> None:
        if commands[i] is good:
            apply(expected, good, lanes)
        np.testing.assert_array_equal(memory.data, expected.data, str(commands[i]))

    result = run(VectorEngine(CONFIGS[lanes]), memory, commands, check=check)
    assert result.errors == [
        Status.RUNNING if c is good else Status.ILLEGAL_COMMAND for c in commands]
    assert result.errors.count(Status.RUNNING) == 4


def test_unused_operands_are_free():
    """Addresses, strides and formats of operands that are not used may be anything."""
    lanes = 4
    memory = Memory(SIZE, np.random.default_rng(2))
    command = simple(
        lanes, 2, 8, b_addr=3, b_stride=1, b_format=Format.FP32, d_kind=Kind.IMMEDIATE, d_addr=7,
        d_stride=3, d_format=Format.BF16, s1=3, s2=Select.D, reduce_addr=1) | {"s1": 0}
    expected = memory.copy()
    apply(expected, command, lanes)
    result = run(VectorEngine(CONFIGS[lanes]), memory, [command])
    assert result.errors == [Status.RUNNING]
    np.testing.assert_array_equal(memory.data, expected.data)


OUT_OF_RANGE: list[dict[str, int]] = [
    {"a_addr": SIZE}, {"a_addr": SIZE - 64}, {"a_addr": 0xFFFFFFF0}, {"out_addr": SIZE - 64},
    {"out_addr": 0xFFFFFFC0}, {"reduce": Reduce.SUM, "reduce_addr": SIZE - 4},
    VECTOR_B | {"b_addr": SIZE - 32, "b_stride": 12}, ROW_B | {"b_addr": SIZE - 8},
    {"out_addr": SIZE, "out_format": Format.MXFP8_E4M3},
]


@pytest.mark.parametrize("stall", [0.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_range(stall):
    """An access out of range ends the command with an error; the next one is as good as ever."""
    lanes = 4
    memory = Memory(SIZE, np.random.default_rng(4))
    good = simple(lanes, 3, 9, reduce=Reduce.MAX, reduce_addr=SIZE - 256, b_stride=12, **VECTOR_B)
    commands = [c for fault in OUT_OF_RANGE for c in (
        simple(lanes, 9, 12) | {k: int(v) for k, v in fault.items()}, good)]
    expected: list[Memory] = []

    def prepare(i: int) -> dict[str, int]:
        if commands[i] is good:
            expected[:] = [memory.copy()]
            apply(expected[0], good, lanes)
        return commands[i]

    def check(i: int) -> None:
        if commands[i] is good:
            np.testing.assert_array_equal(memory.data, expected[0].data, str(commands[i - 1]))

    result = run(VectorEngine(CONFIGS[lanes]), memory, commands, stall=stall, seed=5,
                 prepare=prepare, check=check)
    assert result.errors == [Status.ADDRESS_RANGE, Status.RUNNING] * len(OUT_OF_RANGE)


@pytest.mark.parametrize("lanes", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_blocks(lanes):
    """Results in MX formats: whole and short blocks, loaded again by the next command."""
    rng = np.random.default_rng(20)
    memory = Memory(SIZE, rng)
    cases = [(fmt, cols) for fmt in MX_FORMATS for cols in (1, 40)]

    def make(i: int) -> dict[str, int]:
        fmt, cols = cases[i // 2]
        pitch = -(-cols // 32) * 32
        if i % 2 == 0:
            place(memory, 0, rng.standard_normal(3 * pitch) * np.exp2(rng.integers(-9, 9)))
            return simple(lanes, 3, cols, a_stride=pitch, out_format=fmt, out_stride=pitch)
        return simple(lanes, 3, cols, a_addr=SIZE // 2, a_format=fmt, a_stride=pitch,
                      out_addr=SIZE // 4, out_stride=pitch)

    compare(lanes, make, 2 * len(cases), memory, stall=0.1, seed=1)


def test_activity():
    """Idle without a command, busy, starved without operands, blocked without room."""
    lanes = 4
    memory = Memory(SIZE, np.random.default_rng(6))
    free = run(VectorEngine(CONFIGS[lanes]), memory, [simple(lanes, 4, 32)])
    assert free.activity[0] is Activity.IDLE
    assert free.activity.count(Activity.BUSY) >= 32
    assert Activity.BLOCKED not in free.activity
    held = run(VectorEngine(CONFIGS[lanes]), memory, [simple(lanes, 4, 32)], stall=0.8, seed=2)
    assert held.activity.count(Activity.STARVED) > 10
    assert held.activity.count(Activity.BLOCKED) > 10
