# SPDX-License-Identifier: Apache-2.0
"""`jalapeno throughput`: time between tokens and rates of full models, beside published figures."""

from collections.abc import Collection, Sequence
from typing import Any

from golden import models, traffic
from golden.models import ModelConfig
from sim import cycles
from sim.cycles import Record
from sim.errors import InputError, ToolError
from sim.scaling.assumptions import Assumptions
from sim.scaling.figures import Figure
from sim.scaling.published import published
from sim.scaling.records import SOURCES_OF, figures, measurements
from sim.scaling.step import ROOFLINE, Fractions, Step, decode_step, fractions

HOW = {
    "matrices": "non-expert weights: bytes / slices / HBM rate / streamed GEMM's fraction",
    "experts": "chosen experts: bytes / slices / HBM rate / experts' fraction",
    "attention": "longer of cache / HBM rate and MAC / array rate, "
    "each over its fraction; that is GQA's",
    "commands": "layers x what a recorded layer takes beyond these parts",
    "exchange": "layers x exposed collectives x their time",
}
NEEDS: dict[str, tuple[str, ...]] = {  # the measurements behind each part
    "matrices": ("stream", "dense"),
    "experts": ("experts", "dense"),
    "attention": ("stream", "attention"),
    "commands": tuple(SOURCES_OF),
    "exchange": (),
}


def checked(model: ModelConfig, a: Assumptions, f: Fractions, batch: int) -> Step:
    """The step of `batch` tokens; ToolError when it is shorter than its roofline."""
    step, least = decode_step(model, a, f, batch), decode_step(model, a, ROOFLINE, batch)
    if step.total < least.total * (1 - 1e-9):
        raise ToolError(
            f"{model.name} takes {step.total:.0f} cycles a step, less than its roofline "
            f"of {least.total:.0f}: a fraction or the arithmetic is wrong"
        )
    return step


def model_figures(
    model: ModelConfig, a: Assumptions, f: Fractions, found: Collection[str]
) -> list[Figure]:
    """All figures of one model; one without its measurement in `found` has no value and says so."""
    name, ms, us = model.name, 1e3 / a.clock_hz, 1e6 / a.clock_hz
    official = published(name)

    def figure(
        title: str,
        value: float,
        unit: str,
        how: str,
        needs: Collection[str] = (),
        source: str = "derived",
    ) -> Figure:
        lacks = dict.fromkeys(SOURCES_OF[need].kernel for need in needs if need not in found)
        if lacks:
            how = f"needs records of {', '.join(lacks)}; see above"
            return Figure(name, title, None, unit, source, how)
        return Figure(name, title, value, unit, source, how)

    least = decode_step(model, a, ROOFLINE)
    step, full = checked(model, a, f, 1), checked(model, a, f, a.batch)
    time = step.total * ms
    rate = a.batch / (full.total / a.clock_hz) / (a.chips * a.chip_w / 1e3)
    wanted = official["time_between_tokens"].value
    assert wanted is not None
    return [
        figure(
            "weights read per token",
            sum(traffic.weight_bytes_per_token(model).values()) / 1e9,
            "GB",
            "formats of the published checkpoint",
        ),
        figure(
            "cache read per token",
            traffic.kv_bytes_read(model, a.context) / 1e9,
            "GB",
            f"BF16, context of {a.context}",
        ),
        figure(
            "roofline of the time between tokens",
            least.total * ms,
            "ms",
            "all fractions 1, no time of commands; exposed collectives included",
        ),
        *(
            figure(
                f"time of {part}",
                getattr(step, part) * us,
                "us",
                how,
                NEEDS[part],
                "assumed" if part == "exchange" else "derived",
            )
            for part, how in HOW.items()
        ),
        figure(
            "time between tokens",
            time,
            "ms",
            f"sum of these times; batch 1, {a.chips} chips, even split, no other waits",
            tuple(SOURCES_OF),
        ),
        official["time_between_tokens"],
        figure(
            "time between tokens, ours over published",
            time / wanted,
            "",
            "the published runs use 4-bit weights, on chips not stated",
            tuple(SOURCES_OF),
        ),
        figure(
            "tokens per user",
            round(1e3 / time),
            "tok/s/user",
            "1 / time between tokens",
            tuple(SOURCES_OF),
        ),
        official["user_rate"],
        figure(
            "output tokens per kW",
            round(rate),
            "tok/s/kW",
            f"batch {a.batch}, decode only, rated {a.chip_w:.0f} W x {a.chips} chips",
            tuple(SOURCES_OF),
        ),
        official["power_rate"],
    ]


def throughput(
    names: Sequence[str],
    records: Sequence[Record] | None = None,
    assumptions: Assumptions | None = None,
) -> list[dict[str, Any]]:
    """Rows {model, figure, value, unit, source, how}: assumptions, measurements, then each model.

    `records` default to the recorded cycle suite. InputError for an unknown model; ToolError when a
    record or a result is better than its roofline.
    """
    known = models.MODELS
    for name in names:
        if name not in known:
            raise InputError(
                "MODEL", name, f"it must be one of {', '.join(known)}", "name one of these"
            )
    a = assumptions or Assumptions()
    found = measurements(cycles.load() if records is None else records)
    f = fractions(found)
    rows = a.figures() + figures(found)
    if len(found) == len(SOURCES_OF):
        rows.append(
            Figure(
                "all",
                "commands of a layer",
                f.commands,
                "cycles",
                "derived",
                "measured layer per token less its parts; carried to full size unchanged",
            )
        )
    for name in dict.fromkeys(names):
        rows += model_figures(known[name], a, f, found)
    return [row.row() for row in rows]
