# SPDX-License-Identifier: Apache-2.0
"""Paged KV caches in tile programs: several sequences share the blocks of a pool."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from golden.block_table import BlockPool, BlockShape, Sequence
from golden.formats import Format
from golden.kernels.attention import Chunk
from golden.kernels.trace import Stored
from golden.kv_layout import LINE_ELEMENTS
from sim.errors import InputError
from sim.programs.builder import TileProgram
from sim.programs.memory import Buffer, TileMemory
from sim.programs.regions import KvRegion, place


def allocate_pool(memory: TileMemory, name: str, shape: BlockShape, blocks: int) -> BlockPool:
    """A pool of `blocks` blocks in new rows of the KV SRAM."""
    return BlockPool(shape, memory.kv_rows(name, shape.rows * blocks), blocks)


@dataclass
class PagedRegion:
    """One KV head's cache of a sequence: its tokens, and its entries of the block table.

    The entries from `table` on hold the rows of `sequence.table` once `load_table` has run; a
    sequence that has taken more blocks since, needs it again.
    """

    sequence: Sequence
    table: int
    entries: int
    written: bool = False  # the host has written every line of values

    @property
    def shape(self) -> BlockShape:
        return self.sequence.pool.shape

    def words(self, memory: TileMemory, name: str) -> Buffer:
        """The block table as it is now, as words that the host puts into the tile SRAM."""
        rows = np.asarray(self.sequence.table, np.uint32)
        if not 1 <= len(rows) <= self.entries:
            raise InputError(
                "block table",
                f"{len(rows)} blocks of {name}",
                f"it must be from 1 to its {self.entries} entries",
                "take fewer tokens or larger blocks",
            )
        return memory.fill(memory.buffer(name, 1, len(rows)), Stored(rows[None], Format.FP32))

    def load_table(self, p: TileProgram, words: Buffer) -> None:
        """Copies the words of `words` to this region's entries."""
        p.command("blocktable", addr=words.address, count=words.cols, table=self.table)

    @property
    def fmt(self) -> Format:
        return Format.BF16 if self.shape.elements == LINE_ELEMENTS else Format.MXFP8_E4M3

    @property
    def value_dim(self) -> int:
        return self.shape.value_dim or self.shape.head_dim

    def block(self, index: int) -> KvRegion:
        """A block of the sequence as a region of its own."""
        row, shape = self.sequence.table[index], self.shape
        return KvRegion(
            row,
            row + shape.key_rows,
            shape.tokens,
            shape.head_dim,
            self.value_dim,
            self.fmt,
            self.written,
        )

    def append(self, p: TileProgram, key: Buffer, value: Buffer, token: int) -> None:
        """Writes key and value (rows in tile SRAM) of a token that the sequence has room for."""
        block, place = divmod(token, self.shape.tokens)
        self.block(block).append(p, key, value, place)

    def scores(self, p: TileProgram, queries: Buffer, part: Chunk, out: Buffer) -> None:
        """Queries times the keys of tokens [start, stop)."""
        p.command("matmul", **place(queries, out, self.fmt), **self.keys(part.start, part.stop))

    def product(self, p: TileProgram, probs: Buffer, part: Chunk, out: Buffer) -> None:
        """Probabilities of tokens [start, stop) times their values."""
        p.command("matmul", **place(probs, out, self.fmt), **self.values(part.start, part.stop))

    def keys(self, start: int, stop: int) -> dict[str, Any]:
        """Operands of MATMUL for queries times the keys of tokens [start, stop) (N tokens)."""
        return self._pages(start, stop) | {
            "n": stop - start,
            "k": self.shape.head_dim,
            "weight_addr": 0,
            "weight_gstride": 1,
            "weight_nstride": self.shape.key_lines,
            "page_k": 0,
        }

    def values(self, start: int, stop: int) -> dict[str, Any]:
        """Operands of MATMUL for weights of tokens [start, stop) times their values (K tokens)."""
        return self._pages(start, stop) | {
            "n": self.value_dim,
            "k": stop - start,
            "weight_addr": self.shape.key_rows,
            "weight_gstride": self.shape.dim_tiles,
            "weight_nstride": 1,
            "page_k": 1,
        }

    def _pages(self, start: int, stop: int) -> dict[str, Any]:
        tokens = self.shape.tokens
        if start % tokens:
            raise ValueError(f"start must be a multiple of {tokens} tokens, not {start!r}")
        if not start < stop <= self.sequence.length:
            raise ValueError(
                f"stop must be from {start + 1} to {self.sequence.length}, not {stop!r}"
            )
        return {
            "paged": 1,
            "block_log2": tokens.bit_length() - 1,
            "table": self.table + start // tokens,
        }
