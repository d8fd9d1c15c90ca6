# SPDX-License-Identifier: Apache-2.0
"""Network port: requests of every kind from the network; packets, rate and errors of SEND."""

import numpy as np
import pytest

from hw.config import preset
from hw.isa import SEMAPHORES, SEND, Status
from hw.noc_flit import PACKET_LINES, Channel, Kind
from hw.noc_port import NocPort
from hw.semaphores import FIRST_REMOTE
from hw.verilog import emit
from tests.flat_bench import FlatBench, pack
from tests.noc_bench import (
    CommandDriver,
    LinkDriver,
    LinkMonitor,
    MemoryModel,
    ack,
    fields,
    head,
    number,
    packet,
    run_cycles,
)
from tests.simulators import BOTH

CONFIG = preset("tiny").tile
LINES = CONFIG.sram_lines
OPERANDS = [(op.name, op.width) for op in SEND.operands]
X, Y, MESH_X, MESH_Y = 1, 2, 3, 4


class Bench:
    """One port; the test is the network."""

    def __init__(self, seed: int, rate: float = 1.0):
        self.rng = np.random.default_rng(seed)
        self.bench = FlatBench(NocPort(CONFIG))
        self.bench.drive["position"] = pack((X, 4), (Y, 4), (MESH_X, 5), (MESH_Y, 5))
        self.memory = MemoryModel(self.bench, ["source", "target"], LINES, self.rng, rate)
        self.driver = LinkDriver(self.bench, "network__rx", self.rng, rate)
        self.monitor = LinkMonitor(self.bench, "network__tx", self.rng, (rate, rate))
        self.commands = CommandDriver(self.bench, "control", OPERANDS, self.rng, rate)
        self.parts = [self.memory, self.driver, self.monitor, self.commands, self]
        self.posts: list[int] = []
        self.answer = None  # error of a request packet that the port sent, by its head
        self.answered = 0

    def drive(self) -> None:
        requests = self.monitor.packets[Channel.REQUEST]
        while self.answer is not None and self.answered < len(requests):
            request = fields(requests[self.answered][0])
            self.answered += 1
            self.driver.waiting[Channel.RESPONSE] += packet(
                [head(**ack(request, self.answer(request)))]
            )

    def sample(self) -> None:
        post = self.bench["post"]
        if post >> 5:
            self.posts.append(post & 31)

    def run(self, until, limit: int) -> None:
        self.bench.run(lambda b: run_cycles(b, self.parts, until, limit))


def request(rng: np.random.Generator, model: list[int], posts: list[int]):
    """A random request packet, its effect on the model, and its response's flits."""
    kind = int(rng.choice([Kind.WRITE, Kind.WRITE, Kind.READ, Kind.SEMAPHORE, 3, Kind.ACK]))
    sent = {
        "x": X,
        "y": Y,
        "source_x": number(rng, 8),
        "source_y": number(rng, 8),
        "kind": kind,
        "tag": number(rng, 2),
        "semaphore": number(rng, 5),
        "count": number(rng, 5) % 19,
        "address": int(rng.choice([0, 40, LINES - 8, LINES + 3, (1 << 28) - 4]))
        + int(rng.integers(4)),
    }
    body: list[int] = []
    if kind not in (Kind.READ, Kind.SEMAPHORE):
        body = [number(rng, 136) for _ in range(int(rng.integers(1, PACKET_LINES + 1)))]
    if rng.random() < 0.1:
        sent["x"] += int(rng.integers(1, 100))
    error, lines = Status.RUNNING, []
    if sent["x"] != X:
        error = Status.NO_DESTINATION
    elif kind == Kind.WRITE:
        for i, line in enumerate(body):
            address = (sent["address"] + i) & ((1 << 28) - 1)
            if address < LINES:
                model[address] = line
            else:
                error = Status.ADDRESS_RANGE
        # Real senders do not wrap around the end of the address space.
        if sent["address"] + len(body) > 1 << 28:
            return None
    elif kind == Kind.READ:
        if not 1 <= sent["count"] <= PACKET_LINES:
            error = Status.ILLEGAL_COMMAND
        elif sent["address"] + sent["count"] > LINES:
            error = Status.ADDRESS_RANGE
        else:
            lines = [model[sent["address"] + i] for i in range(sent["count"])]
    elif kind == Kind.SEMAPHORE:
        if sent["semaphore"] < FIRST_REMOTE:
            error = Status.ILLEGAL_COMMAND
        else:
            posts.append(sent["semaphore"])
    else:
        error = Status.ILLEGAL_COMMAND
    answer = ack(sent, error) | {"source_x": X, "source_y": Y, "count": sent["count"]}
    if kind == Kind.READ and error is Status.RUNNING:
        answer["kind"] = Kind.READ_DATA
    return packet([head(**sent), *body]), packet([head(**answer), *lines])


