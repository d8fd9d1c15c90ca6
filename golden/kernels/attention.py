# SPDX-License-Identifier: Apache-2.0
"""Bit-exact model of the attention kernel: one decode step of grouped-query attention with sinks.

Softmax is the streaming kind over chunks of ring slots. Scores stay as the array gives them: the
scale of the softmax is part of the exponents' factor. Maximum m and sum l start as (sink / scale,
1) or, without sinks, as the first chunk's; the output starts as the first chunk's product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.kv import Held, held, held_heads
from golden.kernels.trace import Machine, Trace
from golden.matmul import matmul
from golden.vector import exponentials, row_max, scale_rows, vector

LOG2E = float(np.float32(1.4426950408889634))
LOWEST = np.finfo(np.float32).min  #: the maximum's start in place of a sink of minus infinity


def exponent_factor(scale: float) -> float:
    """c = FP32(scale log2 e): exp2((score - m) c) is e^(scale (score - m))."""
    if not 0 < scale < np.inf:
        raise ValueError(f"scale must be positive and finite, not {scale!r}")
    return float(np.float32(scale / np.log(2.0)))


def sink_starts(sinks: Float32, scale: float) -> Float32:
    """[heads]: sink logits in units of scores, FP32(sink / scale): what lies in tile SRAM.

    A sink of minus infinity becomes the least finite number, so that no difference of two maxima is
    NaN: then a row that sees nothing has m = LOWEST, l = 1 and an output of zeros.
    """
    logits = np.asarray(sinks, np.float64)
    if not np.all(logits < np.inf):
        raise ValueError(f"sinks must be finite or minus infinity, not {sinks!r}")
    with np.errstate(over="ignore"):
        return np.clip(logits / scale, LOWEST, -LOWEST).astype(np.float32)


@dataclass(frozen=True)
class Chunk:
    """Ring slots [start, stop) that are handled at once; `mask` is the cyclic range, relative to
    `start`, of those that count (None: all).

    With `lo_step` or `hi_step` that end of the mask grows by 1 from row to row, modulo 2^16.
    """

    start: int
    stop: int
    mask: tuple[int, int] | None
    lo_step: bool = False
    hi_step: bool = False

    @property
    def stages(self) -> dict[str, Any]:
        """The mask as stages of `golden.vector.vector`."""
        if self.mask is None:
            return {}
        return {
            "mask": True,
            "mask_lo": self.mask[0],
            "mask_hi": self.mask[1],
            "mask_lo_step": self.lo_step,
            "mask_hi_step": self.hi_step,
        }


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
    keys: Held | NDArray[np.uint16],
    values: Held | NDArray[np.uint16],
    starts: Float32 | None,
    factor: float,
    parts: list[Chunk],
) -> Float32:
    """Queries [heads, D] (BF16) on one KV head's keys [slots, D] and values [slots, Dv].

    These are BF16 codes, or `Held` in another format; queries and probabilities are BF16 always.
    `starts` [heads] are `sink_starts`, or None for a softmax without sinks, in which every row must
    see a slot of the first chunk; `factor` is `exponent_factor`. Returns the normalised output
    [heads, Dv] in FP32, before it is stored; zeros without parts.

    Buffers, for chunk i under `{name}.c{i}.`: scores, chunk_max, max, shrink, probs (BF16),
    chunk_sum, sum, product, then output or, for the last of several chunks, scaled; at the end
    `{name}.inverse`. Without sinks the first chunk has no max, shrink and sum: they are its own
    chunk_max and chunk_sum.
    """
    lanes = machine.lanes
    bf16 = Format.BF16
    held_keys, held_values = held(keys), held(values)
    if not parts:
        return np.zeros((len(queries), held_values.codes.shape[1]), np.float32)
    largest = None if starts is None else np.asarray(starts, np.float32)[None, :]
    total, output = None, None
    for index, part in enumerate(parts):
        tag = f"{name}.c{index}"
        weights = *held_keys.keys(part.start, part.stop), held_keys.fmt
        scores = trace.keep(
            f"{tag}.scores", matmul(queries, None, bf16, *weights, machine.rows)
        ).values
        masks = part.stages
        top = trace.keep(f"{tag}.chunk_max", row_max(scores, lanes=lanes, **masks)).values
        new, shrink = top, None
        if largest is not None:
            new = trace.keep(f"{tag}.max", vector(top, largest, lanes=lanes, op1="max")[0]).values
            shrink = trace.keep(
                f"{tag}.shrink",
                vector(
                    largest,
                    new,
                    np.float32(factor),
                    lanes=lanes,
                    op1="sub",
                    s1="b",
                    mul=True,
                    s2="d",
                    function="exp2",
                )[0],
            ).values
        elif np.any(np.isneginf(top)):
            raise ValueError("parts must begin with a chunk of which every row sees a slot")
        probs, sums = exponentials(scores, new[0], factor, lanes=lanes, **masks)
        stored = trace.keep(f"{tag}.probs", probs, bf16)
        chunk_sum = trace.keep(f"{tag}.chunk_sum", sums).values
        if shrink is None:
            total = chunk_sum
        else:
            before = np.ones_like(new) if total is None else total
            total = trace.keep(
                f"{tag}.sum",
                vector(shrink, before, chunk_sum, lanes=lanes, mul=True, s2="b", add=True, s3="d")[
                    0
                ],
            ).values
        weights = *held_values.columns(part.start, part.stop), held_values.fmt
        product = trace.keep(
            f"{tag}.product", matmul(stored.codes, None, bf16, *weights, machine.rows)
        ).values
        if index == len(parts) - 1:
            break
        if shrink is None or output is None:
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
    assert total is not None  # `parts` is not empty
    inverse = trace.keep(
        f"{name}.inverse", vector(total, lanes=lanes, function="reciprocal")[0]
    ).values
    if output is None or shrink is None:
        return scale_rows(product, inverse[0], lanes=lanes)
    scaled = trace.keep(f"{tag}.scaled", scale_rows(output, shrink[0], lanes=lanes)).values
    return vector(
        product, inverse[0][:, None], scaled, lanes=lanes, op1="add", s1="d", mul=True, s2="b"
    )[0]


def attention(
    machine: Machine,
    trace: Trace,
    queries: Float32,
    keys: Sequence[Held] | NDArray[np.uint16],
    values: Sequence[Held] | NDArray[np.uint16],
    sinks: Float32 | None,
    scale: float,
    parts: list[Chunk],
    out_format: Format = Format.BF16,
) -> Float32:
    """Rotated queries [heads, D] on keys and values [slots, kv_heads, D]; [heads, D].

    The queries are rounded to BF16 (buffer `queries`); keys and values are BF16 codes, or a list
    of `Held` by KV head, and hold the new token already. `sinks` [heads] are logits, which `scale`
    does not concern, or None. Query head h reads KV head h // (heads / kv_heads).
    """
    key_heads, value_heads = held_heads(keys), held_heads(values)
    group = len(queries) // len(key_heads)
    rounded = trace.keep("queries", queries, Format.BF16).codes
    starts = None if sinks is None else sink_starts(sinks, scale)
    factor = exponent_factor(scale)
    outputs = []
    for g, (key, value) in enumerate(zip(key_heads, value_heads, strict=True)):
        rows = slice(g * group, (g + 1) * group)
        given = None if starts is None else starts[rows]
        outputs.append(
            attend(machine, trace, f"g{g}", rounded[rows], key, value, given, factor, parts)
        )
    return trace.keep("attended", np.concatenate(outputs), out_format).values
