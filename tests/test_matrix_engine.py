# SPDX-License-Identifier: Apache-2.0
"""The matrix engine on a tile SRAM and a KV SRAM: whole MATMUL commands against the model."""

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import wiring

from golden import fp32
from golden.formats import Format
from golden.kernels.trace import Stored
from golden.matmul import matmul
from hw.config import PRESETS
from hw.isa import Init, Status
from hw.kv_sram import KvSram
from hw.matrix_engine import MatrixEngine
from hw.tile_sram import TileSram
from hw.weight_loader import load_meta
from sim.kernels.gemm import operand, stored
from sim.kernels.system import decode, span
from sim.programs.memory import TileMemory
from tests.simulators import VERILOG_FIRST, Simulator

TINY = PRESETS["tiny"].tile
FORMATS = [f for f in Format if f is not Format.FP32]


class Bench(wiring.Component):
    """Engine and memories; the host ports load and read them."""

    def __init__(self, config):
        self.config = config
        self.engine, self.sram = MatrixEngine(config), TileSram(config)
        self.kv = KvSram(config, load_meta(config.rows).size)
        super().__init__({})

    def elaborate(self, platform):
        m = Module()
        m.submodules.engine, m.submodules.sram, m.submodules.kv = self.engine, self.sram, self.kv
        wiring.connect(m, self.engine.activation, self.sram.activation)
        wiring.connect(m, self.engine.memory, self.sram.matrix)
        wiring.connect(m, self.engine.weights, self.kv.read)
        m.d.comb += [
            self.engine.weights_fault.eq(self.kv.read_fault),
            self.engine.weights_error.eq(self.kv.read_error),
        ]
        return m


async def write_sram(ctx, bench, images):
    port = bench.sram.host.request
    for first, lines, scales in images:
        for i, (line, scale) in enumerate(zip(lines, scales, strict=True)):
            ctx.set(
                port.payload,
                {
                    "address": first + i,
                    "write": 1,
                    "data": [int.from_bytes(bytes(line), "little")],
                    "scales": [int(scale)],
                    "mask": [0xFF],
                    "scale_mask": 1,
                },
            )
            ctx.set(port.valid, 1)
            await ctx.tick().until(port.ready)
    ctx.set(port.valid, 0)


async def write_kv(ctx, bench, images):
    port = bench.kv.host_write
    for first, lines, scales in images:
        for i, (line, scale) in enumerate(zip(lines, scales, strict=True)):
            ctx.set(
                port.payload,
                {
                    "address": first + i,
                    "data": [int.from_bytes(bytes(line), "little")],
                    "scales": [int(scale)],
                    "enable": 1,
                },
            )
            ctx.set(port.valid, 1)
            await ctx.tick().until(port.ready)
    ctx.set(port.valid, 0)


async def read_sram(ctx, bench, first, count):
    found = np.zeros((count, 17), np.uint8)
    client = bench.sram.host
    for i in range(count):
        ctx.set(client.request.payload, {"address": first + i, "write": 0})
        ctx.set(client.request.valid, 1)
        await ctx.tick().until(client.request.ready)
        ctx.set(client.request.valid, 0)
        while not ctx.get(client.valid):
            await ctx.tick()
        line = ctx.get(client.response.data[0])
        found[i, :16] = np.frombuffer(line.to_bytes(16, "little"), np.uint8)
        found[i, 16] = ctx.get(client.response.scales[0])
    return found


def simulate(config, memory, commands, buffers, limit=20_000):
    """Runs MATMUL commands (dicts); gives the buffers' contents, errors and cycles."""
    bench = Bench(config)
    found, errors, cycles = [], [], []

    async def drive(ctx):
        engine = bench.engine.control
        await write_sram(ctx, bench, memory.sram_images)
        await write_kv(ctx, bench, memory.kv_images)
        sent = 0
        for t in range(limit):
            if sent < len(commands):
                ctx.set(engine.command.payload, commands[sent])
                ctx.set(engine.command.valid, 1)
            else:
                ctx.set(engine.command.valid, 0)
            taken = ctx.get(engine.command.ready) and sent < len(commands)
            if ctx.get(engine.done):
                errors.append(Status(ctx.get(engine.error)))
                cycles.append(t)
            await ctx.tick()
            sent += bool(taken)
            if len(errors) == len(commands):
                break
        for buffer in buffers:
            found.append(decode(buffer, await read_sram(ctx, bench, *span(buffer))))

    ports = (bench.engine.control, bench.sram.host, bench.kv.host_write)
    simulator = Simulator(bench, ports)
    simulator.add_clock(1e-9)
    simulator.add_testbench(drive)
    simulator.run()
    return found, errors, cycles


def command(act, weights, out, bias=None):
    return {
        "act_addr": act.address,
        "act_stride": act.stride_lines,
        "m": act.rows,
        "n": weights.n,
        "k": weights.k,
        "weight_addr": weights.row,
        "weight_gstride": 1,
        "weight_nstride": weights.groups,
        "out_addr": out.address,
        "out_stride": out.stride_lines,
        "bias_addr": bias.address if bias else 0,
        "act_format": int(act.fmt),
        "weight_format": int(weights.fmt),
        "stream": 0,
        "init": int(Init.BIAS if bias else Init.ZERO),
        "out_bf16": int(out.fmt is Format.BF16),
    }


