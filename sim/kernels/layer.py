# SPDX-License-Identifier: Apache-2.0
"""`jalapeno sim layer`: a GPT-OSS decoder layer, token by token from an empty KV cache."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from golden import fp32
from golden.bounds import layer_bound
from golden.formats import Format
from golden.kernels.attention import chunks, sink_starts, window_slots
from golden.kernels.kv import Held
from golden.kernels.layer import LayerCache, LayerShape, LayerWeights, layer, rope_rows
from golden.kernels.moe import Expert, Matrix
from golden.kernels.trace import Machine, Stored, Trace
from golden.models import GPT_OSS_120B
from golden.reference.rope import rope_tables, yarn_inv_freq
from hw.config import TileConfig
from sim.errors import InputError
from sim.kernels.attention import CHUNK, check_heads
from sim.kernels.caches import kv_checks
from sim.kernels.moe import SIZES as MOE_OPTIONS
from sim.kernels.moe import check_gate, require_moe
from sim.kernels.results import kernel_result, largest_error
from sim.kernels.system import Check, TileRun, check_host_lines, simulate
from sim.kernels.types import Kernel, KernelRequest, KernelResult, Option
from sim.kernels.vectors import gptoss_layer0
from sim.programs.builder import TileProgram
from sim.programs.layer import LayerPlace
from sim.programs.layer import layer as program
from sim.programs.memory import Buffer, TileMemory, align_up, require
from sim.programs.moe import place_experts, place_matrix
from sim.programs.regions import KvRegion
from sim.programs.resident import place_resident
from sim.programs.work import Work

# The sizes of `gptoss_layer0`; with these the layer runs on that file's tokens and weights.
DEFAULTS = {
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "window": 8,
    "tokens": 16,
    "hidden": 64,
    "intermediate": 64,
    "experts": 8,
    "top_k": 2,
    "context": 16,
}
OPTIONS = {
    "heads": Option(DEFAULTS["heads"], "query heads"),
    "kv_heads": Option(DEFAULTS["kv_heads"], "KV heads; query heads share them evenly"),
    "head_dim": Option(DEFAULTS["head_dim"], "elements of a query, a key and a value"),
    "context": Option(DEFAULTS["context"], "tokens that the cache holds without a window"),
    "window": Option(DEFAULTS["window"], "tokens that a query sees, 0: all", least=0),
    "tokens": Option(DEFAULTS["tokens"], "tokens decoded"),
    "hidden": Option(DEFAULTS["hidden"], "width of the residual stream"),
    "intermediate": Option(DEFAULTS["intermediate"], "width of an expert"),
    "experts": Option(DEFAULTS["experts"], "experts", most=512),
    "top_k": Option(DEFAULTS["top_k"], "experts of a token"),
    "weight": MOE_OPTIONS["weight"],
}


def random_layer(
    rng: np.random.Generator,
    shape: LayerShape,
    tokens: int,
    size: int,
    count: int,
    weight_fmt: Format,
    lanes: int,
) -> tuple[LayerWeights, NDArray, NDArray, NDArray]:
    """Weights, residual stream [tokens, hidden] and RoPE tables [tokens, head_dim / 2]."""

    def weights(*dims: int) -> NDArray[np.float32]:
        return (rng.standard_normal(dims) / np.sqrt(dims[-1])).astype(np.float32)

    def near_one(n: int) -> NDArray[np.float32]:
        return (1 + 0.1 * rng.standard_normal(n)).astype(np.float32)

    hidden, dim = shape.hidden, shape.head_dim
    width = (shape.heads + 2 * shape.kv_heads) * dim
    made = LayerWeights(
        near_one(hidden),
        Matrix.of(weights(width, hidden), Format.BF16, 0.1 * weights(width)),
        rng.standard_normal(shape.heads).astype(np.float32),
        Matrix.of(weights(hidden, shape.heads * dim), Format.BF16, 0.1 * weights(hidden)),
        near_one(hidden),
        Matrix.of(weights(count, hidden), Format.BF16, weights(count)),
        [
            Expert.of(
                weights(2 * size, hidden),
                weights(2 * size),
                weights(hidden, size),
                weights(hidden),
                weight_fmt,
                lanes,
            )
            for _ in range(count)
        ],
    )
    rope = GPT_OSS_120B.rope
    frequencies = yarn_inv_freq(
        dim,
        rope.theta,
        rope.factor,
        rope.original_positions,
        rope.beta_fast,
        rope.beta_slow,
        rope.truncate,
    )
    cos, sin = rope_tables(np.arange(tokens), frequencies, rope.table_scale)
    xs = rng.standard_normal((tokens, hidden)).astype(np.float32)
    return made, xs, cos.astype(np.float32), sin.astype(np.float32)


def vector(memory: TileMemory, name: str, values: NDArray, rows: int = 1) -> Buffer:
    """An FP32 buffer with contents."""
    codes = fp32.bits(np.asarray(values, np.float32)).reshape(rows, -1)
    return memory.fill(memory.buffer(name, *codes.shape), Stored(codes, Format.FP32))


def place_layer(
    p: TileProgram, shape: LayerShape, weights: LayerWeights, stream: bool = True
) -> LayerPlace:
    """Puts a layer's matrices into HBM (`stream`) or KV SRAM, vectors into tile SRAM."""
    memory = p.memory
    qkv, qkv_bias = place_matrix(memory, "qkv", weights.qkv, stream)
    output, output_bias = place_matrix(memory, "output", weights.output, stream)
    router, router_bias = place_matrix(memory, "router", weights.router, stream)
    return LayerPlace(
        vector(memory, "attention_norm", weights.attention_norm),
        qkv,
        qkv_bias,
        vector(memory, "sinks", sink_starts(weights.sinks, shape.head_dim**-0.5), shape.kv_heads),
        output,
        output_bias,
        vector(memory, "moe_norm", weights.moe_norm),
        router,
        router_bias,
        (place_experts if stream else place_resident)(memory, weights.experts),
        [KvRegion.allocate(p, f"kv{g}", shape.ring, shape.head_dim) for g in range(shape.kv_heads)],
    )


