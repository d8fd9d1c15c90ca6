# SPDX-License-Identifier: Apache-2.0
"""Cells side by side that take a whole vector each per cycle, weight included."""

from itertools import product

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from golden.formats import DIGITS, NATIVE_FORMAT, SPECS, Native
from hw.arrangement import activation_places, weight_places
from hw.cell import Cell
from hw.dot_multiply import bias_of, control_of, select_slice
from hw.emit import place
from hw.wires import delayed

# One cell's vector, 40 bytes as `tests.cell_vectors.packed_vectors` makes it.
VECTOR = data.StructLayout({
    "act_codes": 128, "weight_codes": 128, "psum": 32, "act_scale": 8, "weight_scale": 8,
    "act_native": 2, "index": 2, "act_nan": 1, "empty": 1, "weight_native": 2, "weight_nan": 1,
    "unused": 7,
})  # fmt: skip


def _moved(word: Value, places: list[int]) -> Value:
    return Cat(word[p] for p in places)


def _of(native: Value, words: dict[Native, Value]) -> Value:
    e2m1, e4m3, e5m2, bf16 = (words[n] for n in Native)
    return Mux(native[1], Mux(native[0], bf16, e5m2), Mux(native[0], e4m3, e2m1))


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
            load, act = cell.load.weight, cell.activation
            weights = {n: _moved(now.weight_codes, weight_places(n)) for n in Native}
            m.d.comb += load.codes.eq(_of(now.weight_native, weights))
            m.d.comb += [
                cell.row.eq(2), cell.load.valid.eq(1), cell.load.row.eq(2),
                load.scale.eq(now.weight_scale), load.nan.eq(now.weight_nan),
                act.nan.eq(then.act_nan), act.empty.eq(then.empty), act.swap.eq(1),
                cell.psum.eq(delayed(m, f"psum_{i}", then.psum, Cell.PSUM_AFTER)),
            ]  # fmt: skip
            with m.Switch(Cat(then.act_native, then.weight_native)):
                for a, w in product(Native, Native):
                    if DIGITS[a] < DIGITS[w]:
                        continue
                    # The vector repeats each code as often as the weight has digits.
                    bits = SPECS[NATIVE_FORMAT[a]].bits
                    places = [
                        p // bits * bits * DIGITS[w] + p % bits for p in activation_places(a, w)
                    ]
                    with m.Case(a | w << 2):
                        m.d.comb += [
                            act.codes.eq(_moved(then.act_codes, places)),
                            act.bias.eq(then.act_scale + bias_of(a, w)),
                            *(act.control[k].eq(v) for k, v in control_of(a, w).items()),
                            *select_slice(act.control, act.control, then.index),
                        ]
            results.append(cell.psum_out)
        m.d.comb += self.result.eq(Cat(results))
        return m
