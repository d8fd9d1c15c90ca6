# SPDX-License-Identifier: Apache-2.0
"""How a KV cache lies in the KV SRAM: the one place that packs it.

The SRAM has `cols` banks of lines; a line holds 8 BF16 values, element 0 in the low bits, and a row
is one line in every bank. Both regions come out of the array's row reads as stationary weights:

- keys are banked by slot: a row holds the same 8 dimensions of `cols` neighbouring slots, and the
  head_dim / 8 pieces of a key lie in as many consecutive rows of one bank;
- values are banked by dimension: a line holds one dimension of 8 neighbouring slots, and a group of
  8 slots takes ceil(head_dim / cols) rows.

Rows count from the first row of the region. What was never appended is undefined.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

LINE_ELEMENTS = 8  # BF16 values of a line


class Place(NamedTuple):
    """Where elements lie: row of the region, bank, and element of the line, of equal shapes."""

    row: NDArray[np.int64]
    bank: NDArray[np.int64]
    element: NDArray[np.int64]


def _check(head_dim: int, cols: int) -> None:
    if head_dim < LINE_ELEMENTS or head_dim % LINE_ELEMENTS:
        raise ValueError(f"head_dim must be a multiple of {LINE_ELEMENTS}, not {head_dim!r}")
    if cols < 1 or cols & (cols - 1):
        raise ValueError(f"cols must be a power of two, not {cols!r}")


def key_rows(slots: int, head_dim: int, cols: int) -> int:
    """Rows of the key region of a ring of `slots`."""
    _check(head_dim, cols)
    return -(-slots // cols) * (head_dim // LINE_ELEMENTS)


def value_rows(slots: int, head_dim: int, cols: int) -> int:
    """Rows of the value region of a ring of `slots`."""
    _check(head_dim, cols)
    return -(-slots // LINE_ELEMENTS) * -(-head_dim // cols)


def key_place(slot: ArrayLike, dim: ArrayLike, head_dim: int, cols: int) -> Place:
    """Places of key elements (slot, dim), which broadcast."""
    _check(head_dim, cols)
    s, d = np.broadcast_arrays(np.asarray(slot, np.int64), np.asarray(dim, np.int64))
    row = s // cols * (head_dim // LINE_ELEMENTS) + d // LINE_ELEMENTS
    return Place(row, s % cols, d % LINE_ELEMENTS)


def value_place(slot: ArrayLike, dim: ArrayLike, head_dim: int, cols: int) -> Place:
    """Places of value elements (slot, dim), which broadcast."""
    _check(head_dim, cols)
    s, d = np.broadcast_arrays(np.asarray(slot, np.int64), np.asarray(dim, np.int64))
    row = s // LINE_ELEMENTS * -(-head_dim // cols) + d // cols
    return Place(row, d % cols, s % LINE_ELEMENTS)


def _pack(codes: ArrayLike, rows: int, place: Place, cols: int) -> NDArray[np.uint16]:
    lines = np.zeros((rows, cols, LINE_ELEMENTS), np.uint16)
    lines[place] = np.asarray(codes, np.uint16)
    return lines


def _grid(codes: ArrayLike) -> tuple[int, int, NDArray[np.int64], NDArray[np.int64]]:
    shape = np.shape(codes)
    if len(shape) != 2:
        raise ValueError(f"codes must have shape [slots, head_dim], not {shape!r}")
    slots, head_dim = shape
    return slots, head_dim, np.arange(slots)[:, None], np.arange(head_dim)[None]


def pack_keys(codes: ArrayLike, cols: int) -> NDArray[np.uint16]:
    """Key region [rows, cols, 8] of BF16 codes [slots, head_dim]; 0 where no key lies."""
    slots, head_dim, s, d = _grid(codes)
    rows = key_rows(slots, head_dim, cols)
    return _pack(codes, rows, key_place(s, d, head_dim, cols), cols)


def pack_values(codes: ArrayLike, cols: int) -> NDArray[np.uint16]:
    """Value region [rows, cols, 8] of BF16 codes [slots, head_dim]; 0 where no value lies."""
    slots, head_dim, s, d = _grid(codes)
    rows = value_rows(slots, head_dim, cols)
    return _pack(codes, rows, value_place(s, d, head_dim, cols), cols)
