# SPDX-License-Identifier: Apache-2.0
"""`jalapeno sim attention`: decode or prefill of one layer's attention on KV caches.

GPT-OSS is grouped-query attention with sinks; DeepSeek R1 and Kimi K2.5 are multi-head latent
attention as its core sees it: absorbed queries on one KV head of latent and rope elements, whose
values are the latents.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from golden import fp32
from golden.block_table import BLOCK_TOKENS
from golden.bounds import attention_bound, prefill_bound
from golden.formats import SPECS, Format
from golden.kernels.attention import (
    Chunk,
    attention,
    chunks,
    exponent_factor,
    sink_starts,
    window_slots,
)
from golden.kernels.kv import Held, kv_scale
from golden.kernels.prefill import RowBlock, prefill, schedule
from golden.kernels.trace import Machine, Stored, Trace
from golden.kv_layout import line_elements
from golden.models import MODELS, Mla
from sim.errors import InputError
from sim.kernels.caches import kv_checks, page_caches, place_cache, slots, stream_cache
from sim.kernels.results import kernel_result, largest_error
from sim.kernels.system import Check, KvCheck, TileRun, simulate
from sim.kernels.types import MODELS as MODEL_NAMES
from sim.kernels.types import Kernel, KernelRequest, KernelResult, Option, Setting
from sim.programs import attention as program
from sim.programs.builder import TileProgram
from sim.programs.memory import TileMemory, align_up, require
from sim.programs.paged import PagedRegion
from sim.programs.regions import KvRegion, StreamedRegion

# Slots that softmax takes at once: part of the kernel's definition. Longer chunks take fewer
# commands and more memory; the last one's softmax hides behind the product of the one before.
CHUNK = 512
SHORT_CHUNK = 256  # for many rows: prefill, and latent attention
BLOCK = 64  # queries of a head that are handled at once
KV_FORMATS = {"bf16": Format.BF16, "fp8": Format.MXFP8_E4M3}
OPTIONS = {
    "heads": Option(0, "query heads, 0: a tile's share of the model's", least=0),
    "kv_heads": Option(1, "KV heads; query heads share them evenly"),
    "head_dim": Option(0, "elements of a query and a key, 0: the model's", least=0),
    "value_dim": Option(0, "elements of a value, 0: the model's, or head_dim", least=0),
    "context": Option(128, "tokens, the new ones included"),
    "window": Option(0, "tokens that a query sees, 0: all", least=0),
    "queries": Option(1, "new tokens of each sequence"),
    "sequences": Option(1, "sequences; number s has 5 s tokens less than context"),
    "chunk": Option(
        0, f"slots of a softmax step, 0: {CHUNK}, or {SHORT_CHUNK} of many rows", least=0
    ),
    "kv": Option("bf16", "format of keys and values", choices=tuple(KV_FORMATS)),
    "place": Option("auto", "where the cache lies", choices=("auto", "sram", "hbm")),
    "block": Option(
        0, "tokens of a block of a paged cache: 16, 32, 64 or 128; 0: not paged", least=0
    ),
}


def widths(model: str) -> tuple[int, int]:
    """Elements of a key and of a value in the model's attention."""
    attention = MODELS[model].attention
    if isinstance(attention, Mla):
        return attention.kv_lora + attention.rope, attention.kv_lora
    return attention.head_dim, attention.head_dim


def fill(model: str, given: Mapping[str, Setting]) -> dict[str, Setting]:
    """The settings with the model's sizes in place of zeros."""
    s = dict(given)
    attention = MODELS[model].attention
    latent = isinstance(attention, Mla)
    key, value = widths(model)
    if not s["heads"]:
        group = 16 if isinstance(attention, Mla) else attention.heads // attention.kv_heads
        s["heads"] = group * int(s["kv_heads"])
    s["head_dim"] = s["head_dim"] or key
    s["value_dim"] = s["value_dim"] or (value if s["head_dim"] == key else s["head_dim"])
    s["chunk"] = s["chunk"] or (SHORT_CHUNK if latent or int(s["queries"]) > 1 else CHUNK)
    return s


