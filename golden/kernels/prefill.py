# SPDX-License-Identifier: Apache-2.0
"""Bit-exact model of attention of several new tokens at once: a chunk of a prefill.

The keys and values of all tokens up to the last query are in the cache. Queries are handled per
head in blocks of rows; each block walks only the tokens that some row of it sees, in parts that are
ordinary parts of `attend`, with masks that step from row to row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.attention import Chunk, attend, exponent_factor, sink_starts
from golden.kernels.kv import Held, held_heads
from golden.kernels.trace import Machine, Trace

MASK_MODULUS = 1 << 16  # ends of a mask are 16 bits and wrap
NO_BOUND = MASK_MODULUS // 2  # as the lower end: -2^15, before every slot


@dataclass(frozen=True)
class RowBlock:
    """Queries [first, first + rows) of every head, and the parts of the ring that they walk."""

    first: int
    rows: int
    parts: list[Chunk]

    @property
    def scores(self) -> int:
        """Scores that the block computes, masked ones included."""
        return self.rows * sum(part.stop - part.start for part in self.parts)


def schedule(
    position: int,
    count: int,
    *,
    ring: int,
    window: int | None,
    size: int,
    block: int,
    unit: int,
) -> list[RowBlock]:
    """The row blocks of `count` queries at token positions `position` and on.

    Token t lies in slot t mod `ring`. A query sees itself and all tokens before it, or the last
    `window` with itself. A part starts at a multiple of `unit` slots (the larger of the array's
    columns and the tokens of a value line), has at most `size` slots and ends with the last token
    that its rows see. Fewer rows per `block` skip more: a block computes up to rows - 1 masked
    scores per row, and unit - 1 more at the start of a window; but each block loads all its keys
    and values into the array anew, which takes array-rows cycles per weight tile against 4 rows.
    """
    for name, value in (("ring", ring), ("size", size)):
        if value < unit or value % unit:
            raise ValueError(f"{name} must be a multiple of unit {unit}, not {value!r}")
    if position < 0 or count < 1 or block < 1:
        raise ValueError(
            f"position, count and block must be at least 0, 1, 1, not {position, count, block!r}"
        )
    if size + block + unit + (window or 0) > NO_BOUND:
        raise ValueError(f"size, block and window must be below 2^15 in all, not {size!r}")
    oldest = 0 if window is None else max(0, position - window + 1)
    if position + count - oldest > ring:
        raise ValueError(f"ring must hold {position + count - oldest} tokens, not {ring!r}")
    blocks = []
    for first in range(0, count, block):
        rows = min(block, count - first)
        start = position + first  # the token of row 0
        end = start + rows
        token = 0 if window is None else max(0, start - window + 1)
        token -= token % unit
        parts = []
        while token < end:
            stop = min(token + size, end, (token // ring + 1) * ring)
            slot = token % ring
            whole = stop <= start + 1 and (window is None or token > end - 1 - window)
            if whole:
                parts.append(Chunk(slot, slot + stop - token, None))
            else:
                low = NO_BOUND if window is None else (start - window + 1 - token) % MASK_MODULUS
                high = (start + 1 - token) % MASK_MODULUS
                parts.append(
                    Chunk(slot, slot + stop - token, (low, high), window is not None, True)
                )
            token = stop
        blocks.append(RowBlock(first, rows, parts))
    return blocks


def attend_blocks(
    machine: Machine,
    trace: Trace,
    queries: NDArray[np.uint16],
    heads: int,
    keys: Sequence[Held],
    values: Sequence[Held],
    starts: Float32 | None,
    factor: float,
    blocks: list[RowBlock],
) -> Float32:
    """`attend` of head-major BF16 queries [heads * Q, D]: FP32 [Q, heads, Dv], not yet stored.

    `starts` [heads] and `factor` as in `attend`. The buffers of head h and block b are those of
    `attend` under the name `h{h}.b{b}`.
    """
    count, group = len(queries) // heads, heads // len(keys)
    out = np.zeros((count, heads, values[0].codes.shape[1]), np.float32)
    for h in range(heads):
        for b, block in enumerate(blocks):
            row = h * count + block.first
            out[block.first : block.first + block.rows, h] = attend(
                machine,
                trace,
                f"h{h}.b{b}",
                queries[row : row + block.rows],
                keys[h // group],
                values[h // group],
                None if starts is None else np.full(block.rows, starts[h], np.float32),
                factor,
                block.parts,
            )
    return out


def head_major(queries: Float32) -> Float32:
    """[heads * Q, D] of [Q, heads, D]: the rows of a head follow each other."""
    return np.ascontiguousarray(queries.swapaxes(0, 1)).reshape(-1, queries.shape[-1])


def prefill(
    machine: Machine,
    trace: Trace,
    queries: Float32,
    keys: Sequence[Held] | NDArray[np.uint16],
    values: Sequence[Held] | NDArray[np.uint16],
    sinks: Float32 | None,
    scale: float,
    blocks: list[RowBlock],
    out_format: Format = Format.BF16,
) -> Float32:
    """Rotated queries [Q, heads, D] on the slots of a cache: [Q, heads * Dv].

    Arguments as in `golden.kernels.attention.attention`; `blocks` are a `schedule`. Buffers:
    `queries` (BF16, [heads * Q, D], head-major), those of `attend_blocks`, and `attended` [Q, heads
    * Dv], token by token, as the output projection takes it.
    """
    count, heads, _ = queries.shape
    rounded = trace.keep("queries", head_major(queries), Format.BF16).codes
    starts = None if sinks is None else sink_starts(sinks, scale)
    out = attend_blocks(
        machine,
        trace,
        rounded,
        heads,
        held_heads(keys),
        held_heads(values),
        starts,
        exponent_factor(scale),
        blocks,
    )
    return trace.keep("attended", out.reshape(count, -1), out_format).values
