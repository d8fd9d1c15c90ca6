# SPDX-License-Identifier: Apache-2.0
"""`jalapeno sim layer` of DeepSeek R1 or Kimi K2.5: a decoder layer, decode or prefill behind a
filled cache, with experts or with one dense MLP as in a model's first layers.

Sizes are options, by default scaled down; the model gives the rest (`sim.kernels.mla`,
`sim.kernels.moe`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from golden.bounds import middle_bound, mlp_bound
from golden.formats import SPECS, parse_format
from golden.fp32 import Float32
from golden.kernels.layer import norm
from golden.kernels.mla import MlaCache, rope_rows
from golden.kernels.mla_layer import MlaLayerShape, MlaLayerWeights, mla_layer
from golden.kernels.moe import Expert, MixtureWeights
from golden.kernels.trace import Machine, Trace
from golden.models import MODELS, Mla
from golden.reference.rope import rope_tables
from hw.config import TileConfig
from sim.errors import InputError
from sim.kernels import mla, moe
from sim.kernels.caches import kv_checks, slots
from sim.kernels.layer import vector
from sim.kernels.results import kernel_result, largest_error
from sim.kernels.system import Check, TileRun, simulate
from sim.kernels.types import Kernel, KernelRequest, KernelResult, Option, Setting
from sim.programs.builder import TileProgram
from sim.programs.expert_space import MoeShape, account, block_size, check_block, dense
from sim.programs.memory import Buffer, TileMemory, align_up, require
from sim.programs.mla_layer import MixturePlace, MlaLayerPlace, attention_part
from sim.programs.mla_layer import mla_layer as program
from sim.programs.moe import ExpertImage, place_experts
from sim.programs.work import Work

MLP = ("experts", "dense")
OPTIONS = (
    {"mlp": Option("experts", "experts, or one dense MLP of width intermediate", choices=MLP)}
    | {name: option for name, option in mla.OPTIONS.items() if name != "stream"}
    | {name: moe.OPTIONS[name] for name in ("top_k", "groups", "kept", "shared", "block")}
    | {name: moe.OPTIONS[name] for name in ("act", "weight")}
    | {
        "context": Option(16, "tokens at the end, the new ones included"),
        "steps": Option(4, "steps, each a run of its own on what the one before left"),
        "intermediate": Option(64, "width of an expert (2048) or of the dense MLP (18432)"),
        "experts": Option(32, "experts (the models: 256, 384)", most=512),
    }
)


def fill(model: str, s: Mapping[str, Setting]) -> dict[str, Setting]:
    """Settings with the model's in place of 0 and "model"."""
    own = moe.fill(model, s)
    return {name: own[name] for name in s}


def check_dense(model: str, s: Mapping[str, Setting]) -> None:
    """InputError for options of experts, which a dense layer would leave unused."""
    names = ("experts", "top_k", "groups", "kept", "shared")
    own = fill(model, {name: OPTIONS[name].default for name in names})
    for name in names:
        if s[name] != own[name]:
            raise InputError(name, s[name], "a layer with mlp=dense has no experts", "leave it out")


@dataclass(frozen=True)
class Job:
    """A layer and its tokens: the residual stream xs [context, hidden] and tables."""

    shape: MlaLayerShape
    weights: MlaLayerWeights
    xs: Float32
    cos: NDArray
    sin: NDArray
    sizes: mla.Sizes

    @property
    def space(self) -> MoeShape:
        """What the MLP's program must find room for."""
        mlp = self.weights.mlp
        one = mlp if isinstance(mlp, Expert) else mlp.experts[0]
        shared = None
        if isinstance(mlp, MixtureWeights) and mlp.shared is not None:
            shared = mlp.shared.down.fmt
        given = one.intermediate, self.shape.act, one.down.fmt, shared
        return MoeShape(self.xs.shape[1], *given, residual=True)

    def cache(self, machine: Machine) -> MlaCache:
        """The cache before the first step."""
        cached, inner = self.sizes.cached, self.shape.attention
        if not cached:
            return MlaCache.empty(inner)
        part = self.xs[:cached]
        weights = self.weights
        normed = norm(machine, Trace(), "norm", part, weights.attention_norm, self.shape.eps)
        tables = self.cos[:cached], self.sin[:cached]
        return mla.fill(machine, inner, weights.attention, normed, *tables)

    def bound(self, middles: Float32, ids: NDArray[np.int64] | None) -> tuple[NDArray, NDArray]:
        """(float64 reference, largest error) of the stream [new tokens, hidden] after attention,
        then of the layer's result given what attention has left in `middles`.
        """
        cache = MlaCache.empty(self.shape.attention)
        given = cache, self.xs, self.cos, self.sin, self.sizes.cached
        halves = (
            middle_bound(self.shape, self.weights, *given),
            mlp_bound(self.shape, self.weights, middles, ids),
        )
        references, bounds = zip(*halves, strict=True)
        return np.concatenate(references), np.concatenate(bounds)


