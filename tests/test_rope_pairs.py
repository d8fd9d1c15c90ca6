# SPDX-License-Identifier: Apache-2.0
"""RoPE in interleaved pairs (DeepSeek, Kimi) as two VECTOR commands, against the float64 reference.

a' = a permuted by i XOR 1; first a' * sine, whose row has the signs of the pairs, then
a * cosine + that. Each of the three operations rounds once, by at most u = 2^-24 of its result or,
where it is subnormal, by 2^-150 (a sum is exact there):

    |result - reference| <= ((1 + u)^2 - 1) (|a cosine| + |a' sine|) + 2^-148

on the tables as stored in FP32.
"""

import numpy as np
import pytest

from golden.formats import Format
from golden.reference.rope import rope_interleaved, rope_tables, yarn_inv_freq
from golden.vector import rotate
from hw.config import preset
from hw.isa import Kind, Select, Status
from hw.vector_engine import VectorEngine
from tests.simulators import VERILOG_FIRST
from tests.vector_bench import Memory, apply, blank, run

TINY = preset("tiny").tile
SEED = 5_020
A, TURNED, COSINE, SINE, OUT = (1 << 12) * np.arange(5)
U = 2.0**-24


def rows_of_tables(cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tables [S, dim / 2] as rows [S, dim] of a command: each twice, the sine with signs."""
    cosine = np.repeat(cos.astype(np.float32), 2, axis=1)
    sine = np.repeat(sin.astype(np.float32), 2, axis=1)
    sine[:, 0::2] *= -1
    return cosine, sine


def bound(a: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> np.ndarray:
    a, cosine, sine = (np.abs(x.astype(np.float64)) for x in (a, cosine, sine))
    paired = a[:, np.arange(a.shape[1]) ^ 1]
    return ((1 + U) ** 2 - 1) * (a * cosine + paired * sine) + 2.0**-148


@VERILOG_FIRST
@pytest.mark.parametrize("stall", [0.0, 0.3])
@pytest.mark.parametrize("dim, rows", [(2, 3), (6, 5), (64, 5)])
def test_pairs(dim, rows, stall):
    """Rows at positions of their own, up to 131071; rows shorter than a vector, and longer ones."""
    seed = SEED + dim
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    positions = np.concatenate([[0, 131071], rng.integers(0, 1 << 17, rows - 2)])
    frequencies = yarn_inv_freq(dim, 10_000.0, 40.0, 4096, 32.0, 1.0, True)
    cos, sin = rope_tables(positions, frequencies)
    cosine, sine = rows_of_tables(cos, sin)
    a = (rng.standard_normal((rows, dim)) * np.exp2(rng.integers(-8, 9))).astype(np.float32)
    memory = Memory(1 << 15, rng)
    for address, table in ((A, a), (COSINE, cosine), (SINE, sine)):
        for r in range(rows):
            memory.put(int(address) + 256 * r, table[r], Format.FP32)
    base = blank() | {"rows": rows, "cols": dim, "store": 1, "mul": 1}
    base |= {f"{name}_format": int(Format.FP32) for name in ("a", "b", "d", "out")}
    base |= {f"{name}_stride": 64 for name in ("a", "b", "d", "out")}
    base |= {"a_addr": int(A), "b_kind": int(Kind.VECTOR)}
    commands = [
        base | {"permute": 1, "b_addr": int(SINE), "out_addr": int(TURNED)},
        base
        | {
            "b_addr": int(COSINE),
            "add": 1,
            "s3": int(Select.D),
            "d_kind": int(Kind.VECTOR),
            "d_addr": int(TURNED),
            "out_addr": int(OUT),
        },
    ]
    expected = memory.copy()
    for command in commands:
        apply(expected, command, TINY.lanes)
    result = run(VectorEngine(TINY), memory, commands, stall=stall, seed=seed)
    assert result.errors == [Status.RUNNING] * 2
    assert np.array_equal(memory.data, expected.data)
    found = np.stack([memory.load(int(OUT) + 256 * r, dim, Format.FP32) for r in range(rows)])
    assert np.array_equal(found, rotate(a, cosine, sine, 1, lanes=TINY.lanes))
    reference = rope_interleaved(a, cosine[:, 0::2].astype(float), sine[:, 1::2].astype(float))
    error = np.abs(found - reference)
    assert (error <= bound(a, cosine, sine)).all()
    # It is a rotation of pairs, not of halves or in the other direction.
    assert np.abs(found - a).max() > 0.01 * np.abs(a).max()
    other = rope_interleaved(a, cosine[:, 0::2].astype(float), -sine[:, 1::2].astype(float))
    assert (np.abs(other - found) > bound(a, cosine, sine))[1:].any()
    assert np.array_equal(found[0], a[0]), "position 0 turns nothing"
