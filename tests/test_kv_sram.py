# SPDX-License-Identifier: Apache-2.0
"""KV SRAM: skew of the array's reads, writers and their order, host reads, errors, against a model
of code words.
"""

import dataclasses
import re

import numpy as np
import pytest
from amaranth.back import verilog

from golden.ecc import CHECK_BITS, CODE_BITS, COLUMNS, DATA_BITS, decode, encode, to_bits, to_int
from hw.config import TileConfig, preset
from hw.emit import VerilogPlatform
from hw.kv_sram import KvSram
from hw.kv_update import ROW_BITS, KvUpdate, append_width
from hw.ports import LINE_ADDRESS_BITS, LINE_BITS, SCALE_BITS
from tests.flat_bench import FlatBench, pack
from tests.simulators import BOTH, cases

META_BITS = 5
WORD_BITS = LINE_BITS + SCALE_BITS
COVERED = [sum(1 << b for b in range(DATA_BITS) if COLUMNS[b] >> i & 1) for i in range(CHECK_BITS)]


def config(cols: int, beat_lines: int) -> TileConfig:
    """A KV SRAM of 16 rows with `beat_lines` lines in an HBM beat."""
    return dataclasses.replace(
        preset("tiny").tile,
        cols=cols,
        result_depth=max(16, 2 * cols),
        sram_banks=max(16, cols),
        kv_bytes=cols * 256,
        stream_rows=8,
        hbm_port_bytes=8 * beat_lines if beat_lines > 1 else 16,
        hbm_ports=2 if beat_lines > 1 else 1,
    )


CONFIGS = {  # a beat is one line, half a row, a whole row
    "4 banks, 1 line": config(4, 1),
    "8 banks, 4 lines": config(8, 4),
    "16 banks, 16 lines": config(16, 16),
    "32 banks, 16 lines": config(32, 16),
}