def inputs(
    request: KernelRequest, tile: TileConfig
) -> tuple[LayerShape, LayerWeights, NDArray, NDArray, NDArray]:
    """Shape, weights, tokens [T, hidden] and RoPE tables of the settings."""
    s = request.settings
    sizes = {name: int(s[name]) for name in DEFAULTS}
    weight_fmt = next(f for f in Format if f.name.lower().replace("_", "-") == s["weight"])
    window = sizes["window"] or None
    unit = max(8, tile.cols)
    ring = align_up(sizes["context"] if window is None else window, unit)
    if window is None and sizes["tokens"] > sizes["context"]:
        raise InputError(
            "tokens",
            sizes["tokens"],
            f"the cache holds context = {sizes['context']}",
            "take a larger context",
        )
    check_heads(tile.lanes, sizes["heads"], sizes["kv_heads"], sizes["head_dim"])
    dim = sizes["head_dim"]
    if dim & (dim - 1):  # RoPE exchanges halves by flipping one bit of an element's index
        raise InputError(
            "head_dim", dim, "it must be a power of two in a layer", f"take {1 << dim.bit_length()}"
        )
    check_gate(tile.max_experts, tile.max_topk, sizes["experts"], sizes["top_k"])
    require_moe(tile, 1, sizes["hidden"], sizes["intermediate"], sizes["experts"], weight_fmt)
    queries, keys = sizes["heads"] * dim, sizes["kv_heads"] * dim
    require(
        tile,
        sram=(queries + 2 * keys) * 32,
        kv=2 * ring * keys * 16,
        hbm=sizes["hidden"] * 2 * (queries + keys) * 16,
    )
    check_host_lines(sizes["tokens"] * -(-(sizes["hidden"] + 2 * dim) * 32 // 128))
    if sizes == DEFAULTS:
        shape, weights, xs, cos, sin = gptoss_layer0(tile.lanes, weight_fmt)
        return replace(shape, ring=ring, chunk=CHUNK), weights, xs, cos, sin
    shape = LayerShape(
        sizes["hidden"],
        sizes["heads"],
        sizes["kv_heads"],
        sizes["head_dim"],
        window,
        ring,
        sizes["top_k"],
        GPT_OSS_120B.norm_eps,
        CHUNK,
    )
    made = random_layer(
        np.random.default_rng(request.seed),
        shape,
        sizes["tokens"],
        sizes["intermediate"],
        sizes["experts"],
        weight_fmt,
        tile.lanes,
    )
    return shape, *made


def run(request: KernelRequest) -> KernelResult:
    """Every token is one run of a program of its own; the KV cache stays in the KV SRAM."""
    tile = request.config.tile
    shape, weights, xs, cos, sin = inputs(request, tile)
    machine = Machine(tile.rows, tile.lanes)
    memory = TileMemory(tile)
    first = TileProgram(memory)
    place = place_layer(first, shape, weights)
    mark = memory.mark()
    cache = LayerCache.empty(shape)
    runs, works, outputs, ids = [], Work(), [], []
    for t, x in enumerate(xs):
        memory.rewind(mark)
        if t:
            memory.forget()
        p = TileProgram(memory)
        cosine, sine = rope_rows(cos[t], sin[t])
        given = vector(memory, "x", x)
        cosines, sines = vector(memory, "cosine", cosine), vector(memory, "sine", sine)
        token = cache.length
        trace = Trace()
        outputs.append(layer(machine, trace, shape, weights, cache, x, cos[t], sin[t]))
        ids.append(trace.buffers["gate.ids"].codes[0].astype(np.int64))
        valid = window_slots(cache.length, shape.ring, shape.window)
        parts = chunks(len(valid), valid, shape.chunk)
        program(p, shape, place, given, cosines, sines, token, parts)
        works.include(p.work)
        checks = [Check(memory.buffers[name], kept) for name, kept in trace.buffers.items()]
        slots = min(cache.length, shape.ring)
        held = [
            check
            for g, region in enumerate(place.regions)
            for check in kv_checks(
                f"kv{g}",
                region,
                Held(cache.keys[:slots, g]),
                Held(cache.values[:slots, g]),
                tile.cols,
            )
        ]
        runs.append(TileRun([p.finish()], [memory.snapshot()], checks, held))
    reference, bound = layer_bound(shape, weights, xs, cos, sin, np.stack(ids))
    error, limit = largest_error(np.stack(outputs), reference, bound)
    result = simulate(request, [memory], runs)
    return kernel_result("layer", request, request.settings, result, [works], error, limit)


KERNEL = Kernel("layer", "a GPT-OSS decoder layer, decoded token by token", OPTIONS, run)
