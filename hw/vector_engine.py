# SPDX-License-Identifier: Apache-2.0
"""The vector engine: VECTOR commands on C lanes of FP32."""

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import Out

from hw.config import TileConfig
from hw.emit import place
from hw.functions import FunctionUnit
from hw.isa import VECTOR, Activity, Function, Kind, Op1, Reduce, Status, operand_layout
from hw.ports import EngineControl, SramClient
from hw.tile_sram import TileSram
from hw.vector_check import VectorCheck
from hw.vector_issue import VectorIssue
from hw.vector_lane import STAGES, VectorLane
from hw.vector_load import VectorLoad
from hw.vector_mask import VectorMask
from hw.vector_reduce import VectorReduce
from hw.vector_store import VectorStore


class VectorEngine(wiring.Component):
    """Executes VECTOR commands one after another, as `golden.vector.vector`.

    Rate: one vector of `lanes` elements per cycle, over the ends of rows too; two cycles per vector
    when B and D both lie in memory as vectors; one more cycle per row for every ROW operand that
    shares the port with a vector operand or another ROW operand.

    A command's loads begin when the writes of the one before have been taken. With a memory that
    never makes it wait, a command of V vectors is done 28 + V cycles after it was taken;
    `FunctionUnit.LATENCY` more with a function, `VectorReduce.latency` + 1 more with a reduction,
    some for the last block of an MX result. A command that waits already is done 3 cycles sooner,
    counted from the `done` before.

    The pipeline stands still as a whole, and only while the memory does not take its writes; loads
    wait by credits. An access out of range ends the command: what is under way is thrown away,
    `done` comes with ADDRESS_RANGE, and what is stored at the results is undefined. A command
    without `store` and `reduce` is legal and has no effect.

    Parameters
    ----------
    config : the tile

    Members
    -------
    control : Out(EngineControl(VECTOR))
    a, b : Out(SramClient)
        Reads of A; reads of B and D.
    out : Out(SramClient)
        Writes.
    """

    def __init__(self, config: TileConfig) -> None:
        self.config = config
        self.lanes = config.lanes
        lines = config.vector_lines
        super().__init__(
            {
                "control": Out(EngineControl(VECTOR)),
                "a": Out(SramClient(lines)),
                "b": Out(SramClient(lines)),
                "out": Out(SramClient(lines)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        lanes, control = self.lanes, self.control
        lane_bits = lanes.bit_length() - 1

        # The next command waits here and is checked meanwhile.
        waiting = Signal()
        checked = Signal()
        following = Signal(operand_layout(VECTOR), reset_less=True)
        accept = Signal()
        begin = Signal()
        m.submodules.check = check = VectorCheck(lanes)
        m.d.comb += [
            control.command.ready.eq(~waiting),
            accept.eq(control.command.valid & ~waiting),
            check.command.eq(following),
        ]
        m.d.sync += checked.eq(waiting & ~begin)
        with m.If(accept):
            m.d.sync += [waiting.eq(1), following.eq(control.command.payload)]
        with m.Elif(begin):
            m.d.sync += waiting.eq(0)

        # The command that is executed.
        current = Signal(operand_layout(VECTOR), reset_less=True)
        start = Signal()
        stop = Signal()
        clear = Signal()
        fault = Signal()
        failed = Signal()
        end = Signal(16)
        vectors = Signal(16 - lane_bits)
        m.d.comb += [
            fault.eq(self.a.fault | self.b.fault | self.out.fault),
            end.eq(following.cols - 1),
            vectors.eq(end[lane_bits:]),
        ]
        row_vectors = Signal(16 - lane_bits, reset_less=True)
        with m.If(start):
            m.d.sync += [current.eq(following), row_vectors.eq(vectors)]

        m.submodules.load_a = load_a = VectorLoad(lanes, 1)
        m.submodules.load_b = load_b = VectorLoad(lanes, 2)
        m.submodules.issue = issue = VectorIssue(lanes)
        m.submodules.mask = mask = VectorMask(lanes)
        m.submodules.reduce = reduce = VectorReduce(lanes)
        m.submodules.store = store = VectorStore(lanes)
        for load, port, names in ((load_a, self.a, "a"), (load_b, self.b, "bd")):
            wiring.connect(m, load.client, wiring.flipped(port))
            m.d.comb += [
                load.start.eq(start),
                load.stop.eq(stop),
                load.clear.eq(clear),
                load.rows.eq(following.rows - 1),
                load.vectors.eq(row_vectors),
            ]
            for k, name in enumerate(names):
                m.d.comb += [
                    load.operand[k].kind.eq(
                        Kind.VECTOR if name == "a" else following[f"{name}_kind"]
                    ),
                    load.operand[k].address.eq(following[f"{name}_addr"]),
                    load.operand[k].stride.eq(following[f"{name}_stride"]),
                    load.operand[k].format.eq(following[f"{name}_format"]),
                ]
        with m.Switch(current.permute):
            for code in range(lane_bits + 1, 16):
                with m.Case(code):
                    m.d.comb += load_a.toggle.eq(1 << (code - 1 - lane_bits))

        enable = Signal()
        m.d.comb += enable.eq(store.enable)
        wiring.connect(m, load_a.out, issue.a)
        wiring.connect(m, load_b.out, issue.others)
        m.d.comb += [
            issue.start.eq(start),
            issue.clear.eq(clear),
            issue.enable.eq(enable & ~stop),
            issue.rows.eq(following.rows - 1),
            issue.vectors.eq(row_vectors),
            issue.kind[0].eq(current.b_kind),
            issue.kind[1].eq(current.d_kind),
            issue.immediate[0].eq(following.b_addr),
            issue.immediate[1].eq(following.d_addr),
            issue.permute.eq(current.permute),
        ]

        # Beside the lanes go the vectors' valid bits.
        def late(value: Value, cycles: int, name: str) -> Value:
            for age in range(cycles):
                register = Signal(name=f"{name}_{age}")
                with m.If(enable):
                    m.d.sync += register.eq(value)
                with m.If(clear):
                    m.d.sync += register.eq(0)
                value = register
            return value

        before = late(issue.valid, VectorLane.BEFORE_FUNCTION, "before_function")
        used = Signal()
        behind = Signal()
        through = late(before & used, FunctionUnit.LATENCY, "function")
        m.d.comb += [
            used.eq(current.function != Function.NONE),
            behind.eq(Mux(used, through, before)),
        ]
        masking = late(behind, VectorLane.LATENCY - VectorLane.BEFORE_FUNCTION - 1, "multiply")
        valid = late(masking, 1, "valid")
        m.d.comb += [
            mask.start.eq(start),
            mask.step.eq(masking & enable),
            mask.rows.eq(following.rows),
            mask.cols.eq(current.cols),
            mask.mask.eq(current.mask),
            mask.mask_lo.eq(following.mask_lo),
            mask.mask_hi.eq(following.mask_hi),
            mask.mask_lo_step.eq(current.mask_lo_step),
            mask.mask_hi_step.eq(current.mask_hi_step),
        ]
        present = Signal(lanes, reset_less=True)
        keep = Signal(lanes, reset_less=True)
        last = Signal(reset_less=True)
        final = Signal(reset_less=True)
        with m.If(enable):
            m.d.sync += [
                present.eq(mask.present),
                keep.eq(mask.keep),
                last.eq(mask.last),
                final.eq(mask.final),
            ]
        y = Signal(data.ArrayLayout(32, lanes))
        for i in range(lanes):
            lane = VectorLane()
            place(m, platform, f"lane{i}", lane)
            m.d.comb += [
                lane.enable.eq(enable),
                lane.a.eq(issue.x[i]),
                lane.b.eq(issue.b[i]),
                lane.d.eq(issue.d[i]),
                lane.keep.eq(mask.keep[i]),
                y[i].eq(lane.y),
            ]
            m.d.comb += [lane.control[name].eq(current[name]) for name in STAGES]

        reduces = Signal()
        m.d.comb += [
            reduces.eq(current.reduce != Reduce.NONE),
            reduce.enable.eq(enable & reduces),
            reduce.clear.eq(clear),
            reduce.op.eq(Mux(current.reduce == Reduce.MAX, Op1.MAX, Op1.ADD)),
            reduce.single.eq(row_vectors == 0),
            reduce.valid.eq(valid),
            reduce.last.eq(last),
            reduce.y.eq(y),
            reduce.keep.eq(keep),
        ]
        wiring.connect(m, store.client, wiring.flipped(self.out))
        m.d.comb += [
            store.start.eq(start),
            store.stop.eq(stop),
            store.rows.eq(following.rows),
            store.store.eq(current.store),
            store.format.eq(current.out_format),
            store.fixed_scale.eq(current.fixed_scale),
            store.scale.eq(current.scale),
            store.address.eq(following.out_addr),
            store.stride.eq(current.out_stride),
            store.reduce_address.eq(following.reduce_addr),
            store.reduce.eq(reduces),
            store.valid.eq(valid),
            store.y.eq(y),
            store.present.eq(present),
            store.last.eq(last),
            store.final.eq(final),
            store.reduce_valid.eq(reduce.out_valid & reduces),
            store.reduced.eq(reduce.out),
        ]

        # After the last write was taken its fault can still come.
        settle = Signal(range(TileSram.LATENCY), reset_less=True)
        free = Signal()
        done = Signal()
        error = Signal(Status, reset_less=True)
        activity = Signal(Activity)
        m.d.comb += [
            control.done.eq(done),
            control.error.eq(error),
            control.activity.eq(activity),
            start.eq(free & checked & ~check.illegal),
        ]
        m.d.sync += done.eq(0)
        with m.If(fault):
            m.d.sync += failed.eq(1)
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += [
                    free.eq(1),
                    begin.eq(checked),
                    activity.eq(Mux(waiting, Activity.BUSY, Activity.IDLE)),
                ]
                with m.If(checked & check.illegal):
                    m.d.sync += [done.eq(1), error.eq(Status.ILLEGAL_COMMAND)]
                with m.If(start):
                    m.next = "RUN"
            with m.State("RUN"):
                m.d.comb += stop.eq(failed)
                with m.If(~enable):
                    m.d.comb += activity.eq(Activity.BLOCKED)
                with m.Elif(issue.issuing & ~issue.valid):
                    m.d.comb += activity.eq(Activity.STARVED)
                with m.Else():
                    m.d.comb += activity.eq(Activity.BUSY)
                m.d.sync += settle.eq(TileSram.LATENCY - 1)
                with m.If(failed & Cat(load_a.quiet, load_b.quiet, store.quiet).all()):
                    m.d.comb += clear.eq(1)
                    m.next = "SETTLE"
                with m.Elif(~failed & store.finished):
                    m.next = "SETTLE"
            with m.State("SETTLE"):
                m.d.comb += activity.eq(Activity.BUSY)
                m.d.sync += settle.eq(settle - 1)
                with m.If(settle == 1):
                    m.d.comb += [free.eq(1), begin.eq(start)]
                    m.d.sync += [
                        done.eq(1),
                        failed.eq(0),
                        error.eq(Mux(failed | fault, Status.ADDRESS_RANGE, Status.RUNNING)),
                    ]
                    with m.If(start):
                        m.next = "RUN"
                    with m.Else():
                        m.next = "IDLE"
        return m
