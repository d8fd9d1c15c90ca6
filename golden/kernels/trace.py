# SPDX-License-Identifier: Apache-2.0
"""The machine's sizes that decide rounding, and the record of what a kernel leaves in memory."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from golden.formats import Format
from golden.fp32 import Float32
from golden.vector import load, store


@dataclass(frozen=True)
class Machine:
    """Array rows (where K is cut) and vector lanes (the order of sums)."""

    rows: int
    lanes: int


@dataclass(frozen=True)
class Stored:
    """Contents of a buffer: codes [rows, cols], E8M0 scales [rows, ceil(cols / 32)] or None."""

    codes: NDArray
    fmt: Format
    scales: NDArray[np.uint8] | None = None

    @property
    def values(self) -> Float32:
        """The FP32 values that a load gives."""
        return load(self.codes, self.fmt, self.scales)


@dataclass
class Trace:
    """Buffers by name, in the order in which they were written."""

    buffers: dict[str, Stored] = field(default_factory=dict)

    def keep(self, name: str, values: ArrayLike, fmt: Format = Format.FP32) -> Stored:
        """Stores FP32 `values` [rows, cols] (or one row) in `fmt`: what is then in memory."""
        codes, scales = store(np.atleast_2d(np.asarray(values, np.float32)), fmt)
        return self.record(name, Stored(codes, fmt, scales))

    def codes(self, name: str, codes: ArrayLike, fmt: Format) -> Stored:
        """Records codes [rows, cols] as they are, such as the integers of the top-k unit."""
        return self.record(name, Stored(np.atleast_2d(np.asarray(codes)), fmt))

    def record(self, name: str, stored: Stored) -> Stored:
        """Records contents under a new name."""
        if name in self.buffers:
            raise ValueError(f"name must be new, not {name!r}")
        self.buffers[name] = stored
        return stored
