# SPDX-License-Identifier: Apache-2.0
"""What attention costs in accuracy: bit-exact kernels against float64, over contexts and formats.

Queries, keys and values are random, normal, and scaled so that scores have a standard deviation of
SPREAD: weights of a softmax that is neither flat nor a choice of one token. The float64 reference
has them as they are; the kernel rounds queries and cache, which is most of the error. Tokens of
real models are less even, so this compares formats and lengths, and predicts no model's quality.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from golden.bounds import attention_bound
from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.attention import attention, chunks
from golden.kernels.kv import Held, kv_scale
from golden.kernels.trace import Machine, Trace
from golden.models import MODELS, Gqa
from golden.reference.attention import attention_core

SPREAD = 2.0
HEADS = 8  #: query heads on one KV head: GPT-OSS's group, and some of MLA's
CHUNK = 512
CONTEXTS = (128, 512, 2048, 8192)
FORMATS = (Format.BF16, Format.MXFP8_E4M3)
MACHINE = Machine(rows=32, lanes=64)


@dataclass(frozen=True)
class Case:
    """Queries [heads, D], keys [context, D] and values [context, Dv] of one KV head, unrounded."""

    queries: Float32
    keys: Float32
    values: Float32
    sinks: Float32 | None
    scale: float


@dataclass(frozen=True)
class Accuracy:
    """Errors of one case, relative to the root mean square of the float64 output.

    `error` (root mean square) and `largest` are against float64 on unrounded inputs. `kernel`, the
    largest, and its worst-case `bound` (None: not computed) are against float64 on the cache as it
    is stored.
    """

    model: str
    context: int
    fmt: Format
    error: float
    largest: float
    kernel: float
    bound: float | None


def case(model: str, context: int, seed: int = 0) -> Case:
    """Random attention of a model's head sizes: GPT-OSS with sinks, MLA in absorbed form."""
    rng = np.random.default_rng([seed, context, len(model)])
    config = MODELS[model].attention

    def normal(*shape: int) -> Float32:
        return rng.standard_normal(shape).astype(np.float32)

    width = config.head_dim if isinstance(config, Gqa) else config.kv_lora + config.rope
    queries = normal(HEADS, width) * np.float32(SPREAD / (config.scale * np.sqrt(width)))
    keys = normal(context, width)
    if isinstance(config, Gqa):
        return Case(queries, keys, normal(context, width), normal(HEADS), config.scale)
    return Case(queries, keys, keys[:, : config.kv_lora], None, config.scale)


def held(tokens: Float32, fmt: Format) -> Held:
    """Tokens [context, D] in a cache, whose scale fits their largest magnitude."""
    if fmt is Format.BF16:
        return Held.of(tokens)
    return Held.of(tokens, fmt, kv_scale(float(np.abs(tokens).max()), fmt))


def measure(
    model: str, context: int, fmt: Format, seed: int = 0, bounded: bool = False
) -> Accuracy:
    """One row; `bounded` computes the bound too, which takes longer than the kernel."""
    given = case(model, context, seed)
    valid = np.ones(context, bool)
    keys = held(given.keys, fmt)
    values = held(given.values, fmt)
    found = attention(
        MACHINE,
        Trace(),
        given.queries,
        [keys],
        [values],
        given.sinks,
        given.scale,
        chunks(context, valid, CHUNK),
    )

    def reference(k: NDArray, v: NDArray) -> NDArray[np.float64]:
        return attention_core(
            given.queries[None], k[:, None], v[:, None], valid[None], given.scale, given.sinks
        )[0]

    exact = reference(given.keys, given.values)
    unit = float(np.sqrt(np.mean(exact**2)))
    error = found - exact
    kernel = np.abs(found - reference(keys.values, values.values))
    bound = None
    if bounded:
        _, limit = attention_bound(given.queries, [keys], [values], given.sinks, given.scale, valid)
        if np.any(kernel > limit):
            raise ValueError(f"{model} at {context} tokens must be within its bound, and is not")
        bound = float(limit.max()) / unit
    return Accuracy(
        model,
        context,
        fmt,
        float(np.sqrt(np.mean(error**2))) / unit,
        float(np.abs(error).max()) / unit,
        float(kernel.max()) / unit,
        bound,
    )


def row(bf16: Accuracy, e4m3: Accuracy) -> str:
    """A row of the table in docs/numerics.md: the same case with the cache in both formats."""
    figures = [f"{a.error:.1e} | {a.largest:.1e}" for a in (bf16, e4m3)]
    own = max(bf16.kernel, e4m3.kernel)
    return f"| {bf16.model} | {bf16.context} | {' | '.join(figures)} | {own:.1e} |"


def table(contexts: Sequence[int] = CONTEXTS, bounded: bool = False) -> list[str]:
    """The rows of all models: some 20 seconds for CONTEXTS, several times that with bounds."""
    return [
        row(*(measure(model, context, fmt, bounded=bounded) for fmt in FORMATS))
        for model in MODELS
        for context in contexts
    ]