@dataclass(frozen=True)
class Sizes:
    """Settings with the model's sizes filled in. `latent`: values are the first of the key."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    context: int
    window: int | None
    queries: int
    sequences: int
    place: str
    block: int
    chunk: int
    sinks: bool
    scale: float
    latent: bool
    kv: Format

    @classmethod
    def of(cls, request: KernelRequest) -> "Sizes":
        s = request.settings
        model = MODELS[request.model].attention
        latent = isinstance(model, Mla)
        dim = int(s["head_dim"])
        return cls(
            int(s["heads"]),
            int(s["kv_heads"]),
            dim,
            int(s["value_dim"]),
            int(s["context"]),
            int(s["window"]) or None,
            int(s["queries"]),
            int(s["sequences"]),
            str(s["place"]),
            int(s["block"]),
            int(s["chunk"]),
            not latent,
            model.scale if dim == widths(request.model)[0] else dim**-0.5,
            latent,
            KV_FORMATS[str(s["kv"])],
        )

    def unit(self, cols: int) -> int:
        """Slots at whose multiples rings end and chunks start."""
        return max(line_elements(self.kv), cols, self.block)


def check_heads(
    lanes: int, heads: int, kv_heads: int, head_dim: int, fmt: Format = Format.BF16
) -> None:
    """InputError for heads that the tile's program cannot lay out."""
    if heads % kv_heads:
        raise InputError(
            "heads",
            heads,
            f"it must be a multiple of kv_heads {kv_heads}",
            f"take {kv_heads * (heads // kv_heads + 1)}",
        )
    unit = max(line_elements(fmt), lanes)
    if head_dim % unit:
        raise InputError(
            "head_dim",
            head_dim,
            f"it must be a multiple of {unit} on this tile",
            f"take {align_up(head_dim, unit)}",
        )


def check_sizes(request: KernelRequest, sizes: Sizes) -> None:
    """InputError for sizes that no program can have."""
    tile = request.config.tile
    check_heads(tile.lanes, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.kv)
    unit = max(line_elements(sizes.kv), tile.lanes)
    if sizes.value_dim % unit or sizes.value_dim > sizes.head_dim:
        raise InputError(
            "value_dim",
            sizes.value_dim,
            f"it must be a multiple of {unit} and at most {sizes.head_dim}",
            "leave it out",
        )
    if sizes.heads // sizes.kv_heads > tile.acc_rows:
        raise InputError(
            "heads",
            sizes.heads,
            f"a KV head serves at most {tile.acc_rows} query heads",
            f"take {sizes.kv_heads * tile.acc_rows} or more kv_heads",
        )
    shortest = sizes.context - 5 * (sizes.sequences - 1)
    if sizes.queries > shortest:
        raise InputError(
            "context",
            sizes.context,
            f"the shortest sequence has {shortest} tokens and {sizes.queries} of them are new",
            f"take {sizes.queries + 5 * (sizes.sequences - 1)} or more",
        )
    slots = sizes.unit(tile.cols)
    if sizes.chunk % slots:
        raise InputError(
            "chunk",
            sizes.chunk,
            f"it must be a multiple of {slots} slots here",
            f"take {align_up(sizes.chunk, slots)}",
        )
    least = max(BLOCK_TOKENS[0], tile.cols)
    if sizes.block and (sizes.block not in BLOCK_TOKENS or sizes.block < least):
        raise InputError(
            "block",
            sizes.block,
            f"a block has {', '.join(str(b) for b in BLOCK_TOKENS if b >= least)} tokens here",
            f"take {least}",
        )
    if sizes.block and (sizes.window is not None or sizes.place == "hbm"):
        raise InputError(
            "block", sizes.block, "a paged cache has no window and lies in KV SRAM", "leave it out"
        )
    if sizes.place == "hbm" and sizes.window is not None:
        raise InputError("place", "hbm", "a window fits into KV SRAM", "leave it out")


@dataclass
class Sequence:
    """One sequence's tokens: queries [Q, heads, D], caches by KV head, and what was computed."""

    prefix: str
    tokens: int
    ring: int
    fresh: list[int]  # slots of the new tokens
    queries: NDArray[np.float32]
    keys: list[Held]
    values: list[Held]
    parts: list[Chunk]  # of one query
    blocks: list[RowBlock]  # of several
    allowed: NDArray[np.bool_]  # [Q, slots]
    trace: Trace = field(default_factory=Trace)


def hold(tokens: NDArray[np.float32], head: NDArray[np.float32], fmt: Format) -> Held:
    """Tokens [slots, D] in the cache's format, with one scale that fits all of `head`."""
    scale = None if fmt is Format.BF16 else kv_scale(float(np.abs(head).max()), fmt)
    return Held.of(tokens, fmt, scale)


