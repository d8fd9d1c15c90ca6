# SPDX-License-Identifier: Apache-2.0
"""Configuration of every block: frozen dataclasses, validated on construction, and the named
presets.

Everything that follows from these numbers is a property here, computed in one place. Sizes are
bytes unless the name says otherwise; a *line* is 16 bytes, the unit of both SRAMs; a *row* of the
KV SRAM is one line in every bank.
"""

from dataclasses import dataclass
from fractions import Fraction

LINE_BYTES = 16
SLICE_FP4_MACS = (
    65_536  # FP4 multiply-accumulates per cycle of a full-size slice (derived, docs/facts)
)
SLICE_HBM_RATE = 150  # bytes per cycle of HBM of a full-size slice at 1.6 GHz (derived)
FP4_PER_GROUP = 32  # FP4 products of a cell per cycle


def _power_of_two(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or value < least or value > most or value & (value - 1):
        raise ValueError(f"{name} must be a power of two from {least} to {most}, not {value!r}")


@dataclass(frozen=True)
class TileConfig:
    """One tile. `rows` and `cols` count cells; the array is 32 x rows deep in FP4."""

    rows: int = 8
    cols: int = 16
    acc_rows: int = 256
    result_depth: int = 128
    sram_bytes: int = 512 * 1024
    sram_banks: int = 64
    kv_bytes: int = 2 * 1024 * 1024
    stream_rows: int = 64
    block_entries: int = 512
    hbm_rate: Fraction = Fraction(75, 8)
    hbm_port_bytes: int = 16
    hbm_ports: int = 1
    hbm_bytes: int = 64 * 1024 * 1024
    program_beats: int = 4096
    queue_depth: int = 8
    max_topk: int = 8
    max_experts: int = 512
    max_groups: int = 8
    stall_gates: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        _power_of_two("rows", self.rows, 2, 64)
        _power_of_two("cols", self.cols, 4, 128)
        _power_of_two("acc_rows", self.acc_rows, 16, 4096)
        _power_of_two("result_depth", self.result_depth, 4, 1024)
        if self.result_depth < 2 * self.cols:
            raise ValueError(
                f"result_depth must be at least 2 x cols = {2 * self.cols}, "
                f"not {self.result_depth!r}"
            )
        _power_of_two("sram_banks", self.sram_banks, 4, 1024)
        least = max(4 * self.rows, self.cols)
        if self.sram_banks < least:
            raise ValueError(
                f"sram_banks must be at least max(4 x rows, cols) = {least}, "
                f"not {self.sram_banks!r}"
            )
        _power_of_two("sram_bytes", self.sram_bytes, self.sram_banks * LINE_BYTES * 4, 1 << 24)
        _power_of_two("kv_bytes", self.kv_bytes, self.cols * LINE_BYTES * 16, 1 << 26)
        _power_of_two("stream_rows", self.stream_rows, 2, 4096)
        if self.stream_rows < 2 * self.rows or self.stream_rows > self.kv_rows // 2:
            raise ValueError(
                f"stream_rows must be from 2 x rows = {2 * self.rows} to half of the KV SRAM's "
                f"{self.kv_rows} rows, not {self.stream_rows!r}"
            )
        _power_of_two("block_entries", self.block_entries, 2, 1 << 16)
        if self.hbm_rate <= 0 or self.hbm_rate > self.hbm_port_bytes * self.hbm_ports:
            raise ValueError(
                "hbm_rate must be above 0 and at most "
                f"{self.hbm_port_bytes * self.hbm_ports} bytes per cycle, not {self.hbm_rate!r}"
            )
        _power_of_two("hbm_port_bytes", self.hbm_port_bytes, 16, 128)
        if self.hbm_ports not in (1, 2):
            raise ValueError(f"hbm_ports must be 1 or 2, not {self.hbm_ports!r}")
        _power_of_two("program_beats", self.program_beats, 64, 1 << 16)
        _power_of_two("queue_depth", self.queue_depth, 2, 64)
        if not 1 <= self.max_topk <= 16:
            raise ValueError(f"max_topk must be from 1 to 16, not {self.max_topk!r}")
        _power_of_two("max_experts", self.max_experts, 16, 512)
        # The groups are ranked where the best scores are.
        _power_of_two("max_groups", self.max_groups, 1, min(self.max_topk, 16))

    @property
    def fp4_macs(self) -> int:
        """FP4 multiply-accumulates per cycle at peak."""
        return self.rows * self.cols * FP4_PER_GROUP

    @property
    def lanes(self) -> int:
        """FP32 lanes of the vector engine."""
        return self.cols

    @property
    def vector_lines(self) -> int:
        """Lines of one FP32 vector (lanes x 4 bytes)."""
        return self.lanes * 4 // LINE_BYTES

    @property
    def sram_lines(self) -> int:
        return self.sram_bytes // LINE_BYTES

    @property
    def kv_rows(self) -> int:
        """Rows of the KV SRAM, those of the weight stream's ring included."""
        return self.kv_bytes // (LINE_BYTES * self.cols)

    @property
    def stream_base(self) -> int:
        """First KV SRAM row of the weight stream's ring; rows below it are the program's."""
        return self.kv_rows - self.stream_rows

    @property
    def hbm_beat_bytes(self) -> int:
        """Bytes that all HBM ports together move in one cycle."""
        return self.hbm_port_bytes * self.hbm_ports


@dataclass(frozen=True)
class ChipConfig:
    """A mesh of equal tiles."""

    name: str
    tile: TileConfig
    mesh_x: int = 1
    mesh_y: int = 1

    def __post_init__(self) -> None:
        for name in ("mesh_x", "mesh_y"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= 16:
                raise ValueError(f"{name} must be from 1 to 16, not {value!r}")

    @property
    def tiles(self) -> int:
        return self.mesh_x * self.mesh_y


def scaled_hbm_rate(rows: int, cols: int) -> Fraction:
    """HBM bytes per cycle that keep the full-size slice's ratio to the MAC rate."""
    return Fraction(rows * cols * FP4_PER_GROUP * SLICE_HBM_RATE, SLICE_FP4_MACS)


_TINY = TileConfig(
    rows=2,
    cols=4,
    sram_bytes=64 * 1024,
    sram_banks=16,
    kv_bytes=256 * 1024,
    stream_rows=64,
    result_depth=16,
    hbm_rate=Fraction(16),
    program_beats=4096,
)
# 4 MiB of KV SRAM hold 8,192 tokens of a GPT-OSS KV head beside the weight stream's ring.
_SMALL = TileConfig(kv_bytes=4 * 1024 * 1024, hbm_rate=scaled_hbm_rate(8, 16))
_MESH = TileConfig(rows=4, cols=8, sram_banks=32, result_depth=32, hbm_rate=scaled_hbm_rate(4, 8))
_SLICE = TileConfig(
    rows=32,
    cols=64,
    sram_banks=256,
    result_depth=256,
    stream_rows=128,
    hbm_rate=scaled_hbm_rate(32, 64),
    hbm_port_bytes=128,
    hbm_ports=2,
)

PRESETS: dict[str, ChipConfig] = {
    c.name: c
    for c in (
        ChipConfig("tiny", _TINY),
        ChipConfig("small", _SMALL),
        ChipConfig("mesh4", _MESH, 2, 2),
        ChipConfig("mesh16", _MESH, 4, 4),
        ChipConfig("slice", _SLICE),
        ChipConfig("jalapeno", _SLICE, 8, 8),
    )
}


def preset(name: str) -> ChipConfig:
    """The named preset; ValueError names the known ones."""
    if name not in PRESETS:
        raise ValueError(f"config must be one of {', '.join(PRESETS)}, not {name!r}")
    return PRESETS[name]
