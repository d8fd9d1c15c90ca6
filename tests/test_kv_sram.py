# SPDX-License-Identifier: Apache-2.0
"""KV SRAM: skew of the array's reads, writers and their order, host reads, against a line model."""

import dataclasses

import numpy as np
import pytest
from amaranth.back import verilog

from hw.config import TileConfig, preset
from hw.emit import VerilogPlatform
from hw.kv_sram import ROW_BITS, SCALE_ONE, KvSram, append_width
from hw.ports import LINE_ADDRESS_BITS, LINE_BITS, SCALE_BITS
from tests.flat_bench import FlatBench, pack
from tests.simulators import BOTH

META_BITS = 5
WORD_BITS = LINE_BITS + SCALE_BITS


def config(cols: int, beat_lines: int) -> TileConfig:
    """A KV SRAM of 16 rows with `beat_lines` lines in an HBM beat."""
    return dataclasses.replace(
        preset("tiny").tile,
        cols=cols,
        result_depth=max(16, 2 * cols),
        kv_bytes=cols * 256,
        stream_rows=8,
        hbm_port_bytes=8 * beat_lines if beat_lines > 1 else 16,
        hbm_ports=2 if beat_lines > 1 else 1,
    )


CONFIGS = {  # a beat is one line, half a row, a whole row
    "4 banks, 1 line": config(4, 1),
    "8 banks, 4 lines": config(8, 4),
    "16 banks, 16 lines": config(16, 16),
}


