# SPDX-License-Identifier: Apache-2.0
"""What makes the paging of a MATMUL illegal."""

from amaranth import Module, Mux
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.config import TileConfig
from hw.isa import MATMUL, operand_layout
from hw.matrix_job import PAIR_LAYOUT

SMALLEST_BLOCK = 4  # log2 of its tokens
LARGEST_BLOCK = 7


class PageCheck(wiring.Component):
    """`legal`, combinational: not paged, or not from the weight stream and in blocks of whole
    column tiles (along N) or whole lines (along K), of 16 tokens at least.

    A row of the KV SRAM is read at one address in all banks, so a column tile cannot be put
    together from several blocks.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        super().__init__(
            {"command": In(operand_layout(MATMUL)), "pair": In(PAIR_LAYOUT), "legal": Out(1)}
        )

    def elaborate(self, platform):
        m = Module()
        command = self.command
        # block_log2 is 3 bits wide, so LARGEST_BLOCK is no limit of its own.
        along_n = command.block_log2 >= self.config.cols.bit_length() - 1
        along_k = command.block_log2 >= self.pair.group + self.pair.halves
        m.d.comb += self.legal.eq(
            ~command.paged
            | (
                ~command.stream
                & (command.block_log2 >= SMALLEST_BLOCK)
                & Mux(command.page_k, along_k, along_n)
            )
        )
        return m