def number(rng: np.random.Generator, bits: int) -> int:
    return int.from_bytes(rng.bytes((bits + 7) // 8), "little") & ((1 << bits) - 1)


def code_of(word: int) -> int:
    """Code word of a line and its scale."""
    check = sum(((word & c).bit_count() & 1) << i for i, c in enumerate(COVERED))
    return word | check << DATA_BITS


@dataclasses.dataclass
class Append:
    """An append under way: what its banks gave, and cycles until it is written."""

    write: dict
    old: dict[int, tuple[int, bool]]  # word and whether it was not correctable, by bank
    left: int = KvUpdate.LATENCY


class Model:
    """Code words by (row, bank); the writers' payloads are dicts of fields."""

    def __init__(self, tile: TileConfig, rng: np.random.Generator):
        self.rows, self.cols, self.rng = tile.kv_rows, tile.cols, rng
        self.lines = {
            "stream_write": tile.hbm_beat_bytes // 16,
            "dma_write": tile.hbm_beat_bytes // 16,
            "host_write": 1,
        }
        self.codes: dict[tuple[int, int], int] = {}
        self.decoded: dict[int, tuple[int, bool, bool]] = {}

    def read(self, row: int, bank: int) -> tuple[int, bool, bool]:
        """(word, corrected, not correctable)."""
        code = self.codes[row, bank]
        if code not in self.decoded:
            word, corrected, double = decode(to_bits(code, CODE_BITS))
            self.decoded[code] = to_int(word), bool(corrected), bool(double)
        return self.decoded[code]

    def random_write(self, name: str) -> dict:
        rng = self.rng
        if name == "append":
            eight, key = int(rng.integers(2)), int(rng.integers(2))
            width = 1 if key else append_width(self.cols, bool(eight))
            return {
                "row": int(rng.integers(self.rows)),
                "bank": width * int(rng.integers(self.cols // width)),
                "key": key,
                "eight": eight,
                "fresh": int(rng.integers(2)),
                "place": int(rng.integers(16 if eight else 8)),
                "line": number(rng, LINE_BITS),
                "scale": number(rng, SCALE_BITS),
            }
        n = self.lines[name]
        flips = rng.permutation(CODE_BITS)[: rng.integers(3)] if name == "host_write" else []
        return {
            "address": n * int(rng.integers(self.rows * self.cols // n)),
            "data": number(rng, LINE_BITS * n),
            "scales": number(rng, SCALE_BITS * n),
            "enable": number(rng, n),
            "flips": [int(bit) for bit in flips],
        }

    def payload(self, name: str, write: dict) -> int:
        if name == "append":
            return pack(
                (write["row"], ROW_BITS),
                (write["bank"], self.cols.bit_length() - 1),
                (write["key"], 1),
                (write["eight"], 1),
                (write["fresh"], 1),
                (write["place"], 4),
                (write["line"], LINE_BITS),
                (write["scale"], SCALE_BITS),
            )
        n = self.lines[name]
        return pack(
            (write["address"], LINE_ADDRESS_BITS),
            (write["data"], LINE_BITS * n),
            (write["scales"], SCALE_BITS * n),
            (write["enable"], n),
        )

    def banks(self, append: dict) -> list[int]:
        """Banks that an append writes."""
        width = 1 if append["key"] else append_width(self.cols, bool(append["eight"]))
        return list(range(append["bank"], append["bank"] + width))

    def changes(self, append: dict) -> list[int]:
        """Banks whose lines it reads first."""
        return [] if append["key"] or append["fresh"] else self.banks(append)

    def append(self, append: dict, old: dict[int, tuple[int, bool]]) -> bool:
        """The write of an append; whether an old line was not correctable."""
        scale, bits = append["scale"] << LINE_BITS, 8 if append["eight"] else 16
        mask = (1 << bits) - 1
        for i, bank in enumerate(self.banks(append)):
            word, double = old.get(bank, (0, False))
            if append["key"]:
                line = append["line"]
            else:
                shift = bits * append["place"]
                element = append["line"] >> (bits * i) & mask
                line = word & ((1 << LINE_BITS) - 1) & ~(mask << shift) | element << shift
            if not double:
                self.codes[append["row"], bank] = code_of(line | scale)
        return any(double for _, double in old.values())

    def write(self, name: str, write: dict) -> None:
        for i in range(self.lines[name]):
            if write["enable"] >> i & 1:
                row, bank = divmod(write["address"] + i, self.cols)
                data = write["data"] >> (LINE_BITS * i) & ((1 << LINE_BITS) - 1)
                scale = write["scales"] >> (SCALE_BITS * i) & ((1 << SCALE_BITS) - 1)
                code = code_of(data | scale << LINE_BITS)
                self.codes[row, bank] = code ^ sum(1 << bit for bit in write["flips"])


class Traffic:
    """Drives all ports of a `KvSram` and checks all of its outputs in every cycle.

    A command is (row, meta, columns).
    """

    WRITERS = ("stream_write", "dma_write", "host_write")

    def __init__(self, tile: TileConfig, rng: np.random.Generator):
        self.rng = rng
        self.model = Model(tile, rng)
        self.bench = FlatBench(KvSram(tile, META_BITS))
        self.waiting: dict[str, dict] = {}
        # Commands by age: command a is at bank a now, unless None.
        self.commands: list[tuple[int, int, int] | None] = [None] * (tile.cols + 1)
        # What each column gives, by cycles to come: (meta, word).
        late = KvSram.READ_LATENCY
        self.columns: list[list] = [[None] * tile.cols for _ in range(late + 1)]
        self.counts = [[0, 0] for _ in range(late + 2)]  # corrected, uncorrectable
        self.errors = [False] * (late + 2)
        self.fault = False
        self.had: dict[int, tuple[int, bool]] = {}  # what the append that waits has read
        self.under_way: list[Append] = []
        self.host_address: int | None = None
        self.host_state = -1  # cycles until the answer, -1: none under way
        self.host_answer = 0
        self.taken = dict.fromkeys(("append", *self.WRITERS, "host_read"), 0)
        self.blocked = dict.fromkeys(("append", *self.WRITERS, "host_read"), 0)
        self.rows_read = self.faults = self.answers = 0
        self.append_faults = self.read_errors = 0
        self.seen = [0, 0]

    async def cycle(
        self,
        command: tuple[int, int, int] | None,
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
        column_bits = model.cols.bit_length()
        row, meta, columns = command or (
            number(self.rng, ROW_BITS),
            number(self.rng, META_BITS),
            number(self.rng, column_bits),
        )
        drive["read__command"] = pack(
            (command is not None, 1), (row, ROW_BITS), (columns, column_bits), (meta, META_BITS)
        )
        for name in ("append", *self.WRITERS):
            drive[f"{name}__valid"] = name in self.waiting
            if name in writes:
                drive[f"{name}__payload"] = model.payload(name, writes[name])
        flips = self.waiting.get("host_write", {}).get("flips", [])
        fields = [(bit, 1) for bit in flips] + [(number(self.rng, 8), 0)] * (2 - len(flips))
        drive["inject"] = pack(*(f for bit, on in fields for f in ((bit, 8), (on, 1))))
        drive["host_read__request__valid"] = self.host_address is not None
        drive["host_read__request__payload"] = self.host_address or 0
        drive["host_read__response__ready"] = host_ready
        bench.settle()
        self.commands = [command, *self.commands[:-1]]
        read = self._check_append()
        self._check_reads(read)
        self._check_host(host_ready, read)
        self._check_writes()
        self.fault = command is not None and command[0] >= model.rows
        await bench.tick()

    def _check_append(self) -> list[int]:
        """The append that waits; the banks that it reads in this cycle."""
        model, append = self.model, self.waiting.get("append")
        if append is None:
            return []
        changes = model.changes(append)
        clash = any(
            other.write["row"] == append["row"] and set(model.banks(other.write)) & set(changes)
            for other in self.under_way
        )
        left = [] if clash else [c for c in changes if c not in self.had]
        read = [c for c in left if self.commands[c] is None]
        for c in read:
            word, _, double = model.read(append["row"], c)
            self.had[c] = word, double
        ready = not clash and len(read) == len(left)
        assert self.bench["append__ready"] == ready
        self.taken["append"] += ready
        self.blocked["append"] += not ready
        if ready:
            self.under_way.append(Append(self.waiting.pop("append"), self.had))
            self.had = {}
        for c in read:
            self._found(append["row"], c, True)
        return read

    def _found(self, row: int, bank: int, counts: bool) -> tuple[int, bool, bool]:
        word, corrected, double = self.model.read(row, bank)
        if counts:
            self.counts[-1][0] += corrected
            self.counts[-1][1] += double
        return word, corrected, double

    def _check_reads(self, read: list[int]) -> None:
        bench, model = self.bench, self.model
        width = 1 + META_BITS + WORD_BITS
        assert bench["read_fault"] == self.fault
        self.faults += self.fault
        for c in range(model.cols):
            command = self.commands[c]
            self.columns[-1][c] = None
            if command is not None:
                row, meta, columns = command
                word = 0
                if row < model.rows:
                    word, _, double = self._found(row, c, c < columns)
                    self.errors[-1] |= double and c < columns
                self.columns[-1][c] = meta, word
        for c, expected in enumerate(self.columns[0]):
            column = bench["read__column"] >> (width * c) & ((1 << width) - 1)
            assert column & 1 == (expected is not None), (bench.cycle, c)
            if expected is not None:
                meta, word = expected
                assert column >> 1 == pack((meta, META_BITS), (word, WORD_BITS)), (bench.cycle, c)
                self.rows_read += c == model.cols - 1
        self.columns = [*self.columns[1:], [None] * model.cols]
        found = [bench["corrected"], bench["uncorrectable"]]
        assert found == self.counts[0] and bench["read_error"] == self.errors[0], bench.cycle
        self.seen = [a + b for a, b in zip(self.seen, found, strict=True)]
        self.read_errors += self.errors[0]
        self.counts, self.errors = [*self.counts[1:], [0, 0]], [*self.errors[1:], False]

    def _check_host(self, ready: bool, read: list[int]) -> None:
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
                free = self.commands[bank] is None and bank not in read
                assert bench["host_read__request__ready"] == free
                self.taken["host_read"] += free
                self.blocked["host_read"] += not free
                if free:
                    word, corrected, double = model.read(row, bank)
                    self.host_answer = pack((word, WORD_BITS), (corrected, 1), (double, 1))
                    self.host_address, self.host_state = None, KvSram.READ_LATENCY
                return
        if self.host_address is not None:
            assert not bench["host_read__request__ready"]

    def _check_writes(self) -> None:
        first, fault = True, False
        for append in self.under_way:
            append.left -= 1
        if self.under_way and self.under_way[0].left < 0:
            done = self.under_way.pop(0)
            fault = self.model.append(done.write, done.old)
            first = False
        assert self.bench["append_fault"] == fault
        self.append_faults += fault
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


SLOW = pytest.mark.slow
LOADS = (0.1, 0.5, 1.0)
FAST = [("4 banks, 1 line", 1.0), ("8 banks, 4 lines", 0.5)]


@cases(
    "name, load",
    amaranth=[
        pytest.param(n, load, marks=[] if (n, load) in FAST else SLOW)
        for n in CONFIGS
        for load in LOADS
    ],
    verilator=[(n, load) for n in CONFIGS for load in LOADS],
)
def test_random_traffic(simulator: str, name: str, load: float) -> None:
    """Reads, all writers and the host at once; at full load stalls follow from each other."""
    seed = 11
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    traffic = Traffic(CONFIGS[name], rng)
    model = traffic.model
    # Under full load a writer after the first is served only when all before it pause.
    share = {"append": load, "stream_write": 0.5 * load, "dma_write": load, "host_write": load}

    async def bench(_: FlatBench) -> None:
        await traffic.fill()
        for _ in range(700):
            command = None
            if rng.random() < 0.8 * load:
                row = int(rng.integers(model.rows))
                if rng.random() < 0.05:
                    row = [model.rows, model.rows + 1, (1 << ROW_BITS) - 1][rng.integers(3)]
                command = (row, number(rng, META_BITS), int(rng.integers(model.cols + 1)))
            paused = rng.random() < 0.5  # lets the last writers through
            writes = {
                w: model.random_write(w)
                for w in share
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
        assert waited == {"append", "stream_write", "dma_write", "host_write", "host_read"}


@cases("name", amaranth=[(n,) for n in list(CONFIGS)[:2]], verilator=[(n,) for n in CONFIGS])
def test_read_rate_and_skew(simulator: str, name: str) -> None:
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
        for i in range(model.rows + model.cols + KvSram.READ_LATENCY):
            await traffic.cycle((i, i, model.cols) if i < model.rows else None, {})
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
    given: dict[int, int] = {}

    async def bench(_: FlatBench) -> None:
        await traffic.fill()
        old = [model.read(3, c)[0] for c in range(model.cols)]
        write = model.random_write("stream_write") | {"address": 3 * model.cols, "enable": 0xFFFF}
        await traffic.cycle((3, 1, model.cols), {})
        await traffic.cycle(None, {"stream_write": write})
        new = [model.read(3, c)[0] for c in range(model.cols)]
        for _ in range(model.cols + 2):
            for c, column in enumerate(traffic.columns[0]):
                if column is not None:
                    given[c] = column[1]
            await traffic.cycle(None, {})
        assert old[1] != new[1] and old[2] != new[2]
        assert (given[1], given[2]) == (old[1], new[2])

    traffic.bench.run(bench)
    assert traffic.rows_read == 1


def token(row: int, place: int, line: int, **fields: int) -> dict[str, dict]:
    """Append of value elements to bank 0 and on."""
    write = {"row": row, "bank": 0, "key": 0, "eight": 0, "fresh": 0, "scale": 127}
    return {"append": write | {"place": place, "line": line} | fields}


@BOTH
@pytest.mark.parametrize("eight", [0, 1])
def test_value_append_keeps_the_other_tokens(eight: int) -> None:
    """All tokens of a line, as fast as they go, end up side by side; the first clears the line."""
    rng = np.random.default_rng(14)
    traffic = Traffic(CONFIGS["16 banks, 16 lines"], rng)
    model, bits = traffic.model, 8 if eight else 16
    tokens = 128 // bits
    lines = [number(rng, LINE_BITS) for _ in range(tokens + 1)]

    def expected(count: int, bank: int) -> int:
        fields = [(lines[t] >> bits * bank, bits) for t in range(count)]
        return pack(*fields, (0, LINE_BITS - bits * count), (90, SCALE_BITS))

    async def bench(_: FlatBench) -> None:
        await traffic.fill()
        for t in range(tokens):
            await traffic.cycle(
                None, token(2, t, lines[t], eight=eight, fresh=int(t == 0), scale=90)
            )
            while traffic.waiting:
                await traffic.cycle(None, {})
            if t == 2:
                await traffic.drain()
                assert all(
                    model.read(2, c)[0] == expected(3, c)
                    for c in range(append_width(16, bool(eight)))
                )
        # Again from the line's start, but the others stay.
        await traffic.cycle(None, token(2, 0, lines[tokens], eight=eight, scale=90))
        await traffic.drain()
        lines[0] = lines[tokens]
        await traffic.cycle((2, 0, model.cols), {})
        await traffic.drain()

    traffic.bench.run(bench)
    assert traffic.rows_read == 1 and traffic.taken["append"] == tokens + 1
    for c in range(append_width(16, bool(eight))):
        assert model.read(2, c)[0] == expected(tokens, c)


@BOTH
def test_append_rate_and_wait() -> None:
    """Appends to different lines go one per cycle; under reads each bank is read when it is free.

    With a row read in every other cycle neighbouring banks are free in turn, so an append waits two
    cycles; with one in every cycle it waits until the last has passed the last bank.
    """
    rng = np.random.default_rng(15)
    traffic = Traffic(CONFIGS["8 banks, 4 lines"], rng)
    cycles: list[int] = []

    async def bench(flat: FlatBench) -> None:
        await traffic.fill()
        for period, appends in ((0, 8), (2, 8), (1, 1)):
            busy = 40
            for step in range(-8, 0):
                await traffic.cycle((9, 0, 8) if period and step % period == 0 else None, {})
            start = flat.cycle
            for i in range(appends):
                writes = token(i, 5, number(rng, LINE_BITS))
                while True:
                    step = flat.cycle - start
                    reads = period and step < busy and step % period == 0
                    await traffic.cycle((9, 0, 8) if reads else None, writes)
                    writes = {}
                    if not traffic.waiting:
                        break
            cycles.append(flat.cycle - start)
            await traffic.drain()

    traffic.bench.run(bench)
    assert cycles[0] == 8
    assert cycles[1] == 16
    assert cycles[2] == 40 + 7 + 1


@BOTH
@pytest.mark.parametrize("flips", [0, 1, 2])
def test_flipped_bits(flips: int) -> None:
    """Lines with every number of flipped bits, read by the array, an append and the host.

    The array's count only in used columns. An append changes a line that can be corrected, which
    mends it, and leaves one that cannot.
    """
    rng = np.random.default_rng(16 + flips)
    traffic = Traffic(CONFIGS["8 banks, 4 lines"], rng)
    model = traffic.model
    bits = rng.permutation(CODE_BITS)[:16].reshape(8, 2)

    async def bench(_: FlatBench) -> None:
        await traffic.fill()
        for c in range(8):
            write = model.random_write("host_write") | {"address": 8 + c, "enable": 1}
            write |= {"flips": bits[c, :flips].tolist()}
            await traffic.cycle(None, {"host_write": write})
        for columns in (0, 5, 8):
            await traffic.cycle((1, columns, columns), {})
            await traffic.drain()
        found = [0, 0, 0]
        found[flips] = 13
        assert traffic.seen == found[1:] and traffic.read_errors == (13 if flips == 2 else 0)
        for c in range(8):
            await traffic.cycle(None, {}, 8 + c)
            await traffic.drain()
        assert traffic.seen == found[1:]
        await traffic.cycle(None, token(1, 3, number(rng, LINE_BITS)))
        await traffic.drain()
        found[flips] = 21
        assert traffic.seen == found[1:] and traffic.append_faults == (flips == 2)
        await traffic.cycle((1, 0, 8), {})
        await traffic.drain()
        found[2] += 8 if flips == 2 else 0
        assert traffic.seen == found[1:]
        await traffic.cycle(None, token(1, 3, number(rng, LINE_BITS), fresh=1))
        await traffic.drain()
        await traffic.cycle((1, 0, 8), {})
        await traffic.drain()
        assert traffic.seen == found[1:]

    traffic.bench.run(bench)
    assert traffic.rows_read == 5 and traffic.answers == 8


def test_the_model_codes_as_golden_does() -> None:
    rng = np.random.default_rng(17)
    for _ in range(50):
        word = number(rng, DATA_BITS)
        assert code_of(word) == to_int(encode(to_bits(word, DATA_BITS)))


@pytest.mark.parametrize("name", ["tiny", pytest.param("small", marks=SLOW)])
def test_emits_verilog(name: str) -> None:
    tile = preset(name).tile
    text = verilog.convert(KvSram(tile, META_BITS), platform=VerilogPlatform(), name="kv_sram")
    assert len(re.findall(r"^  kv_bank_\d+ ", text, re.MULTILINE)) == tile.cols


def test_rejects_bad_parameters() -> None:
    with pytest.raises(ValueError, match="cols must be"):
        KvSram(dataclasses.replace(preset("tiny").tile, hbm_port_bytes=128), META_BITS)
    with pytest.raises(ValueError, match="meta_bits must be"):
        KvSram(preset("tiny").tile, 0)
