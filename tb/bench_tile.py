# SPDX-License-Identifier: Apache-2.0
"""cocotb bench of the simulated system: loads tiles, runs their programs, reads memories back.

Parameters: `runs`, a list of {load: [first, count] per tile, start: beat per tile or null, limit:
cycles, reads: [[tile, host address, lines], ...], pick: [tile, from, to] or null, damage: [[tile,
KV SRAM line, bits], ...]}; `stall` (of 256); `err` [lo, hi]; `trace`, whether the tiles' commands
are recorded. It reports per run the status of each tile with its counters of KV SRAM errors, its
other counters, the lines read as arrays `read_<run>_<index>`, and `trace`, the text of each tile's
record.

A run with `pick` takes the first word of the line at host address `from`, which an earlier run has
left there, and writes the lines of that index of the array `rows` [index, lines, 16] from host
address `to` on: the host of a language model, which gives the tile the embedding of the token that
the tile has chosen.

`damage` writes a line as it is, but with one or two bits of its code word flipped.
"""

from pathlib import Path

import cocotb
import numpy as np
from cocotb.triggers import ClockCycles, RisingEdge, with_timeout

from hw.host_adapter import COUNTER_LINE, KV_LINE, REGION_LO, Region
from hw.isa import COUNTED, Activity, Status
from tb import bench

SILENCE = 100_000  # cycles after its limit in which a tile must have stopped


class System:
    """The ports of `simulation_top`."""

    def __init__(self, dut):
        self.dut = dut
        self.tiles = len(dut.running)

    async def load(self, tile: int, first: int, count: int) -> None:
        """Writes words of the host file into the tile."""
        if not count:
            return
        dut = self.dut
        dut.load_first.value, dut.load_count.value = first, count
        dut.load_go.value = 1 << tile
        await RisingEdge(dut.clk)
        dut.load_go.value = 0
        await RisingEdge(dut.clk)
        await RisingEdge(dut.clk)
        while int(dut.load_busy.value):
            await with_timeout(dut.load_busy.value_change, 4 * count + SILENCE, "ns")
        await ClockCycles(dut.clk, 8)  # the last response

    async def access(
        self, tile: int, address: int, data: int | None = None, scale: int = 127
    ) -> tuple[int, int]:
        """One host request: (line, scale) of a read, or a write of `data`."""
        dut = self.dut
        dut.host_write.value = int(data is not None)
        dut.host_address.value, dut.host_data.value = address, data or 0
        dut.host_scale.value = scale
        dut.host_valid.value = 1 << tile
        while True:
            await RisingEdge(dut.clk)
            if int(dut.host_ready.value) >> tile & 1:
                break
        dut.host_valid.value = 0
        while True:
            await RisingEdge(dut.clk)
            if int(dut.response_valid.value) >> tile & 1:
                break
        answer = int(dut.response.value) >> 137 * tile
        assert not answer >> 136 & 1, f"host address {address:#x} of tile {tile} is not mapped"
        return answer & ((1 << 128) - 1), answer >> 128 & 0xFF

    async def read(self, tile: int, address: int, lines: int) -> np.ndarray:
        """[lines, 17] bytes: each line and its scale."""
        found = np.zeros((lines, 17), np.uint8)
        for i in range(lines):
            line, scale = await self.access(tile, address + i)
            found[i, :16] = np.frombuffer(line.to_bytes(16, "little"), np.uint8)
            found[i, 16] = scale
        return found

    async def pick(self, tile: int, source: int, target: int) -> None:
        """Writes the lines of `rows` whose index the tile has left at `source`."""
        line, _ = await self.access(tile, source)
        for i, row in enumerate(bench.arrays()["rows"][line & 0xFFFFFFFF]):
            await self.access(tile, target + i, int.from_bytes(row.tobytes(), "little"))

    async def damage(self, tile: int, line: int, bits: list[int]) -> None:
        """Flips bits of the code word of a KV SRAM line."""
        address = Region.KV_SRAM.value << REGION_LO | line
        data, scale = await self.access(tile, address)
        await self.access(tile, KV_LINE, sum((1 << 8 | bit) << 9 * i for i, bit in enumerate(bits)))
        await self.access(tile, address, data, scale)

    async def status(self, tile: int) -> dict:
        word, _ = await self.access(tile, 1)
        kv, _ = await self.access(tile, KV_LINE)
        return {
            "status": Status(word & 0xFF).name,
            "engine": word >> 8 & 0xFF,
            "semaphore": word >> 16 & 0xFF,
            "pc": word >> 32 & 0xFFFFFFFF,
            "cycles": word >> 64 & 0xFFFFFFFF,
            "nan_row": word >> 96 & 1,
            "kv_corrected": kv & 0xFFFFFFFF,
            "kv_uncorrectable": kv >> 32 & 0xFFFFFFFF,
        }

    async def counters(self, tile: int) -> dict:
        result = {}
        for number, name in enumerate(COUNTED):
            result[name.lower()] = {
                state.name.lower(): (
                    await self.access(tile, COUNTER_LINE + len(Activity) * number + state)
                )[0]
                & 0xFFFFFFFF
                for state in Activity
            }
        return result


@cocotb.test()
async def run_programs(dut) -> None:
    """Every run of the parameters, in order."""
    given = bench.parameters()
    system = System(dut)
    for name in (
        "load_go",
        "load_first",
        "load_count",
        "host_valid",
        "host_write",
        "host_address",
        "host_data",
        "host_scale",
    ):
        getattr(dut, name).value = 0
    dut.stall.value = 0
    dut.stall_seed.value = given.get("stall_seed", 1)
    dut.err_lo.value, dut.err_hi.value = given.get("err", (0, 0))
    await bench.start(dut)
    await RisingEdge(dut.clk)
    results, arrays = [], {}
    for r, run in enumerate(given["runs"]):
        for tile, (first, count) in enumerate(run["load"]):
            await system.load(tile, first, count)
        if run.get("reset"):
            for tile in range(system.tiles):
                await system.access(tile, 0, 2)
        if run.get("pick"):
            await system.pick(*run["pick"])
        for tile, line, bits in run.get("damage", ()):
            await system.damage(tile, line, bits)
        dut.stall.value = given.get("stall", 0)
        started = []
        for tile, start in enumerate(run["start"]):
            if start is not None:
                await system.access(tile, 0, 1 | start << 32 | run["limit"] << 64)
                started.append(tile)
        await with_timeout(stopped(dut), run["limit"] + SILENCE, "ns")
        dut.stall.value = 0
        statuses = [await system.status(tile) for tile in started]
        results.append(
            {"status": statuses, "counters": [await system.counters(tile) for tile in started]}
        )
        for i, (tile, address, lines) in enumerate(run["reads"]):
            arrays[f"read_{r}_{i}"] = await system.read(tile, address, lines)
    values = {"runs": results, "simulated": bench.cycle()}
    if given.get("trace"):
        files = [Path(f"trace{tile}.txt") for tile in range(system.tiles)]
        values["trace"] = [file.read_text() for file in files]
    bench.report(values, arrays)


async def stopped(dut) -> None:
    """Returns when no tile runs."""
    while int(dut.running.value):
        await dut.running.value_change
