# SPDX-License-Identifier: Apache-2.0
"""The published figures of `data/published.toml`."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from sim.scaling.figures import Figure

DATA = Path(__file__).parent.parent / "data" / "published.toml"
TITLES = {
    "time_between_tokens": "published: least time between tokens",
    "user_rate": "published: tokens per user at that point",
    "power_rate": "published: peak input + output tokens per kW",
}


@cache
def tables() -> dict[str, dict[str, Any]]:
    """The file's tables, by model."""
    return tomllib.loads(DATA.read_text())


def published(model: str) -> dict[str, Figure]:
    """What is published of `model`: the figures of `TITLES`, by key."""
    found = tables()[model]
    rival = found["rival"]
    notes = {
        "time_between_tokens": f"{rival['name']}: {rival['time_between_tokens']} ms",
        "user_rate": "the same runs",
        "power_rate": f"by rated power; {rival['name']}: {rival['power_rate']}",
    }
    return {
        key: Figure(
            model, title, found[key]["value"], found[key]["unit"], found[key]["source"], notes[key]
        )
        for key, title in TITLES.items()
    }
