# SPDX-License-Identifier: Apache-2.0
"""Where a job's weight tiles lie: the address side of the weight loader's walker."""

from amaranth import Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hw.block_table import ENTRY_BITS
from hw.config import TileConfig
from hw.matrix_job import JOB_LAYOUT
from hw.page_check import LARGEST_BLOCK


def place_layout(config: TileConfig) -> data.StructLayout:
    """Where the lines of a weight tile lie, one KV SRAM row each.

    Line i (from the tile's first on) is row `base` + i * gstride; if `paged`, the row of a table
    entry is added: along N that is `entry`, along K (`along_k`) line i is line `start` + i of
    blocks of 2^shift lines from `entry` on, and i counts from the beginning of its block.
    """
    return data.StructLayout(
        {
            "base": 24,
            "gstride": 16,
            "paged": 1,
            "along_k": 1,
            "entry": ENTRY_BITS,
            "start": LARGEST_BLOCK - 3,
            "shift": 3,
        }
    )


class WeightWalk(wiring.Component):
    """`place` is that of the tile which the walker describes now; combinational in `job` for the
    first tile of a job, then (`walking`) from registers. `step`: the tile is taken; `last_k`: it is
    the last of its column tile.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        super().__init__(
            {
                "job": In(JOB_LAYOUT),
                "walking": In(1),
                "step": In(1),
                "last_k": In(1),
                "place": Out(place_layout(config)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        row_bits = self.config.rows.bit_length() - 1
        col_bits = self.config.cols.bit_length() - 1
        job, pair = self.job.command, self.job.pair
        walking = self.walking
        base_n, base = Signal(24, reset_less=True), Signal(24, reset_less=True)
        base_n_now = Signal(24)
        entry = Signal(ENTRY_BITS, reset_less=True)
        start = Signal(LARGEST_BLOCK - 3, reset_less=True)
        tile, tile_now = Signal(LARGEST_BLOCK, reset_less=True), Signal(LARGEST_BLOCK)
        lines = Signal(row_bits + 1)  # of a whole weight tile
        place = self.place
        m.d.comb += [
            base_n_now.eq(Mux(walking, base_n, job.weight_addr)),
            tile_now.eq(Mux(walking, tile, 0)),
            place.base.eq(Mux(walking, base, job.weight_addr)),
            place.gstride.eq(job.weight_gstride),
            place.paged.eq(job.paged),
            place.along_k.eq(job.paged & job.page_k),
            place.entry.eq(Mux(walking, entry, job.table)),
            place.start.eq(Mux(walking, start, 0)),
            # A line holds one group, or two of MXINT8; legal blocks hold at least a line.
            place.shift.eq(job.block_log2 - pair.group - pair.halves),
            lines.eq(Mux(pair.halves, 1 << row_bits >> 1, 1 << row_bits)),
        ]

        # Along K: the block and the line in it with which the next K tile starts.
        ahead = Signal(range((1 << row_bits) + (1 << (LARGEST_BLOCK - 3))))
        in_block = Signal(LARGEST_BLOCK - 3)
        # Along N: the column tile after this one starts a block.
        block_tiles, next_block = Signal(LARGEST_BLOCK), Signal()
        m.d.comb += [
            ahead.eq(place.start + lines),
            in_block.eq((1 << place.shift) - 1),
            block_tiles.eq((1 << job.block_log2) >> col_bits),
            next_block.eq(job.paged & (tile_now + 1 == block_tiles)),
        ]
        with m.If(self.step):
            with m.If(~self.last_k):
                m.d.sync += [
                    base_n.eq(base_n_now),
                    tile.eq(tile_now),
                    base.eq(
                        place.base
                        + Mux(
                            pair.halves,
                            job.weight_gstride << (row_bits - 1),
                            job.weight_gstride << row_bits,
                        )
                    ),
                    entry.eq(place.entry),
                ]
                with m.If(place.along_k):
                    m.d.sync += [
                        base.eq(place.base),
                        entry.eq(place.entry + (ahead >> place.shift)),
                        start.eq(ahead & in_block),
                    ]
                with m.Else():
                    m.d.sync += start.eq(0)
            with m.Else():
                m.d.sync += [
                    base_n.eq(base_n_now + job.weight_nstride),
                    base.eq(base_n_now + job.weight_nstride),
                    entry.eq(Mux(place.along_k, job.table, place.entry)),
                    start.eq(0),
                    tile.eq(tile_now + 1),
                ]
                with m.If(next_block & ~job.page_k):
                    m.d.sync += [
                        base_n.eq(job.weight_addr),
                        base.eq(job.weight_addr),
                        entry.eq(place.entry + 1),
                        tile.eq(0),
                    ]
        return m
