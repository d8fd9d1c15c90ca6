# SPDX-License-Identifier: Apache-2.0
"""Runs of the simulated system: what is loaded, what runs, what memory must then hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.formats import SPECS
from golden.hbm_layout import LINE_BYTES, unpack_codes
from golden.kernels.trace import Stored
from hw.config import ChipConfig
from hw.host_adapter import REGION_LO, Region
from sim.assembler import Program
from sim.errors import InputError, ToolError
from sim.harness import HOST_WORDS, build_system
from sim.kernels.types import STALLS, KernelRequest
from sim.order_check import OrderReport
from sim.order_check import check as check_commands
from sim.order_check.record import parse
from sim.programs.memory import Buffer, TileMemory
from sim.runner import RunResult, run
from sim.verilator import Build

CYCLE_LIMIT = 20_000_000


@dataclass(frozen=True)
class Check:
    """What a buffer must hold after a run, in one tile."""

    buffer: Buffer
    stored: Stored
    tile: int = 0


@dataclass(frozen=True)
class KvCheck:
    """What KV SRAM rows from `row` on must hold after a run: codes [rows, cols, elements of a line]
    of 16 or 8 bits, and scale bytes [rows, cols].

    Only elements that are `known` count, and scales of their lines: what was never written is
    undefined.
    """

    name: str
    row: int
    codes: NDArray
    known: NDArray[np.bool_]
    scales: NDArray[np.uint8]
    tile: int = 0


@dataclass(frozen=True)
class Pick:
    """Before a run the host reads an index that an earlier run has left in `index` and writes the
    row of `simulate`'s `rows` with that index into `target`.
    """

    index: Buffer
    target: Buffer
    tile: int = 0


@dataclass
class TileRun:
    """One start of the tiles: a program per tile (None: idle), host writes before, checks after."""

    programs: Sequence[Program | None]
    images: Sequence[TileMemory]  # SRAM and KV images to load before this run, per tile
    checks: list[Check] = field(default_factory=list)
    kv_checks: list[KvCheck] = field(default_factory=list)
    pick: Pick | None = None


@dataclass(frozen=True)
class SystemResult:
    """All runs: cycles of each (the slowest tile's), counters summed per tile, values compared, and
    what the check of the commands' order says (None: not asked for).
    """

    cycles: tuple[int, ...]
    counters: Mapping[str, Mapping[str, int]]
    compared: int
    mismatched: int
    differences: tuple[str, ...]
    read: tuple[Mapping[str, Stored], ...]
    order: OrderReport | None
    seconds: float
    cpu_seconds: float
    simulated: int
    build: Build


def host_words(region: Region, first: int, lines: NDArray, scales: NDArray) -> list[str]:
    """Host file words that write `lines` [n, 16] from line `first` of a region."""
    base = region.value << REGION_LO
    return [
        f"{int(scale):02x}{line[::-1].tobytes().hex()}{base + first + i:08x}"
        for i, (line, scale) in enumerate(zip(lines, scales, strict=True))
    ]


def program_words(program: Program, config: ChipConfig) -> list[str]:
    """Host file words of a program at beat 0."""
    beats = program.assemble()
    if len(beats) > config.tile.program_beats:
        raise InputError(
            "program",
            f"{len(beats)} beats",
            f"the tile holds {config.tile.program_beats}",
            "take smaller sizes",
        )
    lines = np.ascontiguousarray(beats, "<u4").view(np.uint8).reshape(-1, LINE_BYTES)
    return host_words(Region.PROGRAM, 0, lines, np.zeros(len(lines), np.uint8))


def check_host_lines(lines: int) -> None:
    """InputError when the simulated host of a tile does not hold that many lines."""
    if lines > HOST_WORDS:
        raise InputError(
            "host data",
            f"{lines} lines",
            f"the simulated host holds {HOST_WORDS}",
            "take smaller sizes",
        )


def tile_words(memory: TileMemory, program: Program | None, config: ChipConfig) -> list[str]:
    """Host file words of the images of a tile's SRAMs and of its program."""
    words: list[str] = []
    for images, region in (
        (memory.sram_images, Region.TILE_SRAM),
        (memory.kv_images, Region.KV_SRAM),
    ):
        for line, lines, scales in images:
            words += host_words(region, line, lines, scales)
    return words if program is None else words + program_words(program, config)


def span(buffer: Buffer) -> tuple[int, int]:
    """First tile SRAM line of a buffer and the number of lines to its end."""
    size = -(-buffer.cols * SPECS[buffer.fmt].storage_bits // 8)
    first = buffer.address // LINE_BYTES
    last = (buffer.at(buffer.rows - 1) + size - 1) // LINE_BYTES
    return first, last - first + 1


def decode(buffer: Buffer, found: NDArray[np.uint8]) -> Stored:
    """Contents of a buffer from the lines [n, 17] of its span."""
    raw = found[:, :16].reshape(-1)
    offset = buffer.address % LINE_BYTES
    size = -(-buffer.cols * SPECS[buffer.fmt].storage_bits // 8)
    codes, scales = [], []
    per_line = LINE_BYTES * 8 // SPECS[buffer.fmt].storage_bits
    for r in range(buffer.rows):
        start = offset + r * buffer.stride
        padded = np.zeros(-(-size // LINE_BYTES) * LINE_BYTES, np.uint8)
        padded[:size] = raw[start : start + size]
        lines = padded.reshape(-1, LINE_BYTES)
        codes.append(unpack_codes(lines, buffer.fmt)[: buffer.cols])
        if SPECS[buffer.fmt].scaled:
            first = start // LINE_BYTES
            blocks = np.arange(-(-buffer.cols // 32)) * 32 // per_line
            scales.append(found[first + blocks, 16])
    return Stored(np.stack(codes), buffer.fmt, np.stack(scales) if scales else None)


def compare(name: str, found: Stored, expected: Stored) -> tuple[int, int, str]:
    """Values compared and different, and a line about the first difference."""
    ours = np.asarray(found.codes).astype(np.uint64)
    theirs = np.asarray(expected.codes).astype(np.uint64)
    if ours.size == theirs.size:  # rows without gaps are also one long row
        ours = ours.reshape(theirs.shape)
    if ours.shape != theirs.shape:
        raise ToolError(f"buffer {name} must have shape {theirs.shape}, not {ours.shape}")
    wrong = ours != theirs
    compared, mismatched = wrong.size, int(wrong.sum())
    if expected.scales is not None and found.scales is not None:
        compared += expected.scales.size
        mismatched += int((found.scales != expected.scales).sum())
    text = ""
    if wrong.any():
        r, c = np.argwhere(wrong)[0]
        text = (
            f"{name}[{r}, {c}] is {int(ours[r, c]):#x}, expected {int(theirs[r, c]):#x} "
            f"({mismatched} of {compared} differ)"
        )
    elif mismatched:
        text = f"{name}: {mismatched} scales differ"
    return compared, mismatched, text


def picked_lines(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """FP32 rows [index, cols] as lines [index, n, 16]."""
    padded = np.zeros((len(rows), -(-rows.shape[1] // 4) * 4), "<f4")
    padded[:, : rows.shape[1]] = rows
    return padded.view(np.uint8).reshape(len(rows), -1, LINE_BYTES)


def _host_addresses(pick: Pick | None) -> list[int] | None:
    """Tile and host addresses of a pick, for the bench."""
    if pick is None:
        return None
    lines = [buffer.address // LINE_BYTES for buffer in (pick.index, pick.target)]
    return [pick.tile, *(Region.TILE_SRAM.value << REGION_LO | line for line in lines)]


def simulate(
    request: KernelRequest,
    memories: Sequence[TileMemory],
    runs: Sequence[TileRun],
    err: tuple[int, int] = (0, 0),
    allow: Sequence[str] = ("DONE",),
    rows: NDArray[np.float32] | None = None,
) -> SystemResult:
    """Builds the system if needed, runs everything, and compares what is in memory.

    `memories` give each tile's HBM contents; `rows` [index, cols] are what a `Pick` chooses from.
    ToolError when a tile stops with a status not allowed.
    """
    config = request.config
    tiles = config.tiles
    files: dict[str, str] = {}
    words: list[list[str]] = [[] for _ in range(tiles)]
    plan: list[dict[str, Any]] = []
    for each in runs:
        first = max(len(w) for w in words)
        loads = []
        for tile in range(tiles):
            fresh = tile_words(each.images[tile], each.programs[tile], config)
            words[tile] += ["0" * 42] * (first - len(words[tile])) + fresh
            loads.append([first, len(fresh)])
        reads = [
            [
                check.tile,
                Region.TILE_SRAM.value << REGION_LO | span(check.buffer)[0],
                span(check.buffer)[1],
            ]
            for check in each.checks
        ]
        reads += [
            [
                kv.tile,
                Region.KV_SRAM.value << REGION_LO | kv.row * config.tile.cols,
                kv.codes.shape[0] * kv.codes.shape[1],
            ]
            for kv in each.kv_checks
        ]
        plan.append(
            {
                "load": loads,
                "start": [None if p is None else 0 for p in each.programs],
                "limit": CYCLE_LIMIT,
                "reads": reads,
                "pick": _host_addresses(each.pick),
            }
        )
    plusargs = []
    for tile in range(tiles):
        check_host_lines(len(words[tile]))
        files[f"host{tile}.hex"] = "\n".join(words[tile]) + "\n"
        plusargs.append(f"+host{tile}=host{tile}.hex")
        hbm = bytes(memories[tile].hbm_image)
        if hbm:
            lines = np.frombuffer(hbm + b"\0" * (-len(hbm) % LINE_BYTES), np.uint8)
            files[f"hbm{tile}.hex"] = (
                "\n".join(line[::-1].tobytes().hex() for line in lines.reshape(-1, LINE_BYTES))
                + "\n"
            )
            plusargs.append(f"+hbm{tile}=hbm{tile}.hex")
    if request.check_order:
        plusargs += [f"+trace{tile}=trace{tile}.txt" for tile in range(tiles)]
    build = build_system(config, waves=request.waves is not None)
    result = run(
        build,
        "tb.bench_tile",
        files=files,
        plusargs=plusargs,
        seed=request.seed,
        waves=request.waves,
        arrays={} if rows is None else {"rows": picked_lines(rows)},
        parameters={
            "runs": plan,
            "stall": STALLS[request.stall] * 256 // 100,
            "stall_seed": (request.seed * 2654435761 + 1) & 0xFFFFFFFF,
            "err": list(err),
            "trace": request.check_order,
        },
    )
    order = check_order(config, memories, runs, result) if request.check_order else None
    return _collect(result, runs, build, allow, order)


def check_order(
    config: ChipConfig,
    memories: Sequence[TileMemory],
    runs: Sequence[TileRun],
    result: RunResult,
) -> OrderReport:
    """Checks the recorded commands; ToolError when there are none."""
    picks = []
    for each in runs:
        picked = []
        if each.pick is not None:
            first, lines = span(each.pick.target)
            picked.append((each.pick.tile, first * LINE_BYTES, lines * LINE_BYTES))
        picks.append(picked)
    report = check_commands(
        config,
        [parse(text.splitlines()) for text in result.report["trace"]],
        [each.images for each in runs],
        [len(memory.hbm_image) for memory in memories],
        [[program is not None for program in each.programs] for each in runs],
        picks,
    )
    if not report.commands:
        raise ToolError("the check of the order must see commands, but recorded none")
    return report


def _collect(
    result: RunResult,
    runs: Sequence[TileRun],
    build: Build,
    allow: Sequence[str],
    order: OrderReport | None,
) -> SystemResult:
    cycles, compared, mismatched, differences, read = [], 0, 0, [], []
    counters: dict[str, dict[str, int]] = {}
    for r, (done, each) in enumerate(zip(result.report["runs"], runs, strict=True)):
        for tile, status in enumerate(done["status"]):
            if status["status"] not in allow:
                raise ToolError(
                    f"tile {tile} stopped with {status['status']} in run {r}: engine "
                    f"{status['engine']}, command at beat {status['pc']}, cycle {status['cycles']}"
                )
            for kind in ("kv_corrected", "kv_uncorrectable"):
                if status[kind]:
                    raise ToolError(f"{kind} of tile {tile} must be 0, not {status[kind]}")
        cycles.append(max(status["cycles"] for status in done["status"]))
        for status, found in zip(done["status"], done["counters"], strict=True):
            for engine, states in found.items():
                if sum(states.values()) != status["cycles"]:
                    raise ToolError(
                        f"counters of {engine} must add up to {status['cycles']} cycles, "
                        f"not {sum(states.values())}"
                    )
            for engine, states in found.items():
                total = counters.setdefault(engine, dict.fromkeys(states, 0))
                for state, count in states.items():
                    total[state] += count
        values = {}
        for i, check in enumerate(each.checks):
            found = decode(check.buffer, result.arrays[f"read_{r}_{i}"])
            values[check.buffer.name] = found
            n, wrong, text = compare(check.buffer.name, found, check.stored)
            compared, mismatched = compared + n, mismatched + wrong
            if text:
                differences.append(f"run {r}, tile {check.tile}: {text}")
        for i, kv in enumerate(each.kv_checks, len(each.checks)):
            lines = np.ascontiguousarray(result.arrays[f"read_{r}_{i}"][:, :16])
            ours = lines.view(kv.codes.dtype).reshape(kv.codes.shape)
            wrong_codes = (ours != kv.codes) & kv.known
            scales = result.arrays[f"read_{r}_{i}"][:, 16].reshape(kv.scales.shape)
            wrong_scales = (scales != kv.scales) & kv.known.any(axis=2)
            compared += int(kv.known.sum()) + int(kv.known.any(axis=2).sum())
            mismatched += int(wrong_codes.sum()) + int(wrong_scales.sum())
            if wrong_scales.any():
                differences.append(f"run {r}, tile {kv.tile}: {kv.name}, scales differ")
            if wrong_codes.any():
                row, bank, element = np.argwhere(wrong_codes)[0]
                differences.append(
                    f"run {r}, tile {kv.tile}: {kv.name}, KV row {kv.row + row}, bank {bank}, "
                    f"element {element} ({int(wrong_codes.sum())} differ)"
                )
        read.append(values)
    return SystemResult(
        tuple(cycles),
        counters,
        compared,
        mismatched,
        tuple(differences),
        tuple(read),
        order,
        result.seconds,
        result.cpu_seconds,
        int(result.report["simulated"]),
        build,
    )
