# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one KV head as the KV SRAM holds them: BF16, or MX with fixed scales.

The scales are powers of two that the host chooses from the largest magnitudes it expects; they do
not change while the cache lives, so that a token can be appended without touching others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from golden.formats import BLOCK, SCALE_ONE, SPECS, Format, decode
from golden.quantise import blocks_of, dequantise, expand_scales, quantise_fixed
from golden.vector import store


def kv_scale(largest: float, fmt: Format = Format.MXFP8_E4M3) -> int:
    """E8M0 code of the least power of two with which no magnitude up to `largest` saturates."""
    if not 0 < largest < np.inf:
        raise ValueError(f"largest must be positive and finite, not {largest!r}")
    fraction, exponent = np.frexp(largest / float(decode(fmt, SPECS[fmt].max_code)))
    return int(np.clip(exponent - (fraction == 0.5) + SCALE_ONE, 0, 2 * SCALE_ONE))


@dataclass(frozen=True)
class Held:
    """Codes [slots, D] and, for an MX format, one E8M0 code per 32 elements of D: `scales`
    [ceil(D / 32)], the same for every slot.
    """

    codes: NDArray
    fmt: Format = Format.BF16
    scales: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        wanted = (blocks_of(self.codes.shape[1]),) if SPECS[self.fmt].scaled else None
        found = None if self.scales is None else self.scales.shape
        if found != wanted:
            raise ValueError(f"scales must have shape {wanted}, not {found}")

    @classmethod
    def of(
        cls, values: ArrayLike, fmt: Format = Format.BF16, scale: int | Sequence[int] | None = None
    ) -> "Held":
        """FP32 values [slots, D] as they are stored; `scale` for all of D or per 32 elements."""
        given = np.asarray(values, np.float32)
        slots, dim = given.shape
        empty = cls.empty(slots, dim, fmt, scale)
        empty.put(slice(None), given)
        return empty

    @classmethod
    def empty(
        cls,
        slots: int,
        dim: int,
        fmt: Format = Format.BF16,
        scale: int | Sequence[int] | None = None,
    ) -> "Held":
        """Zeros, for `put`."""
        codes = np.zeros((slots, dim), np.uint16 if fmt is Format.BF16 else np.uint8)
        if scale is None:
            return cls(codes, fmt)
        scales = np.broadcast_to(np.asarray(scale, np.uint8), (blocks_of(dim),)).copy()
        return cls(codes, fmt, scales)

    def encode(self, values: ArrayLike) -> NDArray:
        """Codes [n, D] of FP32 values [n, D] in this format and with these scales."""
        given = np.atleast_2d(np.asarray(values, np.float32))
        if self.scales is None:
            return store(given, self.fmt)[0].astype(self.codes.dtype)
        codes = np.zeros(given.shape, self.codes.dtype)
        for block, scale in enumerate(self.scales):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            codes[:, part] = quantise_fixed(given[:, part], self.fmt, int(scale))[0]
        return codes

    def put(self, slots: int | slice | NDArray, values: ArrayLike) -> NDArray:
        """Appends FP32 values [n, D] in `slots`; the codes [n, D]."""
        codes = self.encode(values)
        self.codes[slots] = codes
        return codes

    @property
    def values(self) -> NDArray[np.float64]:
        """[slots, D]: what is held, exactly."""
        return dequantise(self.codes, self._rows(len(self.codes)), self.fmt)

    def dims(self, stop: int) -> "Held":
        """The first `stop` elements of every slot (a multiple of 32 if scaled, or all)."""
        if self.scales is None:
            return Held(self.codes[:, :stop], self.fmt)
        if stop % BLOCK and stop != self.codes.shape[1]:
            raise ValueError(f"stop must be a multiple of {BLOCK}, not {stop!r}")
        return Held(self.codes[:, :stop], self.fmt, self.scales[: blocks_of(stop)])

    def _rows(self, count: int) -> NDArray[np.uint8] | None:
        if self.scales is None:
            return None
        return np.broadcast_to(self.scales, (count, len(self.scales)))

    def keys(self, start: int, stop: int) -> tuple[NDArray, NDArray[np.uint8] | None]:
        """(codes [n, D], scales [n, ceil(D / 32)]) of slots as weights of Q K^T."""
        return self.codes[start:stop], self._rows(stop - start)

    def columns(self, start: int, stop: int) -> tuple[NDArray, NDArray[np.uint8] | None]:
        """(codes [D, n], scales [D, ceil(n / 32)]) of slots as weights of P V."""
        codes = self.codes[start:stop].T.copy()
        if self.scales is None:
            return codes, None
        each = expand_scales(self.scales, (codes.shape[0],)).astype(np.uint8)
        return codes, np.broadcast_to(each[:, None], (len(codes), blocks_of(stop - start)))


def held(tokens: "Held | NDArray[np.uint16]") -> Held:
    """BF16 codes [slots, D] as they are, or what is held already."""
    return tokens if isinstance(tokens, Held) else Held(tokens)


def held_heads(tokens: "Sequence[Held] | NDArray[np.uint16]") -> list[Held]:
    """One `Held` per KV head, of a list or of BF16 codes [slots, kv_heads, D]."""
    if isinstance(tokens, np.ndarray):
        return [Held(tokens[:, g]) for g in range(tokens.shape[1])]
    return list(tokens)
