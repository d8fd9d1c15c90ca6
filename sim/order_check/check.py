# SPDX-License-Identifier: Apache-2.0
"""The check: every command against those that wrote what it reads, in the program's order."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hw.config import LINE_BYTES, ChipConfig, TileConfig
from sim.order_check.footprint import Footprint, Places, footprint
from sim.order_check.record import Executed
from sim.programs.access import HBM, KV, SRAM
from sim.programs.memory import TileMemory
from sim.programs.order import SERIAL

NEVER, SETTLED = -2, -1  # written by nobody; by the host


@dataclass(frozen=True)
class Finding:
    """A command that was taken too early, or only by luck not too early.

    `kind`: "unwritten" (nobody has written what it reads), "early" (taken before `other`, which it
    depends on, was done) or "unordered" (`other` was done, but no semaphore made sure of it).
    `hazard`: "reads", "overwrites" (what `other` writes) or "overwrites what is read by" (`other`).
    `first` and `end` bound the places, in bytes of tile SRAM and HBM, in rows of KV SRAM.
    """

    kind: str
    run: int
    tile: int
    command: Executed
    hazard: str
    memory: str
    first: int
    end: int
    other: Executed | None = None
    other_tile: int | None = None

    def __str__(self) -> str:
        unit = "rows " if self.memory == KV else ""
        where = f"{self.memory.upper()} {unit}[{self.first:#x}, {self.end:#x})"
        who = f"run {self.run}, tile {self.tile}: {self.command} ({self.command.engine})"
        if self.other is None:
            return f"{who}, taken in cycle {self.command.taken}, reads {where}: never written"
        what = {"reads": "written by", "overwrites": "also written by"}.get(self.hazard, "read by")
        other = f"{self.other} ({self.other.engine})"
        if self.other_tile is not None:
            other += f" of tile {self.other_tile}"
        when = "not done" if self.other.done is None else f"done in cycle {self.other.done}"
        ending = f"taken in cycle {self.command.taken}, {when}"
        if self.kind == "unordered":
            ending += ", but nothing makes the one wait for the other"
        return f"{who} {self.hazard.split()[0]} {where} {what} {other}: {ending}"


@dataclass
class OrderReport:
    """Commands and dependences that were checked, and what is wrong."""

    commands: int = 0
    dependences: int = 0
    findings: list[Finding] = field(default_factory=list)


class _Shadow:
    """Of every place of a memory who wrote it last, and who has read that (the last by engine).

    Commands are numbered over all runs; those of earlier runs are complete.
    """

    def __init__(self, size: int):
        self.writer = np.full(size, NEVER, np.int32)
        self.readers: dict[str, NDArray[np.int32]] = {}

    def read(self, engine: str, places: Places | slice, number: int) -> None:
        if engine not in self.readers:
            self.readers[engine] = np.full(len(self.writer), SETTLED, np.int32)
        self.readers[engine][places] = number

    def write(self, places: Places, number: int) -> None:
        self.writer[places] = number
        for reader in self.readers.values():
            reader[places] = SETTLED


class TileCheck:
    """The check of one tile over its runs."""

    def __init__(self, config: ChipConfig, tile: int, report: OrderReport):
        self.config, self.tile, self.report = config, tile, report
        self.shadows: dict[str, _Shadow] = {}
        self._run, self._base = -1, 0  # run, and number of its first command
        self._found: set[tuple[int, int]] = set()

    def shadow(self, memory: str) -> _Shadow:
        if memory not in self.shadows:
            tile: TileConfig = self.config.tile
            size = {
                SRAM: tile.sram_bytes,
                KV: tile.kv_bytes,
                HBM: tile.hbm_bytes // LINE_BYTES,
            }
            self.shadows[memory] = _Shadow(size[memory])
        return self.shadows[memory]

    def host(self, memory: TileMemory) -> None:
        """The host has written the images."""
        for images, name in ((memory.sram_images, SRAM), (memory.kv_images, KV)):
            for line, lines, _ in images:
                first = line * LINE_BYTES
                self.shadow(name).writer[first : first + len(lines) * LINE_BYTES] = SETTLED

    def host_hbm(self, size: int) -> None:
        """The first `size` bytes of the HBM slice are loaded."""
        if size:
            self.shadow(HBM).writer[: -(-size // LINE_BYTES)] = SETTLED

    def host_sram(self, first: int, size: int) -> None:
        self.shadow(SRAM).writer[first : first + size] = SETTLED

    def run(
        self, order: Sequence[Executed], arrivals: Sequence[tuple[int, Executed, Places]]
    ) -> None:
        """Checks a run; `arrivals` are (tile, SEND, places in SRAM) of what others sent here."""
        self._run, self._found = self._run + 1, set()
        for index, command in enumerate(order):
            number = self._base + index
            touched = footprint(self.config, self.tile, command.name, command.operands)
            if command.taken is not None:
                self.report.commands += 1
                self._unwritten(command, touched, arrivals)
                self._depends(order, command, touched)
                self._races(command, touched, arrivals)
            for memory, places in touched.reads:
                self.shadow(memory).read(command.engine, places, number)
            if touched.kv_unknown:
                self.shadow(KV).read(command.engine, slice(None), number)
            for memory, places in touched.writes:
                self.shadow(memory).write(places, number)
        for _, send, places in arrivals:
            if send.done is not None:
                self.shadow(SRAM).writer[places] = SETTLED
        self._base += len(order)

    def _unwritten(
        self,
        command: Executed,
        touched: Footprint,
        arrivals: Sequence[tuple[int, Executed, Places]],
    ) -> None:
        for memory, places in touched.reads:
            never = self.shadow(memory).writer[places] == NEVER
            if not never.any():
                continue
            if memory == SRAM:
                for _, send, arrived in arrivals:
                    if send.done is not None and send.done < (command.taken or 0):
                        never &= ~np.isin(places, arrived)
            if not never.any() or (touched.copies and not never.all()):
                continue
            self._report("unwritten", command, "reads", memory, places[never])

    def _depends(self, order: Sequence[Executed], command: Executed, touched: Footprint) -> None:
        for memory, places in touched.reads:
            self._against(order, command, "reads", memory, places, self.shadow(memory).writer)
        if touched.kv_unknown:
            everywhere = np.arange(len(self.shadow(KV).writer))
            self._against(order, command, "reads", KV, everywhere, self.shadow(KV).writer)
        for memory, places in touched.writes:
            shadow = self.shadow(memory)
            self._against(order, command, "overwrites", memory, places, shadow.writer)
            for reader in shadow.readers.values():
                hazard = "overwrites what is read by"
                self._against(order, command, hazard, memory, places, reader)

    def _against(
        self,
        order: Sequence[Executed],
        command: Executed,
        hazard: str,
        memory: str,
        places: Places,
        who: NDArray[np.int32],
    ) -> None:
        """Checks a command against those that `who` names for its places."""
        found = who[places]
        for number in np.unique(found[found >= self._base]):
            self.report.dependences += 1
            other = order[number - self._base]
            kind = verdict(command, other, hazard)
            if kind:
                where = places[found == number]
                self._report(kind, command, hazard, memory, where, other)

    def _races(
        self,
        command: Executed,
        touched: Footprint,
        arrivals: Sequence[tuple[int, Executed, Places]],
    ) -> None:
        """What arrives from other tiles must not change what a command reads or writes."""
        for tile, send, arrived in arrivals:
            if send.taken is None or command.taken is None:
                continue
            sent, done = send.done or 1 << 62, command.done or 1 << 62
            if send.taken > done or sent < command.taken:
                continue
            for hazard, pairs in (("reads", touched.reads), ("overwrites", touched.writes)):
                for memory, places in pairs:
                    both = places[np.isin(places, arrived)] if memory == SRAM else places[:0]
                    if len(both):
                        self._report("early", command, hazard, memory, both, send, tile)

    def _report(
        self,
        kind: str,
        command: Executed,
        hazard: str,
        memory: str,
        places: Places,
        other: Executed | None = None,
        other_tile: int | None = None,
    ) -> None:
        """Adds a finding, one for each pair of commands."""
        pair = id(command), id(other)
        if pair in self._found:
            return
        self._found.add(pair)
        scale = {SRAM: 1, KV: 1 / (LINE_BYTES * self.config.tile.cols), HBM: LINE_BYTES}[memory]
        first, last = int(places.min() * scale), int(places.max() * scale)
        end = last + (LINE_BYTES if memory == HBM else 1)
        self.report.findings.append(
            Finding(
                kind, self._run, self.tile, command, hazard, memory, first, end, other, other_tile
            )
        )


def verdict(command: Executed, other: Executed, hazard: str) -> str:
    """ "early", "unordered" or nothing, for a command that must come after `other`."""
    assert command.taken is not None and command.start is not None
    if command.engine == other.engine:
        # An engine writes its results in order, after what it reads for them. A serial one takes a
        # command ahead, but starts it when the one before is complete.
        if hazard != "reads" or command.engine in SERIAL:
            return ""
    if other.done is None or other.done >= command.taken:
        return "early"
    return "" if command.start.get(other.engine, 0) > other.number else "unordered"


def check(
    config: ChipConfig,
    records: Sequence[Sequence[Sequence[Executed]]],
    images: Sequence[Sequence[TileMemory]],
    hbm_sizes: Sequence[int],
    started: Sequence[Sequence[bool]],
    written: Sequence[Sequence[tuple[int, int, int]]] | None = None,
) -> OrderReport:
    """Checks all runs of all tiles.

    `records` [tile][run] are the commands (`parse`), `images` [run][tile] what the host loads
    before the run, `hbm_sizes` [tile] the bytes of HBM loaded at first, `started` [run][tile]
    whether the tile has a program, `written` [run] what else the host writes before it: (tile,
    first byte of SRAM, bytes).
    """
    report = OrderReport()
    tiles = [TileCheck(config, tile, report) for tile in range(config.tiles)]
    for each, size in zip(tiles, hbm_sizes, strict=True):
        each.host_hbm(size)
    following = [iter(runs) for runs in records]
    for r, loaded in enumerate(images):
        orders: list[Sequence[Executed]] = [
            next(runs, []) if runs_now else []
            for runs, runs_now in zip(following, started[r], strict=True)
        ]
        arrivals: list[list[tuple[int, Executed, Places]]] = [[] for _ in tiles]
        for tile, order in enumerate(orders):
            for command in order:
                if command.name == "send" and command.taken is not None:
                    touched = footprint(config, tile, command.name, command.operands)
                    assert touched.remote is not None
                    where, places = touched.remote
                    arrivals[where].append((tile, command, places))
        for each, memory in zip(tiles, loaded, strict=True):
            each.host(memory)
        for tile, first, size in written[r] if written else ():
            tiles[tile].host_sram(first, size)
        for each, order, arrived in zip(tiles, orders, arrivals, strict=True):
            each.run(order, arrived)
    return report
