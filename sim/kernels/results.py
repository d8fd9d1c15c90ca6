# SPDX-License-Identifier: Apache-2.0
"""From finished runs to the figures of a kernel: fractions of peak and of the binding roofline."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from sim.errors import ToolError
from sim.kernels.system import SystemResult
from sim.kernels.types import KernelRequest, KernelResult, Setting
from sim.programs.work import Work

SOURCES = {
    "compared": "measured",
    "mismatched": "measured",
    "max_error": "measured",
    "max_error_bound": "derived",
    "cycles": "measured",
    "fraction_of_peak": "derived",
    "fraction_of_roofline": "derived",
    "roofline": "derived",
    "counters": "measured",
    "wall_s": "measured",
    "build_s": "measured",
    "cycles_per_s": "measured",
}


def kernel_result(
    kernel: str,
    request: KernelRequest,
    shape: Mapping[str, Setting],
    result: SystemResult,
    works: Sequence[Work],
    error: float,
    bound: float,
) -> KernelResult:
    """Figures of a run. `works` are the tiles' work over all runs; the slowest tile's roofline
    binds.

    ToolError when the run is faster than its roofline, which cannot be.
    """
    cycles = sum(result.cycles)
    slowest = max(works, key=lambda work: work.roofline()[1])
    _, least = slowest.roofline()
    peak = sum((work.array for work in works), Fraction(0)) / len(works)
    for figure, value in (("roofline", least / cycles), ("peak", peak / cycles)):
        if value > 1:
            raise ToolError(
                f"{kernel} took {cycles} cycles, less than its {figure} allows "
                f"({float(value * cycles):.1f}): the count or the roofline is wrong"
            )
    if not np.isfinite(error):
        error = float("inf")
    return KernelResult(
        kernel=kernel,
        config=request.config.name,
        model=request.model,
        seed=request.seed,
        shape=dict(shape),
        compared=result.compared,
        mismatched=result.mismatched,
        max_error=float(error),
        max_error_bound=float(bound),
        cycles=cycles,
        fraction_of_peak=float(peak / cycles),
        fraction_of_roofline=float(least / cycles),
        roofline=slowest.describe(),
        counters=result.counters,
        wall_s=result.seconds,
        build_s=result.build.seconds,
        cycles_per_s=result.simulated / result.seconds,
        sources=SOURCES,
        differences=result.differences,
        order_checked=result.order.commands if result.order else 0,
        order_faults=tuple(map(str, result.order.findings)) if result.order else (),
    )


def largest_error(
    found: np.ndarray, reference: np.ndarray, bound: np.ndarray | float
) -> tuple[float, float]:
    """Largest absolute error, and the bound where the error is nearest to (or beyond) it."""
    difference = np.abs(np.asarray(found, np.float64) - reference)
    limit = np.broadcast_to(np.asarray(bound, np.float64), difference.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(difference == 0, 0.0, difference / limit)
    worst = np.unravel_index(int(np.nanargmax(share)) if share.size else 0, difference.shape)
    if share[worst] > 1:
        return float(difference[worst]), float(limit[worst])
    return float(difference.max()), float(max(limit.max(), difference.max()))
