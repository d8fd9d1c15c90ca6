# SPDX-License-Identifier: Apache-2.0
"""How weights, activations and their scales lie in HBM: the one place that packs them.

A *line* is 16 bytes. Unscaled data are its lines, one after the other. Scaled data are a sequence
of *runs*: one line of 16 scales (E8M0, scale i belongs to the run's data line i), then 16 data
lines. The last run is cut short: its unused scales are 0 and no line follows the last data line.
Inside a line, element 0 sits in the low bits.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from golden.formats import BLOCK, SCALE_ONE, SPECS, Format

LINE_BYTES = 16
RUN_LINES = 16  # data lines that share one line of scales


def stream_lines(n_lines: int, scaled: bool) -> int:
    """Lines that `n_lines` data lines take in HBM, lines of scales included."""
    return n_lines + (-(-n_lines // RUN_LINES) if scaled else 0)


def stream_bytes(n_lines: int, scaled: bool) -> int:
    """Bytes that `n_lines` data lines take in HBM, lines of scales included."""
    return LINE_BYTES * stream_lines(n_lines, scaled)


def pack_lines(lines: ArrayLike, scales: ArrayLike | None = None) -> bytes:
    """HBM image of data lines [n, 16] uint8, in runs if `scales` [n] uint8 are given."""
    data = np.asarray(lines, np.uint8)
    if data.ndim != 2 or data.shape[1] != LINE_BYTES:
        raise ValueError(f"lines must have shape [n, {LINE_BYTES}], not {data.shape!r}")
    if scales is None:
        return data.tobytes()
    codes = np.asarray(scales, np.uint8)
    if codes.shape != data.shape[:1]:
        raise ValueError(f"scales must have shape {data.shape[:1]!r}, not {codes.shape!r}")
    n_lines = len(data)
    runs = -(-n_lines // RUN_LINES)
    image = np.zeros((runs, 1 + RUN_LINES, LINE_BYTES), np.uint8)
    padded = np.zeros((runs * RUN_LINES, LINE_BYTES), np.uint8)
    padded[:n_lines] = data
    image[:, 1:] = padded.reshape(runs, RUN_LINES, LINE_BYTES)
    padded_scales = np.zeros(runs * RUN_LINES, np.uint8)
    padded_scales[:n_lines] = codes
    image[:, 0] = padded_scales.reshape(runs, RUN_LINES)
    return image.tobytes()[: stream_bytes(n_lines, True)]


def unpack_lines(
    image: bytes, n_lines: int, scaled: bool
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Data lines [n_lines, 16] and scales [n_lines] (127 if unscaled) of an HBM image."""
    need = stream_bytes(n_lines, scaled)
    if len(image) < need:
        raise ValueError(f"image must have at least {need} bytes, not {len(image)!r}")
    stored = np.frombuffer(image, np.uint8, need).reshape(-1, LINE_BYTES)
    if not scaled:
        return stored.copy(), np.full(n_lines, SCALE_ONE, np.uint8)
    index = np.arange(n_lines)
    run, position = np.divmod(index, RUN_LINES)
    return stored[index + run + 1], stored[run * (RUN_LINES + 1), position]


def pack_codes(codes: ArrayLike, fmt: Format) -> NDArray[np.uint8]:
    """Lines [..., L, 16] of element codes [..., K], padded with zero codes to whole lines."""
    spec = SPECS[fmt]
    array = np.asarray(codes)
    n_lines = -(-array.shape[-1] // spec.codes_per_line)
    padded = np.zeros((*array.shape[:-1], n_lines * spec.codes_per_line), np.uint32)
    padded[..., : array.shape[-1]] = array.astype(np.uint32) & ((1 << spec.bits) - 1)
    if spec.storage_bits == 4:
        stored = (padded[..., 0::2] | padded[..., 1::2] << 4).astype(np.uint8)
    else:
        stored = padded.astype(f"<u{spec.storage_bits // 8}").view(np.uint8)
    return stored.reshape(*array.shape[:-1], n_lines, LINE_BYTES)


def unpack_codes(lines: ArrayLike, fmt: Format) -> NDArray[np.uint32]:
    """Element codes [..., L * codes_per_line] of lines [..., L, 16], the inverse of packing."""
    spec = SPECS[fmt]
    array = np.ascontiguousarray(lines, np.uint8)
    shape = (*array.shape[:-2], array.shape[-2] * spec.codes_per_line)
    if spec.storage_bits == 4:
        return np.stack([array & 15, array >> 4], axis=-1).astype(np.uint32).reshape(shape)
    return array.view(f"<u{spec.storage_bits // 8}").astype(np.uint32).reshape(shape)


def _line_scales(scales: ArrayLike | None, fmt: Format, n_rows: int, k: int) -> NDArray[np.uint8]:
    """Scale [n_rows, L] of each line of rows of `k` elements."""
    spec = SPECS[fmt]
    n_lines = -(-k // spec.codes_per_line)
    if not spec.scaled:
        if scales is not None:
            raise ValueError(f"scales must be None for {spec.name}")
        return np.full((n_rows, n_lines), SCALE_ONE, np.uint8)
    codes = np.asarray(scales, np.uint8)
    if codes.shape != (n_rows, -(-k // BLOCK)):
        raise ValueError(
            f"scales must have shape {(n_rows, -(-k // BLOCK))!r}, not {codes.shape!r}"
        )
    return codes[:, np.arange(n_lines) * spec.codes_per_line // BLOCK]


def activation_rows(
    codes: ArrayLike, scales: ArrayLike | None, fmt: Format
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Lines [M, L, 16] and their scales [M, L] of activation codes [M, K], K-contiguous.

    `scales` [M, ceil(K / 32)] are the E8M0 codes of the blocks, None for BF16 and FP32.
    """
    array = np.asarray(codes)
    return pack_codes(array, fmt), _line_scales(scales, fmt, *array.shape)


def weight_rows(
    codes: ArrayLike, scales: ArrayLike | None, fmt: Format, cols: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Weight rows of a GEMM in array order: lines [rows * cols, 16] and scales [rows * cols].

    `codes` [N, K] are element codes, `scales` [N, ceil(K / 32)] the E8M0 codes of the blocks (None
    for BF16). There is one row of `cols` lines for each tile of `cols` columns and, inside it,
    each line of K (32 FP4, 16 eight-bit or 8 BF16 elements; MXINT8, which the array recodes to
    BF16, has two array groups in a line). Columns beyond N and elements beyond K are zero codes; a
    column beyond N has scale 127.
    """
    if cols < 1:
        raise ValueError(f"cols must be at least 1, not {cols!r}")
    if SPECS[fmt].native is None:
        raise ValueError(f"fmt must be a format of the array, not {SPECS[fmt].name!r}")
    lines, line_scales = activation_rows(codes, scales, fmt)
    n, n_lines, _ = lines.shape
    tiles = -(-n // cols)
    all_lines = np.zeros((tiles * cols, n_lines, LINE_BYTES), np.uint8)
    all_lines[:n] = lines
    all_scales = np.full((tiles * cols, n_lines), SCALE_ONE, np.uint8)
    all_scales[:n] = line_scales
    return (
        all_lines.reshape(tiles, cols, n_lines, LINE_BYTES).swapaxes(1, 2).reshape(-1, LINE_BYTES),
        all_scales.reshape(tiles, cols, n_lines).swapaxes(1, 2).reshape(-1),
    )
