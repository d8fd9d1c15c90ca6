# SPDX-License-Identifier: Apache-2.0
"""`jalapeno area`."""

from pathlib import Path
from typing import Annotated

import typer

from sim import area as flow
from sim import area_records as records
from sim.blocks import BLOCKS
from sim.blocks import block as named
from sim.cli_common import Config, JsonFile, chip, console
from sim.errors import InputError
from sim.report import check_writable, table, write_json

FIGURES = ("nand2", "flip_flops", "levels", "fo4")


def area(
    block: Annotated[
        str | None, typer.Argument(metavar="[BLOCK]", help="Block to map; see the list below.")
    ] = None,
    config: Config = "small",
    file: JsonFile = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 1 when a recorded block has grown.")
    ] = False,
    update: Annotated[bool, typer.Option("--update", help="Record what was measured.")] = False,
) -> None:
    """Area (NAND2 equivalents), flip-flops, mapped levels and delay (FO4) of a block.

    Needs Debian's qflow-tech-osu018; without opensta there is no delay. --check and --update take
    the recorded blocks instead of BLOCK.
    """
    if block is None and not (check or update):
        raise InputError(
            "BLOCK",
            "not given",
            "it must be named unless --check or --update is",
            "give for example jalapeno area cell",
        )
    if block is not None and (check or update):
        raise InputError(
            "BLOCK",
            block,
            "--check and --update take all recorded blocks",
            "leave it out, or leave out --check and --update",
        )
    check_writable(file)
    if block is None:
        _recorded(check, update, file)
        return
    known, chosen = named(block), chip(config)
    with console.status(f"mapping {block} of {config}"):
        found = flow.area(known.make(chosen), block)
    rows = [[block, 1, *(getattr(found.total, f) for f in FIGURES)]]
    rows += [
        [f"  {name}", count, *(getattr(part, f) for f in FIGURES)]
        for name, (count, part) in found.parts.items()
    ]
    title = f"area of {block} on {config} (measured: Yosys {found.yosys}, OSU 0.18 um)"
    table(console, title, ["block", "instances", *FIGURES], rows)
    if not found.timer:
        console.print("fo4 needs OpenSTA; on Debian: apt install opensta")
    if file is not None:
        write_json(file, {"block": block, "config": config} | found.to_json())


def _recorded(check: bool, update: bool, file: Path | None) -> None:
    comparisons, yosys = [], ""
    with console.status("mapping the recorded blocks") as status:
        for record in records.load():
            status.update(f"mapping {record.block} of {record.config}")
            now = records.measure(record.block, record.config)
            comparisons.append(records.Comparison(record, now.total))
            yosys = now.yosys
    rows = [row for c in comparisons for row in c.rows()]
    table(console, "recorded areas (measured)", list(records.HEAD), rows)
    if file is not None:
        named_rows = [dict(zip(records.HEAD, row, strict=True)) for row in rows]
        write_json(file, [row | {"source": "measured"} for row in named_rows])
    grown = [row for c in comparisons for row in c.grown]
    if update:
        records.save(comparisons, yosys)
    elif check and grown:
        table(console, "grown beyond the tolerance", list(records.HEAD), grown)
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("area", epilog=f"Blocks: {', '.join(BLOCKS)}.")(area)
