# SPDX-License-Identifier: Apache-2.0
"""The recorded cycle suite: runs with the cycles they took, held against what they take now.

`data/cycles.json` lists the runs; a run's cycles are a matter of the RTL and the tile program
alone, so any difference is a change of one of them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hw.config import preset
from sim.errors import ToolError
from sim.kernels import KERNELS
from sim.kernels.types import MODELS, KernelRequest, KernelResult

DATA = Path(__file__).parent / "data" / "cycles.json"
HEAD = ("kernel", "config", "settings", "old", "new", "percent")


@dataclass(frozen=True)
class Record:
    """A run of the suite; `cycles` is None when it has not been measured yet."""

    kernel: str
    config: str
    settings: dict[str, Any]
    model: str = "gpt-oss"
    seed: int = 0
    cycles: int | None = None

    def run(self) -> KernelResult:
        kernel = KERNELS[self.kernel].of(self.model)
        given = {name: str(value) for name, value in self.settings.items()}
        settings = kernel.settings(given, self.model)
        return kernel.run(KernelRequest(preset(self.config), self.model, settings, seed=self.seed))


@dataclass(frozen=True)
class Comparison:
    """A record and what it took now."""

    record: Record
    cycles: int

    @property
    def changed(self) -> bool:
        return self.record.cycles != self.cycles

    @property
    def percent(self) -> float | None:
        old = self.record.cycles
        return None if not old else 100.0 * (self.cycles - old) / old

    def row(self) -> list[Any]:
        percent = "-" if self.percent is None else f"{self.percent:+.2f} %"
        settings = " ".join(f"{name}={value}" for name, value in self.record.settings.items())
        kernel, model = self.record.kernel, self.record.model
        return [
            kernel if model == MODELS[0] else f"{kernel} ({model})",
            self.record.config,
            settings,
            self.record.cycles,
            self.cycles,
            percent,
        ]


def load(file: Path = DATA) -> list[Record]:
    """The recorded runs."""
    return [Record(**entry) for entry in json.loads(file.read_text())]


def measure(records: Sequence[Record], progress: Callable[[Record], None]) -> list[Comparison]:
    """Run all `records`; ToolError when one is wrong, for then its cycles mean nothing."""
    if not records:
        raise ToolError(f"the cycle suite {DATA.name} lists no run, so nothing was compared")
    result = []
    for record in records:
        progress(record)
        run = record.run()
        if not run.passed:
            raise ToolError(
                f"{record.kernel} on {record.config} is wrong: {run.mismatched} of "
                f"{run.compared} values differ; its cycles were not compared"
            )
        result.append(Comparison(record, run.cycles))
    return result


def save(comparisons: Sequence[Comparison], file: Path = DATA) -> None:
    """Record what was measured; one run a line, so that a change reads well."""
    lines = [json.dumps(vars(c.record) | {"cycles": c.cycles}) for c in comparisons]
    file.write_text("[\n  " + ",\n  ".join(lines) + "\n]\n")
