# SPDX-License-Identifier: Apache-2.0
"""Products with chosen operands on a simulated tile, one MATMUL a run, back to back."""

from collections.abc import Sequence

import numpy as np

from golden.formats import Format
from golden.kernels.trace import Stored
from hw.config import preset
from sim.kernels.gemm import placed, product, stored
from sim.kernels.system import Check, SystemResult, TileRun, simulate
from sim.kernels.types import KernelRequest
from sim.programs.memory import TileMemory


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
