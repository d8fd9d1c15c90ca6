# SPDX-License-Identifier: Apache-2.0
"""The matmul array: rows x cols cells, its edges, the skew, and the accumulators below."""

from typing import Any

from amaranth import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from golden.formats import ARRAY_FORMATS, Format, group_elements
from hw.accumulator import Accumulator, accumulate_layout
from hw.cell import Cell
from hw.edge import LENGTH_BITS, SLICE_ROW, ActivationEdge, WeightEdge, load_line_layout
from hw.emit import place
from hw.ports import LINE_BITS, SCALE_BITS
from hw.skew import Delay
from hw.wires import delayed


def slice_layout(rows: int, acc_rows: int) -> data.StructLayout:
    """One slice for all rows at once.

    `lines`, `scales`: each row's line with the slice at field `part`; `index`: slice of its group;
    `count`: valid elements of the K tile, from row 0 on; `swap`: first slice of a weight tile; the
    rest is the accumulators' command.
    """
    return data.StructLayout(
        {
            "valid": 1,
            "lines": data.ArrayLayout(LINE_BITS, rows),
            "scales": data.ArrayLayout(SCALE_BITS, rows),
            "act_format": 3,
            "weight_format": 3,
            "index": 2,
            "part": 5,
            "count": (32 * rows).bit_length(),
            "swap": 1,
            "acc_index": (acc_rows - 1).bit_length(),
            "first": 1,
            "last": 1,
            "bias_sel": 1,
            "use_bias": 1,
        }
    )


