# SPDX-License-Identifier: Apache-2.0
"""Which earlier commands a command must wait for, so that engines run decoupled.

Each engine completes its commands in order, so one wait for a command stands for all that the
engine was given before. What an engine is known to have waited for is a vector clock: index of
the last complete command of every engine. A wait also brings what the awaited command knew.
"""

from dataclasses import dataclass, field

from sim.programs.access import Access

# Engines that start a command when the one before is complete; their own commands need no wait.
SERIAL = ("vector", "topk", "kv")
Clock = dict[str, int]


@dataclass
class Issued:
    """A command that was issued: what it touches, and what is complete when it is."""

    access: Access
    clock: Clock


@dataclass
class Order:
    """The commands so far and what the sequencer and each engine know to be complete."""

    history: dict[str, list[Issued]] = field(default_factory=dict)
    known: dict[str, Clock] = field(default_factory=dict)
    sequencer: Clock = field(default_factory=dict)

    def needs(self, engine: str, access: Access) -> list[tuple[str, int]]:
        """(engine, index) of the commands to wait for, the most recent first."""
        clock = self._clock(engine)
        found: list[tuple[str, int]] = []
        for other, commands in self.history.items():
            done = clock.get(other, -1)
            for index in range(len(commands) - 1, done, -1):
                earlier = commands[index].access
                if other == engine:
                    # Results of an engine are written in order, after what it reads for them.
                    conflict = engine not in SERIAL and access.depends(earlier)
                else:
                    conflict = access.conflicts(earlier)
                if conflict:
                    found.append((other, index))
                    break
        # A wait may bring what another would.
        return [
            (other, index)
            for other, index in found
            if not any(
                self.history[o][i].clock.get(other, -1) >= index
                for o, i in found
                if (o, i) != (other, index)
            )
        ]

    def add(self, engine: str, access: Access, waits: list[tuple[str, int]]) -> int:
        """Records a command that waits for `waits`; its index."""
        clock = self._clock(engine)
        for other, index in waits:
            _merge(clock, self.history[other][index].clock)
        commands = self.history.setdefault(engine, [])
        if engine in SERIAL and commands:
            _merge(clock, commands[-1].clock)
        self.known[engine] = clock
        complete = dict(clock)
        if commands:  # engines complete in order
            _merge(complete, commands[-1].clock)
        complete[engine] = len(commands)
        commands.append(Issued(access, complete))
        return len(commands) - 1

    def learn(self, other: str, index: int) -> None:
        """The sequencer has waited for a command; all that is issued from now on knows it."""
        _merge(self.sequencer, self.history[other][index].clock)

    def learn_all(self) -> None:
        """The sequencer has waited until every engine was idle."""
        for other, commands in self.history.items():
            self.sequencer[other] = len(commands) - 1

    def _clock(self, engine: str) -> Clock:
        clock = dict(self.known.get(engine, {}))
        _merge(clock, self.sequencer)
        return clock


def _merge(clock: Clock, other: Clock) -> None:
    for engine, index in other.items():
        if clock.get(engine, -1) < index:
            clock[engine] = index
