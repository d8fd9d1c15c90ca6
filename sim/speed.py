# SPDX-License-Identifier: Apache-2.0
"""How fast a tile simulates: a GEMM under cocotb, and the same in a C++ loop without Python."""

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from golden.formats import Format
from hw.config import ChipConfig
from sim.errors import InputError, ToolError
from sim.harness import TOP, blocks, sources
from sim.kernels.gemm import operand, placed, product, stored
from sim.kernels.system import Check, TileRun, simulate, tile_words
from sim.kernels.types import KernelRequest
from sim.programs.memory import TileMemory
from sim.verilator import build

MAIN = Path(__file__).parent / "cpp" / "bare.cpp"
LIMIT = 10_000_000  # cycles after which the loop gives up


@dataclass(frozen=True)
class Speed:
    """Cycles per second of processor time, the host's load included; measured.

    `cocotb` counts the process's start and the reading of the results too, `bare` its loop alone.
    `python_share`, derived, is what that adds per cycle, as a fraction of the time under cocotb.
    """

    config: str
    cycles: int
    cocotb: float
    bare: float
    build_s: float

    @property
    def python_share(self) -> float:
        return 1 - self.cocotb / self.bare


def measure(config: ChipConfig, m: int, n: int, k: int) -> Speed:
    """Speed of an MXFP8 x MXFP4 GEMM on a tile. ToolError when either run goes wrong."""
    if config.tiles != 1:
        raise InputError("--config", config.name, "it must be a single tile", "take small")
    rng = np.random.default_rng(0)
    act, weight = operand(rng, m, k, Format.MXFP8_E4M3), operand(rng, n, k, Format.MXFP4)
    memory = TileMemory(config.tile)
    p, out = placed(memory, act, weight, Format.BF16)
    program = p.finish()
    expected = stored(product(act, weight, config.tile.rows), Format.BF16)
    run = TileRun([program], [memory], [Check(out, expected)])
    result = simulate(KernelRequest(config, "gpt-oss", {}), [memory], [run])
    if result.mismatched:
        raise ToolError(f"gemm on {config.name} is wrong: its speed means nothing")
    (found,) = result.cycles

    words = tile_words(memory, program, config)
    files = sources(config)
    model = build(files, TOP, blocks=blocks(config, files), main=MAIN)
    with tempfile.TemporaryDirectory(prefix="jalapeno-speed-") as work:
        (Path(work) / "host0.hex").write_text("\n".join(words) + "\n")
        command = [str(model.program), "+host0=host0.hex", f"+words={len(words)}"]
        done = subprocess.run(
            [*command, f"+limit={LIMIT}"], cwd=work, capture_output=True, text=True
        )
    if done.returncode:
        raise ToolError(f"the bare loop did not end: {done.stdout}{done.stderr}")
    simulated, cycles, seconds = done.stdout.split()[-3:]
    # The program starts one host write later than the tile counts.
    if abs(int(cycles) - found) > 16:
        raise ToolError(f"the bare loop took {cycles} cycles, cocotb {found}")
    return Speed(
        config.name,
        found,
        result.simulated / result.cpu_seconds,
        int(simulated) / float(seconds),
        result.build.seconds,
    )
