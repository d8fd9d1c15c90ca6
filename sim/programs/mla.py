# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention of new tokens on one cache, decode or prefill (`golden.kernels.mla`).

The array goes through the projections without a pause: the latent's product covers the norm of the
compressed queries, and the queries' products cover norm and rotation of the key, its append and the
rotation of the queries. With one token all heads attend at once; with more they take turns, and a
head's value matrix is applied beside the attention of the next.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from golden.formats import Format
from golden.kernels.attention import chunks, exponent_factor
from golden.kernels.mla import MlaMatrices, MlaShape
from golden.kernels.moe import Matrix
from golden.kernels.prefill import schedule
from hw.config import LINE_BYTES
from sim.programs.attention import Attend, decode, interleave, prefill, row_range
from sim.programs.builder import TileProgram
from sim.programs.layer import norm
from sim.programs.memory import Buffer, TileMemory, Weights, align_up, lines_per_group
from sim.programs.regions import KvRegion


@dataclass(frozen=True)
class MlaPlace:
    """Where weights and cache lie: norm weights in tile SRAM, matrices in HBM or KV SRAM.

    `q_nope` is one matrix of all heads, or one per head where a head's columns of the product have
    to be moved apart, to be activations of the array.
    """

    q_a: Weights
    q_a_norm: Buffer
    q_nope: list[Weights]
    q_rope: Weights
    kv_a: Weights
    kv_a_norm: Buffer
    absorb: list[Weights]
    expand: list[Weights]
    output: Weights
    region: KvRegion


def nope_pitch(memory: TileMemory, nope: int, fmt: Format) -> int:
    """Columns from one head's q_nope to the next, such that each starts as activations may."""
    unit = LINE_BYTES * memory.config.rows * lines_per_group(Format.BF16, fmt) // 2
    return align_up(nope, unit)


def place_matrices(
    memory: TileMemory,
    shape: MlaShape,
    weights: MlaMatrices,
    norms: tuple[Buffer, Buffer],
    region: KvRegion,
    stream: bool,
) -> MlaPlace:
    """Puts the matrices into HBM (`stream`) or KV SRAM; `norms` are those of q_a and kv_a."""

    def placed(name: str, matrix: Matrix, rows: slice = slice(None)) -> Weights:
        scales = None if matrix.scales is None else matrix.scales[rows]
        return memory.weights(name, matrix.codes[rows], scales, matrix.fmt, stream)

    nope = shape.nope
    parts = [slice(None)]
    if nope_pitch(memory, nope, weights.absorb[0].fmt) > nope:
        parts = [slice(h * nope, (h + 1) * nope) for h in range(shape.heads)]
    return MlaPlace(
        placed("q_a", weights.q_a),
        norms[0],
        [placed(f"q_nope.{i}", weights.q_nope, rows) for i, rows in enumerate(parts)],
        placed("q_rope", weights.q_rope),
        placed("kv_a", weights.kv_a),
        norms[1],
        [placed(f"absorb.{h}", matrix) for h, matrix in enumerate(weights.absorb)],
        [placed(f"expand.{h}", matrix) for h, matrix in enumerate(weights.expand)],
        placed("output", weights.output),
        region,
    )


def columns(buffer: Buffer, first: int, count: int, name: str | None = None) -> Buffer:
    """Some columns of a buffer."""
    address = buffer.at(0, first)
    return Buffer(name or buffer.name, address, buffer.rows, count, buffer.fmt, buffer.stride)


def rotate(
    p: TileProgram, x: Buffer, cosine: Buffer, sine: Buffer, turned: Buffer, out: Buffer
) -> None:
    """RoPE in interleaved pairs of the rows of x, by one row of the tables or one for each."""
    p.vector(x, turned, b=sine, mul=True, permute=1)
    p.vector(x, out, b=cosine, d=turned, mul=True, add=True, s3="d")


def rotate_heads(
    p: TileProgram,
    shape: MlaShape,
    x: Buffer,
    cosine: Buffer,
    sine: Buffer,
    turned: Buffer,
    queries: Buffer,
) -> None:
    """RoPE of x [T, heads * rope] into the last columns of the queries [heads * T, ..]."""
    count, heads, rope = x.rows, shape.heads, shape.rope
    out = columns(queries, shape.kv_lora, rope)
    if count == 1:  # one row of the tables serves all heads
        x, turned = (Buffer(b.name, b.address, heads, rope, b.fmt, 4 * rope) for b in (x, turned))
        rotate(p, x, cosine, sine, turned, out)
        return
    for h in range(heads):
        own = [columns(b, h * rope, rope) for b in (x, turned)]
        rotate(p, own[0], cosine, sine, own[1], row_range(out, h * count, count))


def nope_products(
    p: TileProgram, shape: MlaShape, weights: list[Weights], x: Buffer
) -> list[Buffer]:
    """q_nope of x [T, q_lora]: each head's [T, nope], as activations, named `q_nope.h{h}`."""
    memory, fmt = p.memory, weights[0].fmt
    pitch = nope_pitch(memory, shape.nope, fmt)
    whole = memory.buffer("q_nope", x.rows, shape.heads * pitch, Format.BF16, weight=fmt)
    made = []
    for h in range(shape.heads):
        name = f"q_nope.h{h}"
        made.append(columns(whole, h * pitch, shape.nope, name))
        memory.buffers[name] = made[-1]
    for matrix, out in zip(weights, made if len(weights) > 1 else [whole], strict=True):
        p.matmul(x, matrix, out)
    return made


