# SPDX-License-Identifier: Apache-2.0
"""Router: random traffic on all ports against a model, latency, throughput, fairness, channels."""

import numpy as np
import pytest

from hw.noc_flit import LINK_DEPTH, Channel, LinkReceiver
from hw.router import Router, Side, WormholeMerge
from hw.verilog import emit
from tests.flat_bench import FlatBench, pack
from tests.noc_bench import LinkDriver, LinkMonitor, fields, head, number, packet, run_cycles
from tests.simulators import BOTH

MESH = 3
X = Y = 1


def bench_of() -> FlatBench:
    bench = FlatBench(Router())
    bench.drive["position"] = pack((X, 4), (Y, 4), (MESH, 5), (MESH, 5))
    return bench


def ends(bench: FlatBench, rng, rate=1.0, rates=(1.0, 1.0)):
    """Drivers of the router's inputs and monitors of its outputs, by side."""
    drivers, monitors = {}, {}
    for side in Side:
        name = side.name.lower()
        into, out = ("tx", "rx") if side is Side.LOCAL else ("rx", "tx")
        drivers[side] = LinkDriver(bench, f"{name}__{into}", rng, rate)
        monitors[side] = LinkMonitor(bench, f"{name}__{out}", rng, rates)
    return drivers, monitors


def destinations(side: Side) -> list[tuple[int, int]]:
    """Where packets that come in at `side` may go; from the tile, out of the mesh, too."""
    inside = [(x, y) for x in range(MESH) for y in range(MESH)]
    if side is Side.LOCAL:
        return [*inside, (MESH, 0), (0, MESH), (255, 255), (X + 16, Y)]
    return [
        (x, y)
        for x, y in inside
        if {
            Side.WEST: x >= X,
            Side.EAST: x <= X,
            Side.NORTH: x == X and y >= Y,
            Side.SOUTH: x == X and y <= Y,
        }[side]
    ]


def expected_side(x: int, y: int) -> Side:
    if x >= MESH or y >= MESH:
        return Side.LOCAL
    if x != X:
        return Side.EAST if x > X else Side.WEST
    if y != Y:
        return Side.SOUTH if y > Y else Side.NORTH
    return Side.LOCAL


@BOTH
@pytest.mark.parametrize(
    "rate, rates", [(1.0, (1.0, 1.0)), (0.3, (1.0, 1.0)), (1.0, (0.4, 0.4)), (0.7, (0.2, 0.9))]
)
def test_random_traffic(rate, rates):
    seed = int(np.random.default_rng().integers(1 << 32))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    bench = bench_of()
    drivers, monitors = ends(bench, rng, rate, rates)
    expected: dict[tuple, list] = {}
    total = 0
    for side in Side:
        for channel in Channel:
            for _ in range(30):
                x, y = destinations(side)[rng.integers(len(destinations(side)))]
                # `source_x` says where the packet came in, so that the monitors can tell.
                words = [head(x=x, y=y, source_x=side, address=number(rng, 28))]
                words += [number(rng, 136) for _ in range(int(rng.choice([0, 1, 2, 5, 16])))]
                flits = packet(words)
                drivers[side].waiting[channel] += flits
                expected.setdefault((side, channel, expected_side(x, y)), []).append(flits)
                total += 1

    def count() -> int:
        return sum(len(p) for m in monitors.values() for p in m.packets)

    bench.run(
        lambda b: run_cycles(
            b, [*drivers.values(), *monitors.values()], lambda: count() == total, 20_000
        )
    )
    for output, monitor in monitors.items():
        for channel in Channel:
            for flits in monitor.packets[channel]:
                side = Side(fields(flits[0])["source_x"])
                queue = expected[side, channel, output]  # KeyError: wrong port
                assert queue.pop(0) == flits
    assert total == 300 and not any(expected.values())


@BOTH
def test_two_cycles_per_hop():
    bench = bench_of()
    drivers, monitors = ends(bench, np.random.default_rng(0))
    start = {}

    async def run(b):
        for side in Side:
            for x, y in destinations(side):
                monitor = monitors[expected_side(x, y)]
                for channel in Channel:
                    before = len(monitor.cycles)
                    start[0] = b.cycle
                    drivers[side].waiting[channel] += packet([head(x=x, y=y)])
                    await run_cycles(
                        b,
                        [*drivers.values(), *monitors.values()],
                        lambda m=monitor, n=before: len(m.cycles) > n,
                        20,
                    )
                    assert monitor.cycles[-1] == (start[0] + 2, channel)

    bench.run(run)


@BOTH
def test_one_flit_per_cycle_on_all_links_at_once():
    """Five flows that share no link, of long packets: no cycle is lost on any."""
    bench = bench_of()
    drivers, monitors = ends(bench, np.random.default_rng(0))
    flows = {
        Side.WEST: (2, 1),
        Side.EAST: (0, 1),
        Side.NORTH: (1, 2),
        Side.SOUTH: (1, 0),
        Side.LOCAL: (1, 1),
    }
    count = 0
    for side, (x, y) in flows.items():
        for _ in range(6):
            drivers[side].waiting[Channel.REQUEST] += packet([head(x=x, y=y), *range(1, 17)])
    count = 6 * 17
    bench.run(
        lambda b: run_cycles(
            b,
            [*drivers.values(), *monitors.values()],
            lambda: all(len(m.cycles) == count for m in monitors.values()),
            3 * count,
        )
    )
    for monitor in monitors.values():
        cycles = [c for c, _ in monitor.cycles]
        assert cycles[-1] - cycles[0] == count - 1


@BOTH
@pytest.mark.parametrize("blocked", Channel)
def test_a_blocked_channel_does_not_stop_the_other(blocked):
    other = Channel(1 - blocked)
    bench = bench_of()
    rates = tuple(0.0 if c is blocked else 1.0 for c in Channel)
    drivers, monitors = ends(bench, np.random.default_rng(1), rates=rates)
    for side in (Side.WEST, Side.LOCAL):
        for channel in Channel:
            for _ in range(4):
                drivers[side].waiting[channel] += packet([head(x=2, y=1), *range(10)])
    bench.run(
        lambda b: run_cycles(
            b,
            [*drivers.values(), *monitors.values()],
            lambda: len(monitors[Side.EAST].packets[other]) == 8,
            400,
        )
    )
    assert len(monitors[Side.EAST].held[blocked]) == LINK_DEPTH  # it was really blocked
    assert not monitors[Side.EAST].packets[blocked]


@BOTH
def test_inputs_take_turns():
    bench = bench_of()
    drivers, monitors = ends(bench, np.random.default_rng(2))
    for side in (Side.WEST, Side.EAST, Side.SOUTH, Side.NORTH, Side.LOCAL):
        for _ in range(6):
            drivers[side].waiting[Channel.RESPONSE] += packet([head(x=1, y=1, source_x=side), 1, 2])
    out = monitors[Side.LOCAL].packets[Channel.RESPONSE]
    bench.run(
        lambda b: run_cycles(
            b, [*drivers.values(), *monitors.values()], lambda: len(out) == 30, 400
        )
    )
    order = [fields(flits[0])["source_x"] for flits in out]
    for i in range(0, 25, 5):
        assert len(set(order[i : i + 5])) == 5


def test_parameters():
    with pytest.raises(ValueError, match="depth must be"):
        LinkReceiver(0)
    with pytest.raises(ValueError, match="inputs must be"):
        WormholeMerge(1)


def test_verilog_shares_modules():
    files = emit(Router(), "router")
    assert "noc_link_receiver_4.v" in files
    assert files["router.v"].count("noc_link_receiver_4 ") == len(Side)
