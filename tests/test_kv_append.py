# SPDX-License-Identifier: Apache-2.0
"""KVAPPEND: the engine between stalling memories against the packed cache; errors; with SRAMs."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from amaranth import Module
from amaranth.back import verilog
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from golden import kv_layout
from golden.formats import SCALE_ONE, Format
from hw.config import TileConfig, preset
from hw.emit import VerilogPlatform
from hw.hbm_channel import line_write
from hw.isa import KVAPPEND, Activity, Status
from hw.kv_append import KvAppend
from hw.kv_sram import KvSram
from hw.kv_update import ROW_BITS, append_width
from hw.ports import LINE_ADDRESS_BITS, LINE_BITS, EngineControl, SramClient, WeightRead
from hw.tile_sram import TileSram
from tests.flat_bench import FlatBench, pack
from tests.simulators import BOTH

OVERHEAD = 16  # cycles of a command besides its lines, without stalls


def config(cols: int) -> TileConfig:
    return dataclasses.replace(
        preset("tiny").tile,
        cols=cols,
        result_depth=max(16, 2 * cols),
        kv_bytes=cols * 16 * 256,
        sram_bytes=1 << 12,
    )


def command(**operands: int) -> dict[str, int]:
    return {
        "k_addr": 0,
        "v_addr": 0,
        "slot": 0,
        "k_base": 0,
        "v_base": 0,
        "head_dim": 8,
        "keys": 1,
        "values": 1,
        "format": Format.BF16,
        "wrapped": 0,
    } | operands


def encode(operands: dict[str, int]) -> int:
    return pack(*((operands[op.name], op.width) for op in KVAPPEND.operands))


class Harness:
    """A `KvAppend` between a tile SRAM and a KV SRAM in numpy, which stall with probability
    `stall`.

    source : bytes [lines, 16] of the tile SRAM, and `source_scales`
    cache : bytes [rows, cols, 16] of the KV SRAM; `scales` and `written` go along
    """

    def __init__(self, tile: TileConfig, rng: np.random.Generator, stall: float):
        self.tile, self.rng, self.stall = tile, rng, stall
        self.bench = FlatBench(KvAppend(tile))
        self.source = rng.integers(256, size=(tile.sram_lines, 16)).astype(np.uint8)
        self.source_scales = rng.integers(256, size=tile.sram_lines).astype(np.uint8)
        shape = (tile.kv_rows, tile.cols, 16)
        self.cache = rng.integers(256, size=shape).astype(np.uint8)
        self.written = np.zeros(shape, bool)
        self.scales = np.zeros(shape[:2], np.uint8)
        self.activity: Counter[Activity] = Counter()
        self.cycles: list[int] = []  # of each command, from taken to done

    async def run(self, commands: list[dict[str, int]]) -> list[Status]:
        bench, drive, rng = self.bench, self.bench.drive, self.rng
        errors: list[Status] = []
        answers: list[int | None] = [None] * TileSram.LATENCY
        waiting = list(commands)
        started: int | None = None
        held: int | None = None  # the append that is offered must stay until it is taken
        for _ in range(400 * len(commands)):
            drive["control__command__valid"] = bool(waiting)
            drive["control__command__payload"] = encode(waiting[0]) if waiting else 0
            drive["source__request__ready"] = rng.random() >= self.stall
            drive["append__ready"] = rng.random() >= self.stall
            address = answers.pop(0)
            drive["source__valid"] = address is not None
            drive["source__fault"] = address is not None and address >= len(self.source)
            drive["source__response"] = (
                int(rng.integers(1 << 62))
                if address is None
                else pack(*((v, 8) for v in self.source[address]), (self.source_scales[address], 8))
            )
            bench.settle()
            answers.append(None)
            if bench["source__request__valid"] and drive["source__request__ready"]:
                request = bench["source__request__payload"]
                assert not request >> LINE_ADDRESS_BITS & 1, "the source is only read"
                answers[-1] = request & ((1 << LINE_ADDRESS_BITS) - 1)
                assert answers[-1] < len(self.source), "reads keep to the tile SRAM"
            offered = bench["append__payload"] if bench["append__valid"] else None
            assert held is None or offered == held
            held = None if drive["append__ready"] else offered
            if offered is not None and drive["append__ready"]:
                self.append(offered)
            activity = Activity(bench["control__activity"])
            self.activity[activity] += 1
            assert (activity is Activity.IDLE) == (started is None)
            if bench["control__done"]:
                assert started is not None and offered is None
                errors.append(Status(bench["control__error"]))
                self.cycles.append(bench.cycle - started)
                started = None
            elif bench["control__command__ready"] and waiting:
                assert started is None
                started = bench.cycle
                waiting.pop(0)
            await bench.tick()
            if len(errors) == len(commands):
                return errors
        raise AssertionError(f"{len(errors)} of {len(commands)} commands are done")

    def append(self, payload: int) -> None:
        """The KV SRAM's side of an append write."""
        fields = []
        for bits in (ROW_BITS, self.tile.cols.bit_length() - 1, 1, 1, 1, 4, LINE_BITS, 8):
            fields.append(payload & ((1 << bits) - 1))
            payload >>= bits
        row, bank, key, eight, fresh, place, line, scale = fields
        data = np.frombuffer(line.to_bytes(16, "little"), np.uint8)
        assert row < self.tile.stream_base
        if key:
            self.cache[row, bank], self.written[row, bank] = data, True
            self.scales[row, bank] = scale
            return
        size = 1 if eight else 2  # bytes of an element
        at = slice(size * place, size * (place + 1))
        for i in range(append_width(self.tile.cols, bool(eight))):
            if fresh:
                self.cache[row, bank + i] = 0
            self.cache[row, bank + i, at] = data[size * i : size * (i + 1)]
            self.written[row, bank + i, at] = True
            self.scales[row, bank + i] = scale

    def check_region(self, expected: np.ndarray, given: np.ndarray, base: int) -> None:
        """The region from row `base` holds `expected` where `given`; nothing else was written."""
        region = slice(base, base + len(expected))
        expected, given = as_bytes(expected), as_bytes(given) != 0
        np.testing.assert_array_equal(self.written[region], given)
        np.testing.assert_array_equal(self.cache[region][given], expected[given])