@BOTH
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_serves_random_requests(rate):
    seed = int(np.random.default_rng().integers(1 << 32))
    print("seed", seed)
    bench = Bench(seed, rate)
    model, posts, expected = list(bench.memory.lines), [], []
    while len(expected) < 300:
        before = list(model)
        made = request(bench.rng, model, posts)
        if made is None:
            model = before
            continue
        bench.driver.waiting[Channel.REQUEST] += made[0]
        expected.append(made[1])
    got = bench.monitor.packets[Channel.RESPONSE]
    bench.run(lambda: len(got) == len(expected), 20_000)
    assert got == expected
    assert bench.posts == posts and posts
    assert bench.memory.lines == model
    statuses = {fields(flits[0])["status"] for flits in got}
    assert statuses == {
        Status.RUNNING,
        Status.ILLEGAL_COMMAND,
        Status.ADDRESS_RANGE,
        Status.NO_DESTINATION,
    }


@BOTH
def test_writes_at_one_flit_per_cycle():
    bench = Bench(1)
    for i in range(20):
        bench.driver.waiting[Channel.REQUEST] += packet(
            [head(x=X, y=Y, kind=Kind.WRITE, address=16 * i), *range(1, 17)]
        )
    got = bench.monitor.packets[Channel.RESPONSE]
    bench.run(lambda: len(got) == 20, 20 * 17 + 12)


def expected_packets(command: dict[str, int], memory: list[int], tag: int) -> list[list[int]]:
    packets = []
    for row in range(command["rows"]):
        for first in range(0, command["lines"], PACKET_LINES):
            count = min(PACKET_LINES, command["lines"] - first)
            source = command["src_addr"] // 16 + row * command["src_stride"] + first
            target = command["dst_addr"] // 16 + row * command["dst_stride"] + first
            packets.append(
                packet(
                    [
                        head(
                            x=command["x"],
                            y=command["y"],
                            source_x=X,
                            source_y=Y,
                            kind=Kind.WRITE,
                            tag=tag,
                            semaphore=command["semaphore"],
                            count=count,
                            address=target,
                        ),
                        *memory[source : source + count],
                    ]
                )
            )
    return packets


@BOTH
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_sends_packets(rate):
    seed = int(np.random.default_rng().integers(1 << 32))
    print("seed", seed)
    bench = Bench(seed, rate)
    bench.answer = lambda request: Status.RUNNING
    rng, expected = bench.rng, []
    for i in range(12):
        lines = int(rng.choice([1, 2, 15, 16, 17, 40]))
        command = {
            "x": int(rng.integers(MESH_X)),
            "y": int(rng.integers(MESH_Y)),
            "src_addr": 16 * int(rng.integers(1000)),
            "dst_addr": 16 * int(rng.integers(1000)),
            "src_stride": int(rng.integers(60)),
            "dst_stride": int(rng.integers(60)),
            "lines": lines,
            "rows": int(rng.choice([1, 2, 5])),
            "semaphore": int(rng.integers(FIRST_REMOTE, SEMAPHORES)),
            "post": int(rng.integers(2)),
        }
        bench.commands.waiting.append(command)
        expected += expected_packets(command, bench.memory.lines, i % 4)
        if command["post"]:
            expected.append(None)  # a semaphore packet
    bench.run(lambda: bench.commands.idle and not bench.bench["active"], 10_000)
    assert bench.commands.done == [Status.RUNNING] * 12
    got = bench.monitor.packets[Channel.REQUEST]
    assert len(got) == len(expected)
    for flits, want in zip(got, expected, strict=True):
        if want is None:
            assert len(flits) == 1 and fields(flits[0])["kind"] == Kind.SEMAPHORE
        else:
            assert flits == want


