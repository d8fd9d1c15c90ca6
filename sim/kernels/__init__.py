# SPDX-License-Identifier: Apache-2.0
"""The kernels that `jalapeno sim` runs, by name."""

from dataclasses import replace

from sim.kernels import attention, gate, gemm, generate, layer, mla, mla_layer, moe
from sim.kernels.types import Kernel

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        gemm.KERNEL,
        attention.KERNEL,
        mla.KERNEL,
        gate.KERNEL,
        moe.KERNEL,
        replace(layer.KERNEL, variant=mla_layer.KERNEL),
        generate.KERNEL,
    )
}