def as_bytes(lines: np.ndarray) -> np.ndarray:
    """Lines [rows, cols, E] as bytes [rows, cols, 16]."""
    return np.ascontiguousarray(lines).view(np.uint8)


@BOTH
@pytest.mark.parametrize("stall", [0.0, 0.6])
@pytest.mark.parametrize(
    "head_dim, fmt",
    [(8, Format.BF16), (24, Format.BF16), (64, Format.BF16)]
    + [(16, Format.MXFP8_E4M3), (48, Format.MXFP8_E4M3)],
)
@pytest.mark.parametrize("cols", [4, 8, 16])
def test_ring(cols: int, head_dim: int, fmt: Format, stall: float) -> None:
    """Tokens around a ring that is not full at the end of its last group, more than once."""
    seed = 100 * cols + head_dim
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    harness = Harness(config(cols), rng, stall)
    elements = kv_layout.line_elements(fmt)
    dtype = np.dtype("<u2") if fmt is Format.BF16 else np.dtype("u1")
    ring, tokens, lines = cols + 3, 2 * cols + 9, head_dim // elements
    k_base = 5
    v_base = k_base + kv_layout.key_rows(ring, head_dim, cols, fmt)
    end = v_base + kv_layout.value_rows(ring, head_dim, cols, fmt)
    keys, values = np.zeros((ring, head_dim), dtype), np.zeros((ring, head_dim), dtype)
    key_scales, value_scales = np.zeros((ring, lines), np.uint8), np.zeros(lines, np.uint8)
    commands = []
    for token in range(tokens):
        k, v = (int(x) for x in rng.integers(len(harness.source) - lines + 1, size=2))
        slot = token % ring
        keys[slot] = harness.source[k : k + lines].reshape(-1).view(dtype)
        values[slot] = harness.source[v : v + lines].reshape(-1).view(dtype)
        key_scales[slot] = harness.source_scales[k : k + lines]
        value_scales = harness.source_scales[v : v + lines]
        commands.append(
            command(
                k_addr=16 * k,
                v_addr=16 * v,
                slot=slot,
                k_base=k_base,
                v_base=v_base,
                head_dim=head_dim,
                format=fmt,
                wrapped=int(token >= ring),
            )
        )
    errors: list[Status] = []

    async def bench(_: FlatBench) -> None:
        errors.extend(await harness.run(commands))

    harness.bench.run(bench)
    assert errors == [Status.RUNNING] * tokens
    everywhere = np.full((ring, head_dim), (1 << (8 * dtype.itemsize)) - 1, dtype)
    for pack_region, codes, base in (
        (kv_layout.pack_keys, keys, k_base),
        (kv_layout.pack_values, values, v_base),
    ):
        harness.check_region(
            pack_region(codes, cols, fmt), pack_region(everywhere, cols, fmt), base
        )
    assert not harness.written[:k_base].any() and not harness.written[end:].any()
    if fmt is Format.BF16:
        written = harness.written.any(axis=2)
        np.testing.assert_array_equal(harness.scales, np.where(written, SCALE_ONE, 0))
    else:
        d = elements * np.arange(lines)
        key = kv_layout.key_place(np.arange(ring)[:, None], d, head_dim, cols, fmt)
        np.testing.assert_array_equal(harness.scales[k_base + key.row, key.bank], key_scales)
        value = kv_layout.value_place((tokens - 1) % ring, np.arange(head_dim), head_dim, cols, fmt)
        np.testing.assert_array_equal(
            harness.scales[v_base + value.row, value.bank], value_scales.repeat(elements)
        )
    moves = lines + lines * elements // append_width(cols, fmt is not Format.BF16)
    if stall:
        assert harness.activity[Activity.BLOCKED] and harness.activity[Activity.STARVED]
    else:
        assert set(harness.cycles) == {harness.cycles[0]}
        assert moves < harness.cycles[0] <= moves + OVERHEAD
        assert not harness.activity[Activity.BLOCKED]


