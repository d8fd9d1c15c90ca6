# SPDX-License-Identifier: Apache-2.0
"""Models around the networks: packets as numbers, ends of links, tile SRAM clients."""

from collections import deque
from collections.abc import Callable

import numpy as np

from hw.isa import Status
from hw.noc_flit import HEAD, LINK_DEPTH, Channel, Kind
from hw.ports import GRANULES, LINE_ADDRESS_BITS, LINE_BITS, SCALE_BITS
from hw.tile_sram import TileSram
from tests.flat_bench import FlatBench

LINE_MASK = (1 << LINE_BITS) - 1
WORD_BITS = LINE_BITS + SCALE_BITS


def number(rng: np.random.Generator, bits: int) -> int:
    return int.from_bytes(rng.bytes((bits + 7) // 8), "little") & ((1 << bits) - 1)


def head(**fields: int) -> int:
    """A head flit's word; HEAD's fields by name."""
    return sum(int(fields.pop(name)) << field.offset for name, field in HEAD if name in fields)


def fields(word: int) -> dict[str, int]:
    return {name: word >> field.offset & ((1 << field.width) - 1) for name, field in HEAD}


def packet(words: list[int]) -> list[int]:
    """Flits of a packet whose head flit holds `words[0]`."""
    return [
        word | (i == 0) << WORD_BITS | (i == len(words) - 1) << (WORD_BITS + 1)
        for i, word in enumerate(words)
    ]


def is_head(flit: int) -> bool:
    return bool(flit >> WORD_BITS & 1)


def is_tail(flit: int) -> bool:
    return bool(flit >> (WORD_BITS + 1) & 1)


class LinkDriver:
    """Drives the link that is the input `prefix`: flits of both channels, against credits."""

    def __init__(self, bench: FlatBench, prefix: str, rng: np.random.Generator, rate: float = 1.0):
        self.bench, self.prefix, self.rng, self.rate = bench, prefix, rng, rate
        self.waiting: list[deque[int]] = [deque() for _ in Channel]
        self.credits = [LINK_DEPTH] * len(Channel)

    def drive(self) -> None:
        able = [c for c in Channel if self.waiting[c] and self.credits[c]]
        valid = 0
        if able and self.rng.random() < self.rate:
            channel = able[int(self.rng.integers(len(able)))]
            self.bench.drive[f"{self.prefix}__flit"] = self.waiting[channel].popleft()
            self.credits[channel] -= 1
            valid = 1 << channel
        self.bench.drive[f"{self.prefix}__valid"] = valid

    def sample(self) -> None:
        credit = self.bench[f"{self.prefix}__credit"]
        for channel in Channel:
            self.credits[channel] += credit >> channel & 1
            assert self.credits[channel] <= LINK_DEPTH


class LinkMonitor:
    """Takes the flits of the output link `prefix`; `packets[channel]` are the complete ones.

    An entry is free again one cycle after its flit came, at the earliest; `rate` of 0 for a channel
    keeps it full for ever.
    """

    def __init__(
        self,
        bench: FlatBench,
        prefix: str,
        rng: np.random.Generator,
        rates: tuple[float, float] = (1.0, 1.0),
    ):
        self.bench, self.prefix, self.rng, self.rates = bench, prefix, rng, rates
        self.held: list[deque[int]] = [deque() for _ in Channel]
        self.partial: list[list[int]] = [[] for _ in Channel]
        self.packets: list[list[list[int]]] = [[] for _ in Channel]
        self.cycles: list[tuple[int, int]] = []  # (cycle, channel) of each flit

    def drive(self) -> None:
        credit = 0
        for channel in Channel:
            held = self.held[channel]
            if held and held[0] < self.bench.cycle and self.rng.random() < self.rates[channel]:
                held.popleft()
                credit |= 1 << channel
        self.bench.drive[f"{self.prefix}__credit"] = credit

    def sample(self) -> None:
        valid = self.bench[f"{self.prefix}__valid"]
        assert valid in (0, 1, 2)
        for channel in Channel:
            if valid >> channel & 1:
                flit = self.bench[f"{self.prefix}__flit"]
                self.held[channel].append(self.bench.cycle + 1)
                assert len(self.held[channel]) <= LINK_DEPTH, "flit without credit"
                self.cycles.append((self.bench.cycle, channel))
                assert is_head(flit) == (not self.partial[channel]), "packets interleave"
                self.partial[channel].append(flit)
                if is_tail(flit):
                    self.packets[channel].append(self.partial[channel])
                    self.partial[channel] = []


class MemoryModel:
    """Lines of 136 bits behind any number of `SramClient(1)` ports, each ready at `rate`."""

    def __init__(
        self,
        bench: FlatBench,
        clients: list[str],
        lines: int,
        rng: np.random.Generator,
        rate: float = 1.0,
    ):
        self.bench, self.clients, self.rng, self.rate = bench, clients, rng, rate
        self.lines = [number(rng, WORD_BITS) for _ in range(lines)]
        self.answers: dict[str, deque[int | None]] = {
            c: deque([None] * TileSram.LATENCY) for c in clients
        }
        self.waits: dict[str, int | None] = dict.fromkeys(clients)
        self.offered: dict[str, bool] = {}
        self.on_write: Callable[[int, int], None] = lambda address, word: None

    def drive(self) -> None:
        for client in self.clients:
            answer = self.answers[client].popleft()
            drive = self.bench.drive
            drive[f"{client}__valid"] = answer is not None
            # Rubbish when nothing was read.
            drive[f"{client}__response"] = number(self.rng, WORD_BITS) if answer is None else answer
            self.offered[client] = self.rng.random() < self.rate
            drive[f"{client}__request__ready"] = self.offered[client]

    def sample(self) -> None:
        for client in self.clients:
            answer: int | None = None
            request = (
                self.bench[f"{client}__request__payload"]
                if self.bench[f"{client}__request__valid"]
                else None
            )
            if self.waits[client] is not None:
                assert request == self.waits[client], "a waiting request has changed"
            self.waits[client] = None if self.offered[client] else request
            if request is not None and self.offered[client]:
                answer = self._access(request)
            self.answers[client].append(answer)

    def _access(self, request: int) -> int | None:
        address = request & ((1 << LINE_ADDRESS_BITS) - 1)
        assert address < len(self.lines), "the port lets bad addresses through"
        request >>= LINE_ADDRESS_BITS
        if not request & 1:
            return self.lines[address]
        word, request = request >> 1 & ((1 << WORD_BITS) - 1), request >> 1 + WORD_BITS
        assert request & ((1 << GRANULES) - 1) == (1 << GRANULES) - 1
        if not request >> GRANULES:
            word = word & LINE_MASK | self.lines[address] & ~LINE_MASK
        self.lines[address] = word
        self.on_write(address, word)
        return None


class CommandDriver:
    """Issues commands on the `EngineControl` at `prefix`, collects (error, cycle) of each done."""

    def __init__(
        self,
        bench: FlatBench,
        prefix: str,
        operands: list[tuple[str, int]],
        rng: np.random.Generator,
        rate: float = 1.0,
    ):
        self.bench, self.prefix, self.operands = bench, prefix, operands
        self.rng, self.rate = rng, rate
        self.waiting: deque[dict[str, int]] = deque()
        self.offered = False
        self.issued = 0
        self.done: list[Status] = []
        self.cycles: list[int] = []

    def drive(self) -> None:
        if not self.offered and self.waiting and self.rng.random() < self.rate:
            self.offered = True
        drive = self.bench.drive
        drive[f"{self.prefix}__command__valid"] = self.offered
        if self.offered:
            payload = position = 0
            for name, width in self.operands:
                payload |= self.waiting[0].get(name, 0) << position
                position += width
            drive[f"{self.prefix}__command__payload"] = payload

    def sample(self) -> None:
        if self.bench[f"{self.prefix}__done"]:
            self.done.append(Status(self.bench[f"{self.prefix}__error"]))
            self.cycles.append(self.bench.cycle)
            assert len(self.done) <= self.issued
        if self.offered and self.bench[f"{self.prefix}__command__ready"]:
            self.waiting.popleft()
            self.offered = False
            self.issued += 1

    @property
    def idle(self) -> bool:
        return not self.waiting and len(self.done) == self.issued


def ack(request: dict[str, int], error: Status = Status.RUNNING) -> dict[str, int]:
    """What the answer to a write or semaphore packet says."""
    return request | {
        "x": request["source_x"],
        "y": request["source_y"],
        "tag": request["tag"],
        "status": int(error),
        "kind": Kind.ACK if error is Status.RUNNING else Kind.ERROR,
    }


async def run_cycles(bench: FlatBench, parts: list, until: Callable[[], bool], limit: int) -> None:
    """Drive and sample all `parts` every cycle until `until()`; fails after `limit` cycles."""
    for _ in range(limit):
        for part in parts:
            part.drive()
        bench.settle()
        for part in parts:
            part.sample()
        await bench.tick()
        if until():
            return
    raise AssertionError(f"not finished after {limit} cycles")
