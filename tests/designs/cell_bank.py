# SPDX-License-Identifier: Apache-2.0
"""Cells side by side that take a whole vector each per cycle, weight included."""

from amaranth import Cat, Module, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hw.cell import Cell
from hw.emit import place
from hw.wires import delayed

# One cell's vector, 40 bytes as `tests.cell_vectors.packed_vectors` makes it.
VECTOR = data.StructLayout({
    "act_codes": 128, "weight_codes": 128, "psum": 32, "act_scale": 8, "weight_scale": 8,
    "act_native": 2, "index": 2, "act_nan": 1, "empty": 1, "weight_native": 2, "weight_nan": 1,
    "unused": 7,
})  # fmt: skip


class CellBank(wiring.Component):
    """`result` belongs to the `vector` of LATENCY cycles ago; every vector brings a new weight."""

    LATENCY = 1 + Cell.PSUM_AFTER + Cell.ROW_HOP

    def __init__(self, cells: int):
        self.cells = cells
        super().__init__({"vector": In(VECTOR.size * cells), "result": Out(32 * cells)})

    def elaborate(self, platform):
        m = Module()
        results = []
        for i in range(self.cells):
            cell = Cell(2)
            place(m, platform, f"cell_{i}", cell)
            now = Signal(VECTOR, name=f"now_{i}")
            m.d.comb += now.eq(self.vector[VECTOR.size * i : VECTOR.size * (i + 1)])
            then = delayed(m, f"then_{i}", now)
            weight = cell.load.weight
            m.d.comb += [
                cell.row.eq(2), cell.load.valid.eq(1), cell.load.row.eq(2),
                weight.codes.eq(now.weight_codes), weight.scale.eq(now.weight_scale),
                weight.native.eq(now.weight_native), weight.nan.eq(now.weight_nan),
                cell.activation.codes.eq(then.act_codes), cell.activation.scale.eq(then.act_scale),
                cell.activation.native.eq(then.act_native), cell.activation.index.eq(then.index),
                cell.activation.nan.eq(then.act_nan), cell.activation.empty.eq(then.empty),
                cell.activation.swap.eq(1),
                cell.psum.eq(delayed(m, f"psum_{i}", then.psum, Cell.PSUM_AFTER)),
            ]  # fmt: skip
            results.append(cell.psum_out)
        m.d.comb += self.result.eq(Cat(results))
        return m
