# SPDX-License-Identifier: Apache-2.0
"""The code over KV SRAM lines: every flip of one and of two bits, in the model and in RTL."""

from itertools import combinations

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden.ecc import (
    CHECK_BITS,
    CODE_BITS,
    COLUMNS,
    DATA_BITS,
    decode,
    encode,
    syndrome,
    to_bits,
    to_int,
)
from hw.ecc import EccDecoder, EccEncoder
from tests.flat_bench import FlatBench
from tests.simulators import BOTH, VERILOG_FIRST

PAIRS = list(combinations(range(CODE_BITS), 2))


def words(rng: np.random.Generator, count: int) -> np.ndarray:
    """Zeros, ones, one bit each, then random words [count, 136]."""
    fixed = np.vstack([np.zeros((1, DATA_BITS)), np.ones((1, DATA_BITS)), np.eye(DATA_BITS)])
    return np.vstack([fixed, rng.integers(2, size=(count, DATA_BITS))]).astype(np.uint8)


def test_columns() -> None:
    """Different, of odd weight, of the least total weight, spread evenly over the check bits."""
    assert len(COLUMNS) == len(set(COLUMNS)) == CODE_BITS
    weights = [column.bit_count() for column in COLUMNS]
    assert weights == [3] * 84 + [5] * 52 + [1] * 9
    assert COLUMNS[DATA_BITS:] == tuple(1 << i for i in range(CHECK_BITS))
    covered = [sum(c >> i & 1 for c in COLUMNS[:DATA_BITS]) for i in range(CHECK_BITS)]
    assert set(covered) == {56, 57} and sum(covered) == 512


def test_every_single_flip_is_corrected() -> None:
    data = words(np.random.default_rng(31), 20)
    code = encode(data)
    assert not syndrome(code).any()
    kept = decode(code)
    np.testing.assert_array_equal(kept.data, data)
    assert not kept.corrected.any() and not kept.double.any()
    flipped = decode(code[:, None] ^ np.eye(CODE_BITS, dtype=np.uint8))
    np.testing.assert_array_equal(
        flipped.data, np.broadcast_to(data[:, None], (len(data), CODE_BITS, DATA_BITS))
    )
    assert flipped.corrected.all() and not flipped.double.any()


def test_every_double_flip_is_detected() -> None:
    """On words of all kinds: the code is linear, so the words do not matter."""
    rng = np.random.default_rng(32)
    data = rng.integers(2, size=(len(PAIRS), DATA_BITS)).astype(np.uint8)
    flips = np.zeros((len(PAIRS), CODE_BITS), np.uint8)
    flips[np.arange(len(PAIRS))[:, None], np.array(PAIRS)] = 1
    found = decode(encode(data) ^ flips)
    assert found.double.all() and not found.corrected.any()
    assert len(found.double) == 10_440


@pytest.mark.parametrize("shape", [(), (135,), (2, 144)])
def test_wrong_sizes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="words must have 136 bits"):
        encode(np.zeros(shape, np.uint8))
    with pytest.raises(ValueError, match="words must have 145 bits"):
        decode(np.zeros(shape, np.uint8))


class Path(wiring.Component):
    """Encoder, flips, decoder; the outputs a cycle later."""

    def __init__(self) -> None:
        super().__init__(
            {
                "data": In(DATA_BITS),
                "flips": In(CODE_BITS),
                "code": Out(CODE_BITS),
                "back": Out(DATA_BITS),
                "corrected": Out(1),
                "double": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.encoder, m.submodules.decoder = encoder, decoder = EccEncoder(), EccDecoder()
        m.d.comb += [encoder.data.eq(self.data), decoder.code.eq(encoder.code ^ self.flips)]
        m.d.sync += [
            self.code.eq(encoder.code),
            self.back.eq(decoder.data),
            self.corrected.eq(decoder.corrected),
            self.double.eq(decoder.double),
        ]
        return m


def run(cases: list[tuple[int, int]]) -> None:
    """Encodes each word, flips bits, and compares what is decoded with the model."""
    bench = FlatBench(Path())
    code = encode(np.array([to_bits(word, DATA_BITS) for word, _ in cases]))
    flips = np.array([to_bits(mask, CODE_BITS) for _, mask in cases])
    expected = decode(code ^ flips)
    compared = 0

    async def drive(_: FlatBench) -> None:
        nonlocal compared
        for i in range(len(cases) + 1):
            if i < len(cases):
                bench.drive["data"], bench.drive["flips"] = cases[i]
            bench.settle()
            if i:
                assert bench["code"] == to_int(code[i - 1])
                assert bench["back"] == to_int(expected.data[i - 1])
                assert bench["corrected"] == expected.corrected[i - 1]
                assert bench["double"] == expected.double[i - 1]
                compared += 1
            await bench.tick()

    bench.run(drive)
    assert compared == len(cases)


def random_words(rng: np.random.Generator, count: int) -> list[int]:
    return [to_int(bits) for bits in rng.integers(2, size=(count, DATA_BITS))]


@BOTH
def test_encoder_and_single_flips() -> None:
    """Words of one bit give every column; each bit of a code word is flipped once."""
    rng = np.random.default_rng(33)
    cases = [(to_int(word), 0) for word in words(rng, 10)]
    cases += [(w, 1 << b) for b, w in enumerate(random_words(rng, CODE_BITS))]
    run(cases)


@BOTH
def test_some_flips_of_two_and_more_bits() -> None:
    rng = np.random.default_rng(34)
    masks = [(1 << a) | (1 << b) for a, b in rng.permutation(PAIRS)[:100].tolist()]
    masks += [sum(1 << int(b) for b in rng.permutation(CODE_BITS)[:n]) for n in (3, 4, 5, 70)]
    run(list(zip(random_words(rng, len(masks)), masks, strict=True)))


@VERILOG_FIRST
def test_every_double_flip_in_rtl() -> None:
    rng = np.random.default_rng(35)
    masks = [(1 << a) | (1 << b) for a, b in PAIRS]
    run(list(zip(random_words(rng, len(masks)), masks, strict=True)))
