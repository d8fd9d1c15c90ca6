# SPDX-License-Identifier: Apache-2.0
"""The host's view of a tile: registers, program memory, tile SRAM and KV SRAM behind one port.

Bits 31..28 of a host address choose the region, the rest counts lines:

| region | contents |
|---|---|
| 0 | registers: line 0 control, 1 status, 2 KV SRAM, 16 + i counter i, 64 + i semaphore i |
| 1 | program memory, one beat a line |
| 2 | tile SRAM |
| 3 | KV SRAM, line row * cols + bank |

Control (write): bit 0 start, bit 1 reset, bits 63..32 start beat, bits 95..64 cycle limit (0:
none). Status (read): bits 7..0 status, 15..8 engine, 23..16 semaphore, 31 running, 63..32 beat of
the command, 95..64 cycles since start, 96 a top-k row was all NaN.

KV SRAM (write): bits to flip in the code word of the next host write to the KV SRAM: bits 7..0 one,
enabled by bit 8, and 16..9 another, enabled by bit 17. KV SRAM (read): bits 31..0 reads that were
corrected, 63..32 reads that were not correctable, both since the start and saturating; of the last
host read of the KV SRAM 64: it was corrected, 65: it was not correctable.
"""

from enum import IntEnum

from amaranth import Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hw.config import TileConfig
from hw.fifo import StreamFifo
from hw.ports import LINE_BITS, SCALE_BITS, HostPort

REGION_LO = 28
KV_LINE = 2
COUNTER_LINE = 16
SEMAPHORE_LINE = 64
REGISTER_LINES = 128
CORE_COMMAND = data.StructLayout(
    {"valid": 1, "write": 1, "region": 2, "address": 28, "data": LINE_BITS, "scale": SCALE_BITS}
)
CORE_ANSWER = data.StructLayout({"data": LINE_BITS, "scale": SCALE_BITS, "error": 1})


class Region(IntEnum):
    """Regions of the host map."""

    REGISTERS = 0
    PROGRAM = 1
    TILE_SRAM = 2
    KV_SRAM = 3


class HostAdapter(wiring.Component):
    """Turns host requests into accesses of the tile's core.

    Writes go at one per cycle when the target takes them; a read is answered before the next
    request is taken. Each request gets one response, in order. `access` is offered while
    `access_valid`, done in the cycle in which `access_ready` is high; a read's `answer` comes with
    `answer_valid` some cycles later.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        super().__init__(
            {
                "host": Out(HostPort()),
                "access": Out(CORE_COMMAND),
                "access_ready": In(1),
                "answer": In(CORE_ANSWER),
                "answer_valid": In(1),
                "soft_reset": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        request, response = self.host.request, self.host.response
        m.submodules.responses = responses = StreamFifo(response.payload.shape(), 4)
        wiring.connect(m, responses.o, wiring.flipped(response))
        payload = request.payload
        waiting, mapped, taken = Signal(), Signal(), Signal()
        limit = Signal(29)
        config = self.config
        with m.Switch(payload.address[REGION_LO:]):
            for region, lines in (
                (Region.REGISTERS, REGISTER_LINES),
                (Region.PROGRAM, config.program_beats),
                (Region.TILE_SRAM, config.sram_lines),
                (Region.KV_SRAM, config.kv_rows * config.cols),
            ):
                with m.Case(region.value):
                    m.d.comb += limit.eq(lines)
        m.d.comb += [
            mapped.eq(payload.address[:REGION_LO] < limit),
            self.access.valid.eq(request.valid & mapped & ~waiting & responses.i.ready),
            self.access.write.eq(payload.write),
            self.access.region.eq(payload.address[REGION_LO:]),
            self.access.address.eq(payload.address[:REGION_LO]),
            self.access.data.eq(payload.data),
            self.access.scale.eq(payload.scale),
            taken.eq(self.access.valid & self.access_ready),
            request.ready.eq(~waiting & responses.i.ready & (taken | ~mapped)),
            responses.i.valid.eq(
                Mux(
                    waiting,
                    self.answer_valid,
                    request.valid & request.ready & (payload.write | ~mapped),
                )
            ),
            responses.i.payload.data.eq(Mux(waiting, self.answer.data, 0)),
            responses.i.payload.scale.eq(Mux(waiting, self.answer.scale, 0)),
            responses.i.payload.error.eq(Mux(waiting, self.answer.error, ~mapped)),
            self.soft_reset.eq(taken & payload.write & payload.data[1] & (payload.address == 0)),
        ]
        with m.If(taken & ~payload.write):
            m.d.sync += waiting.eq(1)
        with m.Elif(self.answer_valid):
            m.d.sync += waiting.eq(0)
        return m
