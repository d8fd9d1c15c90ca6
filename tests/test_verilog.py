# SPDX-License-Identifier: Apache-2.0
"""Emission: shared modules once, macros, determinism, lint, Yosys, and the description."""

import json
import os
import subprocess
import sys

import pytest
from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from pyosys import libyosys as yosys

from hw.config import preset
from hw.emit import place
from hw.verilog import description, emit, layout, waivers
from sim import verilator
from tests.designs.buffers import WORD, Pair

PRINT = (
    "import sys; from hw.verilog import emit; from tests.designs.buffers import Pair; "
    "sys.stdout.write(repr(emit(Pair(), 'pair')))"
)


@pytest.fixture(scope="module")
def files():
    return emit(Pair(), "pair")


def test_files_are_one_per_shared_module(files):
    assert list(files) == ["jalapeno_sram_1r1w.v", "pair.v", "test_buffer.v", "test_inverter.v"]
    text = "".join(files.values())
    assert text.count("module test_buffer(") == 1
    assert files["pair.v"].count("  test_buffer ") == 2
    assert ".DEPTH(32'd16)" in files["pair.v"]


def test_text_is_the_same_in_another_process(files):
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    again = subprocess.run(
        [sys.executable, "-c", PRINT], capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert again == repr(files)


def test_text_names_no_source_and_no_initial_value(files):
    assert ".py" not in "".join(files.values())
    assert " = 1'h0;" not in files["test_buffer.v"].split("always")[0]


def test_verilator_has_nothing_to_say(files, tmp_path):
    for name, text in (files | {"waivers.vlt": waivers()}).items():
        (tmp_path / name).write_text(text)
    tool = verilator.find()
    command = [
        str(tool.program),
        "--lint-only",
        "-Wall",
        "--top-module",
        "pair",
        "waivers.vlt",
        *files,
    ]
    done = subprocess.run(command, cwd=tmp_path, env=tool.environ(), capture_output=True, text=True)
    assert done.returncode == 0 and "%Warning" not in done.stderr, done.stderr


def test_yosys_reads_it(files, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    design = yosys.Design()
    for name in files:
        yosys.run_pass(f"read_verilog {tmp_path / name}", design)
    yosys.run_pass("hierarchy -check -top pair", design)
    yosys.run_pass("proc", design)
    yosys.run_pass("check -assert", design)


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


def test_description():
    text = description(Pair(), "pair", preset("tiny"))
    value = json.loads(text)
    assert text == description(Pair(), "pair", preset("tiny"))
    ports = {port["name"]: port for port in value["ports"]}
    assert (
        ports["input__payload"]["direction"] == "input" and ports["input__payload"]["width"] == 16
    )
    assert ports["input__payload"]["fields"] == layout(WORD)["fields"]
    assert [f["offset"] for f in ports["input__payload"]["fields"]] == [0, 4]
    assert value["configuration"]["tile"]["hbm_rate"] == "16"