@BOTH
@pytest.mark.parametrize("lines, rows", [(160, 2), (1, 100)])
def test_sends_a_flit_per_cycle(lines, rows):
    bench = Bench(5)
    bench.answer = lambda request: Status.RUNNING
    for i in range(2):
        bench.commands.waiting.append(
            {
                "src_stride": lines,
                "dst_stride": lines,
                "lines": lines,
                "rows": rows,
                "src_addr": 16 * 100 * i,
            }
        )
    bench.run(lambda: bench.commands.idle, 3000)
    cycles = [c for c, channel in bench.monitor.cycles if channel == Channel.REQUEST]
    flits = 2 * rows * (lines + -(-lines // PACKET_LINES))
    assert len(cycles) == flits
    assert cycles[-1] - cycles[0] <= flits + 8  # a few cycles between the two commands


GOOD = {
    "x": 0,
    "y": 3,
    "src_addr": 64,
    "dst_addr": 128,
    "lines": 20,
    "rows": 2,
    "src_stride": 20,
    "dst_stride": 20,
    "semaphore": SEMAPHORES - 1,
    "post": 1,
}


@BOTH
@pytest.mark.parametrize(
    "wrong, error, flits",
    [
        ({"lines": 0}, Status.ILLEGAL_COMMAND, 0),
        ({"rows": 0}, Status.ILLEGAL_COMMAND, 0),
        ({"src_addr": 8}, Status.ILLEGAL_COMMAND, 0),
        ({"dst_addr": 4}, Status.ILLEGAL_COMMAND, 0),
        ({"semaphore": FIRST_REMOTE - 1}, Status.ILLEGAL_COMMAND, 0),
        ({"x": MESH_X}, Status.NO_DESTINATION, 0),
        ({"x": 16}, Status.NO_DESTINATION, 0),
        ({"y": MESH_Y}, Status.NO_DESTINATION, 0),
        ({"y": 255}, Status.NO_DESTINATION, 0),
        ({"src_addr": 16 * LINES}, Status.ADDRESS_RANGE, 0),
        ({"dst_addr": (1 << 32) - 16}, Status.ADDRESS_RANGE, 0),
        ({"dst_addr": 16 * (LINES - 39)}, Status.ADDRESS_RANGE, 22 + 17),
        ({"src_stride": 0xFFFF}, Status.ADDRESS_RANGE, 22),
    ],
    ids=str,
)
def test_errors_found_here(wrong, error, flits):
    """The command fails, posts nothing, and the next one is done."""
    bench = Bench(7)
    bench.answer = lambda request: Status.RUNNING
    bench.commands.waiting += [GOOD | wrong, GOOD]
    bench.run(lambda: bench.commands.idle, 1000)
    assert bench.commands.done == [error, Status.RUNNING]
    got = bench.monitor.packets[Channel.REQUEST]
    first = [p for p in got if fields(p[0])["tag"] == 0]
    assert sum(map(len, first)) == flits
    assert [fields(p[0])["tag"] for p in got if fields(p[0])["kind"] == Kind.SEMAPHORE] == [1]


@BOTH
@pytest.mark.parametrize(
    "error", [Status.ADDRESS_RANGE, Status.NO_DESTINATION, Status.ILLEGAL_COMMAND]
)
def test_errors_told_by_the_destination(error):
    """The first error wins; packets and the semaphore that are not out yet are not sent."""
    bench = Bench(8)
    bench.answer = lambda request: (
        error if request["tag"] == 0 and request["address"] >= 24 else Status.RUNNING
    )
    bench.commands.waiting += [GOOD | {"rows": 20}, GOOD]
    bench.run(lambda: bench.commands.idle, 2000)
    assert bench.commands.done == [error, Status.RUNNING]
    got = [fields(p[0]) for p in bench.monitor.packets[Channel.REQUEST]]
    assert len([p for p in got if p["tag"] == 0]) < 40
    assert [p["tag"] for p in got if p["kind"] == Kind.SEMAPHORE] == [1]


@BOTH
def test_waits_for_answers():
    bench = Bench(9)
    bench.commands.waiting.append(GOOD)
    limit = 300
    bench.run(lambda: bench.bench.cycle == limit, limit + 1)
    assert not bench.commands.done and bench.bench["active"]


def test_verilog():
    assert sorted(emit(NocPort(CONFIG), "noc_port")) == ["noc_port.v"]
