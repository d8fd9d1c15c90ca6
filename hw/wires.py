# SPDX-License-Identifier: Apache-2.0
"""Named intermediate signals and pipeline registers of datapaths."""

from typing import Any

from amaranth import Module, Signal, Value


def wire(m: Module, name: str, value: Any, shape: Any = None) -> Signal:
    """A named signal that carries `value`, in `shape` (default: as wide as the value, unsigned)."""
    signal = Signal(len(Value.cast(value)) if shape is None else shape, name=name)
    m.d.comb += signal.eq(value)
    return signal


def delayed(m: Module, name: str, value: Any, cycles: int = 1, *, reset: bool = False) -> Any:
    """`value` after `cycles` registers of its own shape; control values want `reset`."""
    for i in range(cycles):
        stage = Signal.like(value, name=f"{name}_{i + 1}", reset_less=not reset)
        m.d.sync += stage.eq(value)
        value = stage
    return value
