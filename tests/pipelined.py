# SPDX-License-Identifier: Apache-2.0
"""Bench of a fixed-latency pipeline with an `enable` input, in either simulator."""

import numpy as np
from amaranth.lib import wiring

from tests.simulators import Simulator


def run_pipeline(
    component: wiring.Component,
    inputs: dict[str, np.ndarray],
    outputs: list[str],
    seed: int | None = None,
) -> dict[str, np.ndarray]:
    """Outputs, as uint64 arrays, for inputs applied one set per cycle.

    With a seed, `enable` falls at random and the inputs are rubbish while it is low. A result that
    comes late or early, or that moves during a stall, shows up as a wrong one.
    """
    count = len(next(iter(inputs.values())))
    latency = component.LATENCY  # type: ignore[attr-defined]
    rng = None if seed is None else np.random.default_rng(seed)
    values = {name: [int(v) for v in column] for name, column in inputs.items()}
    results: dict[str, list[int]] = {name: [] for name in outputs}

    async def bench(ctx):
        step = 0
        while step < count + latency:
            advance = rng is None or rng.random() < 0.6
            ctx.set(component.enable, advance)
            for name, column in values.items():
                port = getattr(component, name)
                if advance and step < count:
                    ctx.set(port, column[step])
                elif rng is not None:
                    ctx.set(port, int(rng.integers(0, 1 << len(port), dtype=np.uint64)))
            if advance and step >= latency:
                for name in outputs:
                    results[name].append(ctx.get(getattr(component, name)))
            step += advance
            await ctx.tick()

    simulator = Simulator(component)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return {name: np.array(column, np.uint64) for name, column in results.items()}
