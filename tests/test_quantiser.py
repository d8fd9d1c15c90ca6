# SPDX-License-Identifier: Apache-2.0
"""The quantiser: the model and the vector engine's store path."""

import ml_dtypes
import numpy as np
import pytest

from golden.formats import MX_FORMATS, SPECS, Format, decode
from golden.quantise import quantise
from golden.vector import load, rounded, store
from hw.config import preset
from hw.isa import Status
from hw.vector_engine import VectorEngine
from sim.programs.builder import TileProgram
from sim.programs.memory import TileMemory
from tests.simulators import VERILOG_FIRST
from tests.vector_bench import SPECIAL, Memory, apply, blank, run

TINY = preset("tiny").tile
SEED = 8_118
DTYPES = {
    Format.MXFP4: ml_dtypes.float4_e2m1fn,
    Format.MXFP6_E2M3: ml_dtypes.float6_e2m3fn,
    Format.MXFP6_E3M2: ml_dtypes.float6_e3m2fn,
    Format.MXFP8_E4M3: ml_dtypes.float8_e4m3fn,
    Format.MXFP8_E5M2: ml_dtypes.float8_e5m2,
}
FIXED = (0, 1, 120, 127, 134, 253, 254)
QUIET = {Format.MXFP8_E4M3: 0x7F, Format.MXFP8_E5M2: 0x7E}  # what a NaN becomes


def independent(values: np.ndarray, fmt: Format, scale: int) -> np.ndarray:
    """Codes of `values` under one scale, elements rounded by ml_dtypes (MXINT8: numpy)."""
    largest = float(decode(fmt, np.array([SPECS[fmt].max_code]))[0])
    with np.errstate(over="ignore"):
        scaled = np.ldexp(values.astype(np.float64), 127 - scale)
    # The largest value is a code: to clip before the rounding is to saturate.
    clipped = np.clip(np.where(np.isnan(scaled), 0.0, scaled), -largest, largest)
    if fmt is Format.MXINT8:
        codes = np.rint(clipped * 64).astype(np.int64) & 0xFF
    else:
        codes = clipped.astype(DTYPES[fmt]).view(np.uint8).astype(np.int64)
    return np.where(np.isnan(values), QUIET.get(fmt, SPECS[fmt].max_code), codes)


