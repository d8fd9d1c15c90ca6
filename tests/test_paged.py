# SPDX-License-Identifier: Apache-2.0
"""Paged weights: MATMUL through the block table, BLOCKTABLE, on the bench of the matrix engine."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from amaranth import Module
from amaranth import sim as amaranth_sim

from golden.block_table import BlockShape, Sequence
from golden.formats import Format
from golden.kernels.trace import Stored
from golden.matmul import matmul
from hw.config import PRESETS
from hw.isa import Init, Status
from hw.matrix_job import PairDecoder
from hw.page_check import PageCheck
from sim.kernels.gemm import operand, stored
from sim.programs.memory import TileMemory
from sim.programs.paged import PagedRegion, allocate_pool
from tests.simulators import VERILOG_FIRST
from tests.test_matrix_engine import simulate

TINY = PRESETS["tiny"].tile
ENTRIES = TINY.block_entries
BF16, FP8, FP32 = Format.BF16, Format.MXFP8_E4M3, Format.FP32
NAN = {BF16: 0x7FC0, FP8: 0x7F}


class Cache:
    """Sequences in the blocks of a pool, with random contents; what no token owns is NaN."""

    def __init__(self, rng, config, memory, shape, fmt, blocks, name="cache"):
        self.rng, self.config, self.memory, self.fmt = rng, config, memory, fmt
        self.pool = allocate_pool(memory, name, shape, blocks)
        self.shape, self.name = shape, name
        dtype = np.uint16 if fmt is BF16 else np.uint8
        rows = shape.rows * blocks
        self.image = np.full((rows, config.cols, shape.elements), NAN[fmt], dtype)
        self.contents = {}

    def shuffle(self):
        """Takes all blocks and frees them in random order."""
        taken = [self.pool.allocate() for _ in range(self.pool.free_blocks)]
        for row in self.rng.permutation(taken):
            self.pool.free(int(row))

    def fill(self, sequence, tokens):
        """Appends `tokens` random tokens; the sequence's keys and values, all of them."""
        old = self.contents.get(sequence)
        start = sequence.length
        sequence.append(tokens)
        dim = self.shape.head_dim
        new = [operand(self.rng, tokens, dim, self.fmt).codes for _ in range(2)]
        at, d = np.arange(start, start + tokens)[:, None], np.arange(dim)[None]
        for place, codes in zip((sequence.key_place, sequence.value_place), new, strict=True):
            where = place(at, d)
            self.image[where.row - self.pool.first, where.bank, where.element] = codes
        if old is not None and start:
            new = [np.concatenate(pair) for pair in zip(old, new, strict=True)]
        self.contents[sequence] = new
        return new

    def write(self):
        """Hands the image to the host."""
        lines = self.image.reshape(-1, self.shape.elements).view(np.uint8)
        first = self.pool.first * self.config.cols
        self.memory.kv_images.append((first, lines, np.full(len(lines), 127, np.uint8)))


