# SPDX-License-Identifier: Apache-2.0
"""KV SRAM on a tile: planted faults, contents that were never written, both formats."""

import re
from typing import Any

import numpy as np

from golden.formats import Format
from golden.kernels.trace import Stored
from golden.kv_layout import key_rows, line_elements, value_rows
from hw.config import preset
from hw.host_adapter import REGION_LO, Region
from hw.isa import Engine
from sim.assembler import disassemble
from sim.harness import build_system
from sim.kernels.gemm import operand, product, stored
from sim.kernels.system import decode, span, tile_words
from sim.programs.builder import TileProgram
from sim.programs.memory import Buffer, TileMemory, Weights
from sim.programs.regions import KvRegion
from sim.runner import run

TINY = preset("tiny")
COLS = TINY.tile.cols
BF16, FP8, FP32 = Format.BF16, Format.MXFP8_E4M3, Format.FP32


class Runs:
    """Runs of a tile, one after the other, each after a reset: images, damage, program, reads."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.plan: list[dict[str, Any]] = []
        self.buffers: list[list[Buffer]] = []

    def add(
        self,
        memory: TileMemory,
        program: TileProgram,
        buffers: list[Buffer],
        damage: list[tuple[int, list[int]]] = (),  # type: ignore[assignment]
    ) -> None:
        fresh = tile_words(memory, program.finish(), TINY)
        reads = []
        for first, count in map(span, buffers):
            reads.append([0, Region.TILE_SRAM.value << REGION_LO | first, count])
        self.plan.append(
            {
                "load": [[len(self.words), len(fresh)]],
                "start": [0],
                "limit": 20_000,
                "reads": reads,
                "reset": int(bool(self.plan)),
                "damage": [[0, line, bits] for line, bits in damage],
            }
        )
        self.words += fresh
        self.buffers.append(buffers)

    def run(self, seed: int) -> list[tuple[dict, list[Stored]]]:
        """Status and buffers of each run."""
        print(f"seed {seed}")
        result = run(
            build_system(TINY),
            "tb.bench_tile",
            files={"host0.hex": "\n".join(self.words) + "\n"},
            plusargs=["+host0=host0.hex"],
            seed=seed,
            parameters={"runs": self.plan, "stall": 0},
        )
        return [
            (
                done["status"][0],
                [decode(b, result.arrays[f"read_{r}_{i}"]) for i, b in enumerate(self.buffers[r])],
            )
            for r, done in enumerate(result.report["runs"])
        ]


def test_planted_faults():
    """One flipped bit changes nothing but the count; two stop the tile, if the line is used.

    The six columns of the product are those of rows 0 to 2, and two of rows 3 to 5.
    """
    rng = np.random.default_rng(51)
    act, weight = operand(rng, 1, 20, BF16), operand(rng, 6, 20, BF16)
    expected = stored(product(act, weight, TINY.tile.rows), FP32).codes

    def matmul() -> tuple[TileMemory, TileProgram, Buffer, int]:
        memory = TileMemory(TINY.tile)
        p = TileProgram(memory)
        out = memory.buffer("out", 1, 6)
        a = memory.fill(memory.buffer("act", 1, 20, BF16, weight=BF16), act)
        w = memory.weights("weight", weight.codes, None, BF16, False)
        p.matmul(a, w, out)
        return memory, p, out, w.row

    def appended(slot: int) -> tuple[TileMemory, TileProgram]:
        memory = TileMemory(TINY.tile)
        p = TileProgram(memory)
        row = memory.fill(memory.buffer("row", 1, 8, BF16), operand(rng, 1, 8, BF16))
        region = KvRegion(16, 32, 16, 8, 8)
        lines = np.zeros((2 * COLS, 16), np.uint8)
        memory.kv_images.append((32 * COLS, lines, np.full(len(lines), 127, np.uint8)))
        region.append(p, row, row, slot)
        return memory, p

    runs = Runs()
    cases = []
    for row, bank, bits in (
        (0, 0, []),
        (1, 2, [77]),
        (2, 1, [140]),
        (4, 1, [130]),
        (4, 2, [3]),
        (3, 3, [3, 9]),
        (5, 0, [0, 9]),
        (2, 2, [3, 144]),
        (2, 2, []),
    ):
        memory, p, out, first = matmul()
        runs.add(memory, p, [out], [((first + row) * COLS + bank, bits)] if bits else [])
        cases.append(("matmul", row < 3 or bank < 2, bits))
    for slot, bits in ((1, [90]), (2, [90, 91]), (8, [90, 91]), (0, [90, 91])):
        memory, p = appended(slot)
        runs.add(memory, p, [], [(32 * COLS + 1, bits)])
        cases.append(("kvappend", slot % 8 != 0, bits))
    results = runs.run(51)
    assert len(results) == len(cases)
    for (kind, used, bits), (status, found) in zip(cases, results, strict=True):
        stops = used and len(bits) == 2
        assert status["status"] == ("KV_ERROR" if stops else "DONE"), (kind, used, bits)
        counts = [int(used and len(bits) == n) for n in (1, 2)]
        assert [status["kv_corrected"], status["kv_uncorrectable"]] == counts
        if stops:
            engine = Engine.MATRIX if kind == "matmul" else Engine.KV
            assert (status["engine"], status["pc"]) == (engine, 0)
        elif kind == "matmul":
            np.testing.assert_array_equal(found[0].codes, expected)


def same_scale(rng: np.random.Generator, tokens: int, dim: int, fmt: Format, scale: int) -> Stored:
    """Random rows [tokens, dim], one scale for all."""
    rows = operand(rng, tokens, dim, fmt)
    if fmt is BF16:
        return rows
    return Stored(rows.codes, fmt, np.full((tokens, -(-dim // 32)), scale, np.uint8))


def test_lines_that_hold_nan_influence_nothing():
    """A region full of NaN and a short context in it: scores and P V are those of the tokens.

    Tokens end within a line of values and within a row of keys. Keys that are longer than values
    (latent and rope, of which the latent is also the value) take two commands a token.
    """
    rng = np.random.default_rng(52)
    runs, expected = Runs(), []
    for fmt, tokens, dim, v_dim in ((BF16, 11, 24, 16), (FP8, 19, 32, 32), (FP8, 5, 48, 16)):
        memory = TileMemory(TINY.tile)
        p = TileProgram(memory)
        elements, slots = line_elements(fmt), 24
        rows = key_rows(slots, dim, COLS, fmt), value_rows(slots, v_dim, COLS, fmt)
        keys, values = memory.kv_rows("keys", rows[0]), memory.kv_rows("values", rows[1])
        nan = np.full((sum(rows) * COLS, 16), 0xFF, np.uint8)
        memory.kv_images.append((keys * COLS, nan, np.full(len(nan), 0xFF, np.uint8)))
        key, value = (
            same_scale(rng, tokens, dim, fmt, 120),
            same_scale(rng, tokens, v_dim, fmt, 130),
        )
        k = memory.fill(memory.buffer("k", tokens, dim, fmt), key)
        v = memory.fill(memory.buffer("v", tokens, v_dim, fmt), value)
        for t in range(tokens):
            common = {"slot": t, "k_base": keys, "v_base": values, "format": fmt}
            p.command("kvappend", k_addr=k.at(t), v_addr=0, head_dim=dim, keys=1, **common)
            p.command("kvappend", k_addr=0, v_addr=v.at(t), head_dim=v_dim, values=1, **common)
        query, probs = operand(rng, 2, dim, BF16), operand(rng, 2, tokens, BF16)
        q = memory.fill(memory.buffer("q", 2, dim, BF16, weight=fmt), query)
        s = memory.fill(memory.buffer("s", 2, tokens, BF16, weight=fmt), probs)
        scores, out = memory.buffer("scores", 2, tokens), memory.buffer("out", 2, v_dim)
        pieces, tiles = dim // elements, -(-v_dim // COLS)
        p.matmul(q, Weights(tokens, dim, fmt, rows[0], pieces, fmt is FP8, row=keys), scores)
        p.command(
            "matmul",
            act_addr=s.address,
            act_stride=s.stride_lines,
            m=2,
            n=v_dim,
            k=tokens,
            weight_addr=values,
            weight_gstride=tiles,
            weight_nstride=1,
            out_addr=out.address,
            out_stride=out.stride_lines,
            act_format=BF16,
            weight_format=fmt,
        )
        scales = None if fmt is BF16 else np.full((v_dim, 1), 130, np.uint8)
        turned = Stored(np.ascontiguousarray(value.codes.T), fmt, scales)
        expected.append((product(query, key, 2), product(probs, turned, 2)))
        runs.add(memory, p, [scores, out])
    for (status, found), wanted in zip(runs.run(52), expected, strict=True):
        assert status["status"] == "DONE"
        assert not status["kv_corrected"] and not status["kv_uncorrectable"]
        for got, values in zip(found, wanted, strict=True):
            assert np.isfinite(values).all() and values.any()
            np.testing.assert_array_equal(got.codes, stored(values, FP32).codes)


def test_appends_of_later_laps_keep_the_line():
    """The first lap of a ring starts lines anew; later ones, and a cache that the host wrote, not.

    Lengths of keys and values that differ take two commands.
    """
    memory = TileMemory(TINY.tile)
    p = TileProgram(memory)
    row = memory.buffer("row", 1, 32, FP8)
    for ring, dim, written in ((KvRegion(0, 64, 24, 32, 32, FP8), 32, False),
                               (KvRegion(0, 64, 24, 32, 16, FP8, True), 16, True)):  # fmt: skip
        assert ring.value_dim == dim and ring.written is written
        for token in (0, 23, 24, 49):
            ring.append(p, row, row, token)
    found = [line for line in disassemble(p.finish().assemble()) if line.startswith("kvappend")]
    assert len(found) == 4 + 8 and all("format=3" in line for line in found)
    slots = [int(re.findall(r"slot=(0x[0-9a-f]+|[0-9]+)", f"{x} slot=0")[0], 0) for x in found]
    assert slots == [0, 23, 0, 1] + [s for s in (0, 23, 0, 1) for _ in range(2)]
    assert ["wrapped=1" in line for line in found] == [False, False, True, True] + [True] * 8
