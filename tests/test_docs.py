# SPDX-License-Identifier: Apache-2.0
"""The documents: examples run, and what they name exists and has the stated values."""

import doctest
import re
import tomllib
from pathlib import Path

import pytest

from hw import host_adapter, isa
from hw.config import PRESETS
from sim.scaling.published import DATA

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
WRITTEN = [ROOT / "README.md", *DOCS]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CLASSES = {"official", "reported", "derived", "assumed", "measured"}


def named(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(text, language):
    return [body for found, body in BLOCK.findall(text) if found == language]


def section(text, title):
    """The text below a heading, up to the next one."""
    return re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.M | re.S)[1]


def rows(text):
    """Cells of the table rows in a text, heads and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = {i for i, cells in enumerate(split) if all(re.fullmatch(r"-+:?", c) for c in cells)}
    return [cells for i, cells in enumerate(split) if not {i, i + 1} & rules]


@pytest.mark.parametrize("name", ["numerics.md", "programming.md"])
def test_examples(name):
    text = "\n".join(body for body in blocks(named(name), "python") if ">>>" in body)
    test = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    assert len(test.examples) >= 8
    report: list[str] = []
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert result.attempted == len(test.examples) and not result.failed, "".join(report)


def test_diagram_blocks_are_files():
    diagrams = blocks(named("architecture.md"), "mermaid")
    assert len(diagrams) >= 2
    names = {name for d in diagrams for name in re.findall(r"\b([a-z][a-z0-9_]*)\[(?!\()", d)}
    assert len(names) >= 30 and {"tile", "matrix_engine", "kv_sram", "router"} <= names
    missing = sorted(name for name in names if not (ROOT / "hw" / f"{name}.py").exists())
    assert not missing, f"no hw/<name>.py for {missing}"


def test_diagram_edges_join_declared_blocks():
    for diagram in blocks(named("architecture.md"), "mermaid"):
        declared = set(re.findall(r"\b([a-z][a-z0-9_]*) ?[\[(]", diagram))
        joined = 0
        for line in diagram.splitlines():
            ends = re.fullmatch(r"\s*(\w+) (?:<?-->|---)(?:\|[^|]*\|)? (\w+)", line)
            if ends:
                assert set(ends.groups()) <= declared, line
                joined += 1
        assert joined >= 5


def chip_files():
    """Names of the files that make up the chip: all that hw/chip.py imports, directly or not."""
    found, left = set(), ["chip"]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            text = (ROOT / "hw" / f"{name}.py").read_text(encoding="utf-8")
            left += re.findall(r"^\s*from hw\.(\w+) import", text, re.M)
            for names in re.findall(r"^\s*from hw import ([\w, ]+)", text, re.M):
                left += names.split(", ")
    return found


def test_every_hardware_file_is_described():
    described = [cells[0].strip("`") for cells in rows(section(named("architecture.md"), "Blocks"))]
    assert len(described) == len(set(described))
    unknown = sorted(n for n in described if not (ROOT / "hw" / f"{n}.py").exists())
    missing = sorted(chip_files() - set(described))
    assert not unknown and not missing, f"docs/architecture.md lacks {missing}; no files: {unknown}"


@pytest.mark.parametrize("document", WRITTEN, ids=lambda p: p.name)
def test_paths_exist(document):
    text = document.read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:hw|sim|tb|golden|tests|docs)/[\w./]*)`", text))
    missing = sorted(p for p in paths if "NAME" not in p and not (ROOT / p).exists())
    assert not missing
    links = [t for t in re.findall(r"\]\(([^)#]+)", text) if "://" not in t]
    assert all((document.parent / link).exists() for link in links)


@pytest.mark.parametrize("document", WRITTEN, ids=lambda p: p.name)
def test_commands_exist(document):
    from sim.cli import app

    known = {c.name or c.callback.__name__ for c in app.registered_commands}
    used = set(re.findall(r"jalapeno ([a-z]+)\b", document.read_text(encoding="utf-8")))
    assert used - {"sim"} <= known | {"doctor"}, used - known


def test_presets_are_as_configured():
    found = rows(section(named("architecture.md"), "Presets"))
    assert [cells[0].strip("`") for cells in found] == list(PRESETS)
    for name, array, macs, mesh, sram, kv, rate in found:
        chip = PRESETS[name.strip("`")]
        tile = chip.tile
        assert array == f"{tile.rows} x {tile.cols}"
        assert macs == f"{tile.fp4_macs:,}"
        assert mesh == f"{chip.mesh_x} x {chip.mesh_y}"
        assert (sram, kv) == (f"{tile.sram_bytes // 1024} KiB", f"{tile.kv_bytes // 1024} KiB")
        assert float(rate) == float(tile.hbm_rate)


def test_status_codes_are_listed():
    found = rows(section(named("programming.md"), "Status"))
    assert {(int(code), name.strip("`")) for code, name, _ in found} == {
        (s.value, s.name) for s in isa.Status
    }


def test_host_map_is_as_built():
    text = named("programming.md")
    found = rows(section(text, "Host map"))
    assert {(int(code), name.strip("`")) for code, name, _ in found[:4]} == {
        (r.value, r.name) for r in host_adapter.Region
    }
    assert f"line {host_adapter.COUNTER_LINE} + 4 * engine" in text
    assert f"line {host_adapter.SEMAPHORE_LINE} + semaphore" in text


def test_facts_have_classes():
    text = named("facts.md")
    for title in ("The chip", "What is derived", "What is assumed", "Published results"):
        found = rows(section(text, title))
        assert len(found) >= 3
        assert all(cells[-1] in CLASSES | {"-"} for cells in found)


def test_facts_hold_the_published_figures():
    table = {
        cells[0]: cells[1:4] for cells in rows(section(named("facts.md"), "Published results"))
    }
    models = list(tomllib.loads(DATA.read_text(encoding="utf-8")).values())
    for title, value in (
        ("least time between tokens", lambda m: f"{m['time_between_tokens']['value']:.2f} ms"),
        ("tok/s/user at that point", lambda m: f"{m['user_rate']['value']:,}"),
        ("end-to-end latency", lambda m: f"{m['end_to_end']['value']:.2f} s"),
        ("peak input + output tok/s/kW, by rated power", lambda m: f"{m['power_rate']['value']:,}"),
        ("rival", lambda m: m["rival"]["name"]),
        (
            "rival: least time between tokens",
            lambda m: f"{m['rival']['time_between_tokens']:.2f} ms",
        ),
        ("rival: peak tok/s/kW", lambda m: f"{m['rival']['power_rate']:,}"),
    ):
        assert table[title] == [value(m) for m in models]
