# SPDX-License-Identifier: Apache-2.0
"""`jalapeno cycles`."""

from typing import Annotated

import typer

from sim import cycles as suite
from sim.cli_common import JsonFile, console
from sim.report import check_writable, markdown, table, write_json


def cycles(
    check: Annotated[
        bool, typer.Option("--check", help="Exit 1 when a count differs from its record.")
    ] = False,
    update: Annotated[bool, typer.Option("--update", help="Record what was measured.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table in Markdown.")
    ] = False,
    file: JsonFile = None,
) -> None:
    """Run the recorded cycle suite and hold it against the recorded counts.

    With --check the exit code is 1 when a count rose, or changed at all without --update.
    """
    check_writable(file)
    records = suite.load()
    with console.status("running the cycle suite") as status:
        results = suite.measure(
            records, lambda r: status.update(f"running {r.kernel} on {r.config} {r.settings}")
        )
    shown = [r for r in results if r.changed] if check else results
    rows = [r.row() for r in shown]
    if as_markdown:
        typer.echo("Cycles (measured):\n")
        typer.echo(markdown(suite.HEAD, rows), nl=False)
    elif rows or not check:
        title = "differences from the record" if check else "cycle suite"
        table(console, f"{title} (cycles, measured)", suite.HEAD, rows)
    if file is not None:
        named = [dict(zip(suite.HEAD, r.row(), strict=True)) for r in results]
        write_json(file, [row | {"source": "measured"} for row in named])
    if update:
        suite.save(results)
    rose = any(r.percent is not None and r.percent > 0 for r in results)
    if check and (rose or (not update and any(r.changed for r in results))):
        raise typer.Exit(1)
    if check and not as_markdown:
        console.print(f"{len(results)} runs took what is recorded" if not rows else "recorded")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("cycles")(cycles)
