# SPDX-License-Identifier: Apache-2.0
"""The command line on a kernel of its own: exit codes, one-line messages, JSON, cycle suite."""

import json
from dataclasses import replace

import pytest

from golden.bounds import NoBound
from sim import cli, cycles, verilator
from sim.errors import InputError, ToolError
from sim.kernels import KERNELS
from sim.kernels.types import Kernel, KernelResult, Option

KEYS = {
    "differences",
    "kernel",
    "config",
    "model",
    "seed",
    "shape",
    "compared",
    "mismatched",
    "max_error",
    "max_error_bound",
    "cycles",
    "fraction_of_peak",
    "fraction_of_roofline",
    "roofline",
    "counters",
    "wall_s",
    "build_s",
    "cycles_per_s",
    "sources",
    "extra",
    "text",
    "order_checked",
    "order_faults",
}
OPTIONS = {
    "m": Option(4, "rows", 1, 64),
    "act": Option("bf16", "format", choices=("bf16", "mxfp4")),
    "wrong": Option(0, "values that differ", 0, 99),
    "count": Option(10, "values compared", 0, 99),
    "late": Option(0, "commands that come too early", 0, 1),
}


def run_double(request):
    if request.settings["m"] == 13:
        raise InputError("m", 13, "13 rows do not fit", "choose fewer")
    if request.settings["m"] == 14:
        raise ToolError("the build failed:\nerror: no such thing")
    return KernelResult(
        kernel="double",
        config=request.config.name,
        model=request.model,
        seed=request.seed,
        shape=request.settings,
        compared=request.settings["count"],
        mismatched=request.settings["wrong"],
        max_error=0.5,
        max_error_bound=1.0,
        cycles=1000 + request.settings["m"],
        fraction_of_peak=0.25,
        fraction_of_roofline=0.5,
        roofline="HBM",
        counters={"MATRIX": {"BUSY": 7, "IDLE": 3}},
        wall_s=1.0,
        build_s=2.0,
        cycles_per_s=1004.0,
        sources={"cycles": "measured", "fraction_of_roofline": "derived"},
        order_checked=5 * request.check_order,
        order_faults=("VECTOR at beat 4 reads",) * request.settings["late"] * request.check_order,
    )


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    monkeypatch.setitem(KERNELS, "double", Kernel("double", "Doubles.", OPTIONS, run_double))


@pytest.fixture
def jalapeno(capsys):
    def call(*arguments):
        code = cli.main([str(a) for a in arguments])
        output = capsys.readouterr()
        assert "Traceback" not in output.out + output.err
        return code, output.out, output.err

    return call


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["doctor"],
        ["verilog"],
        ["sim"],
        ["cycles"],
        ["throughput"],
        ["demo"],
        ["area"],
        ["speed"],
    ],
    ids=str,
)
def test_help(jalapeno, command):
    code, out, _ = jalapeno(*command, "--help")
    assert code == 0 and "Usage: jalapeno" in out


def test_model_is_the_kernels_first(jalapeno, monkeypatch):
    other = Kernel("other", "Others.", OPTIONS, run_double, ("kimi-k2.5", "gpt-oss"))
    monkeypatch.setitem(KERNELS, "other", other)
    for kernel, given, wanted in (
        ("double", [], "gpt-oss"),
        ("other", [], "kimi-k2.5"),
        ("other", ["--model", "gpt-oss"], "gpt-oss"),
    ):
        code, out, _ = jalapeno("sim", kernel, *given)
        assert code == 0 and f"({wanted})" in out


def test_texts_are_shown_as_they_are(jalapeno, monkeypatch):
    """A prompt may be empty, and what it holds is no markup."""
    prompts = {"prompt": Option("The ", "what it begins with")}

    def run(request):
        own = replace(request, settings={"m": 4, "wrong": 0, "late": 0, "count": 10})
        return replace(run_double(own), shape=request.settings, text=request.settings["prompt"])

    monkeypatch.setitem(KERNELS, "said", Kernel("said", "Says.", prompts, run))
    for prompt in ("[/nope]", "[red]x", ""):
        code, out, _ = jalapeno("sim", "said", "--prompt", prompt)
        assert code == 0 and f"prompt={prompt}, seed 0" in " ".join(out.split())


def test_no_bound_is_one_line(jalapeno, monkeypatch):
    def run(request):
        raise NoBound("scores are far off")

    monkeypatch.setitem(KERNELS, "far", Kernel("far", "Is far.", OPTIONS, run))
    code, _, err = jalapeno("sim", "far", "--seed", "3")
    assert code == 2 and err.count("\n") == 1
    assert "--seed is 3, but" in err and "scores are far off" in err and "take another seed" in err


