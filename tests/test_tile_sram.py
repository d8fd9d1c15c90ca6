# SPDX-License-Identifier: Apache-2.0
"""Tile SRAM: random traffic of all clients against a model; arbitration, faults, starvation."""

import dataclasses

import numpy as np
import pytest
from amaranth.back import verilog

from hw.config import TileConfig, preset
from hw.emit import VerilogPlatform
from hw.ports import GRANULES, LINE_ADDRESS_BITS, LINE_BITS, SCALE_BITS
from hw.sram_arbiter import SramArbiter
from hw.tile_sram import TileSram
from tests.flat_bench import FlatBench, pack
from tests.simulators import BOTH

TINY = preset("tiny").tile
CONFIGS = {
    "tiny": TINY,
    # Every width differs: 4 activation lines, vectors of 2, beats of 8.
    "wide": TileConfig(
        rows=4,
        cols=8,
        sram_bytes=16 * 1024,
        sram_banks=32,
        kv_bytes=64 * 1024,
        stream_rows=64,
        result_depth=16,
        hbm_port_bytes=64,
        hbm_ports=2,
    ),
    # Four lines per activation read in the widest stride are all banks; a vector and a beat take
    # half of the banks each.
    "narrow": TileConfig(
        rows=2,
        cols=8,
        sram_bytes=2048,
        sram_banks=8,
        kv_bytes=64 * 1024,
        stream_rows=64,
        result_depth=16,
        hbm_port_bytes=32,
        hbm_ports=2,
    ),
}
READ_ONLY = ("activation", "vector_a", "vector_b")


