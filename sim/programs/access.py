# SPDX-License-Identifier: Apache-2.0
"""What each command reads and writes: byte ranges of tile SRAM, rows of KV SRAM, bytes of HBM."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from golden.formats import SPECS, Format, group_elements
from hw.config import LINE_BYTES, TileConfig
from hw.isa import Direction, Init, Kind, Reduce
from sim.assembler import Indirect

Range = tuple[str, int, int]  # memory, first, end
SRAM, KV, HBM = "sram", "kv", "hbm"
WHOLE = 1 << 40
Operands = Mapping[str, Any]


@dataclass(frozen=True)
class Within(Indirect):
    """An address in a register that is known to lie, with all that is touched, in [first, end)."""

    first: int
    end: int


@dataclass
class Access:
    """Ranges that a command reads and writes. An address in a register counts as anywhere, unless
    it is `Within` a range.
    """

    reads: list[Range] = field(default_factory=list)
    writes: list[Range] = field(default_factory=list)

    def conflicts(self, earlier: "Access") -> bool:
        """Whether this command must come after `earlier`."""
        return (
            _overlap(self.reads, earlier.writes)
            or _overlap(self.writes, earlier.writes)
            or _overlap(self.writes, earlier.reads)
        )

    def depends(self, earlier: "Access") -> bool:
        """Whether this command reads what `earlier` writes."""
        return _overlap(self.reads, earlier.writes)


def _overlap(ours: list[Range], theirs: list[Range]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in ours for b in theirs)


def _range(memory: str, first: Any, size: int) -> Range:
    if isinstance(first, Within):
        return memory, first.first, first.end
    if not isinstance(first, int):
        return memory, 0, WHOLE
    return memory, first, first + size


def _rows(first: Any, rows: int, stride: int, row_bytes: int) -> Range:
    """Rows of tile SRAM, `stride` bytes apart."""
    return _range(SRAM, first, (rows - 1) * stride + row_bytes)


def _bytes(elements: int, fmt: int) -> int:
    size = -(-elements * SPECS[Format(fmt)].storage_bits // 8)
    return -(-size // LINE_BYTES) * LINE_BYTES if SPECS[Format(fmt)].scaled else size


def _matmul(config: TileConfig, o: Operands) -> Access:
    access = Access()
    m, n, k = o["m"], o["n"], o["k"]
    fmt = Format(o["weight_format"])
    access.reads.append(
        _rows(o["act_addr"], m, LINE_BYTES * o["act_stride"], _bytes(k, o["act_format"]))
    )
    if o.get("init") == Init.BIAS:
        access.reads.append(_range(SRAM, o["bias_addr"], 4 * n))
    if o.get("paged"):
        access.reads.append((KV, 0, WHOLE))  # wherever the blocks are
    elif not o.get("stream"):
        groups = -(-k // group_elements(fmt)) >> (fmt is Format.MXINT8)
        rows = (-(-n // config.cols) - 1) * o["weight_nstride"]
        access.reads.append(
            _range(KV, o["weight_addr"], rows + max(0, groups) * o["weight_gstride"] + 1)
        )
    size = n * (2 if o.get("out_bf16") else 4)
    access.writes.append(_rows(o["out_addr"], m, LINE_BYTES * o["out_stride"], size))
    return access


def _blocktable(config: TileConfig, o: Operands) -> Access:
    """The table is the matrix engine's own, which keeps the order of its uses."""
    return Access([_range(SRAM, o["addr"], 4 * o["count"])])


