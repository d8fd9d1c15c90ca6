# SPDX-License-Identifier: Apache-2.0
"""Bit-exact model of the attention kernel: one decode step of grouped-query attention with sinks.

Softmax is the streaming kind over chunks of ring slots: maximum m and sum l start as (sink, 1), the
output as the first chunk's product.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from golden import fp32
from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.trace import Machine, Trace
from golden.matmul import matmul
from golden.vector import exponentials, row_max, scale_rows, vector

LOG2E = float(np.float32(1.4426950408889634))


@dataclass(frozen=True)
class Chunk:
    """Ring slots [start, stop) that are handled at once; `mask` is the cyclic range, relative to
    `start`, of those that count (None: all).
    """

    start: int
    stop: int
    mask: tuple[int, int] | None


def chunks(slots: int, valid: NDArray[np.bool_], size: int) -> list[Chunk]:
    """Cuts `slots` written slots into chunks of `size`; wholly masked chunks are left out.

    The valid slots [slots] form one cyclic range of the ring.
    """
    found = []
    for start in range(0, slots, size):
        part = valid[start : min(start + size, slots)]
        if not part.any():
            continue
        if part.all():
            mask = None
        else:
            rises = np.flatnonzero(part & ~np.roll(part, 1))
            falls = np.flatnonzero(part & ~np.roll(part, -1))
            if len(rises) != 1:
                raise ValueError(f"valid must be one cyclic range, not {len(rises)} in a chunk")
            mask = (int(rises[0]), int(falls[0]) + 1)
        found.append(Chunk(start, start + len(part), mask))
    return found


def window_slots(context: int, ring: int, window: int | None) -> NDArray[np.bool_]:
    """[min(context, ring)]: slots that the newest of `context` tokens sees.

    Token t lies in slot t mod ring; with a window of w the newest sees the last w tokens.
    """
    slots = min(context, ring)
    seen = context if window is None else min(window, context)
    if seen > slots:
        raise ValueError(f"ring must hold the {seen} tokens that are seen, not {ring!r}")
    valid = np.zeros(slots, bool)
    valid[np.arange(context - seen, context) % ring] = True
    return valid


def attend(
    machine: Machine,
    trace: Trace,
    name: str,
    queries: NDArray[np.uint16],
    keys: NDArray[np.uint16],
    values: NDArray[np.uint16],
    sinks: Float32,
    parts: list[Chunk],
) -> Float32:
    """Queries [heads, D] on one KV head: scaled BF16 queries, keys and values [slots, D] (BF16).

    Returns the normalised output [heads, D] in FP32, before it is stored.
    """
    lanes = machine.lanes
    bf16 = Format.BF16
    if not parts:
        raise ValueError("parts must hold at least one chunk, not none")
    largest, total = np.asarray(sinks, np.float32)[None, :], None
    output = None
    for index, part in enumerate(parts):
        tag = f"{name}.c{index}"
        span = slice(part.start, part.stop)
        scores = trace.keep(
            f"{tag}.scores", matmul(queries, None, bf16, keys[span], None, bf16, machine.rows)
        ).values
        masks = (
            {}
            if part.mask is None
            else {"mask": True, "mask_lo": part.mask[0], "mask_hi": part.mask[1]}
        )
        top = trace.keep(f"{tag}.chunk_max", row_max(scores, lanes=lanes, **masks)).values
        new = trace.keep(f"{tag}.max", vector(top, largest, lanes=lanes, op1="max")[0]).values
        shrink = trace.keep(
            f"{tag}.shrink",
            vector(
                largest,
                new,
                np.float32(LOG2E),
                lanes=lanes,
                op1="sub",
                s1="b",
                mul=True,
                s2="d",
                function="exp2",
            )[0],
        ).values
        probs, sums = exponentials(scores, new[0], LOG2E, lanes=lanes, **masks)
        stored = trace.keep(f"{tag}.probs", probs, bf16)
        chunk_sum = trace.keep(f"{tag}.chunk_sum", sums).values
        before = np.ones_like(new) if total is None else total
        total = trace.keep(
            f"{tag}.sum",
            vector(shrink, before, chunk_sum, lanes=lanes, mul=True, s2="b", add=True, s3="d")[0],
        ).values
        product = trace.keep(
            f"{tag}.product",
            matmul(stored.codes, None, bf16, values[span].T.copy(), None, bf16, machine.rows),
        ).values
        if output is None:
            output = product
        else:
            output = trace.keep(
                f"{tag}.output",
                vector(
                    output,
                    shrink[0][:, None],
                    product,
                    lanes=lanes,
                    mul=True,
                    s2="b",
                    add=True,
                    s3="d",
                )[0],
            ).values
        largest = new
    assert total is not None and output is not None  # `parts` is not empty
    inverse = trace.keep(
        f"{name}.inverse", vector(total, lanes=lanes, function="reciprocal")[0]
    ).values
    return scale_rows(output, inverse[0], lanes=lanes)


def attention(
    machine: Machine,
    trace: Trace,
    queries: Float32,
    keys: NDArray[np.uint16],
    values: NDArray[np.uint16],
    sinks: Float32,
    scale: float,
    parts: list[Chunk],
    out_format: Format = Format.BF16,
) -> Float32:
    """Rotated queries [heads, D] (FP32) on BF16 keys and values [slots, kv_heads, D]; [heads, D].

    `keys` and `values` hold the new token already. Query head h reads KV head h // (heads /
    kv_heads).
    """
    heads, kv_heads = len(queries), keys.shape[1]
    group = heads // kv_heads
    scaled = trace.keep("queries", fp32.mul(queries, np.float32(scale)), Format.BF16).codes
    outputs = [
        attend(
            machine,
            trace,
            f"g{g}",
            scaled[g * group : (g + 1) * group],
            keys[:, g],
            values[:, g],
            sinks[g * group : (g + 1) * group],
            parts,
        )
        for g in range(kv_heads)
    ]
    return trace.keep("attended", np.concatenate(outputs), out_format).values
