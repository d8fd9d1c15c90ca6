# SPDX-License-Identifier: Apache-2.0
"""Buffers of a tile program: where they lie in tile SRAM, KV SRAM and the HBM slice.

Allocation is by hand-over: every buffer has its own place, so what a program leaves can be read
back.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from golden.formats import SPECS, Format, group_elements
from golden.hbm_layout import activation_rows, pack_lines, stream_bytes, weight_rows
from golden.kernels.trace import Stored
from hw.config import LINE_BYTES, TileConfig
from sim.errors import InputError


def align_up(value: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


def lines_per_group(act: Format, weight: Format) -> int:
    """SRAM lines that a group's activations take, at least 1."""
    return max(1, group_elements(weight) * SPECS[act].storage_bits // (8 * LINE_BYTES))


def widest(act: Format, *weights: Format) -> Format:
    """Of the formats of several matrices, that whose groups take most lines of the activations
    that all of them are multiplied with: a buffer aligned for it is aligned for all.
    """
    return max(weights, key=lambda weight: lines_per_group(act, weight))


def require(
    config: TileConfig, tiles: int = 1, *, sram: int = 0, kv: int = 0, hbm: int = 0
) -> None:
    """InputError when `tiles` tiles cannot hold these bits, however they are laid out.

    For before random data is made: sizes far beyond the tile would take the machine's memory.
    """
    for name, bits, held in (
        ("tile SRAM", sram, config.sram_bytes),
        ("KV SRAM", kv, config.kv_bytes),
        ("HBM slice", hbm, config.hbm_bytes),
    ):
        if bits > 8 * held * tiles:
            raise InputError(
                name,
                f"{-(-bits // 8)} bytes or more",
                f"the tile has {held} bytes" if tiles == 1 else f"{tiles} tiles have {held} each",
                "take smaller sizes or a larger --config",
            )


@dataclass(frozen=True)
class Buffer:
    """A matrix [rows, cols] of `fmt` in tile SRAM: row r starts at byte `address + r * stride`."""

    name: str
    address: int
    rows: int
    cols: int
    fmt: Format
    stride: int

    @property
    def stride_lines(self) -> int:
        return self.stride // LINE_BYTES

    @property
    def stride_words(self) -> int:
        return self.stride // 4

    def at(self, row: int = 0, col: int = 0) -> int:
        """Byte address of an element."""
        return self.address + row * self.stride + col * SPECS[self.fmt].storage_bits // 8

    def row(self, row: int) -> "Buffer":
        """One row as a buffer of its own."""
        return Buffer(f"{self.name}[{row}]", self.at(row), 1, self.cols, self.fmt, self.stride)


@dataclass(frozen=True)
class Weights:
    """A weight matrix [n, k] where MATMUL finds it: KV SRAM rows from `row` on, or a stream of
    `rows` rows from HBM address `hbm`.
    """

    n: int
    k: int
    fmt: Format
    rows: int
    groups: int  # KV rows of one column tile
    scaled: bool
    row: int | None = None
    hbm: int | None = None


class TileMemory:
    """Allocates a tile's memories and collects what the host puts there before the start."""

    def __init__(self, config: TileConfig):
        self.config = config
        self._sram = self._kv = self._hbm = 0
        self.sram_images: list[tuple[int, NDArray[np.uint8], NDArray[np.uint8]]] = []
        self.kv_images: list[tuple[int, NDArray[np.uint8], NDArray[np.uint8]]] = []
        self.hbm_image = bytearray()
        self.buffers: dict[str, Buffer] = {}
        self._shared: dict[str, tuple[int, int, str]] = {}  # address, bytes, last buffer

    def buffer(
        self,
        name: str,
        rows: int,
        cols: int,
        fmt: Format = Format.FP32,
        weight: Format | None = None,
        share: str | None = None,
        spread: bool = True,
    ) -> Buffer:
        """A new buffer, aligned for the vector engine and, if `weight` is given, as activations
        of a matmul with weights of that format; `spread` then pads its rows so that they start in
        different banks.

        Buffers of one `share` take the same place where they fit, each after the one before is no
        longer needed. Only the last of them is in `buffers`.
        """
        config = self.config
        bits = SPECS[fmt].storage_bits
        unit = max(LINE_BYTES, config.lanes * bits // 8)
        if weight is not None:
            unit = max(unit, LINE_BYTES * config.rows * lines_per_group(fmt, weight))
        size = -(-cols * bits // 8)
        stride = align_up(size, unit)
        if spread and weight is not None and rows > 1 and stride // unit % 2 == 0:
            # The array reads one piece of every row before it goes on: an odd stride keeps these
            # pieces in different banks, so that other clients find theirs free.
            stride += unit
        size = align_up(rows * stride, unit)
        address, room, previous = self._shared.get(share or "", (0, 0, ""))
        if size > room or address % unit:
            address, room = self._take_sram(name, size, unit), size
        else:
            self.buffers.pop(previous, None)
        made = Buffer(name, address, rows, cols, fmt, stride)
        if share:
            self._shared[share] = address, room, name
        self.buffers[name] = made
        return made

    def packed(
        self, name: str, rows: int, cols: int, fmt: Format, weight: Format | None = None
    ) -> Buffer:
        """A buffer whose rows follow each other without a gap, so that it is also one long row."""
        flat = self.buffer(name, 1, rows * cols, fmt, weight)
        made = Buffer(name, flat.address, rows, cols, fmt, cols * SPECS[fmt].storage_bits // 8)
        self.buffers[name] = made
        return made

    def part(self, name: str, buffer: Buffer, first: int, rows: int) -> Buffer:
        """`rows` rows of a buffer from row `first` on, by a name of their own."""
        made = Buffer(name, buffer.at(first), rows, buffer.cols, buffer.fmt, buffer.stride)
        self.buffers[name] = made
        return made

    def scalars(self, name: str, count: int) -> Buffer:
        """A vector of FP32 scalars, one per row of something else."""
        return self.buffer(name, 1, count)

    @property
    def sram_free(self) -> int:
        """Bytes of tile SRAM that are not taken."""
        return self.config.sram_bytes - self._sram

    def mark(self) -> int:
        """The tile SRAM that is taken so far, for `rewind`."""
        return self._sram

    def rewind(self, mark: int) -> None:
        """Frees the tile SRAM that was taken since `mark`; its buffers are forgotten."""
        self._sram = mark
        self.buffers = {name: b for name, b in self.buffers.items() if b.address < mark}
        self._shared = {name: s for name, s in self._shared.items() if s[0] < mark}

    def snapshot(self) -> "TileMemory":
        """The images as they are now, for a run that is one of several."""
        copy = TileMemory(self.config)
        copy.sram_images, copy.kv_images = list(self.sram_images), list(self.kv_images)
        return copy

    def forget(self) -> None:
        """Drops the images: a later run finds in memory what earlier ones left."""
        self.sram_images, self.kv_images = [], []

    def _take_sram(self, name: str, size: int, unit: int) -> int:
        address = align_up(self._sram, unit)
        if address + size > self.config.sram_bytes:
            raise InputError(
                "tile SRAM",
                f"{address + size} bytes (up to {name})",
                f"the tile has {self.config.sram_bytes} bytes",
                "take smaller sizes or a larger --config",
            )
        self._sram = address + size
        return address

    def kv_rows(self, name: str, rows: int) -> int:
        """First of `rows` new rows of the KV SRAM."""
        if self._kv + rows > self.config.stream_base:
            raise InputError(
                "KV SRAM",
                f"{self._kv + rows} rows (up to {name})",
                f"the tile has {self.config.stream_base} rows of {self.config.cols} lines",
                "take smaller sizes or a larger --config (gemm: or weights=hbm)",
            )
        first, self._kv = self._kv, self._kv + rows
        return first

    def hbm_bytes(self, name: str, size: int) -> int:
        """Address of `size` new bytes of the HBM slice."""
        if self._hbm + size > self.config.hbm_bytes:
            raise InputError(
                "HBM slice",
                f"{self._hbm + size} bytes (up to {name})",
                f"the simulated slice has {self.config.hbm_bytes} bytes",
                "take smaller sizes",
            )
        address, self._hbm = self._hbm, self._hbm + align_up(size, LINE_BYTES)
        return address

    def hbm(self, name: str, image: bytes) -> int:
        """Puts bytes into the HBM slice; their address."""
        address = self.hbm_bytes(name, len(image))
        self.hbm_image += b"\0" * (address - len(self.hbm_image)) + image
        return address

    def fill(self, buffer: Buffer, stored: Stored) -> Buffer:
        """Puts contents into a buffer before the start."""
        lines, scales = activation_rows(stored.codes, stored.scales, stored.fmt)
        raw = lines.reshape(len(lines), -1)
        size = -(-buffer.cols * SPECS[buffer.fmt].storage_bits // 8)
        if buffer.stride % LINE_BYTES == 0:
            for r in range(buffer.rows):
                self.sram_images.append((buffer.at(r) // LINE_BYTES, lines[r], scales[r]))
            return buffer
        flat = b"".join(raw[r, :size].tobytes() for r in range(buffer.rows))
        flat += b"\0" * (-len(flat) % LINE_BYTES)
        whole = np.frombuffer(flat, np.uint8).reshape(-1, LINE_BYTES)
        self.sram_images.append(
            (buffer.address // LINE_BYTES, whole, np.full(len(whole), 127, np.uint8))
        )
        return buffer

    def weights(
        self, name: str, codes: NDArray, scales: NDArray | None, fmt: Format, stream: bool
    ) -> Weights:
        """Packs weights [n, k] into KV SRAM rows or, `stream`, into the HBM slice."""
        n, k = codes.shape
        cols = self.config.cols
        lines, line_scales = weight_rows(codes, scales, fmt, cols)
        scaled = SPECS[fmt].scaled
        rows = len(lines) // cols
        groups = rows // -(-n // cols)
        if stream:
            image = pack_lines(lines, line_scales if scaled else None)
            return Weights(n, k, fmt, rows, groups, scaled, hbm=self.hbm(name, image))
        row = self.kv_rows(name, rows)
        self.kv_images.append((row * cols, lines, line_scales))
        return Weights(n, k, fmt, rows, groups, scaled, row=row)

    def traffic(self, weights: Weights) -> int:
        """HBM bytes of a streamed matrix, scales included."""
        return stream_bytes(weights.rows * self.config.cols, weights.scaled)