def make_sequence(
    rng: np.random.Generator, sizes: Sizes, number: int, unit: int, tokens: int
) -> Sequence:
    """Random queries and cache of sequence `number` with `tokens` tokens."""
    count = sizes.queries
    seen = tokens if sizes.window is None else min(tokens, sizes.window + count - 1)
    ring = align_up(seen, unit)
    slots = min(tokens, ring)
    shape = slots, sizes.kv_heads

    def normal(*dims: int) -> NDArray[np.float32]:
        return rng.standard_normal(dims).astype(np.float32)

    queries = normal(count, sizes.heads, sizes.head_dim)
    keys = normal(*shape, sizes.head_dim)
    values = keys[..., : sizes.value_dim] if sizes.latent else normal(*shape, sizes.value_dim)
    position = tokens - count
    allowed = np.zeros((count, slots), bool)
    for q in range(count):
        first = 0 if sizes.window is None else max(0, position + q + 1 - sizes.window)
        allowed[q, np.arange(first, position + q + 1) % ring] = True
    parts, blocks = [], []
    if count == 1:
        parts = chunks(slots, window_slots(tokens, ring, sizes.window), sizes.chunk)
    else:
        size = align_up(min(sizes.chunk, ring), unit)
        blocks = schedule(
            position, count, ring=ring, window=sizes.window, size=size, block=BLOCK, unit=unit
        )
    return Sequence(
        "" if sizes.sequences == 1 else f"s{number}.",
        tokens,
        ring,
        [t % ring for t in range(position, tokens)],
        queries,
        [hold(keys[:, g], keys[:, g], sizes.kv) for g in range(sizes.kv_heads)],
        [
            hold(values[:, g], keys[:, g] if sizes.latent else values[:, g], sizes.kv)
            for g in range(sizes.kv_heads)
        ],
        parts,
        blocks,
        allowed,
    )


def compute(
    machine: Machine, sizes: Sizes, sequence: Sequence, sinks: NDArray[np.float32] | None
) -> tuple[float, float]:
    """Runs the bit-exact model into the sequence's trace; the error against float64, and its
    bound.
    """
    s, scale = sequence, sizes.scale
    if sizes.queries == 1:
        args = s.queries[0], s.keys, s.values, sinks, scale
        out = attention(machine, s.trace, *args, s.parts)
        reference, bound = attention_bound(*args, s.allowed[0], Format.BF16)
    else:
        many = s.queries, s.keys, s.values, sinks, scale
        out = prefill(machine, s.trace, *many, s.blocks)
        reference, bound = prefill_bound(*many, s.allowed, Format.BF16)
    return largest_error(out, reference, bound)


def fits(sizes: Sizes, ring: int, kv_bits: int) -> bool:
    """Whether all caches fit into the KV SRAM."""
    each = ring * (sizes.head_dim + sizes.value_dim) * SPECS[sizes.kv].storage_bits
    return each * sizes.kv_heads * sizes.sequences <= kv_bits


def tokens(held: Held, slots: list[int]) -> Stored:
    """Some tokens of a cache as rows in tile SRAM."""
    scales = None if held.scales is None else np.tile(held.scales, (len(slots), 1))
    return Stored(held.codes[slots], held.fmt, scales)


def issue(
    p: TileProgram,
    sizes: Sizes,
    s: Sequence,
    starts: NDArray[np.float32] | None,
    paged: list[PagedRegion],
) -> tuple[list[program.Attend], list[KvCheck]]:
    """Places a sequence and gives its chunks, and what its caches must hold afterwards."""
    memory, bf16, prefix = p.memory, Format.BF16, s.prefix
    count, kv_heads = sizes.queries, sizes.kv_heads
    regions: list[KvRegion | StreamedRegion | PagedRegion] = []
    appends, checks = [], []
    for g in range(kv_heads):
        name = f"{prefix}kv{g}"
        key, value = s.keys[g], s.values[g]
        offset = 0
        into: KvRegion | PagedRegion
        if paged:
            into = paged[g]
            regions.append(into)
        else:
            if sizes.place == "hbm":
                region = stream_cache(p, name, key, value, s.fresh, s.parts)
                into, offset = region.newest, region.first
                regions.append(region)
            else:
                into = place_cache(p, name, s.ring, key, value, s.fresh)
                regions.append(into)
            span = slice(offset, None)
            checks += kv_checks(name, into, slots(key, span), slots(value, span), p.config.cols)
        given = memory.fill(
            memory.buffer(f"{name}.new_keys", count, sizes.head_dim, sizes.kv), tokens(key, s.fresh)
        )
        new_values = given
        if not sizes.latent:
            new_values = memory.fill(
                memory.buffer(f"{name}.new_values", count, sizes.value_dim, sizes.kv),
                tokens(value, s.fresh),
            )
        appends.append(
            program.Appends(
                p,
                into,
                [
                    (slot - offset, given.row(i), new_values.row(i))
                    for i, slot in enumerate(s.fresh)
                ],
            )
        )
    rows = sizes.heads * count
    queries = memory.fill(
        memory.buffer(f"{prefix}queries", rows, sizes.head_dim, bf16, weight=sizes.kv),
        s.trace.buffers["queries"],
    )
    factor = exponent_factor(sizes.scale)
    first = None
    if starts is not None:
        each = starts.reshape(kv_heads, -1)
        if count > 1:
            each = np.repeat(starts[:, None], min(BLOCK, count), axis=1)
        first = memory.fill(
            memory.buffer(f"{prefix}starts", *each.shape), Stored(fp32.bits(each), Format.FP32)
        )
    if count == 1:
        out = memory.buffer(f"{prefix}attended", sizes.heads, sizes.value_dim, bf16)
        attends = program.decode(p, queries, first, regions, factor, s.parts, out, appends, prefix)
    else:
        out = memory.buffer(f"{prefix}attended", count, sizes.heads * sizes.value_dim, bf16)
        attends = program.prefill(
            p, queries, sizes.heads, first, regions, factor, s.blocks, out, appends, prefix
        )
    return attends, checks


