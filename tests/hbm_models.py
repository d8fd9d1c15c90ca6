# SPDX-License-Identifier: Apache-2.0
"""Python models around `tb.hbm_bench.HbmBench` for Amaranth's simulator: AXI memory, SRAM, KV
SRAM."""

from collections import deque

import numpy as np

from hw.config import TileConfig
from hw.isa import COMMANDS, Status
from hw.tile_sram import TileSram

OKAY, SLVERR = 0, 2


def _int(data: bytes) -> int:
    return int.from_bytes(data, "little")


class HbmWorld:
    """Memories of an `HbmBench`, its random stalls, and the commands that it is given.

    `stall` is the probability of a pause on each channel and cycle, `errors` a byte address range
    of HBM that answers with an error. `bursts` collects (port, write, address, beats); protocol
    rules are asserted.
    """

    def __init__(self, config: TileConfig, bench, seed: int, stall=0.0, latency=10, errors=(0, 0)):
        self.config, self.bench, self.stall, self.latency = config, bench, stall, latency
        self.rng = np.random.default_rng(seed)
        self.lines = config.hbm_beat_bytes // 16
        self.hbm = self.rng.integers(0, 256, config.hbm_bytes, dtype=np.uint8)
        self.sram = self.rng.integers(0, 256, (config.sram_lines, 16), dtype=np.uint8)
        self.sram_scales = self.rng.integers(0, 256, config.sram_lines, dtype=np.uint8)
        kv_lines = config.kv_rows * config.cols
        self.kv = self.rng.integers(0, 256, (kv_lines, 16), dtype=np.uint8)
        self.kv_scales = self.rng.integers(0, 256, kv_lines, dtype=np.uint8)
        self.errors = errors
        self.bursts: list[tuple[int, bool, int, int]] = []
        self.commands = {"dma": deque(), "stream": deque()}
        self.done: dict[str, list[Status]] = {"dma": [], "stream": []}
        self.activity = {"dma": [0] * 4, "stream": [0] * 4}
        self.taken_rows = 0
        self.take_after = 0  # rows are released when more than this many wait
        self.now = 0

    def issue(self, engine: str, **operands) -> None:
        self.commands[engine].append(operands)

    def pause(self) -> bool:
        return self.rng.random() < self.stall

    def start(self, sim) -> None:
        for port in range(self.config.hbm_ports):
            for process in (self._reads, self._writes):
                sim.add_testbench(self._bound(process, port), background=True)
        for name in ("kv_write", "stream_write"):
            sim.add_testbench(self._bound(self._kv, name), background=True)
        sim.add_testbench(self._sram, background=True)
        sim.add_testbench(self._rows, background=True)
        for engine in ("dma", "stream"):
            sim.add_testbench(self._bound(self._commands, engine), background=True)
            sim.add_testbench(self._bound(self._watch, engine), background=True)

    @staticmethod
    def _bound(process, *args):
        async def testbench(ctx):
            await process(ctx, *args)

        return testbench

    def _check_burst(self, port: int, write: bool, payload) -> tuple[int, int]:
        size = self.config.hbm_port_bytes
        address, beats = int(payload.addr), int(payload.len) + 1
        assert address % size == 0 and 1 << int(payload.size) == size and int(payload.burst) == 1
        assert address // 4096 == (address + beats * size - 1) // 4096, "burst crosses 4 KiB"
        self.bursts.append((port, write, address, beats))
        return address, beats

    def _where(self, port: int, address: int) -> int:
        """Byte of the HBM slice at byte `address` of `port`; ports take beats in turn."""
        size = self.config.hbm_port_bytes
        return address // size * self.config.hbm_beat_bytes + port * size

    def _bad(self, where: int) -> bool:
        return self.errors[0] <= where < self.errors[1]

    async def _reads(self, ctx, port: int):
        axi, size = self.bench.axi[port], self.config.hbm_port_bytes
        queue: deque = deque()
        beat = None
        while True:
            if beat is None and queue and queue[0][0] <= self.now and not self.pause():
                due, address, left = queue[0]
                where = self._where(port, address)
                beat = (where, left == 1)
                ctx.set(axi.r.p.data, _int(self.hbm[where : where + size].tobytes()))
                ctx.set(axi.r.p.last, left == 1)
                ctx.set(axi.r.p.resp, SLVERR if self._bad(where) else OKAY)
                queue[0] = (due, address + size, left - 1)
                if left == 1:
                    queue.popleft()
            ctx.set(axi.r.valid, beat is not None)
            ready = not self.pause()
            ctx.set(axi.ar.ready, ready)
            *_, valid, payload, r_ready = await ctx.tick().sample(
                axi.ar.valid, axi.ar.p, axi.r.ready
            )
            if beat is not None and r_ready:
                beat = None
            if valid and ready:
                queue.append((self.now + self.latency, *self._check_burst(port, False, payload)))

    async def _writes(self, ctx, port: int):
        axi, size = self.bench.axi[port], self.config.hbm_port_bytes
        queue: deque = deque()
        answers: deque = deque()
        wrong = answering = False
        while True:
            aw_ready, w_ready = not self.pause(), bool(queue) and not self.pause()
            if answers and answers[0][0] <= self.now and not answering and not self.pause():
                answering = True
                ctx.set(axi.b.p.resp, answers[0][1])
            ctx.set(axi.b.valid, answering)
            ctx.set(axi.aw.ready, aw_ready)
            ctx.set(axi.w.ready, w_ready)
            *_, aw_valid, aw, w_valid, w, b_ready = await ctx.tick().sample(
                axi.aw.valid, axi.aw.p, axi.w.valid, axi.w.p, axi.b.ready
            )
            if answering and b_ready:
                answering = False
                answers.popleft()
            if w_valid and w_ready:
                address, left = queue[0]
                assert int(w.last) == (left == 1)
                where = self._where(port, address)
                wrong |= self._bad(where)
                data = np.frombuffer(int(w.data).to_bytes(size, "little"), np.uint8)
                mask = np.array([int(w.strb) >> i & 1 for i in range(size)], bool)
                self.hbm[where : where + size][mask] = data[mask]
                queue[0] = (address + size, left - 1)
                if left == 1:
                    queue.popleft()
                    answers.append((self.now + self.latency, SLVERR if wrong else OKAY))
                    wrong = False
            if aw_valid and aw_ready:
                queue.append(self._check_burst(port, True, aw))

    async def _kv(self, ctx, name: str):
        port = getattr(self.bench, name)
        held = None
        while True:
            ready = not self.pause()
            ctx.set(port.ready, ready)
            *_, valid, payload = await ctx.tick().sample(port.valid, port.p)
            if held is not None:
                assert valid and payload.as_bits() == held, f"{name} changed while it waited"
            held = payload.as_bits() if valid and not ready else None
            if valid and ready:
                address = int(payload.address)
                assert address % self.lines == 0 and int(payload.enable)
                for i in range(self.lines):
                    if int(payload.enable) >> i & 1:
                        self.kv[address + i] = np.frombuffer(
                            int(payload.data[i]).to_bytes(16, "little"), np.uint8
                        )
                        self.kv_scales[address + i] = payload.scales[i]

    async def _sram(self, ctx):
        client = self.bench.sram
        answers: deque = deque([None] * (TileSram.LATENCY - 1))
        while True:
            ready = not self.pause()
            ctx.set(client.request.ready, ready)
            *_, valid, request = await ctx.tick().sample(client.request.valid, client.request.p)
            answer = None
            if valid and ready:
                address = int(request.address)
                assert address % self.lines == 0 and address < self.config.sram_lines
                if request.write:
                    for i in range(self.lines):
                        assert int(request.mask[i]) in (0, 255)
                        assert (int(request.scale_mask) >> i & 1) == (int(request.mask[i]) != 0)
                        if int(request.mask[i]):
                            self.sram[address + i] = np.frombuffer(
                                int(request.data[i]).to_bytes(16, "little"), np.uint8
                            )
                            self.sram_scales[address + i] = request.scales[i]
                else:
                    answer = self.sram[address : address + self.lines].copy()
            answers.append(answer)
            now = answers.popleft()
            ctx.set(client.valid, now is not None)
            for i in range(self.lines):
                ctx.set(client.response.data[i], 0xDEAD if now is None else _int(now[i].tobytes()))

    async def _rows(self, ctx):
        while True:
            # `available` is what it will be after the edge at which the last row was released.
            take = ctx.get(self.bench.available) > self.take_after and not self.pause()
            ctx.set(self.bench.taken, take)
            await ctx.tick()
            self.now += 1
            self.taken_rows += take

    async def _commands(self, ctx, engine: str):
        command = getattr(self.bench, f"{engine}_control").command
        layout = {c.name: c for c in COMMANDS}[engine.upper()]
        while True:
            while not self.commands[engine]:
                await ctx.tick()
            operands = self.commands[engine].popleft()
            ctx.set(command.p, {op.name: 0 for op in layout.operands} | operands)
            ctx.set(command.valid, 1)
            while True:
                *_, ready = await ctx.tick().sample(command.ready)
                if ready:
                    break
            ctx.set(command.valid, 0)

    async def _watch(self, ctx, engine: str):
        control = getattr(self.bench, f"{engine}_control")
        async for _, _, done, error, activity in ctx.tick().sample(
            control.done, control.error, control.activity
        ):
            self.activity[engine][int(activity)] += 1
            if done:
                self.done[engine].append(Status(error))

    async def finished(self, ctx, engine: str, count: int, limit=20_000) -> None:
        """Wait until `engine` has completed `count` commands since the start."""
        for _ in range(limit):
            if len(self.done[engine]) >= count:
                return
            await ctx.tick()
        raise AssertionError(f"{engine}: {len(self.done[engine])} of {count} commands are done")
