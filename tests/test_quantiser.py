# SPDX-License-Identifier: Apache-2.0
"""The quantiser: the model and the vector engine's store path."""

from pathlib import Path

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
from tests.quantiser_cases import (
    DTYPES,
    LOWEST,
    SOURCES,
    Blocks,
    blocks,
    by_hand,
    highest,
    magnitudes,
    targets,
    together,
)
from tests.simulators import VERILOG_FIRST
from tests.vector_bench import SPECIAL, Memory, apply, blank, run

VECTORS = Path(__file__).parent / "vectors"
TINY = preset("tiny").tile
SMALL = preset("small").tile
SLICE = preset("slice").tile
SEED = 8_118
MX_LATENCY = 38  # of a command beside its vectors on 4 lanes, the last block being full
# Thousands of vectors: the same in Amaranth's simulator would take minutes.
VERILOG = pytest.mark.parametrize("simulator", ["verilator"], indirect=True)
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
    rows, cols = 2, 43
    commands, values = [], {}
    for fmt in MX_FORMATS:
        for scale in (0, 121, 127, 254, None):
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


# ---- blocks with known codes, in the model and in the vector engine


def shifts(fmt: Format, source: Format) -> tuple[int, ...]:
    """Exponents of the blocks' scales, taken in turns: both ends, one, and one between.

    BF16 has not the small values of the lowest scale; those that it has are in `all_blocks`.
    """
    usual = (0, highest(fmt), -20)
    return (*usual, LOWEST) if source is Format.FP32 else usual


def all_blocks(fmt: Format, source: Format) -> Blocks:
    """Every target under every scale."""
    every = (LOWEST, LOWEST + 1, -20, 0, highest(fmt))
    return together(by_hand(fmt, source), *(blocks(fmt, source, (shift,)) for shift in every))


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.name)
@pytest.mark.parametrize("fmt", MX_FORMATS, ids=lambda f: f.name)
def test_blocks_of_the_model(fmt, source):
    given = all_blocks(fmt, source)
    values = rounded(given.values, source)
    assert np.array_equal(values, given.values, equal_nan=True), "the source has every value"
    codes, scales = store(values, fmt)
    assert np.array_equal(scales[:, 0], given.scales)
    assert np.array_equal(codes, given.codes)
    # What was stored is stored again as it is, save for zeros of either sign and NaN.
    number = (given.scales > 0) & (given.scales < 255)
    again = store(load(codes, fmt, scales), fmt)[0][number]
    assert number.sum() > 10 and np.array_equal(again, codes[number])


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.name)
@pytest.mark.parametrize("fmt", MX_FORMATS, ids=lambda f: f.name)
def test_the_blocks_have_every_code_and_tie(fmt, source):
    """The cases themselves: all codes that an encoder can give, and three values for each tie."""
    given = blocks(fmt, source, shifts(fmt, source))
    count = 1 << SPECS[fmt].bits
    missing = set(range(count)) - set(given.codes.reshape(-1).tolist())
    never = {0x80} if fmt is Format.MXINT8 else set()
    if fmt in QUIET:
        first = SPECS[fmt].max_code + 1
        never = {code | sign for code in range(first, 0x80) for sign in (0, 0x80)}
    assert missing == never
    found = [item for item in targets(fmt, 0, source) if item is not None]
    table = magnitudes(fmt)
    for code in range(SPECS[fmt].max_code):
        middle = (table[code] + table[code + 1]) / 2
        assert (middle, code + code % 2) in found
        assert any(c == code and (table[code] <= v < middle) for v, c in found)
        assert any(c == code + 1 and (middle < v <= table[code + 1]) for v, c in found)
    assert np.isfinite(given.values).all()
    largest = np.abs(given.values.astype(np.float64)).max(axis=1)
    assert (np.frexp(largest)[1] - 1 == given.scales - 127 + SPECS[fmt].max_exponent).all()


