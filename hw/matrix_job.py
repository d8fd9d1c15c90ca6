# SPDX-License-Identifier: Apache-2.0
"""A MATMUL command as the stages of the matrix engine take it: operands plus what follows from
the pair of formats.

With a, w the base-2 logarithms of the significand digits of activation (recoded) and weight:
slices of a group P = 2^a, products of a slice N = 2^(5 - a - w), elements of a group G = 2^(5 - w).
An activation format stored in 2^s bits makes a group 2^(5 - w + s - 7) lines: `step` is that
exponent when it is not negative, `narrow` its negative otherwise (2^narrow groups share a line),
and 2^(7 - s - 5 + a + w) slices share a line (`share`).
"""

from enum import IntEnum

from amaranth import Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from golden.formats import Format
from hw.isa import MATMUL, operand_layout

PAIR_LAYOUT = data.StructLayout(
    {
        "slices": 2,  # log2 P
        "group": 3,  # log2 G
        "step": 2,
        "narrow": 2,
        "share": 3,  # log2 of the slices in a line
        "halves": 1,  # a KV line holds two groups of the weight (MXINT8)
    }
)
JOB_LAYOUT = data.StructLayout({"command": operand_layout(MATMUL), "pair": PAIR_LAYOUT})


class FormatClass(IntEnum):
    """Base-2 logarithm of a format's significand digits."""

    FP4 = 0
    EIGHT = 1
    BF16 = 2


class PairDecoder(wiring.Component):
    """Derives `pair` from the two format codes; combinational. `legal` is low for FP32."""

    def __init__(self) -> None:
        super().__init__(
            {
                "act_format": In(3),
                "weight_format": In(3),
                "pair": Out(PAIR_LAYOUT),
                "legal": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()

        def digits(code, name):
            value = Signal(2, name=f"{name}_digits")
            with m.Switch(code):
                with m.Case(Format.MXFP4):
                    m.d.comb += value.eq(FormatClass.FP4)
                with m.Case(Format.MXINT8, Format.BF16):
                    m.d.comb += value.eq(FormatClass.BF16)
                with m.Default():
                    m.d.comb += value.eq(FormatClass.EIGHT)
            return value

        act, weight = digits(self.act_format, "act"), digits(self.weight_format, "weight")
        chains = Signal(2)
        m.d.comb += chains.eq(Mux(act > weight, act, weight))
        storage = Signal(3)  # log2 of the stored bits of an activation
        with m.Switch(self.act_format):
            with m.Case(Format.MXFP4):
                m.d.comb += storage.eq(2)
            with m.Case(Format.BF16):
                m.d.comb += storage.eq(4)
            with m.Default():
                m.d.comb += storage.eq(3)
        lines = Signal(4)  # log2 of the lines of a group, plus 2
        m.d.comb += [
            lines.eq(storage - weight),
            self.pair.slices.eq(chains),
            self.pair.group.eq(5 - weight),
            self.pair.step.eq(Mux(lines > 2, lines - 2, 0)),
            self.pair.narrow.eq(Mux(lines < 2, 2 - lines, 0)),
            self.pair.share.eq(2 + chains + weight - storage),
            self.pair.halves.eq(self.weight_format == Format.MXINT8),
            self.legal.eq((self.act_format != Format.FP32) & (self.weight_format != Format.FP32)),
        ]
        return m
