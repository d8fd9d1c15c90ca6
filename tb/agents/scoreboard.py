# SPDX-License-Identifier: Apache-2.0
"""Comparing what came with what was expected, and failing when nothing was compared."""

from collections import deque
from typing import Any


class Scoreboard:
    """Compares values in order; `compared` and `mismatched` count, `differences` keeps the first
    few.

    A bench ends with `check`, which fails also when nothing was compared or something is missing.
    """

    KEPT = 8

    def __init__(self, name: str):
        self.name = name
        self.compared = self.mismatched = 0
        self.differences: list[str] = []
        self._expected: deque[Any] = deque()

    def expect(self, *values: Any) -> None:
        """Queue values that must come, in this order."""
        self._expected.extend(values)

    def got(self, value: Any) -> None:
        """Compare `value` with the oldest expected one; an unexpected value is a mismatch."""
        self.compared += 1
        wanted = self._expected.popleft() if self._expected else "nothing more"
        if value != wanted:
            self.mismatched += 1
            if len(self.differences) < self.KEPT:
                self.differences.append(
                    f"{self.name}[{self.compared - 1}]: {value!r}, expected {wanted!r}"
                )

    @property
    def missing(self) -> int:
        """Expected values that have not come."""
        return len(self._expected)

    def counts(self) -> dict[str, int]:
        """For the bench's report."""
        return {"compared": self.compared, "mismatched": self.mismatched, "missing": self.missing}

    def check(self) -> None:
        """AssertionError on a mismatch, a missing value, or when nothing was compared."""
        assert self.compared, f"{self.name}: nothing was compared"
        assert not self.mismatched, f"{self.mismatched} of {self.compared} differ: " + "; ".join(
            self.differences
        )
        assert not self.missing, f"{self.name}: {self.missing} expected values did not come"
