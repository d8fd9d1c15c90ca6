# SPDX-License-Identifier: Apache-2.0
"""The machine and the run that the scaling model assumes, each number with its source."""

from dataclasses import dataclass

from hw.config import ChipConfig, preset
from sim.scaling.figures import Figure


@dataclass(frozen=True)
class Assumptions:
    """Chips work on one layer together (tensor parallel): every slice reads an equal share of all
    weights and caches. `batch` and `context` are those of the rate per power; the time between
    tokens is that of batch 1.
    """

    chips: int = 8
    clock_hz: float = 1.6e9
    context: int = 8192
    batch: int = 64
    collectives_per_layer: int = 2
    collective_s: float = 1e-6
    chip_w: float = 700.0

    def __post_init__(self) -> None:
        for name in ("chips", "context", "batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1, not {value!r}")
        for name in ("clock_hz", "chip_w"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)!r}")
        for name in ("collectives_per_layer", "collective_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)!r}")

    @property
    def chip(self) -> ChipConfig:
        """One full-size chip."""
        return preset("jalapeno")

    @property
    def slices(self) -> int:
        """Slices that share the work."""
        return self.chips * self.chip.tiles

    def figures(self) -> list[Figure]:
        """The list, for the table."""
        tile = self.chip.tile
        rate = float(tile.hbm_rate)
        rows: list[tuple[str, float, str, str, str]] = [
            (
                "clock",
                self.clock_hz / 1e9,
                "GHz",
                "derived",
                f"published peak over {self.chip.tiles} slices of {tile.fp4_macs} FP4 MAC/clk",
            ),
            ("slices per chip", self.chip.tiles, "", "official", "one HBM slice each"),
            (
                "HBM per slice",
                rate,
                "B/clk",
                "derived",
                f"published 15.4 TB/s = {rate:.0f} x {self.chip.tiles} x clock",
            ),
            (
                "chips",
                self.chips,
                "",
                "assumed",
                "tensor parallel; reported for DeepSeek R1 at concurrency 1",
            ),
            ("context", self.context, "tokens", "assumed", "the published runs have 8k of input"),
            ("batch of tok/s/kW", self.batch, "users", "assumed", "decode only"),
            (
                "exposed collectives",
                self.collectives_per_layer,
                "per layer",
                "assumed",
                "after attention and after the experts",
            ),
            (
                "time of a collective",
                self.collective_s * 1e6,
                "us",
                "assumed",
                "over all slices of all chips",
            ),
            ("rated power of a chip", self.chip_w, "W", "official", "sustained power is lower"),
        ]
        return [
            Figure("all", name, value, unit, source, how) for name, value, unit, source, how in rows
        ]
