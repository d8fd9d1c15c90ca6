# SPDX-License-Identifier: Apache-2.0
"""The element mask and its steps from row to row: the mask unit and whole commands."""

import numpy as np
import pytest

from golden.formats import Format
from golden.vector import counted, vector
from hw.config import preset
from hw.isa import Reduce, Status
from hw.vector_engine import VectorEngine
from hw.vector_mask import VectorMask
from tests.simulators import VERILOG_FIRST, Simulator
from tests.vector_bench import Memory, apply, blank, run

SEED = 9_412
STEPS = [(0, 0), (0, 1), (1, 0), (1, 1)]
CASES = [  # rows, cols, mask_lo, mask_hi
    (5, 7, 0, 3),  # causal
    (5, 9, 2, 5),
    (4, 8, 6, 1),  # wraps around the ring
    (6, 5, 3, 3),  # empty, and with one step not any more
    (5, 9, 0xFFFE, 2),  # the ends wrap around at 2^16
    (5, 9, 2, 0xFFFE),
    (4, 6, 0xFFFD, 0xFFFF),
    (1, 1, 0, 1),
]


def test_steps_of_the_model():
    """The masks of a prefill chunk, written out."""
    causal = [counted(6, 0, 3, r, mask_hi_step=True).nonzero()[0].tolist() for r in range(4)]
    assert causal == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    both = {"mask_lo_step": True, "mask_hi_step": True}
    window = [counted(5, 1, 3, r, **both).nonzero()[0].tolist() for r in range(4)]
    assert window == [[1, 2], [2, 3], [3, 4], [4]]
    wrapped = [counted(4, 0xFFFF, 2, r, **both).nonzero()[0].tolist() for r in range(3)]
    assert wrapped == [[0, 1], [0, 1, 2], [1, 2, 3]]
    a = np.array([[3, 2, 5, 9], [3, 2, 5, 9], [3, 2, 5, 9]], np.float32)
    out, largest = vector(
        a, lanes=4, mask=True, mask_lo=0, mask_hi=2, mask_hi_step=True, reduce="max"
    )
    assert largest.tolist() == [3, 5, 9]
    assert out.tolist() == [[3, 2, 0, 0], [3, 2, 5, 0], [3, 2, 5, 9]]
    total = vector(a, lanes=4, mask=True, mask_lo=0, mask_hi=2, reduce="sum", **both)[1]
    assert total.tolist() == [5, 7, 14]


@pytest.mark.parametrize("lanes", [4, 16])
def test_mask_of_every_vector(lanes):
    """Commands back to back, with and without pauses; every vector's outputs are compared."""
    seed = SEED + lanes
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    cases = [(*case, 1, *steps) for case in CASES for steps in STEPS]
    for _ in range(40):
        rows, cols = int(rng.integers(1, 9)), int(rng.integers(1, 3 * lanes + 2))
        ends = [int(v) for v in rng.integers(-4, cols + 3, 2) % (1 << 16)]
        cases.append((rows, cols, *ends, *(int(v) for v in rng.integers(0, 2, 3))))
    dut = VectorMask(lanes)
    compared = 0

    async def bench(ctx):
        nonlocal compared
        for index, (rows, cols, lo, hi, mask, lo_step, hi_step) in enumerate(cases):
            for port, value in (
                (dut.rows, rows),
                (dut.mask_lo, lo),
                (dut.mask_hi, hi),
                (dut.cols, cols),
                (dut.mask, mask),
                (dut.mask_lo_step, lo_step),
                (dut.mask_hi_step, hi_step),
                (dut.start, 1),
            ):
                ctx.set(port, value)
            await ctx.tick()
            ctx.set(dut.start, 0)
            # Taken with `start`: they may change from here on.
            for port in (dut.rows, dut.mask_lo, dut.mask_hi):
                ctx.set(port, int(rng.integers(0, 1 << 16)))
            vectors = -(-cols // lanes)
            for r in range(rows):
                row = counted(cols, lo, hi, r, mask_lo_step=lo_step, mask_hi_step=hi_step)
                padded = np.zeros((2, vectors * lanes), bool)
                padded[0, :cols] = True
                padded[1, :cols] = row if mask else True
                for v in range(vectors):
                    while index % 2 and rng.random() < 0.3:
                        ctx.set(dut.step, 0)
                        await ctx.tick()
                    here = (ctx.get(dut.present), ctx.get(dut.keep))
                    want = [
                        sum(1 << int(i) for i in bits.nonzero()[0])
                        for bits in padded[:, v * lanes : (v + 1) * lanes]
                    ]
                    assert list(here) == want, (cases[index], r, v)
                    assert ctx.get(dut.last) == (v == vectors - 1)
                    assert ctx.get(dut.final) == (v == vectors - 1 and r == rows - 1)
                    compared += 1
                    ctx.set(dut.step, 1)
                    await ctx.tick()
            ctx.set(dut.step, 0)

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    assert compared > 300


@VERILOG_FIRST
@pytest.mark.parametrize("stall", [0.0, 0.4])
def test_masks_of_a_prefill_chunk(stall):
    """Commands that wait at the engine, each with its own mask; NaN behind the mask is harmless."""
    tile = preset("tiny").tile
    memory = Memory(1 << 15, np.random.default_rng(SEED))
    commands = []
    for i, (rows, cols, lo, hi) in enumerate(CASES):
        for j, (lo_step, hi_step) in enumerate(STEPS):
            commands.append(
                blank()
                | {
                    "rows": rows,
                    "cols": cols,
                    "a_format": int(Format.FP32),
                    "a_stride": 16,
                    "out_format": int(Format.FP32),
                    "out_addr": 4096 + 2048 * j,
                    "out_stride": 16,
                    "store": 1,
                    "reduce": int((Reduce.SUM, Reduce.MAX)[(i + j) % 2]),
                    "reduce_addr": 16384 + 256 * (4 * i + j),
                    "mask": 1,
                    "mask_lo": lo,
                    "mask_hi": hi,
                    "mask_lo_step": lo_step,
                    "mask_hi_step": hi_step,
                }
            )
    for r in range(6):
        row = np.arange(16, dtype=np.float32) + 1
        row[3 + r] = np.nan
        memory.put(64 * r, row, Format.FP32)
    expected = memory.copy()
    for command in commands:
        apply(expected, command, tile.lanes)
    result = run(VectorEngine(tile), memory, commands, stall=stall, seed=SEED)
    assert result.errors == [Status.RUNNING] * len(commands)
    assert (memory.data == expected.data).all()
    # lo = 0, hi = 3 + r: the NaN of row r is the first element that does not count.
    largest = memory.load(commands[1]["reduce_addr"], 5, Format.FP32)
    assert largest.tolist() == [3, 4, 5, 6, 7]