def test_doctor_finds_what_the_tests_run_with(jalapeno):
    code, out, _ = jalapeno("doctor")
    assert code == 0
    assert all(name in out for name in ("verilator", "g++", "perl", "cocotb", "amaranth", "cache"))


def test_doctor_names_what_is_missing(jalapeno, monkeypatch, tmp_path):
    from sim import doctor

    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    verilator.compiler.cache_clear()
    code, out, _ = jalapeno("doctor")
    verilator.compiler.cache_clear()
    assert code == 1 and "apt install g++" in out and "apt install perl" in out


def test_sim_writes_its_json(jalapeno, tmp_path):
    file = tmp_path / "out.json"
    code, out, _ = jalapeno(
        "sim", "double", "--config", "tiny", "--set", "m=7", "--seed", 3, "--json", file
    )
    value = json.loads(file.read_text())
    assert code == 0 and "PASS" in out and "1,007" in out and "measured" in out and "derived" in out
    assert set(value) == KEYS
    assert (value["cycles"], value["seed"], value["config"], value["shape"]["m"]) == (
        1007,
        3,
        "tiny",
        7,
    )


def test_sim_checks_the_order_when_asked(jalapeno):
    code, out, _ = jalapeno("sim", "double", "--set", "late=1")
    assert code == 0 and "order" not in out
    code, out, _ = jalapeno("sim", "double", "--check-order")
    assert code == 0 and "order checked: 5 commands" in out
    code, out, _ = jalapeno("sim", "double", "--set", "late=1", "--check-order")
    assert code == 1 and "VECTOR at beat 4 reads" in out and "1 commands came too early" in out


@pytest.mark.parametrize(
    "settings, word",
    [(["wrong=2"], "2 of 10 values differ"), (["count=0"], "nothing was compared")],
)
def test_sim_fails(jalapeno, settings, word):
    code, out, _ = jalapeno("sim", "double", *(a for s in settings for a in ("--set", s)))
    assert code == 1 and "FAIL" in out and word in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["sim", "nothing"], "KERNEL is nothing, but it must be one of"),
        (
            ["sim", "double", "--config", "huge"],
            "--config is huge, but it must be one of tiny, small",
        ),
        (
            ["sim", "generate", "--model", "kimi-k2.5"],
            "kernel generate computes that of gpt-oss only",
        ),
        (["sim", "double", "--model", "llama"], "--model is llama, but it must be one of gpt-oss"),
        (
            ["sim", "double", "--stall", "some"],
            "--stall is some, but it must be one of none, light, heavy",
        ),
        (["sim", "double", "--seed", "-4"], "--seed is -4, but it must be from 0 to"),
        (["sim", "double", "--seed", "x"], "Invalid value for '--seed'"),
        (["sim", "double", "--set", "m"], "--set is m, but it must be NAME=VALUE"),
        (["sim", "double", "--set", "m=65"], "m is 65, but it must be from 1 to 64"),
        (["sim", "double", "--set", "m=two"], "m is two, but it must be a whole number"),
        (["sim", "double", "--set", "act=fp3"], "act is fp3, but it must be one of bf16, mxfp4"),
        (["sim", "double", "--set", "q=1"], "--set is q, but kernel double takes m, act"),
        (["sim", "double", "--set", "m=13"], "m is 13, but 13 rows do not fit; choose fewer"),
        (["sim", "double", "--waves", "x.vcd"], "--waves is x.vcd, but it must be a .fst file"),
        (
            ["sim", "double", "--json", "/no/such/x.json"],
            "--json is /no/such/x.json, but it cannot be written",
        ),
        (["sim"], "Missing argument"),
        (["simulate"], "No such command"),
        (["verilog", "engine", "-o", "x"], "BLOCK is engine, but it must be one of"),
        (
            ["verilog", "router", "-o", "/proc/no/such"],
            "-o is /proc/no/such, but it cannot be written",
        ),
        (["throughput", "llama"], "MODEL is llama, but it must be one of"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_input_is_one_line(jalapeno, arguments, message):
    code, _, err = jalapeno(*arguments)
    assert code == 2 and message in err
    assert err.count("\n") == 1 and err.startswith("jalapeno: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["sim", "double", "--json", "{}"],
        ["sim", "double", "--waves", "{}/x.fst"],
        ["cycles", "--json", "{}"],
        ["speed", "--json", "{}"],
        ["area", "cell", "--json", "{}"],
    ],
    ids=lambda v: v[0] + v[-2],
)
def test_unwritable_file_is_refused_before_the_run(jalapeno, monkeypatch, arguments, tmp_path):
    def run(*_):
        raise AssertionError("ran")

    monkeypatch.setitem(KERNELS, "double", Kernel("double", "Doubles.", OPTIONS, run))
    (tmp_path / "x.fst").mkdir()
    monkeypatch.setattr(cycles, "measure", run)
    monkeypatch.setattr("sim.speed.measure", run)
    monkeypatch.setattr("sim.area.area", run)
    code, _, err = jalapeno(*(a.format(tmp_path) for a in arguments))
    assert code == 2 and "but it cannot be written" in err and err.count("\n") == 1


