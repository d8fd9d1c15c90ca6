# SPDX-License-Identifier: Apache-2.0
"""What the recorded cycle suite says about each kernel: cycles over what its roofline allows.

Of several records of a kernel the one with the most work counts, since it is nearest to a full-size
run. A missing record gives no number, only its name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from golden.formats import SPECS, Format, group_elements, parse_format, products_per_slice
from golden.hbm_layout import LINE_BYTES, stream_bytes
from hw.config import TileConfig, preset
from sim.cycles import Record
from sim.errors import ToolError
from sim.kernels import KERNELS
from sim.scaling.figures import Figure

CONFIG = "small"  # the preset whose records are carried to full-size slices
Settings = Mapping[str, Any]


def array_cycles(tile: TileConfig, m: int, n: int, k: int, act: Format, weight: Format) -> Fraction:
    """m n k / (rows cols N): slices of a product, N multiply-accumulates per cell and cycle."""
    return Fraction(m * n * k, tile.rows * tile.cols * products_per_slice(act, weight))


def load_cycles(tile: TileConfig, n: int, k: int, weight: Format) -> int:
    """ceil(n / cols) ceil(k / G): weight rows, one per cycle, G elements of K in each."""
    return -(-n // tile.cols) * -(-k // group_elements(weight))


def stream_cycles(tile: TileConfig, n: int, k: int, weight: Format) -> Fraction:
    """Bytes of a weight matrix as it lies in HBM, scales included, over the HBM rate."""
    lines = -(-n // tile.cols) * tile.cols * -(-k // SPECS[weight].codes_per_line)
    return stream_bytes(lines, SPECS[weight].scaled) / tile.hbm_rate


def bias_cycles(tile: TileConfig, n: int) -> Fraction:
    """An FP32 vector from HBM over the HBM rate."""
    return LINE_BYTES * -(-n // 4) / tile.hbm_rate


def gemm_array(tile: TileConfig, s: Settings) -> Fraction:
    """Array cycles of a gemm record."""
    return array_cycles(
        tile, s["m"], s["n"], s["k"], parse_format(s["act"]), parse_format(s["weight"])
    )


def gemm_stream(tile: TileConfig, s: Settings) -> Fraction:
    """HBM cycles of a gemm record."""
    return stream_cycles(tile, s["n"], s["k"], parse_format(s["weight"]))


def attention_work(tile: TileConfig, s: Settings) -> Fraction:
    """Array or weight-load cycles, whichever is longer, of Q K^T and P V in BF16, for one token.

    Per KV head: m = heads / kv_heads queries on `context` (or `window`) keys of `head_dim`.
    """
    kv_heads, dim, bf16 = s["kv_heads"], s["head_dim"], Format.BF16
    keys = min(s["context"], s["window"]) if s["window"] else s["context"]
    m = s["heads"] // kv_heads
    array = array_cycles(tile, m, keys, dim, bf16, bf16) + array_cycles(
        tile, m, dim, keys, bf16, bf16
    )
    load = load_cycles(tile, keys, dim, bf16) + load_cycles(tile, dim, keys, bf16)
    return kv_heads * max(array, Fraction(load))


def experts_stream(tile: TileConfig, s: Settings) -> Fraction:
    """HBM cycles of the chosen experts of one token: both matrices and biases of top_k experts."""
    weight = parse_format(s["weight"])
    padded = -(-s["intermediate"] // tile.cols) * tile.cols
    one = (
        stream_cycles(tile, 2 * padded, s["hidden"], weight)
        + stream_cycles(tile, s["hidden"], s["intermediate"], weight)
        + bias_cycles(tile, 2 * padded)
        + bias_cycles(tile, s["hidden"])
    )
    return s["top_k"] * one


def moe_stream(tile: TileConfig, s: Settings) -> Fraction:
    """HBM cycles of a moe record of one token of GPT-OSS: the router and the chosen experts."""
    return stream_cycles(tile, s["experts"], s["hidden"], Format.BF16) + experts_stream(tile, s)


def layer_dense(tile: TileConfig, s: Settings) -> Fraction:
    """HBM cycles of one token's BF16 matrices in a layer record: QKV, output, router."""
    width, bf16 = s["heads"] * s["head_dim"], Format.BF16
    qkv = width + 2 * s["kv_heads"] * s["head_dim"]
    return (
        stream_cycles(tile, qkv, s["hidden"], bf16)
        + stream_cycles(tile, s["hidden"], width, bf16)
        + stream_cycles(tile, s["experts"], s["hidden"], bf16)
    )


