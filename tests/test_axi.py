# SPDX-License-Identifier: Apache-2.0
"""The AXI master in Verilator: against cocotbext-axi's memory and our HBM slice; its rate."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from golden.hbm_layout import stream_bytes, unpack_lines
from hw.config import preset
from hw.isa import DMA, STREAM, Direction, Status
from sim.runner import run
from sim.verilator import build
from tb.hbm_tops import TOP, axi_top, slice_top
from tests.test_dma import apply_dma, random_dma

TINY = replace(preset("tiny").tile, hbm_bytes=1 << 16)
LATENCY = 160


def packed(command, operands) -> str:
    """The operands as the bits of the engine's command port, in hexadecimal."""
    bits = position = 0
    for op in command.operands:
        bits |= operands[op.name] << position
        position += op.width
    return f"{bits:x}"


def hex_words(hbm) -> str:
    return "\n".join(line[::-1].tobytes().hex() for line in hbm.reshape(-1, 16)) + "\n"


@pytest.fixture(scope="module", params=["axi_ram", "slice"])
def memory(request):
    """(name, build) of the bench on each memory."""
    if request.param == "axi_ram":
        return request.param, build(axi_top(TINY), TOP)
    return request.param, build(slice_top(TINY, {"LATENCY": LATENCY}), TOP)


@pytest.mark.parametrize("stall", [0.0, 0.25], ids=["free", "stalled"])
def test_copies(memory, stall):
    name, model = memory
    rng = np.random.default_rng(17)
    hbm = rng.integers(0, 256, TINY.hbm_bytes, dtype=np.uint8)
    sram = rng.integers(0, 256, (TINY.sram_lines, 16), dtype=np.uint8)
    scales = rng.integers(0, 256, TINY.sram_lines, dtype=np.uint8)
    commands = [random_dma(rng, TINY, Direction(i % 2)) for i in range(12)]
    # 700 lines from 0xFF0 on cross three 4 KiB boundaries each way.
    plain = dict(hbm_stride=0, local_stride=0, rows=1, scaled=0)
    commands += [
        dict(plain, hbm_addr=0xFF0, local_addr=0, lines=700, direction=1),
        dict(plain, hbm_addr=0, local_addr=0, lines=TINY.sram_lines, direction=0),
    ]
    wanted, wanted_sram = hbm.copy(), (sram.copy(), scales.copy())
    for command in commands:
        apply_dma(None, wanted, wanted_sram, None, command)
    result = run(
        model,
        "tb.bench_hbm",
        seed=3,
        plusargs=["+hbm0=hbm.hex"],
        files={"hbm.hex": hex_words(hbm)},
        arrays={"hbm": hbm, "sram": sram, "scales": scales},
        parameters={
            "memory": name,
            "stall": stall,
            "commands": [packed(DMA, command) for command in commands],
        },
    )
    assert result.report["errors"] == [0] * len(commands)
    assert np.array_equal(result.arrays["sram"].reshape(-1), wanted)
    assert np.array_equal(result.arrays["sram"], wanted_sram[0])
    assert np.array_equal(result.arrays["scales"], wanted_sram[1])


def test_stream_contents(memory):
    name, model = memory
    rng = np.random.default_rng(18)
    hbm = rng.integers(0, 256, TINY.hbm_bytes, dtype=np.uint8)
    jobs = [dict(hbm_addr=0xFC0, rows=50, scaled=1), dict(hbm_addr=0x10, rows=33, scaled=0)]
    result = run(
        model,
        "tb.bench_hbm",
        seed=3,
        plusargs=["+hbm0=hbm.hex"],
        files={"hbm.hex": hex_words(hbm)},
        arrays={"hbm": hbm},
        parameters={
            "memory": name,
            "stall": 0.2,
            "keep": True,
            "streams": [packed(STREAM, job) for job in jobs],
        },
    )
    wanted = [
        unpack_lines(
            hbm[job["hbm_addr"] :].tobytes(), job["rows"] * TINY.cols, bool(job["scaled"])
        )[0]
        for job in jobs
    ]
    assert np.array_equal(result.arrays["written"], np.concatenate(wanted))


def test_slice_errors():
    """Commands that touch the slice's error window or go past its end report it, no others."""
    model = build(slice_top(TINY, {"LATENCY": 5, "BYTES": TINY.hbm_bytes // 2}), TOP)
    plain = dict(hbm_stride=0, local_addr=0, local_stride=0, lines=20, rows=1, scaled=0)
    half = TINY.hbm_bytes // 2
    cases = [
        (0, 0, Status.RUNNING),
        (0x4000 - 320, 0, Status.RUNNING),
        (0x4000 - 304, 0, Status.HBM_ERROR),
        (0x4000, 1, Status.HBM_ERROR),
        (0x4010, 1, Status.RUNNING),
        (half - 304, 0, Status.HBM_ERROR),
        (half - 320, 1, Status.RUNNING),
        (half, 1, Status.HBM_ERROR),
    ]
    result = run(
        model,
        "tb.bench_hbm",
        arrays={
            "sram": np.zeros((TINY.sram_lines, 16), np.uint8),
            "scales": np.zeros(TINY.sram_lines, np.uint8),
        },
        parameters={
            "memory": "slice",
            "stall": 0.0,
            "errors": [0x4000, 0x4010],
            "commands": [
                packed(DMA, dict(plain, hbm_addr=address, direction=direction))
                for address, direction, _ in cases
            ],
        },
    )
    assert result.report["errors"] == [status for *_, status in cases]


@pytest.mark.parametrize("rate", [Fraction(16), Fraction(75, 8)], ids=["16", "75/8"])
@pytest.mark.parametrize("scaled", [0, 1])
def test_stream_rate(rate, scaled):
    """Long weight streams reach 99.5 % of the slice's rate at a latency of 160 cycles."""
    check_rate(replace(TINY, hbm_rate=rate), scaled, rows=200)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [0, 1])
def test_full_size_rate(scaled):
    """The full-size slice's two ports of 128 bytes reach 99.5 % of 150 bytes per cycle."""
    check_rate(replace(preset("slice").tile, hbm_bytes=1 << 22), scaled, rows=120)


def check_rate(config, scaled, rows):
    rate = config.hbm_rate
    model = build(slice_top(config, {"LATENCY": LATENCY}), TOP)
    count = 24
    commands = [
        packed(STREAM, dict(hbm_addr=0x40 * i, rows=rows, scaled=scaled)) for i in range(count)
    ]
    result = run(
        model,
        "tb.bench_hbm",
        parameters={"memory": "slice", "stall": 0.0, "keep": False, "streams": commands},
    )
    moved = count * stream_bytes(rows * config.cols, bool(scaled))
    share = moved / (result.report["cycles"] * rate)
    print(f"{moved} bytes in {result.report['cycles']} cycles: {float(share):.4f} of {rate} B/clk")
    assert 0.995 <= share <= 1.005
