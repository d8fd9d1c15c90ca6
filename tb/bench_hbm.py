# SPDX-License-Identifier: Apache-2.0
"""DMA and weight stream on an AXI memory: cocotbext-axi's `AxiRam` or our HBM slice.

Parameters: `stall` in [0, 1), `memory` "axi_ram" or "slice", and `commands` (packed operands of
DMA) or `streams` (of STREAM, with `keep` to collect what is written); arrays `hbm`, `sram`,
`scales`.
"""

import itertools

import cocotb
import numpy as np
from cocotb.triggers import RisingEdge
from cocotbext.axi import AxiBus, AxiRam

from hw.tile_sram import TileSram
from tb.bench import arrays, cycle, parameters, report, rng, start


def memory(dut, generator, stall):
    """Start the memory, with pauses on all channels."""
    if parameters()["memory"] == "slice":
        dut.stall.value = int(256 * stall)
        dut.err_lo.value, dut.err_hi.value = parameters().get("errors", (0, 0))
        return
    ram = AxiRam(AxiBus.from_prefix(dut, "m_axi"), dut.clk, dut.rst, size=len(arrays()["hbm"]))
    ram.write(0, arrays()["hbm"].tobytes())
    if stall:

        def pauses():
            while True:
                yield bool(generator.random() < stall)

        reads, writes = ram.read_if, ram.write_if
        for channel in (
            reads.ar_channel,
            reads.r_channel,
            writes.aw_channel,
            writes.w_channel,
            writes.b_channel,
        ):
            channel.set_pause_generator(pauses())


async def sram(dut, lines, scales, generator, stall):
    """A tile SRAM for transfers of one line, at the DMA engine's client port."""
    request, edge = dut.sram__request__payload, RisingEdge(dut.clk)
    answers: list[int | None] = [None] * (TileSram.LATENCY - 1)
    while True:
        ready = generator.random() >= stall
        dut.sram__request__ready.value = int(ready)
        await edge
        answer = None
        if ready and dut.sram__request__valid.value:
            bits = request.value.to_unsigned()
            address, write = bits & (1 << 28) - 1, bits >> 28 & 1
            if write:
                data = (bits >> 29 & (1 << 128) - 1).to_bytes(16, "little")
                lines[address] = np.frombuffer(data, np.uint8)
                scales[address] = bits >> 157 & 0xFF
            else:
                answer = int.from_bytes(lines[address].tobytes(), "little")
        answers.append(answer)
        now = answers.pop(0)
        dut.sram__valid.value = int(now is not None)
        dut.sram__response.value = now or 0


async def issue(dut, engine, commands):
    """Offer packed commands one after the other."""
    payload = getattr(dut, f"{engine}_control__command__payload")
    valid = getattr(dut, f"{engine}_control__command__valid")
    ready = getattr(dut, f"{engine}_control__command__ready")
    for command in commands:
        payload.value = command
        valid.value = 1
        await RisingEdge(dut.clk)
        while not ready.value:
            await RisingEdge(dut.clk)
    valid.value = 0


async def finished(dut, engine, count, limit):
    """Errors of the next `count` commands, and the cycle in which the last one was done."""
    done = getattr(dut, f"{engine}_control__done")
    error = getattr(dut, f"{engine}_control__error")
    errors = []
    for _ in range(limit):
        await RisingEdge(dut.clk)
        if done.value:
            errors.append(error.value.to_unsigned())
            if len(errors) == count:
                return errors, cycle()
    raise AssertionError(f"{len(errors)} of {count} commands are done after {limit} cycles")


def idle_inputs(dut):
    for name in (
        "dma_control__command__valid",
        "stream_control__command__valid",
        "sram__valid",
        "sram__fault",
        "sram__request__ready",
        "taken",
    ):
        getattr(dut, name).value = 0
    dut.kv_write__ready.value = dut.stream_write__ready.value = 1


@cocotb.test()
async def copies(dut):
    """DMA commands in both directions; the last one copies all of HBM into the SRAM."""
    given = parameters()
    if "commands" not in given:
        return
    generator, stall = rng(), given["stall"]
    lines, scales = arrays()["sram"].copy(), arrays()["scales"].copy()
    idle_inputs(dut)
    memory(dut, generator, stall)
    await start(dut)
    cocotb.start_soon(sram(dut, lines, scales, generator, stall))
    commands = [int(text, 16) for text in given["commands"]]
    cocotb.start_soon(issue(dut, "dma", commands))
    errors, _ = await finished(dut, "dma", len(commands), 200_000)
    report({"errors": errors}, {"sram": lines, "scales": scales})


@cocotb.test()
async def streams(dut):
    """Weight streams as fast as memory goes; `cycles` from the first written line to the end."""
    given = parameters()
    if "streams" not in given:
        return
    idle_inputs(dut)
    memory(dut, rng(), given["stall"])
    await start(dut)
    commands = [int(text, 16) for text in given["streams"]]
    cocotb.start_soon(issue(dut, "stream", commands))
    written, first = [], None

    async def watch():
        nonlocal first
        for now in itertools.count():
            await RisingEdge(dut.clk)
            dut.taken.value = int(now % 2 and dut.available.value.to_unsigned() != 0)
            if dut.stream_write__valid.value:
                first = cycle() if first is None else first
                if given["keep"]:
                    written.append(dut.stream_write__payload.value.to_unsigned())

    cocotb.start_soon(watch())
    errors, last = await finished(dut, "stream", len(commands), 200_000)
    data = b"".join((word >> 28 & (1 << 128) - 1).to_bytes(16, "little") for word in written)
    report(
        {"errors": errors, "cycles": last - first},
        {"written": np.frombuffer(data, np.uint8).reshape(-1, 16)},
    )
