# SPDX-License-Identifier: Apache-2.0
"""`jalapeno area`: figures of blocks, and the recorded ones held."""

import json
from pathlib import Path

import pytest

from hw.bf16_round import Bf16Round
from sim import area, area_records
from sim.cli import main
from tests.designs.separate_multipliers import CLASSES, Common, OneClass

needs_tools = pytest.mark.skipif(
    bool(area.missing()), reason=f"apt install {' '.join(area.missing())}"
)


@needs_tools
def test_recorded_blocks_have_not_grown():
    compared = 0
    for record in area_records.load():
        comparison = area_records.Comparison(
            record, area_records.measure(record.block, record.config).total
        )
        assert not comparison.grown
        compared += len([row for row in comparison.rows() if row[3] is not None])
    assert compared


@needs_tools
def test_small_block_with_json(tmp_path):
    file = tmp_path / "area.json"
    assert main(["area", "router", "--config", "tiny", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert {"nand2", "flip_flops", "levels", "fo4", "blocks", "yosys"} <= set(found)
    assert found["nand2"] > 1000 and found["flip_flops"] > 100 and 5 < found["fo4"] < 100


@needs_tools
@pytest.mark.slow
def test_shared_modules_count_as_often_as_they_are_placed():
    from hw.array import MatmulArray

    found = area.area(MatmulArray(2, 1, acc_rows=2, result_depth=2), "array")
    count, cell = next(value for name, value in found.parts.items() if name.startswith("cell"))
    assert count == 2 and found.total.flip_flops > 2 * cell.flip_flops


@needs_tools
def test_combinational_block():
    found = area.area(Bf16Round(), "bf16_round").total
    assert found.flip_flops == 0 and found.nand2 > 10 and found.fo4


def test_growth_is_held():
    old = area.Area(1000, 100, 10, 40.0)
    record = area_records.Record("cell", "small", old)
    assert not area_records.Comparison(record, area.Area(1030, 103, 99, 42.0)).grown
    for worse in ((1031, 100, 10, 40.0), (1000, 104, 10, 40.0), (1000, 100, 10, 42.1)):
        assert len(area_records.Comparison(record, area.Area(*worse)).grown) == 1
    assert not area_records.Comparison(record, area.Area(900, 100, 10, None)).grown


def test_missing_library_names_the_package(monkeypatch, capsys):
    monkeypatch.setattr(area, "LIBRARY", Path("/nowhere"))
    assert main(["area", "cell"]) == 1
    assert "apt install qflow-tech-osu018" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, wanted",
    [
        ([], "BLOCK is not given, but it must be named unless"),
        (["cell", "--check"], "BLOCK is cell, but --check and --update take all recorded blocks"),
        (["nothing"], "BLOCK is nothing, but it must be one of cell,"),
        (["cell", "--config", "x"], "--config is x, but it must be one of tiny,"),
    ],
)
def test_bad_input(arguments, wanted, capsys):
    assert main(["area", *arguments]) == 2
    error = capsys.readouterr().err
    assert wanted in error and error.count("\n") == 1


@needs_tools
@pytest.mark.slow
def test_one_fused_cell_is_smaller_than_separate_multipliers():
    """`Common` once and, for each class of pairs, what its own cell has beyond that."""
    common = area.area(Common(), "common").total.nand2
    own = {
        digits: area.area(OneClass(act, weight), "one_class").total.nand2 - common
        for digits, (act, weight) in CLASSES.items()
    }
    fused = area_records.measure("cell", "small").total.nand2
    print(f"common {common}, own {own}, separate {common + sum(own.values())}, fused {fused}")
    assert all(value > 0 for value in own.values())
    assert 1.5 * fused < common + sum(own.values())
