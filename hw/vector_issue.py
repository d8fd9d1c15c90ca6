# SPDX-License-Identifier: Apache-2.0
"""Gathers the operands of a VECTOR command, vector by vector, and enters them into the lanes."""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.isa import Kind


class VectorIssue(wiring.Component):
    """Takes one vector of `a`, and of B and D what the command needs, in each cycle with `valid`.

    `others` carries B and D in the order of `VectorLoad`: a vector that needs both takes two
    cycles, the first of which may pass ahead of `a`. Values of kind ROW stay for the rest of their
    row, those of kind IMMEDIATE for the command. No latency; one vector per cycle. Nothing is
    issued while `enable` is low.

    Members
    -------
    start : In(1)
        Begins a command; the immediates are taken with it.
    clear : In(1)
    enable : In(1)
    rows, vectors : In(16)
        Rows, and vectors of a row, both less one.
    kind : In
        Kinds of B and D.
    immediate : In
        Values of B and D of kind IMMEDIATE.
    permute : In(4)
        As in the command; what it does beyond the lanes is up to the load.
    issuing : Out(1)
        Vectors of the command are still to be issued.
    valid : Out(1)
    x, b, d : Out
        Operands of every lane.
    """

    def __init__(self, lanes: int) -> None:
        if lanes < 4 or lanes & (lanes - 1):
            raise ValueError(f"lanes must be a power of two from 4 on, not {lanes!r}")
        self.lanes = lanes
        vector = data.ArrayLayout(32, lanes)
        super().__init__(
            {
                "start": In(1),
                "clear": In(1),
                "enable": In(1),
                "rows": In(16),
                "vectors": In(16),
                "kind": In(data.ArrayLayout(Kind, 2)),
                "immediate": In(data.ArrayLayout(32, 2)),
                "permute": In(4),
                "a": In(stream.Signature(vector)),
                "others": In(stream.Signature(vector)),
                "issuing": Out(1),
                "valid": Out(1),
                "x": Out(vector),
                "b": Out(vector),
                "d": Out(vector),
            }
        )

    def elaborate(self, platform):
        m = Module()
        row = Signal(16, reset_less=True)
        index = Signal(16, reset_less=True)
        second = Signal()  # B of this vector is there, D is next
        held = [
            Signal(data.ArrayLayout(32, self.lanes), name=f"held_{name}", reset_less=True)
            for name in "bd"
        ]
        needs = [Signal(name=f"needs_{name}") for name in "bd"]
        for k in range(2):
            m.d.comb += needs[k].eq(
                (self.kind[k] == Kind.VECTOR) | ((self.kind[k] == Kind.ROW) & (index == 0))
            )
        final = Signal()  # the item that comes, if any, is the last that the vector needs
        is_d = Signal()
        take = Signal()
        m.d.comb += [
            is_d.eq(second | ~needs[0]),
            final.eq(second | ~needs[0] | ~needs[1]),
            self.valid.eq(
                self.issuing
                & self.enable
                & self.a.valid
                & final
                & (self.others.valid | ~Cat(needs).any())
            ),
            self.a.ready.eq(self.valid),
            take.eq(self.others.valid & Mux(final, self.valid & Cat(needs).any(), self.issuing)),
            self.others.ready.eq(take),
            self.b.eq(Mux(needs[0] & ~is_d, self.others.payload.as_value(), held[0].as_value())),
            self.d.eq(Mux(needs[1] & is_d, self.others.payload.as_value(), held[1].as_value())),
        ]
        issuing = Signal()
        m.d.comb += self.issuing.eq(issuing)
        with m.If(take):
            m.d.sync += second.eq(~final)
            with m.If(is_d):
                m.d.sync += held[1].eq(self.others.payload)
            with m.Else():
                m.d.sync += held[0].eq(self.others.payload)
        with m.If(self.valid):
            m.d.sync += index.eq(index + 1)
            with m.If(index == self.vectors):
                m.d.sync += [index.eq(0), row.eq(row - 1), issuing.eq(row != 0)]
        with m.If(self.start):
            m.d.sync += [row.eq(self.rows), index.eq(0), second.eq(0), issuing.eq(1)]
            for k in range(2):
                m.d.sync += held[k].eq(self.immediate[k].replicate(self.lanes))
        with m.If(self.clear):
            m.d.sync += issuing.eq(0)

        for i in range(self.lanes):
            m.d.comb += self.x[i].eq(self.a.payload[i])
            with m.Switch(self.permute):
                for bit in range(self.lanes.bit_length() - 1):
                    with m.Case(bit + 1):
                        m.d.comb += self.x[i].eq(self.a.payload[i ^ (1 << bit)])
        return m