@BOTH
def test_key_or_value_alone() -> None:
    rng = np.random.default_rng(21)
    harness = Harness(config(4), rng, 0.2)
    cases = [
        command(keys=0, v_addr=32, slot=6, v_base=40, head_dim=24),
        command(values=0, k_addr=64, slot=6, k_base=10, head_dim=24),
    ]
    errors: list[Status] = []

    async def bench(_: FlatBench) -> None:
        errors.extend(await harness.run(cases))

    harness.bench.run(bench)
    assert errors == [Status.RUNNING] * 2
    d = np.arange(24)
    value, key = kv_layout.value_place(6, d, 24, 4), kv_layout.key_place(6, d, 24, 4)
    cache, written, source = (
        array.view(np.uint16)
        for array in (harness.cache, harness.written.astype(np.uint8), harness.source)
    )
    expected = np.zeros_like(written)
    expected[value.row + 40, value.bank, value.element] = 0x0101
    expected[key.row + 10, key.bank, key.element] = 0x0101
    np.testing.assert_array_equal(written, expected)
    np.testing.assert_array_equal(
        cache[value.row + 40, value.bank, value.element], source[2:5].reshape(-1)
    )
    np.testing.assert_array_equal(
        cache[key.row + 10, key.bank, key.element], source[4:7].reshape(-1)
    )


TILE = config(4)
END, TOP = TILE.stream_base, TILE.sram_bytes
ERRORS = {
    "head_dim 0": (command(head_dim=0), Status.ILLEGAL_COMMAND),
    "head_dim 12": (command(head_dim=12), Status.ILLEGAL_COMMAND),
    "head_dim 24 of FP8": (command(head_dim=24, format=3), Status.ILLEGAL_COMMAND),
    "FP4": (command(head_dim=32, format=Format.MXFP4), Status.ILLEGAL_COMMAND),
    "E5M2": (command(head_dim=32, format=Format.MXFP8_E5M2), Status.ILLEGAL_COMMAND),
    "FP32": (command(head_dim=32, format=Format.FP32), Status.ILLEGAL_COMMAND),
    "FP8 value row by slot": (
        command(v_base=END - 4, slot=16, head_dim=16, format=3),
        Status.ADDRESS_RANGE,
    ),
    "key misaligned": (command(k_addr=8), Status.ILLEGAL_COMMAND),
    "value misaligned": (command(v_addr=2), Status.ILLEGAL_COMMAND),
    "neither": (command(keys=0, values=0), Status.ILLEGAL_COMMAND),
    "illegal and out of range": (command(v_addr=TOP + 8), Status.ILLEGAL_COMMAND),
    "key row in the ring": (command(k_base=END), Status.ADDRESS_RANGE),
    "last key row in the ring": (command(k_base=END - 1, head_dim=16), Status.ADDRESS_RANGE),
    "key row by slot": (command(k_base=END - 2, slot=8), Status.ADDRESS_RANGE),
    "value row in the ring": (command(v_base=END, head_dim=8), Status.ADDRESS_RANGE),
    "last value row in the ring": (command(v_base=END - 1), Status.ADDRESS_RANGE),
    "value row by slot": (command(v_base=END - 4, slot=16), Status.ADDRESS_RANGE),
    "key source": (command(k_addr=TOP), Status.ADDRESS_RANGE),
    "key source's last line": (command(k_addr=TOP - 16, head_dim=16), Status.ADDRESS_RANGE),
    "value source's last line": (command(v_addr=TOP - 16, head_dim=16), Status.ADDRESS_RANGE),
    "source at the end of addresses": (
        command(v_addr=0xFFFF_FFF0, head_dim=16),
        Status.ADDRESS_RANGE,
    ),
    "everything at its largest": (
        command(
            k_addr=0xFFFF_FFF0,
            v_addr=0xFFFF_FFF0,
            slot=0xFF_FFFF,
            k_base=0xFF_FFFF,
            v_base=0xFF_FFFF,
            head_dim=0xFFF8,
        ),
        Status.ADDRESS_RANGE,
    ),
    "key row beyond 24 bits": (
        command(slot=0x80_0000, head_dim=64, values=0),
        Status.ADDRESS_RANGE,
    ),
    "value row beyond 24 bits": (
        command(slot=0x80_0000, head_dim=64, keys=0),
        Status.ADDRESS_RANGE,
    ),
}


