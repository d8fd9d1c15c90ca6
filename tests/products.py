# SPDX-License-Identifier: Apache-2.0
"""Products with chosen operands on a simulated tile: one MATMUL a run, or many in one program."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from golden import fp32
from golden.formats import Format
from golden.kernels.trace import Stored
from golden.matmul import matmul
from hw.config import preset
from sim.errors import InputError
from sim.kernels.gemm import placed, product, stored
from sim.kernels.system import Check, SystemResult, TileRun, simulate
from sim.kernels.types import KernelRequest
from sim.programs.builder import TileProgram
from sim.programs.gemm import gemm
from sim.programs.memory import Buffer, TileMemory


def operand(codes: np.ndarray, fmt: Format, scales: np.ndarray | int = 127) -> Stored:
    """Codes [rows, K] with E8M0 scales [rows, blocks], or one for all."""
    codes = np.asarray(codes)
    if fmt is Format.BF16:
        return Stored(codes.astype(np.uint16), fmt)
    blocks = -(-codes.shape[1] // 32)
    scale = np.broadcast_to(np.asarray(scales, np.uint8), (len(codes), blocks))
    return Stored(codes.astype(np.uint8), fmt, np.ascontiguousarray(scale))


def run_products(
    pairs: Sequence[tuple[Stored, Stored]], config: str = "tiny", stall: str = "none", seed: int = 1
) -> SystemResult:
    """Runs act [M, K] times weight [N, K] of each pair and compares every bit of the FP32 results.

    Results that do not fit into the tile SRAM are cut along N.
    """
    chip = preset(config)
    tile = chip.tile
    runs = []
    room = tile.sram_bytes // 2
    for act, weight in pairs:
        m = len(act.codes)
        width = max(1, room // (4 * m * tile.cols)) * tile.cols
        for start in range(0, len(weight.codes), width):
            part = slice(start, start + width)
            scales = None if weight.scales is None else weight.scales[part]
            cut = Stored(weight.codes[part], weight.fmt, scales)
            memory = TileMemory(tile)
            p, out = placed(memory, act, cut, Format.FP32)
            expected = stored(product(act, cut, tile.rows), Format.FP32)
            runs.append(TileRun([p.finish()], [memory], [Check(out, expected)]))
    request = KernelRequest(chip, "gpt-oss", {}, stall, seed)
    return simulate(request, [TileMemory(tile)], runs)


@dataclass(frozen=True)
class Job:
    """act [M, K] times weight [N, K], plus bias [N] if there is one, into results of format `out`.

    `stream`: the weights start in HBM, else in KV SRAM.
    """

    act: Stored
    weight: Stored
    out: Format = Format.FP32
    bias: np.ndarray | None = None
    stream: bool = False

    @property
    def name(self) -> str:
        m, k = self.act.codes.shape
        form = f"{self.act.fmt.name} x {self.weight.fmt.name} to {self.out.name}"
        kind = " with bias" * (self.bias is not None) + " from HBM" * self.stream
        return f"{m} x {len(self.weight.codes)} x {k}, {form}{kind}"

    def expected(self, rows: int) -> Stored:
        a, w = self.act, self.weight
        result = matmul(a.codes, a.scales, a.fmt, w.codes, w.scales, w.fmt, rows, self.bias)
        return stored(result, self.out)


def _add(p: TileProgram, job: Job) -> Buffer:
    """Adds a job; it shares no memory with those before it and waits for none."""
    memory = p.memory
    (m, k), n = job.act.codes.shape, len(job.weight.codes)
    act = memory.buffer("act", m, k, job.act.fmt, job.weight.fmt)
    out = memory.buffer(job.name, m, n, job.out)
    bias = None if job.bias is None else memory.scalars("bias", n)
    # Nothing is filled or taken from the KV SRAM before all of the tile SRAM is there.
    memory.fill(act, job.act)
    if bias is not None:
        memory.fill(bias, Stored(fp32.bits(job.bias)[None], Format.FP32))
    w = job.weight
    weights = memory.weights("weights", w.codes, w.scales, w.fmt, job.stream)
    gemm(p, act, weights, out, bias)
    return out


def run_jobs(
    jobs: Iterable[Job], config: str = "tiny", stall: str = "none", seed: int = 1
) -> SystemResult:
    """Runs all jobs, as many in a program as the tile SRAM holds, without waits between them.

    Every bit of every result is compared.
    """
    chip = preset(config)
    memory = TileMemory(chip.tile)
    runs: list[TileRun] = []
    p, checks = TileProgram(memory), list[Check]()

    def close() -> None:
        nonlocal p, checks
        runs.append(TileRun([p.finish()], [memory.snapshot()], checks))
        memory.forget()
        memory.rewind(0)
        p, checks = TileProgram(memory), []

    for job in jobs:
        mark = memory.mark()
        try:
            out = _add(p, job)
        except InputError:
            if not checks:
                raise
            memory.rewind(mark)
            close()
            out = _add(p, job)
        checks.append(Check(out, job.expected(chip.tile.rows)))
    close()
    request = KernelRequest(chip, "gpt-oss", {}, stall, seed)
    return simulate(request, [memory], runs)