def make_job(request: KernelRequest) -> Job:
    """Random tokens and weights; InputError for sizes that the tile cannot do."""
    s, tile, model = request.settings, request.config.tile, request.model
    config = MODELS[model]
    assert isinstance(config.attention, Mla)
    numbers = {name: int(s[name]) for name in mla.OPTIONS if name != "stream"}
    sizes = mla.Sizes(**numbers, stream=1)
    mla.check_sizes(tile, sizes)
    fmt, act = parse_format(str(s["weight"])), parse_format(str(s["act"]))
    hidden, size = sizes.hidden, int(s["intermediate"])
    check_block(tile, size, act, int(s["block"]))
    spec = None
    if s["mlp"] == "experts":
        spec = moe.gate_spec(tile, model, s)
        moe.require_moe(tile, sizes.tokens, hidden, size, spec.experts, fmt)
    else:
        check_dense(model, s)
        padded = 3 * align_up(size, tile.lanes)
        require(
            tile,
            sram=sizes.tokens * (size + hidden) * 16,
            hbm=padded * hidden * SPECS[fmt].storage_bits,
        )
    rng = np.random.default_rng(request.seed)
    unit = max(8, tile.cols)
    shape = MlaLayerShape(
        mla.shape_of(config.attention, sizes, unit),
        config.norm_eps,
        spec,
        act,
    )
    norms = [(1 + 0.1 * rng.standard_normal(hidden)).astype(np.float32) for _ in range(2)]
    attention = mla.random_mla(rng, shape.attention, hidden)
    mlp: MixtureWeights | Expert
    if spec is None:
        given = hidden, size, fmt, tile.lanes, config.dense_format
        mlp = moe.random_expert(rng, model, *given)
    else:
        mlp = moe.random_parts(rng, model, s, spec, tile.lanes)
    xs = rng.standard_normal((sizes.context, hidden)).astype(np.float32)
    frequencies = replace(config.rope, dim=sizes.rope).inv_freq()
    cos, sin = (
        table.astype(np.float32)
        for table in rope_tables(np.arange(sizes.context), frequencies, config.rope.table_scale)
    )
    return Job(shape, MlaLayerWeights(norms[0], attention, norms[1], mlp), xs, cos, sin, sizes)


class Layer:
    """A job's weights and cache in a tile's memory, and the programs of its steps."""

    def __init__(self, tile: TileConfig, job: Job, cache: MlaCache, block: int):
        self.job, self.memory = job, TileMemory(tile)
        p = TileProgram(self.memory)
        weights = job.weights
        attention = mla.place(p, job.shape.attention, weights.attention, cache, True)
        norms = (
            vector(self.memory, "attention_norm", weights.attention_norm),
            vector(self.memory, "mlp_norm", weights.mlp_norm),
        )
        mlp = weights.mlp
        bias = None
        if isinstance(mlp, MixtureWeights):
            assert mlp.choice_bias is not None
            bias = vector(self.memory, "choice_bias", mlp.choice_bias)
        self.mark = self.memory.mark()
        # What attention leaves of the tile SRAM in the last step, which takes most.
        count = job.sizes.tokens
        attention_part(
            TileProgram(self.memory),
            job.shape,
            norms[0],
            attention,
            *self.inputs(job.xs[-count:], job.cos[-count:], job.sin[-count:]),
            len(job.xs) - count,
        )
        taken = self.memory.mark()
        self.memory.rewind(self.mark)
        self.block = block or block_size(tile, count, job.space, job.shape.gate, taken)
        placed: MixturePlace | ExpertImage
        if isinstance(mlp, Expert):
            placed = place_experts(self.memory, [mlp], self.block, "mlp")
        else:
            assert bias is not None
            router = mlp.router
            placed = MixturePlace(
                self.memory.weights("router", router.codes, router.scales, router.fmt, True),
                bias,
                place_experts(self.memory, mlp.experts, self.block),
                None
                if mlp.shared is None
                else place_experts(self.memory, [mlp.shared], self.block, "shared"),
            )
        self.place = MlaLayerPlace(norms[0], attention, norms[1], placed)

    def inputs(self, xs: Float32, cos: NDArray, sin: NDArray) -> tuple[Buffer, Buffer, Buffer]:
        """Buffers of a step's residual stream and RoPE rows."""
        cosine, sine = rope_rows(cos, sin)
        return (
            vector(self.memory, "stream", xs, len(xs)),
            vector(self.memory, "cosine", cosine, len(xs)),
            vector(self.memory, "sine", sine, len(xs)),
        )

    def step(self, position: int, counts: list[int]) -> TileProgram:
        """The program of the tokens behind `position`; `counts` are the rows of each expert that
        they visit.
        """
        self.memory.rewind(self.mark)
        job, part = self.job, slice(position, position + self.job.sizes.tokens)
        p = TileProgram(self.memory)
        given = self.inputs(job.xs[part], job.cos[part], job.sin[part])
        program(p, job.shape, self.place, *given, position)
        if isinstance(self.place.mlp, MixturePlace):
            image = self.place.mlp.experts
            account(p, image, job.shape.act, counts, dense(job.sizes.tokens, image.count))
        return p

    def checks(self, trace: Trace) -> list[Check]:
        """What is in memory after a step."""
        names = list(trace.buffers)
        last = names.index("middle") + 1
        first, second = (
            Trace({name: trace.buffers[name] for name in part})
            for part in (names[:last], names[last:])
        )
        checks = mla.checks_of(self.memory, self.job.shape.attention, first)
        if isinstance(self.place.mlp, MixturePlace):
            return checks + moe.checks_of(self.memory, self.place.mlp.experts, second)
        partial = () if len(self.place.mlp.blocks()) == 1 else ("mlp.gate_up", "mlp.gated")
        return checks + [
            Check(self.memory.buffers[name], kept)
            for name, kept in second.buffers.items()
            if name not in partial
        ]