class MatmulArray(wiring.Component):
    """Weight-stationary array: takes one slice and one row of weights per cycle, nothing stalls.

    A slice that enters in cycle t meets row r of column c in cycle t + ROW_HOP r + c + 2, and its
    sums are a result (if `last`) in cycle t + RESULT_LATENCY. A weight for row r that enters at
    column 0 in cycle u (at column c in u + c) must come at least `load_after_swap(r)` cycles after
    the swap of the tile before it, and its own tile's swap at least `swap_after_load(r)` cycles
    after it. Rows of a tile beyond `count` need no load and contribute nothing.

    Accumulators: slices with one `acc_index` are ACC_LATENCY cycles apart, unless the later is
    `first`. Of slices with `last`, at most `result_depth` may be on their way or in `result` at
    once. A bias register may be written
    when the last slice that uses it entered RESULT_LATENCY cycles ago.

    Members
    -------
    slice : In(slice_layout(rows, acc_rows))
    load : In, cols x load_line_layout
    bias_write : In, {valid, sel, data}
    result : Out(stream of cols FP32), in the order of the `last` slices, one per cycle
    """

    ROW_HOP = Cell.ROW_HOP
    ACC_LATENCY = Accumulator.LATENCY

    def __init__(self, rows: int, cols: int, acc_rows: int = 256, result_depth: int = 64):
        for name, value in (("rows", rows), ("cols", cols)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if rows < 2:
            raise ValueError(f"rows must be at least 2, not {rows!r}")
        self.rows, self.cols = rows, cols
        self.acc_rows, self.result_depth = acc_rows, result_depth
        self.row_bits = max(1, (rows - 1).bit_length())
        # From the slice to the partial sum below column 0.
        self.psum_latency = ActivationEdge.LATENCY + Cell.PSUM_AFTER + Cell.ROW_HOP * rows
        self.RESULT_LATENCY = self.psum_latency + cols + Accumulator.RESULT_AFTER
        super().__init__(
            {
                "slice": In(slice_layout(rows, acc_rows)),
                "load": In(data.ArrayLayout(load_line_layout(self.row_bits), cols)),
                "bias_write": In(
                    data.StructLayout({"valid": 1, "sel": 1, "data": data.ArrayLayout(32, cols)})
                ),
                "result": Out(stream.Signature(data.ArrayLayout(32, cols))),
            }
        )

    @property
    def emit_name(self) -> str:
        return f"array_{self.rows}x{self.cols}_{self.acc_rows}_{self.result_depth}"

    @staticmethod
    def load_after_swap(row: int) -> int:
        """Least u - t: a row-`row` load at u after the swap at t, not touching what it takes."""
        return Cell.ROW_HOP * row + ActivationEdge.LATENCY - WeightEdge.LATENCY

    @staticmethod
    def swap_after_load(row: int) -> int:
        """Least t - u: a swap at t takes the row-`row` word loaded at u."""
        return WeightEdge.LATENCY + 1 - ActivationEdge.LATENCY - Cell.ROW_HOP * row

    def elaborate(self, platform):
        m = Module()
        activations = self._left_edge(m, platform)
        loads = []
        for c in range(self.cols):
            edge = WeightEdge(self.row_bits)
            place(m, platform, f"weight_edge_{c}", edge)
            m.d.comb += edge.line.eq(self.load[c])
            loads.append(edge.load)
        psums: list[Any] = [0] * self.cols
        for r in range(self.rows):
            activation = activations[r]
            for c in range(self.cols):
                cell = Cell(self.row_bits)
                place(m, platform, f"cell_{r}_{c}", cell)
                m.d.comb += [
                    cell.row.eq(r),
                    cell.load.eq(loads[c]),
                    cell.activation.eq(activation),
                    cell.psum.eq(psums[c]),
                ]
                activation, psums[c] = cell.activation_out, cell.psum_out
        self._accumulate(m, platform, psums)
        return m

    def _left_edge(self, m, platform):
        """Each row's activations at column 0, skewed by ROW_HOP cycles per row."""
        now = self.slice
        group = Signal(range(6))  # log2 of a group's elements
        with m.Switch(now.weight_format):
            for fmt in ARRAY_FORMATS:
                with m.Case(fmt):
                    m.d.comb += group.eq(group_elements(Format(fmt)).bit_length() - 1)
        swaps = Signal(Cell.ROW_HOP * (self.rows - 1) + 1)
        m.d.comb += swaps[0].eq(now.valid & now.swap)
        if self.rows > 1:
            m.d.sync += swaps[1:].eq(swaps[:-1])
        activations = []
        for r in range(self.rows):
            row = Signal(SLICE_ROW, name=f"slice_row{r}")
            start = Signal(len(now.count) + 1, name=f"start{r}")
            left = Signal(len(now.count), name=f"left{r}")
            whole = Signal(LENGTH_BITS, name=f"group{r}")
            m.d.comb += [
                start.eq(r << group),
                whole.eq(1 << group),
                left.eq(Mux(now.count > start, now.count - start, 0)),
                row.line.eq(now.lines[r]),
                row.scale.eq(now.scales[r]),
                row.act_format.eq(now.act_format),
                row.weight_format.eq(now.weight_format),
                row.index.eq(now.index),
                row.part.eq(now.part),
                row.length.eq(Mux(left > whole, whole, left)),
                row.swap.eq(0),
            ]
            skew = Delay(len(row.as_value()), Cell.ROW_HOP * r)
            place(m, platform, f"skew_{r}", skew)
            edge = ActivationEdge()
            place(m, platform, f"activation_edge_{r}", edge)
            late = Signal(SLICE_ROW, name=f"late{r}")
            m.d.comb += [
                skew.i.eq(row),
                late.eq(skew.o),
                edge.slice.eq(late),
                edge.slice.swap.eq(swaps[Cell.ROW_HOP * r]),
            ]
            activations.append(edge.activation)
        return activations

    def _accumulate(self, m, platform, psums):
        """Accumulators, their commands, and the queue of whole result rows."""
        now = self.slice
        layout = accumulate_layout(self.acc_rows)
        entering = Signal(layout, name="entering")
        m.d.comb += [
            entering.index.eq(now.acc_index),
            entering.first.eq(now.first),
            entering.last.eq(now.last),
            entering.use_bias.eq(now.use_bias),
            entering.bias_sel.eq(now.bias_sel),
            entering.valid.eq(0),
        ]
        wait = self.psum_latency - 1  # commands come one cycle before their partial sums
        delay = Delay(layout.size, wait)
        place(m, platform, "command_delay", delay)
        valids = Signal(wait)
        command = Signal(layout, name="command")
        m.d.sync += valids.eq((valids << 1) | now.valid)
        m.d.comb += [
            delay.i.eq(entering),
            command.eq(delay.o),
            command.valid.eq(valids[-1]),
        ]
        head = Signal(range(self.result_depth))
        fetch = Signal()
        values = []
        for c in range(self.cols):
            column = Accumulator(self.acc_rows, self.result_depth)
            place(m, platform, f"accumulator_{c}", column)
            m.d.comb += [
                column.command.eq(command),
                column.psum.eq(psums[c]),
                column.bias_write.eq(self.bias_write.valid),
                column.bias_sel.eq(self.bias_write.sel),
                column.bias.eq(self.bias_write.data[c]),
                column.result_en.eq(fetch),
                column.result_addr.eq(head),
            ]
            command = column.command_out
            values.append(column.result)
        for c, value in enumerate(values):
            m.d.comb += self.result.payload[c].eq(value)

        # A row is whole when the last column has queued its value.
        arrived = command  # as it leaves the last column
        whole = Signal()
        ready = Signal(range(self.result_depth + 1))
        m.d.comb += [
            whole.eq(
                delayed(
                    m,
                    "whole",
                    arrived.valid & arrived.last,
                    Accumulator.RESULT_AFTER - 1,
                    reset=True,
                )
            ),
            fetch.eq((ready != 0) & (~self.result.valid | self.result.ready)),
        ]
        m.d.sync += ready.eq(ready + whole - fetch)
        with m.If(fetch):
            m.d.sync += [head.eq(head + 1), self.result.valid.eq(1)]
        with m.Elif(self.result.ready):
            m.d.sync += self.result.valid.eq(0)
