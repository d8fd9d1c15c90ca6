# SPDX-License-Identifier: Apache-2.0
"""`jalapeno sim` and `jalapeno demo`."""

from pathlib import Path
from typing import Annotated

import typer

from golden.bounds import NoBound
from sim.cli_common import Config, JsonFile, chip, choice, console
from sim.errors import InputError
from sim.kernels import KERNELS
from sim.kernels.types import MODELS, STALLS, Kernel, KernelRequest, KernelResult
from sim.report import check_writable, show, write_json
from sim.runner import MAX_SEED

DEMO = ("layer", "generate")  # kernels
DEMO_CONFIG = "small"
NEXT = """[bold]Where to look next[/]
  jalapeno sim gemm --set m=1 --set weights=hbm   the same tile, held to its weight stream
  jalapeno throughput                             what the cycles mean for the full models
  jalapeno verilog tile --config small -o DIR     the RTL that has just run
  docs/architecture.md, docs/numerics.md, docs/programming.md"""


def _options(kernel: Kernel) -> str:
    parts = []
    for name, option in kernel.options.items():
        allowed = (
            "|".join(option.choices)
            if option.choices
            else (f"{option.least}..{option.most}" if isinstance(option.default, int) else "WORD")
        )
        parts.append(f"{name}={allowed} ({option.doc}; {option.default})")
    models = (
        ""
        if len(kernel.all_models) == len(MODELS) == len(kernel.models)
        else (f" --model {'|'.join(kernel.models)}")
    )
    text = f"{kernel.name}{models}: {kernel.doc} " + ", ".join(parts)
    return text if kernel.variant is None else f"{text}\n\n{_options(kernel.variant)}"


def settings(
    kernel: Kernel, items: list[str], model: str = MODELS[0], prompt: str | None = None
) -> dict[str, int | str]:
    """Every option's value from the texts NAME=VALUE of `--set`, and from that of `--prompt`."""
    given: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name or not value:
            raise InputError("--set", item, "it must be NAME=VALUE", "give for example --set m=4")
        given[name] = value
    if prompt is not None:  # which may be empty
        given["prompt"] = prompt
    return kernel.settings(given, model)


def _run(kernel: Kernel, request: KernelRequest, file: Path | None) -> KernelResult:
    with console.status(
        f"{kernel.name} on {request.config.name}: building what is not cached, then simulating"
    ):
        try:
            result = kernel.run(request)
        except NoBound as error:
            raise InputError(
                "--seed",
                request.seed,
                f"with its data and these sizes the error has no bound ({error})",
                "take another seed or larger sizes",
            ) from None
    show(console, result)
    if file is not None:
        write_json(file, result.to_json())
        console.print(f"written: {file}", markup=False)
    return result


def sim(
    kernel: Annotated[str, typer.Argument(metavar="KERNEL", help=f"One of {', '.join(KERNELS)}.")],
    config: Config = "small",
    model: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(MODELS)}; default: the kernel's first.", metavar="MODEL"
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A size of the kernel, see below; may be repeated."
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What the text of generate begins with."),
    ] = None,
    stall: Annotated[
        str,
        typer.Option(
            metavar="|".join(STALLS),
            help="How often streams stand still: 0, 10 or 60 % of the cycles.",
        ),
    ] = "none",
    seed: Annotated[int, typer.Option(help="Seed of data, stalls and power-up values.")] = 0,
    waves: Annotated[
        Path | None,
        typer.Option(metavar="FILE.fst", help="Record all signals; uses a build of its own."),
    ] = None,
    check_order: Annotated[
        bool,
        typer.Option(
            "--check-order",
            help="Also report every command that was started before what it depends on was done.",
        ),
    ] = False,
    json_: JsonFile = None,
) -> None:
    """Run a kernel in RTL, compare every bit with the golden model, and print its cycles.

    Exit 0 only when something was compared and nothing differs.
    """
    chosen = KERNELS[choice("KERNEL", kernel, tuple(KERNELS))]
    if not 0 <= seed <= MAX_SEED:
        raise InputError(
            "--seed", seed, f"it must be from 0 to {MAX_SEED}", "give for example --seed 1"
        )
    if waves is not None and (waves.suffix != ".fst" or not waves.absolute().parent.is_dir()):
        raise InputError(
            "--waves",
            str(waves),
            "it must be a .fst file in a directory that exists",
            "give for example --waves run.fst",
        )
    check_writable(waves, "--waves")
    check_writable(json_)
    model = chosen.models[0] if model is None else model
    if choice("--model", model, MODELS) not in chosen.all_models:
        raise InputError(
            "--model",
            model,
            f"kernel {kernel} computes that of {', '.join(chosen.all_models)} only",
            f"give --model {chosen.models[0]}",
        )
    chosen = chosen.of(model)
    request = KernelRequest(
        chip(config),
        model,
        settings(chosen, set_ or [], model, prompt),
        choice("--stall", stall, tuple(STALLS)),
        seed,
        waves,
        check_order,
    )
    if not _run(chosen, request, json_).passed:
        raise typer.Exit(1)


def demo() -> None:
    """Run a GPT-OSS-shaped decoder layer on one tile, let a small model write a line of text on
    it, then say where to look next.
    """
    passed = True
    for name in DEMO:
        kernel = KERNELS[name]
        request = KernelRequest(chip(DEMO_CONFIG), MODELS[0], kernel.settings({}))
        passed &= _run(kernel, request, None).passed
    console.print(NEXT)
    if not passed:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add both commands to `app`."""
    app.command("sim", epilog="\n\n".join(map(_options, KERNELS.values())))(sim)
    app.command("demo")(demo)
