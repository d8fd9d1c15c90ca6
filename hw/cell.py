# SPDX-License-Identifier: Apache-2.0
"""Cell of the matmul array: a stationary group of weights times activation slices, added to a
partial sum.

The arithmetic is that of `golden.matmul.cell`, bit for bit.
"""

from amaranth import Cat, Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hw.carry import add
from hw.dot_align import DotAlign
from hw.dot_multiply import (
    BIAS_BITS,
    CONTROL,
    QUADS,
    SCALE_SUM_BITS,
    SHIFT_BITS,
    DotLanes,
    DotQuads,
)
from hw.dot_sum import DotRound, DotSum
from hw.psum_adder import PsumAlign, PsumRound, PsumSum
from hw.wires import delayed, wire

# A slice of activations, placed by `hw.arrangement`. `bias`: its scale and what its formats add
# (`hw.dot_multiply.bias_of`); `empty` makes the cell add exactly +0, whatever it holds.
ACTIVATION = data.StructLayout(
    {
        "codes": 128,
        "bias": signed(BIAS_BITS),
        "control": CONTROL,
        "nan": 1,
        "empty": 1,
        "swap": 1,
    }
)

# A stationary group, recoded, masked, and placed by `hw.arrangement`. `nan`: an element or the
# scale is not a number.
WEIGHT = data.StructLayout({"codes": 128, "scale": 8, "nan": 1})


def load_layout(row_bits: int) -> data.StructLayout:
    """A weight on a column's load bus, for the cell of row `row`."""
    return data.StructLayout({"valid": 1, "row": row_bits, "weight": WEIGHT})


class Cell(wiring.Component):
    """One cell; takes a slice and a partial sum every cycle and never stalls.

    `activation` moves on to `activation_out` in one cycle. `psum` belongs to the slice that came
    at `activation` PSUM_AFTER cycles before; `psum_out` follows it ROW_HOP cycles later. A weight
    on the load bus whose `row` is the cell's goes into the shadow register and can be taken by a
    slice with `swap` one cycle later; that slice is the first to be computed with it.

    Members
    -------
    row : In(row_bits)
        The cell's row, a constant.
    load : In(load_layout(row_bits))
    activation, activation_out : In/Out(ACTIVATION)
    psum, psum_out : In/Out(32)
    """

    ROW_HOP = 3
    PSUM_AFTER = 6

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
        control = activation.control
        m.submodules.lanes = lanes = DotLanes()
        m.d.comb += [
            lanes.act.eq(activation.codes),
            lanes.weight.eq(weight.codes),
            lanes.control.eq(control),
        ]
        four_digits = delayed(m, "four_digits", control.act_bf16)
        two_quads = wire(m, "two_quads", control.act_bf16 & ~control.weight_e2m1)
        spread = wire(m, "spread", Cat(two_quads, control.weight_bf16))
        bias = wire(m, "bias", activation.bias + weight.scale, signed(SCALE_SUM_BITS))
        nan = wire(m, "nan", (activation.nan | weight.nan) & ~activation.empty)

        # Sums of quads, largest exponent.
        m.submodules.quads = quads = DotQuads()
        all_one, by_pair = (
            delayed(m, "all_one", control.act_e2m1),
            delayed(m, "by_pair", control.by_pair),
        )
        m.d.comb += [
            quads.missing.eq(delayed(m, "missing", lanes.missing)),
            quads.above.eq(delayed(m, "above", lanes.above)),
            quads.all_one.eq(all_one), quads.by_pair.eq(by_pair),
            quads.four_digits.eq(four_digits),
        ]  # fmt: skip
        exponents = [delayed(m, f"exponent_{q}", lanes.exponent[q]) for q in range(QUADS)]
        odd_top = delayed(m, "odd_top", lanes.odd_shift)
        for q in range(QUADS):
            m.d.comb += quads.exponent[q].eq(exponents[q])
        for u in range(2 * QUADS):
            m.d.comb += quads.pair[u].eq(delayed(m, f"pair_{u}", lanes.pair[u]))

        # Alignment and sum.
        m.submodules.align = align = DotAlign()
        m.d.comb += [
            align.inverted.eq(delayed(m, "inverted", quads.inverted)),
            align.keep.eq(delayed(m, "keep", quads.keep)),
            Cat(align.two_quads, align.four_quads).eq(delayed(m, "spread", spread, 2)),
        ]
        for q in range(QUADS):
            m.d.comb += [
                align.quad[q].eq(delayed(m, f"quad_{q}", quads.quad[q])),
                align.odd_pair[q].eq(delayed(m, f"odd_pair_{q}", quads.odd_pair[q])),
                align.shift[q].eq(delayed(m, f"shift_{q}", quads.shift[q])),
                align.odd_shift[q].eq(
                    delayed(m, f"odd_shift_{q}", Cat(exponents[q][SHIFT_BITS:], odd_top[q]))
                ),
            ]
        m.submodules.sum = total = DotSum()
        m.d.comb += [
            total.sum.eq(delayed(m, "sum", align.sum)),
            total.carry.eq(delayed(m, "carry", align.carry)),
        ]
        m.submodules.round = rounding = DotRound()
        largest = wire(m, "largest", quads.top, SCALE_SUM_BITS)
        lead = add(m, "lead_sum", delayed(m, "bias", bias), largest, blocks=(4, 4))
        m.d.comb += [
            rounding.total.eq(delayed(m, "total", total.total)),
            rounding.repeats.eq(delayed(m, "repeats", total.repeats)),
            rounding.lead.eq(delayed(m, "lead", lead[:SCALE_SUM_BITS], 3)),
        ]

        # Partial sum.
        m.submodules.psum_align = psum_align = PsumAlign()
        m.submodules.psum_sum = psum_sum = PsumSum()
        m.submodules.psum_round = psum_round = PsumRound()
        empty = delayed(m, "empty", activation.empty, 4)
        significand = wire(m, "significand", Mux(empty, 0, rounding.significand))
        sign = wire(m, "sign", rounding.sign & ~empty)
        m.d.comb += [
            psum_align.psum.eq(self.psum),
            psum_align.dot_sign.eq(delayed(m, "dot_sign", sign)),
            psum_align.dot_significand.eq(delayed(m, "significand", significand)),
            psum_align.dot_exponent.eq(delayed(m, "exponent", rounding.exponent)),
            psum_align.dot_nan.eq(delayed(m, "nan", nan, 5)),
            psum_sum.aligned.eq(delayed(m, "aligned", psum_align.aligned)),
            psum_round.summed.eq(delayed(m, "summed", psum_sum.summed)),
            self.psum_out.eq(delayed(m, "result", psum_round.psum)),
        ]
        return m
