# SPDX-License-Identifier: Apache-2.0
"""Runs a cocotb bench of `tb/` on a build: parameters in, results out, a directory for each run."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import cocotb_tools.config
import find_libpython
import numpy as np

from sim.errors import ToolError
from sim.verilator import Build

PARAMETERS = "parameters.json"
ARRAYS = "arrays.npz"
REPORT = "report.json"
REPORT_ARRAYS = "report.npz"
RESULTS = "results.xml"
LOG = "run.log"
MAX_SEED = (1 << 31) - 2


@dataclass(frozen=True)
class Outcome:
    """One test of the bench; `failure` is empty when it passed."""

    name: str
    failure: str


@dataclass(frozen=True)
class RunResult:
    """A finished run: `report` and `arrays` are what the bench handed to `tb.bench.report`.

    `seconds` is the wall time of the simulator's process, `cpu_seconds` its processor time.
    """

    outcomes: tuple[Outcome, ...]
    report: dict[str, Any]
    arrays: dict[str, np.ndarray]
    seconds: float
    cpu_seconds: float

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failure]


def children_cpu_seconds() -> float:
    """Processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _environment(build: Build, bench: str, seed: int, only: str | None) -> dict[str, str]:
    library = find_libpython.find_libpython()
    if library is None:
        raise ToolError(
            "Python's shared library was not found and cocotb needs it; on Debian: apt install "
            f"libpython{sys.version_info.major}.{sys.version_info.minor}"
        )
    return (
        os.environ
        | {
            "COCOTB_TOPLEVEL": build.top,
            "COCOTB_TEST_MODULES": bench,
            "TOPLEVEL_LANG": "verilog",
            "COCOTB_RESULTS_FILE": RESULTS,
            "COCOTB_RANDOM_SEED": str(seed),
            "COCOTB_TRUST_INERTIAL_WRITES": "1",
            "COCOTB_ANSI_OUTPUT": "0",
            "GPI_USERS": f"{library};{cocotb_tools.config.pygpi_entry_point()}",
            "PYGPI_PYTHON_BIN": sys.executable,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        | ({"COCOTB_TEST_FILTER": f"{only}$"} if only else {})
    )


def _outcomes(file: Path) -> tuple[Outcome, ...]:
    if not file.is_file():
        return ()
    outcomes = []
    for case in ElementTree.parse(file).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        wrong = [part for part in case if part.tag in ("failure", "error")]
        text = "; ".join(
            p.get("error_msg") or p.get("message") or (p.text or "failed").strip() for p in wrong
        )
        outcomes.append(Outcome(case.get("name", "?"), text))
    return tuple(outcomes)


def run(
    build: Build,
    bench: str,
    *,
    parameters: Mapping[str, Any] | None = None,
    arrays: Mapping[str, np.ndarray] | None = None,
    files: Mapping[str, str] | None = None,
    seed: int = 0,
    plusargs: Sequence[str] = (),
    waves: Path | None = None,
    only: str | None = None,
    timeout_s: float | None = None,
    check: bool = True,
) -> RunResult:
    """Run the cocotb module `bench` (as "tb.bench_of_something") on `build`.

    The bench gets `parameters` (JSON), `arrays` and `files` (name: text, in its working directory,
    for $readmemh) through `tb.bench`. `seed` sets cocotb's random seed and the values of all
    registers and memories at power-up. `waves` is an FST file, for a build with waves. `only` is
    the name of one test.

    ToolError when no test ran, or when one failed and `check` is set; the run's directory is then
    kept and named.
    """
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be from 0 to {MAX_SEED}, not {seed!r}")
    if waves is not None and not build.waves:
        raise ValueError(f"build must be one with waves to write {waves}")
    place = Path(tempfile.mkdtemp(prefix="jalapeno-run-"))
    (place / PARAMETERS).write_text(json.dumps(dict(parameters or {})))
    np.savez(place / ARRAYS, **dict(arrays or {}))  # type: ignore[arg-type]
    for name, text in (files or {}).items():
        (place / name).write_text(text)
    command = [
        str(build.program),
        "+verilator+rand+reset+2",
        f"+verilator+seed+{seed + 1}",
        *plusargs,
    ]
    if waves is not None:
        command += ["--trace", "--trace-file", str(waves.absolute())]
    start, cpu_start = time.monotonic(), children_cpu_seconds()
    with (place / LOG).open("w") as log:
        try:
            code = subprocess.run(
                command,
                cwd=place,
                env=_environment(build, bench, seed, only),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=timeout_s,
            ).returncode
        except subprocess.TimeoutExpired:
            raise ToolError(
                f"bench {bench} took more than {timeout_s} s; its log: {place / LOG}"
            ) from None
    seconds = time.monotonic() - start
    cpu_seconds = children_cpu_seconds() - cpu_start
    outcomes = _outcomes(place / RESULTS)
    if not outcomes:
        tail = "\n".join((place / LOG).read_text(errors="replace").splitlines()[-8:])
        raise ToolError(
            f"bench {bench} ran no test (exit {code}):\n{tail}\nthe whole log: {place / LOG}"
        )
    report = json.loads((place / REPORT).read_text()) if (place / REPORT).is_file() else {}
    found: dict[str, np.ndarray] = {}
    if (place / REPORT_ARRAYS).is_file():
        with np.load(place / REPORT_ARRAYS) as stored:
            found = {name: stored[name] for name in stored.files}
    result = RunResult(outcomes, report, found, seconds, cpu_seconds)
    if check and (result.failures or code):
        reasons = [f"{o.name}: {o.failure}" for o in result.failures] or [f"exit {code}"]
        raise ToolError(
            "\n".join(
                [
                    f"bench {bench} failed with seed {seed}:",
                    *reasons,
                    f"the whole log: {place / LOG}",
                ]
            )
        )
    shutil.rmtree(place)
    return result
