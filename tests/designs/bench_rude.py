# SPDX-License-Identifier: Apache-2.0
"""cocotb bench of `Rude`: the protocol monitor must see what it does wrong, and nothing else."""

import cocotb
from cocotb.triggers import ClockCycles

from tb import bench
from tb.agents import ProtocolMonitor, Scoreboard, StreamDriver, StreamMonitor


@cocotb.test()
async def watched(dut):
    dut.fault.value = bench.parameters()["fault"]
    board = Scoreboard("output")
    StreamDriver(dut, "input").put(*range(40))
    board.expect(*range(40))
    StreamMonitor(dut, "output", stall=0.7, rng=bench.rng(), callback=board.got)
    into, out = ProtocolMonitor(dut, "input"), ProtocolMonitor(dut, "output")
    await bench.start(dut)
    await ClockCycles(dut.clk, 400)
    into.check()
    bench.report(
        {
            "violations": [v.what for v in out.violations],
            "count": len(out.violations),
            "handovers": out.handovers,
        }
        | board.counts()
    )


@cocotb.test()
async def fails(dut):
    """A scoreboard that compared nothing fails."""
    await bench.start(dut)
    if bench.parameters()["empty"]:
        Scoreboard("nothing").check()
