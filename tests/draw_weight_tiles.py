# SPDX-License-Identifier: Apache-2.0
"""Draws docs/weight_tiles.svg: weight tiles that change without a bubble.

python -m tests.draw_weight_tiles [FILE]: simulates the matrix engine with 8 x 4 cells in Amaranth's
simulator, eight rows of MXFP4 on MXFP4 weights, so that a tile takes as many slices as the array
has rows: the fastest that tiles can follow each other.
"""

import sys
from dataclasses import replace

import matplotlib
import numpy as np
from amaranth.sim import Simulator

from golden.formats import Format
from hw.config import preset
from tests.test_matrix_engine import Bench, matmuls, write_kv, write_sram

CONFIG = replace(preset("tiny").tile, rows=8, sram_banks=32, stall_gates=False)
SHAPE = (8, 8, 1536, Format.MXFP4, Format.MXFP4, Format.BF16, False)
TRACES = ("weight row loaded", "slice enters", "swap (new tile)", "result row leaves")


def record(cycles: int) -> np.ndarray:
    """The traces, one bit per cycle, from the acceptance of the command on."""
    bench = Bench(CONFIG)
    memory, commands, _, _ = matmuls(np.random.default_rng(1), CONFIG, [SHAPE])
    engine, array = bench.engine, bench.engine.array
    found: list[list[int]] = []

    async def drive(ctx):
        await write_sram(ctx, bench, memory.sram_images)
        await write_kv(ctx, bench, memory.kv_images)
        ctx.set(engine.control.command.payload, commands[0])
        ctx.set(engine.control.command.valid, 1)
        await ctx.tick().until(engine.control.command.ready)
        ctx.set(engine.control.command.valid, 0)
        for _ in range(cycles):
            valid = ctx.get(array.slice.valid)
            found.append(
                [
                    ctx.get(engine.weights.command.valid),
                    valid,
                    valid & ctx.get(array.slice.swap),
                    ctx.get(array.result.valid) & ctx.get(array.result.ready),
                ]
            )
            await ctx.tick()

    simulator = Simulator(bench)
    simulator.add_clock(1e-9)
    simulator.add_testbench(drive)
    simulator.run()
    return np.array(found, bool).T


def draw(traces: np.ndarray, file: str) -> None:
    """One digital trace a row, as SVG."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "weight_tiles"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 2.4))
    for i, (name, trace) in enumerate(zip(TRACES, traces, strict=True)):
        base = -i * 1.4
        axes.step(np.arange(len(trace) + 1), np.append(trace, trace[-1]) + base, where="post", lw=1)
        axes.text(-2, base + 0.3, name, ha="right", fontsize=9)
    axes.set_xlim(0, traces.shape[1])
    axes.set_yticks([])
    axes.set_xlabel("cycles since the command was taken")
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    traces = record(170)
    slices = np.flatnonzero(traces[1])
    print(f"{len(slices)} slices in cycles {slices[0]} to {slices[-1]}")
    draw(traces, sys.argv[1] if len(sys.argv) > 1 else "docs/weight_tiles.svg")
