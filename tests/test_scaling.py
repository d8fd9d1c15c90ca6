# SPDX-License-Identifier: Apache-2.0
"""Scaling model: sums against `golden.traffic`, sources, missing records, impossible results."""

import json
from importlib import import_module

import pytest

from golden import traffic
from golden.models import DEEPSEEK_R1, GPT_OSS_120B, MODELS
from hw.config import preset
from sim import cli
from sim.cycles import Record
from sim.errors import InputError, ToolError
from sim.kernels import KERNELS
from sim.kernels.types import MODELS as NAMES
from sim.kernels.types import SOURCES, KernelRequest
from sim.scaling import throughput
from sim.scaling.assumptions import Assumptions
from sim.scaling.published import published
from sim.scaling.records import (
    SOURCES_OF,
    attention_work,
    gemm_array,
    gemm_stream,
    layer_work,
    measurements,
    moe_stream,
)
from sim.scaling.step import ROOFLINE, Fractions, decode_step, fractions, layer_step, sums, touched

LAYER = {
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "context": 16,
    "window": 8,
    "tokens": 16,
    "hidden": 64,
    "intermediate": 64,
    "experts": 8,
    "top_k": 2,
}
RECORDS = [
    Record("gemm", "small", {"m": 64, "n": 128, "k": 1024}, cycles=4400),
    Record(
        "gemm", "small", {"m": 1, "n": 128, "k": 1024, "act": "bf16", "weights": "hbm"}, cycles=8000
    ),
    Record("attention", "small", {"heads": 8, "context": 512}, cycles=6000),
    Record("moe", "small", {"hidden": 128, "intermediate": 128}, cycles=20000),
    Record("layer", "small", LAYER, cycles=120000),
]


def by_name(rows, model):
    return {row["figure"]: row for row in rows if row["model"] == model}


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_layers_add_up_to_the_model(model):
    places = [None, *range(model.layers)]
    parts = [sums(model, place, 1) for place in places]
    read = sum(size for part in parts for size, _ in part.values())
    macs = sum(n for part in parts for _, pairs in part.values() for n in pairs.values())
    assert read == pytest.approx(sum(traffic.weight_bytes_per_token(model).values()), rel=1e-12)
    assert 2 * macs == pytest.approx(traffic.linear_flops(model), rel=1e-12)


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_roofline_is_the_arithmetic(model):
    a = Assumptions(collectives_per_layer=0)
    step = decode_step(model, a, ROOFLINE)
    read = sum(traffic.weight_bytes_per_token(model).values()) / 150 / (8 * 64)
    assert step.matrices + step.experts == pytest.approx(read, rel=1e-12)
    cache = traffic.kv_bytes_read(model, a.context) / 150 / 512
    array = traffic.attention_flops(model, a.context) / 2 / 512 / (32 * 64 * 2)
    assert step.attention == pytest.approx(max(cache, array), rel=1e-12)
    assert step.commands == step.exchange == 0


def test_windows_shorten_only_their_layers():
    a = Assumptions()
    even, odd = (layer_step(GPT_OSS_120B, i, a, ROOFLINE, 1).attention for i in (0, 1))
    assert odd == pytest.approx(even * a.context / 128)


def test_dense_layers_have_no_experts():
    a = Assumptions()
    experts = [layer_step(DEEPSEEK_R1, i, a, ROOFLINE, 1).experts for i in range(5)]
    assert experts[:3] == [0, 0, 0] and experts[3] == experts[4] > 0


def test_touched_experts():
    assert touched(128, 4, 1) == pytest.approx(4)
    assert touched(8, 2, 2) == pytest.approx(2 + 2 * (1 - 2 / 8))
    assert touched(128, 4, 10_000) == pytest.approx(128)


def test_fractions_of_records():
    found = measurements(RECORDS)
    assert set(found) == set(SOURCES_OF)
    # m n k / (8 rows x 16 columns x 16 products): MXFP8 activations on MXFP4 weights
    assert found["dense"].least == 64 * 128 * 1024 / (8 * 16 * 16)
    # 128 x 1024 weights of 4 bits and their scales at 9.375 bytes per cycle
    assert found["stream"].least == 128 * 1024 // 2 * 17 // 16 / preset("small").tile.hbm_rate
    # 512 keys of 64 BF16, once as keys and once as values: 2 x 512 rows; 8 queries in the array
    assert found["attention"].least == 2 * 8 * 512 * 64 / (8 * 16 * 2)
    assert all(0 < one.fraction <= 1 for one in found.values())


@pytest.mark.parametrize(
    "name, given, resource",
    [
        ("gemm", {"m": 64, "n": 128, "k": 256}, "array"),
        ("gemm", {"m": 1, "n": 128, "k": 256, "act": "bf16", "weights": "hbm"}, "hbm"),
        ("attention", {"context": 100}, "array"),
        ("attention", {"context": 300, "window": 128, "heads": 16, "kv_heads": 2}, "array"),
        ("moe", {"hidden": 128, "intermediate": 72, "experts": 8}, "hbm"),
        ("layer", {}, "hbm"),
    ],
    ids=str,
)
def test_rooflines_are_those_of_the_programs(monkeypatch, name, given, resource):
    """The formulas against the commands of the kernel's own tile program, not simulated here."""
    work = {}
    module = import_module(f"sim.kernels.{name}")
    monkeypatch.setattr(module, "simulate", lambda *args, **options: None)

    def stop(*args):
        work["tile"] = args[4][0]
        raise StopIteration

    monkeypatch.setattr(module, "kernel_result", stop)
    settings = KERNELS[name].settings({option: str(value) for option, value in given.items()})
    with pytest.raises(StopIteration):
        KERNELS[name].run(KernelRequest(preset("small"), "gpt-oss", settings))
    formula = {
        "gemm": gemm_stream if resource == "hbm" else gemm_array,
        "attention": attention_work,
        "moe": moe_stream,
        "layer": layer_work,
    }[name]
    assert formula(preset("small").tile, settings) == getattr(work["tile"], resource) > 0


