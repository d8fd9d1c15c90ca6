# SPDX-License-Identifier: Apache-2.0
"""cocotb bench of `CellBank`: vectors [cycles, bytes] in, results [cycles, cells] out, one row
per cycle.
"""

import cocotb
import numpy as np
from cocotb.triggers import RisingEdge

from tb import bench


@cocotb.test()
async def vectors(dut):
    latency = bench.parameters()["latency"]
    words = bench.arrays()["vectors"]
    await bench.start(dut)
    clk, vector, result = dut.clk, dut.vector, dut.result
    size = len(result.value) // 8
    found = bytearray()
    for t in range(len(words) + latency + 1):
        await RisingEdge(clk)
        if t > latency:
            found += result.value.to_unsigned().to_bytes(size, "little")
        if t < len(words):
            vector.value = int.from_bytes(words[t].tobytes(), "little")
    results = np.frombuffer(bytes(found), np.uint32).reshape(len(words), -1)
    bench.report({"cycles": len(words)}, {"results": results})
