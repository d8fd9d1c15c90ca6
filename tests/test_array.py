# SPDX-License-Identifier: Apache-2.0
"""The matmul array against the bit-exact model: weight tiles back to back, loads under compute."""

from itertools import product

import numpy as np
import pytest
from amaranth import Const, Value

from golden.formats import SPECS, Format, group_elements, products_per_slice, slices
from golden.hbm_layout import activation_rows, weight_rows
from golden.matmul import matmul
from hw.array import MatmulArray
from tests.simulators import VERILOG_FIRST, Simulator, cases

ROWS, COLS = 3, 4
FORMATS = [f for f in Format if f is not Format.FP32]


def random_operand(rng, rows, cols, fmt):
    codes = rng.integers(0, 1 << SPECS[fmt].bits, (rows, cols))
    if not SPECS[fmt].scaled:
        return codes, None
    return codes, rng.integers(100, 150, (rows, -(-cols // 32))).astype(np.uint8)


class Bench:
    """Drives loads and slices cycle by cycle, from lists of what happens when."""

    def __init__(self, rows=ROWS, cols=COLS, depth=128, acc_rows=16):
        self.array = MatmulArray(rows, cols, acc_rows=acc_rows, result_depth=depth)
        self.loads, self.slices = {}, {}
        self.now = 0
        self.expected = []

    def tile(self, m, act, act_scales, act_fmt, weight, weight_scales, weight_fmt, spacing=None):
        """One K tile of one column tile: all slices; results are expected at its end."""
        rows, cols = self.array.rows, self.array.cols
        k = act.shape[1]
        lines, scales = activation_rows(act, act_scales, act_fmt)
        wide, wide_scales = weight_rows(weight, weight_scales, weight_fmt, cols)
        chains, n = slices(act_fmt, weight_fmt), products_per_slice(act_fmt, weight_fmt)
        group = group_elements(weight_fmt)
        groups = -(-k // group)
        # Loads one row per cycle; the swap may come as soon as every row is in time.
        halves = weight_fmt is Format.MXINT8
        start = max(self.now, 0)
        last_swap = getattr(self, "last_swap", -(10**6))
        due = start
        at = start
        for r in range(groups):
            at = max(at, last_swap + MatmulArray.load_after_swap(r))
            while at in self.loads:
                at += 1
            line = (r // 2 if halves else r) * cols
            self.loads[at] = [
                (
                    r,
                    wide[line + c],
                    int(wide_scales[line + c]),
                    weight_fmt,
                    r % 2 if halves else 0,
                    min(group, k - r * group),
                )
                for c in range(cols)
            ]
            due = max(due, at + MatmulArray.swap_after_load(r))
            at += 1
        t = due
        while t in self.slices:
            t += 1
        self.last_swap = t
        bits = SPECS[act_fmt].storage_bits
        for j in range(chains):
            begin = t
            for row in range(m):
                fields = []
                for r in range(rows):
                    element = r * group + j * n
                    bit = element * bits
                    line = min(bit // 128, lines.shape[1] - 1)
                    fields.append((lines[row, line], int(scales[row, line]), bit % 128))
                self.slices[t] = dict(
                    fields=fields,
                    act_format=act_fmt,
                    weight_format=weight_fmt,
                    index=j,
                    n_bits=n * bits,
                    count=k,
                    swap=int(j == 0 and row == 0),
                    acc_index=row,
                    first=int(j == 0),
                    last=int(j == chains - 1),
                )
                t += 1
            if m < MatmulArray.ACC_LATENCY:
                t = begin + MatmulArray.ACC_LATENCY
        self.now = max(self.now, t - 1)
        self.expected += list(
            matmul(act, act_scales, act_fmt, weight, weight_scales, weight_fmt, rows).view(
                np.uint32
            )
        )

    def _slices(self):
        """Value of the slice port in each cycle that has one."""
        layout = self.array.slice.shape()
        words = {}
        for t, given in self.slices.items():
            lines = []
            for line, _, bit in given["fields"]:
                # A group that starts inside a line is moved to its low end.
                whole = int.from_bytes(line.tobytes(), "little")
                lines.append(whole >> bit // given["n_bits"] * given["n_bits"])
            scales = [scale for _, scale, _ in given["fields"]]
            fields = {name: int(given[name]) for name in given if name not in ("fields", "n_bits")}
            words[t] = layout.const(fields | {"valid": 1, "lines": lines, "scales": scales})
        return {t: Const.cast(word).value for t, word in words.items()}

    def _loads(self):
        """In each cycle that loads, value and mask of the columns of the load port that do."""
        layout = self.array.load.shape().elem_shape
        words = {}
        for u, row in self.loads.items():
            for c, (r, line, scale, fmt, half, length) in enumerate(row):
                whole = int.from_bytes(line.tobytes(), "little")
                fields = {"valid": 1, "row": r, "line": whole, "scale": scale, "format": int(fmt)}
                entry = Const.cast(layout.const(fields | {"half": half, "length": length})).value
                word, mask = words.get(u + c, (0, 0))
                full = (1 << layout.size) - 1
                words[u + c] = (
                    word | entry << c * layout.size,
                    mask | full << c * layout.size,
                )
        return words

    def run(self, stall=0.0, rng=None):
        """Rows of results; `times` gets the cycle in which each was taken.

        What is not valid keeps the values of before. Ports are set as a whole, which is fast.
        """
        found = []
        self.times = []
        array = self.array
        slices, loads = self._slices(), self._loads()
        slice_port, load_port = Value.cast(array.slice), Value.cast(array.load)
        result = Value.cast(array.result.payload)
        slice_valid = 1 << array.slice.shape()["valid"].offset
        load_layout = array.load.shape().elem_shape
        valids = sum(
            1 << load_layout["valid"].offset + c * load_layout.size for c in range(array.cols)
        )

        def take(ctx, t):
            self.times.append(t)
            whole = ctx.get(result).to_bytes(4 * array.cols, "little")
            found.append(np.frombuffer(whole, "<u4"))

        async def drive(ctx):
            end = max([*self.loads, *self.slices]) + array.RESULT_LATENCY + array.cols + 4
            now_slice = now_load = 0
            for t in range(end):
                now_slice = slices.get(t, now_slice & ~slice_valid)
                word, mask = loads.get(t, (0, 0))
                now_load = now_load & ~(valids | mask) | word
                ctx.set(slice_port, now_slice)
                ctx.set(load_port, now_load)
                ready = int(rng is None or rng.random() >= stall)
                ctx.set(array.result.ready, ready)
                if ready and ctx.get(array.result.valid):
                    take(ctx, t)
                await ctx.tick()
            ctx.set(array.result.ready, 1)
            for t in range(end, end + 200):
                if ctx.get(array.result.valid):
                    take(ctx, t)
                await ctx.tick()

        simulator = Simulator(array)
        simulator.add_clock(1e-9)
        simulator.add_testbench(drive)
        simulator.run()
        return np.array(found, np.uint32)


@cases(
    "seed, tiles",
    amaranth=[pytest.param(0, 4, marks=pytest.mark.slow)],
    verilator=[(seed, 20) for seed in range(2)],
)
def test_tiles_of_changing_formats_back_to_back(simulator, seed, tiles):
    print("seed", seed)
    rng = np.random.default_rng(seed)
    bench = Bench()
    for _ in range(tiles):
        act_fmt, weight_fmt = FORMATS[rng.integers(7)], FORMATS[rng.integers(7)]
        m = int(rng.integers(1, 7))
        k = int(rng.integers(1, ROWS * group_elements(weight_fmt) + 1))
        n = COLS
        act, act_scales = random_operand(rng, m, k, act_fmt)
        weight, weight_scales = random_operand(rng, n, k, weight_fmt)
        bench.tile(m, act, act_scales, act_fmt, weight, weight_scales, weight_fmt)
    found = bench.run(stall=0.3, rng=rng)
    expected = np.array(bench.expected)
    assert len(expected) and found.shape == expected.shape
    assert np.array_equal(found, expected)


@VERILOG_FIRST
@pytest.mark.parametrize("act_fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("weight_fmt", FORMATS, ids=lambda f: f.name)
def test_every_pair(act_fmt, weight_fmt):
    rng = np.random.default_rng(int(act_fmt) * 8 + int(weight_fmt))
    bench = Bench()
    k = ROWS * group_elements(weight_fmt)
    for m in (1, 3):
        act, act_scales = random_operand(rng, m, k, act_fmt)
        weight, weight_scales = random_operand(rng, COLS, k, weight_fmt)
        bench.tile(m, act, act_scales, act_fmt, weight, weight_scales, weight_fmt)
    found = bench.run()
    assert len(found) == 4 and np.array_equal(found, np.array(bench.expected))


ONE, BIG, NAN = 0x3F80, 0x4280, 0x7FC1  # BF16 codes of 1, 64 and a NaN


def line_of(codes):
    """A line with the given BF16 codes."""
    return np.array(codes, "<u2").view(np.uint8)


def one_slice(bench, at, codes, count, swap=1, scale=127):
    """Slice 0 of a BF16 tile, alone a result: every row has the activations `codes`."""
    line = line_of([*codes, *[0] * (8 - len(codes))])
    bench.slices[at] = dict(
        fields=[(line, scale, 0)] * bench.array.rows,
        act_format=Format.BF16,
        weight_format=Format.BF16,
        index=0,
        n_bits=32,
        count=count,
        swap=swap,
        acc_index=0,
        first=1,
        last=1,
    )


def load_row(bench, at, row, codes, length=8):
    bench.loads[at] = [(row, line_of(codes), 127, Format.BF16, 0, length)] * bench.array.cols


def load_ones(bench, start):
    for row in range(bench.array.rows):
        load_row(bench, start + row, row, [ONE] * 8)


def floats(found):
    return found.view(np.float32)[:, 0].tolist()


@VERILOG_FIRST
def test_distances_of_load_and_swap_are_exact():
    """A load late enough after a swap is for the next tile, a swap late enough after a load takes
    it; one cycle less and it is the other way round.
    """
    bench = Bench()
    all_ones, one_big = 2 * 3.0, 2 * (2 + 64.0)
    want = []
    for number, (row, early) in enumerate(product(range(3), range(2))):
        start = 120 * number
        load_ones(bench, start)
        one_slice(bench, start + 40, [ONE, ONE], 24)
        load_row(bench, start + 40 + MatmulArray.load_after_swap(row) - early, row, [BIG] * 8)
        want.append(one_big if early else all_ones)
        load_ones(bench, start + 60)
        load_row(bench, start + 90, row, [BIG] * 8)
        swap = start + 90 + MatmulArray.swap_after_load(row) - early
        one_slice(bench, swap, [ONE, ONE], 24)
        want.append(all_ones if early else one_big)
    found = bench.run()
    assert floats(found) == want and (found == found[:, :1]).all()


@VERILOG_FIRST
def test_stale_and_masked_nans_influence_nothing():
    """NaN weights of a tile before, in rows not loaded, and beyond the end on both sides."""
    bench = Bench()
    for row in range(3):
        load_row(bench, row, row, [NAN] * 8)
    one_slice(bench, 20, [ONE, ONE], 24)
    # Nine elements: all of row 0 and one of row 1; row 2 keeps its NaN.
    load_row(bench, 30, 0, [ONE] * 8)
    load_row(bench, 33, 1, [BIG, *[NAN] * 7], length=1)
    one_slice(bench, 50, [ONE, NAN], 8)  # row 0 has a NaN that counts
    one_slice(bench, 51, [ONE, ONE], 9, swap=0)
    one_slice(bench, 52, [ONE, ONE], 8, swap=0)
    one_slice(bench, 53, [ONE, NAN], 1, swap=0)
    found = bench.run()
    assert found[0, 0] == 0x7FC00000 and found[1, 0] == 0x7FC00000
    assert floats(found[2:]) == [2.0 + 64.0, 2.0, 1.0]
