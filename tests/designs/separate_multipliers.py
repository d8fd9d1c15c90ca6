# SPDX-License-Identifier: Apache-2.0
"""What a cell would cost with multipliers of its own for each pair of digit counts.

`OneClass` is the cell with the formats' control tied to constants, of which synthesis leaves what
one class of pairs needs. `Common` is what such cells would share: the operands' registers, the
rounding and the partial sum.
"""

from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden.formats import DIGITS, Native
from hw.cell import ACTIVATION, WEIGHT, Cell, load_layout
from hw.dot_multiply import SCALE_SUM_BITS, TOTAL_BITS, control_of
from hw.dot_sum import COUNT_BITS, DotRound
from hw.psum_adder import PsumAlign, PsumRound, PsumSum
from hw.wires import delayed

# Digits of activation and weight, and a pair of formats of each class.
CLASSES = {
    (DIGITS[a], DIGITS[w]): (a, w)
    for a in (Native.E2M1, Native.E4M3, Native.BF16)
    for w in (Native.E2M1, Native.E4M3, Native.BF16)
    if DIGITS[a] >= DIGITS[w]
}


class OneClass(wiring.Component):
    """A cell that knows one class of pairs."""

    def __init__(self, act: Native, weight: Native):
        self.act, self.weight = act, weight
        super().__init__(
            {
                "load": In(load_layout(3)),
                "activation": In(ACTIVATION),
                "psum": In(32),
                "psum_out": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.cell = cell = Cell(3)
        m.d.comb += [
            cell.row.eq(2),
            cell.load.eq(self.load),
            cell.activation.eq(self.activation),
            cell.psum.eq(self.psum),
            self.psum_out.eq(cell.psum_out),
        ]
        for name, value in control_of(self.act, self.weight).items():
            if not (name.endswith("e5m2") and Native.E4M3 in (self.act, self.weight)):
                m.d.comb += cell.activation.control[name].eq(int(value))
        return m


class Common(wiring.Component):
    """Registers of the operands, rounding of the total, and the partial sum."""

    def __init__(self) -> None:
        super().__init__(
            {
                "load": In(load_layout(3)),
                "activation": In(ACTIVATION),
                "activation_out": Out(ACTIVATION),
                "weight": Out(WEIGHT),
                "total": In(TOTAL_BITS),
                "repeats": In(COUNT_BITS),
                "lead": In(SCALE_SUM_BITS),
                "psum": In(32),
                "psum_out": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        shadow = Signal(WEIGHT, reset_less=True)
        with m.If(self.load.valid & (self.load.row == 2)):
            m.d.sync += shadow.eq(self.load.weight)
        with m.If(self.activation.swap):
            m.d.sync += self.weight.eq(shadow)
        m.d.sync += self.activation_out.eq(self.activation)
        m.submodules.round = rounding = DotRound()
        m.submodules.align = align = PsumAlign()
        m.submodules.sum = total = PsumSum()
        m.submodules.psum_round = psum_round = PsumRound()
        m.d.comb += [
            rounding.total.eq(delayed(m, "total", self.total)),
            rounding.repeats.eq(delayed(m, "repeats", self.repeats)),
            rounding.lead.eq(delayed(m, "lead", self.lead)),
            align.psum.eq(self.psum),
            align.dot_sign.eq(delayed(m, "sign", rounding.sign)),
            align.dot_significand.eq(delayed(m, "significand", rounding.significand)),
            align.dot_exponent.eq(delayed(m, "exponent", rounding.exponent)),
            align.dot_nan.eq(delayed(m, "nan", self.activation.nan, 6)),
            total.aligned.eq(delayed(m, "aligned", align.aligned)),
            psum_round.summed.eq(delayed(m, "summed", total.summed)),
            self.psum_out.eq(delayed(m, "result", psum_round.psum)),
        ]
        return m
