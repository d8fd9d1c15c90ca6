# SPDX-License-Identifier: Apache-2.0
"""Cell of the matmul array: a stationary group of weights times activation slices, added to a
partial sum.

The arithmetic is that of `golden.matmul.cell`, bit for bit.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from golden.formats import Native
from hw.dot_align import DotAlign, DotAmounts
from hw.dot_multiply import QUADS, DotMultiply
from hw.dot_sum import DotMagnitude, DotRound, DotSum
from hw.psum_adder import PsumAlign, PsumRound, PsumSum
from hw.wires import delayed, wire

# A slice of activations: codes repeated as often as the weight has digits; `index` is the slice
# in the top bits (j, or 2 j where there are two slices); `empty` makes the cell add exactly +0,
# whatever it holds.
ACTIVATION = data.StructLayout(
    {
        "codes": 128,
        "scale": 8,
        "native": 2,
        "index": 2,
        "nan": 1,
        "empty": 1,
        "swap": 1,
    }
)

# A stationary group, recoded and masked. `nan`: an element or the scale is not a number.
WEIGHT = data.StructLayout({"codes": 128, "scale": 8, "native": 2, "nan": 1})


def load_layout(row_bits: int) -> data.StructLayout:
    """A weight on a column's load bus, for the cell of row `row`."""
    return data.StructLayout({"valid": 1, "row": row_bits, "weight": WEIGHT})


class Cell(wiring.Component):
    """One cell; takes a slice and a partial sum every cycle and never stalls.

    `activation` moves on to `activation_out` in one cycle. `psum` belongs to the slice that came
    at `activation` PSUM_AFTER cycles before; `psum_out` follows it ROW_HOP cycles later. A weight
    on the load bus whose `row` is the cell's goes into the shadow register and can be taken by a
    slice with `swap` one cycle later; that slice is the first to be computed with it.

    Members ------- row : In(row_bits) The cell's row, a constant. load :
    In(load_layout(row_bits)) activation, activation_out : In/Out(ACTIVATION) psum, psum_out :
    In/Out(32)
    """

    ROW_HOP = 3
    PSUM_AFTER = 7

    def __init__(self, row_bits: int):
        if not isinstance(row_bits, int) or row_bits < 1:
            raise ValueError(f"row_bits must be an integer of at least 1, not {row_bits!r}")
        self.row_bits = row_bits
        super().__init__({
            "row": In(row_bits),
            "load": In(load_layout(row_bits)),
            "activation": In(ACTIVATION),
            "activation_out": Out(ACTIVATION),
            "psum": In(32),
            "psum_out": Out(32),
        })  # fmt: skip

    @property
    def emit_name(self) -> str:
        return f"cell_row{self.row_bits}"

    def elaborate(self, platform):
        m = Module()
        shadow = Signal(WEIGHT, reset_less=True)
        weight = Signal(WEIGHT, reset_less=True)
        with m.If(self.load.valid & (self.load.row == self.row)):
            m.d.sync += shadow.eq(self.load.weight)
        with m.If(self.activation.swap):
            m.d.sync += weight.eq(shadow)
        activation = Signal(ACTIVATION, reset_less=True)
        m.d.sync += activation.eq(self.activation)
        m.d.comb += self.activation_out.eq(activation)

        # Multiply.
        m.submodules.multiply = multiply = DotMultiply()
        m.d.comb += [
            multiply.act.eq(activation.codes),
            multiply.weight.eq(weight.codes),
            multiply.index.eq(activation.index),
            multiply.act_native.eq(activation.native),
            multiply.weight_native.eq(weight.native),
            multiply.act_scale.eq(activation.scale),
            multiply.weight_scale.eq(weight.scale),
        ]
        act_bf16 = wire(m, "act_bf16", activation.native == Native.BF16)
        act_e2m1 = wire(m, "act_e2m1", activation.native == Native.E2M1)
        weight_e2m1 = wire(m, "weight_e2m1", weight.native == Native.E2M1)
        spread = wire(m, "spread", Cat(
            act_bf16 & ~weight_e2m1, act_bf16 & (weight.native == Native.BF16)))  # fmt: skip
        nan = wire(m, "nan", (activation.nan | weight.nan) & ~activation.empty)

        # Amounts of alignment.
        m.submodules.amounts = amounts = DotAmounts()
        fixed = wire(m, "fixed", act_e2m1 | (~act_bf16 & weight_e2m1))
        m.d.comb += [
            amounts.fixed.eq(delayed(m, "fixed", fixed)),
            amounts.unit_in.eq(delayed(m, "scale", multiply.scale)),
            *(amounts.exponent[q].eq(delayed(m, f"exponent_{q}", multiply.exponent[q]))
              for q in range(QUADS)),
        ]  # fmt: skip

        # Alignment and sum.
        m.submodules.align = align = DotAlign()
        m.d.comb += [
            align.inverted.eq(delayed(m, "inverted", multiply.inverted, 2)),
            align.keep.eq(delayed(m, "keep", amounts.keep)),
            Cat(align.two_quads, align.four_quads).eq(delayed(m, "spread", spread, 2)),
        ]
        for q in range(QUADS):
            m.d.comb += [
                align.quad[q].eq(delayed(m, f"quad_{q}", multiply.quad[q], 2)),
                align.shift[q].eq(delayed(m, f"shift_{q}", amounts.shift[q])),
                align.pair[q].eq(delayed(m, f"pair_{q}", multiply.pair[q], 2)),
                align.pair_shift[q].eq(delayed(m, f"pair_shift_{q}", multiply.pair_shift[q], 2)),
            ]
        m.submodules.sum = total = DotSum()
        m.d.comb += [
            total.sum.eq(delayed(m, "sum", align.sum)),
            total.carry.eq(delayed(m, "carry", align.carry)),
        ]
        m.submodules.magnitude = magnitude = DotMagnitude()
        m.d.comb += magnitude.total.eq(delayed(m, "total", total.total))
        m.submodules.round = rounding = DotRound()
        m.d.comb += [
            rounding.sign.eq(delayed(m, "total_sign", magnitude.sign)),
            rounding.magnitude.eq(delayed(m, "magnitude", magnitude.magnitude)),
            rounding.zeros.eq(delayed(m, "zeros", magnitude.zeros)),
            rounding.unit.eq(delayed(m, "unit", amounts.unit, 4)),
        ]

        # Partial sum.
        m.submodules.psum_align = psum_align = PsumAlign()
        m.submodules.psum_sum = psum_sum = PsumSum()
        m.submodules.psum_round = psum_round = PsumRound()
        empty = delayed(m, "empty", activation.empty, 5)
        significand = wire(m, "significand", Mux(empty, 0, rounding.significand))
        sign = wire(m, "sign", rounding.sign & ~empty)
        m.d.comb += [
            psum_align.psum.eq(self.psum),
            psum_align.dot_sign.eq(delayed(m, "dot_sign", sign)),
            psum_align.dot_significand.eq(delayed(m, "significand", significand)),
            psum_align.dot_exponent.eq(delayed(m, "exponent", rounding.exponent)),
            psum_align.dot_nan.eq(delayed(m, "nan", nan, 6)),
            psum_sum.aligned.eq(delayed(m, "aligned", psum_align.aligned)),
            psum_round.summed.eq(delayed(m, "summed", psum_sum.summed)),
            self.psum_out.eq(delayed(m, "result", psum_round.psum)),
        ]
        return m
