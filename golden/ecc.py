# SPDX-License-Identifier: Apache-2.0
"""The code over a line of the KV SRAM: single-error correction, double-error detection.

A Hsiao code (M. Y. Hsiao, "A Class of Optimal Minimum Odd-weight-column SEC-DED Codes", 1970):
every column of the check matrix is different and has an odd number of ones. So a syndrome of one
flipped bit is that bit's column, and a syndrome of two has an even number of ones, which is no
column.

A code word is 145 bits: the line in bits 127..0, its scale in bits 135..128, check bits in bits
144..136. A word of zeros only is a code word. Bits are the last axis of arrays of 0 and 1, the
lowest first.
"""

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

DATA_BITS = 136  # a line of 128 bits and its scale of 8
CHECK_BITS = 9
CODE_BITS = DATA_BITS + CHECK_BITS


def _columns() -> tuple[int, ...]:
    """Columns of the check matrix, by bit of the code word.

    Data: all columns of three ones, ascending; then columns of five ones, each time the one that
    leaves the check bits' counts of ones as even as possible (least sum of squares), the lowest of
    equals. Check bits: one one each. Every check bit then covers 56 or 57 data bits.
    """

    def of_weight(ones: int) -> list[int]:
        return sorted(sum(1 << i for i in at) for at in combinations(range(CHECK_BITS), ones))

    def uneven(counts: NDArray[np.int64], column: int) -> int:
        return int(((counts + [column >> i & 1 for i in range(CHECK_BITS)]) ** 2).sum())

    chosen, left = of_weight(3), of_weight(5)
    counts = np.array([sum(c >> i & 1 for c in chosen) for i in range(CHECK_BITS)])
    while len(chosen) < DATA_BITS:
        best = min(left, key=lambda column: (uneven(counts, column), column))
        left.remove(best)
        chosen.append(best)
        counts += [best >> i & 1 for i in range(CHECK_BITS)]
    return (*chosen, *(1 << i for i in range(CHECK_BITS)))


COLUMNS = _columns()
_MATRIX = np.array([[c >> i & 1 for i in range(CHECK_BITS)] for c in COLUMNS], np.uint8)


class Decoded(NamedTuple):
    """Data bits [..., 136]; whether one bit was corrected; whether more are wrong than that.

    Data of a word that is not correctable is as it was read.
    """

    data: NDArray[np.uint8]
    corrected: NDArray[np.bool_]
    double: NDArray[np.bool_]


def _bits(values: ArrayLike, count: int) -> NDArray[np.uint8]:
    bits = np.asarray(values, np.uint8)
    if not bits.ndim or bits.shape[-1] != count:
        raise ValueError(f"words must have {count} bits, not shape {bits.shape!r}")
    return bits


def to_bits(value: int, count: int) -> NDArray[np.uint8]:
    """The low `count` bits of a number."""
    return np.array([value >> i & 1 for i in range(count)], np.uint8)


def to_int(bits: ArrayLike) -> int:
    """The number of one word's bits."""
    return sum(int(bit) << i for i, bit in enumerate(np.asarray(bits)))


def syndrome(code: ArrayLike) -> NDArray[np.int64]:
    """Syndromes of code words [..., 145]."""
    bits = _bits(code, CODE_BITS)
    parities = bits.astype(np.int64) @ _MATRIX & 1
    return parities @ (1 << np.arange(CHECK_BITS))


def encode(data: ArrayLike) -> NDArray[np.uint8]:
    """Code words [..., 145] of data bits [..., 136]."""
    bits = _bits(data, DATA_BITS)
    check = bits.astype(np.int64) @ _MATRIX[:DATA_BITS] & 1
    return np.concatenate([bits, check.astype(np.uint8)], axis=-1)


def decode(code: ArrayLike) -> Decoded:
    """Data of code words [..., 145] with at most one flipped bit each, and what was found.

    Three and more flips may look like one.
    """
    bits = _bits(code, CODE_BITS)
    found = syndrome(bits)
    at = found[..., None] == np.array(COLUMNS)
    corrected = at.any(axis=-1)
    data = bits[..., :DATA_BITS] ^ at[..., :DATA_BITS].astype(np.uint8)
    return Decoded(data, corrected, (found != 0) & ~corrected)