def layer_work(tile: TileConfig, s: Settings) -> Fraction:
    """HBM cycles of a layer record, all tokens."""
    return s["tokens"] * (layer_dense(tile, s) + experts_stream(tile, s))


def is_dense(tile: TileConfig, s: Settings) -> bool:
    """A gemm on one tile from resident weights that the array binds, not the load of weights."""
    weight = parse_format(s["weight"])
    return (
        s["weights"] == "sram"
        and s["split"] == "none"
        and gemm_array(tile, s) >= load_cycles(tile, s["n"], s["k"], weight)
    )


def is_streamed(tile: TileConfig, s: Settings) -> bool:
    """A gemm on one tile of a single row, with weights from HBM."""
    return s["weights"] == "hbm" and s["split"] == "none" and s["m"] == 1


def is_single(tile: TileConfig, s: Settings) -> bool:
    """One token, without a shared expert: which experts several tokens share is not in a record."""
    return s["tokens"] == 1 and s["shared"] == "none"


def is_any(tile: TileConfig, s: Settings) -> bool:
    """Every record of the kernel."""
    return True


@dataclass(frozen=True)
class Source:
    """Where a fraction comes from: a kernel, which of its records, and their roofline cycles."""

    title: str
    kernel: str
    wanted: str
    matches: Callable[[TileConfig, Settings], bool]
    roofline: Callable[[TileConfig, Settings], Fraction]
    binds: str


SOURCES_OF = {
    "dense": Source(
        "dense GEMM", "gemm", "gemm weights=sram bound by the array", is_dense, gemm_array, "array"
    ),
    "stream": Source(
        "streamed GEMM, m=1", "gemm", "gemm m=1 weights=hbm", is_streamed, gemm_stream, "HBM"
    ),
    "attention": Source(
        "attention", "attention", "attention", is_any, attention_work, "array or load"
    ),
    "experts": Source("experts", "moe", "moe tokens=1", is_single, moe_stream, "HBM"),
    "layer": Source("decoder layer", "layer", "layer", is_any, layer_work, "HBM"),
}


@dataclass(frozen=True)
class Measurement:
    """A record of a source: its settings and cycles, and the roofline's cycles."""

    source: Source
    settings: Settings
    cycles: int
    least: Fraction

    @property
    def fraction(self) -> float:
        """Roofline cycles over measured ones, above 0 and at most 1."""
        return float(self.least / self.cycles)

    @property
    def shown(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings.items())


def measurements(records: Sequence[Record]) -> dict[str, Measurement]:
    """The measurement of every source that has a record; ToolError when one beats its roofline."""
    tile = preset(CONFIG).tile
    found: dict[str, Measurement] = {}
    for key, source in SOURCES_OF.items():
        for record in records:
            if record.kernel != source.kernel or record.config != CONFIG or not record.cycles:
                continue
            settings = (
                KERNELS[record.kernel]
                .of(record.model)
                .settings(
                    {name: str(value) for name, value in record.settings.items()}, record.model
                )
            )
            if not source.matches(tile, settings):
                continue
            made = Measurement(source, settings, record.cycles, source.roofline(tile, settings))
            if made.least > made.cycles:
                raise ToolError(
                    f"the record of {source.kernel} {made.shown} has {made.cycles} cycles, less "
                    f"than its {source.binds} roofline of {float(made.least):.1f}: "
                    "one of them is wrong"
                )
            if key not in found or made.least > found[key].least:
                found[key] = made
    return found


def figures(found: Mapping[str, Measurement]) -> list[Figure]:
    """Cycles and fraction of every source, or that it is missing."""
    rows = []
    for key, source in SOURCES_OF.items():
        title, name = source.title, f"{source.title}: fraction of its {source.binds} roofline"
        if key in found:
            one = found[key]
            rows += [
                Figure(
                    "all",
                    f"{title}: cycles",
                    one.cycles,
                    "cycles",
                    "measured",
                    f"{source.kernel} on {CONFIG}, {one.shown}",
                ),
                Figure(
                    "all",
                    name,
                    one.fraction,
                    "",
                    "derived",
                    f"{float(one.least):.1f} / {one.cycles} cycles",
                ),
            ]
        else:
            rows.append(
                Figure(
                    "all",
                    name,
                    None,
                    "",
                    "measured",
                    f"no record of {source.wanted} on {CONFIG}; "
                    "record one with jalapeno cycles --update",
                )
            )
    return rows
