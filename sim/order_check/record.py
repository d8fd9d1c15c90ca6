# SPDX-License-Identifier: Apache-2.0
"""What a tile did, from the file of `sim/rtl/command_trace.sv`: commands with resolved operands,
when each was taken and done, and what each was known to have waited for.

Knowledge is a vector clock: of each engine (and of the sequencer's LOADs) the number of commands
that are complete. A command's start has that of the sequencer at its issue, of the engine's
command before it, and of the posts whose semaphores it took. A semaphore's takes are matched with
its posts in the order in which both were observed, which is exact where one engine posts it.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hw import isa
from sim.programs.order import SERIAL

SEQUENCER = "sequencer"
ENGINES = tuple(engine.name.lower() for engine in isa.Engine)
Clock = dict[str, int]


@dataclass
class Executed:
    """A command, or a LOAD of the sequencer. `number` counts its engine's commands.

    `start` is what was complete, for sure, when it started; it and `taken` are None when it never
    did, `done` is None when it did not end without an error.
    """

    name: str
    engine: str
    number: int
    beat: int
    operands: Mapping[str, int]
    waits: tuple[int, ...] = ()
    posts: tuple[int, ...] = ()
    issued: Clock = field(default_factory=dict)
    start: Clock | None = None
    complete: Clock = field(default_factory=dict)
    taken: int | None = None
    done: int | None = None

    def __str__(self) -> str:
        return f"{self.name.upper()} at beat {self.beat}"


def merge(clock: Clock, other: Clock) -> None:
    """Adds what `other` knows to `clock`."""
    for engine, count in other.items():
        if clock.get(engine, 0) < count:
            clock[engine] = count


def decode(
    words: list[int],
) -> tuple[isa.Command, dict[str, int], tuple[int, ...], tuple[int, ...]]:
    """Command, operands, semaphores waited for and posted, from sixteen resolved words."""
    command = isa.BY_OPCODE[words[0] & ((1 << isa.OPCODE_BITS) - 1)]
    operands = {op.name: words[op.word] >> op.lo & ((1 << op.width) - 1) for op in command.operands}

    def semaphores(what: str) -> tuple[int, ...]:
        found = []
        for i in range(2):
            lo, width = isa.SYNC_FIELDS[f"{what}{i}"]
            enable, _ = isa.SYNC_FIELDS[f"{what}{i}_en"]
            if words[1] >> enable & 1:
                found.append(words[1] >> lo & ((1 << width) - 1))
        return tuple(found)

    return command, operands, semaphores("wait"), semaphores("post")


class _Tile:
    """State while the events of a run go by."""

    def __init__(self, posted: dict[int, deque[Clock]]):
        self.order: list[Executed] = []
        self.sequencer: Clock = {}
        # What an earlier run has posted and nothing took is there, and says nothing.
        self.posted: dict[int, deque[Clock]] = {
            s: deque({} for _ in clocks) for s, clocks in posted.items()
        }
        self.words: list[int] = []
        self.queued: dict[str, deque[Executed]] = {e: deque() for e in ENGINES}
        self.flying: dict[str, deque[Executed]] = {e: deque() for e in ENGINES}
        self.last: dict[str, Executed] = {}  # last that was taken
        self.finished: dict[str, Clock] = {}
        self.issued: Clock = {}

    def _take(self, semaphore: int, clock: Clock) -> None:
        posts = self.posted.get(semaphore)
        if posts:  # else another tile has posted it
            merge(clock, posts.popleft())

    def _post(self, semaphore: int, clock: Clock) -> None:
        self.posted.setdefault(semaphore, deque()).append(dict(clock))

    def taken(self, engine: str, cycle: int) -> None:
        command = self.queued[engine].popleft()
        clock = dict(command.issued)
        before = self.last.get(engine)
        if before is not None:
            assert before.start is not None
            merge(clock, before.start)
            if engine in SERIAL or "blocktable" in (command.name, before.name):
                clock[engine] = command.number
                merge(clock, before.complete)
        for semaphore in command.waits:
            self._take(semaphore, clock)
        command.taken, command.start = cycle, clock
        self.last[engine] = command
        self.flying[engine].append(command)

    def done(self, engine: str, cycle: int) -> None:
        command = self.flying[engine].popleft()
        command.done = cycle
        assert command.start is not None
        clock = dict(command.start)
        merge(clock, self.finished.get(engine, {}))
        clock[engine] = command.number + 1
        command.complete = self.finished[engine] = clock
        for semaphore in command.posts:
            self._post(semaphore, clock)

    def beat(self, cycle: int, index: int, pc: int, words: list[int], base: int) -> None:
        if index == 0 and words[0] < 1 << (isa.OPCODE_BITS - 1):
            self._scalar(isa.Scalar(words[0]), cycle, pc, base + words[2] & 0xFFFF_FFFF)
            return
        self.words = words if index == 0 else self.words + words
        if index < isa.COMMAND_BEATS - 1:
            return
        kind, operands, waits, posts = decode(self.words)
        engine = kind.engine.name.lower()
        number = self.issued.get(engine, 0)
        self.issued[engine] = number + 1
        command = Executed(
            kind.name.lower(), engine, number, pc, operands, waits, posts, dict(self.sequencer)
        )
        self.order.append(command)
        self.queued[engine].append(command)

    def _scalar(self, opcode: isa.Scalar, cycle: int, pc: int, value: int) -> None:
        if opcode is isa.Scalar.WAIT:
            self._take(value, self.sequencer)
        elif opcode is isa.Scalar.POST:
            self._post(value, self.sequencer)
        elif opcode is isa.Scalar.FENCE:
            merge(self.sequencer, self.issued)
        elif opcode is isa.Scalar.LOAD:
            number = self.sequencer.get(SEQUENCER, 0)
            load = Executed("load", SEQUENCER, number, pc, {"address": value})
            load.start, load.taken, load.done = dict(self.sequencer), cycle, cycle
            self.sequencer[SEQUENCER] = number + 1
            self.order.append(load)


def parse(lines: Iterable[str]) -> list[list[Executed]]:
    """The commands of each run of a tile, in the order of the program's execution."""
    runs: list[list[Executed]] = []
    tile = _Tile({})
    for line in lines:
        kind, *texts = line.split()
        values = [int(text, 16) for text in texts]
        if kind == "S":
            tile = _Tile(tile.posted)
            runs.append(tile.order)
        elif not runs:  # not yet reset
            continue
        elif kind == "B":
            cycle, index, pc, *words, base = values
            tile.beat(cycle, index, pc, words, base)
        else:
            for i, engine in enumerate(ENGINES):
                if values[1] >> i & 1:
                    (tile.taken if kind == "T" else tile.done)(engine, values[0])
    return runs
