# SPDX-License-Identifier: Apache-2.0
"""The moe kernel on the tile: all models, formats and batches against the bit-exact model; what is
fetched; faults of the HBM slice; distance to the roofline.
"""

from dataclasses import replace

import numpy as np
import pytest

from golden.formats import Format
from golden.kernels.trace import Machine, Trace
from golden.models import GateSpec
from hw.config import ChipConfig, preset
from sim.errors import InputError, ToolError
from sim.kernels import KERNELS
from sim.kernels import moe as kernel
from sim.kernels.moe import checks_of, make_job, place_job
from sim.kernels.system import SystemResult, TileRun, simulate
from sim.kernels.types import KernelRequest, KernelResult
from sim.programs.expert_space import MoeShape, block_size
from sim.programs.memory import TileMemory

TINY = {"hidden": 64, "intermediate": 64, "experts": 8, "top_k": 2}
slow = pytest.mark.slow


def request_of(model="gpt-oss", config="tiny", stall="none", seed=5, **settings) -> KernelRequest:
    given = {name: str(value) for name, value in settings.items()}
    chip = config if isinstance(config, ChipConfig) else preset(config)
    settings = KERNELS["moe"].settings(given, model)
    print("moe", chip.name, model, stall, "seed", seed, settings)
    return KernelRequest(chip, model, settings, stall, seed, check_order=chip.name == "tiny")


def moe(model="gpt-oss", config="tiny", stall="none", seed=5, **settings) -> KernelResult:
    result = KERNELS["moe"].run(request_of(model, config, stall, seed, **settings))
    assert result.passed, result.differences
    assert 0 < result.fraction_of_roofline <= 1 and result.fraction_of_peak <= 1
    return result


