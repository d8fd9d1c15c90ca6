# SPDX-License-Identifier: Apache-2.0
"""What a program asks of each resource of a tile, and the roofline that binds."""

from dataclasses import dataclass, fields
from fractions import Fraction

from golden.formats import Format, group_elements, products_per_slice
from hw.config import TileConfig


@dataclass
class Work:
    """Cycles that each resource needs at its full rate, for one tile.

    `array`: multiply-accumulates / (cells x products per cycle of the pair of formats); `load`:
    weight rows, one per cycle; `hbm`: bytes / rate; `vector`: vectors of `lanes` elements, one per
    cycle; `topk`: scores, one per cycle.
    """

    array: Fraction = Fraction(0)
    load: Fraction = Fraction(0)
    hbm: Fraction = Fraction(0)
    vector: Fraction = Fraction(0)
    topk: Fraction = Fraction(0)

    def matmul(
        self, config: TileConfig, m: int, n: int, k: int, act: Format, weight: Format
    ) -> None:
        cells = config.rows * config.cols
        self.array += Fraction(m * n * k, cells * products_per_slice(act, weight))
        self.load += -(-n // config.cols) * -(-k // group_elements(weight))

    def bytes(self, config: TileConfig, count: int) -> None:
        self.hbm += Fraction(count) / config.hbm_rate

    def vectors(self, config: TileConfig, rows: int, cols: int) -> None:
        self.vector += rows * -(-cols // config.lanes)

    def scores(self, count: int) -> None:
        self.topk += count

    def include(self, other: "Work") -> None:
        """Adds the work of another program of the same tile."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def roofline(self) -> tuple[str, Fraction]:
        """Name and cycles of the resource that takes longest."""
        name = max((f.name for f in fields(self)), key=lambda n: getattr(self, n))
        return name, getattr(self, name)

    def describe(self) -> str:
        """The binding roofline with the arithmetic of all."""
        name, _ = self.roofline()
        parts = ", ".join(f"{f.name} {float(getattr(self, f.name)):.1f}" for f in fields(self))
        return f"{name} (cycles at full rate: {parts})"
