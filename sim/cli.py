# SPDX-License-Identifier: Apache-2.0
"""The command `jalapeno`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from sim import cli_area, cli_cycles, cli_sim, cli_speed
from sim.blocks import BLOCKS
from sim.blocks import block as named
from sim.cli_common import Config, JsonFile, chip, console, errors
from sim.errors import InputError, ToolError

app = typer.Typer(
    name="jalapeno",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="RTL model of an LLM-inference chip: "
    "simulate its kernels, emit its Verilog, count its cycles.",
)


@app.command()
def doctor() -> None:
    """List the tools found, their versions, what is missing and how to get it."""
    from sim import doctor as checks
    from sim.report import table

    found = checks.findings()
    table(
        console,
        "jalapeno doctor",
        ["what", "state", "found", "how to get it"],
        [
            (
                f.name,
                "ok" if f.ok else "optional" if f.optional else "MISSING",
                f.found,
                "" if f.ok else f.remedy,
            )
            for f in found
        ],
    )
    if any(not f.ok and not f.optional for f in found):
        raise typer.Exit(1)


@app.command(epilog=f"Blocks: {', '.join(BLOCKS)}.")
def verilog(
    block: Annotated[
        str, typer.Argument(metavar="BLOCK", help="Block to emit; see the list below.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Directory to write to.")
    ],
    config: Config = "small",
) -> None:
    """Write the Verilog of a block and its JSON description; equal to the byte on every run."""
    from hw.verilog import description, emit, waivers

    known, chosen = named(block), chip(config)
    with console.status(f"emitting {block} of {config}"):
        component = known.make(chosen)
        files = emit(component, block)
        files[f"{block}.json"] = description(component, block, chosen, files)
        files["waivers.vlt"] = waivers()
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (output / name).write_text(text)
    except OSError as error:
        raise InputError(
            "-o",
            str(output),
            f"it cannot be written ({error.strerror})",
            "name a directory of yours",
        ) from None
    console.print(f"{len(files)} files, {sum(map(len, files.values())):,} bytes, in {output}")


@app.command()
def throughput(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Default: all.")
    ] = None,
    file: JsonFile = None,
) -> None:
    """Full-model time between tokens and tokens per second, beside the published figures."""
    from sim.kernels.types import MODELS
    from sim.report import table, write_json

    for model in models or ():
        if model not in MODELS:
            raise InputError(
                "MODEL", model, f"it must be one of {', '.join(MODELS)}", "name one of these"
            )
    from sim.scaling import throughput as compute

    with console.status("composing the full models"):
        rows = compute(list(models or MODELS))
    if file is not None:
        write_json(file, rows)
    head = list(rows[0])
    table(console, "throughput", head, [[row[name] for name in head] for row in rows])


cli_sim.register(app)
cli_cycles.register(app)
cli_area.register(app)
cli_speed.register(app)


def main(arguments: list[str] | None = None) -> int:
    """Entry point: one line and exit 2 for bad input, one message and exit 1 when a tool fails."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        return app(given or ["--help"], prog_name="jalapeno", standalone_mode=False) or 0
    except KeyboardInterrupt:
        return 130
    except InputError as error:
        errors.print(f"jalapeno: {error}", markup=False)
        return 2
    except MemoryError as error:
        reason = f"more is needed ({error})" if str(error) else "more is needed"
        errors.print(
            f"jalapeno: memory is too little, but {reason}; take smaller sizes", markup=False
        )
        return 2
    except ToolError as error:
        errors.print(f"jalapeno: {error}", markup=False)
        return 1
    except Exception as error:
        # Typer's usage errors: their class is in click or inside typer, depending on its version.
        if not hasattr(error, "format_message"):
            raise
        errors.print(f"jalapeno: {error.format_message()}; see jalapeno --help", markup=False)
        return 2


def entry() -> None:
    """The installed script."""
    sys.exit(main())
