# SPDX-License-Identifier: Apache-2.0
"""Paged KV caches: which blocks of the KV SRAM belong to which sequence, and where tokens lie.

A *block* holds the keys and values of `tokens` neighbouring tokens of a sequence for one KV head:
its key rows, then its value rows, each laid out as a region of `golden.kv_layout` whose slots are
the tokens' places in the block. Blocks of a sequence lie anywhere; its block table lists the first
row of each, in order of the tokens. So one table serves the keys (at displacement 0) and the
values (at displacement `key_rows`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from golden.kv_layout import LINE_ELEMENTS, Place

BLOCK_TOKENS = (16, 32, 64, 128)


@dataclass(frozen=True)
class BlockShape:
    """A block of `tokens` tokens of `head_dim` elements, `elements` of them to a line (8 of BF16,
    16 of FP8), on `cols` banks. Keys fill all banks, so a block has at least `cols` tokens. Values
    have `value_dim` elements (0: as many as keys).
    """

    tokens: int
    head_dim: int
    cols: int
    elements: int = LINE_ELEMENTS
    value_dim: int = 0

    def __post_init__(self) -> None:
        if self.tokens not in BLOCK_TOKENS:
            raise ValueError(f"tokens must be one of {BLOCK_TOKENS}, not {self.tokens!r}")
        if self.cols < 1 or self.cols & (self.cols - 1) or self.cols > self.tokens:
            raise ValueError(
                f"cols must be a power of two of at most {self.tokens} tokens, not {self.cols!r}"
            )
        if self.elements not in (8, 16):
            raise ValueError(f"elements must be 8 or 16, not {self.elements!r}")
        if self.head_dim < 1 or self.head_dim % self.elements:
            raise ValueError(
                f"head_dim must be a multiple of {self.elements}, not {self.head_dim!r}"
            )

    @property
    def key_lines(self) -> int:
        """Lines of a key, and rows of a column tile of keys."""
        return self.head_dim // self.elements

    @property
    def dim_tiles(self) -> int:
        """Rows of a group of values."""
        return -(-(self.value_dim or self.head_dim) // self.cols)

    @property
    def key_rows(self) -> int:
        return self.tokens // self.cols * self.key_lines

    @property
    def value_rows(self) -> int:
        return self.tokens // self.elements * self.dim_tiles

    @property
    def rows(self) -> int:
        return self.key_rows + self.value_rows


class BlockPool:
    """`blocks` blocks of `shape` from row `first` on, given out to sequences and taken back.

    The block that was freed last is given out first; fresh ones in order of their rows.
    """

    def __init__(self, shape: BlockShape, first: int, blocks: int):
        if first < 0:
            raise ValueError(f"first must not be negative, not {first!r}")
        if blocks < 1:
            raise ValueError(f"blocks must be at least 1, not {blocks!r}")
        self.shape, self.first, self.blocks = shape, first, blocks
        self._free = [first + shape.rows * b for b in reversed(range(blocks))]

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """First row of a block that was free."""
        if not self._free:
            raise ValueError(f"all {self.blocks} blocks are taken")
        return self._free.pop()

    def free(self, row: int) -> None:
        """Takes back the block that starts at `row`."""
        place = row - self.first
        if place < 0 or place % self.shape.rows or place >= self.shape.rows * self.blocks:
            raise ValueError(f"row must be the first of a block of the pool, not {row!r}")
        if row in self._free:
            raise ValueError(f"block at row {row} is free already")
        self._free.append(row)


class Sequence:
    """A sequence's tokens in blocks of `pool`: `table` has the first row of each block."""

    def __init__(self, pool: BlockPool):
        self.pool, self.table, self.length = pool, list[int](), 0

    def append(self, tokens: int = 1) -> None:
        """Makes room for `tokens` more; no block is taken if there is not enough room for all."""
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, not {tokens!r}")
        blocks = -(-(self.length + tokens) // self.pool.shape.tokens) - len(self.table)
        if blocks > self.pool.free_blocks:
            raise ValueError(
                f"tokens must fit {self.pool.free_blocks} free blocks, not {tokens!r} tokens"
            )
        self.table += [self.pool.allocate() for _ in range(blocks)]
        self.length += tokens

    def release(self) -> None:
        """Gives all blocks back, the last one first."""
        while self.table:
            self.pool.free(self.table.pop())
        self.length = 0

    def slot(self, token: int) -> tuple[int, int]:
        """First row of a token's block, and the token's slot in it."""
        if not 0 <= token < self.length:
            raise ValueError(f"token must be from 0 to {self.length - 1}, not {token!r}")
        block, slot = divmod(token, self.pool.shape.tokens)
        return self.table[block], slot

    def _blocks(self, token: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if token.size and (token.min() < 0 or token.max() >= self.length):
            raise ValueError(f"token must be from 0 to {self.length - 1}, not {token!r}")
        rows = np.asarray(self.table, np.int64)
        return rows[token // self.pool.shape.tokens], token % self.pool.shape.tokens

    def key_place(self, token: ArrayLike, dim: ArrayLike) -> Place:
        """Places of key elements (token, dim), which broadcast; rows are those of the SRAM."""
        s, d = np.broadcast_arrays(np.asarray(token, np.int64), np.asarray(dim, np.int64))
        shape = self.pool.shape
        block, slot = self._blocks(s)
        row = block + slot // shape.cols * shape.key_lines + d // shape.elements
        return Place(row, slot % shape.cols, d % shape.elements)

    def value_place(self, token: ArrayLike, dim: ArrayLike) -> Place:
        """Places of value elements (token, dim), which broadcast; rows are those of the SRAM."""
        s, d = np.broadcast_arrays(np.asarray(token, np.int64), np.asarray(dim, np.int64))
        shape = self.pool.shape
        block, slot = self._blocks(s)
        row = block + shape.key_rows + slot // shape.elements * shape.dim_tiles + d // shape.cols
        return Place(row, d % shape.cols, slot % shape.elements)