def run_jobs(requests: list[KernelRequest], **options) -> tuple[SystemResult, list[int]]:
    """One simulation of all requests, each on what the one before has left in memory.

    Also the weight rows that must be fetched: the router's, the shared expert's, and those of each
    expert that any token of a request has chosen, once.
    """
    tile = requests[0].config.tile
    memory, runs, rows = TileMemory(tile), [], []
    for request in requests:
        memory.rewind(0)
        memory.forget()
        job, trace = make_job(request), Trace()
        block = int(request.settings["block"]) or block_size(tile, len(job.x), job.shape, job.spec)
        job.model(Machine(tile.rows, tile.lanes), trace)
        p, image = place_job(memory, job, block)
        checks = checks_of(memory, image, trace)
        assert {"x_bf16", "logits", "gate.ids", "moe"} <= {c.buffer.name for c in checks}
        runs.append(TileRun([p.finish()], [memory.snapshot()], checks))
        visited = len(np.unique(trace.buffers["gate.ids"].codes))
        each = image.gate_up.rows + image.down.rows
        router = -(-job.spec.experts // tile.cols) * -(-job.x.shape[1] // 8)
        shared = 0
        if job.shared is not None:
            scratch = TileMemory(tile)
            shared = sum(
                scratch.weights("shared", m.codes, m.scales, m.fmt, stream=True).rows
                for m in (job.shared.gate_up, job.shared.down)
            )
        rows.append(router + shared + visited * each)
    return simulate(requests[0], [memory], runs, **options), rows


def check_jobs(requests: list[KernelRequest]) -> None:
    result, rows = run_jobs(requests)
    assert result.compared > 0 and result.mismatched == 0, result.differences
    assert result.order is not None and result.order.dependences > 0
    assert not result.order.findings, list(map(str, result.order.findings[:5]))
    tile = requests[0].config.tile
    assert result.counters["load"]["busy"] == sum(rows)
    lines = tile.hbm_beat_bytes // 16
    assert result.counters["stream"]["busy"] == sum(rows) * tile.cols // lines


GPT = [
    {"experts": 1, "top_k": 1},
    {"tokens": 3, "top_k": 4},
    {"hidden": 72, "intermediate": 40},
    {"tokens": 2, "act": "mxfp8-e4m3"},
    {"tokens": 4, "block": 32, "intermediate": 96, "experts": 4},  # 3 blocks, rows gathered
    {"tokens": 5, "block": 32, "intermediate": 72, "experts": 1, "top_k": 1},
    {"weight": "bf16"},
    {"tokens": 2, "weight": "mxfp8-e4m3", "experts": 16, "top_k": 8},
]
SIGMOID = [
    ("deepseek-r1", {"tokens": 3, "experts": 16, "top_k": 4}),
    ("kimi-k2.5", {"tokens": 2, "experts": 24}),
    ("deepseek-r1", {"block": 32, "intermediate": 96, "experts": 16, "top_k": 8}),
    ("kimi-k2.5", {"shared": "none", "top_k": 1}),
    ("kimi-k2.5", {"weight": "mxfp8-e4m3", "shared": "mxfp8-e4m3", "act": "mxfp8-e4m3"}),
    ("deepseek-r1", {"weight": "bf16", "shared": "bf16", "tokens": 2, "groups": 2, "kept": 1}),
    # Shared experts whose groups are wider than those of the others: one buffer serves both.
    ("kimi-k2.5", {"weight": "bf16", "shared": "mxfp4", "tokens": 2, "hidden": 40}),
    ("deepseek-r1", {"weight": "mxint8", "shared": "mxfp6-e2m3", "act": "mxfp8-e4m3"}),
]


def test_gpt_oss():
    """A single token, and several that share experts."""
    check_jobs([request_of(**TINY | s, stall="light") for s in (GPT[0], GPT[1])])


def test_models_with_shared_experts():
    for model, settings in (SIGMOID[0], SIGMOID[-2]):
        check_jobs([request_of(model, **TINY | settings)])


@slow
@pytest.mark.parametrize("stall", ["none", "light", "heavy"])
def test_all_of_gpt_oss(stall):
    check_jobs([request_of(**TINY | s, stall=stall, seed=i) for i, s in enumerate(GPT)])


@slow
@pytest.mark.parametrize("stall", ["none", "light", "heavy"])
def test_all_with_sigmoid_gates(stall):
    requests = [
        request_of(model, **TINY | s, stall=stall, seed=i) for i, (model, s) in enumerate(SIGMOID)
    ]
    check_jobs(requests)


@slow
@pytest.mark.parametrize("seed", range(3))
def test_random_batches(seed):
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(6):
        experts = int(rng.choice([1, 2, 5, 16]))
        settings = {
            "tokens": int(rng.integers(1, 9)),
            "experts": experts,
            "top_k": int(rng.integers(1, min(experts, 8) + 1)),
            "hidden": int(rng.choice([32, 40, 64, 100])),
            "intermediate": int(rng.choice([4, 32, 36, 65])),
            "block": int(rng.choice([0, 32])),
        }
        stall = ("none", "light", "heavy")[seed]
        requests.append(request_of(**settings, stall=stall, seed=10 * seed + i))
    check_jobs(requests)


def chosen_places(request: KernelRequest) -> tuple[list[tuple[int, int, int]], list[int]]:
    """(first byte, first of the biases, end) of each expert, and the experts that are chosen."""
    tile, job, trace = request.config.tile, make_job(request), Trace()
    job.model(Machine(tile.rows, tile.lanes), trace)
    _, image = place_job(TileMemory(tile), job, 64)
    places = [
        (start, start + image.bias_offset, start + image.size)
        for start in (image.base + e * image.size for e in range(image.count))
    ]
    return places, sorted(set(trace.buffers["gate.ids"].codes.ravel().tolist()))


@pytest.mark.parametrize(
    "where",
    [
        "weights",
        *(pytest.param(w, marks=slow) for w in ("biases", "router", "shared", "elsewhere")),
    ],
)
def test_errors_of_the_hbm_slice(where):
    """In the router, the shared expert, or the weights or biases of a chosen expert they stop the
    tile; elsewhere they matter to nobody.
    """
    request = request_of(**TINY)
    if where == "shared":  # it lies between router and experts
        request = request_of("kimi-k2.5", **TINY)
    if where in ("router", "shared"):
        job = make_job(request)
        _, image = place_job(TileMemory(request.config.tile), job, 64)
        place = (0, 16) if where == "router" else (image.base - 32, image.base - 16)
        with pytest.raises(ToolError, match="HBM_ERROR"):
            run_jobs([request], err=place)
        return
    places, chosen = chosen_places(request)
    assert 0 < len(chosen) < len(places)
    start, biases, end = places[chosen[-1]]
    if where == "elsewhere":
        start, _, end = places[next(e for e in range(len(places)) if e not in chosen)]
        result, _ = run_jobs([request], err=(start, end))
        assert result.compared > 0 and result.mismatched == 0, result.differences
        return
    with pytest.raises(ToolError, match="HBM_ERROR"):
        run_jobs([request], err=(start + 32, start + 48) if where == "weights" else (biases, end))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda image, tile: {"base": tile.hbm_bytes - image.size},  # expert 0 would fit
            id="address",
        ),
        pytest.param(
            lambda image, tile: {"count": 1},  # a chosen id is no expert
            id="id",
            marks=slow,
        ),
    ],
)
def test_experts_out_of_range_stop_the_tile(monkeypatch, change):
    request = replace(request_of(**TINY), check_order=False)  # it knows no place out of range
    _, chosen = chosen_places(request)
    assert max(chosen) > 0
    place = kernel.place_experts

    def elsewhere(memory, experts, *rest):
        image = place(memory, experts, *rest)
        return replace(image, **change(image, memory.config))

    monkeypatch.setattr(kernel, "place_experts", elsewhere)
    with pytest.raises(ToolError, match="ADDRESS_RANGE"):
        run_jobs([request])


