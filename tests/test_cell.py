# SPDX-License-Identifier: Apache-2.0
"""The cell against the bit-exact model, in both simulators, and its weight registers."""

import numpy as np
import pytest

from golden.formats import Native
from hw.arrangement import activation_places, weight_places
from hw.cell import Cell
from hw.dot_multiply import bias_of, control_of
from hw.verilog import emit
from sim import runner, verilator
from tests.cell_vectors import NATIVE_PAIRS, packed_vectors
from tests.designs.cell_bank import CellBank
from tests.simulators import BOTH, Simulator


def natives(vectors: np.ndarray) -> np.ndarray:
    """Activation and weight formats of packed vectors, as one number."""
    return vectors[:, 38] & 0xC3


def report(vectors: np.ndarray, got: np.ndarray, want: np.ndarray) -> str:
    i = int(np.flatnonzero(got != want)[0])
    act, weight = Native(int(vectors[i, 38] & 3)), Native(int(vectors[i, 38] >> 6))
    return f"vector {i}, {act.name} x {weight.name}: {got[i]:#x}, expected {want[i]:#x}"


@BOTH
def test_vectors():
    seed = 21
    print("seed", seed)
    vectors, want = packed_vectors(np.random.default_rng(seed), 1000)
    bank = CellBank(1)
    got = []

    async def bench(ctx):
        for t in range(len(vectors) + CellBank.LATENCY):
            if t < len(vectors):
                ctx.set(bank.vector, int.from_bytes(vectors[t].tobytes(), "little"))
            if t >= CellBank.LATENCY:
                got.append(ctx.get(bank.result))
            await ctx.tick()

    simulator = Simulator(bank)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    result = np.array(got, np.uint32)
    assert np.array_equal(result, want), report(vectors, result, want)
    assert len(np.unique(natives(vectors))) == len(NATIVE_PAIRS)


@pytest.mark.slow
def test_million_vectors():
    seed, cells, cycles = 22, 32, 40_000
    print("seed", seed)
    vectors, want = packed_vectors(np.random.default_rng(seed), cells * cycles)
    build = verilator.build(emit(CellBank(cells), "cell_bank"), "cell_bank", blocks=["cell_row2"])
    result = runner.run(
        build, "tests.designs.bench_cells", parameters={"latency": CellBank.LATENCY},
        arrays={"vectors": vectors.reshape(cycles, -1)})  # fmt: skip
    got = result.arrays["results"].reshape(-1)
    assert np.array_equal(got, want), report(vectors, got, want)
    assert np.bincount(natives(vectors)).max() < len(vectors) / 8


ONE, TWO, THREE = 0x3F80, 0x4000, 0x4040  # BF16


def placed(codes: int, places: list[int]) -> int:
    return sum((codes >> place & 1) << i for i, place in enumerate(places))


def run_loads(loads: dict[int, tuple[int, int]], swaps: set[int], cycles: int) -> list[float]:
    """Weights that a cell of row 1 computes with, cycle by cycle.

    `loads` gives row and code of the load bus by cycle, `swaps` the cycles with a swap; the value
    in place i is that of the slice at the activation port in cycle i.
    """
    cell = Cell(2)
    found = []
    after = Cell.PSUM_AFTER + Cell.ROW_HOP
    natives = Native.BF16, Native.BF16
    one = placed(ONE, activation_places(*natives))
    control = {**control_of(*natives), "upper": 0, "right": 0, "left": 1}
    scale = {"bias": 127 + bias_of(*natives), "control": control}

    async def bench(ctx):
        ctx.set(cell.row, 1)
        for t in range(cycles + after):
            row, code = loads.get(t, (0, 0))
            weight = {"codes": placed(code, weight_places(Native.BF16)), "scale": 127, "nan": 0}
            ctx.set(cell.load, {"valid": t in loads, "row": row, "weight": weight})
            ctx.set(cell.activation, {
                "codes": one, **scale, "nan": 0, "empty": 0, "swap": t in swaps})  # fmt: skip
            if t >= after:
                found.append(float(np.uint32(ctx.get(cell.psum_out)).view(np.float32)))
            await ctx.tick()

    simulator = Simulator(cell)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return found


@BOTH
def test_swap_takes_a_load_of_the_cycle_before():
    found = run_loads({0: (1, ONE), 3: (1, TWO)}, {1, 4}, 7)
    assert found[1:] == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


@BOTH
def test_load_in_the_cycle_of_a_swap_waits_for_the_next():
    found = run_loads({0: (1, ONE), 1: (1, TWO)}, {1, 4}, 7)
    assert found[1:] == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


@BOTH
def test_load_for_another_row_is_ignored():
    found = run_loads({0: (1, ONE), 1: (0, TWO), 2: (3, THREE)}, {1, 4}, 7)
    assert found[1:] == [1.0] * 6


@BOTH
def test_activation_moves_on_in_one_cycle():
    cell = Cell(1)
    seen = []

    async def bench(ctx):
        for t in range(8):
            value = (t * 0x9E3779B97F4A7C15) ** 4 & ((1 << len(cell.activation.as_value())) - 1)
            ctx.set(cell.activation.as_value(), value)
            seen.append((value, ctx.get(cell.activation_out.as_value())))
            await ctx.tick()

    simulator = Simulator(cell)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    assert [out for _, out in seen[1:]] == [value for value, _ in seen[:-1]]
    assert len({value for value, _ in seen}) == 8


def test_parameters():
    with pytest.raises(ValueError, match="row_bits must be an integer of at least 1, not 0"):
        Cell(0)
