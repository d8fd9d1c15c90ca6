# SPDX-License-Identifier: Apache-2.0
"""Bit-exact model of multi-head latent attention (DeepSeek R1, Kimi K2.5) in absorbed form.

One KV head of kv_lora + rope elements serves all heads: its keys are a token's normed latent and
rotated rope part, its values the latent alone. Queries are brought into the latent's space by each
head's key matrix, and the output out of it by its value matrix. Decode and prefill are one
function; one token attends with its heads as rows, several with their tokens as rows, per head.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.attention import attend, chunks, exponent_factor
from golden.kernels.kv import Held
from golden.kernels.layer import norm
from golden.kernels.moe import Matrix
from golden.kernels.prefill import attend_blocks, schedule
from golden.kernels.trace import Machine, Stored, Trace
from golden.models import Mla
from golden.reference.mla import MlaWeights
from golden.vector import vector


@dataclass(frozen=True)
class MlaShape:
    """Sizes of one tile's share: `heads` may be some of the model's.

    `ring` slots hold the cache (no window: the context must fit); `chunk`, `block` and `unit` are
    those of `golden.kernels.prefill.schedule`. `eps` is that of both inner norms.
    """

    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int
    scale: float
    eps: float
    ring: int
    chunk: int = 512
    block: int = 64
    unit: int = 64

    @classmethod
    def of(cls, model: Mla, ring: int, heads: int | None = None) -> "MlaShape":
        """A model's sizes, with all or some of its heads."""
        return cls(
            model.heads if heads is None else heads,
            model.q_lora,
            model.kv_lora,
            model.nope,
            model.rope,
            model.v,
            model.scale,
            model.norm_eps,
            ring,
        )

    @property
    def width(self) -> int:
        """Elements of a key and of a query."""
        return self.kv_lora + self.rope


@dataclass(frozen=True)
class MlaMatrices:
    """Weights as the array takes them, [out, in] each; norms are FP32.

    The rows of q_b are split by kind (`q_nope` [heads * nope, q_lora], `q_rope` [heads * rope,
    q_lora]), those of kv_b by head and kind: `absorb` [kv_lora, nope] is a head's key matrix
    transposed, `expand` [v, kv_lora] its value matrix.
    """

    q_a: Matrix
    q_a_norm: Float32
    q_nope: Matrix
    q_rope: Matrix
    kv_a: Matrix
    kv_a_norm: Float32
    absorb: list[Matrix]
    expand: list[Matrix]
    output: Matrix

    @classmethod
    def of(cls, weights: MlaWeights, shape: MlaShape, fmt: Format = Format.BF16) -> "MlaMatrices":
        """Rounds a model's weights to `fmt`."""
        heads, nope = shape.heads, shape.nope
        q_b = np.asarray(weights.q_b).reshape(heads, nope + shape.rope, -1)
        kv_b = np.asarray(weights.kv_b).reshape(heads, nope + shape.v, -1)
        return cls(
            Matrix.of(weights.q_a, fmt),
            np.asarray(weights.q_a_norm, np.float32),
            Matrix.of(q_b[:, :nope].reshape(heads * nope, -1), fmt),
            Matrix.of(q_b[:, nope:].reshape(heads * shape.rope, -1), fmt),
            Matrix.of(weights.kv_a, fmt),
            np.asarray(weights.kv_a_norm, np.float32),
            [Matrix.of(head[:nope].T, fmt) for head in kv_b],
            [Matrix.of(head[nope:], fmt) for head in kv_b],
            Matrix.of(weights.o, fmt),
        )


@dataclass
class MlaCache:
    """Keys [ring, kv_lora + rope] by slot, whose first kv_lora are the values, and the tokens
    appended so far.
    """

    keys: Held
    length: int = 0

    @classmethod
    def empty(
        cls,
        shape: MlaShape,
        fmt: Format = Format.BF16,
        latent_scale: int | None = None,
        rope_scale: int | None = None,
    ) -> "MlaCache":
        """An MX format takes an E8M0 code for the latent and one for the rope part.

        Then kv_lora must be a multiple of 32.
        """
        if latent_scale is None or rope_scale is None:
            return cls(Held.empty(shape.ring, shape.width, fmt))
        if shape.kv_lora % 32:
            raise ValueError(f"kv_lora must be a multiple of 32, not {shape.kv_lora!r}")
        blocks = shape.kv_lora // 32, -(-shape.rope // 32)
        scales = [latent_scale] * blocks[0] + [rope_scale] * blocks[1]
        return cls(Held.empty(shape.ring, shape.width, fmt, scales))

    def values(self, shape: MlaShape) -> Held:
        """The latents."""
        return self.keys.dims(shape.kv_lora)


def rope_rows(cos: NDArray, sin: NDArray) -> tuple[Float32, Float32]:
    """Interleaved tables [T, rope / 2] as rows [T, rope] of the rotation: cosines, signed sines.

    The pair of an element is at its index XOR 1: permute = 1 of a VECTOR command.
    """
    cosine, sine = np.asarray(cos, np.float32), np.asarray(sin, np.float32)
    signed = np.stack([-sine, sine], axis=-1)
    return np.repeat(cosine, 2, axis=-1), signed.reshape(cosine.shape[0], -1)


def rotate(
    machine: Machine, trace: Trace, name: str, x: Float32, cosine: Float32, sine: Float32
) -> Float32:
    """RoPE of rows x [M, rope] by rows [M, rope]; not yet stored. Buffer `name`: the first pass."""
    lanes = machine.lanes
    turned = trace.keep(name, vector(x, sine, lanes=lanes, permute=1, mul=True, s2="b")[0]).values
    return vector(x, cosine, turned, lanes=lanes, mul=True, s2="b", add=True, s3="d")[0]