def wide_values(rng: np.random.Generator, count: int) -> np.ndarray:
    """FP32 values of every exponent, with special ones; NaN canonical."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    bits[: len(SPECIAL)] = SPECIAL
    values = rng.permutation(bits).view(np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), values)


@pytest.mark.parametrize("fmt", MX_FORMATS, ids=lambda f: f.name)
def test_fixed_scale_of_the_model(fmt):
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    for scale in FIXED:
        near = rng.standard_normal(4096) * np.exp2(rng.integers(-12, 20, 4096))
        with np.errstate(over="ignore"):
            near = np.ldexp(near, scale - 127).astype(np.float32)
        values = np.concatenate([wide_values(rng, 1024), near]).reshape(-1, 40)
        codes, scales = store(values, fmt, scale)
        assert scales.shape == (128, 2) and (scales == scale).all()
        assert np.array_equal(codes, independent(values, fmt, scale))
        once = load(codes, fmt, scales)
        assert np.array_equal(rounded(once, fmt, scale), once, equal_nan=True)


def test_fixed_scale_by_hand():
    x = np.array([1.0, -1000.0, np.inf, -np.inf, np.nan, -0.0, 0.0, 2.0**-10], np.float32)
    codes, scales = quantise(x, Format.MXFP8_E4M3, 127)
    assert codes.tolist() == [0x38, 0xFE, 0x7E, 0xFE, 0x7F, 0x80, 0x00, 0x00]
    assert scales.tolist() == [127]
    assert quantise(x, Format.MXFP8_E4M3, 117)[0].tolist()[:2] == [0x7E, 0xFE]
    assert quantise(x, Format.MXFP8_E5M2, 127)[0].tolist()[2:5] == [0x7B, 0xFB, 0x7E]
    assert quantise(x, Format.MXFP4, 129)[0].tolist() == [0x0, 0xF, 0x7, 0xF, 0x7, 0x8, 0x0, 0x0]
    # Minus the canonical NaN is a NaN all the same.
    assert quantise(-x[4:5], Format.MXFP8_E4M3, 127)[0].tolist() == [0x7F]
    for scale in (-1, 255, 256):
        with pytest.raises(ValueError, match="fixed_scale must be an E8M0 code"):
            quantise(x, Format.MXFP4, scale)
    for fmt in (Format.BF16, Format.FP32):
        with pytest.raises(ValueError, match="fixed_scale must be None"):
            store(x, fmt, 127)


def copy_command(rows: int, cols: int, source: Format, fmt: Format, **fields: int) -> dict:
    """Rows at 0 converted to `fmt` at 16384."""
    bits = SPECS[fmt].storage_bits
    base = {
        "rows": rows,
        "cols": cols,
        "a_format": source,
        "a_stride": -(-cols * SPECS[source].storage_bits // 128) * 4,
        "out_format": fmt,
        "out_addr": 16384,
        "out_stride": -(-cols * bits // 128) * 4,
        "store": 1,
    }
    return blank() | {name: int(value) for name, value in (base | fields).items()}


@VERILOG_FIRST
@pytest.mark.parametrize("stall", [0.0, 0.4])
def test_fixed_scale(stall):
    """Fixed and own scales in turns, in every format, rows of short and of whole blocks."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    memory = Memory(1 << 15, rng)
    rows, cols = 3, 75
    commands, values = [], {}
    for fmt in MX_FORMATS:
        for scale in (*FIXED, None):
            fields = {} if scale is None else {"fixed_scale": 1, "scale": scale}
            commands.append(copy_command(rows, cols, Format.FP32, fmt, **fields))

    expected: list[Memory] = []

    def prepare(index: int) -> dict[str, int]:
        command = commands[index]
        scale = command["scale"] or 127
        x = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-10, 20, (rows, cols)))
        with np.errstate(over="ignore"):
            x = np.ldexp(x, scale - 127).astype(np.float32)
        x[0, :16], x[rows - 1] = wide_values(rng, 16), wide_values(rng, cols)
        for r in range(rows):
            memory.put(4 * r * command["a_stride"], x[r], Format.FP32)
        values[index] = x
        expected.append(memory.copy())
        apply(expected[-1], command, TINY.lanes)
        return command

    def check(index: int) -> None:
        command = commands[index]
        assert (memory.data == expected[index].data).all(), command
        assert (memory.scales == expected[index].scales).all(), command
        if command["fixed_scale"]:
            fmt = Format(command["out_format"])
            for r in range(rows):
                address = command["out_addr"] + 4 * r * command["out_stride"]
                codes, scales = memory.codes(address, cols, fmt)
                assert (scales == command["scale"]).all()
                codes &= (1 << SPECS[fmt].bits) - 1
                assert np.array_equal(codes, independent(values[index][r], fmt, command["scale"]))

    result = run(
        VectorEngine(TINY),
        memory,
        [{}] * len(commands),
        stall=stall,
        seed=SEED,
        prepare=prepare,
        check=check,
    )
    assert result.errors == [Status.RUNNING] * len(commands)


@VERILOG_FIRST
def test_scale_of_nan_is_illegal_only_where_it_is_used():
    memory = Memory(1 << 15, np.random.default_rng(SEED))
    nan = {"fixed_scale": 1, "scale": 0xFF}
    commands = [copy_command(2, 12, Format.FP32, fmt, **nan) for fmt in MX_FORMATS]
    harmless = [
        copy_command(2, 12, Format.FP32, Format.FP32, **nan),
        copy_command(2, 12, Format.FP32, Format.BF16, **nan),
        copy_command(2, 12, Format.FP32, Format.MXFP4, store=0, **nan),
        copy_command(2, 12, Format.FP32, Format.MXFP4, scale=0xFF),
    ]
    expected = memory.copy()
    for command in harmless:
        apply(expected, command, TINY.lanes)
    result = run(VectorEngine(TINY), memory, commands + harmless)
    assert result.errors == [Status.ILLEGAL_COMMAND] * len(MX_FORMATS) + [Status.RUNNING] * 4
    assert (memory.data == expected.data).all() and (memory.scales == expected.scales).all()


def test_builder_gives_the_operands():
    memory = TileMemory(TINY)
    a = memory.buffer("a", 2, 32, Format.FP32)
    out = memory.buffer("out", 2, 32, Format.MXFP8_E4M3)
    p = TileProgram(memory)
    p.vector(a, out, mask=(1, 2), mask_hi_step=True, fixed_scale=130)
    words = p.program.assemble().reshape(-1)
    assert words[2] >> 24 == 0b110 and words[3] >> 24 == 130
    with pytest.raises(ValueError, match="fixed_scale must come with"):
        p.vector(a, a, fixed_scale=130)
    with pytest.raises(ValueError, match="mask must be given"):
        p.vector(a, out, mask_lo_step=True)
