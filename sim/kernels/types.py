# SPDX-License-Identifier: Apache-2.0
"""A kernel as command line, cycle suite and scaling model see it: options in, a result out."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hw.config import ChipConfig
from sim.errors import InputError

MODELS = ("gpt-oss", "deepseek-r1", "kimi-k2.5")
STALLS = {
    "none": 0,
    "light": 10,
    "heavy": 60,
}  # percent of the cycles in which a stream stands still
SOURCES = ("measured", "derived", "assumed", "official", "reported")

Setting = int | str


@dataclass(frozen=True)
class Option:
    """One name that `--set NAME=VALUE` takes. Its type is that of `default`.

    `least` and `most` bound an integer, `choices` lists the values of a word.
    """

    default: Setting
    doc: str
    least: int = 1
    most: int = 65_535
    choices: tuple[str, ...] = ()

    def parse(self, name: str, text: str) -> Setting:
        """The value of `text`; InputError names what is allowed."""
        if isinstance(self.default, str):
            if self.choices and text not in self.choices:
                raise InputError(
                    name,
                    text,
                    f"it must be one of {', '.join(self.choices)}",
                    f"give for example --set {name}={self.default}",
                )
            return text
        try:
            value = int(text)
        except ValueError:
            raise InputError(
                name,
                text,
                "it must be a whole number",
                f"give for example --set {name}={self.default}",
            ) from None
        if not self.least <= value <= self.most:
            raise InputError(
                name,
                value,
                f"it must be from {self.least} to {self.most}",
                f"give for example --set {name}={self.default}",
            )
        return value


@dataclass(frozen=True)
class KernelRequest:
    """One run that is asked for; `settings` has a value for every option of the kernel.

    `stall` is a key of `STALLS`; `waves` is the FST file to write, or None; `check_order` has the
    order of the commands checked (`sim.order_check`).
    """

    config: ChipConfig
    model: str
    settings: Mapping[str, Setting]
    stall: str = "none"
    seed: int = 0
    waves: Path | None = None
    check_order: bool = False


@dataclass(frozen=True)
class KernelResult:
    """One finished run, as `--json` writes it.

    `max_error` is the largest absolute error against the float64 reference and `max_error_bound`
    what it may be. `fraction_of_roofline` is the time that the `roofline` (its name) allows, over
    the time taken. `counters` are cycles by engine and activity. `sources` says for each figure
    whether it was measured, derived or assumed; `differences` name the first wrong value of each
    buffer that differs. `order_checked` counts the commands whose order was checked, `order_faults`
    says which came too early. `extra` holds a kernel's own figures, `text` what a model has said
    or a note on the sizes.
    """

    kernel: str
    config: str
    model: str
    seed: int
    shape: Mapping[str, Setting]
    compared: int
    mismatched: int
    max_error: float
    max_error_bound: float
    cycles: int
    fraction_of_peak: float
    fraction_of_roofline: float
    roofline: str
    counters: Mapping[str, Mapping[str, int]]
    wall_s: float
    build_s: float
    cycles_per_s: float
    sources: Mapping[str, str] = field(default_factory=dict)
    differences: tuple[str, ...] = ()
    extra: Mapping[str, int | float] = field(default_factory=dict)
    text: str = ""
    order_checked: int = 0
    order_faults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for figure, source in self.sources.items():
            if source not in SOURCES:
                raise ValueError(
                    f"source of {figure} must be one of {', '.join(SOURCES)}, not {source!r}"
                )

    @property
    def passed(self) -> bool:
        """Something was compared, nothing differs, no command came too early, and the error is
        within its bound, which is finite.
        """
        return (
            self.compared > 0
            and self.mismatched == 0
            and not self.order_faults
            and self.max_error <= self.max_error_bound < float("inf")
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Kernel:
    """A kernel of `KERNELS`: `run` builds what it needs, simulates and compares.

    It raises InputError for sizes that do not fit, NoBound for data that leave the error without a
    bound, and ToolError when a build or a bench fails.
    """

    name: str
    doc: str
    options: Mapping[str, Option]
    run: Callable[[KernelRequest], KernelResult]
    models: tuple[str, ...] = MODELS[:1]  # whose block it computes
    fill: Callable[[str, Mapping[str, Setting]], dict[str, Setting]] | None = None  # see settings
    variant: "Kernel | None" = None  # of the same name, for other models

    @property
    def all_models(self) -> tuple[str, ...]:
        """Those of its variant too."""
        return self.models + (self.variant.all_models if self.variant else ())

    def of(self, model: str) -> "Kernel":
        """The variant for a model of `all_models`."""
        return self.variant.of(model) if self.variant and model not in self.models else self

    def settings(self, given: Mapping[str, str], model: str = MODELS[0]) -> dict[str, Setting]:
        """Every option's value: the given texts parsed, defaults elsewhere.

        `fill` replaces defaults that depend on the model.
        """
        for name in given:
            if name not in self.options:
                raise InputError(
                    "--set",
                    name,
                    f"kernel {self.name} takes {', '.join(self.options)}",
                    f"see jalapeno sim {self.name} --help",
                )
        parsed = {
            name: option.parse(name, given[name]) if name in given else option.default
            for name, option in self.options.items()
        }
        return parsed if self.fill is None else self.fill(model, parsed)
