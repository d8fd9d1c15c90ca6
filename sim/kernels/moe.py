# SPDX-License-Identifier: Apache-2.0
"""`jalapeno sim moe`: gate, chosen experts from HBM, shared expert, weighted sum."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from golden import fp32
from golden.bounds import moe_bound
from golden.formats import SPECS, Format, parse_format
from golden.int4 import round_to_int4, values_of
from golden.kernels.moe import Expert, Matrix, MixtureWeights, moe
from golden.kernels.trace import Machine, Stored, Trace
from golden.models import INT4_32, MODELS, GateSpec, WeightFormat
from hw.config import TileConfig
from sim.errors import InputError
from sim.kernels.results import kernel_result, largest_error
from sim.kernels.system import Check, TileRun, simulate
from sim.kernels.types import MODELS as MODEL_NAMES
from sim.kernels.types import Kernel, KernelRequest, KernelResult, Option, Setting
from sim.programs.builder import TileProgram
from sim.programs.expert_space import MoeShape, account, block_size, check_block, dense
from sim.programs.memory import TileMemory, require
from sim.programs.mixture import mixture
from sim.programs.moe import ExpertImage, place_experts, place_matrix

MX = tuple(SPECS[f].name for f in Format if f is not Format.FP32)
SIZES = {
    "tokens": Option(1, "tokens"),
    "hidden": Option(0, "width of the residual stream, 0: scaled from the model", least=0),
    "intermediate": Option(0, "width of an expert, 0: scaled from the model", least=0),
    "experts": Option(0, "experts, 0: scaled from the model", least=0, most=512),
    "top_k": Option(0, "experts of a token, 0: the model's", least=0),
    "act": Option("bf16", "format of the experts' activations", choices=("bf16", "mxfp8-e4m3")),
    "weight": Option("mxfp4", "format of the experts' weights", choices=MX),
}
OPTIONS = SIZES | {
    "groups": Option(0, "groups of experts, 0: the model's", least=0, most=512),
    "kept": Option(0, "groups that take part, 0: the model's", least=0, most=512),
    "shared": Option(
        "model",
        "format of the shared expert's weights, none: there is no such expert",
        choices=("model", "none", *MX),
    ),
    "block": Option(0, "places of an expert that are computed at once, 0: what fits", least=0),
}
# What a tile runs in about a minute: hidden and intermediate sizes / 16 (GPT-OSS: 512 of 2880),
# experts / 4 (Kimi's and GPT-OSS's; DeepSeek's groups stay whole), as many chosen as in the model.
SCALED: dict[str, dict[str, Setting]] = {
    "gpt-oss": {"hidden": 512, "intermediate": 512, "experts": 32, "shared": "none"},
    "deepseek-r1": {"hidden": 448, "intermediate": 128, "experts": 64, "shared": "mxfp4"},
    "kimi-k2.5": {"hidden": 448, "intermediate": 128, "experts": 96, "shared": "bf16"},
}


def fill(model: str, s: Mapping[str, Setting]) -> dict[str, Setting]:
    """Settings with the model's, scaled, in place of 0 and "model"."""
    moe = MODELS[model].moe
    sizes = SCALED[model] | {"top_k": moe.topk, "groups": moe.groups, "kept": moe.groups_kept}
    return {
        name: sizes[name] if name in sizes and value in (0, "model") else value
        for name, value in s.items()
    }


GIVEN = ("hidden", "intermediate", "experts", "shared", "top_k", "groups", "kept")


def note(request: KernelRequest) -> str:
    """Says that all sizes are scaled from the model, if they are."""
    model, s = MODELS[request.model], request.settings
    given = fill(request.model, dict.fromkeys(GIVEN, 0))
    if any(s[name] != value for name, value in given.items()):
        return ""
    return (
        f"Sizes scaled from {model.title}: hidden {s['hidden']} of {model.hidden}, intermediate "
        f"{s['intermediate']} of {model.moe.intermediate}, {s['experts']} of {model.moe.experts} "
        f"experts; top {s['top_k']}, {s['groups']} group(s) and shared expert as in the model."
    )


def check_gate(max_experts: int, max_topk: int, experts: int, top_k: int) -> None:
    """InputError for a gate that the tile's top-k unit cannot do."""
    if experts > max_experts:
        raise InputError(
            "experts", experts, f"the tile's top-k unit takes {max_experts}", "take fewer"
        )
    if top_k > min(max_topk, experts):
        raise InputError(
            "top_k",
            top_k,
            f"it must be at most {min(max_topk, experts)}",
            "take fewer" if max_topk <= experts else "take fewer, or more experts",
        )


