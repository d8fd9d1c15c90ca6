# SPDX-License-Identifier: Apache-2.0
"""Tables: rich ones for the terminal, Markdown for CI summaries, JSON files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sim.errors import InputError
from sim.kernels.types import KernelResult

DIFFERENCES = 8  # wrong buffers that a report names


def cell(value: Any) -> str:
    """A value as tables show it: thousands with commas, other numbers to 4 significant digits."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; numbers are right-aligned. Texts are shown as they are, brackets included."""
    result = Table(title=escape(title), title_justify="left")
    for i, name in enumerate(head):
        numeric = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        result.add_column(name, justify="right" if numeric else "left")
    for row in rows:
        result.add_row(*(escape(cell(value)) for value in row))
    console.print(result)


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The same table in Markdown."""
    lines = [head, ["---"] * len(head), *([cell(value) for value in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _unwritable(name: str, file: Path, error: OSError) -> InputError:
    return InputError(
        name,
        str(file),
        f"it cannot be written ({error.strerror})",
        "name a file in a directory that exists",
    )


def check_writable(file: Path | None, name: str = "--json") -> None:
    """InputError when `file`, the value of option `name`, cannot be written.

    For before a long run, which would otherwise be lost. What a file holds is left as it is.
    """
    if file is None:
        return
    try:
        existed = file.exists()
        with file.open("a"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise _unwritable(name, file, error) from None


def write_json(file: Path, value: Any) -> None:
    """Write `value` to `file`; InputError when that is not possible."""
    try:
        file.write_text(json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise _unwritable("--json", file, error) from None


def show(console: Console, result: KernelResult) -> None:
    """Print one finished run."""
    figures: list[tuple[str, Any]] = [
        ("compared", result.compared),
        ("mismatched", result.mismatched),
        ("max_error", result.max_error),
        ("max_error_bound", result.max_error_bound),
        ("cycles", result.cycles),
        ("fraction_of_peak", result.fraction_of_peak),
        ("fraction_of_roofline", result.fraction_of_roofline),
        ("build_s", result.build_s),
        ("wall_s", result.wall_s),
        ("cycles_per_s", result.cycles_per_s),
        *result.extra.items(),
    ]
    shape = " ".join(f"{name}={value}" for name, value in result.shape.items())
    table(
        console,
        f"{result.kernel} on {result.config} ({result.model}), {shape}, seed {result.seed}",
        ["figure", "value", "source"],
        [(name, cell(value), result.sources.get(name, "measured")) for name, value in figures],
    )
    console.print(f"roofline: {result.roofline}")
    if result.counters:
        states = list(
            dict.fromkeys(state for engine in result.counters.values() for state in engine)
        )
        table(
            console,
            "cycles by engine (measured)",
            ["engine", *states],
            [
                [engine, *(counts.get(state, 0) for state in states)]
                for engine, counts in result.counters.items()
            ],
        )
    verdict = (
        "[green]PASS[/]: equal to the golden model in every bit"
        if result.passed
        else (
            "[red]FAIL[/]: "
            + (
                "nothing was compared"
                if not result.compared
                else f"{result.mismatched} of {result.compared} values differ"
                if result.mismatched
                else f"{len(result.order_faults)} commands came too early"
                if result.order_faults
                else "the error is above its bound"
            )
        )
    )
    if result.text:
        console.print(result.text, markup=False, highlight=False)
    for line in (*result.differences[:DIFFERENCES], *result.order_faults[:DIFFERENCES]):
        console.print(line, markup=False)
    if result.order_checked:
        console.print(f"order checked: {result.order_checked} commands")
    console.print(verdict)
