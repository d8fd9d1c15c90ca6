# SPDX-License-Identifier: Apache-2.0
"""Several single-line clients of the tile SRAM on one port."""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.ports import SramClient


class SramArbiter(wiring.Component):
    """Round-robin sharing of one `SramClient(1)` by `clients` of them.

    Latency: none of its own, requests and responses pass combinationally; one request per cycle. A
    request that waits is held on the port until it is taken. Every client is served at least once
    in `clients` accesses. Responses and faults go to the client whose request was taken `latency`
    cycles before.

    Parameters
    ----------
    clients : number of clients, at least 1
    latency : cycles from a request that is taken to its response or fault
    """

    def __init__(self, clients: int, latency: int):
        if not isinstance(clients, int) or clients < 1:
            raise ValueError(f"clients must be at least 1, not {clients!r}")
        if not isinstance(latency, int) or latency < 1:
            raise ValueError(f"latency must be at least 1, not {latency!r}")
        self.latency = latency
        self.count = clients
        super().__init__(
            {
                "clients": In(SramClient(1)).array(clients),
                "sram": Out(SramClient(1)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        count, sram = self.count, self.sram
        waiting = Signal(count)
        later = Signal(count)  # clients behind the one served last, which come first
        preferred = Signal(count)
        candidates = Signal(count)
        first = Signal(count)
        held = Signal(count)  # the client whose request waits at the port
        grant = Signal(count)
        m.d.comb += [
            waiting.eq(Cat(client.request.valid for client in self.clients)),
            preferred.eq(waiting & later),
            candidates.eq(Mux(preferred.any(), preferred, waiting)),
            first.eq(candidates & (~candidates + 1)),
            grant.eq(Mux(held.any(), held, first)),
            sram.request.valid.eq(waiting.any()),
        ]
        taken = Signal(count)
        m.d.comb += taken.eq(Mux(sram.request.ready, grant, 0))
        m.d.sync += held.eq(Mux(sram.request.ready, 0, grant))
        with m.If(taken.any()):
            m.d.sync += later.eq(~(taken | (taken - 1)))

        for i, client in enumerate(self.clients):
            with m.If(grant[i]):
                m.d.comb += sram.request.payload.eq(client.request.payload)
            m.d.comb += client.request.ready.eq(taken[i])

        route = taken
        for age in range(self.latency):
            moved = Signal(count, name=f"route{age}")
            m.d.sync += moved.eq(route)
            route = moved
        for i, client in enumerate(self.clients):
            m.d.comb += [
                client.valid.eq(sram.valid & route[i]),
                client.fault.eq(sram.fault & route[i]),
                client.response.eq(sram.response),
            ]
        return m
