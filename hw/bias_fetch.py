# SPDX-License-Identifier: Apache-2.0
"""Fetches bias vectors of a job's column tiles into the array's bias registers, ahead of use."""

from amaranth import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.array import MatmulArray
from hw.config import TileConfig
from hw.matrix_job import JOB_LAYOUT
from hw.ports import SramClient


class BiasFetch(wiring.Component):
    """Reads one vector of `cols` FP32 biases per column tile through `memory`.

    `ready` is high while the register that the issuer uses next holds its bias; `used` says that
    the last slice which reads it was issued, after which the register is written again only when
    that slice has passed the whole array.
    """

    SLOTS = 2

    def __init__(self, config: TileConfig, array: MatmulArray, passing: int):
        if passing < 1:
            raise ValueError(f"passing must be at least 1, not {passing!r}")
        self.config = config
        self.passing = passing  # cycles from `used` until the register is free
        super().__init__(
            {
                "job": In(stream.Signature(JOB_LAYOUT)),
                "memory": Out(SramClient(config.vector_lines)),
                "bias_write": Out(array.bias_write.shape()),
                "used": In(1),
                "ready": Out(1),
                "fault": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        command = self.job.payload.command
        cols = self.config.cols
        walking, left, line, last = Signal(), Signal(16), Signal(28, reset_less=True), Signal()
        free, held, slot, granted = (
            Signal(range(self.SLOTS + 1), init=self.SLOTS),
            Signal(range(self.SLOTS + 1)),
            Signal(),
            Signal(),
        )
        left_now, line_now = Signal(16), Signal(28)
        request = self.memory.request
        m.d.comb += [
            left_now.eq(Mux(walking, left, command.n)),
            line_now.eq(Mux(walking, line, command.bias_addr[4:])),
            last.eq(left_now <= cols),
            request.valid.eq(self.job.valid & (free != 0)),
            request.payload.address.eq(line_now),
            granted.eq(request.valid & request.ready),
            self.job.ready.eq(granted & last),
            self.bias_write.valid.eq(self.memory.valid),
            self.bias_write.sel.eq(slot),
            self.bias_write.data.eq(self.memory.response.data),
            self.ready.eq(held != 0),
            self.fault.eq(self.memory.fault),
        ]
        with m.If(granted):
            m.d.sync += [
                walking.eq(~last),
                left.eq(left_now - cols),
                line.eq(line_now + self.config.vector_lines),
            ]
        with m.If(self.memory.valid):
            m.d.sync += slot.eq(~slot)
        delay = Signal(self.passing)
        m.d.sync += [
            delay.eq((delay << 1) | self.used),
            free.eq(free - granted + delay[-1]),
            held.eq(held + self.memory.valid - self.used),
        ]
        return m
