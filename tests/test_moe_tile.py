# SPDX-License-Identifier: Apache-2.0
"""The moe kernel on the tile: all models, formats and batches against the bit-exact model; what is
fetched; faults of the HBM slice; distance to the roofline.
"""

import numpy as np
import pytest

from golden.kernels.trace import Machine, Trace
from hw.config import ChipConfig, preset
from sim.kernels import KERNELS
from sim.kernels.moe import checks_of, make_job, place_job
from sim.kernels.system import SystemResult, TileRun, simulate
from sim.kernels.types import KernelRequest, KernelResult
from sim.programs.expert_space import block_size
from sim.programs.memory import TileMemory

TINY = {"hidden": 64, "intermediate": 64, "experts": 8, "top_k": 2}
slow = pytest.mark.slow


def request_of(model="gpt-oss", config="tiny", stall="none", seed=5, **settings) -> KernelRequest:
    given = {name: str(value) for name, value in settings.items()}
    chip = config if isinstance(config, ChipConfig) else preset(config)
    settings = KERNELS["moe"].settings(given, model)
    print("moe", chip.name, model, stall, "seed", seed, settings)
    return KernelRequest(chip, model, settings, stall, seed)


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
]


def test_gpt_oss():
    """A single token, and several that share experts."""
    check_jobs([request_of(**TINY | s, stall="light") for s in (GPT[0], GPT[1])])


def test_models_with_shared_experts():
    model, settings = SIGMOID[0]
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
