# SPDX-License-Identifier: Apache-2.0
"""`jalapeno speed`."""

from dataclasses import asdict
from typing import Annotated

import typer

from sim.cli_common import Config, JsonFile, chip, console
from sim.errors import InputError
from sim.report import check_writable, table, write_json


def speed(
    config: Config = "small",
    m: Annotated[int, typer.Option(metavar="1..256", help="Activation rows.")] = 64,
    n: Annotated[int, typer.Option(metavar="1..4096", help="Result columns.")] = 128,
    k: Annotated[int, typer.Option(metavar="1..16384", help="Contraction length.")] = 2048,
    file: JsonFile = None,
) -> None:
    """Simulated cycles per second of processor time: a tile under cocotb, and in a C++ loop."""
    from sim import speed as measurement

    for name, size, most, usual in (
        ("--m", m, 256, 64),
        ("--n", n, 4096, 128),
        ("--k", k, 16384, 2048),
    ):
        if not 1 <= size <= most:
            remedy = f"give for example {name} {usual}"
            raise InputError(name, size, f"it must be from 1 to {most}", remedy)
    check_writable(file)
    chosen = chip(config)
    with console.status(f"building and running {config} twice"):
        found = measurement.measure(chosen, m, n, k)
    values = asdict(found) | {"python_share": found.python_share}
    rows: list[list[object]] = [
        ["cycles", found.cycles, "measured"],
        ["build_s", round(found.build_s, 1), "measured"],
        ["cycles per CPU-second, cocotb", round(found.cocotb), "measured"],
        ["cycles per CPU-second, C++ loop", round(found.bare), "measured"],
        ["share of Python in the time", f"{100 * found.python_share:.0f} %", "derived"],
    ]
    table(console, f"speed of {config}, gemm {m} x {n} x {k}", ["figure", "value", "source"], rows)
    if file is not None:
        write_json(file, values)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("speed")(speed)
