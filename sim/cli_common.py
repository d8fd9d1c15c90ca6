# SPDX-License-Identifier: Apache-2.0
"""What the commands share: consoles, common options, and the preset by its name."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hw.config import PRESETS, ChipConfig, preset
from sim.errors import InputError

console = Console()
errors = Console(stderr=True, soft_wrap=True, highlight=False)

Config = Annotated[
    str, typer.Option("--config", help=f"One of {', '.join(PRESETS)}.", metavar="PRESET")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the result here.", metavar="FILE")
]


def choice(name: str, value: str, known: tuple[str, ...]) -> str:
    """`value` if it is known; InputError lists what is."""
    if value not in known:
        raise InputError(name, value, f"it must be one of {', '.join(known)}", "name one of these")
    return value


def chip(name: str) -> ChipConfig:
    """The preset `name`; InputError lists the known ones."""
    return preset(choice("--config", name, tuple(PRESETS)))
