# SPDX-License-Identifier: Apache-2.0
"""Issues the activation slices of a job: for each weight tile slice-major (slice outer, activation
row inner), one slice per cycle when the tile SRAM grants its read.

A slice is issued only when everything it needs is there or promised: its weights (`swap_ready`),
the bias of its column tile, room for its result, and a stored partial sum that is old enough. So
nothing stalls inside the array.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.array import MatmulArray
from hw.config import TileConfig
from hw.isa import Init
from hw.matrix_job import JOB_LAYOUT
from hw.ports import LINE_BITS, ActivationClient
from hw.tile_sram import TileSram
from hw.weight_loader import tile_layout

ISSUE_LATENCY = TileSram.LATENCY + 1  # from a granted request to the slice at the array


class SliceIssuer(wiring.Component):
    """Takes a job with its first tile and gives it back (`job` ready) with its last slice.

    `slice` goes to the array ISSUE_LATENCY cycles after the request was granted. `bias_ready`: the
    column tile's bias is in register `bias_sel`; `bias_used` pulses with the column tile's last
    first slice. `room` is the number of results that the array may still take; `reserve` pulses for
    each one issued. `starved` and `blocked` say why no slice was issued: for want of weights,
    bias or the SRAM, or of room.
    """

    def __init__(self, config: TileConfig, array: MatmulArray):
        self.config = config
        self.slice_layout = array.slice.shape()
        super().__init__(
            {
                "job": In(stream.Signature(JOB_LAYOUT)),
                "tile": In(stream.Signature(tile_layout(config))),
                "activation": Out(ActivationClient(config.rows)),
                "slice": Out(self.slice_layout),
                "swap_ready": In(1),
                "swap": Out(1),
                "bias_ready": In(1),
                "bias_used": Out(1),
                "room": In(1),
                "reserve": Out(1),
                "issued": Out(1),
                "starved": Out(1),
                "blocked": Out(1),
                "fault": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        rows = self.config.rows
        row_bits = rows.bit_length() - 1
        command, pair = self.job.payload.command, self.job.payload.pair
        tile = self.tile.payload

        # Position: K tile `kt` of the column tile, slice j, activation row.
        index_bits = (self.config.acc_rows - 1).bit_length()
        kt, j = Signal(16), Signal(2)
        row, row_line = Signal(index_bits), Signal(28, reset_less=True)
        first_row, last_row, last_slice = Signal(), Signal(), Signal()
        tile_line, block, line_in_group = Signal(28), Signal(16), Signal(2)
        line_now = Signal(28)
        m.d.comb += [
            first_row.eq(row == 0),
            last_row.eq(row == (command.m - 1)[:index_bits]),
            last_slice.eq(j == ((1 << pair.slices) - 1)[:2]),
            block.eq(kt >> pair.narrow),
            tile_line.eq((block << row_bits) << pair.step),
            line_in_group.eq(j >> pair.share),
            line_now.eq(Mux(first_row, command.act_addr[4:], row_line)),
        ]

        # Stored partial sums must be ACC_LATENCY cycles old.
        recent = [
            Signal(index_bits + 1, name=f"recent{i}") for i in range(MatmulArray.ACC_LATENCY - 1)
        ]
        clash = Signal()
        m.d.comb += clash.eq(Cat(*(r == Cat(row, 1) for r in recent)).any() if recent else 0)

        first, last, swap = Signal(), Signal(), Signal()
        weights, bias, offered, granted = Signal(), Signal(), Signal(), Signal()
        needs_bias = Signal()
        m.d.comb += [
            first.eq(tile.first_k & (j == 0)),
            last.eq(tile.last_k & last_slice),
            swap.eq(first_row & (j == 0)),
            needs_bias.eq(first & (command.init == Init.BIAS)),
            weights.eq(~swap | self.swap_ready),
            bias.eq(~needs_bias | self.bias_ready),
            offered.eq(
                self.tile.valid
                & self.job.valid
                & weights
                & bias
                & ~(clash & ~first)
                & (~last | self.room)
            ),
            self.activation.request.valid.eq(offered),
            self.activation.request.payload.address.eq(line_now + tile_line + line_in_group),
            self.activation.request.payload.step.eq(pair.step),
            granted.eq(offered & self.activation.request.ready),
            self.issued.eq(granted),
            self.swap.eq(granted & swap),
            self.reserve.eq(granted & last),
            self.bias_used.eq(granted & needs_bias & last_row),
            self.tile.ready.eq(granted & last_row & last_slice),
            self.job.ready.eq(self.tile.ready & tile.last_tile),
            self.blocked.eq(self.tile.valid & self.job.valid & last & ~self.room),
            self.starved.eq(self.job.valid & ~granted & ~self.blocked),
            self.fault.eq(self.activation.fault),
        ]
        if recent:
            m.d.sync += Cat(*recent).eq(
                Cat(Mux(granted, Cat(row, 1), 0)[: index_bits + 1], *recent[:-1])
            )
        bias_sel = Signal()
        with m.If(granted):
            m.d.sync += [
                row.eq(Mux(last_row, 0, row + 1)),
                row_line.eq(line_now + command.act_stride),
            ]
            with m.If(last_row):
                m.d.sync += j.eq(Mux(last_slice, 0, j + 1))
                with m.If(last_slice):
                    m.d.sync += kt.eq(Mux(tile.last_k, 0, kt + 1))
            with m.If(self.bias_used):
                m.d.sync += bias_sel.eq(~bias_sel)

        # What travels beside the read, and what it meets when the lines arrive.
        header = data.StructLayout(
            {
                "act_format": 3,
                "weight_format": 3,
                "index": 2,
                "part": 5,
                "count": (32 * rows).bit_length(),
                "swap": 1,
                "acc_index": index_bits,
                "first": 1,
                "last": 1,
                "bias_sel": 1,
                "use_bias": 1,
                "narrow": 2,
                "phase": 2,
            }
        )
        now = Signal(header)
        m.d.comb += [
            now.act_format.eq(command.act_format),
            now.weight_format.eq(command.weight_format),
            now.index.eq(j),
            now.part.eq(j & ((1 << pair.share) - 1)),
            now.count.eq(tile.count),
            now.swap.eq(swap),
            now.acc_index.eq(row),
            now.first.eq(first),
            now.last.eq(last),
            now.bias_sel.eq(bias_sel),
            now.use_bias.eq(needs_bias),
            now.narrow.eq(pair.narrow),
            now.phase.eq(kt & ((1 << pair.narrow) - 1)),
        ]
        then = now
        for i in range(TileSram.LATENCY):
            stage = Signal(header, name=f"header{i}", reset_less=True)
            m.d.sync += stage.eq(then)
            then = stage

        fields = Signal(self.slice_layout, name="fields")
        response = self.activation.response
        m.d.comb += fields.valid.eq(self.activation.valid)
        for name in (
            "act_format",
            "weight_format",
            "index",
            "part",
            "count",
            "swap",
            "acc_index",
            "first",
            "last",
            "bias_sel",
            "use_bias",
        ):
            m.d.comb += fields[name].eq(then[name])
        with m.Switch(Cat(then.phase, then.narrow)):
            for narrow in (1, 2):
                for phase in range(1 << narrow):
                    with m.Case(phase | narrow << 2):
                        for r in range(rows):
                            group = phase * rows + r
                            width = LINE_BITS >> narrow
                            line, part = group >> narrow, group % (1 << narrow)
                            m.d.comb += [
                                fields.lines[r].eq(
                                    response.data[line][part * width : (part + 1) * width]
                                ),
                                fields.scales[r].eq(response.scales[line]),
                            ]
            with m.Default():
                m.d.comb += [fields.lines.eq(response.data), fields.scales.eq(response.scales)]
        valid = Signal()
        held = Signal(self.slice_layout, name="held", reset_less=True)
        m.d.sync += [held.eq(fields), valid.eq(fields.valid)]
        m.d.comb += [self.slice.eq(held), self.slice.valid.eq(valid)]
        return m
