# SPDX-License-Identifier: Apache-2.0
"""Emission: shared modules once, macros, determinism, lint, Yosys, and the description."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from pyosys import libyosys as yosys

from hw.config import LINE_BYTES, preset
from hw.emit import place
from hw.isa import COUNTED
from hw.verilog import description, emit, instances, layout, waivers
from sim import verilator
from sim.blocks import BLOCKS
from tests.designs.buffers import WORD, Pair

ROOT = Path(__file__).parent.parent
SRAM = "jalapeno_sram_1r1w_16x12"
PRINT = (
    "import sys; from hw.verilog import emit; from tests.designs.buffers import Pair; "
    "sys.stdout.write(repr(emit(Pair(), 'pair')))"
)


@pytest.fixture(scope="module")
def files():
    return emit(Pair(), "pair")


def test_files_are_one_per_shared_module(files):
    assert list(files) == [SRAM + ".v", "pair.v", "test_buffer.v", "test_inverter.v"]
    text = "".join(files.values())
    assert text.count("module test_buffer(") == 1
    assert files["pair.v"].count("  test_buffer ") == 2
    assert f"  {SRAM} " in files["pair.v"]
    assert f"module {SRAM} #(" in files[SRAM + ".v"] and "DEPTH = 16" in files[SRAM + ".v"]


def test_text_is_the_same_in_another_process(files):
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    again = subprocess.run(
        [sys.executable, "-c", PRINT], capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert again == repr(files)


def test_text_names_no_source_and_no_initial_value(files):
    assert ".py" not in "".join(files.values())
    assert " = 1'h0;" not in files["test_buffer.v"].split("always")[0]


def lint(files, top, place):
    """What Verilator objects to in `files`, written to the directory `place`."""
    for name, text in (files | {"waivers.vlt": waivers()}).items():
        (place / name).write_text(text)
    tool = verilator.find()
    command = [str(tool.program), "--lint-only", "-Wall", "--top-module", top, "waivers.vlt"]
    done = subprocess.run(
        [*command, *files], cwd=place, env=tool.environ(), capture_output=True, text=True
    )
    return done.stderr if done.returncode or "%Warning" in done.stderr else ""


def synthesisable(files, top, place):
    """Yosys reads `files` from the directory `place` and finds them consistent, or raises."""
    design = yosys.Design()
    for name, text in files.items():
        (place / name).write_text(text)
        yosys.run_pass(f"read_verilog {place / name}", design)
    for command in (f"hierarchy -check -top {top}", "proc", "check -assert"):
        yosys.run_pass(command, design)


def test_verilator_has_nothing_to_say(files, tmp_path):
    assert lint(files, "pair", tmp_path) == ""


def test_yosys_reads_it(files, tmp_path):
    synthesisable(files, "pair", tmp_path)


def header(text, module):
    """(name, direction, width) of the ports of `module` in Verilog `text`."""
    body = text[re.search(rf"^module \\?{module} ?\(", text, re.M).start() :].split("endmodule")[0]
    found = re.findall(r"^  (input|output) (?:\[(\d+):0\] )?\\?(\S+?) ?;", body, re.M)
    return {(name, direction, int(high or 0) + 1) for direction, high, name in found}


# The chip contains the tile.
SIZES = [
    *(
        pytest.param("tiny", b, marks=[pytest.mark.slow] if b in ("tile", "chip") else [])
        for b in BLOCKS
    ),
    *(pytest.param("small", b, marks=pytest.mark.slow) for b in ("vector_engine", "tile_sram")),
    pytest.param("mesh4", "chip", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("config", "name"), SIZES)
def test_block_is_clean(config, name, tmp_path):
    chosen = preset(config)
    component = BLOCKS[name].make(chosen)
    files = emit(component, name)
    text = "".join(files.values())
    assert not re.search(r"\binitial\b|always @\*|always @\(\*|_case \*\)|\.py\b|/home|/tmp", text)
    modules = re.findall(r"^module (\S+)", text, re.M)
    assert len(modules) == len(set(modules))
    value = json.loads(description(component, name, chosen, files))
    ports = {(p["name"], p["direction"], p["width"]) for p in value["ports"]}
    assert ports == header(files[f"{name}.v"], name)
    listed = {part["module"] + ".v" for part in value["modules"] + value["srams"]}
    assert listed == set(files)
    assert lint(files, name, tmp_path) == ""


@pytest.fixture(scope="module")
def tile():
    """A tile and its Verilog."""
    component = BLOCKS["tile"].make(preset("tiny"))
    return component, emit(component, "tile")


@pytest.mark.slow
def test_tile_is_synthesisable_and_the_same_elsewhere(tile, tmp_path):
    _, files = tile
    synthesisable(files, "tile", tmp_path)
    for package in ("hw", "golden", "sim"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    program = (
        "import sys; from hw.verilog import emit; from hw.config import preset; "
        "from sim.blocks import BLOCKS; "
        "sys.stdout.write(repr(emit(BLOCKS['tile'].make(preset('tiny')), 'tile')))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": str(tmp_path)}
    again = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=tmp_path,
    ).stdout
    assert again == repr(files)


@pytest.mark.slow
def test_tile_description(tile):
    """Of every cell, bank and SRAM that a tile has, and of the counters that its host reads."""
    chosen = preset("tiny")
    component, files = tile
    value = json.loads(description(component, "tile", chosen, files))
    modules = {part["module"]: part["instances"] for part in value["modules"]}
    config = chosen.tile
    assert modules["tile"] == modules["tile_core_2x4"] == 1
    assert modules["cell_row1"] == config.rows * config.cols
    assert modules["vector_lane"] == config.lanes
    bits = {s["module"]: s["depth"] * s["width"] * s["instances"] for s in value["srams"]}
    word = 8 * LINE_BYTES + 8  # a line and its scale
    lines = config.sram_bytes // LINE_BYTES
    assert bits[f"jalapeno_sram_1rw_{lines // config.sram_banks}x{word}_by8"] == lines * word
    code = word + 9  # and its check bits
    assert bits[f"jalapeno_sram_1r1w_{config.kv_rows}x{code}"] == (
        config.kv_bytes // LINE_BYTES * code
    )
    assert value["counters"] == {
        "engines": list(COUNTED),
        "activities": ["IDLE", "BUSY", "STARVED", "BLOCKED"],
        "width": 32,
        "host_line": 16,
        "kv_errors": {
            "host_line": 2,
            "corrected": {"offset": 0, "width": 32},
            "uncorrectable": {"offset": 32, "width": 32},
        },
    }


def test_instances_are_counted_over_all_levels(files):
    counts = instances(files, "pair")
    assert counts["pair"] == 1 and counts["test_buffer"] == 2 and counts[SRAM] == 1


class Table(wiring.Component):
    """A memory with contents."""

    y: Out(4)

    def elaborate(self, platform):
        m = Module()
        m.submodules.memory = memory = Memory(shape=4, depth=2, init=[0, 5])
        m.d.comb += self.y.eq(memory.read_port(domain="comb").data)
        return m


def test_contents_of_memories_are_refused():
    with pytest.raises(ValueError, match="init of a memory must be 0"):
        emit(Table(), "table")


class Unclocked(wiring.Component):
    """Says that it has no registers, and has one."""

    y: Out(1)
    emit_name = "test_unclocked"
    clocked = False

    def elaborate(self, platform):
        m = Module()
        state = Signal()
        m.d.sync += state.eq(~state)
        m.d.comb += self.y.eq(state)
        return m


class Delay(wiring.Component):
    """Only registers without reset."""

    a: In(4)
    y: Out(4)
    emit_name = "test_delay"

    def elaborate(self, platform):
        m = Module()
        held = Signal(4, reset_less=True)
        m.d.sync += held.eq(self.a)
        m.d.comb += self.y.eq(held)
        return m


class Holder(wiring.Component):
    """Places another component."""

    y: Out(4)

    def __init__(self, part):
        self.part = part
        super().__init__()

    def elaborate(self, platform):
        m = Module()
        place(m, platform, "part", self.part)
        m.d.comb += self.y.eq(self.part.y)
        return m


def test_wrong_clocked_is_refused():
    with pytest.raises(ValueError, match="clocked of test_unclocked must be True"):
        emit(Holder(Unclocked()), "holder")


def test_shared_module_without_reset_still_has_its_port():
    files = emit(Holder(Delay()), "holder")
    assert "input rst;" in files["test_delay.v"] and ".rst(rst)" in files["holder.v"]


def test_description(files):
    text = description(Pair(), "pair", preset("tiny"), files)
    value = json.loads(text)
    assert text == description(Pair(), "pair", preset("tiny"), files)
    ports = {port["name"]: port for port in value["ports"]}
    assert (
        ports["input__payload"]["direction"] == "input" and ports["input__payload"]["width"] == 16
    )
    assert ports["input__payload"]["fields"] == layout(WORD)["fields"]
    assert [f["offset"] for f in ports["input__payload"]["fields"]] == [0, 4]
    assert value["configuration"]["tile"]["hbm_rate"] == "16"