def matmuls(rng, config, shapes):
    """Memory, commands, result buffers and their expected contents for (m, n, k, act, weight, out,
    bias) each.
    """
    memory = TileMemory(config)
    commands, outs, expected = [], [], []
    for i, (m, n, k, act_fmt, weight_fmt, out_fmt, biased) in enumerate(shapes):
        a, w = operand(rng, m, k, act_fmt), operand(rng, n, k, weight_fmt)
        bias = rng.standard_normal(n).astype(np.float32) if biased else None
        act = memory.fill(memory.buffer(f"act{i}", m, k, act_fmt, weight_fmt), a)
        weights = memory.weights(f"w{i}", w.codes, w.scales, weight_fmt, False)
        out = memory.buffer(f"out{i}", m, n, out_fmt)
        where = None
        if bias is not None:
            where = memory.fill(
                memory.scalars(f"bias{i}", n), Stored(fp32.bits(bias)[None], Format.FP32)
            )
        commands.append(command(act, weights, out, where))
        outs.append(out)
        expected.append(
            stored(
                matmul(
                    a.codes, a.scales, act_fmt, w.codes, w.scales, weight_fmt, config.rows, bias
                ),
                out_fmt,
            )
        )
    return memory, commands, outs, expected


def check(seed, config, shapes):
    print("seed", seed, shapes)
    memory, commands, outs, expected = matmuls(np.random.default_rng(seed), config, shapes)
    found, errors, cycles = simulate(config, memory, commands, outs)
    assert errors == [Status.RUNNING] * len(commands)
    assert len(found) == len(expected) > 0
    for shape, ours, theirs in zip(shapes, found, expected, strict=True):
        assert np.array_equal(ours.codes, theirs.codes), shape
    return cycles


@VERILOG_FIRST
def test_edges_of_the_array_back_to_back():
    rng = np.random.default_rng(1)
    shapes = []
    for size in (1, 3, 4, 5, 9):
        for fmt in (Format.BF16, Format.FP32):
            act, weight = FORMATS[rng.integers(7)], FORMATS[rng.integers(7)]
            shapes.append(
                (
                    int(rng.integers(1, 6)),
                    size,
                    int(rng.integers(1, 150)),
                    act,
                    weight,
                    fmt,
                    bool(rng.integers(2)),
                )
            )
    check(1, TINY, shapes)


@VERILOG_FIRST
@pytest.mark.parametrize(
    "act_fmt", [Format.MXFP4, Format.MXFP8_E4M3, Format.MXINT8, Format.BF16], ids=lambda f: f.name
)
def test_formats(act_fmt):
    check(
        2,
        TINY,
        [
            (m, 6, 70, act_fmt, weight, Format.FP32, False)
            for m, weight in (
                (1, Format.MXFP4),
                (2, Format.MXFP6_E2M3),
                (3, Format.MXINT8),
                (5, Format.BF16),
            )
        ],
    )


@VERILOG_FIRST
def test_long_rows_follow_at_one_slice_per_cycle():
    cycles = check(3, TINY, [(16, 8, 256, Format.MXFP8_E4M3, Format.MXFP4, Format.FP32, False)])
    slices = 2 * (256 // 64) * 2 * 16
    assert cycles[0] < slices + 60


@VERILOG_FIRST
def test_illegal_commands_have_no_effect():
    good = matmuls(
        np.random.default_rng(4), TINY, [(2, 4, 32, Format.BF16, Format.BF16, Format.FP32, False)]
    )
    memory, commands, outs, expected = good
    bad = [
        dict(commands[0], **change)
        for change in (
            {"m": 0},
            {"n": 0},
            {"k": 0},
            {"m": 1000},
            {"act_format": 7},
            {"weight_format": 7},
            {"act_addr": 16},
            {"out_addr": 4},
            {"act_stride": 1},
            {"bias_addr": 4, "init": 1},
        )
    ]
    found, errors, _ = simulate(TINY, memory, [*bad, *commands], outs)
    assert errors == [Status.ILLEGAL_COMMAND] * len(bad) + [Status.RUNNING]
    assert np.array_equal(found[0].codes, expected[0].codes)


@VERILOG_FIRST
def test_addresses_out_of_range_are_reported():
    memory, commands, outs, _ = matmuls(
        np.random.default_rng(5), TINY, [(2, 4, 32, Format.BF16, Format.BF16, Format.FP32, False)]
    )
    far = 1 << 24
    bad = [
        dict(commands[0], **change)
        for change in (
            {"act_addr": far},
            {"out_addr": far},
            {"weight_addr": far - 1},
            {"bias_addr": far, "init": 1},
        )
    ]
    for each in bad:
        _, errors, _ = simulate(TINY, memory, [each, commands[0]], outs)
        assert errors == [Status.ADDRESS_RANGE, Status.RUNNING], each