def number(rng: np.random.Generator, bits: int) -> int:
    return int.from_bytes(rng.bytes((bits + 7) // 8), "little") & ((1 << bits) - 1)


class Model:
    """Words by [row][bank]; the writers' payloads are dicts of fields."""

    def __init__(self, tile: TileConfig, rng: np.random.Generator):
        self.rows, self.cols, self.rng = tile.kv_rows, tile.cols, rng
        self.lines = {
            "stream_write": tile.hbm_beat_bytes // 16,
            "dma_write": tile.hbm_beat_bytes // 16,
            "host_write": 1,
        }
        self.words: dict[tuple[int, int], int] = {}

    def random_write(self, name: str) -> dict:
        rng = self.rng
        if name == "append":
            width = append_width(self.cols)
            key = int(rng.integers(2))
            bank = (
                int(rng.integers(self.cols))
                if key
                else (width * int(rng.integers(self.cols // width)))
            )
            return {
                "row": int(rng.integers(self.rows)),
                "bank": bank,
                "key": key,
                "granule": int(rng.integers(8)),
                "line": number(rng, LINE_BITS),
            }
        n = self.lines[name]
        return {
            "address": n * int(rng.integers(self.rows * self.cols // n)),
            "data": number(rng, LINE_BITS * n),
            "scales": number(rng, SCALE_BITS * n),
            "enable": number(rng, n),
        }

    def payload(self, name: str, write: dict) -> int:
        if name == "append":
            return pack(
                (write["row"], ROW_BITS),
                (write["bank"], self.cols.bit_length() - 1),
                (write["key"], 1),
                (write["granule"], 3),
                (write["line"], LINE_BITS),
            )
        n = self.lines[name]
        return pack(
            (write["address"], LINE_ADDRESS_BITS),
            (write["data"], LINE_BITS * n),
            (write["scales"], SCALE_BITS * n),
            (write["enable"], n),
        )

    def write(self, name: str, write: dict) -> None:
        one = SCALE_ONE << LINE_BITS
        if name == "append":
            row, bank, line = write["row"], write["bank"], write["line"]
            if write["key"]:
                self.words[row, bank] = line | one
                return
            for i in range(append_width(self.cols)):
                field = 0xFFFF << (16 * write["granule"])
                element = line >> (16 * i) & 0xFFFF
                old = self.words[row, bank + i] & ((1 << LINE_BITS) - 1)
                self.words[row, bank + i] = old & ~field | element << (16 * write["granule"]) | one
            return
        for i in range(self.lines[name]):
            if write["enable"] >> i & 1:
                row, bank = divmod(write["address"] + i, self.cols)
                data = write["data"] >> (LINE_BITS * i) & ((1 << LINE_BITS) - 1)
                scale = write["scales"] >> (SCALE_BITS * i) & ((1 << SCALE_BITS) - 1)
                self.words[row, bank] = data | scale << LINE_BITS


class Traffic:
    """Drives all ports of a `KvSram` and checks all of its outputs in every cycle."""

    WRITERS = ("stream_write", "append", "dma_write", "host_write")

    def __init__(self, tile: TileConfig, rng: np.random.Generator):
        self.rng = rng
        self.model = Model(tile, rng)
        self.bench = FlatBench(KvSram(tile, META_BITS))
        self.waiting: dict[str, dict] = {}
        # Commands by age: command a is at bank a now, unless None.
        self.commands: list[tuple[int, int] | None] = [None] * (tile.cols + 1)
        self.columns: list[tuple[int, int] | None] = [None] * tile.cols
        self.fault = False
        self.host_address: int | None = None
        self.host_state = -1  # cycles until the answer, -1: none under way
        self.host_answer = 0
        self.taken = dict.fromkeys((*self.WRITERS, "host_read"), 0)
        self.blocked = dict.fromkeys((*self.WRITERS, "host_read"), 0)
        self.rows_read = self.faults = self.answers = 0

    async def cycle(
        self,
        command: tuple[int, int] | None,
        writes: dict[str, dict],
        host_read: int | None = None,
        host_ready: bool = True,
    ) -> None:
        bench, model = self.bench, self.model
        drive = bench.drive
        self.waiting |= writes
        if host_read is not None:
            assert self.host_address is None
            self.host_address = host_read
        row, meta = command or (number(self.rng, ROW_BITS), number(self.rng, META_BITS))
        drive["read__command"] = pack((command is not None, 1), (row, ROW_BITS), (meta, META_BITS))
        for name in self.WRITERS:
            drive[f"{name}__valid"] = name in self.waiting
            if name in writes:
                drive[f"{name}__payload"] = model.payload(name, writes[name])
        drive["host_read__request__valid"] = self.host_address is not None
        drive["host_read__request__payload"] = self.host_address or 0
        drive["host_read__response__ready"] = host_ready
        bench.settle()
        self.commands = [command, *self.commands[:-1]]
        self._check_reads()
        self._check_host(host_ready)
        self._check_writes()
        self.fault = command is not None and command[0] >= model.rows
        await bench.tick()

    def _check_reads(self) -> None:
        bench, model = self.bench, self.model
        width = 1 + META_BITS + WORD_BITS
        assert bench["read_fault"] == self.fault
        self.faults += self.fault
        for c, expected in enumerate(self.columns):
            column = bench["read__column"] >> (width * c) & ((1 << width) - 1)
            assert column & 1 == (expected is not None), (bench.cycle, c)
            if expected is not None:
                meta, word = expected
                assert column >> 1 == pack((meta, META_BITS), (word, WORD_BITS)), (bench.cycle, c)
                self.rows_read += c == model.cols - 1
        self.columns = [
            None if at is None else (at[1], model.words.get((at[0], c), 0))
            for c, at in enumerate(self.commands[: model.cols])
        ]

    def _check_host(self, ready: bool) -> None:
        bench, model = self.bench, self.model
        if self.host_state == 0:
            assert bench["host_read__response__valid"]
            assert bench["host_read__response__payload"] == self.host_answer
            if ready:
                self.host_state = -1
                self.answers += 1
        else:
            assert not bench["host_read__response__valid"]
            if self.host_state > 0:
                self.host_state -= 1
            elif self.host_address is not None:
                row, bank = divmod(self.host_address, model.cols)
                free = self.commands[bank] is None
                assert bench["host_read__request__ready"] == free
                self.taken["host_read"] += free
                self.blocked["host_read"] += not free
                if free:
                    self.host_answer = model.words[row, bank]
                    self.host_address, self.host_state = None, 1
                return
        if self.host_address is not None:
            assert not bench["host_read__request__ready"]

    def _check_writes(self) -> None:
        first = True
        for name in self.WRITERS:
            if name not in self.waiting:
                continue
            assert self.bench[f"{name}__ready"] == first, name
            if first:
                self.model.write(name, self.waiting.pop(name))
                self.taken[name] += 1
            else:
                self.blocked[name] += 1
            first = False

    async def fill(self) -> None:
        """Write every line, so that nothing undefined is read."""
        n = self.model.lines["stream_write"]
        for address in range(0, self.model.rows * self.model.cols, n):
            write = self.model.random_write("stream_write")
            await self.cycle(
                None, {"stream_write": write | {"address": address, "enable": (1 << n) - 1}}
            )

    async def drain(self) -> None:
        for _ in range(self.model.cols + 20):
            await self.cycle(None, {})
        assert not self.waiting and self.host_address is None and self.host_state == -1


@BOTH
@pytest.mark.parametrize("load", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("name", CONFIGS)
def test_random_traffic(name: str, load: float) -> None:
    """Reads, all writers and the host at once; at full load stalls follow from each other."""
    seed = 11
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    traffic = Traffic(CONFIGS[name], rng)
    model = traffic.model
    # Under full load a writer after the first is served only when all before it pause.
    share = {"stream_write": 0.5 * load, "append": load, "dma_write": load, "host_write": load}

    async def bench(_: FlatBench) -> None:
        await traffic.fill()
        for _ in range(700):
            command = None
            if rng.random() < 0.8 * load:
                row = int(rng.integers(model.rows))
                if rng.random() < 0.05:
                    row = [model.rows, model.rows + 1, (1 << ROW_BITS) - 1][rng.integers(3)]
                command = (row, number(rng, META_BITS))
            paused = rng.random() < 0.5  # lets the last writers through
            writes = {
                w: model.random_write(w)
                for w in traffic.WRITERS
                if w not in traffic.waiting
                and rng.random() < share[w]
                and not (paused and w in ("append", "dma_write"))
            }
            host = None
            if traffic.host_address is None and rng.random() < load:
                host = int(rng.integers(model.rows * model.cols))
            await traffic.cycle(command, writes, host, rng.random() < 0.7)
        await traffic.drain()

    traffic.bench.run(bench)
    assert traffic.rows_read > 40 and traffic.faults >= 1
    assert all(count >= 15 for count in traffic.taken.values()), traffic.taken
    assert traffic.answers == traffic.taken["host_read"]
    if load > 0.1:
        waited = {w for w, cycles in traffic.blocked.items() if cycles}
        assert waited == {"append", "dma_write", "host_write", "host_read"}
    assert traffic.blocked["stream_write"] == 0


@BOTH
@pytest.mark.parametrize("name", CONFIGS)
def test_read_rate_and_skew(name: str) -> None:
    """A row in every cycle; column c's line exactly READ_LATENCY + c cycles after its command."""
    rng = np.random.default_rng(12)
    traffic = Traffic(CONFIGS[name], rng)
    model = traffic.model
    seen: dict[tuple[int, int], int] = {}
    first = 0

    async def bench(flat: FlatBench) -> None:
        nonlocal first
        await traffic.fill()
        first = flat.cycle
        for i in range(model.rows + model.cols + 1):
            await traffic.cycle((i, i) if i < model.rows else None, {})
            width = 1 + META_BITS + WORD_BITS
            for c in range(model.cols):
                column = flat["read__column"] >> (width * c)
                if column & 1:
                    seen[column >> 1 & ((1 << META_BITS) - 1), c] = flat.cycle - 1

    traffic.bench.run(bench)
    assert seen == {
        (i, c): first + i + KvSram.READ_LATENCY + c
        for i in range(model.rows)
        for c in range(model.cols)
    }
    assert traffic.rows_read == model.rows


@BOTH
def test_read_overtaken_by_write_sees_it_from_the_next_bank_on() -> None:
    """A write in the cycle in which the read is at bank 1: bank 1 gives the old word, 2 the new."""
    rng = np.random.default_rng(13)
    traffic = Traffic(CONFIGS["16 banks, 16 lines"], rng)
    model = traffic.model
    words: list[int] = []

    async def bench(_: FlatBench) -> None:
        await traffic.fill()
        old = [model.words[3, c] for c in range(model.cols)]
        write = model.random_write("stream_write") | {"address": 3 * model.cols, "enable": 0xFFFF}
        await traffic.cycle((3, 1), {})
        await traffic.cycle(None, {"stream_write": write})
        words.extend([old[1], model.words[3, 2]])
        assert old[2] != model.words[3, 2]
        for c in range(1, model.cols):
            if c in (1, 2):
                assert traffic.columns[c] == (1, words[c - 1])
            await traffic.cycle(None, {})

    traffic.bench.run(bench)
    assert traffic.rows_read == 1


@BOTH
def test_value_append_keeps_the_other_tokens() -> None:
    """Eight tokens of a group, appended in any order, end up side by side in each line."""
    rng = np.random.default_rng(14)
    traffic = Traffic(CONFIGS["8 banks, 4 lines"], rng)
    model = traffic.model
    lines = {granule: number(rng, LINE_BITS) for granule in range(8)}

    async def bench(_: FlatBench) -> None:
        await traffic.fill()
        for granule in rng.permutation(8):
            await traffic.cycle(
                None,
                {
                    "append": {
                        "row": 2,
                        "bank": 0,
                        "key": 0,
                        "granule": int(granule),
                        "line": lines[granule],
                    }
                },
            )
        await traffic.cycle((2, 0), {})
        await traffic.drain()

    traffic.bench.run(bench)
    assert traffic.rows_read == 1
    for c in range(8):
        expected = pack(*((lines[g] >> (16 * c), 16) for g in range(8)), (SCALE_ONE, SCALE_BITS))
        assert model.words[2, c] == expected


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_emits_verilog(name: str) -> None:
    tile = preset(name).tile
    text = verilog.convert(KvSram(tile, META_BITS), platform=VerilogPlatform(), name="kv_sram")
    assert text.count("jalapeno_sram_1r1w_") == tile.cols


def test_rejects_bad_parameters() -> None:
    with pytest.raises(ValueError, match="cols must be"):
        KvSram(dataclasses.replace(preset("tiny").tile, hbm_port_bytes=128), META_BITS)
    with pytest.raises(ValueError, match="meta_bits must be"):
        KvSram(preset("tiny").tile, 0)
