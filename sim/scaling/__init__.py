# SPDX-License-Identifier: Apache-2.0
"""Full models on full-size chips: from measured cycles and stated assumptions to time and rate.

`throughput` gives every figure with its unit and source; `assumptions` lists what is assumed,
`records` reads what was measured, `step` does the
arithmetic of a step, `compose` puts it beside the published figures.
"""

from sim.scaling.compose import throughput

__all__ = ["throughput"]
