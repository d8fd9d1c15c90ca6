# SPDX-License-Identifier: Apache-2.0
"""Placing sub-blocks: inline for Amaranth's simulator, as instances of once-emitted modules for
Verilog.

Amaranth never merges equal modules, so a component that repeats (cell, lane, bank, router, tile) is
emitted once under its `emit_name` and instantiated. `VerilogPlatform` collects what must be
emitted.
"""

from typing import Any, Protocol, runtime_checkable

from amaranth import ClockSignal, Instance, Module, ResetInserter, ResetSignal
from amaranth.lib import wiring


@runtime_checkable
class Emitted(Protocol):
    """A component emitted once: `emit_name` names the module and its hardware parameters."""

    @property
    def emit_name(self) -> str: ...


def flat_ports(component: wiring.Component) -> list[tuple[str, bool, Any]]:
    """(Verilog port name, whether an input of `component`, value) of each of its leaf ports."""
    ports = []
    for path, member, value in component.signature.flatten(component):
        name = "__".join(str(part) for part in path)
        ports.append((name, member.flow is wiring.In, value))
    return ports


class VerilogPlatform:
    """Platform of Verilog emission; `components` maps module names to one representative each."""

    def __init__(self) -> None:
        self.components: dict[str, wiring.Component] = {}

    def register(self, component: wiring.Component) -> str:
        name = component.emit_name  # type: ignore[attr-defined]
        self.components.setdefault(name, component)
        return name


def place(
    m: Module, platform: Any, name: str, component: wiring.Component, reset: Any = None
) -> None:
    """Make `component` the submodule `name` of `m`.

    With a `VerilogPlatform` and a component that has an `emit_name` this is an Instance of the
    shared module, else the component itself. Connect only to the component's ports, never to its
    inside. `reset` resets the component in addition to the domain's own reset.
    """
    if not (isinstance(platform, VerilogPlatform) and isinstance(component, Emitted)):
        m.submodules[name] = component if reset is None else ResetInserter(reset)(component)
        return
    module = platform.register(component)
    connections: dict[str, Any] = {}
    for port, is_input, value in flat_ports(component):
        connections[f"{'i' if is_input else 'o'}_{port}"] = value
    if getattr(component, "clocked", True):
        connections["i_clk"] = ClockSignal()
        connections["i_rst"] = ResetSignal() if reset is None else ResetSignal() | reset
    m.submodules[name] = Instance(module, **connections)