@slow
def test_one_token_at_the_hbm_roofline():
    """GPT-OSS scaled to a tile, from the first command to the last result."""
    result = moe(config="small", seed=0)
    assert result.shape["hidden"] == 512 and result.shape["experts"] == 32
    assert result.roofline.startswith("hbm") and result.fraction_of_roofline >= 0.996
    assert "2880" in result.text


@slow
def test_one_expert_of_full_size_at_the_hbm_roofline():
    sizes = {"hidden": 2880, "intermediate": 2880, "experts": 1, "top_k": 1}
    result = moe(config="small", seed=0, **sizes)
    assert result.roofline.startswith("hbm") and result.fraction_of_roofline >= 0.995


@slow
@pytest.mark.parametrize("model", ["deepseek-r1", "kimi-k2.5"])
def test_one_token_of_the_other_models(model):
    result = moe(model, "small", seed=0)
    assert result.roofline.startswith("hbm") and result.fraction_of_roofline >= 0.98


# tokens: the resource that binds, the least fraction of its time (docs/moe.md).
SWEEP = {1: ("hbm", 0.985), 8: ("hbm", 0.98), 64: ("array", 0.855), 256: ("array", 0.885)}


@slow
@pytest.mark.parametrize("tokens", SWEEP)
def test_tokens_of_an_expert(tokens):
    """256 tokens take a larger tile SRAM: 4 KiB each, see docs/moe.md."""
    name, least = SWEEP[tokens]
    sizes = {"hidden": 512, "intermediate": 512, "experts": 1, "top_k": 1}
    config = preset("small")
    if tokens == 256:
        config = replace(config, tile=replace(config.tile, sram_bytes=2 << 20))
    result = moe(config=config, seed=0, tokens=tokens, **sizes)
    print(result.cycles, f"{result.fraction_of_roofline:.2%}", result.roofline)
    assert result.roofline.startswith(name) and result.fraction_of_roofline >= least


def test_blocks_are_chosen_by_their_cost():
    """With few tokens one block, with more the smaller ones, whose last costs less; what does not
    fit is said.
    """
    tile, gate = preset("small").tile, GateSpec(1, 1, "softmax")
    shape = MoeShape(512, 512, Format.BF16, Format.MXFP4)
    assert [block_size(tile, n, shape, gate) for n in (1, 4, 8, 64)] == [512, 512, 128, 64]
    assert block_size(tile, 16, shape, GateSpec(64, 4, "softmax")) == 512  # 1 row each
    assert block_size(tile, 4, shape, None) == 512
    assert block_size(tile, 4, shape, None, taken=tile.sram_bytes - 48 * 1024) < 512
    with pytest.raises(InputError, match="tile SRAM"):
        block_size(tile, 256, shape, gate)


def test_the_note_says_what_is_scaled():
    for model in ("gpt-oss", "deepseek-r1", "kimi-k2.5"):
        assert kernel.note(request_of(model, tokens=3)).startswith("Sizes scaled from")
        assert kernel.note(request_of(model, top_k=2)) == ""  # the model chooses more
        assert kernel.note(request_of(model, hidden=64)) == ""
    assert kernel.note(request_of("deepseek-r1", kept=5)) == ""