@BOTH
def test_errors_write_nothing() -> None:
    """Each wrong command is done with its error, and a good one after it still works."""
    rng = np.random.default_rng(22)
    harness = Harness(TILE, rng, 0.0)
    seen: dict[str, list[Status]] = {}

    async def bench(_: FlatBench) -> None:
        for name, (wrong, _) in ERRORS.items():
            errors = await harness.run([wrong])
            assert not harness.written.any(), name
            seen[name] = errors + await harness.run([command(v_base=2)])
            assert harness.written.sum() == 32, name
            harness.written[:] = False

    harness.bench.run(bench)
    assert seen == {name: [status, Status.RUNNING] for name, (_, status) in ERRORS.items()}


@BOTH
def test_last_rows_and_lines_are_in_range() -> None:
    rng = np.random.default_rng(23)
    harness = Harness(TILE, rng, 0.0)
    edge = [
        command(k_base=END - 4, slot=7, v_base=0, head_dim=16, k_addr=TOP - 32, v_addr=TOP - 32),
        command(v_base=END - 8, slot=15, k_base=0, head_dim=16),
        # What does not take part is not looked at.
        command(keys=0, k_base=0xFF_FFFF, k_addr=0xFFFF_FFF0),
        command(values=0, v_base=0xFF_FFFF, v_addr=0xFFFF_FFF0),
    ]
    errors: list[Status] = []

    async def bench(_: FlatBench) -> None:
        errors.extend(await harness.run(edge))

    harness.bench.run(bench)
    assert errors == [Status.RUNNING] * len(edge)
    assert harness.written[END - 1].any() and not harness.written[END:].any()


