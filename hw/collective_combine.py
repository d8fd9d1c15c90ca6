# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a collective node: two streams of lines combined into one."""

from amaranth import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.emit import place
from hw.fp32_add import Fp32Add
from hw.fp32_compare import Fp32Compare
from hw.isa import CollectiveOp, Scope
from hw.ports import LINE_BITS

WORDS = LINE_BITS // 32
COLLECTIVE_LINE = data.StructLayout({"line": LINE_BITS, "op": CollectiveOp, "scope": Scope})


class CollectiveCombine(wiring.Component):
    """`result` = `upstream` op `own`, line by line, four FP32 per line.

    Sums and maxima are those of `golden.fp32`; BROADCAST is a bitwise OR, of which all but the root
    contribute zeros. `alone` says that there is no upstream: own lines pass unchanged. Op and scope
    are those of the own line. Latency `LATENCY` cycles, one line per cycle; while a result
    waits everything stands still. Each input is ready when the other is there, too.
    """

    LATENCY = Fp32Add.LATENCY
    emit_name = "collective_combine"

    def __init__(self):
        super().__init__(
            {
                "alone": In(1),
                "upstream": In(stream.Signature(COLLECTIVE_LINE)),
                "own": In(stream.Signature(COLLECTIVE_LINE)),
                "result": Out(stream.Signature(COLLECTIVE_LINE)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        enable, take = Signal(), Signal()
        valid = Signal(self.LATENCY)
        own, upstream = self.own, self.upstream
        m.d.comb += [
            enable.eq(~valid[-1] | self.result.ready),
            take.eq(enable & own.valid & (upstream.valid | self.alone)),
            own.ready.eq(enable & (upstream.valid | self.alone)),
            upstream.ready.eq(enable & own.valid & ~self.alone),
            self.result.valid.eq(valid[-1]),
        ]
        with m.If(enable):
            m.d.sync += valid.eq((valid << 1) | take)

        # Op and scope of the line in each stage; what is not added travels beside the adders.
        adds, compares = Signal(), Signal()
        m.d.comb += [
            adds.eq(take & ~self.alone & (own.payload.op == CollectiveOp.ALLREDUCE_SUM)),
            compares.eq(take & ~self.alone & (own.payload.op == CollectiveOp.ALLREDUCE_MAX)),
        ]
        stage = data.StructLayout(
            {"line": LINE_BITS, "add": 1, "compare": 1, "op": CollectiveOp, "scope": Scope}
        )
        stages = [Signal(stage, name=f"stage{i}", reset_less=True) for i in range(self.LATENCY)]
        sums, maxima = Signal(LINE_BITS), Signal(LINE_BITS)
        with m.If(enable):
            m.d.sync += [
                stages[0].line.eq(own.payload.line | Mux(self.alone, 0, upstream.payload.line)),
                stages[0].add.eq(adds),
                stages[0].compare.eq(compares),
                stages[0].op.eq(own.payload.op),
                stages[0].scope.eq(own.payload.scope),
                stages[1].eq(stages[0]),
                *(after.eq(before) for before, after in zip(stages[1:], stages[2:], strict=False)),
            ]
            with m.If(stages[0].compare):
                m.d.sync += stages[1].line.eq(maxima)

        for i in range(WORDS):
            word = slice(32 * i, 32 * i + 32)
            adder, compare = Fp32Add(), Fp32Compare()
            place(m, platform, f"add{i}", adder)
            place(m, platform, f"compare{i}", compare)
            for unit, used in ((adder, adds), (compare, compares)):
                # Operands rest at zero while the unit is not in use: less switching.
                m.d.comb += [
                    unit.enable.eq(enable),
                    unit.a.eq(Mux(used, upstream.payload.line[word], 0)),
                    unit.b.eq(Mux(used, own.payload.line[word], 0)),
                ]
            m.d.comb += [sums[word].eq(adder.result), maxima[word].eq(compare.maximum)]

        last = stages[-1]
        m.d.comb += [
            self.result.payload.line.eq(Mux(last.add, sums, last.line)),
            self.result.payload.op.eq(last.op),
            self.result.payload.scope.eq(last.scope),
        ]
        return m