def test_largest_record_counts():
    more = [
        *RECORDS,
        Record("gemm", "small", {"m": 32, "n": 128, "k": 1024}, cycles=9999),
        Record("gemm", "small", {"m": 128, "n": 128, "k": 1024}, cycles=8300),
        Record("gemm", "tiny", {"m": 999, "n": 128, "k": 1024}, cycles=10**9),
    ]
    assert measurements(more)["dense"].cycles == 8300


def test_load_bound_gemm_is_not_dense():
    few = Record("gemm", "small", {"m": 2, "n": 128, "k": 1024}, cycles=9999)
    assert "dense" not in measurements([few])  # 2 rows x 2 slices against 8 weight rows a tile
    four = Record("gemm", "small", {"m": 4, "n": 128, "k": 1024}, cycles=9999)
    assert "dense" in measurements([four])


def test_commands_explain_the_measured_layer():
    f = fractions(measurements(RECORDS))
    later = [*RECORDS[:-1], Record("layer", "small", LAYER, cycles=120000 + 16 * 100)]
    assert f.commands > 0
    assert fractions(measurements(later)).commands == pytest.approx(f.commands + 100)


def test_every_figure_has_a_source():
    rows = throughput(NAMES, RECORDS)
    assert len(rows) > 60
    for row in rows:
        assert set(row) == {"model", "figure", "value", "unit", "source", "how"}
        assert row["source"] in SOURCES and row["value"] is not None and row["how"]
    for name in NAMES:
        ours = by_name(rows, name)
        assert ours["time between tokens"]["value"] == pytest.approx(
            sum(
                ours[f"time of {part}"]["value"]
                for part in ("matrices", "experts", "attention", "commands", "exchange")
            )
            / 1e3
        )
        assert (
            ours["time between tokens"]["value"]
            >= ours["roofline of the time between tokens"]["value"]
        )
        assert ours["published: least time between tokens"]["source"] == "official"


def test_published_figures_agree_with_each_other():
    for name in NAMES:
        found = published(name)
        product = found["time_between_tokens"].value * found["user_rate"].value
        assert product == pytest.approx(1000, rel=0.01)  # ms x tokens per second
    assert published("kimi-k2.5")["user_rate"].value == 694


@pytest.mark.parametrize(
    "kernel, lost, kept",
    [
        ("moe", "time of experts", "time of matrices"),
        ("attention", "time of attention", "time of experts"),
        ("layer", "time of commands", "time of attention"),
    ],
)
def test_missing_record_is_said(kernel, lost, kept):
    rows = by_name(throughput(["gpt-oss"], [r for r in RECORDS if r.kernel != kernel]), "gpt-oss")
    for name in (lost, "time between tokens", "tokens per user", "output tokens per kW"):
        assert rows[name]["value"] is None and kernel in rows[name]["how"]
    assert rows[kept]["value"] > 0
    assert rows["roofline of the time between tokens"]["value"] > 0


def test_unmeasured_record_is_missing():
    rows = throughput(["gpt-oss"], [Record(r.kernel, r.config, r.settings) for r in RECORDS])
    assert by_name(rows, "gpt-oss")["time between tokens"]["value"] is None
    assert not any(row["source"] == "measured" and row["value"] for row in rows)


def test_better_than_roofline_is_an_error():
    wrong = [*RECORDS[1:], Record("gemm", "small", {"m": 64, "n": 128, "k": 1024}, cycles=4095)]
    with pytest.raises(ToolError, match="4095 cycles, less than its array roofline of 4096.0"):
        throughput(["gpt-oss"], wrong)


def test_result_better_than_roofline_is_an_error(monkeypatch):
    from sim.scaling import compose

    monkeypatch.setattr(compose, "fractions", lambda found: Fractions(stream=1.5))
    with pytest.raises(ToolError, match="gpt-oss takes .* less than its roofline"):
        throughput(["gpt-oss"], RECORDS)


def test_unknown_model():
    with pytest.raises(
        InputError, match="MODEL is llama, but it must be one of gpt-oss, deepseek-r1"
    ):
        throughput(["llama"], RECORDS)


@pytest.mark.parametrize(
    "name, value",
    [("chips", 0), ("context", 1.5), ("batch", -1), ("clock_hz", 0.0), ("collective_s", -1e-6)],
)
def test_assumptions_are_checked(name, value):
    with pytest.raises(ValueError, match=f"{name} must"):
        Assumptions(**{name: value})


def test_more_chips_and_batch():
    f = fractions(measurements(RECORDS))
    one, two = (decode_step(GPT_OSS_120B, Assumptions(chips=n), f) for n in (8, 16))
    assert two.matrices == pytest.approx(one.matrices / 2)
    assert two.exchange == one.exchange and two.commands == one.commands
    many = decode_step(GPT_OSS_120B, Assumptions(), f, 64)
    assert one.total < many.total < 64 * one.total


def test_command(capsys, tmp_path):
    file = tmp_path / "out.json"
    assert cli.main(["throughput", "gpt-oss", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert {row["model"] for row in rows} == {"all", "gpt-oss"}
    assert all({"value", "unit", "source"} <= set(row) for row in rows)
    assert "official" in capsys.readouterr().out
    assert cli.main(["throughput", "llama"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
