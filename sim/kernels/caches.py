# SPDX-License-Identifier: Apache-2.0
"""KV caches of simulated kernels: contents, where they lie, and what must be in them afterwards."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from golden.block_table import BlockShape
from golden.block_table import Sequence as Pages
from golden.formats import BLOCK, SCALE_ONE
from golden.kernels.attention import Chunk
from golden.kernels.kv import Held
from golden.kv_layout import line_elements, pack_keys, pack_values
from golden.quantise import expand_scales
from hw.config import LINE_BYTES
from sim.errors import InputError
from sim.kernels.system import KvCheck
from sim.programs.builder import TileProgram
from sim.programs.memory import TileMemory, align_up
from sim.programs.paged import PagedRegion, allocate_pool
from sim.programs.regions import KvRegion, StreamedRegion

CHECKED_SLOTS = 1024  # of a cache are read back; reading takes longer than most runs


def line_scales(
    region: KvRegion, keys: Held, values: Held, cols: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Scale bytes of the first rows of both regions: [head_dim / E, cols] of keys, [tiles, cols] of
    values; what lies below repeats them.
    """
    lines = region.head_dim // line_elements(keys.fmt)
    tiles = -(-region.value_dim // cols)
    if keys.scales is None or values.scales is None:
        return np.full((lines, cols), SCALE_ONE, np.uint8), np.full(
            (tiles, cols), SCALE_ONE, np.uint8
        )
    each = keys.scales[np.arange(lines) * line_elements(keys.fmt) // BLOCK]
    wide = np.full(tiles * cols, SCALE_ONE, np.uint8)
    wide[: region.value_dim] = expand_scales(values.scales, (region.value_dim,))
    return np.repeat(each[:, None], cols, axis=1), wide.reshape(tiles, cols)


def packed(
    region: KvRegion, keys: Held, values: Held, cols: int
) -> list[tuple[str, int, NDArray, NDArray[np.uint8]]]:
    """(kind, first row, codes [rows, cols, E], scales [rows, cols]) of keys and values."""
    found = []
    scales = line_scales(region, keys, values, cols)
    for kind, row, pack, held, unit in (
        ("keys", region.keys, pack_keys, keys, scales[0]),
        ("values", region.values, pack_values, values, scales[1]),
    ):
        codes = pack(held.codes, cols, held.fmt)
        found.append((kind, row, codes, np.tile(unit, (len(codes) // len(unit), 1))))
    return found


def kv_images(memory: TileMemory, region: KvRegion, keys: Held, values: Held) -> None:
    """Puts keys and values [slots, D] into a head's cache, as if they had been appended."""
    cols = memory.config.cols
    if not len(keys.codes):
        return
    for _, row, codes, scales in packed(region, keys, values, cols):
        raw = np.ascontiguousarray(codes).view(np.uint8).reshape(-1, LINE_BYTES)
        memory.kv_images.append((row * cols, raw, scales.reshape(-1)))


def kv_checks(name: str, region: KvRegion, keys: Held, values: Held, cols: int) -> list[KvCheck]:
    """What a head's cache must hold once keys and values [slots, D] are in it.

    Of a large cache only the newest slots are looked at.
    """
    unit = max(cols, line_elements(keys.fmt))
    first = max(0, (len(keys.codes) - CHECKED_SLOTS) // unit * unit)
    marks = [Held(np.ones_like(held.codes), held.fmt, held.scales) for held in (keys, values)]
    found = []
    for (kind, row, codes, scales), (_, _, known, _) in zip(
        packed(region, keys, values, cols), packed(region, marks[0], marks[1], cols), strict=True
    ):
        elements = line_elements(keys.fmt)
        if kind == "keys":
            before = first // cols * (region.head_dim // elements)
        else:
            before = first // elements * -(-region.value_dim // cols)
        found.append(
            KvCheck(
                f"{name}.{kind}", row + before, codes[before:], known[before:] > 0, scales[before:]
            )
        )
    return found


def without(held: Held, slots: Sequence[int]) -> Held:
    """The cache with zeros in slots that are yet to be appended."""
    left = held.codes.copy()
    left[list(slots)] = 0
    return Held(left, held.fmt, held.scales)


def slots(held: Held, span: slice) -> Held:
    """Some slots of a cache."""
    return Held(held.codes[span], held.fmt, held.scales)


def place_cache(
    p: TileProgram, name: str, ring: int, keys: Held, values: Held, fresh: Sequence[int]
) -> KvRegion:
    """A head's cache in KV SRAM that holds all slots but the `fresh` ones."""
    region = KvRegion.allocate(p, name, ring, keys.codes.shape[1], values.codes.shape[1], keys.fmt)
    kv_images(p.memory, region, without(keys, fresh), without(values, fresh))
    return replace(region, written=True)


def page_caches(
    p: TileProgram,
    rng: np.random.Generator,
    tokens: int,
    caches: Sequence[tuple[str, Held, Held, Sequence[int]]],
) -> tuple[list[PagedRegion], list[KvCheck]]:
    """Caches (name, keys, values, fresh slots) in blocks of `tokens` from one pool, taken in random
    order, with their block tables; and what the blocks must hold.
    """
    memory, cols = p.memory, p.config.cols
    keys, values = caches[0][1], caches[0][2]
    shape = BlockShape(
        tokens,
        keys.codes.shape[1],
        cols,
        line_elements(keys.fmt),
        value_dim=values.codes.shape[1],
    )
    counts = [-(-len(held.codes) // tokens) for _, held, _, _ in caches]
    pool = allocate_pool(memory, "blocks", shape, sum(counts))
    sequences = [Pages(pool) for _ in caches]
    order = rng.permutation(np.repeat(np.arange(len(caches)), counts))
    for number in order:
        sequence, count = sequences[number], len(caches[number][1].codes)
        sequence.append(min(tokens, count - sequence.length))
    regions, checks = [], []
    table = 0
    for (name, held, other, fresh), sequence, count in zip(caches, sequences, counts, strict=True):
        region = PagedRegion(sequence, table, count, written=True)
        if table + count > p.config.block_entries:
            raise InputError(
                "blocks",
                f"{table + count} of {tokens} tokens",
                f"the block table has {p.config.block_entries} entries",
                "take larger blocks or fewer tokens",
            )
        table += count
        region.load_table(p, region.words(memory, f"{name}.table"))
        first = without(held, fresh), without(other, fresh)
        for b in range(count):
            block, span = region.block(b), slice(b * tokens, (b + 1) * tokens)
            kv_images(memory, block, slots(first[0], span), slots(first[1], span))
            checks += kv_checks(
                f"{name}.block{b}", block, slots(held, span), slots(other, span), cols
            )
        regions.append(region)
    return regions, checks


def stream_cache(
    p: TileProgram,
    name: str,
    keys: Held,
    values: Held,
    fresh: Sequence[int],
    parts: Sequence[Chunk],
) -> StreamedRegion:
    """A head's cache whose older chunks lie in the HBM slice; that of the `fresh` slots, and what
    comes after it, in KV SRAM.
    """
    memory, cols = p.memory, p.config.cols
    first = max(part.start for part in parts if part.start <= min(fresh))
    streamed: tuple[dict, dict] = {}, {}
    for part in parts:
        if part.start >= first:
            continue
        tag = f"{name}.{part.start}"
        codes, scales = keys.keys(part.start, part.stop)
        streamed[0][part.start] = memory.weights(f"{tag}.keys", codes, scales, keys.fmt, True)
        codes, scales = values.columns(part.start, part.stop)
        streamed[1][part.start] = memory.weights(f"{tag}.values", codes, scales, values.fmt, True)
    left = [slot - first for slot in fresh]
    tail = align_up(len(keys.codes) - first, max(cols, line_elements(keys.fmt)))
    newest = place_cache(
        p,
        name,
        tail,
        slots(keys, slice(first, None)),
        slots(values, slice(first, None)),
        left,
    )
    return StreamedRegion(streamed[0], streamed[1], first, newest)
