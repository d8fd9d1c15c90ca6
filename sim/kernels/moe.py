# SPDX-License-Identifier: Apache-2.0
"""`jalapeno sim moe`: gate, experts from HBM, clamped SwiGLU, weighted sum."""

import numpy as np

from golden import fp32
from golden.bounds import moe_bound
from golden.formats import SPECS, Format, parse_format
from golden.kernels.moe import Expert, Matrix, moe
from golden.kernels.trace import Machine, Stored, Trace
from hw.config import TileConfig
from sim.errors import InputError
from sim.kernels.results import kernel_result, largest_error
from sim.kernels.system import Check, TileRun, simulate
from sim.kernels.types import Kernel, KernelRequest, KernelResult, Option
from sim.programs.builder import TileProgram
from sim.programs.memory import TileMemory, require
from sim.programs.moe import moe as program
from sim.programs.moe import place_experts, place_matrix

MX = tuple(SPECS[f].name for f in Format if f is not Format.FP32)
OPTIONS = {
    "tokens": Option(2, "tokens"),
    "hidden": Option(128, "width of the residual stream"),
    "intermediate": Option(128, "width of an expert"),
    "experts": Option(8, "experts", most=512),
    "top_k": Option(2, "experts of a token"),
    "act": Option("bf16", "format of the experts' activations", choices=("bf16", "mxfp8-e4m3")),
    "weight": Option("mxfp4", "format of the experts' weights", choices=MX),
}


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
            "take fewer or more experts",
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


def run(request: KernelRequest) -> KernelResult:
    """Random activations and experts; the gate's choices decide what is fetched."""
    s, config = request.settings, request.config
    tile = config.tile
    tokens, hidden, size = int(s["tokens"]), int(s["hidden"]), int(s["intermediate"])
    count, top_k = int(s["experts"]), int(s["top_k"])
    act, weight_fmt = parse_format(str(s["act"])), parse_format(str(s["weight"]))
    check_gate(tile.max_experts, tile.max_topk, count, top_k)
    require_moe(tile, tokens, hidden, size, count, weight_fmt)
    machine = Machine(tile.rows, tile.lanes)
    rng = np.random.default_rng(request.seed)

    def weights(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    router = Matrix.of(
        weights(count, hidden), Format.BF16, rng.standard_normal(count).astype(np.float32)
    )
    experts = [
        Expert.of(
            weights(2 * size, hidden),
            weights(2 * size),
            weights(hidden, size),
            weights(hidden),
            weight_fmt,
            tile.lanes,
        )
        for _ in range(count)
    ]
    trace = Trace()
    out = moe(machine, trace, x, router, experts, top_k, act)
    ids = trace.buffers["gate.ids"].codes.astype(np.int64)
    reference, bound = moe_bound(x, router, experts, top_k, ids, act)
    error, limit = largest_error(out, reference, bound)

    memory = TileMemory(tile)
    p = TileProgram(memory)
    given = memory.fill(memory.buffer("x", tokens, hidden), Stored(fp32.bits(x), Format.FP32))
    gate_weights, gate_bias = place_matrix(memory, "router", router, stream=True)
    image = place_experts(memory, experts)
    result_buffer = memory.buffer("moe", tokens, hidden)
    program(p, given, gate_weights, gate_bias, image, top_k, act, result_buffer)
    checks = [Check(memory.buffers[name], kept) for name, kept in trace.buffers.items()]
    result = simulate(request, [memory], [TileRun([p.finish()], [memory], checks)])
    return kernel_result("moe", request, s, result, [p.work], error, limit)


KERNEL = Kernel("moe", "mixture of experts with a gate in hardware", OPTIONS, run)
