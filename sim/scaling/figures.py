# SPDX-License-Identifier: Apache-2.0
"""One figure of the scaling model: a value with its unit and where it comes from."""

from dataclasses import asdict, dataclass
from typing import Any

from sim.kernels.types import SOURCES


@dataclass(frozen=True)
class Figure:
    """`value` None means that a measurement it needs is missing; `how` then names it.

    `source` says where the value comes from; a figure computed from others is derived, whatever
    those are, and `how` gives the arithmetic.
    """

    model: str
    figure: str
    value: int | float | None
    unit: str
    source: str
    how: str

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source must be one of {', '.join(SOURCES)}, not {self.source!r}")

    def row(self) -> dict[str, Any]:
        """The figure as JSON and the table show it."""
        return asdict(self)