def _vector(config: TileConfig, o: Operands) -> Access:
    access = Access()
    rows, cols = o["rows"], o["cols"]
    for name in "abd":
        kind = Kind.VECTOR if name == "a" else o.get(f"{name}_kind", Kind.NONE)
        if kind in (Kind.VECTOR, Kind.ROW):
            size = 4 if kind == Kind.ROW else _bytes(cols, o[f"{name}_format"])
            stride = 4 * o.get(f"{name}_stride", 0)
            access.reads.append(_rows(o[f"{name}_addr"], rows, stride, size))
    if o.get("store"):
        size = _bytes(cols, o["out_format"])
        access.writes.append(_rows(o["out_addr"], rows, 4 * o.get("out_stride", 0), size))
    if o.get("reduce", Reduce.NONE) != Reduce.NONE:
        access.writes.append(_range(SRAM, o["reduce_addr"], 4 * rows))
    return access


def _topk(config: TileConfig, o: Operands) -> Access:
    access = Access([_range(SRAM, o["score_addr"], 4 * o["count"])])
    if o.get("use_bias"):
        access.reads.append(_range(SRAM, o["bias_addr"], 4 * o["count"]))
    size = -(-4 * o["k"] // LINE_BYTES) * LINE_BYTES
    access.writes = [_range(SRAM, o[name], size) for name in ("ids_addr", "scores_addr")]
    return access


def _dma(config: TileConfig, o: Operands) -> Access:
    direction = o.get("direction", Direction.HBM_TO_SRAM)
    rows, lines, stride = o["rows"], o["lines"], o.get("local_stride", 0)
    span = (rows - 1) * stride + lines
    size = (rows - 1) * o.get("hbm_stride", 0) + lines * LINE_BYTES * (17 if o.get("scaled") else 1)
    far = _range(HBM, o["hbm_addr"], size)
    if direction == Direction.HBM_TO_KV:
        first = o["local_addr"]
        if isinstance(first, int):
            end = -(-(first + span) // config.cols)
            return Access([far], [(KV, first // config.cols, end)])
        return Access([far], [(KV, 0, WHOLE)])
    near = _range(SRAM, o["local_addr"], span * LINE_BYTES)
    return Access([near], [far]) if direction == Direction.SRAM_TO_HBM else Access([far], [near])


def _stream(config: TileConfig, o: Operands) -> Access:
    lines = o["rows"] * config.cols
    size = LINE_BYTES * (lines + -(-lines // 16) if o.get("scaled") else lines)
    return Access([_range(HBM, o["hbm_addr"], size)])


def _kvappend(config: TileConfig, o: Operands) -> Access:
    access = Access()
    bits = SPECS[Format(o.get("format", Format.BF16))].storage_bits
    per_line = LINE_BYTES * 8 // bits
    dim, slot = o["head_dim"], o["slot"]
    lines, tiles = dim // per_line, -(-dim // config.cols)
    for use, source, base, unit, rows in (
        ("keys", "k_addr", "k_base", config.cols, lines),
        ("values", "v_addr", "v_base", per_line, tiles),
    ):
        if o.get(use):
            access.reads.append(_range(SRAM, o[source], lines * LINE_BYTES))
            known = isinstance(slot, int) and isinstance(o[base], int)
            first = o[base] + slot // unit * rows if known else None
            access.writes.append(_range(KV, first, rows))
    return access


def _send(config: TileConfig, o: Operands) -> Access:
    size = LINE_BYTES * ((o["rows"] - 1) * o.get("src_stride", 0) + o["lines"])
    return Access([_range(SRAM, o["src_addr"], size)])


def _collective(config: TileConfig, o: Operands) -> Access:
    size = LINE_BYTES * o["lines"]
    return Access([_range(SRAM, o["src_addr"], size)], [_range(SRAM, o["dst_addr"], size)])


_ACCESS: dict[str, Callable[[TileConfig, Operands], Access]] = {
    "matmul": _matmul,
    "blocktable": _blocktable,
    "vector": _vector,
    "topk": _topk,
    "dma": _dma,
    "stream": _stream,
    "kvappend": _kvappend,
    "send": _send,
    "collective": _collective,
}


def access(config: TileConfig, name: str, operands: Operands) -> Access:
    """Ranges of the command `name` (lower case) with these operands."""
    return _ACCESS[name](config, operands)
