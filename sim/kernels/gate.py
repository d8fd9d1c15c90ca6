# SPDX-License-Identifier: Apache-2.0
"""`jalapeno sim gate`: the experts of tokens and their shares, as one of the three models does."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from golden import fp32
from golden.bounds.gate import shares_bound
from golden.formats import Format
from golden.kernels.gate import gates
from golden.kernels.trace import Machine, Stored, Trace
from golden.models import MODELS, GateSpec
from hw.config import TileConfig
from sim.errors import InputError
from sim.kernels.moe import check_gate
from sim.kernels.results import kernel_result, largest_error
from sim.kernels.system import Check, TileRun, simulate
from sim.kernels.types import MODELS as MODEL_NAMES
from sim.kernels.types import Kernel, KernelRequest, KernelResult, Option, Setting
from sim.programs.builder import TileProgram
from sim.programs.gate import gates as program
from sim.programs.memory import TileMemory, require

OPTIONS = {
    "tokens": Option(4, "tokens"),
    "experts": Option(0, "experts, 0: the model's", least=0, most=512),
    "top_k": Option(0, "experts of a token, 0: the model's", least=0, most=512),
    "groups": Option(0, "groups of experts, 0: the model's", least=0, most=512),
    "kept": Option(0, "groups that take part, 0: the model's", least=0, most=512),
    "scoring": Option(
        "model",
        "softmax over the chosen, or sigmoid with a bias of the choice",
        choices=("model", "softmax", "sigmoid"),
    ),
}
LATENCY = "last_score_to_ids"  #: cycles until ids and scores are in tile SRAM


def gate_spec(model: str, s: Mapping[str, Setting]) -> GateSpec:
    """The model's gate with what the settings change; InputError for one that cannot be."""
    spec = MODELS[model].moe.gate_spec
    if s["scoring"] not in ("model", spec.scoring):
        softmax = s["scoring"] == "softmax"
        spec = GateSpec(
            spec.experts,
            spec.top_k,
            "softmax" if softmax else "sigmoid",
            "logits" if softmax else "choice",
        )
    experts, top_k = int(s["experts"]) or spec.experts, int(s["top_k"]) or spec.top_k
    groups, kept = int(s["groups"]) or spec.groups, int(s["kept"]) or spec.groups_kept
    try:
        return replace(spec, experts=experts, top_k=top_k, groups=groups, groups_kept=kept)
    except ValueError as error:
        raise InputError(
            "gate",
            f"experts={experts} top_k={top_k} groups={groups} kept={kept}",
            str(error).replace("groups_kept", "kept"),
            "see jalapeno sim --help",
        ) from None


def check_groups(tile: TileConfig, spec: GateSpec) -> None:
    """InputError for groups that the tile's top-k unit cannot do."""
    if spec.groups > tile.max_groups or spec.groups & (spec.groups - 1):
        raise InputError(
            "groups",
            spec.groups,
            f"the tile's top-k unit takes powers of two up to {tile.max_groups}",
            "give for example --set groups=1",
        )


def run(request: KernelRequest) -> KernelResult:
    """Random logits, and a random bias of the choice where the gate has one."""
    s, tile = request.settings, request.config.tile
    tokens, spec = int(s["tokens"]), gate_spec(request.model, s)
    check_gate(tile.max_experts, tile.max_topk, spec.experts, spec.top_k)
    check_groups(tile, spec)
    scored = 2 if spec.scoring == "sigmoid" else 1
    require(tile, sram=32 * tokens * spec.experts * scored)
    rng = np.random.default_rng(request.seed)
    logits = (2 * rng.standard_normal((tokens, spec.experts))).astype(np.float32)
    bias = None
    if spec.bias == "choice":
        # Negative choices too, so that a dropped group must not win by a masked 0.
        bias = (0.2 * rng.standard_normal(spec.experts) - 0.5).astype(np.float32)
    trace = Trace()
    ids, shares = gates(Machine(tile.rows, tile.lanes), trace, "gate", logits, spec, bias)
    error, limit = largest_error(shares, *shares_bound(logits, ids, spec))

    memory = TileMemory(tile)
    p = TileProgram(memory)
    given = memory.buffer("logits", tokens, spec.experts)
    memory.fill(given, Stored(fp32.bits(logits), Format.FP32))
    biases = None
    if bias is not None:
        biases = memory.scalars("bias", spec.experts)
        memory.fill(biases, Stored(fp32.bits(bias)[None, :], Format.FP32))
    program(p, "gate", given, spec, biases)
    checks = [Check(memory.buffers[name], kept) for name, kept in trace.buffers.items()]
    result = simulate(request, [memory], [TileRun([p.finish()], [memory], checks)])
    shape = dict(s) | {
        "experts": spec.experts,
        "top_k": spec.top_k,
        "groups": spec.groups,
        "kept": spec.groups_kept,
        "scoring": spec.scoring,
    }
    figures = kernel_result("gate", request, shape, result, [p.work], error, limit)
    # While scores come the engine is busy one cycle for each, and starved otherwise.
    busy = result.counters["topk"]["busy"] + result.counters["topk"]["blocked"]
    latency = busy / tokens - spec.experts
    return replace(
        figures,
        extra={LATENCY: latency},
        sources={**figures.sources, LATENCY: "measured"},
    )


KERNEL = Kernel(
    "gate", "choice of experts and their shares, of any of the models", OPTIONS, run, MODEL_NAMES
)