def mla_queries(
    machine: Machine,
    trace: Trace,
    shape: MlaShape,
    weights: MlaMatrices,
    x: Stored,
    cosine: Float32,
    sine: Float32,
) -> NDArray[np.uint16]:
    """Absorbed queries [heads * T, kv_lora + rope] in BF16, head-major, of x [T, hidden]."""
    bf16 = Format.BF16
    heads, count = shape.heads, len(x.codes)
    q_a = trace.keep("q_a", weights.q_a.times(machine, x)).values
    normed = norm(machine, trace, "q_norm", q_a, weights.q_a_norm, shape.eps)
    compressed = trace.keep("q_latent", normed, bf16)
    nope = trace.keep("q_nope", weights.q_nope.times(machine, compressed), bf16).codes
    rope = trace.keep("q_rope", weights.q_rope.times(machine, compressed)).values
    rotated = rotate(
        machine,
        trace,
        "q_turned",
        rope.reshape(count * heads, shape.rope),
        np.repeat(cosine, heads, axis=0),
        np.repeat(sine, heads, axis=0),
    ).reshape(count, heads, shape.rope)
    queries = np.zeros((heads, count, shape.width), np.float32)
    for h, matrix in enumerate(weights.absorb):
        part = Stored(nope[:, h * shape.nope : (h + 1) * shape.nope], bf16)
        queries[h, :, : shape.kv_lora] = matrix.times(machine, part)
    queries[:, :, shape.kv_lora :] = rotated.swapaxes(0, 1)
    return trace.keep("queries", queries.reshape(heads * count, -1), bf16).codes


def mla_key(
    machine: Machine,
    trace: Trace,
    shape: MlaShape,
    weights: MlaMatrices,
    x: Stored,
    cosine: Float32,
    sine: Float32,
) -> Float32:
    """Latents and rotated rope parts [T, kv_lora + rope] of x [T, hidden], not yet stored."""
    kv_a = trace.keep("kv_a", weights.kv_a.times(machine, x)).values
    latent, rope = kv_a[:, : shape.kv_lora], kv_a[:, shape.kv_lora :]
    normed = norm(machine, trace, "kv_norm", latent, weights.kv_a_norm, shape.eps)
    return np.concatenate([normed, rotate(machine, trace, "k_turned", rope, cosine, sine)], axis=1)


def mla(
    machine: Machine,
    trace: Trace,
    shape: MlaShape,
    weights: MlaMatrices,
    cache: MlaCache,
    x: Float32,
    cos: NDArray,
    sin: NDArray,
) -> Float32:
    """Attention of T new tokens, normed activations x [T, hidden]: [T, hidden] in FP32.

    The tokens follow those in `cache`, which is updated. cos, sin: tables [T, rope / 2] of their
    positions. ValueError when `ring` cannot hold them.

    Buffers, [rows, cols], FP32 if nothing is said:

        x           [T, hidden] BF16
        q_a         [T, q_lora]; may be one product with kv_a
        q_norm.*    squares, inverse [1, T]
        q_latent    [T, q_lora] BF16
        q_nope      [T, heads * nope] BF16, as the product is written
        q_rope      [T, heads * rope]
        q_turned    [T * heads, rope]: row t * heads + h
        kv_a        [T, kv_lora + rope]
        kv_norm.*   squares, inverse [1, T]
        k_turned    [T, rope]
        key         [T, kv_lora + rope] in the cache's format; its first kv_lora are the value
        queries     [heads * T, kv_lora + rope] BF16: row h * T + t; the first kv_lora columns as
                    the absorbing product of head h is written, the others as the rotation is
        mixed       [heads * T, kv_lora] BF16, rows as in queries
        attended    [T, heads * v] BF16: columns h * v and on as head h's product is written
        projected   [T, hidden]

    and those of `attend` without sinks: under `g0` with all heads as rows for T = 1, else under
    `h{h}.b{b}` as `attend_blocks` says.
    """
    bf16 = Format.BF16
    count, heads = len(x), shape.heads
    if cache.length + count > shape.ring:
        raise ValueError(f"ring must hold {cache.length + count} tokens, not {shape.ring!r}")
    given = trace.keep("x", x, bf16)
    cosine, sine = rope_rows(cos, sin)
    queries = mla_queries(machine, trace, shape, weights, given, cosine, sine)
    key = mla_key(machine, trace, shape, weights, given, cosine, sine)
    position, cache.length = cache.length, cache.length + count
    codes = cache.keys.put(np.arange(position, cache.length), key)
    scales = cache.keys.keys(position, cache.length)[1]
    trace.record("key", Stored(codes, cache.keys.fmt, scales))

    values, factor = cache.values(shape), exponent_factor(shape.scale)
    if count == 1:
        parts = chunks(cache.length, np.ones(cache.length, bool), shape.chunk)
        rows = attend(machine, trace, "g0", queries, cache.keys, values, None, factor, parts)
    else:
        blocks = schedule(
            position,
            count,
            ring=shape.ring,
            window=None,
            size=shape.chunk,
            block=shape.block,
            unit=shape.unit,
        )
        out = attend_blocks(
            machine, trace, queries, heads, [cache.keys], [values], None, factor, blocks
        )
        rows = out.swapaxes(0, 1).reshape(heads * count, -1)
    mixed = trace.keep("mixed", rows, bf16).codes
    heads_out = [
        matrix.times(machine, Stored(mixed[h * count : (h + 1) * count], bf16))
        for h, matrix in enumerate(weights.expand)
    ]
    attended = trace.keep("attended", np.concatenate(heads_out, axis=1), bf16)
    return trace.keep("projected", weights.output.times(machine, attended)).values
