# SPDX-License-Identifier: Apache-2.0
"""The kernels that `jalapeno sim` runs, by name."""

from sim.kernels.types import Kernel

KERNELS: dict[str, Kernel] = {}
