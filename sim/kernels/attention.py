# SPDX-License-Identifier: Apache-2.0
"""`jalapeno sim attention`: one decode step of grouped-query attention on the KV SRAM."""

import numpy as np
from numpy.typing import NDArray

from golden import fp32
from golden.bounds import attention_bound
from golden.formats import Format, to_bf16_codes
from golden.kernels.attention import (
    attention,
    chunks,
    exponent_factor,
    sink_starts,
    window_slots,
)
from golden.kernels.trace import Machine, Stored, Trace
from golden.kv_layout import LINE_ELEMENTS, pack_keys, pack_values
from sim.errors import InputError
from sim.kernels.results import kernel_result, largest_error
from sim.kernels.system import Check, KvCheck, TileRun, simulate
from sim.kernels.types import Kernel, KernelRequest, KernelResult, Option
from sim.programs.attention import KvRegion
from sim.programs.attention import attention as program
from sim.programs.builder import TileProgram
from sim.programs.memory import TileMemory, align_up, require

CHUNK = 512  # slots that softmax takes at once: part of the kernel's definition
OPTIONS = {
    "heads": Option(8, "query heads"),
    "kv_heads": Option(1, "KV heads; query heads share them evenly"),
    "head_dim": Option(64, "elements of a head"),
    "context": Option(128, "tokens, the new one included"),
    "window": Option(0, "tokens that the query sees, 0: all", least=0),
    "queries": Option(1, "new tokens", most=1),
    "kv": Option("bf16", "format of keys and values", choices=("bf16",)),
}


def check_heads(lanes: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """InputError for heads that the tile's program cannot lay out."""
    if heads % kv_heads:
        raise InputError(
            "heads",
            heads,
            f"it must be a multiple of kv_heads {kv_heads}",
            f"take {kv_heads * (heads // kv_heads + 1)}",
        )
    unit = max(8, lanes)
    if head_dim % unit:
        raise InputError(
            "head_dim",
            head_dim,
            f"it must be a multiple of {unit} on this tile",
            f"take {align_up(head_dim, unit)}",
        )


def kv_images(
    memory: TileMemory, region: KvRegion, keys: NDArray[np.uint16], values: NDArray[np.uint16]
) -> None:
    """Puts keys and values [slots, D] into a head's cache, as if they had been appended."""
    cols = memory.config.cols
    if not len(keys):
        return
    for row, codes in (
        (region.keys, pack_keys(keys, cols)),
        (region.values, pack_values(values, cols)),
    ):
        raw = np.ascontiguousarray(codes.reshape(-1, LINE_ELEMENTS), "<u2").view(np.uint8)
        memory.kv_images.append((row * cols, raw, np.full(len(raw), 127, np.uint8)))


def kv_checks(
    name: str, region: KvRegion, keys: NDArray[np.uint16], values: NDArray[np.uint16], cols: int
) -> list[KvCheck]:
    """What a head's cache must hold once keys and values [slots, D] are in it."""
    written = np.ones(keys.shape, np.uint16)
    return [
        KvCheck(f"{name}.keys", region.keys, pack_keys(keys, cols), pack_keys(written, cols) > 0),
        KvCheck(
            f"{name}.values",
            region.values,
            pack_values(values, cols),
            pack_values(written, cols) > 0,
        ),
    ]


def run(request: KernelRequest) -> KernelResult:
    """The cache holds all tokens but the newest, whose key and value the program appends."""
    s, config = request.settings, request.config
    tile = config.tile
    heads, kv_heads, dim = int(s["heads"]), int(s["kv_heads"]), int(s["head_dim"])
    context, window = int(s["context"]), int(s["window"]) or None
    check_heads(tile.lanes, heads, kv_heads, dim)
    ring = align_up(context if window is None else window, max(8, tile.cols))
    require(tile, sram=heads * dim * 32, kv=2 * ring * kv_heads * dim * 16)
    machine = Machine(tile.rows, tile.lanes)
    rng = np.random.default_rng(request.seed)
    queries = rng.standard_normal((heads, dim)).astype(np.float32)
    sinks = rng.standard_normal(heads).astype(np.float32)
    valid = window_slots(context, ring, window)
    slots = len(valid)
    keys = to_bf16_codes(rng.standard_normal((slots, kv_heads, dim)).astype(np.float32))
    values = to_bf16_codes(rng.standard_normal((slots, kv_heads, dim)).astype(np.float32))
    slot = (context - 1) % ring
    parts = chunks(slots, valid, CHUNK)
    scale = dim**-0.5

    trace = Trace()
    out = attention(machine, trace, queries, keys, values, sinks, scale, parts)
    reference, bound = attention_bound(queries, keys, values, sinks, scale, valid, Format.BF16)
    error, limit = largest_error(out, reference, bound)

    memory = TileMemory(tile)
    p = TileProgram(memory)
    regions = [KvRegion.allocate(p, f"kv{g}", ring, dim) for g in range(kv_heads)]
    for g, region in enumerate(regions):
        before = np.arange(slots) != slot
        old_keys = np.where(before[:, None], keys[:, g], 0).astype(np.uint16)
        old_values = np.where(before[:, None], values[:, g], 0).astype(np.uint16)
        kv_images(memory, region, old_keys, old_values)
    bf16 = Format.BF16
    rotated = memory.fill(
        memory.buffer("queries", heads, dim, bf16, weight=bf16), trace.buffers["queries"]
    )
    key = memory.fill(
        memory.buffer("key", kv_heads, dim, Format.BF16), Stored(keys[slot], Format.BF16)
    )
    value = memory.fill(
        memory.buffer("value", kv_heads, dim, Format.BF16), Stored(values[slot], Format.BF16)
    )
    sink = memory.fill(
        memory.buffer("sinks", kv_heads, heads // kv_heads),
        Stored(fp32.bits(sink_starts(sinks, scale)).reshape(kv_heads, -1), Format.FP32),
    )
    attended = memory.buffer("attended", heads, dim, Format.BF16)
    program(p, rotated, key, value, sink, regions, slot, exponent_factor(scale), parts, attended)
    checks = [
        Check(memory.buffers[name], kept)
        for name, kept in trace.buffers.items()
        if name in memory.buffers
    ]
    held = [
        check
        for g, region in enumerate(regions)
        for check in kv_checks(f"kv{g}", region, keys[:, g], values[:, g], tile.cols)
    ]
    result = simulate(request, [memory], [TileRun([p.finish()], [memory], checks, held)])
    return kernel_result("attention", request, s, result, [p.work], error, limit)


KERNEL = Kernel("attention", "one decode step of attention with sinks", OPTIONS, run)
