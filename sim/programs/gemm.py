# SPDX-License-Identifier: Apache-2.0
"""GEMM: out [m, n] = act [m, k] times weights [n, k] transposed (plus a bias [n]), any sizes that
fit the tile.
"""

from sim.programs.builder import TileProgram
from sim.programs.memory import Buffer, Weights


def gemm(
    p: TileProgram, act: Buffer, weights: Weights, out: Buffer, bias: Buffer | None = None
) -> None:
    """Blocks of at most acc_rows activation rows; streamed weights are fetched once per block."""
    block = p.config.acc_rows
    for start in range(0, act.rows, block):
        rows = min(block, act.rows - start)
        p.matmul(
            Buffer(act.name, act.at(start), rows, act.cols, act.fmt, act.stride),
            weights,
            Buffer(out.name, out.at(start), rows, out.cols, out.fmt, out.stride),
            bias,
        )