class Model:
    """Lines of the SRAM as numbers of 136 bits, and who may access them in a cycle."""

    def __init__(self, config: TileConfig, patience: int):
        self.config, self.patience = config, patience
        self.lines = {"activation": config.rows, "dma": config.hbm_beat_bytes // 16}
        for name in ("matrix", "vector_a", "vector_b", "vector_out"):
            self.lines[name] = config.vector_lines
        for name in TileSram.SMALL:
            self.lines[name] = 1
        self.memory: dict[int, int] = {}
        self.waited = dict.fromkeys(TileSram.PORTS, 0)

    def addresses(self, name: str, request: dict) -> list[int]:
        step = request.get("step", 0)
        return [request["address"] + (i << step) for i in range(self.lines[name])]

    def inside(self, name: str, request: dict) -> bool:
        return (
            request.get("step", 0) < 3
            and max(self.addresses(name, request)) < self.config.sram_lines
        )

    def banks(self, name: str, request: dict) -> set[int]:
        if not self.inside(name, request):
            return set()
        if name == "vector_out" and not request["write"]:
            return set()
        return {a % self.config.sram_banks for a in self.addresses(name, request)}

    def access(self, name: str, request: dict) -> tuple[bool, int, int, bool]:
        """Effect of a taken request; (valid, data, scales, fault) of its answer."""
        addresses = self.addresses(name, request)
        inside = self.inside(name, request)
        if name not in READ_ONLY and request["write"]:
            for i, address in enumerate(addresses if inside else []):
                line = self.memory[address]
                for granule in range(GRANULES):
                    if request["mask"] >> (i * GRANULES + granule) & 1:
                        field = 0xFFFF << (16 * granule)
                        line = line & ~field | request["data"] >> (LINE_BITS * i) & field
                if request["scale_mask"] >> i & 1:
                    scale = request["scales"] >> (SCALE_BITS * i) & 0xFF
                    line = line & ((1 << LINE_BITS) - 1) | scale << LINE_BITS
                self.memory[address] = line
            return False, 0, 0, not inside
        if name == "vector_out":
            return False, 0, 0, not inside
        words = [self.memory[a] if inside else 0 for a in addresses]
        data = pack(*((w, LINE_BITS) for w in words))
        scales = pack(*((w >> LINE_BITS, SCALE_BITS) for w in words))
        return True, data, scales, not inside

    def check_arbitration(self, waiting: dict[str, dict], taken: set[str], conflicts: int) -> None:
        """Taken requests share no bank; a waiting one meets one that goes before it."""

        def port(name: str) -> str:
            return "small" if name in TileSram.SMALL else name

        banks = {name: self.banks(name, request) for name, request in waiting.items()}
        used = [b for name in taken for b in banks[name]]
        assert len(used) == len(set(used)), f"bank conflict among {taken}"
        urgent = {p for p, n in self.waited.items() if n >= self.patience}
        small_taken = [name for name in taken if port(name) == "small"]
        assert len(small_taken) <= 1
        stuck = {
            port(n) for n in waiting if n not in taken and not (port(n) == "small" and small_taken)
        }
        assert conflicts == sum(1 << i for i, p in enumerate(TileSram.PORTS) if p in stuck)

        def rank(p: str) -> tuple[bool, int]:
            return (p not in urgent, TileSram.PORTS.index(p))

        for name in waiting:
            if port(name) not in stuck or port(name) == "small":
                continue
            first = [
                t for t in taken if banks[t] & banks[name] and rank(port(t)) < rank(port(name))
            ]
            assert first, f"{name} waits for nobody that goes before it"
        for p in TileSram.PORTS:
            self.waited[p] = self.waited[p] + 1 if p in stuck else 0


def payload(model: Model, name: str, request: dict) -> int:
    n = model.lines[name]
    if name == "activation":
        return pack((request["address"], LINE_ADDRESS_BITS), (request["step"], 2))
    return pack(
        (request["address"], LINE_ADDRESS_BITS),
        (request["write"], 1),
        (request["data"], LINE_BITS * n),
        (request["scales"], SCALE_BITS * n),
        (request["mask"], GRANULES * n),
        (request["scale_mask"], n),
    )


def number(rng: np.random.Generator, bits: int) -> int:
    return int.from_bytes(rng.bytes((bits + 7) // 8), "little") & ((1 << bits) - 1)


def random_request(rng: np.random.Generator, model: Model, name: str, write: float) -> dict:
    """A request for one of the first two rows, the last row, or beyond the end."""
    n, banks, lines = model.lines[name], model.config.sram_banks, model.config.sram_lines
    step = int(rng.integers(3)) if name == "activation" else 0
    block = n << step
    start = [0, banks, lines - banks][rng.integers(3)]
    address = start + int(rng.integers(banks // block)) * block + int(rng.integers(1 << step))
    if rng.random() < 0.05:
        address = [lines, (1 << LINE_ADDRESS_BITS) - block, lines * 2][rng.integers(3)]
    request = {"address": address}
    if name == "activation":
        return request | {"step": 3 if rng.random() < 0.02 else step}
    return request | {
        "write": int(rng.random() < write),
        "data": number(rng, LINE_BITS * n),
        "scales": number(rng, SCALE_BITS * n),
        "mask": number(rng, GRANULES * n),
        "scale_mask": number(rng, n),
    }


class Traffic:
    """Runs requests of all clients and checks every port in every cycle."""

    def __init__(self, config: TileConfig, patience: int = 16):
        self.model = Model(config, patience)
        self.bench = FlatBench(TileSram(config, patience))
        self.waiting: dict[str, dict] = {}
        self.answers: list[dict[str, tuple[bool, int, int, bool]]] = [{}] * TileSram.LATENCY
        self.answered = dict.fromkeys(self.model.lines, 0)
        self.faults = dict.fromkeys(self.model.lines, 0)
        self.taken = dict.fromkeys(self.model.lines, 0)
        self.since = dict.fromkeys(self.model.lines, 0)
        self.longest = dict.fromkeys(self.model.lines, 0)
        self.conflicts = 0

    async def cycle(self, new: dict[str, dict]) -> set[str]:
        bench, model = self.bench, self.model
        assert not new.keys() & self.waiting.keys()
        self.waiting |= new
        for name in model.lines:
            bench.drive[f"{name}__request__valid"] = name in self.waiting
            if name in new:
                bench.drive[f"{name}__request__payload"] = payload(model, name, new[name])
        bench.settle()
        expected = self.answers.pop(0)
        for name in model.lines:
            valid, data, scales, fault = expected.get(name, (False, 0, 0, False))
            assert bench[f"{name}__valid"] == valid, (bench.cycle, name)
            assert bench[f"{name}__fault"] == fault, (bench.cycle, name)
            if valid:
                width = LINE_BITS * model.lines[name]
                answer = bench[f"{name}__response"]
                assert answer & ((1 << width) - 1) == data, (bench.cycle, name)
                assert answer >> width == scales, (bench.cycle, name)
            self.answered[name] += valid
            self.faults[name] += fault
        taken = {name for name in self.waiting if bench[f"{name}__request__ready"]}
        model.check_arbitration(self.waiting, taken, bench["conflicts"])
        self.conflicts += bench["conflicts"].bit_count()
        # Reads and writes of one cycle share no bank, so their order does not matter.
        self.answers.append({name: model.access(name, self.waiting[name]) for name in taken})
        for name in self.waiting:
            self.since[name] += 1
            self.longest[name] = max(self.longest[name], self.since[name] - 1)
        for name in taken:
            del self.waiting[name]
            self.taken[name] += 1
            self.since[name] = 0
        await bench.tick()
        return taken

    async def fill(self, rng: np.random.Generator, rows: list[int]) -> None:
        """Write rows whole through the DMA port."""
        n, banks = self.model.lines["dma"], self.model.config.sram_banks
        for row in rows:
            for address in range(row * banks, (row + 1) * banks, n):
                for line in range(address, address + n):
                    self.model.memory[line] = 0
                full = {"mask": (1 << GRANULES * n) - 1, "scale_mask": (1 << n) - 1}
                request = {
                    "address": address,
                    "write": 1,
                    "data": number(rng, LINE_BITS * n),
                    "scales": number(rng, SCALE_BITS * n),
                }
                assert "dma" in await self.cycle({"dma": request | full})

    async def drain(self) -> None:
        for _ in range(200):
            if not self.waiting and not any(self.answers):
                return
            await self.cycle({})
        raise AssertionError(f"{self.waiting} never served")


def edge_rows(config: TileConfig) -> list[int]:
    return [0, 1, config.sram_lines // config.sram_banks - 1]


@BOTH
@pytest.mark.parametrize("load", [0.15, 1.0])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in ("tiny", "wide") else [pytest.mark.slow]) for n in CONFIGS],
)
def test_random_traffic(name: str, load: float) -> None:
    seed = 7
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    config = CONFIGS[name]
    traffic = Traffic(config)

    async def bench(_: FlatBench) -> None:
        await traffic.fill(rng, edge_rows(config))
        for _ in range(500):
            new = {
                n: random_request(rng, traffic.model, n, 0.9 if n == "vector_out" else 0.4)
                for n in traffic.model.lines
                if n not in traffic.waiting and rng.random() < load
            }
            await traffic.cycle(new)
        await traffic.drain()

    traffic.bench.run(bench)
    least = 10 if load == 1.0 else 20
    assert all(count >= least for count in traffic.taken.values()), traffic.taken
    assert all(n == "vector_out" or count for n, count in traffic.answered.items())
    assert sum(traffic.faults.values()) > 10
    assert traffic.conflicts > 20


@BOTH
def test_starvation_bound() -> None:
    """All clients ask for one bank in every cycle: none waits longer than is promised."""
    patience = 16
    rng = np.random.default_rng(3)
    traffic = Traffic(TINY, patience)

    async def bench(_: FlatBench) -> None:
        await traffic.fill(rng, edge_rows(TINY))
        for _ in range(900):
            new = {}
            for n in traffic.model.lines:
                if n not in traffic.waiting:
                    request = random_request(rng, traffic.model, n, 0.5)
                    new[n] = request | {"address": 0, **({"write": 1} if n == "vector_out" else {})}
                    if n == "activation":
                        new[n]["step"] = 0
            assert len(await traffic.cycle(new)) == 1
        await traffic.drain()

    traffic.bench.run(bench)
    bound = patience + len(TileSram.PORTS) - 1
    for n, longest in traffic.longest.items():
        limit = (bound + 1) * len(TileSram.SMALL) if n in TileSram.SMALL else bound
        assert 0 < longest <= limit, (n, longest)
    assert traffic.longest["dma"] >= patience


@BOTH
def test_full_rate_without_conflicts() -> None:
    """Ports on different banks take a request each in every cycle."""
    rng = np.random.default_rng(5)
    traffic = Traffic(TINY)
    lanes = {
        "activation": 0,
        "matrix": 4,
        "vector_out": 5,
        "vector_a": 6,
        "vector_b": 7,
        "dma": 8,
        "host": 9,
    }

    async def bench(_: FlatBench) -> None:
        await traffic.fill(rng, edge_rows(TINY))
        for i in range(40):
            new = {}
            for n, bank in lanes.items():
                request = random_request(rng, traffic.model, n, i % 2)
                new[n] = request | {"address": bank + 16 * (i % 2)}
                if n == "activation":
                    new[n]["step"] = i % 2
                if n == "vector_out":
                    new[n]["write"] = 1
            assert await traffic.cycle(new) == set(lanes)
        await traffic.drain()

    traffic.bench.run(bench)
    assert all(traffic.taken[n] >= 40 for n in lanes)
    assert traffic.conflicts == 0


@BOTH
def test_small_clients_take_turns() -> None:
    rng = np.random.default_rng(6)
    traffic = Traffic(TINY)

    async def bench(_: FlatBench) -> None:
        await traffic.fill(rng, edge_rows(TINY))
        for _ in range(10 * len(TileSram.SMALL)):
            await traffic.cycle(
                {
                    n: random_request(rng, traffic.model, n, 0.5)
                    for n in TileSram.SMALL
                    if n not in traffic.waiting
                }
            )
        await traffic.drain()

    traffic.bench.run(bench)
    served = [traffic.taken[n] for n in TileSram.SMALL]
    assert min(served) >= 10 and max(served) - min(served) <= 1
    assert traffic.conflicts == 0


@BOTH
def test_waiting_request_is_held_at_the_shared_port() -> None:
    """A client that comes later does not replace the request that already waits."""
    rng = np.random.default_rng(8)
    count, latency = 3, 2
    flat = FlatBench(SramArbiter(count, latency))
    seen: list[int] = []

    async def bench(_: FlatBench) -> None:
        waiting: set[int] = set()
        offered = None
        for _ in range(300):
            waiting |= {i for i in range(count) if rng.random() < 0.2}
            for i in range(count):
                flat.drive[f"clients__{i}__request__valid"] = i in waiting
                flat.drive[f"clients__{i}__request__payload"] = i
            flat.drive["sram__request__ready"] = ready = rng.random() < 0.3
            flat.settle()
            assert flat["sram__request__valid"] == bool(waiting)
            if waiting:
                assert offered is None or flat["sram__request__payload"] == offered
                offered = flat["sram__request__payload"]
            taken = [i for i in waiting if flat[f"clients__{i}__request__ready"]]
            assert taken == ([offered] if ready and waiting else [])
            if taken:
                seen.append(taken[0])
                waiting.discard(taken[0])
                offered = None
            await flat.tick()

    flat.run(bench)
    assert min(seen.count(i) for i in range(count)) > 10


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_emits_verilog_with_one_bank_module(name: str) -> None:
    platform = VerilogPlatform()
    config = preset(name).tile
    text = verilog.convert(TileSram(config), platform=platform, name="tile_sram")
    (module,) = platform.components
    assert text.count(f"{module} ") == config.sram_banks
    bank = verilog.convert(platform.components[module], platform=VerilogPlatform(), name=module)
    assert bank.count("jalapeno_sram_1rw") == 1


def test_rejects_bad_parameters() -> None:
    with pytest.raises(ValueError, match="clients must be"):
        SramArbiter(0, 2)
    with pytest.raises(ValueError, match="latency must be"):
        SramArbiter(2, 0)
    with pytest.raises(ValueError, match="patience must be"):
        TileSram(TINY, patience=0)
    with pytest.raises(ValueError, match="sram_banks must be"):
        TileSram(dataclasses.replace(TINY, rows=2, sram_banks=8, hbm_ports=2, hbm_port_bytes=128))
