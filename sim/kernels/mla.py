# SPDX-License-Identifier: Apache-2.0
"""`jalapeno sim mla`: the whole multi-head latent attention of DeepSeek R1 or Kimi K2.5, decode or
prefill behind a filled cache.

The models' own sizes are far beyond a simulated tile: sizes are options, by default scaled down.
Of the model come the frequencies of the rotary embedding (YaRN), the softmax scale and eps.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from golden.bounds import mla_bound
from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.mla import MlaCache, MlaMatrices, MlaShape, mla, mla_key, rope_rows
from golden.kernels.trace import Machine, Stored, Trace
from golden.models import MODELS, Mla
from golden.reference.mla import MlaWeights
from golden.reference.rope import rope_tables
from hw.config import TileConfig
from sim.errors import InputError
from sim.kernels.attention import SHORT_CHUNK
from sim.kernels.caches import kv_checks, kv_images, slots
from sim.kernels.layer import vector
from sim.kernels.results import kernel_result, largest_error
from sim.kernels.system import Check, TileRun, check_host_lines, simulate
from sim.kernels.types import Kernel, KernelRequest, KernelResult, Option, Setting
from sim.programs.builder import TileProgram
from sim.programs.memory import TileMemory, align_up, require
from sim.programs.mla import MlaPlace, place_matrices
from sim.programs.mla import mla as program
from sim.programs.regions import KvRegion
from sim.programs.work import Work

MODEL_NAMES = ("deepseek-r1", "kimi-k2.5")
OPTIONS = {
    "heads": Option(4, "query heads (the models: 128, 64)"),
    "q_lora": Option(96, "width of the compressed queries (1536)"),
    "kv_lora": Option(128, "width of the latent (512)"),
    "nope": Option(32, "elements of a head that are not rotated (128)"),
    "rope": Option(16, "elements of a head that are rotated (64)"),
    "v": Option(32, "elements of a head's value (128)"),
    "hidden": Option(128, "width of the residual stream (7168)"),
    "context": Option(48, "tokens at the end, the new ones included"),
    "tokens": Option(1, "new tokens of a step: 1 is decode, more are prefill"),
    "steps": Option(1, "steps, each a run of its own on the cache that the one before left"),
    "chunk": Option(SHORT_CHUNK, "slots that the softmax takes at once", most=4096),
    "stream": Option(1, "1: weights come from the HBM slice, 0: they lie in KV SRAM", 0, 1),
}


@dataclass(frozen=True)
class Sizes:
    """What the settings say, as numbers."""

    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int
    hidden: int
    context: int
    tokens: int
    steps: int
    chunk: int
    stream: int

    @property
    def cached(self) -> int:
        """Tokens in the cache before the first step."""
        return self.context - self.tokens * self.steps

    @property
    def weights(self) -> int:
        """Elements of all matrices."""
        latent = self.kv_lora + self.rope
        queries = self.heads * (self.nope + self.rope)
        each = self.kv_lora * (self.nope + self.v) + self.v * self.hidden
        return self.hidden * (self.q_lora + latent) + self.q_lora * queries + self.heads * each


def check_sizes(tile: TileConfig, sizes: Sizes) -> None:
    """InputError for sizes that the tile's program cannot lay out."""
    unit = max(8, tile.lanes)
    for name, size, least in (
        ("kv_lora", sizes.kv_lora, unit),
        ("rope", sizes.rope, unit),
        ("v", sizes.v, tile.lanes),
        ("chunk", sizes.chunk, unit),
    ):
        if size % least:
            raise InputError(
                name,
                size,
                f"it must be a multiple of {least} on this tile",
                f"take {align_up(size, least)}",
            )
    rows = "heads" if sizes.tokens == 1 else "tokens"
    if max(sizes.tokens, sizes.heads if sizes.tokens == 1 else 0) > tile.acc_rows:
        raise InputError(
            rows,
            getattr(sizes, rows),
            f"the array takes {tile.acc_rows} rows at once",
            "take fewer" if rows == "heads" else "take fewer, in more steps",
        )
    if sizes.cached < 0:
        raise InputError(
            "context",
            sizes.context,
            f"{sizes.tokens * sizes.steps} of its tokens are new",
            f"take {sizes.tokens * sizes.steps} or more",
        )
    matrices, width = sizes.weights * 16, sizes.kv_lora + sizes.rope
    rows_at_once = sizes.tokens * (
        sizes.hidden * 48 + sizes.heads * (2 * sizes.rope * 32 + (width + sizes.kv_lora) * 16)
    )
    require(
        tile,
        sram=rows_at_once,
        kv=sizes.context * (width + sizes.kv_lora) * 16 + (0 if sizes.stream else matrices),
        hbm=matrices if sizes.stream else 0,
    )
    check_host_lines(sizes.steps * -(-sizes.tokens * (sizes.hidden + 4 * sizes.rope) // 8))


def shape_of(model: Mla, sizes: Sizes, unit: int) -> MlaShape:
    """The model's scale and eps at these sizes."""
    return MlaShape(
        sizes.heads,
        sizes.q_lora,
        sizes.kv_lora,
        sizes.nope,
        sizes.rope,
        sizes.v,
        model.scale * ((model.nope + model.rope) / (sizes.nope + sizes.rope)) ** 0.5,
        model.norm_eps,
        align_up(sizes.context, unit),
        sizes.chunk,
        unit=unit,
    )


def random_mla(rng: np.random.Generator, shape: MlaShape, hidden: int) -> MlaMatrices:
    """Weights with which the scores are some units apart."""

    def matrix(out: int, contraction: int) -> NDArray:
        return rng.standard_normal((out, contraction)) / np.sqrt(contraction)

    return MlaMatrices.of(
        MlaWeights(
            matrix(shape.q_lora, hidden),
            1 + 0.1 * rng.standard_normal(shape.q_lora),
            matrix(shape.heads * (shape.nope + shape.rope), shape.q_lora),
            matrix(shape.width, hidden),
            1 + 0.1 * rng.standard_normal(shape.kv_lora),
            matrix(shape.heads * (shape.nope + shape.v), shape.kv_lora),
            matrix(hidden, shape.heads * shape.v),
        ),
        shape,
    )


def fill(
    machine: Machine,
    shape: MlaShape,
    weights: MlaMatrices,
    xs: Float32,
    cos: NDArray,
    sin: NDArray,
) -> MlaCache:
    """A cache with the keys of tokens xs [T, hidden]."""
    cache = MlaCache.empty(shape)
    if len(xs):
        trace = Trace()
        given = trace.keep("x", xs, Format.BF16)
        keys = mla_key(machine, trace, shape, weights, given, *rope_rows(cos, sin))
        cache.keys.put(np.arange(len(xs)), keys)
        cache.length = len(xs)
    return cache


def place(
    p: TileProgram, shape: MlaShape, weights: MlaMatrices, cache: MlaCache, stream: bool
) -> MlaPlace:
    """Puts weights and the cache, as it is, into the tile's memories."""
    region = KvRegion.allocate(p, "kv", shape.ring, shape.width, shape.kv_lora)
    keys = slots(cache.keys, slice(cache.length))
    kv_images(p.memory, region, keys, keys.dims(shape.kv_lora))
    norms = (
        vector(p.memory, "q_a_norm", weights.q_a_norm),
        vector(p.memory, "kv_a_norm", weights.kv_a_norm),
    )
    return place_matrices(p.memory, shape, weights, norms, region, stream)


def checks_of(memory: TileMemory, shape: MlaShape, trace: Trace) -> list[Check]:
    """A check of every buffer that still has a place; q_nope by heads, which may lie apart."""
    checks = []
    for name, kept in trace.buffers.items():
        if name == "q_nope":
            for h in range(shape.heads):
                part = kept.codes[:, h * shape.nope : (h + 1) * shape.nope]
                checks.append(Check(memory.buffers[f"q_nope.h{h}"], Stored(part, kept.fmt)))
        elif ".c" not in name or name in memory.buffers:  # chunks may share places
            checks.append(Check(memory.buffers[name], kept))
    return checks


def settings(request: KernelRequest) -> dict[str, Setting]:
    """What was run, and what its sizes are scaled from, as the result reports it."""
    config = MODELS[request.model]
    model = config.attention
    assert isinstance(model, Mla)
    own = ("heads", "q_lora", "kv_lora", "nope", "rope", "v")
    scaled = ",".join(f"{name}={getattr(model, name)}" for name in own)
    return dict(request.settings) | {"scaled_from": f"{scaled},hidden={config.hidden}"}


def run(request: KernelRequest) -> KernelResult:
    """Every step is one run of a program of its own; the cache stays in the KV SRAM."""
    tile = request.config.tile
    sizes = Sizes(**{name: int(request.settings[name]) for name in OPTIONS})
    check_sizes(tile, sizes)
    config = MODELS[request.model]
    assert isinstance(config.attention, Mla)
    shape = shape_of(config.attention, sizes, max(8, tile.cols))
    rng = np.random.default_rng(request.seed)
    weights = random_mla(rng, shape, sizes.hidden)
    xs = rng.standard_normal((sizes.context, sizes.hidden)).astype(np.float32)
    frequencies = replace(config.rope, dim=shape.rope).inv_freq()
    cos, sin = (
        table.astype(np.float32)
        for table in rope_tables(np.arange(sizes.context), frequencies, config.rope.table_scale)
    )
    machine, cached = Machine(tile.rows, tile.lanes), sizes.cached
    cache = fill(machine, shape, weights, xs[:cached], cos[:cached], sin[:cached])

    memory = TileMemory(tile)
    where = place(TileProgram(memory), shape, weights, cache, bool(sizes.stream))
    mark = memory.mark()
    runs, work, outputs = [], Work(), []
    for step in range(sizes.steps):
        memory.rewind(mark)
        if step:
            memory.forget()
        position = cache.length
        new = slice(position, position + sizes.tokens)
        trace = Trace()
        outputs.append(mla(machine, trace, shape, weights, cache, xs[new], cos[new], sin[new]))
        p = TileProgram(memory)
        given = trace.buffers["x"]
        x = memory.buffer("x", sizes.tokens, sizes.hidden, Format.BF16, weight=weights.q_a.fmt)
        memory.fill(x, given)
        cosine, sine = (
            vector(memory, name, rows, sizes.tokens)
            for name, rows in zip(("cosine", "sine"), rope_rows(cos[new], sin[new]), strict=True)
        )
        program(p, shape, where, x, cosine, sine, position)
        work.include(p.work)
        keys = slots(cache.keys, slice(cache.length))
        keys = replace(keys, codes=keys.codes.copy())  # the cache grows
        held = kv_checks("kv", where.region, keys, keys.dims(shape.kv_lora), tile.cols)
        checks = checks_of(memory, shape, trace)
        runs.append(TileRun([p.finish()], [memory.snapshot()], checks, held))
    reference, bound = mla_bound(shape, weights, MlaCache.empty(shape), xs, cos, sin, cached)
    error, limit = largest_error(np.concatenate(outputs), reference, bound)
    result = simulate(request, [memory], runs)
    return kernel_result("mla", request, settings(request), result, [work], error, limit)


KERNEL = Kernel(
    "mla",
    "multi-head latent attention of DeepSeek R1 or Kimi K2.5, sizes scaled down",
    OPTIONS,
    run,
    MODEL_NAMES,
)