def attends_of(
    p: TileProgram, shape: MlaShape, region: KvRegion, queries: Buffer, position: int, out: Buffer
) -> list[Attend]:
    """Attention of absorbed queries [heads * T, ..] on all tokens up to each: `out` likewise."""
    count, factor = queries.rows // shape.heads, exponent_factor(shape.scale)
    if count == 1:
        walk = chunks(position + 1, np.ones(position + 1, bool), shape.chunk)
        return decode(p, queries, None, [region], factor, walk, out)
    blocks = schedule(
        position,
        count,
        ring=shape.ring,
        window=None,
        size=shape.chunk,
        block=shape.block,
        unit=shape.unit,
    )
    return prefill(p, queries, shape.heads, None, [region], factor, blocks, out)


class Expansion:
    """The value matrices of the heads on their rows of `mixed`, in turn, one head later than it
    could be: so that the array need not wait for a head's last vector command.
    """

    def __init__(self, p: TileProgram, weights: list[Weights], mixed: Buffer, attended: Buffer):
        self.p, self.weights, self.mixed, self.attended = p, weights, mixed, attended
        # Streams that wait for room in the ring must leave the queue open for what frees it.
        streamed = weights[0].row is None
        self.ahead = min(len(weights), p.config.queue_depth // 2) if streamed else 0
        self.issued = self.ready = 0

    def fetch(self) -> None:
        """Starts the streams of the first matrices."""
        for weights in self.weights[: self.ahead]:
            self.p.stream(weights)

    def head_done(self) -> None:
        """Notes that a head's rows have been issued; issues the head before."""
        self.ready += 1
        self.issue(self.ready - 1)

    def issue(self, heads: int) -> None:
        """Issues the products of the first `heads` heads that are left."""
        count, width = self.attended.rows, self.attended.cols // len(self.weights)
        for h in range(self.issued, heads):
            self.p.matmul(
                row_range(self.mixed, h * count, count),
                self.weights[h],
                columns(self.attended, h * width, width),
                fetched=h < self.ahead,
            )
            self.issued = h + 1


def mla(
    p: TileProgram,
    shape: MlaShape,
    place: MlaPlace,
    x: Buffer,
    cosine: Buffer,
    sine: Buffer,
    position: int,
) -> Buffer:
    """Attention of T tokens behind `position` cached ones: [T, hidden] in FP32.

    x [T, hidden] are normed activations in BF16, cosine and sine [T, rope] the rows of
    `golden.kernels.mla.rope_rows`. T is at most acc_rows, and so are the heads if T is 1.
    """
    memory, bf16 = p.memory, Format.BF16
    count, heads, width = x.rows, shape.heads, shape.width
    q_a, kv_a = memory.buffer("q_a", count, shape.q_lora), memory.buffer("kv_a", count, width)
    p.matmul(x, place.q_a, q_a)
    p.matmul(x, place.kv_a, kv_a)

    fmt = place.q_rope.fmt
    q_latent = memory.buffer("q_latent", count, shape.q_lora, bf16, weight=fmt)
    norm(p, "q_norm", q_a, place.q_a_norm, shape.eps, q_latent)
    q_rope = memory.buffer("q_rope", count, heads * shape.rope)
    q_turned = memory.buffer("q_turned", count, heads * shape.rope)
    p.matmul(q_latent, place.q_rope, q_rope)

    key = memory.buffer("key", count, width, bf16)
    k_turned = memory.buffer("k_turned", count, shape.rope)
    latent, rest = columns(kv_a, 0, shape.kv_lora), columns(kv_a, shape.kv_lora, shape.rope)
    norm(p, "kv_norm", latent, place.kv_a_norm, shape.eps, columns(key, 0, shape.kv_lora))
    rotate(p, rest, cosine, sine, k_turned, columns(key, shape.kv_lora, shape.rope))

    nope = nope_products(p, shape, place.q_nope, q_latent)
    queries = memory.buffer("queries", heads * count, width, bf16, weight=bf16)
    rotate_heads(p, shape, q_rope, cosine, sine, q_turned, queries)
    for h, weights in enumerate(place.absorb):
        out = columns(row_range(queries, h * count, count), 0, shape.kv_lora)
        p.matmul(nope[h], weights, out)
        # A few at a time: a full queue would keep the sequencer from the next product.
        for t in range(-(-h * count // heads), -(-(h + 1) * count // heads)):
            place.region.append(p, key.row(t), key.row(t), position + t)

    mixed = memory.buffer("mixed", heads * count, shape.kv_lora, bf16, weight=place.expand[0].fmt)
    attended = memory.buffer("attended", count, heads * shape.v, bf16, weight=place.output.fmt)
    expansion = Expansion(p, place.expand, mixed, attended)
    expansion.fetch()
    attends = attends_of(p, shape, place.region, queries, position, mixed)
    done: Callable[[Attend], None] | None = None
    if count > 1:
        lasts = attends[len(attends) // heads - 1 :: len(attends) // heads]

        def done(attend: Attend) -> None:
            if any(attend is last for last in lasts):
                expansion.head_done()

    interleave(attends, done)
    expansion.issue(heads)
    projected = memory.buffer("projected", count, place.output.n)
    p.matmul(attended, place.output, projected)
    return projected