def test_refused_run_leaves_files_as_they_are(jalapeno, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")
    for file in (old, new):
        assert jalapeno("sim", "double", "--set", "m=13", "--json", file)[0] == 2
    assert old.read_text() == "{}" and not new.exists()


def test_too_little_memory_is_one_line(jalapeno, monkeypatch):
    def run(_):
        raise MemoryError("Unable to allocate 32.0 GiB")

    monkeypatch.setitem(KERNELS, "double", Kernel("double", "Doubles.", OPTIONS, run))
    code, _, err = jalapeno("sim", "double")
    assert code == 2 and "Unable to allocate 32.0 GiB" in err and err.count("\n") == 1


def test_doctor_says_that_the_cache_cannot_be_written(jalapeno, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JALAPENO_CACHE", str(tmp_path / "file"))
    code, out, _ = jalapeno("doctor")
    assert code == 1 and "MISSING" in out


def test_tool_failure_is_exit_one(jalapeno):
    code, _, err = jalapeno("sim", "double", "--set", "m=14")
    assert code == 1 and "error: no such thing" in err


def test_verilog_is_the_same_twice(jalapeno, tmp_path):
    for place in ("a", "b"):
        code, out, _ = jalapeno("verilog", "router", "--config", "tiny", "-o", tmp_path / place)
        assert code == 0 and "files" in out
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert {"router.v", "router.json", "waivers.vlt"} <= set(names)
    assert all(
        (tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names
    )


@pytest.fixture
def suite(monkeypatch, tmp_path):
    def write(*counts):
        entries = [
            {"kernel": "double", "config": "tiny", "settings": {"m": i + 1}, "cycles": c}
            for i, c in enumerate(counts)
        ]
        file.write_text(json.dumps(entries))
        return file

    file = tmp_path / "cycles.json"
    load, save = cycles.load, cycles.save
    monkeypatch.setattr(cycles, "load", lambda: load(file))
    monkeypatch.setattr(cycles, "save", lambda results: save(results, file))
    return write


@pytest.mark.parametrize(
    "counts, arguments, code",
    [
        ([1001, 1002], [], 0),
        ([1001, 900], [], 1),  # rose
        ([1001, 2000], [], 1),  # fell, and is not recorded
        ([1001, 2000], ["--update"], 0),
        ([1001, 900], ["--update"], 1),
        ([1001, None], [], 1),
        ([], [], 1),
    ],
)
def test_cycles_check(jalapeno, suite, counts, arguments, code):
    suite(*counts)
    assert jalapeno("cycles", "--check", *arguments)[0] == code


def test_cycles_shows_only_what_differs(jalapeno, suite):
    suite(1001, 501)
    code, out, _ = jalapeno("cycles", "--check", "--markdown")
    assert code == 1
    assert out.splitlines()[:2] == ["Cycles (measured):", ""]
    assert out.splitlines()[2] == "| kernel | config | settings | old | new | percent |"
    assert out.splitlines()[4:] == ["| double | tiny | m=2 | 501 | 1,002 | +100.00 % |"]


def test_cycles_update_is_recorded(jalapeno, suite):
    file = suite(1001, 2000)
    assert jalapeno("cycles", "--update")[0] == 0
    assert [r.cycles for r in cycles.load()] == [1001, 1002]
    assert jalapeno("cycles", "--check", "--json", file.with_name("out.json"))[0] == 0
    assert [row["new"] for row in json.loads(file.with_name("out.json").read_text())] == [
        1001,
        1002,
    ]


def test_cycles_of_a_wrong_kernel_are_not_compared(jalapeno, suite, monkeypatch):
    suite(1001)
    wrong = replace(KERNELS["double"], run=lambda r: replace(run_double(r), mismatched=1))
    monkeypatch.setitem(KERNELS, "double", wrong)
    code, _, err = jalapeno("cycles")
    assert code == 1 and "double on tiny is wrong: 1 of 10 values differ" in err


def test_recorded_suite_is_readable():
    for record in cycles.load():
        assert record.kernel in KERNELS


def test_unknown_source_is_refused():
    with pytest.raises(ValueError, match="source of cycles must be one of"):
        replace(run_double_result(), sources={"cycles": "guessed"})


def run_double_result():
    from hw.config import preset
    from sim.kernels.types import KernelRequest

    return run_double(KernelRequest(preset("tiny"), "gpt-oss", KERNELS["double"].settings({})))