class AppendSystem(wiring.Component):
    """The engine with both SRAMs, as the tile connects them."""

    def __init__(self, tile: TileConfig):
        self.tile = tile
        super().__init__(
            {
                "control": Out(EngineControl(KVAPPEND)),
                "host": In(SramClient(1)),
                "read": In(WeightRead(tile.cols, 8)),
                "stream_write": In(stream.Signature(line_write(tile.hbm_beat_bytes // 16))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.sram = sram = TileSram(self.tile)
        m.submodules.kv = kv = KvSram(self.tile, 8)
        m.submodules.engine = engine = KvAppend(self.tile)
        connect(m, flipped(self.control), engine.control)
        connect(m, flipped(self.host), sram.host)
        connect(m, engine.source, sram.kv)
        connect(m, engine.append, kv.append)
        connect(m, flipped(self.read), kv.read)
        connect(m, flipped(self.stream_write), kv.stream_write)
        m.d.comb += engine.fault.eq(kv.append_fault)
        return m


@BOTH
def test_append_while_the_array_reads() -> None:
    """Rows are read and the weight stream writes in every other cycle while tokens are appended.

    A row read after a command is done holds its token beside those of before, whole.
    """
    rng = np.random.default_rng(24)
    cols, head_dim, tokens = 8, 24, 12
    tile = config(cols)
    flat = FlatBench(AppendSystem(tile))
    width = 1 + 8 + LINE_BITS + 8
    codes = rng.integers(1 << 16, size=(tokens, 2, head_dim)).astype(np.uint16)
    key_end = kv_layout.key_rows(tokens, head_dim, cols)
    rows = key_end + kv_layout.value_rows(tokens, head_dim, cols)
    found = np.zeros((rows, cols, 8), np.uint16)
    reads = 0

    async def step(row: int | None = None) -> None:
        nonlocal reads
        drive = flat.drive
        drive["read__command"] = 0 if row is None else pack((1, 1), (row, 24), (0, 4), (row, 8))
        drive["stream_write__valid"] = flat.cycle % 2
        drive["stream_write__payload"] = pack(
            (tile.stream_base * cols, LINE_ADDRESS_BITS), (0, LINE_BITS + 8), (1, 1)
        )
        flat.settle()
        for c in range(cols):
            column = flat["read__column"] >> (width * c) & ((1 << width) - 1)
            if column & 1:
                at, line = column >> 1 & 0xFF, column >> 9
                found[at, c] = [line >> (16 * i) & 0xFFFF for i in range(8)]
                reads += 1

    async def bench(_: FlatBench) -> None:
        drive = flat.drive
        for address, line in enumerate(codes.reshape(-1, 8)):
            drive["host__request__valid"] = 1
            drive["host__request__payload"] = pack(
                (address, LINE_ADDRESS_BITS),
                (1, 1),
                *((v, 16) for v in line),
                (0, 8),
                (0xFF, 8),
                (1, 1),
            )
            await step()
            assert flat["host__request__ready"]
            await flat.tick()
        drive["host__request__valid"] = 0
        for token in range(tokens):
            address = 16 * token * 2 * head_dim // 8
            drive["control__command__payload"] = encode(
                command(
                    k_addr=address,
                    v_addr=address + 2 * head_dim,
                    slot=token,
                    v_base=key_end,
                    head_dim=head_dim,
                )
            )
            drive["control__command__valid"] = 1
            done = False
            for cycle in range(300):
                # Any row: unwritten ones are undefined, so what they give is looked at only later.
                await step(int(rng.integers(rows)) if rng.random() < 0.8 else None)
                done = bool(flat["control__done"])
                if done:
                    assert flat["control__error"] == Status.RUNNING
                await flat.tick()
                drive["control__command__valid"] = 0
                if done:
                    break
                assert cycle < 299
            for cycle in range(rows + cols + KvSram.READ_LATENCY):
                await step(cycle if cycle < rows else None)
                await flat.tick()
            so_far = codes[: token + 1]
            for pack_region, part, base in (
                (kv_layout.pack_keys, 0, 0),
                (kv_layout.pack_values, 1, key_end),
            ):
                expected = pack_region(so_far[:, part], cols)
                given = pack_region(np.ones_like(so_far[:, part]), cols) == 1
                got = found[base : base + len(expected)]
                np.testing.assert_array_equal(got[given], expected[given])

    flat.run(bench)
    assert reads > tokens * rows * cols


def test_layout_is_one_to_one() -> None:
    """Every element has a place of its own, and regions are as small as whole groups allow."""
    checked = 0
    for cols in (4, 8, 16, 64):
        for head_dim in (8, 24, 64):
            for slots in (1, 8, 13, 64):
                s, d = np.arange(slots)[:, None], np.arange(head_dim)[None]
                codes = (s * head_dim + d + 1).astype(np.uint16)
                for pack_region, place, rows in (
                    (kv_layout.pack_keys, kv_layout.key_place, kv_layout.key_rows),
                    (kv_layout.pack_values, kv_layout.value_place, kv_layout.value_rows),
                ):
                    lines = pack_region(codes, cols)
                    assert lines.shape == (rows(slots, head_dim, cols), cols, 8)
                    assert np.count_nonzero(lines) == codes.size
                    np.testing.assert_array_equal(lines[place(s, d, head_dim, cols)], codes)
                    assert lines[-1].any()
                    checked += codes.size
    assert checked > 10_000


@pytest.mark.parametrize("bad", [0, 4, 12, -8])
def test_layout_rejects_bad_sizes(bad: int) -> None:
    with pytest.raises(ValueError, match="head_dim must be"):
        kv_layout.key_rows(8, bad, 8)
    with pytest.raises(ValueError, match="cols must be"):
        kv_layout.value_rows(8, 8, 3)
    with pytest.raises(ValueError, match="codes must have shape"):
        kv_layout.pack_keys(np.zeros(8, np.uint16), 8)


def test_emits_verilog() -> None:
    text = verilog.convert(
        KvAppend(preset("small").tile), platform=VerilogPlatform(), name="kv_append"
    )
    assert "module kv_append(" in text
