# SPDX-License-Identifier: Apache-2.0
"""Writes the array's result rows into the tile SRAM, as FP32 or rounded to BF16."""

from amaranth import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.bf16_round import Bf16Round
from hw.config import TileConfig
from hw.matrix_job import JOB_LAYOUT
from hw.ports import GRANULES, LINE_BITS, SramClient


class ResultWriter(wiring.Component):
    """Takes rows of `cols` FP32 results in the order column tile, activation row.

    One row per cycle when the SRAM grants it. Columns beyond n are not written. `job` is given back
    when its last row has been written (`done` pulses in that cycle).
    """

    def __init__(self, config: TileConfig):
        self.config = config
        super().__init__(
            {
                "job": In(stream.Signature(JOB_LAYOUT)),
                "result": In(stream.Signature(data.ArrayLayout(32, config.cols))),
                "memory": Out(SramClient(config.vector_lines)),
                "done": Out(1),
                "blocked": Out(1),
                "fault": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        cols, lines = config.cols, config.vector_lines
        command = self.job.payload.command
        walking, row, left = Signal(), Signal(16), Signal(16, reset_less=True)
        # Byte address of a BF16 vector counts halves of an FP32 vector's lines.
        tile_byte, row_byte = Signal(32, reset_less=True), Signal(32, reset_less=True)
        left_now, tile_now, byte_now = Signal(16), Signal(32), Signal(32)
        last_row, last_tile, granted, upper = Signal(), Signal(), Signal(), Signal()
        request = self.memory.request
        vector_bytes = Mux(command.out_bf16, 2 * cols, 4 * cols)
        m.d.comb += [
            left_now.eq(Mux(walking, left, command.n)),
            tile_now.eq(Mux(walking, tile_byte, command.out_addr)),
            byte_now.eq(Mux(row == 0, tile_now, row_byte)),
            last_row.eq(row == command.m - 1),
            last_tile.eq(left_now <= cols),
            upper.eq(command.out_bf16 & byte_now[(2 * cols).bit_length() - 1]),
            request.valid.eq(self.job.valid & self.result.valid),
            request.payload.write.eq(1),
            request.payload.address.eq((byte_now >> (4 * cols).bit_length() - 1) * lines),
            granted.eq(request.valid & request.ready),
            self.result.ready.eq(granted),
            self.job.ready.eq(granted & last_row & last_tile),
            self.done.eq(self.job.ready),
            self.blocked.eq(request.valid & ~request.ready),
            self.fault.eq(self.memory.fault),
        ]
        valid = Signal(cols)
        m.d.comb += valid.eq(Cat(*(left_now > c for c in range(cols))))
        half = []
        for c in range(cols):
            m.submodules[f"round{c}"] = rounder = Bf16Round()
            m.d.comb += rounder.i.eq(self.result.payload[c])
            half.append(rounder.o)
        full = Signal(lines * LINE_BITS)
        mask = Signal(lines * GRANULES)
        with m.If(command.out_bf16):
            m.d.comb += [
                full.eq(Cat(*half, *half)),
                mask.eq(Mux(upper, Cat(Const(0, cols), valid), valid)),
            ]
        with m.Else():
            m.d.comb += [
                full.eq(self.result.payload.as_value()),
                mask.eq(Cat(*(v.replicate(2) for v in valid))),
            ]
        m.d.comb += [request.payload.data.eq(full), request.payload.mask.eq(mask)]
        with m.If(granted):
            m.d.sync += [
                row.eq(Mux(last_row, 0, row + 1)),
                row_byte.eq(byte_now + (command.out_stride << 4)),
            ]
            with m.If(last_row):
                m.d.sync += [
                    walking.eq(~last_tile),
                    left.eq(left_now - cols),
                    tile_byte.eq(tile_now + vector_bytes),
                ]
            with m.Else():
                m.d.sync += [walking.eq(1), left.eq(left_now), tile_byte.eq(tile_now)]
        return m
