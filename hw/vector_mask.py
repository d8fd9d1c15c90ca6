# SPDX-License-Identifier: Apache-2.0
"""Which elements of a vector exist and which count, for the vectors of a command in their order."""

from amaranth import Cat, Const, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out


class VectorMask(wiring.Component):
    """Walks over rows and vectors; the outputs belong to the vector that the next `step` passes.

    Members
    -------
    start : In(1)
        Begins a command.
    step : In(1)
    rows, mask_lo, mask_hi : In(16)
        Of the command, taken with `start`.
    cols, mask, mask_lo_step, mask_hi_step : In
        Of the command; they hold still.
    present : Out(lanes)
        Elements of the row, low beyond its end.
    keep : Out(lanes)
        Those of them that the mask lets through.
    last : Out(1)
        The vector ends its row; `final`: the last row.
    """

    def __init__(self, lanes: int) -> None:
        if lanes < 4 or lanes & (lanes - 1):
            raise ValueError(f"lanes must be a power of two from 4 on, not {lanes!r}")
        self.lanes = lanes
        super().__init__(
            {
                "start": In(1),
                "step": In(1),
                "rows": In(16),
                "cols": In(16),
                "mask": In(1),
                "mask_lo": In(16),
                "mask_hi": In(16),
                "mask_lo_step": In(1),
                "mask_hi_step": In(1),
                "present": Out(lanes),
                "keep": Out(lanes),
                "last": Out(1),
                "final": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        bits = self.lanes.bit_length() - 1
        row = Signal(16, reset_less=True)
        index = Signal(16 - bits, reset_less=True)
        lo = Signal(16, reset_less=True)  # of the row
        hi = Signal(16, reset_less=True)
        end = Signal(16)
        m.d.comb += [
            end.eq(self.cols - 1),
            self.last.eq(index == end[bits:]),
            self.final.eq(self.last & (row == 1)),
        ]
        with m.If(self.step):
            m.d.sync += index.eq(Mux(self.last, 0, index + 1))
            with m.If(self.last):
                m.d.sync += [
                    row.eq(row - 1),
                    lo.eq(lo + self.mask_lo_step),
                    hi.eq(hi + self.mask_hi_step),
                ]
        with m.If(self.start):
            m.d.sync += [
                row.eq(self.rows),
                index.eq(0),
                lo.eq(self.mask_lo),
                hi.eq(self.mask_hi),
            ]

        def below(limit, name: str) -> Signal:
            """Elements of the vector whose index is below `limit`."""
            result = Signal(self.lanes, name=name)
            before, at = Signal(name=f"{name}_before"), Signal(name=f"{name}_at")
            m.d.comb += [
                before.eq(index < limit[bits:]),
                at.eq(index == limit[bits:]),
                # The last element is below the limit only if the whole vector is.
                result.eq(
                    Cat(
                        *(before | (at & (limit[:bits] > i)) for i in range(self.lanes - 1)), before
                    )
                ),
            ]
            return result

        under_lo = below(lo, "under_lo")
        under_hi = below(hi, "under_hi")
        counted = Signal(self.lanes)
        with m.If(lo > hi):
            m.d.comb += counted.eq(~under_lo | under_hi)
        with m.Else():
            m.d.comb += counted.eq(~under_lo & under_hi)
        m.d.comb += [
            self.present.eq(
                Cat(Const(1, 1), *(~self.last | (end[:bits] >= i) for i in range(1, self.lanes)))
            ),
            self.keep.eq(self.present & (counted | (~self.mask).replicate(self.lanes))),
        ]
        return m
