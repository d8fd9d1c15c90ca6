# SPDX-License-Identifier: Apache-2.0
"""Row reductions of the vector engine: four partial results per lane, then a tree of lanes."""

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hw.emit import place
from hw.isa import Op1
from hw.vector_combine import VectorCombine
from hw.vector_lane import NEGATIVE_INFINITY

PARTIALS = 4  # part of the definition of a reduction; more than the latency of VectorCombine


class VectorPartials(wiring.Component):
    """The partial results of one lane and their collapse to one value.

    Three operators: one adds elements to the partials, one makes (p0, p1) and, a cycle later,
    (p2, p3) of a row, one the last result. `LATENCY` cycles after the last element of a row the
    row's result is on `result`, for one cycle. One element per cycle and one row per cycle at most.
    While `enable` is low the whole pipeline stands still.

    Members
    -------
    enable : In(1)
    op : In(3)
        `Op1.ADD` or `Op1.MAX`; must not change while elements are under way, like `single`.
    single : In(1)
        Rows have one element only: partials other than the first are absent.
    y, keep : In
        Element; it counts if `keep` is high.
    slot : In(2)
        Partial that it is added to; `fresh`: as the first of the row.
    fresh : In(1)
    write : In(PARTIALS)
        Which partial takes the result of the element of VectorCombine.LATENCY cycles ago.
    capture : In(1)
        That element was the last of its row; `present` says which partials the row has.
    present : In(PARTIALS)
    first : In(1)
        `capture` of the last cycle.
    result : Out(32)
    """

    LATENCY = 3 * VectorCombine.LATENCY + 2
    emit_name = "vector_partials"

    def __init__(self) -> None:
        super().__init__(
            {
                "enable": In(1),
                "op": In(3),
                "single": In(1),
                "y": In(32),
                "keep": In(1),
                "slot": In(2),
                "fresh": In(1),
                "write": In(PARTIALS),
                "capture": In(1),
                "present": In(PARTIALS),
                "first": In(1),
                "result": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        gather, pairs, final = VectorCombine(), VectorCombine(), VectorCombine()
        for name, unit in (("gather", gather), ("pairs", pairs), ("final", final)):
            place(m, platform, name, unit)
            m.d.comb += [unit.enable.eq(self.enable), unit.op.eq(self.op)]

        empty = Signal(32)
        m.d.comb += empty.eq(Mux(self.op == Op1.MAX, NEGATIVE_INFINITY, 0))
        partials = [Signal(32, name=f"partial_{k}", reset_less=True) for k in range(PARTIALS)]
        captured = [Signal(32, name=f"captured_{k}", reset_less=True) for k in range(PARTIALS)]
        chosen = Signal(32)
        with m.Switch(self.slot):
            for k in range(PARTIALS):
                with m.Case(k):
                    m.d.comb += chosen.eq(partials[k])
        m.d.comb += [
            gather.a.eq(Mux(self.fresh, empty, chosen)),
            gather.b.eq(Mux(self.keep, self.y, empty)),
        ]
        with m.If(self.enable):
            for k in range(PARTIALS):
                with m.If(self.write[k]):
                    m.d.sync += partials[k].eq(gather.result)
                with m.If(self.capture):
                    m.d.sync += captured[k].eq(
                        Mux(self.present[k], Mux(self.write[k], gather.result, partials[k]), empty)
                    )

        # With single elements the next row takes the place of (p2, p3), which would be empty.
        lower = Signal(32, reset_less=True)
        with m.If(self.enable):
            m.d.sync += lower.eq(pairs.result)
        m.d.comb += [
            pairs.a.eq(Mux(self.first, captured[0], captured[2])),
            pairs.b.eq(Mux(self.first, captured[1], captured[3])),
            final.a.eq(lower),
            final.b.eq(Mux(self.single, empty, pairs.result)),
            self.result.eq(final.result),
        ]
        return m


class VectorReduce(wiring.Component):
    """Reduces rows of vectors of `lanes` elements to one FP32 each.

    The results are those of `golden.fp32.reduce_sum` and `reduce_max`. Latency `latency` cycles
    from the last vector of a row; one vector, and one row, per cycle. While `enable` is low the
    whole pipeline stands still.

    Parameters
    ----------
    lanes : a power of two

    Members
    -------
    enable : In(1)
    clear : In(1)
        Forgets what is under way.
    op : In(3)
        `Op1.ADD` or `Op1.MAX`; must not change while vectors are under way, like `single`.
    single : In(1)
        Rows have one vector only.
    valid : In(1)
    last : In(1)
        The vector ends its row.
    y : In
        Elements; those with `keep` low do not count.
    keep : In
    out_valid : Out(1)
        High for one enabled cycle for every row.
    out : Out(32)
    """

    def __init__(self, lanes: int) -> None:
        if lanes < 2 or lanes & (lanes - 1):
            raise ValueError(f"lanes must be a power of two from 2 on, not {lanes!r}")
        self.lanes = lanes
        super().__init__(
            {
                "enable": In(1),
                "clear": In(1),
                "op": In(3),
                "single": In(1),
                "valid": In(1),
                "last": In(1),
                "y": In(data.ArrayLayout(32, lanes)),
                "keep": In(lanes),
                "out_valid": Out(1),
                "out": Out(32),
            }
        )

    @property
    def latency(self) -> int:
        levels = self.lanes.bit_length() - 1
        return VectorPartials.LATENCY + levels * VectorCombine.LATENCY

    def elaborate(self, platform):
        m = Module()

        # Place of the vector in its row: its partial, and whether that one is new.
        slot = Signal(range(PARTIALS))
        fresh = Signal(init=1)
        with m.If(self.enable & self.valid):
            m.d.sync += slot.eq(slot + 1)
            with m.If(slot == PARTIALS - 1):
                m.d.sync += fresh.eq(0)
            with m.If(self.last):
                m.d.sync += [slot.eq(0), fresh.eq(1)]
        with m.If(self.clear):
            m.d.sync += [slot.eq(0), fresh.eq(1)]

        tag = data.StructLayout({"valid": 1, "last": 1, "slot": slot.shape(), "fresh": 1})
        now = Signal(tag)
        m.d.comb += [
            now.valid.eq(self.valid),
            now.last.eq(self.last),
            now.slot.eq(slot),
            now.fresh.eq(fresh),
        ]

        def late(value: Value, cycles: int, name: str) -> Value:
            """`value`, a tag or bit with control state, some enabled cycles later."""
            for age in range(cycles):
                register = Signal(len(value), name=f"{name}_{age}")
                with m.If(self.enable):
                    m.d.sync += register.eq(value)
                with m.If(self.clear):
                    m.d.sync += register.eq(0)
                value = register
            return value

        gathered = data.View(tag, late(now.as_value(), VectorCombine.LATENCY, "gathered"))
        write = Signal(PARTIALS)
        present = Signal(PARTIALS)
        capture = Signal()
        m.d.comb += [
            capture.eq(gathered.valid & gathered.last),
            write.eq(Mux(gathered.valid, 1 << gathered.slot, 0)),
            present.eq(
                Cat(
                    Const(1, 1),
                    *(~gathered.fresh | (k <= gathered.slot) for k in range(1, PARTIALS)),
                )
            ),
        ]
        first = late(capture, 1, "first")
        values = []
        for i in range(self.lanes):
            lane = VectorPartials()
            place(m, platform, f"lane{i}", lane)
            m.d.comb += [
                lane.enable.eq(self.enable),
                lane.op.eq(self.op),
                lane.single.eq(self.single),
                lane.y.eq(self.y[i]),
                lane.keep.eq(self.keep[i]),
                lane.slot.eq(slot),
                lane.fresh.eq(fresh),
                lane.write.eq(write),
                lane.capture.eq(capture),
                lane.present.eq(present),
                lane.first.eq(first),
            ]
            values.append(lane.result)

        level = 0
        while len(values) > 1:
            nodes = []
            for i in range(0, len(values), 2):
                node = VectorCombine()
                place(m, platform, f"level{level}_{i // 2}", node)
                m.d.comb += [
                    node.enable.eq(self.enable),
                    node.op.eq(self.op),
                    node.a.eq(values[i]),
                    node.b.eq(values[i + 1]),
                ]
                nodes.append(node.result)
            values = nodes
            level += 1
        m.d.comb += [
            self.out.eq(values[0]),
            self.out_valid.eq(late(capture, self.latency - VectorCombine.LATENCY, "done")),
        ]
        return m