def convert(config, jobs: list[tuple[Blocks, Format, Format, dict]], stall: float, seed: int):
    """Runs `jobs` (blocks, source, result format, command fields), one after the other, at once.

    Every job's codes and scales are compared with those of its blocks, and all other bytes of the
    memory with what they were. A job is one row of all its blocks, or one row for each where a
    block is at least a vector.
    """
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    memory = Memory(1 << 16, rng)
    state: dict[str, Memory] = {}
    out = 3 << 14

    def prepare(index: int) -> dict[str, int]:
        given, source, fmt, fields = jobs[index]
        # Nothing of the job before may pass for a result of this one.
        memory.data[out:] = rng.integers(0, 256, len(memory.data) - out)
        memory.scales[out // 16 :] = rng.integers(0, 256, len(memory.scales) - out // 16)
        memory.put(0, given.values.reshape(-1), source)
        state["before"] = memory.copy()
        single = index % 2 == 0 or config.lanes > 32
        if single:  # its blocks need not fill vectors, of which a stride must be a multiple
            strides = {"a_stride": 0, "out_stride": 0}
            cols = given.values.size
            return copy_command(1, cols, source, fmt, out_addr=out, **strides, **fields)
        return copy_command(*given.values.shape, source, fmt, out_addr=out, **fields)

    def check(index: int) -> None:
        given, _, fmt, _ = jobs[index]
        codes, scales = memory.codes(out, given.values.size, fmt)
        name = f"job {index}: {fmt.name}"
        assert np.array_equal(codes, given.codes.reshape(-1)), name
        assert np.array_equal(scales, np.repeat(given.scales, 32)), name
        end = out + given.values.size * SPECS[fmt].storage_bits // 8
        for now, then, unit in (
            (memory.data, state["before"].data, 1),
            (memory.scales, state["before"].scales, 16),
        ):
            assert np.array_equal(now[: out // unit], then[: out // unit]), name
            assert np.array_equal(now[end // unit :], then[end // unit :]), name

    result = run(
        VectorEngine(config),
        memory,
        [{}] * len(jobs),
        stall=stall,
        seed=seed,
        limit=200_000,
        prepare=prepare,
        check=check,
    )
    assert result.errors == [Status.RUNNING] * len(jobs)


def turns(fmt: Format, source: Format) -> Blocks:
    return together(by_hand(fmt, source), blocks(fmt, source, shifts(fmt, source)))


@VERILOG
def test_blocks(simulator):
    """Every tie, both neighbours and every code, all formats from both sources, without a pause."""
    jobs = [(turns(fmt, src), src, fmt, {}) for src in SOURCES for fmt in MX_FORMATS]
    convert(TINY, jobs, 0.0, SEED)


@VERILOG_FIRST
def test_saturation_and_ends_of_the_scales_with_stalls():
    jobs = [(by_hand(fmt, src), src, fmt, {}) for fmt in MX_FORMATS for src in SOURCES]
    convert(TINY, jobs, 0.4, SEED + 1)


@VERILOG
@pytest.mark.slow
@pytest.mark.parametrize(
    "config, stall", [(TINY, 0.3), (SMALL, 0.0), (SLICE, 0.2)], ids=["tiny", "small", "slice"]
)
def test_all_blocks_under_all_scales(config, stall, simulator):
    """Vectors of a part of a block, and of two blocks."""
    jobs = [(all_blocks(fmt, src), src, fmt, {}) for fmt in MX_FORMATS for src in SOURCES]
    convert(config, jobs, stall, SEED + 2)


REFERENCE = {
    Format.MXFP4: "fmt_encode_e2m1fn",
    Format.MXFP8_E4M3: "fmt_encode_e4m3fn",
    Format.MXFP8_E5M2: "fmt_encode_e5m2",
}


def reference_blocks(fmt: Format) -> Blocks:
    """The vectors' values under the scale 1, in blocks; expected values by gfloat, saturating."""
    data = np.load(VECTORS / f"{REFERENCE[fmt]}.npz")
    x, want = data["x"], data["value_gfloat_saturating"].astype(np.float64)
    table = magnitudes(fmt)
    codes = np.searchsorted(table, np.where(np.isnan(want), 0, np.abs(want)))
    assert (np.isnan(want) | (table[codes] == np.abs(want))).all()
    codes = codes | np.signbit(want).astype(np.int64) << (SPECS[fmt].bits - 1)
    codes = np.where(np.isnan(x), QUIET.get(fmt, SPECS[fmt].max_code), codes)
    count = -(-len(x) // 32) * 32
    values, padded = np.zeros(count, np.float32), np.zeros(count, np.int64)
    values[: len(x)], padded[: len(x)] = x, codes
    return Blocks(values.reshape(-1, 32), padded.reshape(-1, 32), np.full(count // 32, 127))


@VERILOG
def test_reference_vectors_with_a_fixed_scale(simulator):
    jobs = []
    for fmt in REFERENCE:
        given = reference_blocks(fmt)
        assert np.array_equal(store(given.values, fmt, 127)[0], given.codes)
        jobs.append((given, Format.FP32, fmt, {"fixed_scale": 1, "scale": 127}))
    convert(TINY, jobs, 0.0, SEED + 3)


@VERILOG
def test_one_vector_per_cycle(simulator):
    """Of commands that wait at the engine, longer ones take just their vectors' cycles more."""
    fixed = {"fixed_scale": 1, "scale": 120}
    cases = [
        (source, fmt, fields, shape)
        for fmt in MX_FORMATS
        for source, fields in ((Format.FP32, {}), (Format.BF16, {}), (Format.FP32, fixed))
        for shape in ((1, 32), (1, 224), (5, 32))
    ]
    memory = Memory(1 << 15, np.random.default_rng(SEED))
    commands = [copy_command(*shape, src, fmt, **fields) for src, fmt, fields, shape in cases]
    result = run(VectorEngine(TINY), memory, commands)
    took = np.diff([result.taken[0] + 3, *result.done])
    vectors = np.array([rows * cols // TINY.lanes for *_, (rows, cols) in cases])
    assert set(vectors) == {8, 40, 56}
    assert (took - vectors == MX_LATENCY - 3).all(), took - vectors
