# SPDX-License-Identifier: Apache-2.0
"""Where the keys and values of a KV head lie, and the matrix products that read them."""

from dataclasses import dataclass
from typing import Protocol

from golden.formats import Format
from golden.kernels.attention import Chunk
from golden.kv_layout import key_rows, line_elements, value_rows
from sim.programs.builder import TileProgram
from sim.programs.memory import Buffer, Weights


class Appended(Protocol):
    """A cache in KV SRAM."""

    def append(self, p: TileProgram, key: Buffer, value: Buffer, token: int) -> None:
        """Appends key and value of token number `token` of the sequence."""


class Region(Protocol):
    """A KV head's cache, whose parts are ring slots [start, stop)."""

    @property
    def value_dim(self) -> int: ...

    @property
    def fmt(self) -> Format: ...

    def scores(self, p: TileProgram, queries: Buffer, part: Chunk, out: Buffer) -> None:
        """Issues queries times the keys of the part."""

    def product(self, p: TileProgram, probs: Buffer, part: Chunk, out: Buffer) -> None:
        """Issues probabilities of the part times its values."""


@dataclass(frozen=True)
class KvRegion:
    """One KV head's cache in KV SRAM: `ring` slots from rows `keys` and `values`.

    Keys have `head_dim` elements, values `value_dim`, all in BF16 or in MXFP8 E4M3. `written`: the
    host has written every line of values, so that appends keep what is in them from the start.
    """

    keys: int
    values: int
    ring: int
    head_dim: int
    value_dim: int
    fmt: Format = Format.BF16
    written: bool = False

    @classmethod
    def allocate(
        cls,
        p: TileProgram,
        name: str,
        ring: int,
        head_dim: int,
        value_dim: int | None = None,
        fmt: Format = Format.BF16,
    ) -> "KvRegion":
        cols, width = p.config.cols, value_dim or head_dim
        keys = p.memory.kv_rows(f"{name}.keys", key_rows(ring, head_dim, cols, fmt))
        values = p.memory.kv_rows(f"{name}.values", value_rows(ring, width, cols, fmt))
        return cls(keys, values, ring, head_dim, width, fmt)

    def scores(self, p: TileProgram, queries: Buffer, part: Chunk, out: Buffer) -> None:
        """Queries times the keys of slots [start, stop)."""
        lines = self.head_dim // line_elements(self.fmt)
        p.command(
            "matmul",
            **place(queries, out, self.fmt),
            n=part.stop - part.start,
            k=self.head_dim,
            weight_addr=self.keys + part.start // p.config.cols * lines,
            weight_gstride=1,
            weight_nstride=lines,
        )

    def product(self, p: TileProgram, probs: Buffer, part: Chunk, out: Buffer) -> None:
        """Probabilities of slots [start, stop) times their values."""
        tiles = -(-self.value_dim // p.config.cols)
        p.command(
            "matmul",
            **place(probs, out, self.fmt),
            n=self.value_dim,
            k=part.stop - part.start,
            weight_addr=self.values + part.start // line_elements(self.fmt) * tiles,
            weight_gstride=tiles,
            weight_nstride=1,
        )

    def append(self, p: TileProgram, key: Buffer, value: Buffer, token: int) -> None:
        """Appends key and value (rows in the cache's format) of a token in slot `token` mod ring;
        from the second lap on the other tokens of a line stay.
        """
        common = {
            "slot": token % self.ring,
            "format": self.fmt,
            "wrapped": int(self.written or token >= self.ring),
        }
        sides = {
            "keys": {"k_addr": key.address, "k_base": self.keys, "keys": 1},
            "values": {"v_addr": value.address, "v_base": self.values, "values": 1},
        }
        if self.head_dim == self.value_dim:
            both = sides["keys"] | sides["values"]
            p.command("kvappend", head_dim=self.head_dim, **common, **both)
            return
        p.command("kvappend", head_dim=self.head_dim, **common, **sides["keys"])
        p.command("kvappend", head_dim=self.value_dim, **common, **sides["values"])


def place(act: Buffer, out: Buffer, fmt: Format = Format.BF16) -> dict[str, int]:
    """Operands of a MATMUL of BF16 activations, weights in `fmt`, but for where these lie."""
    return {
        "act_addr": act.address,
        "act_stride": act.stride_lines,
        "m": act.rows,
        "out_addr": out.address,
        "out_stride": out.stride_lines,
        "act_format": Format.BF16,
        "weight_format": fmt,
    }


@dataclass(frozen=True)
class StreamedRegion:
    """A cache whose older chunks come from the HBM slice, as weights by the part's start; the
    others, from slot `first` on, lie in `newest`, whose slot 0 that is.
    """

    keys: dict[int, Weights]
    values: dict[int, Weights]
    first: int
    newest: KvRegion

    @property
    def value_dim(self) -> int:
        return self.newest.value_dim

    @property
    def fmt(self) -> Format:
        return self.newest.fmt

    def _newest(self, part: Chunk) -> Chunk:
        return Chunk(part.start - self.first, part.stop - self.first, part.mask)

    def scores(self, p: TileProgram, queries: Buffer, part: Chunk, out: Buffer) -> None:
        if part.start >= self.first:
            self.newest.scores(p, queries, self._newest(part), out)
        else:
            p.matmul(queries, self.keys[part.start], out)

    def product(self, p: TileProgram, probs: Buffer, part: Chunk, out: Buffer) -> None:
        if part.start >= self.first:
            self.newest.product(p, probs, self._newest(part), out)
        else:
            p.matmul(probs, self.values[part.start], out)
