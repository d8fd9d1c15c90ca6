# SPDX-License-Identifier: Apache-2.0
"""cocotb bench of `Pair`: every word comes out with its tag raised by two."""

import cocotb

from tb import bench
from tb.agents import ProtocolMonitor, Scoreboard, StreamDriver, StreamMonitor
from tests.designs.buffers import WORD


@cocotb.test()
async def passes(dut):
    parameters = bench.parameters()
    rng = bench.rng()
    board = Scoreboard("output")
    dut.look.value = 0
    driver = StreamDriver(dut, "input", WORD, idle=parameters["idle"], rng=bench.rng(1))
    monitor = StreamMonitor(
        dut, "output", WORD, stall=parameters["stall"], rng=bench.rng(2), callback=board.got
    )
    heard = StreamMonitor(dut, "output", WORD, stall=None)
    protocols = [ProtocolMonitor(dut, "input"), ProtocolMonitor(dut, "output")]
    await bench.start(dut)
    words = [
        {"tag": int(rng.integers(16)), "value": rng.integers(64, size=2).tolist()}
        for _ in range(parameters["words"])
    ]
    board.expect(*({"tag": (w["tag"] + 2) % 16, "value": w["value"]} for w in words))
    first = bench.cycle()
    await driver.send(words)
    await monitor.wait_for(len(words))
    board.check()
    for protocol in protocols:
        protocol.check()
    assert heard.words == monitor.words and driver.sent == len(words)
    bench.report(
        board.counts()
        | {
            "cycles": bench.cycle() - first,
            "waits": protocols[1].waits,
            "draw": int(rng.integers(1 << 30)),
        },
        {"tags": [w["tag"] for w in monitor.words], "given": bench.arrays()["given"]},
    )
    bench.report({"again": 1})


@cocotb.test()
async def power_up(dut):
    """Registers nobody resets do not power up as zero; the data of a build is what it was given."""
    dut.look.value = 3
    dut.input__valid.value = 0
    await bench.start(dut)
    bench.report({"held": int(dut.output__payload.value), "seen": int(dut.seen.value)})