def note(request: KernelRequest, layer: Layer) -> str:
    """What the sizes are scaled from."""
    model, s = MODELS[request.model], request.settings
    kind = (
        f"intermediate {s['intermediate']} of {model.dense_intermediate} (dense)"
        if s["mlp"] == "dense"
        else f"intermediate {s['intermediate']} of {model.moe.intermediate}, {s['experts']} of "
        f"{model.moe.experts} experts, top {s['top_k']} of {s['groups']} group(s)"
    )
    return f"Sizes scaled from {model.title}: hidden {s['hidden']} of {model.hidden}, {kind}."


def run(request: KernelRequest) -> KernelResult:
    """Every step is one run of a program of its own; the cache stays in the KV SRAM."""
    tile, s = request.config.tile, request.settings
    job = make_job(request)
    machine, sizes = Machine(tile.rows, tile.lanes), job.sizes
    cache = job.cache(machine)
    layer = Layer(tile, job, cache, int(s["block"]))
    runs, work, chosen = [], Work(), []
    middles, outputs = [], []
    for step in range(sizes.steps):
        if step:
            layer.memory.forget()
        position = cache.length
        part, trace = slice(position, position + sizes.tokens), Trace()
        given = job.shape, job.weights, cache, job.xs[part], job.cos[part], job.sin[part]
        outputs.append(mla_layer(machine, trace, *given))
        middles.append(trace.buffers["middle"].values)
        counts: list[int] = []
        if "gate.ids" in trace.buffers:
            ids = trace.buffers["gate.ids"].codes.astype(np.int64)
            chosen.append(ids)
            counts = np.unique(ids, return_counts=True)[1].tolist()
        p = layer.step(position, counts)
        work.include(p.work)
        keys = slots(cache.keys, slice(cache.length))
        keys = replace(keys, codes=keys.codes.copy())  # the cache grows
        latent = job.shape.attention.kv_lora
        held = kv_checks("kv", layer.place.attention.region, keys, keys.dims(latent), tile.cols)
        runs.append(TileRun([p.finish()], [layer.memory.snapshot()], layer.checks(trace), held))
    ids_of_all = np.concatenate(chosen) if chosen else None
    bound = job.bound(np.concatenate(middles), ids_of_all)
    error, limit = largest_error(np.concatenate([*middles, *outputs]), *bound)
    result = simulate(request, [layer.memory], runs)
    shape = dict(s) | {"block": layer.block}
    made = kernel_result("layer", request, shape, result, [work], error, limit)
    return replace(made, text=note(request, layer))


KERNEL = Kernel(
    "layer",
    "a decoder layer of DeepSeek R1 or Kimi K2.5, decode or prefill",
    OPTIONS,
    run,
    mla.MODEL_NAMES,
    fill,
)
