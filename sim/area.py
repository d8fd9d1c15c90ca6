# SPDX-License-Identifier: Apache-2.0
"""Area and depth of a block, mapped to the OSU 0.18 um cells by Yosys and timed by OpenSTA.

The library is Debian's package `qflow-tech-osu018`, the timer its `opensta`; Yosys is the `pyosys`
wheel. There are no wires in these figures, so they are given as ratios: area in NAND2 equivalents,
delay in FO4. Equal for equal Yosys versions, within some percent between versions.

A shared module (`hw.emit.place`) is mapped once, by itself, and counted as often as it is placed;
SRAM macros are black boxes without area. So no path is seen across the border of a shared module.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from amaranth.lib import wiring

from hw.verilog import macro, modules
from sim import cache
from sim.errors import ToolError

LIBRARY = Path("/usr/share/qflow/tech/osu018/osu018_stdcells.lib")
NAND2_AREA = 24.0  # um2
FO4_NS = 0.099  # a NAND-sized inverter driving four of its kind
TARGET_PS = 1000  # the delay that abc sizes for
_ABC = (
    f"strash;ifraig;scorr;dc2;dretime;strash;&get -n;&dch -f;&nf -D {TARGET_PS};&put;print_stats;"
    f"buffer;upsize -D {TARGET_PS};dnsize -D {TARGET_PS};topo;stime -p"
)
_CONSTRAINTS = "set_driving_cell INVX4\nset_load 0.03 [all_outputs]\n"
_STA = """read_liberty {library}
read_verilog top.v
link_design top
create_clock -name clk -period 100 {clock}
set_input_delay -clock clk 0 [all_inputs]
set_output_delay -clock clk 0 [all_outputs]
set_driving_cell -lib_cell INVX4 [all_inputs]
set_load 0.03 [all_outputs]
report_checks -path_delay max
exit
"""


@dataclass(frozen=True)
class Area:
    """`nand2` is the area with flip-flops, `levels` the mapped cells on abc's longest path, `fo4`
    the longest path from a register or input to a register or output (None without OpenSTA).
    """

    nand2: int
    flip_flops: int
    levels: int
    fo4: float | None


@dataclass(frozen=True)
class BlockArea:
    """Figures of a block and, by name, of the blocks in it: (how often placed, each one's figures).

    Inline sub-blocks are part of the block's own figures, shared modules are placed in it; both are
    in `parts`. Parts that are mapped alone lose what they share with their neighbours: their sum
    is near the whole, not equal to it.
    """

    total: Area
    parts: Mapping[str, tuple[int, Area]]
    yosys: str
    timer: bool

    def to_json(self) -> dict[str, Any]:
        """`nand2`, `flip_flops`, `levels`, `fo4`, and the same by sub-block."""
        parts = {n: {"instances": count} | asdict(a) for n, (count, a) in self.parts.items()}
        return asdict(self.total) | {"blocks": parts, "yosys": self.yosys, "source": "measured"}


def missing() -> list[str]:
    """Debian packages that `area` needs and does not find; without opensta it gives no delay."""
    found = {"qflow-tech-osu018": LIBRARY.is_file(), "opensta": shutil.which("sta") is not None}
    return [package for package, there in found.items() if not there]


def area(component: wiring.Component, name: str) -> BlockArea:
    """Figures of `component` as module `name`.

    ToolError names what is missing. Takes a few seconds for ten thousand gates; figures of a module
    are kept in the cache.
    """
    if not LIBRARY.is_file():
        raise ToolError(
            f"the cell library {LIBRARY} was not found; on Debian: apt install qflow-tech-osu018"
        )
    texts = modules(component, name)
    placed = {module: _placed(text, set(texts)) for module, text in texts.items()}
    own = {module: _mapped(texts, module, module) for module in texts}

    def whole(module: str) -> Area:
        total = own[module]
        for child, count in placed[module].items():
            part = whole(child)
            total = Area(
                total.nand2 + count * part.nand2,
                total.flip_flops + count * part.flip_flops,
                max(total.levels, part.levels),
                None if total.fo4 is None else max(total.fo4, part.fo4 or 0.0),
            )
        return total

    parts = {
        inner.removeprefix(f"{name}."): (1, _mapped(texts, name, inner))
        for inner in sorted(re.findall(r"^module \\(\S+)", texts[name], re.MULTILINE))
        if inner.count(".") == 1
    }
    parts |= {child: (count, whole(child)) for child, count in sorted(placed[name].items())}
    return BlockArea(
        whole(name), parts, metadata.version("pyosys"), shutil.which("sta") is not None
    )


def _placed(text: str, shared: set[str]) -> dict[str, int]:
    """How often each shared module is placed in an RTLIL text, its inline sub-blocks included."""
    inside: dict[str, dict[str, int]] = {}
    for module, body in re.findall(r"^module \\(\S+)\n(.*?)^end\n", text, re.MULTILINE | re.DOTALL):
        counts: dict[str, int] = {}
        for cell in re.findall(r"^  cell \\(\S+) ", body, re.MULTILINE):
            counts[cell] = counts.get(cell, 0) + 1
        inside[module] = counts

    def walk(module: str) -> dict[str, int]:
        total: dict[str, int] = {}
        for cell, count in inside[module].items():
            below = {cell: 1} if cell in shared or cell not in inside else walk(cell)
            for key, value in below.items():
                total[key] = total.get(key, 0) + count * value
        return total

    top = next(m for m in inside if "." not in m)
    return {cell: count for cell, count in walk(top).items() if cell in shared}


def _mapped(texts: Mapping[str, str], module: str, top: str) -> Area:
    """Figures of module `top` in the text of `module`, shared modules in it left out."""
    others = {n: text for n, text in texts.items() if n != module}
    used = {n: others[n] for n in _placed(texts[module], set(others))}
    timer = shutil.which("sta")
    key = cache.digest(
        [texts[module], top, *used, *used.values(), metadata.version("pyosys"), _ABC, _STA]
        + [_CONSTRAINTS, LIBRARY.read_text(), str(timer is not None)]
    )

    def make(work: Path) -> None:
        result = _flow(work, texts[module], top, used, timer)
        (work / "area.json").write_text(json.dumps(asdict(result)))

    place, _ = cache.entry("area", key, make)
    return Area(**json.loads((place / "area.json").read_text()))


def _flow(work: Path, text: str, top: str, used: Mapping[str, str], timer: str | None) -> Area:
    """The whole flow in directory `work`."""
    (work / "top.il").write_text(text)
    (work / "constraints").write_text(_CONSTRAINTS)
    (work / "abc.script").write_text(_ABC.replace(";", "\n"))
    script = ["read_rtlil top.il"]
    for i, child in enumerate(used):
        (work / f"shared{i}.il").write_text(used[child])
        script.append(f"read_rtlil shared{i}.il")
    macros = sorted(set(re.findall(r"^  cell \\(jalapeno_sram_\S+) ", text, re.MULTILINE)))
    for macro_name in macros:
        (work / f"{macro_name}.v").write_text(macro(macro_name))
        script.append(f"read_verilog {macro_name}.v")
    if used or macros:
        script.append(f"blackbox {' '.join([*used, *macros])}")
    script += [
        f"hierarchy -top {top}",
        "chformal -remove",
        f"synth -flatten -top {top}",
        f"dfflibmap -liberty {LIBRARY}",
        f"abc -liberty {LIBRARY} -constr constraints -script abc.script",
        "splitnets -ports",
        "opt_clean",
        f"tee -o stat stat -liberty {LIBRARY}",
        f"rename {top} top",
        "write_verilog -noattr -noexpr top.v",
    ]
    passes = "\n".join(f"ys.run_pass({line!r}, design)" for line in script)
    program = f"from pyosys import libyosys as ys\ndesign = ys.Design()\n{passes}\n"
    log = _run([sys.executable, "-c", program], work)
    stat = (work / "stat").read_text()
    cells = re.findall(r"Chip area for (?:top )?module '\S+': ([\d.]+)", stat)
    levels = re.findall(r"lev\s*=\s*(\d+)", log)
    flip_flops = sum(
        int(count)
        for line in stat.splitlines()
        if "DFF" in line
        for count in re.findall(r"\s(\d+)\s", line)[:1]
    )
    netlist = (work / "top.v").read_text().replace(" signed ", " ")
    mapped = re.search(r"^  [A-Z0-9]+X\d+ ", netlist, re.MULTILINE) is not None  # not wires alone
    if mapped != bool(cells):
        raise ToolError(f"no area in the report of Yosys:\n{stat[-1500:]}")
    fo4 = None
    if timer is not None:
        (work / "top.v").write_text(netlist)
        clocked = re.search(r"\binput clk\b", netlist) is not None
        clock = "[get_ports clk]" if clocked else ""
        (work / "sta.tcl").write_text(_STA.format(library=LIBRARY, clock=clock))
        report = _run([timer, "sta.tcl"], work)
        arrivals = re.findall(r"^\s*([\d.]+)\s+data arrival time", report, re.MULTILINE)
        if mapped and not arrivals:
            raise ToolError(f"no path in the report of OpenSTA:\n{report[-1500:]}")
        fo4 = round(float(arrivals[0]) / FO4_NS, 1) if arrivals else 0.0
    return Area(
        round(float(cells[-1]) / NAND2_AREA) if cells else 0,
        flip_flops,
        int(levels[-1]) if levels else 0,
        fo4,
    )


def _run(command: list[str], work: Path) -> str:
    result = subprocess.run(command, cwd=work, capture_output=True, text=True)
    if result.returncode:
        tail = (result.stdout + result.stderr)[-1500:]
        raise ToolError(f"{Path(command[0]).name} failed:\n{tail}")
    return result.stdout + result.stderr
