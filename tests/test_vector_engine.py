# SPDX-License-Identifier: Apache-2.0
"""The vector engine against the model: every byte of memory, rates, faults, illegal commands."""

import re

import numpy as np
import pytest

from golden import fp32
from golden.formats import MX_FORMATS, Format
from golden.vector import exponentials
from hw.config import preset
from hw.isa import Activity, Function, Kind, Op1, Reduce, Select, Status
from hw.vector_engine import VectorEngine
from hw.verilog import emit
from tests.simulators import BOTH, VERILOG_FIRST
from tests.vector_bench import Memory, apply, blank, random_command, run

TINY = preset("tiny").tile
SMALL = preset("small").tile
SLICE = preset("slice").tile
SEED = 7_301


def same(memory: Memory, expected: Memory) -> bool:
    return bool((memory.data == expected.data).all() and (memory.scales == expected.scales).all())


def random_run(config, count: int, stall: float, seed: int) -> None:
    """`count` commands on one engine, each with new operands once the one before is done."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    lanes = config.lanes
    memory = Memory(1 << 15, rng)
    expected: list[Memory] = []
    commands = []
    sizes = (1, lanes - 1, lanes, lanes + 1, 2 * lanes + 1, 5 * lanes, 8 * lanes)

    def prepare(index: int) -> dict[str, int]:
        rows = int(rng.integers(1, 10 if config is TINY else 4))
        commands.append(random_command(rng, memory, lanes, rows, sizes[index % len(sizes)]))
        expected.append(memory.copy())
        apply(expected[-1], commands[-1], lanes)
        return commands[-1]

    def check(index: int) -> None:
        used = {name: value for name, value in commands[index].items() if value}
        assert same(memory, expected[index]), f"command {index}: {used}"

    result = run(
        VectorEngine(config),
        memory,
        [{}] * count,
        stall=stall,
        seed=seed,
        prepare=prepare,
        check=check,
    )
    assert result.errors == [Status.RUNNING] * count


@VERILOG_FIRST
@pytest.mark.parametrize("stall", [0.0, 0.4])
def test_random_commands(stall):
    random_run(TINY, 21, stall, SEED + int(10 * stall))


@BOTH
@pytest.mark.slow
def test_random_commands_16_lanes():
    random_run(SMALL, 3, 0.2, SEED)


@BOTH
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_many_random_commands(seed):
    random_run(TINY, 100, (0.0, 0.2, 0.6)[seed % 3], SEED + 100 + seed)


@BOTH
@pytest.mark.slow
def test_many_random_commands_16_lanes():
    random_run(SMALL, 28, 0.2, SEED + 200)


@BOTH
@pytest.mark.slow
def test_random_commands_64_lanes():
    """Vectors of more than one block."""
    random_run(SLICE, 7, 0.2, SEED + 300)


def matrix_command(rows: int, cols: int, /, **fields: int) -> dict[str, int]:
    """A copy of FP32 rows; B, D, result and reduction have regions of their own."""
    base = {
        "rows": rows,
        "cols": cols,
        "a_format": Format.FP32,
        "b_format": Format.FP32,
        "d_format": Format.FP32,
        "out_format": Format.FP32,
        "a_addr": 0,
        "b_addr": 4096,
        "d_addr": 8192,
        "out_addr": 12288,
        "reduce_addr": 16384,
        "a_stride": 64,
        "b_stride": 64,
        "d_stride": 64,
        "out_stride": 64,
        "store": 1,
    }
    return blank() | {name: int(value) for name, value in (base | fields).items()}


LATENCY = 28  # of a command beside its vectors, without function, reduction and MX result
RATES = {
    "copy": ({}, 0, 1),
    "bf16": ({"a_format": Format.BF16, "out_format": Format.BF16}, 0, 1),
    "function": ({"function": Function.EXP2}, 14, 1),
    "sum": ({"reduce": Reduce.SUM}, 18, 1),
    "function_sum": ({"function": Function.SIGMOID, "reduce": Reduce.SUM}, 32, 1),
    "vector": ({"b_kind": Kind.VECTOR, "mul": 1}, 0, 1),
    "row": ({"b_kind": Kind.ROW, "op1": Op1.SUB}, 0, 1),
    "two_vectors": ({"b_kind": Kind.VECTOR, "d_kind": Kind.VECTOR, "mul": 1}, 0, 2),
}


@VERILOG_FIRST
def test_rate_and_latency():
    """Commands that wait at the engine; a command is taken while the one before runs."""
    memory = Memory(1 << 15, np.random.default_rng(SEED))
    shapes = ((1, 4), (4, 32), (16, 4))
    cases = [(name, rows, cols) for name in RATES for rows, cols in shapes]
    commands = [matrix_command(rows, cols, **RATES[name][0]) for name, rows, cols in cases]
    result = run(VectorEngine(TINY), memory, commands)
    last = result.taken[0] + 3
    for case, done in zip(cases, result.done, strict=True):
        name, rows, cols = case
        _, extra, cycles = RATES[name]
        vectors = rows * cols // TINY.lanes
        assert done - last == LATENCY - 3 + extra + cycles * vectors, case
        last = done


@VERILOG_FIRST
def test_activity_tells_every_cycle():
    command = matrix_command(4, 64)
    engine = VectorEngine(TINY)
    for name, seen in (("", None), ("a", Activity.STARVED), ("out", Activity.BLOCKED)):
        memory = Memory(1 << 15, np.random.default_rng(SEED))
        result = run(engine, memory, [command], stall={name: 0.7}, seed=SEED)
        assert result.activity[0] is Activity.IDLE
        during = result.activity[result.taken[0] + 1 : result.done[0]]
        assert Activity.IDLE not in during
        assert (Activity.BLOCKED in during) == (seen is Activity.BLOCKED)
        # Without stalls it starves only until the first operands have come.
        assert (during.count(Activity.STARVED) > 10) == (seen is Activity.STARVED)
        assert during.count(Activity.BUSY) >= 64


@VERILOG_FIRST
@pytest.mark.parametrize("stall", [0.0, 0.4])
def test_softmax_as_a_chain_of_dependent_commands(stall):
    """Every command reads what the one before wrote, and waits at the engine meanwhile."""
    rng = np.random.default_rng(SEED)
    rows, cols, lanes = 6, 21, TINY.lanes
    memory = Memory(1 << 15, rng)
    a = rng.standard_normal((rows, cols)).astype(np.float32)
    for r in range(rows):
        memory.put(256 * r, a[r], Format.FP32)
    largest = matrix_command(rows, cols, reduce=Reduce.MAX, store=0)
    powers = matrix_command(
        rows,
        cols,
        op1=Op1.SUB,
        b_kind=Kind.ROW,
        b_addr=16384,
        b_stride=1,
        mul=1,
        s2=Select.D,
        d_kind=Kind.IMMEDIATE,
        d_addr=fp32.bits(np.float32(1.5)),
        function=Function.EXP2,
        reduce=Reduce.SUM,
        reduce_addr=20480,
    )
    inverse = matrix_command(1, rows, a_addr=20480, out_addr=24576, function=Function.RECIPROCAL)
    scale = matrix_command(
        rows, cols, a_addr=12288, mul=1, b_kind=Kind.ROW, b_addr=24576, b_stride=1, out_addr=12288
    )
    commands = [largest, powers, inverse, scale]
    expected = memory.copy()
    for command in commands:
        apply(expected, command, lanes)
    result = run(VectorEngine(TINY), memory, commands, stall=stall, seed=SEED)
    assert result.errors == [Status.RUNNING] * 4
    assert same(memory, expected)
    out = np.stack([memory.load(12288 + 256 * r, cols, Format.FP32) for r in range(rows)])
    raw, total = exponentials(a, a.max(axis=1), 1.5, lanes=lanes)
    assert np.allclose(out, raw / total[:, None], rtol=1e-6)


ILLEGAL = [
    {"rows": 0},
    {"cols": 0},
    {"op1": 5},
    {"op1": 7},
    {"function": 5},
    {"reduce": 3},
    {"s1": 3},
    {"s4": 3},
    {"a_addr": 8},
    {"a_addr": 2},
    {"a_stride": 2},
    {"out_addr": 4},
    {"out_stride": 1},
    {"a_format": Format.BF16, "a_addr": 4},
    {"a_format": Format.BF16, "a_stride": 1},
    {"a_format": Format.MXFP4, "a_addr": 1},
    {"out_format": Format.MXFP8_E4M3, "out_addr": 4},
    {"out_format": Format.MXFP4, "out_stride": 2},
    {"b_kind": Kind.VECTOR, "b_addr": 4},
    {"d_kind": Kind.VECTOR, "d_stride": 3},
    {"b_kind": Kind.ROW, "b_addr": 2},
    {"reduce": Reduce.SUM, "reduce_addr": 2},
    {"permute": 4},
    {"permute": 15},
    {"op1": Op1.ADD},
    {"mul": 1, "s2": Select.D},
    {"add": 1, "s3": Select.B},
    {"mul2": 1},
]


@BOTH
def test_illegal_commands_have_no_effect():
    memory = Memory(1 << 15, np.random.default_rng(SEED))
    before = memory.copy()
    commands = [matrix_command(2, 12, **fields) for fields in ILLEGAL]
    result = run(VectorEngine(TINY), memory, commands)
    for fields, error in zip(ILLEGAL, result.errors, strict=True):
        assert error is Status.ILLEGAL_COMMAND, fields
    assert same(memory, before)


@BOTH
def test_what_is_not_used_is_not_checked():
    memory = Memory(1 << 15, np.random.default_rng(SEED))
    commands = [
        matrix_command(2, 12, b_addr=1, d_addr=3, d_stride=1, reduce_addr=1, s1=Select.D),
        matrix_command(2, 12, out_addr=2, out_stride=3, store=0, reduce=Reduce.MAX),
        matrix_command(2, 12, b_kind=Kind.IMMEDIATE, b_addr=3, mul=1),
        matrix_command(2, 12, store=0),
    ]
    expected = memory.copy()
    for command in commands:
        apply(expected, command, TINY.lanes)
    assert run(VectorEngine(TINY), memory, commands).errors == [Status.RUNNING] * 4
    assert same(memory, expected)


OUTSIDE = {
    "a": {"a_addr": 1 << 20},
    "a_row": {"a_addr": (1 << 15) - 128, "a_stride": 32},
    "b": {"b_kind": Kind.VECTOR, "b_addr": 0xFFFF_FF00, "mul": 1},
    "d": {"d_kind": Kind.ROW, "d_addr": 1 << 16, "mul": 1, "s2": Select.D},
    "wrap": {"a_addr": 0xFFFF_FFF0},
    "out": {"out_addr": (1 << 15) - 32, "out_stride": 4},
    "out_wrap": {"out_addr": 0xFFFF_FFF0},
    "reduction": {"reduce": Reduce.SUM, "reduce_addr": 0x8000_0000, "store": 0},
}


@VERILOG_FIRST
@pytest.mark.parametrize("stall", [0.0, 0.5])
def test_access_out_of_range(stall):
    """The command ends with ADDRESS_RANGE; the next one, which waited, is not harmed."""
    memory = Memory(1 << 15, np.random.default_rng(SEED))
    good = matrix_command(
        3, 24, a_addr=4096, out_addr=28672, reduce=Reduce.SUM, reduce_addr=20480, mul=1, s2=Select.X
    )
    commands = []
    for fields in OUTSIDE.values():
        commands += [matrix_command(5, 24, **fields), good]
    states: list[Memory] = []
    result = run(
        VectorEngine(TINY),
        memory,
        commands,
        stall=stall,
        seed=SEED,
        check=lambda index: states.append(memory.copy()),
    )
    for i, name in enumerate(OUTSIDE):
        assert result.errors[2 * i : 2 * i + 2] == [Status.ADDRESS_RANGE, Status.RUNNING], name
        before, after = states[2 * i : 2 * i + 2]
        apply(before, good, TINY.lanes)
        assert same(after, before), name


@BOTH
def test_a_fault_ends_a_long_command_early():
    memory = Memory(1 << 15, np.random.default_rng(SEED))
    command = matrix_command(60_000, 60_000, b_kind=Kind.ROW, b_addr=1 << 16, mul=1)
    result = run(VectorEngine(TINY), memory, [command], limit=100)
    assert result.errors == [Status.ADDRESS_RANGE]


@VERILOG_FIRST
def test_blocks_stored_and_loaded_again():
    """Rows of a short block, and of whole ones and a short one, in every MX format."""
    rng = np.random.default_rng(SEED)
    memory = Memory(1 << 15, rng)
    commands = []
    for i, fmt in enumerate(MX_FORMATS):
        for r, cols in enumerate((1, 75)):
            values = rng.standard_normal(80) * np.exp2(rng.integers(-9, 9))
            memory.put(512 * r, values.astype(np.float32), Format.FP32)
            here = {"a_stride": 0, "out_addr": 4096 + 2048 * i + 512 * r}
            commands += [
                matrix_command(2, cols, a_addr=512 * r, out_format=fmt, **here),
                matrix_command(
                    2,
                    cols,
                    **here
                    | {
                        "a_addr": here["out_addr"],
                        "a_format": fmt,
                        "a_stride": 64,
                        "out_addr": 20480 + 1024 * i + 512 * r,
                    },
                ),
            ]
    expected = memory.copy()
    for command in commands:
        apply(expected, command, TINY.lanes)
    result = run(VectorEngine(TINY), memory, commands, stall=0.1, seed=SEED)
    assert result.errors == [Status.RUNNING] * len(commands)
    assert same(memory, expected)


@BOTH
def test_results_in_place_of_operands():
    memory = Memory(1 << 15, np.random.default_rng(SEED))
    command = matrix_command(7, 22, out_addr=0, b_kind=Kind.VECTOR, op1=Op1.MIN)
    expected = memory.copy()
    apply(expected, command, TINY.lanes)
    assert run(VectorEngine(TINY), memory, [command], stall=0.3).errors == [Status.RUNNING]
    assert same(memory, expected)


def test_verilog_evaluates_every_bit():
    """A combinational process with nothing but a constant has no event that would start it."""
    texts = emit(VectorEngine(TINY), "vector_engine")
    never = re.compile(r"always @\*\n\s*\S+(?: \S+)? = \d+'\w+;\n")
    assert len(texts) > 5
    for name, text in texts.items():
        assert "assign" in text
        assert not never.findall(text), name


def test_sizes_are_checked():
    from hw.vector_issue import VectorIssue
    from hw.vector_load import VectorLoad
    from hw.vector_mask import VectorMask
    from hw.vector_quantise import VectorQuantise
    from hw.vector_reduce import VectorReduce
    from hw.vector_store import VectorStore

    for make in (
        VectorIssue,
        VectorMask,
        VectorStore,
        VectorReduce,
        lambda n: VectorLoad(n, 1),
        lambda n: VectorQuantise(n, 33, 16),
    ):
        for lanes in (0, 1, 6):
            with pytest.raises(ValueError, match="lanes must be"):
                make(lanes)
    with pytest.raises(ValueError, match="operands must be"):
        VectorLoad(4, 3)
    with pytest.raises(ValueError, match="depth must be"):
        VectorQuantise(4, 33, 7)