def require_moe(
    tile: TileConfig, tokens: int, hidden: int, size: int, count: int, weight_fmt: Format
) -> None:
    """InputError for sizes far beyond the tile: residual streams, router, experts."""
    expert = 3 * size * hidden * SPECS[weight_fmt].storage_bits + (2 * size + hidden) * 32
    require(
        tile,
        sram=tokens * (hidden + count + 2 * size) * 32,
        hbm=count * (hidden * 16 + expert),
    )


def random_expert(
    rng: np.random.Generator,
    model: str,
    hidden: int,
    size: int,
    fmt: Format,
    lanes: int,
    given: WeightFormat,
) -> Expert:
    """Normal weights of variance 1 / fan-in, and biases where the model has them.

    Weights that the model gives in INT4 are rounded to that first and then converted to `fmt`.
    """

    def weights(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    if MODELS[model].moe.activation == "clamped-swiglu":
        rows = weights(2 * size, hidden), weights(2 * size), weights(hidden, size), weights(hidden)
        return Expert.of(*rows, fmt, lanes)
    gate, up, down = weights(size, hidden), weights(size, hidden), weights(hidden, size)
    if given is INT4_32:
        gate, up, down = (values_of(*round_to_int4(part)) for part in (gate, up, down))
    return Expert.gated(gate, up, down, fmt, lanes)


@dataclass(frozen=True)
class Job:
    """What is computed: activations [tokens, hidden], weights, gate, formats."""

    x: NDArray[np.float32]
    router: Matrix
    experts: list[Expert]
    spec: GateSpec
    act: Format
    choice_bias: NDArray[np.float32] | None
    shared: Expert | None

    @property
    def shape(self) -> MoeShape:
        one = self.experts[0]
        shared = None if self.shared is None else self.shared.down.fmt
        return MoeShape(self.x.shape[1], one.intermediate, self.act, one.down.fmt, shared)

    def model(self, machine: Machine, trace: Trace) -> NDArray[np.float32]:
        """What the tile must compute."""
        given = self.x, self.router, self.experts, self.spec
        return moe(machine, trace, *given, self.act, self.choice_bias, self.shared)

    def bound(self, ids: NDArray[np.int64]) -> tuple[NDArray, NDArray]:
        """Float64 reference with the experts `ids`, and the largest error."""
        given = self.x, self.router, self.experts, self.spec
        return moe_bound(*given, ids, self.act, self.choice_bias, self.shared)


def gate_spec(tile: TileConfig, model: str, s: Mapping[str, Setting]) -> GateSpec:
    """The model's gate at these sizes; InputError for one that the tile's top-k unit cannot do."""
    count, top_k = int(s["experts"]), int(s["top_k"])
    check_gate(tile.max_experts, tile.max_topk, count, top_k)
    base = MODELS[model].moe.gate_spec
    try:
        spec = replace(
            base, experts=count, top_k=top_k, groups=int(s["groups"]), groups_kept=int(s["kept"])
        )
    except ValueError as error:
        raise InputError(
            "gate",
            f"experts={count} top_k={top_k}",
            str(error).replace("groups_kept", "kept"),
            "see jalapeno sim --help",
        ) from None
    if spec.groups > tile.max_groups or spec.groups & (spec.groups - 1):
        raise InputError(
            "groups",
            spec.groups,
            f"the tile's top-k unit takes powers of two up to {tile.max_groups}",
            "give for example --set groups=1",
        )
    return spec


def check_rows(tile: TileConfig, tokens: int) -> None:
    """InputError for more tokens at once than the array has sums for."""
    if tokens > tile.acc_rows:
        raise InputError(
            "tokens",
            tokens,
            f"the array has sums for {tile.acc_rows} rows",
            f"take at most {tile.acc_rows}",
        )


def random_parts(
    rng: np.random.Generator, model: str, s: Mapping[str, Setting], spec: GateSpec, lanes: int
) -> MixtureWeights:
    """Weights of a block of experts with the settings' sizes and formats."""
    hidden, size, count = int(s["hidden"]), int(s["intermediate"]), spec.experts
    config = MODELS[model]
    router_weights = rng.standard_normal((count, hidden)) / np.sqrt(hidden)
    bias = rng.standard_normal(count).astype(np.float32)
    softmax = spec.scoring == "softmax"
    router = Matrix.of(router_weights, Format.BF16, bias if softmax else None)
    fmt = parse_format(str(s["weight"]))
    experts = [
        random_expert(rng, model, hidden, size, fmt, lanes, config.routed_format)
        for _ in range(count)
    ]
    shared = None
    if s["shared"] != "none":
        fmt = parse_format(str(s["shared"]))
        shared = random_expert(rng, model, hidden, size, fmt, lanes, config.shared_format)
        if shared.biased:
            raise InputError("shared", s["shared"], f"{model} has none", "give shared=none")
    choice = None if softmax else (0.1 * bias).astype(np.float32)
    return MixtureWeights(router, choice, experts, shared)


def make_job(request: KernelRequest) -> Job:
    """Random activations and weights; InputError for sizes that the tile cannot do."""
    s, tile, model = request.settings, request.config.tile, request.model
    tokens, hidden, size = int(s["tokens"]), int(s["hidden"]), int(s["intermediate"])
    act, weight_fmt = parse_format(str(s["act"])), parse_format(str(s["weight"]))
    spec = gate_spec(tile, model, s)
    require_moe(tile, tokens, hidden, size, spec.experts, weight_fmt)
    check_rows(tile, tokens)
    check_block(tile, size, act, int(s["block"]))
    rng = np.random.default_rng(request.seed)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    parts = random_parts(rng, model, s, spec, tile.lanes)
    return Job(x, parts.router, parts.experts, spec, act, parts.choice_bias, parts.shared)


def run(request: KernelRequest) -> KernelResult:
    """Random activations and experts; the gate's choices decide what is fetched."""
    tile, s = request.config.tile, request.settings
    job = make_job(request)
    block = int(s["block"]) or block_size(tile, len(job.x), job.shape, job.spec)
    trace = Trace()
    out = job.model(Machine(tile.rows, tile.lanes), trace)
    ids = trace.buffers["gate.ids"].codes.astype(np.int64)
    error, limit = largest_error(out, *job.bound(ids))
    memory = TileMemory(tile)
    p, image = place_job(memory, job, block)
    visited, rows = np.unique(ids, return_counts=True)
    account(p, image, job.act, rows.tolist(), dense(len(job.x), job.spec.experts))
    checks = checks_of(memory, image, trace)
    result = simulate(request, [memory], [TileRun([p.finish()], [memory], checks)])
    made = kernel_result("moe", request, s, result, [p.work], error, limit)
    return replace(
        made,
        shape=dict(s) | {"block": block},
        text=note(request),
        extra={"experts_visited": len(visited)},
        sources={**made.sources, "experts_visited": "derived"},
    )


def checks_of(memory: TileMemory, image: ExpertImage, trace: Trace) -> list[Check]:
    """What is in memory at the end: all but what one expert left and the next has overwritten.

    Of a last expert that is computed in blocks only its hidden layer is whole.
    """
    parts = ("gate_up", "gated", "hidden", "down") if len(image.blocks()) == 1 else ("hidden",)
    last = int(trace.buffers["gate.ids"].codes.max())
    places = {
        f"{source}.{part}": f"{target}.{part}"
        for source, target in (("shared", "shared"), (f"e{last}", "expert"))
        for part in parts
    }
    checks = []
    for name, kept in trace.buffers.items():
        place = places.get(name, "" if name[0] == "e" or name.startswith("shared.") else name)
        if buffer := memory.buffers.get(place):
            checks.append(Check(replace(buffer, rows=len(kept.codes)), kept))
    return checks


def place_job(memory: TileMemory, job: Job, block: int) -> tuple[TileProgram, ExpertImage]:
    """The program of a job, its operands placed in `memory`, and where the experts are."""
    p = TileProgram(memory)
    tokens, hidden = job.x.shape
    # Where no row of x is gathered later, the result takes its place.
    place = "x" if dense(tokens, job.spec.experts) else None
    x = memory.buffer("x", tokens, hidden, share=place)
    memory.fill(x, Stored(fp32.bits(job.x), Format.FP32))
    gate_weights, gate_bias = place_matrix(memory, "router", job.router, stream=True)
    shared = None
    if job.shared is not None:
        shared = place_experts(memory, [job.shared], block, "shared")
    image = place_experts(memory, job.experts, block)
    choice_bias = None
    if job.choice_bias is not None:
        choice_bias = memory.scalars("choice_bias", len(job.choice_bias))
        memory.fill(choice_bias, Stored(fp32.bits(job.choice_bias)[None], Format.FP32))
    out = memory.buffer("moe", tokens, hidden, share=place)
    bias = None if job.choice_bias is not None else gate_bias
    mixture(p, x, gate_weights, bias, image, job.spec, job.act, out, choice_bias, shared)
    return p, image


KERNEL = Kernel(
    "moe",
    "mixture of experts with a gate in hardware, of any of the models",
    OPTIONS,
    run,
    MODEL_NAMES,
    fill,
)
