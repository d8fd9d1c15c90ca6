# SPDX-License-Identifier: Apache-2.0
"""How a KV cache lies in the KV SRAM: the one place that packs it.

The SRAM has `cols` banks of lines; a line holds E elements, 8 of BF16 or 16 of MXFP8 E4M3, element
0 in the low bits, and a row is one line in every bank. Both regions come out of the array's row
reads as stationary weights:

- keys are banked by slot: a row holds the same E dimensions of `cols` neighbouring slots, and the
  head_dim / E pieces of a key lie in as many consecutive rows of one bank;
- values are banked by dimension: a line holds one dimension of E neighbouring slots, and a group of
  E slots takes ceil(head_dim / cols) rows.

Rows count from the first row of the region. head_dim is a multiple of E. An element that was never
appended is zero when its line has a value and undefined otherwise.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from golden.formats import LINE_BITS, SPECS, Format

FORMATS = (Format.BF16, Format.MXFP8_E4M3)
LINE_ELEMENTS = 8  # BF16 values of a line


class Place(NamedTuple):
    """Where elements lie: row of the region, bank, and element of the line, of equal shapes."""

    row: NDArray[np.int64]
    bank: NDArray[np.int64]
    element: NDArray[np.int64]


def line_elements(fmt: Format = Format.BF16) -> int:
    """Elements of a line."""
    if fmt not in FORMATS:
        raise ValueError(f"fmt must be one of {', '.join(f.name for f in FORMATS)}, not {fmt!r}")
    return LINE_BITS // SPECS[fmt].storage_bits


def _check(head_dim: int, cols: int, fmt: Format) -> int:
    """Elements of a line, once sizes are checked."""
    elements = line_elements(fmt)
    if head_dim < elements or head_dim % elements:
        raise ValueError(f"head_dim must be a multiple of {elements}, not {head_dim!r}")
    if cols < 1 or cols & (cols - 1):
        raise ValueError(f"cols must be a power of two, not {cols!r}")
    return elements


def key_rows(slots: int, head_dim: int, cols: int, fmt: Format = Format.BF16) -> int:
    """Rows of the key region of a ring of `slots`."""
    elements = _check(head_dim, cols, fmt)
    return -(-slots // cols) * (head_dim // elements)


def value_rows(slots: int, head_dim: int, cols: int, fmt: Format = Format.BF16) -> int:
    """Rows of the value region of a ring of `slots`."""
    elements = _check(head_dim, cols, fmt)
    return -(-slots // elements) * -(-head_dim // cols)


def key_place(
    slot: ArrayLike, dim: ArrayLike, head_dim: int, cols: int, fmt: Format = Format.BF16
) -> Place:
    """Places of key elements (slot, dim), which broadcast."""
    elements = _check(head_dim, cols, fmt)
    s, d = np.broadcast_arrays(np.asarray(slot, np.int64), np.asarray(dim, np.int64))
    row = s // cols * (head_dim // elements) + d // elements
    return Place(row, s % cols, d % elements)


def value_place(
    slot: ArrayLike, dim: ArrayLike, head_dim: int, cols: int, fmt: Format = Format.BF16
) -> Place:
    """Places of value elements (slot, dim), which broadcast."""
    elements = _check(head_dim, cols, fmt)
    s, d = np.broadcast_arrays(np.asarray(slot, np.int64), np.asarray(dim, np.int64))
    row = s // elements * -(-head_dim // cols) + d // cols
    return Place(row, d % cols, s % elements)


def _pack(codes: ArrayLike, rows: int, place: Place, cols: int, fmt: Format) -> NDArray:
    dtype = np.uint16 if SPECS[fmt].storage_bits == 16 else np.uint8
    lines = np.zeros((rows, cols, line_elements(fmt)), dtype)
    lines[place] = np.asarray(codes, dtype)
    return lines


def _grid(codes: ArrayLike) -> tuple[int, int, NDArray[np.int64], NDArray[np.int64]]:
    shape = np.shape(codes)
    if len(shape) != 2:
        raise ValueError(f"codes must have shape [slots, head_dim], not {shape!r}")
    slots, head_dim = shape
    return slots, head_dim, np.arange(slots)[:, None], np.arange(head_dim)[None]


def pack_keys(codes: ArrayLike, cols: int, fmt: Format = Format.BF16) -> NDArray:
    """Key region [rows, cols, E] of codes [slots, head_dim], 16-bit for BF16, else 8-bit; 0 where
    no key lies.
    """
    slots, head_dim, s, d = _grid(codes)
    rows = key_rows(slots, head_dim, cols, fmt)
    return _pack(codes, rows, key_place(s, d, head_dim, cols, fmt), cols, fmt)


def pack_values(codes: ArrayLike, cols: int, fmt: Format = Format.BF16) -> NDArray:
    """Value region [rows, cols, E] of codes [slots, head_dim], 16-bit for BF16, else 8-bit; 0 where
    no value lies.
    """
    slots, head_dim, s, d = _grid(codes)
    rows = value_rows(slots, head_dim, cols, fmt)
    return _pack(codes, rows, value_place(s, d, head_dim, cols, fmt), cols, fmt)
