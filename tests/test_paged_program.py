# SPDX-License-Identifier: Apache-2.0
"""Paged KV caches: blocks given out and taken back, and programs of several sequences on a tile."""

import numpy as np
import pytest

from golden import kv_layout
from golden.block_table import BlockPool, BlockShape, Sequence
from golden.formats import Format
from golden.matmul import matmul
from hw.config import preset
from sim.errors import InputError
from sim.kernels.gemm import operand, stored
from sim.kernels.system import Check, TileRun, simulate
from sim.kernels.types import KernelRequest
from sim.programs.access import KV, access
from sim.programs.builder import TileProgram
from sim.programs.memory import TileMemory
from sim.programs.paged import PagedRegion, allocate_pool

SHAPE = BlockShape(16, 24, 4)


def test_a_block_is_a_small_cache():
    """Keys and values of a block lie as `kv_layout` packs as many slots."""
    rng = np.random.default_rng(1)
    for tokens, dim, cols in ((16, 24, 4), (32, 8, 16), (64, 40, 32), (128, 64, 128)):
        shape = BlockShape(tokens, dim, cols)
        codes = rng.integers(1 << 16, size=(tokens, dim), dtype=np.uint16)
        keys, values = kv_layout.pack_keys(codes, cols), kv_layout.pack_values(codes, cols)
        assert (shape.key_rows, shape.value_rows) == (len(keys), len(values))
        pool = BlockPool(shape, 100, 3)
        pool.allocate()
        sequence = Sequence(pool)
        sequence.append(tokens)
        assert sequence.table == [100 + shape.rows]
        at, d = np.arange(tokens)[:, None], np.arange(dim)[None]
        key, value = sequence.key_place(at, d), sequence.value_place(at, d)
        first = sequence.table[0]
        assert np.array_equal(keys[key.row - first, key.bank, key.element], codes)
        first += shape.key_rows
        assert np.array_equal(values[value.row - first, value.bank, value.element], codes)


