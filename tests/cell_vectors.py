# SPDX-License-Identifier: Apache-2.0
"""Random vectors for one cell that reach its corners."""

from itertools import product

import numpy as np

from golden.formats import DIGITS, LANES, NATIVE_FORMAT, SCALE_NAN, SPECS, Native, fields
from golden.matmul import cell

NATIVE_PAIRS = [(a, w) for a, w in product(Native, Native) if DIGITS[a] >= DIGITS[w]]


def random_codes(rng: np.random.Generator, native: Native, shape: tuple[int, int]) -> np.ndarray:
    """Codes [count, N]: raw bits, near or far exponents, zeros, largest magnitudes, cancelling
    pairs.

    Cancelling pairs share a large magnitude while the other elements lie at any distance below
    them, so that the edge of the window of exponents decides the sum.
    """
    spec = SPECS[NATIVE_FORMAT[native]]
    raw = rng.integers(0, 1 << spec.bits, shape)
    top_field = spec.max_code >> spec.mantissa_bits
    mantissa = raw & ((1 << spec.mantissa_bits) - 1)
    sign = raw & (1 << (spec.bits - 1))
    near = rng.integers(0, top_field + 1, (shape[0], 1))

    def limited(field: np.ndarray) -> np.ndarray:
        code = np.clip(field, 0, top_field) << spec.mantissa_bits | mantissa
        return sign | np.minimum(code, spec.max_code)

    clustered = limited(near + rng.integers(-2, 3, shape))
    far = limited(near - rng.integers(0, 40, shape))
    finite = limited(rng.integers(0, top_field + 1, shape))
    top = sign | spec.max_code
    sparse = np.where(rng.random(shape) < 0.7, sign, finite)
    cancelling = limited(near - rng.integers(12, 20, shape))
    cancelling[:, 0] = limited(np.broadcast_to(near, shape))[:, 0]
    cancelling[:, 1] = cancelling[:, 0]
    kind = rng.integers(0, 8, (shape[0], 1))
    return np.select(
        [kind == 0, kind == 1, kind == 2, kind == 3, kind == 4, kind == 5],
        [raw, top, sparse, finite, far, clustered],
        cancelling,
    )


def random_psum(rng: np.random.Generator, count: int) -> np.ndarray:
    """FP32 bit patterns (uint32) of all kinds, with +-0, +-infinity and NaN."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    special = np.array(
        [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 1, 0x807FFFFF, 0x7F7FFFFF],
        np.uint32,
    )
    mild = (rng.standard_normal(count) * 100).astype(np.float32).view(np.uint32)
    kind = rng.integers(0, 4, count)
    return np.select([kind == 0, kind == 1], [special[rng.integers(0, 9, count)], bits], mild)


def cell_vectors(
    rng: np.random.Generator, act: Native, weight: Native, count: int
) -> tuple[np.ndarray, ...]:
    """Activation and weight codes [count, N], their scales, psum bits and NaN flags [count]."""
    n = LANES // (DIGITS[act] * DIGITS[weight])
    a, w = random_codes(rng, act, (count, n)), random_codes(rng, weight, (count, n))
    # Some slices whose first two products cancel exactly.
    opposite = rng.integers(0, 2, count) == 0
    a_sign = 1 << (SPECS[NATIVE_FORMAT[act]].bits - 1)
    a[:, 1] = np.where(opposite, a[:, 0] ^ a_sign, a[:, 1])
    w[:, 1] = np.where(opposite, w[:, 0], w[:, 1])
    wild = rng.integers(0, 4, (2, count)) == 0
    scale_a, scale_w = np.where(
        wild, rng.integers(0, 256, (2, count)), rng.integers(100, 150, (2, count))
    )
    # A third of the partial sums nearly cancel the dot product, some exactly.
    zero, clear = np.zeros(count, np.float32), np.zeros(count, bool)
    minus = -cell(act, weight, a, w, scale_a, scale_w, clear, zero)
    step = rng.integers(-3, 4, count).astype(np.uint32)
    close = np.where(np.isfinite(minus), minus.view(np.uint32) + step, 0).astype(np.uint32)
    psum = np.where(rng.integers(0, 3, count) == 0, close, random_psum(rng, count))
    nan = fields(NATIVE_FORMAT[act], a)[2].any(axis=1) | (scale_a == SCALE_NAN)
    nan |= fields(NATIVE_FORMAT[weight], w)[2].any(axis=1) | (scale_w == SCALE_NAN)
    return a, w, scale_a, scale_w, psum.astype(np.uint32), nan


def packed_vectors(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors [count, 40] bytes for `tests.designs.cell_bank` and the psum bits [count] they
    give.

    All native pairs in random order, each slice of the group in turn, the rest of the group
    random; some slices are empty.
    """
    vectors = np.zeros((count, 40), np.uint8)
    want = np.zeros(count, np.uint32)
    pair = rng.integers(0, len(NATIVE_PAIRS), count)
    for number, (act, weight) in enumerate(NATIVE_PAIRS):
        chosen = np.flatnonzero(pair == number)
        total = len(chosen)
        a, w, scale_a, scale_w, psum, _ = cell_vectors(rng, act, weight, total)
        n, parts = a.shape[1], DIGITS[act]
        j = rng.integers(0, parts, total)
        group = random_codes(rng, weight, (total, n * parts)).reshape(total, parts, n)
        group[np.arange(total), j] = w
        nan_a = fields(NATIVE_FORMAT[act], a)[2].any(axis=1) | (scale_a == SCALE_NAN)
        nan_w = fields(NATIVE_FORMAT[weight], w)[2].any(axis=1) | (scale_w == SCALE_NAN)
        empty = rng.integers(0, 16, total) == 0
        nothing = np.where(empty[:, None], 0, a)
        flag = (nan_a | nan_w) & ~empty
        value = cell(act, weight, nothing, w, scale_a, scale_w, flag, psum.view(np.float32))
        want[chosen] = value.view(np.uint32)
        vectors[chosen, :16] = line_of(np.repeat(a, DIGITS[weight], axis=1), act)
        vectors[chosen, 16:32] = line_of(group.reshape(total, -1), weight)
        vectors[chosen, 32:36] = psum[:, None].view(np.uint8)
        vectors[chosen, 36], vectors[chosen, 37] = scale_a, scale_w
        index = j << 1 if parts == 2 else j
        vectors[chosen, 38] = act | index << 2 | nan_a << 4 | empty << 5 | weight << 6
        vectors[chosen, 39] = nan_w
    return vectors, want


def line_of(codes: np.ndarray, native: Native) -> np.ndarray:
    """128-bit lines [count, 16] bytes of codes that fill them, the first in the low bits."""
    bits = SPECS[NATIVE_FORMAT[native]].bits
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    dtype = "<u2" if bits == 16 else np.uint8
    return np.ascontiguousarray(codes.astype(dtype)).view(np.uint8)
