# SPDX-License-Identifier: Apache-2.0
"""Driver and monitor of a ready/valid stream, with idle cycles and back-pressure."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import cocotb
import numpy as np
from cocotb.triggers import Event, RisingEdge

from tb.agents.packing import Packing


def _probability(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be a probability below 1, not {value!r}")
    return value


class StreamDriver:
    """Sends values into the stream input `name` of `dut`: `name__payload`, `name__valid`,
    `name__ready`.

    It waits for the end of reset; with `idle` 0 it offers a word in every cycle.

    Parameters
    ----------
    shape
        Shape of the payload, or None to give packed integers.
    idle
        Probability that a cycle between two words is left empty. With `rng` the payload is random
        whenever valid is low, so that nobody gets away with reading it early.
    rng
        Source of the pattern; without one `idle` must be 0.
    """

    def __init__(
        self,
        dut: Any,
        name: str,
        shape: Any = None,
        *,
        idle: float = 0.0,
        rng: np.random.Generator | None = None,
    ):
        self.idle = _probability("idle", idle)
        if idle and rng is None:
            raise ValueError("rng must be given for an idle pattern")
        self._packing = None if shape is None else Packing(shape)
        self._clock, self._rng = RisingEdge(dut.clk), rng
        self._payload = getattr(dut, f"{name}__payload")
        self._valid, self._ready = getattr(dut, f"{name}__valid"), getattr(dut, f"{name}__ready")
        self._reset = dut.rst
        self._queue: deque[Any] = deque()
        self._filled, self._empty = Event(), Event()
        self._empty.set()
        self.sent = 0
        self._valid.value = 0
        self._task = cocotb.start_soon(self._run())

    def put(self, *values: Any) -> None:
        """Queue `values`; they are sent in order from the next cycle on."""
        self._queue.extend(values)
        self._filled.set()
        self._empty.clear()

    async def drained(self) -> None:
        """Wait until everything queued has been taken."""
        await self._empty.wait()

    async def send(self, values: Iterable[Any]) -> None:
        """Queue `values` and wait until all are taken."""
        self.put(*values)
        await self.drained()

    def _quiet(self) -> None:
        self._valid.value = 0
        if self._rng is not None:
            width = len(self._payload)
            self._payload.value = int.from_bytes(self._rng.bytes(-(-width // 8)), "little") >> (
                -width % 8
            )

    async def _run(self) -> None:
        self._quiet()
        await self._clock
        while self._reset.value:
            await self._clock
        while True:
            if not self._queue:
                self._quiet()
                self._empty.set()
                self._filled.clear()
                await self._filled.wait()
                await self._clock
            while self._rng is not None and self._rng.random() < self.idle:
                self._quiet()
                await self._clock
            value = self._queue.popleft()
            self._payload.value = value if self._packing is None else self._packing.pack(value)
            self._valid.value = 1
            await self._clock
            while not self._ready.value:
                await self._clock
            self.sent += 1


class StreamMonitor:
    """Collects the words that the stream output `name` of `dut` hands over, in `words`.

    Parameters
    ----------
    shape
        Shape of the payload, or None to collect packed integers.
    stall
        Probability that ready is low in a cycle; None only listens and leaves ready to somebody
        else.
    rng
        Source of the pattern; without one `stall` must be 0 or None.
    callback
        Called with each word when it is handed over.
    """

    def __init__(
        self,
        dut: Any,
        name: str,
        shape: Any = None,
        *,
        stall: float | None = 0.0,
        rng: np.random.Generator | None = None,
        callback: Callable[[Any], None] | None = None,
    ):
        self.stall = None if stall is None else _probability("stall", stall)
        if stall and rng is None:
            raise ValueError("rng must be given for a stall pattern")
        self._packing = None if shape is None else Packing(shape)
        self._clock, self._rng, self._callback = RisingEdge(dut.clk), rng, callback
        self._payload = getattr(dut, f"{name}__payload")
        self._valid, self._ready = getattr(dut, f"{name}__valid"), getattr(dut, f"{name}__ready")
        self._reset = dut.rst
        self.words: list[Any] = []
        self._arrived = Event()
        self._task = cocotb.start_soon(self._run())

    async def wait_for(self, count: int) -> list[Any]:
        """Wait until `count` words have come since the start; returns all words."""
        while len(self.words) < count:
            self._arrived.clear()
            await self._arrived.wait()
        return self.words

    async def _run(self) -> None:
        while True:
            if self.stall is not None:
                ready = not self.stall or self._rng is None or self._rng.random() >= self.stall
                self._ready.value = int(ready)
            await self._clock
            if self._reset.value or not self._valid.value:
                continue
            if self.stall is None:
                ready = bool(self._ready.value)
            if ready:
                bits = self._payload.value.to_unsigned()
                word = bits if self._packing is None else self._packing.unpack(bits)
                self.words.append(word)
                if self._callback is not None:
                    self._callback(word)
                self._arrived.set()