def test_places_of_several_sequences_never_meet():
    seed = 2
    rng = np.random.default_rng(seed)
    print("seed", seed)
    for elements in (8, 16):
        shape = BlockShape(32, 48, 8, elements)
        pool = BlockPool(shape, 7, 12)
        sequences = [Sequence(pool) for _ in range(4)]
        released = 0
        for _ in range(300):
            sequence = sequences[rng.integers(4)]
            if rng.random() < 0.1:
                sequence.release()
                released += 1
            elif pool.free_blocks:
                sequence.append(int(rng.integers(1, 30)))
            blocks = [row for s in sequences for row in s.table]
            assert len(set(blocks)) == len(blocks) == pool.blocks - pool.free_blocks
            assert all(len(s.table) == -(-s.length // 32) for s in sequences)
        assert released and any(s.length for s in sequences)
        seen = set()
        for sequence in (s for s in sequences if s.length):
            at, d = np.arange(sequence.length)[:, None], np.arange(48)[None]
            for place in (sequence.key_place(at, d), sequence.value_place(at, d)):
                found = set(zip(*(a.ravel().tolist() for a in place), strict=True))
                assert len(found) == sequence.length * 48 and not found & seen
                seen |= found
        rows = [row for row, *_ in seen]
        assert min(rows) >= 7 and max(rows) < 7 + 12 * shape.rows


def test_blocks_are_refused():
    pool = BlockPool(SHAPE, 0, 2)
    sequence = Sequence(pool)
    with pytest.raises(ValueError, match="tokens must fit 2 free blocks, not 33 tokens"):
        sequence.append(33)
    assert sequence.length == 0 and pool.free_blocks == 2
    sequence.append(20)
    for token in (-1, 20):
        with pytest.raises(ValueError, match="token must be from 0 to 19"):
            sequence.slot(token)
        with pytest.raises(ValueError, match="token must be from 0 to 19"):
            sequence.key_place(token, 0)
    for row in (1, -SHAPE.rows, 2 * SHAPE.rows):
        with pytest.raises(ValueError, match="row must be the first of a block"):
            pool.free(row)
    with pytest.raises(ValueError, match="all 2 blocks are taken"):
        pool.allocate()
    row = sequence.table[0]
    sequence.release()
    with pytest.raises(ValueError, match=f"block at row {row} is free already"):
        pool.free(row)
    for bad in (
        {"tokens": 8},
        {"tokens": 16, "cols": 32},
        {"cols": 3},
        {"elements": 4},
        {"head_dim": 12},
        {"head_dim": 24, "elements": 16},
    ):
        with pytest.raises(ValueError):
            BlockShape(**({"tokens": 16, "head_dim": 16, "cols": 4} | bad))
    with pytest.raises(ValueError, match="blocks must be at least 1"):
        BlockPool(SHAPE, 0, 0)


def test_regions_are_refused():
    memory = TileMemory(preset("tiny").tile)
    sequence = Sequence(allocate_pool(memory, "cache", SHAPE, 3))
    region = PagedRegion(sequence, 0, 1)
    with pytest.raises(InputError, match="block table"):
        region.words(memory, "none")
    sequence.append(40)
    with pytest.raises(InputError, match="block table"):
        region.words(memory, "many")
    with pytest.raises(ValueError, match="start must be a multiple of 16"):
        region.keys(8, 20)
    for start, stop in ((16, 41), (16, 16), (48, 48)):
        with pytest.raises(ValueError, match="stop must be from"):
            region.values(start, stop)


def test_a_paged_matmul_reads_all_of_the_kv_sram():
    tile = preset("tiny").tile
    sequence = Sequence(BlockPool(SHAPE, 0, 3))
    sequence.append(5)
    fields = {"act_addr": 0, "m": 1, "act_stride": 8, "act_format": 6, "out_addr": 4096}
    operands = PagedRegion(sequence, 0, 1).keys(0, 5)
    touched = access(tile, "matmul", fields | operands | {"weight_format": 6, "out_stride": 4})
    append = access(
        tile,
        "kvappend",
        {
            "k_addr": 0,
            "v_addr": 0,
            "k_base": 900,
            "v_base": 950,
            "slot": 3,
            "head_dim": 24,
            "keys": 1,
            "values": 1,
            "format": 6,
        },
    )
    assert {r[0] for r in append.writes} == {KV} and touched.depends(append)


class Tokens:
    """A sequence on the tile: tokens of random keys and values, appended by the program."""

    def __init__(self, p, rng, name, pool, table, length):
        self.p, self.name, self.rng = p, name, rng
        self.sequence = Sequence(pool)
        self.region = PagedRegion(self.sequence, table, 3)
        dim = pool.shape.head_dim
        memory = p.memory
        self.keys, self.values = (operand(rng, length, dim, Format.BF16) for _ in range(2))
        self.key_rows, self.value_rows = (
            memory.fill(memory.buffer(f"{name}.{part}", length, dim, Format.BF16), contents)
            for part, contents in (("keys", self.keys), ("values", self.values))
        )

    def append(self, count=1):
        for _ in range(count):
            token = self.sequence.length
            self.sequence.append()
            self.region.append(self.p, self.key_rows.row(token), self.value_rows.row(token), token)

    def attend(self, checks):
        """Loads the table; queries times keys, then other weights times values."""
        p, length = self.p, self.sequence.length
        memory = p.memory
        self.region.load_table(p, self.region.words(memory, f"{self.name}.table{len(checks)}"))
        for weights, pages in (
            (self.keys.codes[:length], self.region.keys(0, length)),
            (self.values.codes[:length].T, self.region.values(0, length)),
        ):
            n, k = weights.shape
            tag = f"{self.name}.{len(checks)}"
            a = operand(self.rng, 2, k, Format.BF16)
            act = memory.fill(memory.buffer(f"{tag}.act", 2, k, Format.BF16, Format.BF16), a)
            out = memory.buffer(f"{tag}.out", 2, n)
            p.command(
                "matmul",
                act_addr=act.address,
                act_stride=act.stride_lines,
                m=2,
                out_addr=out.address,
                out_stride=out.stride_lines,
                act_format=Format.BF16,
                weight_format=Format.BF16,
                **pages,
            )
            found = matmul(
                a.codes, None, Format.BF16, weights, None, Format.BF16, p.config.rows, None
            )
            checks.append(Check(out, stored(found, Format.FP32)))


def run_sequences(stall):
    seed = 3
    print("seed", seed)
    rng = np.random.default_rng(seed)
    config = preset("tiny")
    memory = TileMemory(config.tile)
    p = TileProgram(memory)
    pool = allocate_pool(memory, "cache", SHAPE, 3)
    first = Tokens(p, rng, "first", pool, 8, 33)
    second = Tokens(p, rng, "second", pool, 11, 12)
    third = Tokens(p, rng, "third", pool, 8, 20)
    checks = []
    for count in (5, 12):
        first.append(count)
        second.append(count // 2)
    first.attend(checks)
    second.attend(checks)
    second.append(3)
    second.attend(checks)
    gone = list(first.sequence.table)
    assert len(gone) == 2 and pool.free_blocks == 0
    first.sequence.release()
    third.append(20)
    assert sorted(third.sequence.table) == sorted(gone)
    third.attend(checks)
    second.attend(checks)
    request = KernelRequest(config, "gpt-oss", {}, stall=stall, check_order=True)
    result = simulate(request, [memory], [TileRun([p.finish()], [memory], checks)])
    assert result.mismatched == 0 and result.compared > 0, result.differences
    assert result.order is not None and not result.order.findings, result.order.findings[0]
    assert len(checks) == 10


def test_blocks_change_hands_on_the_tile():
    """Two sequences share a pool; a third gets the blocks of the first, and its table entries."""
    run_sequences("none")


@pytest.mark.slow
def test_blocks_change_hands_with_stalls():
    run_sequences("heavy")