def prepare(request: KernelRequest) -> Sizes:
    """The settings as sizes; InputError for what cannot be run."""
    tile = request.config.tile
    sizes = Sizes.of(request)
    check_sizes(request, sizes)
    longest = sizes.context if sizes.window is None else sizes.window + sizes.queries - 1
    stream_bits = 8 * 16 * tile.cols * tile.stream_base
    if sizes.place == "auto":
        inside = fits(sizes, align_up(longest, sizes.unit(tile.cols)), stream_bits)
        sizes = replace(sizes, place="sram" if inside or sizes.block else "hbm")
    cache = sizes.sequences * sizes.kv_heads * longest * (sizes.head_dim + sizes.value_dim)
    cache *= SPECS[sizes.kv].storage_bits
    require(
        tile,
        sram=sizes.sequences * sizes.queries * sizes.heads * sizes.head_dim * 16,
        kv=cache if sizes.place == "sram" else 0,
        hbm=cache if sizes.place == "hbm" else 0,
    )
    if sizes.place == "hbm" and sizes.queries > 1:
        raise InputError(
            "queries", sizes.queries, "a cache in HBM serves one query", "take a shorter context"
        )
    return sizes


def execute(
    request: KernelRequest,
    sizes: Sizes,
    sequences: list[Sequence],
    sinks: NDArray[np.float32] | None,
) -> KernelResult:
    """Runs the sequences' attention on the tile and compares it."""
    tile = request.config.tile
    machine = Machine(tile.rows, tile.lanes)
    memory = TileMemory(tile)
    p = TileProgram(memory)
    starts = None if sinks is None else sink_starts(sinks, sizes.scale)
    attends: list[program.Attend] = []
    checks: list[Check] = []
    held: list[KvCheck] = []
    errors = []
    paged: list[PagedRegion] = []
    if sizes.block:
        caches = [
            (f"{s.prefix}kv{g}", s.keys[g], s.values[g], s.fresh)
            for s in sequences
            for g in range(sizes.kv_heads)
        ]
        paged, held = page_caches(p, np.random.default_rng(request.seed), sizes.block, caches)
    for i, s in enumerate(sequences):
        errors.append(compute(machine, sizes, s, sinks))
        blocks = paged[i * sizes.kv_heads : (i + 1) * sizes.kv_heads]
        made, kept = issue(p, sizes, s, starts, blocks)
        attends, held = attends + made, held + kept
    program.interleave(attends)
    for s in sequences:
        checks += [
            Check(memory.buffers[s.prefix + name], kept)
            for name, kept in s.trace.buffers.items()
            if s.prefix + name in memory.buffers
        ]
    error, limit = max(errors, key=lambda pair: pair[0] / max(pair[1], 1e-300))
    result = simulate(request, [memory], [TileRun([p.finish()], [memory], checks, held)])
    shape = dict(request.settings) | {"place": sizes.place}
    return kernel_result("attention", request, shape, result, [p.work], error, limit)


def run(request: KernelRequest) -> KernelResult:
    """The caches hold all tokens but the newest, which the program appends."""
    sizes = prepare(request)
    rng = np.random.default_rng(request.seed)
    sinks = rng.standard_normal(sizes.heads).astype(np.float32) if sizes.sinks else None
    unit = sizes.unit(request.config.tile.cols)
    sequences = [
        make_sequence(rng, sizes, i, unit, sizes.context - 5 * i) for i in range(sizes.sequences)
    ]
    return execute(request, sizes, sequences, sinks)


KERNEL = Kernel(
    "attention", "attention on a KV cache, decode or prefill", OPTIONS, run, MODEL_NAMES, fill
)
