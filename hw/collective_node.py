# SPDX-License-Identifier: Apache-2.0
"""A node of the collective network."""

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from hw.collective_combine import COLLECTIVE_LINE, CollectiveCombine
from hw.emit import place
from hw.fifo import StreamFifo
from hw.isa import Scope
from hw.noc_flit import POSITION
from hw.ports import LINE_BITS


class CollectiveLocal(wiring.Signature):
    """The tile's link, seen from the tile: its contributions, and the results."""

    def __init__(self):
        super().__init__(
            {
                "contribution": Out(stream.Signature(COLLECTIVE_LINE)),
                "result": In(stream.Signature(LINE_BITS)),
            }
        )


class CollectiveNode(wiring.Component):
    """Joins a tile's lines with its neighbours' and hands the results back.

    Lines are reduced eastwards along a row, then (scope MESH) southwards along the last column, or
    (scope COLUMN) southwards along their own column. The result returns from the end of the chain
    against that direction: north along the column, then west along each row, and is copied to every
    tile on the way. This is the order of `golden.collective`. Every line carries its op and scope;
    nodes keep no other state, and every stage handles one line per cycle. A hop takes 1 +
    CollectiveCombine.LATENCY cycles towards the end of the chain and one back.

    Operations do not mix: a tile has one operation under way, and a line moves on only together
    with the line of the tile it passes, so lines of a later operation wait at the first node that
    has not reached it. Members of a scope must issue its operations in the same order, with the
    same number of lines.

    Deadlock: a result waits for nobody but the tiles, which always take theirs; a reduced line
    waits for the tiles' contributions and for results to drain.

    Members
    -------
    position : x, y and the mesh's size, constant.
    local : the tile.
    reduce_west, reduce_north : from the neighbours; reduce_east, reduce_south : to them.
    result_east, result_south : from the neighbours; result_west, result_north : to them.
    """

    emit_name = "collective_node"

    def __init__(self):
        line = stream.Signature(COLLECTIVE_LINE)
        super().__init__(
            {
                "position": In(POSITION),
                "local": In(CollectiveLocal()),
                "reduce_west": In(line),
                "reduce_north": In(line),
                "reduce_east": Out(line),
                "reduce_south": Out(line),
                "result_east": In(line),
                "result_south": In(line),
                "result_west": Out(line),
                "result_north": Out(line),
            }
        )

    def elaborate(self, platform):
        m = Module()
        at = self.position
        last_x, last_y = Signal(), Signal()
        m.d.comb += [last_x.eq(at.x + 1 == at.mesh_x), last_y.eq(at.y + 1 == at.mesh_y)]

        row, column = CollectiveCombine(), CollectiveCombine()
        place(m, platform, "row", row)
        place(m, platform, "column", column)
        m.submodules.from_west = from_west = StreamFifo(COLLECTIVE_LINE, 2)
        m.submodules.from_north = from_north = StreamFifo(COLLECTIVE_LINE, 2)
        m.submodules.results = results = StreamFifo(COLLECTIVE_LINE, 2)
        connect(m, flipped(self.reduce_west), from_west.i)
        connect(m, flipped(self.reduce_north), from_north.i)
        connect(m, from_west.o, row.upstream)
        connect(m, from_north.o, column.upstream)
        m.d.comb += [row.alone.eq(at.x == 0), column.alone.eq(at.y == 0)]

        # The tile's line goes into the row's chain, or straight into the column's.
        own = self.local.contribution
        along_row = Signal()
        m.d.comb += [
            along_row.eq(own.payload.scope != Scope.COLUMN),
            row.own.valid.eq(own.valid & along_row),
            row.own.payload.eq(own.payload),
        ]
        # At the end of the row its sum goes into the column's chain, back, or on.
        turns = Signal()
        m.d.comb += turns.eq(last_x & (row.result.payload.scope == Scope.MESH))
        row_done, column_done = Signal(), Signal()
        m.d.comb += row_done.eq(row.result.valid & last_x & ~turns)
        m.d.comb += column_done.eq(column.result.valid & last_y)
        into_column = Signal()  # the row's chain has a line for the column's
        m.d.comb += into_column.eq(row.result.valid & turns)
        with m.If(into_column):
            m.d.comb += [column.own.valid.eq(1), column.own.payload.eq(row.result.payload)]
        with m.Else():
            m.d.comb += [
                column.own.valid.eq(own.valid & ~along_row),
                column.own.payload.eq(own.payload),
            ]
        m.d.comb += own.ready.eq(Mux(along_row, row.own.ready, column.own.ready & ~into_column))

        m.d.comb += [
            self.reduce_east.valid.eq(row.result.valid & ~last_x),
            self.reduce_east.payload.eq(row.result.payload),
            self.reduce_south.valid.eq(column.result.valid & ~last_y),
            self.reduce_south.payload.eq(column.result.payload),
        ]

        # Results: of the tile's one operation, so only one of the four comes at a time.
        sources = [
            (row_done, row.result.payload),
            (column_done, column.result.payload),
            (self.result_east.valid, self.result_east.payload),
            (self.result_south.valid, self.result_south.payload),
        ]
        taken = []
        earlier: list[Value] = []
        for i, (source, payload) in enumerate(sources):
            grant = Signal(name=f"result_grant{i}")
            m.d.comb += grant.eq(results.i.ready & ~Cat(earlier).any())
            with m.If(source & ~Cat(earlier).any()):
                m.d.comb += [results.i.valid.eq(1), results.i.payload.eq(payload)]
            taken.append(grant)
            earlier.append(source)
        row_ready, column_ready, east_ready, south_ready = taken
        m.d.comb += [
            self.result_east.ready.eq(east_ready),
            self.result_south.ready.eq(south_ready),
            column.result.ready.eq(Mux(last_y, column_ready, self.reduce_south.ready)),
        ]
        with m.If(turns):
            m.d.comb += row.result.ready.eq(column.own.ready)
        with m.Elif(last_x):
            m.d.comb += row.result.ready.eq(row_ready)
        with m.Else():
            m.d.comb += row.result.ready.eq(self.reduce_east.ready)

        # Copies of a result to the tile, west and north; each goes as soon as it can.
        scope = results.o.payload.scope
        m.d.comb += [
            self.local.result.payload.eq(results.o.payload.line),
            self.result_west.payload.eq(results.o.payload),
            self.result_north.payload.eq(results.o.payload),
        ]
        branches = [
            (self.local.result, 1),
            (self.result_west, (scope != Scope.COLUMN) & (at.x != 0)),
            (
                self.result_north,
                (at.y != 0) & ((scope == Scope.COLUMN) | ((scope == Scope.MESH) & last_x)),
            ),
        ]
        sent = Signal(len(branches))
        settled = Signal(len(branches))
        for i, (branch, wanted) in enumerate(branches):
            m.d.comb += [
                branch.valid.eq(results.o.valid & wanted & ~sent[i]),
                settled[i].eq(~wanted | sent[i] | branch.ready if i else sent[i] | branch.ready),
            ]
        m.d.comb += results.o.ready.eq(settled.all())
        m.d.sync += sent.eq(Mux(results.o.valid & ~settled.all(), settled, 0))
        return m
