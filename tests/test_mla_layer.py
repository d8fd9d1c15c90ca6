# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of DeepSeek and Kimi in RTL: with experts and dense, decode and prefill, against
the bit-exact model.
"""

from dataclasses import replace

import pytest

from golden.formats import Format
from golden.kernels.trace import Machine
from hw.config import preset
from sim.assembler import disassemble
from sim.errors import InputError
from sim.kernels import KERNELS
from sim.kernels.mla_layer import Job, make_job
from sim.kernels.types import KernelRequest
from tests.test_mla_layer_golden import case

TINY = {
    "hidden": 32,
    "q_lora": 24,
    "kv_lora": 32,
    "nope": 16,
    "rope": 8,
    "v": 8,
    "steps": 2,
    "chunk": 8,
}
# Nothing that may be something else is a multiple of the array's sizes.
ODD = {"hidden": 36, "q_lora": 23, "nope": 9, "v": 12, "heads": 5, "intermediate": 72}
DEEPSEEK, KIMI = "deepseek-r1", "kimi-k2.5"
DENSE = {"mlp": "dense"}
slow = pytest.mark.slow


def request_of(model, config="tiny", stall="none", seed=0, **settings):
    kernel = KERNELS["layer"].of(model)
    given = kernel.settings({name: str(value) for name, value in settings.items()}, model)
    print("layer", config, model, stall, "seed", seed, given)
    return KernelRequest(preset(config), model, given, stall, seed, check_order=config == "tiny")


def simulate(model, config="tiny", stall="none", seed=0, **settings):
    request = request_of(model, config, stall, seed, **settings)
    result = KERNELS["layer"].of(model).run(request)
    assert result.compared > 0 and result.mismatched == 0, result.differences
    assert result.passed and 0 < result.fraction_of_roofline <= 1
    if config == "tiny":
        assert result.order_checked > 0
    return result


CASES = [
    (DEEPSEEK, {"experts": 16}, "light"),
    (KIMI, DENSE | ODD | {"tokens": 3}, "heavy"),
    (DEEPSEEK, DENSE | {"context": 1, "steps": 1}, "none"),
    (DEEPSEEK, {"experts": 16, "tokens": 5} | ODD, "none"),
    (DEEPSEEK, {"experts": 16, "groups": 2, "kept": 1, "top_k": 3, "tokens": 2}, "heavy"),
    (DEEPSEEK, {"experts": 16, "shared": "none", "block": 32} | ODD, "light"),
    (DEEPSEEK, {"experts": 16, "tokens": 4, "block": 32, "act": "mxfp8-e4m3"} | ODD, "none"),
    (KIMI, {"experts": 24, "weight": "mxfp8-e4m3", "shared": "mxfp8-e4m3"}, "none"),
    (KIMI, {"experts": 24, "weight": "bf16", "tokens": 9, "context": 18}, "heavy"),
    (KIMI, {"experts": 1, "top_k": 1, "tokens": 3, "shared": "none"}, "light"),
    (KIMI, DENSE | {"block": 32, "intermediate": 100, "act": "mxfp8-e4m3"}, "light"),
    (KIMI, DENSE | {"weight": "bf16", "tokens": 8, "intermediate": 7}, "none"),
]


@pytest.mark.parametrize(
    ("model", "settings", "stall"),
    [pytest.param(*case, marks=[slow] if i > 1 else []) for i, case in enumerate(CASES)],
    ids=str,
)
def test_layer(model, settings, stall):
    simulate(model, stall=stall, seed=20, **(TINY | settings))


@slow
@pytest.mark.parametrize("model", [DEEPSEEK, KIMI])
@pytest.mark.parametrize("settings", [{}, DENSE, {"tokens": 4}], ids=str)
def test_small_tile(model, settings):
    result = simulate(model, "small", seed=21, **settings)
    assert "7168" in result.text


@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=slow)])
def test_the_layer_of_the_vector(monkeypatch, dense):
    """Weights and tokens of an independent implementation; `tests/test_mla_layer_golden.py` holds
    the bit-exact model to what it gave.
    """
    shape, weights, xs, cos, sin, _ = case(preset("tiny").tile.lanes, Format.MXFP4, dense)
    own = shape.attention
    settings = {name: getattr(own, name) for name in ("heads", "q_lora", "kv_lora", "nope", "rope")}
    settings |= {"v": own.v, "hidden": xs.shape[1], "context": len(xs), "tokens": 3, "steps": 4}
    if dense:
        settings |= DENSE
    request = request_of(DEEPSEEK, "tiny", "light", **settings)
    sizes = replace(make_job(request).sizes, chunk=8)
    inner = replace(own, block=64, chunk=8)
    job = Job(replace(shape, attention=inner), weights, xs, cos, sin, sizes)
    monkeypatch.setattr("sim.kernels.mla_layer.make_job", lambda _: job)
    result = KERNELS["layer"].of(DEEPSEEK).run(request)
    assert result.passed, result.differences


class Stopped(Exception):
    pass


def planned(monkeypatch, model, **settings):
    """The runs of a layer, which is not simulated."""
    seen = []

    def note(request, memories, runs, **_):
        seen.extend(runs)
        raise Stopped

    monkeypatch.setattr("sim.kernels.mla_layer.simulate", note)
    request = request_of(model, **(TINY | settings))
    with pytest.raises(Stopped):
        KERNELS["layer"].of(model).run(request)
    return seen


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (DENSE, ("mlp.gate_up", "mlp.gated", "mlp.hidden", "mlp.down", "dense")),
        (DENSE | {"block": 32}, ("mlp.hidden", "mlp.down", "dense")),
        (
            {"experts": 16, "tokens": 2},
            ("x_bf16", "logits", "gate.ids", "gate.shares", "shared.hidden", "shared.down", "moe"),
        ),
    ],
    ids=str,
)
def test_every_buffer_is_compared(monkeypatch, settings, wanted):
    for run in planned(monkeypatch, DEEPSEEK, **settings):
        names = {check.buffer.name for check in run.checks}
        assert {*wanted, "x", "q_latent", "projected", "middle", "normed2"} <= names
        assert len(names) == len(run.checks) and len(run.kv_checks) == 2


def test_router_and_shared_expert_are_fetched_before_the_gate(monkeypatch):
    """All streams that depend on nothing stand before the first TOPK."""
    (run, _) = planned(monkeypatch, KIMI, experts=16)
    (program,) = run.programs
    issued = [line.split()[0] for line in disassemble(program.assemble())]
    first = issued.index("topk")
    # q_a, kv_a, q_rope, q_nope, absorb, expand, output; router, shared gate_up and down
    assert issued[:first].count("stream") == 4 + 4 + 4 + 1 + 3


def test_models_choose_the_kernel():
    layer = KERNELS["layer"]
    assert layer.all_models == ("gpt-oss", DEEPSEEK, KIMI)
    assert layer.of("gpt-oss") is layer and "kv_heads" in layer.options
    for model in (DEEPSEEK, KIMI):
        assert layer.of(model).name == "layer" and "kv_lora" in layer.of(model).options
    assert KERNELS["gemm"].of(KIMI) is KERNELS["gemm"]


def test_the_layer_is_that_of_its_model():
    """Its eps, its gate and its scale of the scores."""
    jobs = [make_job(request_of(model, **TINY)) for model in (DEEPSEEK, KIMI)]
    assert [job.shape.eps for job in jobs] == [1e-6, 1e-5]
    assert [job.shape.gate.scale for job in jobs] == [2.5, 2.827]
    assert jobs[0].shape.attention.scale < jobs[1].shape.attention.scale
    assert jobs[0].cache(Machine(2, 4)).length == 14  # tokens before the two steps


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": 100}, "groups must divide 100 experts"),
        ({"experts": 512, "top_k": 99}, "top_k is 99, but it must be at most"),
        ({"groups": 3, "kept": 2, "experts": 48}, "powers of two"),
        ({"kept": 9}, "kept must be 1 to 8"),
        ({"kv_lora": 36}, "kv_lora is 36, but it must be a multiple of 8"),
        ({"steps": 17}, "context is 16, but 17 of its tokens are new"),
        ({"tokens": 257, "context": 600}, "tokens is 257, but the array takes 256 rows"),
        (DENSE | {"intermediate": 65535, "hidden": 65535}, "the tile has"),
        ({"intermediate": 65535}, "the tile has"),
        ({"intermediate": 38, "block": 39}, "block is 39, but it must be a multiple of 4"),
        (DENSE | {"shared": "bf16"}, "shared is bf16, but a layer with mlp=dense has no experts"),
        (DENSE | {"experts": 64}, "experts is 64, but a layer with mlp=dense has no experts"),
        (DENSE | {"block": 4, "act": "mxfp8-e4m3"}, "block is 4, but it must be a multiple of 32"),
        ({"hidden": 65535}, "the tile has"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(settings, message):
    with pytest.raises(InputError) as error:
        simulate(DEEPSEEK, **(TINY | settings))
    assert message in str(error.value) and "\n" not in str(error.value)
