# SPDX-License-Identifier: Apache-2.0
"""KV caches of simulated kernels: contents, where they lie, and what must be in them afterwards."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from golden.block_table import BlockShape
from golden.block_table import Sequence as Pages
from golden.kernels.attention import Chunk
from golden.kernels.kv import Held
from golden.kv_layout import LINE_ELEMENTS, pack_keys, pack_values
from sim.errors import InputError
from sim.kernels.system import KvCheck
from sim.programs.builder import TileProgram
from sim.programs.memory import TileMemory, align_up
from sim.programs.paged import PagedRegion, allocate_pool
from sim.programs.regions import KvRegion, StreamedRegion

CHECKED_SLOTS = 1024  # of a cache are read back; reading takes longer than most runs


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
    """What a head's cache must hold once keys and values [slots, D] are in it.

    Of a large cache only the newest slots are looked at.
    """
    unit = max(cols, LINE_ELEMENTS)
    first = max(0, (len(keys) - CHECKED_SLOTS) // unit * unit)
    found = []
    for kind, row, pack, codes in (
        ("keys", region.keys, pack_keys, keys),
        ("values", region.values, pack_values, values),
    ):
        before = len(pack(codes[:first], cols)) if first else 0
        part = codes[first:]
        known = pack(np.ones(part.shape, np.uint16), cols) > 0
        found.append(KvCheck(f"{name}.{kind}", row + before, pack(part, cols), known))
    return found


def without(codes: NDArray, slots: Sequence[int]) -> NDArray:
    """The codes with zeros in slots that are yet to be appended."""
    left = codes.copy()
    left[list(slots)] = 0
    return left


def place_cache(
    p: TileProgram, name: str, ring: int, keys: Held, values: Held, fresh: Sequence[int]
) -> KvRegion:
    """A head's cache in KV SRAM that holds all slots but the `fresh` ones."""
    region = KvRegion.allocate(p, name, ring, keys.codes.shape[1], values.codes.shape[1])
    kv_images(p.memory, region, without(keys.codes, fresh), without(values.codes, fresh))
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
        tokens, keys.codes.shape[1], cols, LINE_ELEMENTS, value_dim=values.codes.shape[1]
    )
    counts = [-(-len(held.codes) // tokens) for _, held, _, _ in caches]
    pool = allocate_pool(memory, "blocks", shape, sum(counts))
    sequences = [Pages(pool) for _ in caches]
    order = rng.permutation(np.repeat(np.arange(len(caches)), counts))
    for number in order:
        sequence, slots = sequences[number], len(caches[number][1].codes)
        sequence.append(min(tokens, slots - sequence.length))
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
        first = without(held.codes, fresh), without(other.codes, fresh)
        for b in range(count):
            block, span = region.block(b), slice(b * tokens, (b + 1) * tokens)
            kv_images(memory, block, first[0][span], first[1][span])
            checks += kv_checks(
                f"{name}.block{b}", block, held.codes[span], other.codes[span], cols
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
    tail = align_up(len(keys.codes) - first, max(cols, LINE_ELEMENTS))
    newest = place_cache(
        p,
        name,
        tail,
        Held(keys.codes[first:], keys.fmt, keys.scales),
        Held(values.codes[first:], values.fmt, values.scales),
        left,
    )
    return StreamedRegion(streamed[0], streamed[1], first, newest)
