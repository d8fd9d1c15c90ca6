# SPDX-License-Identifier: Apache-2.0
"""The recorded areas: blocks with their figures, held against what they are now.

`data/area.json` lists them with the Yosys version they are from. Between versions of Yosys figures
move by some percent, so they may grow by a tolerance before the check fails.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hw.config import preset
from sim.area import Area, BlockArea, area
from sim.blocks import block

DATA = Path(__file__).parent / "data" / "area.json"
HEAD = ("block", "config", "figure", "old", "new", "percent")
TOLERANCE = {"nand2": 3.0, "flip_flops": 3.0, "fo4": 5.0}  # percent


@dataclass(frozen=True)
class Record:
    """A block with its recorded figures; None when it has not been measured yet."""

    block: str
    config: str
    area: Area | None = None


def measure(name: str, config: str) -> BlockArea:
    """The figures of a block now."""
    return area(block(name).make(preset(config)), name)


@dataclass(frozen=True)
class Comparison:
    """A record and what it is now."""

    record: Record
    now: Area

    def rows(self) -> list[list[Any]]:
        """Rows of `HEAD` for the figures that both have."""
        result = []
        for figure in TOLERANCE:
            old = None if self.record.area is None else getattr(self.record.area, figure)
            new = getattr(self.now, figure)
            percent = "-" if not old or new is None else f"{100 * (new - old) / old:+.1f} %"
            result.append([self.record.block, self.record.config, figure, old, new, percent])
        return result

    @property
    def grown(self) -> list[list[Any]]:
        """The rows of figures that grew beyond their tolerance."""
        result = []
        for row, tolerance in zip(self.rows(), TOLERANCE.values(), strict=True):
            old, new = row[3], row[4]
            if old is not None and new is not None and new > old * (1 + tolerance / 100):
                result.append(row)
        return result


def load(file: Path = DATA) -> list[Record]:
    """The recorded blocks."""
    return [
        Record(e["block"], e["config"], Area(**e["area"]) if e["area"] else None)
        for e in json.loads(file.read_text())["blocks"]
    ]


def save(comparisons: Sequence[Comparison], yosys: str, file: Path = DATA) -> None:
    """Record what was measured; one block a line, so that a change reads well."""
    lines = [
        json.dumps({"block": c.record.block, "config": c.record.config, "area": asdict(c.now)})
        for c in comparisons
    ]
    text = ",\n    ".join(lines)
    file.write_text(f'{{\n  "yosys": "{yosys}",\n  "blocks": [\n    {text}\n  ]\n}}\n')
