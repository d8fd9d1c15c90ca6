# SPDX-License-Identifier: Apache-2.0
"""Accumulator of one column: sums the chains of slices and K tiles, and queues finished results."""

from amaranth import Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hw.fp32_add import Fp32Add
from hw.sram import Sram1R1W
from hw.wires import delayed

BIASES = 2  # bias registers


def accumulate_layout(acc_rows: int) -> data.StructLayout:
    """`first`: add to +0 or, with `use_bias`, to bias register `bias_sel` instead of the stored
    sum; `last`: the sum is a result and is not stored.
    """
    return data.StructLayout(
        {
            "valid": 1,
            "index": (acc_rows - 1).bit_length(),
            "first": 1,
            "last": 1,
            "use_bias": 1,
            "bias_sel": 1,
        }
    )


class Accumulator(wiring.Component):
    """`acc_rows` FP32 sums, one adder, and a queue of `result_depth` results.

    One command per cycle; `psum` comes one cycle after its `command`. Two commands with the same
    index must be LATENCY cycles apart unless the later one is `first`. A result is in the queue
    RESULT_AFTER cycles after its command. The queue is read at `result_addr`, the value is on
    `result` in the cycle after `result_en` and stays; the reader keeps count and must not let it
    overflow.

    `command_out` is `command` one cycle later, for the next column.
    """

    LATENCY = 2
    RESULT_AFTER = LATENCY + 2

    def __init__(self, acc_rows: int, result_depth: int):
        for name, value in (("acc_rows", acc_rows), ("result_depth", result_depth)):
            if not isinstance(value, int) or value < 2 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two of at least 2, not {value!r}")
        self.acc_rows, self.result_depth = acc_rows, result_depth
        layout = accumulate_layout(acc_rows)
        super().__init__(
            {
                "command": In(layout),
                "command_out": Out(layout),
                "psum": In(32),
                "bias_write": In(1),
                "bias_sel": In(1),
                "bias": In(32),
                "result_en": In(1),
                "result_addr": In((result_depth - 1).bit_length()),
                "result": Out(32),
            }
        )

    @property
    def emit_name(self) -> str:
        return f"accumulator_{self.acc_rows}_{self.result_depth}"

    def elaborate(self, platform):
        m = Module()
        m.submodules.sums = sums = Sram1R1W(32, self.acc_rows)
        m.submodules.queue = queue = Sram1R1W(32, self.result_depth)
        m.submodules.adder = adder = Fp32Add(self.LATENCY)
        layout = accumulate_layout(self.acc_rows)

        biases = [Signal(32, name=f"bias{i}", reset_less=True) for i in range(BIASES)]
        for i, bias in enumerate(biases):
            with m.If(self.bias_write & (self.bias_sel == i)):
                m.d.sync += bias.eq(self.bias)

        # Read the stored sum while the partial sum is on its way.
        now = Signal(layout)
        valid = Signal()
        m.d.sync += [now.eq(self.command), valid.eq(self.command.valid)]
        m.d.comb += [
            self.command_out.eq(now),
            self.command_out.valid.eq(valid),
            sums.read_en.eq(self.command.valid),
            sums.read_addr.eq(self.command.index),
        ]

        # What the adder gives now, and what was written while the sum was read, are newer.
        then = Signal(layout)
        m.d.comb += then.eq(delayed(m, "command", now, self.LATENCY))
        stores = Signal()
        m.d.comb += stores.eq(delayed(m, "valid", valid, self.LATENCY, reset=True) & ~then.last)
        written = Signal()
        written_index = Signal.like(then.index, reset_less=True)
        written_sum = Signal(32, reset_less=True)
        m.d.sync += [written.eq(stores), written_index.eq(then.index), written_sum.eq(adder.result)]
        stored, start, base = Signal(32), Signal(32), Signal(32)
        m.d.comb += [
            start.eq(Mux(now.use_bias, Mux(now.bias_sel, biases[1], biases[0]), 0)),
            stored.eq(
                Mux(
                    stores & (then.index == now.index),
                    adder.result,
                    Mux(written & (written_index == now.index), written_sum, sums.read_data),
                )
            ),
            base.eq(Mux(now.first, start, stored)),
            adder.enable.eq(1),
            adder.a.eq(base),
            adder.b.eq(self.psum),
            adder.subtract.eq(0),
            sums.write_en.eq(stores),
            sums.write_addr.eq(then.index),
            sums.write_data.eq(adder.result),
        ]

        # Results.
        emits = Signal()
        tail = Signal.like(self.result_addr)
        m.d.comb += [
            emits.eq(delayed(m, "emit", valid & now.last, self.LATENCY, reset=True)),
            queue.write_en.eq(emits),
            queue.write_addr.eq(tail),
            queue.write_data.eq(adder.result),
            queue.read_en.eq(self.result_en),
            queue.read_addr.eq(self.result_addr),
            self.result.eq(queue.read_data),
        ]
        with m.If(emits):
            m.d.sync += tail.eq(tail + 1)
        return m