class Jobs:
    """Commands with the results they should leave."""

    def __init__(self, rng, config, memory):
        self.rng, self.config, self.memory = rng, config, memory
        self.commands, self.outs, self.expected = [], [], []

    def load(self, region):
        words = region.words(self.memory, f"table{len(self.commands)}")
        self.commands.append(
            {"code": 1, "addr": words.address, "count": words.cols, "table": region.table}
        )

    def plain(self, n, k):
        """A MATMUL that is not paged."""
        w = operand(self.rng, n, k, BF16)
        weights = self.memory.weights(f"w{len(self.commands)}", w.codes, None, BF16, False)
        operands = {
            "n": n,
            "k": k,
            "weight_addr": weights.row,
            "weight_gstride": 1,
            "weight_nstride": weights.groups,
        }
        self._matmul(2, w.codes, BF16, operands)

    def keys(self, cache, region, m, start, stop):
        keys, _ = cache.contents[region.sequence]
        self._matmul(m, keys[start:stop], cache.fmt, region.keys(start, stop))

    def values(self, cache, region, m, start, stop):
        _, values = cache.contents[region.sequence]
        self._matmul(m, values[start:stop].T, cache.fmt, region.values(start, stop))

    def _matmul(self, m, weights, fmt, operands):
        n, k = weights.shape
        name = len(self.commands)
        a = operand(self.rng, m, k, BF16)
        act = self.memory.fill(self.memory.buffer(f"act{name}", m, k, BF16, fmt), a)
        out = self.memory.buffer(f"out{name}", m, n)
        self.commands.append(
            operands
            | {
                "act_addr": act.address,
                "act_stride": act.stride_lines,
                "m": m,
                "out_addr": out.address,
                "out_stride": out.stride_lines,
                "act_format": int(BF16),
                "weight_format": int(fmt),
                "init": int(Init.ZERO),
            }
        )
        scales = None if fmt is BF16 else np.full((n, -(-k // 32)), 127, np.uint8)
        result = matmul(a.codes, None, BF16, weights, scales, fmt, self.config.rows, None)
        self.outs.append(out)
        self.expected.append(stored(result, FP32))

    def check(self, limit=20_000):
        found, errors, cycles = simulate(self.config, self.memory, self.commands, self.outs, limit)
        assert errors == [Status.RUNNING] * len(self.commands)
        assert len(found) == len(self.expected) > 0
        for i, (ours, theirs) in enumerate(zip(found, self.expected, strict=True)):
            assert not np.isnan(theirs.codes.view(np.float32)).all()
            assert np.array_equal(ours.codes, theirs.codes), i
        return cycles


def setup(seed, shape, fmt, blocks, config=TINY):
    print("seed", seed, shape, fmt)
    rng = np.random.default_rng(seed)
    memory = TileMemory(config)
    cache = Cache(rng, config, memory, shape, fmt, blocks)
    cache.shuffle()
    return rng, cache, Jobs(rng, config, memory)


SIZES = [
    pytest.param(tokens, fmt, marks=[] if quick else pytest.mark.slow, id=f"{tokens}-{fmt.name}")
    for tokens, fmt, quick in (
        (16, BF16, True),
        (16, FP8, True),
        (32, BF16, False),
        (32, FP8, True),
        (64, BF16, True),
        (64, FP8, False),
        (128, BF16, False),
        (128, FP8, False),
    )
]


@VERILOG_FIRST
@pytest.mark.parametrize("tokens, fmt", SIZES)
def test_block_sizes(tokens, fmt):
    """Two sequences in shuffled blocks, partial last ones, paged and not, back to back."""
    elements = 8 if fmt is BF16 else 16
    shape = BlockShape(tokens, 48 if tokens < 64 else 16, TINY.cols, elements)
    _, cache, jobs = setup(tokens + elements, shape, fmt, 7)
    first = PagedRegion(Sequence(cache.pool), 5, 4)
    second = PagedRegion(Sequence(cache.pool), ENTRIES - 3, 3)
    cache.fill(first.sequence, 2 * tokens + 5)
    cache.fill(second.sequence, tokens + tokens // 2 + 1)
    cache.fill(first.sequence, tokens)
    cache.write()
    for region in (first, second):
        jobs.load(region)
    for m, region in enumerate((first, second), 1):
        length = region.sequence.length
        jobs.keys(cache, region, m, 0, length)
        jobs.values(cache, region, 3 - m, 0, length)
        jobs.plain(9, 40)
        jobs.values(cache, region, 1, tokens, length - 3)
        jobs.keys(cache, region, 1, tokens, length - 3)
    jobs.check()


@VERILOG_FIRST
def test_short_caches():
    """One token, one line, the ends of blocks."""
    shape = BlockShape(16, 8, TINY.cols)
    _, cache, jobs = setup(1, shape, BF16, 4)
    region = PagedRegion(Sequence(cache.pool), 0, 4)
    cache.fill(region.sequence, 50)
    cache.write()
    jobs.load(region)
    for stop in (1, 4, 5, 8, 15, 16, 17, 31, 32, 33):
        jobs.keys(cache, region, 1, 0, stop)
        jobs.values(cache, region, 1, 0, stop)
    jobs.check()


@VERILOG_FIRST
def test_freed_blocks_serve_the_next_sequence():
    """Later sequences get the blocks of earlier ones, whose tokens stay behind theirs; the table is
    filled between MATMULs.
    """
    shape = BlockShape(16, 16, TINY.cols)
    _, cache, jobs = setup(2, shape, BF16, 5)
    kept, gone = Sequence(cache.pool), Sequence(cache.pool)
    cache.fill(kept, 20)
    cache.fill(gone, 40)
    rows = set(gone.table)
    gone.release()
    kept.release()
    again, other = Sequence(cache.pool), Sequence(cache.pool)
    cache.fill(again, 45)
    cache.fill(other, 17)
    assert rows & (set(again.table) | set(other.table))
    cache.write()
    # Both use the same entries of the table, one after the other.
    for sequence in (again, other, again):
        region = PagedRegion(sequence, ENTRIES // 2 - 1, 3)
        jobs.load(region)
        jobs.values(cache, region, 2, 0, sequence.length)
        jobs.keys(cache, region, 2, 0, sequence.length)
    jobs.check()


@VERILOG_FIRST
def test_tables_of_every_alignment():
    """Words from any place in a vector on, to any entry, more than a vector of them."""
    shape = BlockShape(16, 8, TINY.cols)
    _, cache, jobs = setup(3, shape, BF16, 24)
    sequence = Sequence(cache.pool)
    cache.fill(sequence, 21 * 16 - 3)
    cache.write()
    rows = np.asarray(sequence.table, np.uint32)
    at = 7
    for size in (1, 2, 3, 4, 5, 6):
        lead = at % TINY.cols
        words = np.concatenate([np.full(lead, 0xFFFF_FFFF, np.uint32), rows[at - 7 :][:size]])
        buffer = jobs.memory.fill(
            jobs.memory.buffer(f"words{at}", 1, len(words)), Stored(words[None], FP32)
        )
        jobs.commands.append(
            {"code": 1, "addr": buffer.address + 4 * lead, "count": size, "table": at}
        )
        at += size
    region = PagedRegion(sequence, 7, 21)
    assert at == 7 + len(rows)
    jobs.keys(cache, region, 1, 0, sequence.length)
    jobs.values(cache, region, 1, 0, sequence.length)
    jobs.check()


@VERILOG_FIRST
def test_paging_costs_no_cycle():
    """A paged MATMUL takes as long as the same one on contiguous rows."""
    shape = BlockShape(16, 64, TINY.cols)
    _, cache, jobs = setup(4, shape, BF16, 4)
    region = PagedRegion(Sequence(cache.pool), 0, 4)
    cache.fill(region.sequence, 64)
    cache.write()
    jobs.load(region)
    jobs.keys(cache, region, 1, 0, 64)
    jobs.values(cache, region, 1, 0, 64)
    paged = jobs.commands[1:]
    took = []
    for each in paged:
        lengths = []
        for commands in ([jobs.commands[0], each], [jobs.commands[0], dict(each, paged=0)]):
            _, errors, cycles = simulate(TINY, jobs.memory, commands, [])
            assert errors == [Status.RUNNING] * 2
            lengths.append(cycles[1] - cycles[0])
        took.append(lengths)
    assert all(paged == plain for paged, plain in took), took


def small_job():
    shape = BlockShape(16, 16, TINY.cols)
    _, cache, jobs = setup(5, shape, BF16, 3)
    region = PagedRegion(Sequence(cache.pool), ENTRIES - 4, 4)
    cache.fill(region.sequence, 40)
    cache.write()
    jobs.load(region)
    jobs.keys(cache, region, 1, 0, 40)
    jobs.values(cache, region, 1, 0, 40)
    return jobs


@VERILOG_FIRST
def test_illegal_commands_have_no_effect():
    jobs = small_job()
    load, keys, values = jobs.commands
    fp4 = {"act_format": int(Format.MXFP4), "weight_format": int(Format.MXFP4)}
    bad = [
        dict(load, count=0),
        dict(load, addr=load["addr"] + 2),
        dict(keys, stream=1),
        dict(keys, block_log2=3),
        dict(values, block_log2=0),
        dict(values, **fp4),  # a line of FP4 has 32 tokens
    ]
    commands = [load, *bad, keys, values]
    found, errors, _ = simulate(TINY, jobs.memory, commands, jobs.outs)
    illegal = [Status.ILLEGAL_COMMAND] * len(bad)
    assert errors == [Status.RUNNING, *illegal, Status.RUNNING, Status.RUNNING]
    for ours, theirs in zip(found, jobs.expected, strict=True):
        assert np.array_equal(ours.codes, theirs.codes)


@VERILOG_FIRST
def test_addresses_out_of_range_are_reported():
    jobs = small_job()
    load, keys, values = jobs.commands
    bad = [
        dict(load, count=5),  # beyond the table
        dict(load, table=ENTRIES),
        dict(load, table=0xFFFF, count=2),
        dict(load, addr=TINY.sram_bytes - 4, count=2),
        dict(load, addr=0xFFFF_FFFC),
        dict(load, count=0xFFFF),
        dict(keys, n=65),  # its fifth entry is none
        dict(values, k=65),
        dict(keys, table=0xFFFF),
        dict(keys, weight_addr=TINY.kv_rows),
        dict(values, weight_addr=(1 << 24) - 1),  # the sum leaves 24 bits
    ]
    spare = jobs.memory.buffer("spare", 1, 128)
    for each in bad:
        if "out_addr" in each:
            each["out_addr"] = spare.address
        commands = [load, each, keys, values]
        found, errors, _ = simulate(TINY, jobs.memory, commands, jobs.outs)
        ok = Status.RUNNING
        assert errors == [ok, Status.ADDRESS_RANGE, ok, ok], each
        for ours, theirs in zip(found, jobs.expected, strict=True):
            assert np.array_equal(ours.codes, theirs.codes)


@VERILOG_FIRST
@pytest.mark.parametrize("word", [TINY.kv_rows, 1 << 24, 0x8000_0000, 0xFFFF_FFFF])
def test_words_that_are_no_row_are_reported_when_they_are_used(word):
    jobs = small_job()
    load, keys, values = jobs.commands
    line = np.asarray([[word]], np.uint32)
    buffer = jobs.memory.fill(jobs.memory.buffer("no_row", 1, 1), Stored(line, FP32))
    change = {"code": 1, "addr": buffer.address, "count": 1, "table": ENTRIES - 2}
    within = [dict(keys, n=32), dict(values, k=32)]
    commands = [load, change, *within, keys, values]
    _, errors, _ = simulate(TINY, jobs.memory, commands, [])
    assert errors == [Status.RUNNING] * 4 + [Status.ADDRESS_RANGE] * 2


@pytest.mark.parametrize("cols", [4, 16, 32, 64, 128])
def test_blocks_that_are_legal(cols):
    """Every format, block size and axis, on arrays of every width."""
    m = Module()
    m.submodules.pair = pair = PairDecoder()
    m.submodules.check = check = PageCheck(
        replace(TINY, cols=cols, sram_banks=128, result_depth=256, sram_bytes=1 << 20)
    )
    m.d.comb += [
        pair.act_format.eq(BF16),
        pair.weight_format.eq(check.command.weight_format),
        check.pair.eq(pair.pair),
    ]
    found, expected = [], []

    async def drive(ctx):
        for fmt in (f for f in Format if f is not FP32):
            line = 32 if fmt is Format.MXFP4 else 8 if fmt is BF16 else 16  # tokens of a line
            for block_log2, page_k, stream, paged in product(range(8), (0, 1), (0, 1), (0, 1)):
                ctx.set(
                    check.command,
                    {
                        "weight_format": int(fmt),
                        "block_log2": block_log2,
                        "page_k": page_k,
                        "stream": stream,
                        "paged": paged,
                    },
                )
                least = max(16, line if page_k else cols)
                found.append(bool(ctx.get(check.legal)))
                expected.append(not paged or (not stream and 1 << block_log2 >= least))

    simulator = amaranth_sim.Simulator(m)
    simulator.add_testbench(drive)
    simulator.run()
    assert found == expected and len(found) == 7 * 64 and not all(found)
