# SPDX-License-Identifier: Apache-2.0
"""Exactly what a command touches, from its operands: written from the instruction set, not from
`sim.programs.access`, whose ranges may be larger.

Places are indices: bytes of tile SRAM, bytes of KV SRAM ((row * cols + bank) * 16 + byte), lines of
HBM.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from golden.formats import SPECS, Format
from hw.config import LINE_BYTES, ChipConfig, TileConfig
from hw.isa import CollectiveOp, Direction, Init, Kind, Reduce, Scope
from sim.programs.access import HBM, KV, SRAM

Places = NDArray[np.int64]
Operands = Mapping[str, int]


@dataclass
class Footprint:
    """(memory, places) read and written. `kv_unknown`: it reads KV SRAM by the block table.

    `copies`: whole lines are moved, whatever part of them means something. `remote` is (tile,
    places in its SRAM) of what goes to another tile.
    """

    reads: list[tuple[str, Places]] = field(default_factory=list)
    writes: list[tuple[str, Places]] = field(default_factory=list)
    kv_unknown: bool = False
    copies: bool = False
    remote: tuple[int, Places] | None = None


def _rows(first: int, rows: int, stride: int, size: int) -> Places:
    """`size` places of each row; a stride of 0 is one row."""
    starts = first + stride * np.arange(rows if stride else 1, dtype=np.int64)
    return (starts[:, None] + np.arange(size)).ravel()


def _bytes(elements: int, fmt: int) -> int:
    """Of a row of elements; of an MX format whole lines, which their scales stand for."""
    spec = SPECS[Format(fmt)]
    size = -(-elements * spec.storage_bits // 8)
    return -(-size // LINE_BYTES) * LINE_BYTES if spec.scaled else size


def _lines(lines: Places) -> Places:
    """Bytes of whole lines."""
    return (lines[:, None] * LINE_BYTES + np.arange(LINE_BYTES)).ravel()


def _matmul(config: TileConfig, o: Operands) -> Footprint:
    m, n, k, cols = o["m"], o["n"], o["k"], config.cols
    out = Footprint()
    size = _bytes(k, o["act_format"])
    out.reads.append((SRAM, _rows(o["act_addr"], m, LINE_BYTES * o["act_stride"], size)))
    if o["init"] == Init.BIAS:
        out.reads.append((SRAM, _rows(o["bias_addr"], 1, 0, 4 * n)))
    out.kv_unknown = bool(o["paged"])
    if not o["stream"] and not o["paged"]:
        bits = SPECS[Format(o["weight_format"])].storage_bits
        per_line = 8 * LINE_BYTES // bits
        column = np.arange(n)[:, None, None]
        group = np.arange(-(-k // per_line))[None, :, None]
        byte = np.arange(LINE_BYTES)[None, None, :]
        row = o["weight_addr"] + column // cols * o["weight_nstride"] + group * o["weight_gstride"]
        places = (row * cols + column % cols) * LINE_BYTES + byte
        counts = np.broadcast_to(group * per_line + byte * 8 // bits < k, places.shape)
        out.reads.append((KV, places[counts]))
    size = n * (2 if o["out_bf16"] else 4)
    out.writes.append((SRAM, _rows(o["out_addr"], m, LINE_BYTES * o["out_stride"], size)))
    return out


def _blocktable(config: TileConfig, o: Operands) -> Footprint:
    return Footprint([(SRAM, _rows(o["addr"], 1, 0, 4 * o["count"]))])


def _vector(config: TileConfig, o: Operands) -> Footprint:
    rows, cols = o["rows"], o["cols"]
    out = Footprint()
    for name in "abd":
        kind = Kind.VECTOR if name == "a" else o[f"{name}_kind"]
        if kind in (Kind.VECTOR, Kind.ROW):
            size = 4 if kind == Kind.ROW else _bytes(cols, o[f"{name}_format"])
            places = _rows(o[f"{name}_addr"], rows, 4 * o[f"{name}_stride"], size)
            out.reads.append((SRAM, places))
    if o["store"]:
        size = _bytes(cols, o["out_format"])
        out.writes.append((SRAM, _rows(o["out_addr"], rows, 4 * o["out_stride"], size)))
    if o["reduce"] != Reduce.NONE:
        out.writes.append((SRAM, _rows(o["reduce_addr"], 1, 0, 4 * rows)))
    return out


def _topk(config: TileConfig, o: Operands) -> Footprint:
    sources = ["score_addr"] + (["bias_addr"] if o["use_bias"] else [])
    size = -(-4 * o["k"] // LINE_BYTES) * LINE_BYTES
    return Footprint(
        [(SRAM, _rows(o[name], 1, 0, 4 * o["count"])) for name in sources],
        [(SRAM, _rows(o[name], 1, 0, size)) for name in ("ids_addr", "scores_addr")],
    )


def _runs(lines: int, scaled: int) -> int:
    """Lines in HBM of that many data lines."""
    return lines + (-(-lines // 16) if scaled else 0)


def _dma(config: TileConfig, o: Operands) -> Footprint:
    rows, lines = o["rows"], o["lines"]
    far = (
        HBM,
        _rows(
            o["hbm_addr"] // LINE_BYTES,
            rows,
            o["hbm_stride"] // LINE_BYTES,
            _runs(lines, o["scaled"]),
        ),
    )
    to_kv = o["direction"] == Direction.HBM_TO_KV
    first = o["local_addr"] if to_kv else o["local_addr"] // LINE_BYTES
    local = _rows(first, rows, o["local_stride"], lines)
    if to_kv:
        return Footprint([far], [(KV, _lines(local))])
    near = SRAM, _lines(local)
    if o["direction"] == Direction.SRAM_TO_HBM:
        return Footprint([near], [far], copies=True)
    return Footprint([far], [near])


def _stream(config: TileConfig, o: Operands) -> Footprint:
    size = _runs(o["rows"] * config.cols, o["scaled"])
    return Footprint([(HBM, _rows(o["hbm_addr"] // LINE_BYTES, 1, 0, size))])


def _kvappend(config: TileConfig, o: Operands) -> Footprint:
    out, cols, slot, dim = Footprint(), config.cols, o["slot"], o["head_dim"]
    size = SPECS[Format(o["format"])].storage_bits // 8  # of an element
    per_line = LINE_BYTES // size
    pieces = dim // per_line
    if o["keys"]:
        out.reads.append((SRAM, _rows(o["k_addr"], 1, 0, size * dim)))
        row = o["k_base"] + slot // cols * pieces + np.arange(pieces)
        out.writes.append((KV, _lines(row * cols + slot % cols)))
    if o["values"]:
        out.reads.append((SRAM, _rows(o["v_addr"], 1, 0, size * dim)))
        d = np.arange(dim)
        row = o["v_base"] + slot // per_line * -(-dim // cols) + d // cols
        whole = _lines(row * cols + d % cols)
        if slot % per_line == 0 and not o["wrapped"]:
            out.writes.append((KV, whole))  # with zeros for the tokens to come
        else:
            out.reads.append((KV, whole))  # the line as it was, of which an element changes
            first = (row * cols + d % cols) * LINE_BYTES + slot % per_line * size
            out.writes.append((KV, (first[:, None] + np.arange(size)).ravel()))
    return out


def _load(config: TileConfig, o: Operands) -> Footprint:
    return Footprint([(SRAM, _rows(o["address"], 1, 0, 4))])


_LOCAL: dict[str, Callable[[TileConfig, Operands], Footprint]] = {
    "matmul": _matmul,
    "blocktable": _blocktable,
    "vector": _vector,
    "topk": _topk,
    "dma": _dma,
    "stream": _stream,
    "kvappend": _kvappend,
    "load": _load,
}


def footprint(config: ChipConfig, tile: int, name: str, o: Operands) -> Footprint:
    """What the command `name` (lower case) with these operands touches when `tile` executes it."""
    if name in _LOCAL:
        return _LOCAL[name](config.tile, o)
    if name == "send":
        size = LINE_BYTES * o["lines"]
        near = _rows(o["src_addr"], o["rows"], LINE_BYTES * o["src_stride"], size)
        far = _rows(o["dst_addr"], o["rows"], LINE_BYTES * o["dst_stride"], size)
        where = o["y"] * config.mesh_x + o["x"]
        return Footprint([(SRAM, near)], copies=True, remote=(where, far))
    if name != "collective":
        raise ValueError(f"name must be a command's, not {name!r}")
    size = LINE_BYTES * o["lines"]
    x, y = tile % config.mesh_x, tile // config.mesh_x
    own = {Scope.MESH: tile, Scope.ROW: x, Scope.COLUMN: y}[Scope(o["scope"])]
    out = Footprint(writes=[(SRAM, _rows(o["dst_addr"], 1, 0, size))], copies=True)
    if o["op"] != CollectiveOp.BROADCAST or o["root"] == own:
        out.reads.append((SRAM, _rows(o["src_addr"], 1, 0, size)))
    return out
