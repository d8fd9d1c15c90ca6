# SPDX-License-Identifier: Apache-2.0
"""Agents: patterns keep order and content, planted faults are seen, an empty scoreboard fails."""

import numpy as np
import pytest
from amaranth import signed
from amaranth.lib import data

from hw.verilog import emit
from sim import runner, verilator
from tb.agents import Packing, Scoreboard
from tests.designs.buffers import WORD, Pair, Rude


@pytest.fixture(scope="module")
def pair():
    return verilator.build(emit(Pair(), "pair"), "pair", blocks=["test_buffer"])


@pytest.fixture(scope="module")
def rude():
    return verilator.build(emit(Rude(), "rude"), "rude")


@pytest.mark.parametrize(
    "idle, stall, least, most",
    [(0.0, 0.0, 600, 610), (0.6, 0.0, 750, 1200), (0.0, 0.6, 750, 1400), (0.6, 0.6, 900, 1800)],
)
def test_patterns(pair, idle, stall, least, most):
    result = runner.run(
        pair,
        "tests.designs.bench_pair",
        seed=11,
        only=".*passes",
        parameters={"idle": idle, "stall": stall, "words": 300},
        arrays={"given": np.zeros(1)},
    )
    assert (result.report["compared"], result.report["mismatched"]) == (300, 0)
    assert least <= result.report["cycles"] <= most
    assert (result.report["waits"] > 0) == (stall > 0)


@pytest.mark.parametrize(
    "fault, what",
    [(0, None), (1, "valid fell before the word was taken"), (2, "payload changed from")],
)
def test_planted_faults(rude, fault, what):
    result = runner.run(
        rude, "tests.designs.bench_rude", parameters={"fault": fault, "empty": False}, seed=fault
    )
    assert result.report["compared"] > 0 and result.report["handovers"] > 0
    if what is None:
        assert result.report["count"] == 0 and result.report["mismatched"] == 0
    else:
        assert result.report["count"] > 0 and result.report["mismatched"] > 0
        assert all(v.startswith(what) for v in result.report["violations"])


def test_empty_scoreboard_fails_the_bench(rude):
    with pytest.raises(runner.ToolError, match="nothing was compared"):
        runner.run(rude, "tests.designs.bench_rude", parameters={"fault": 0, "empty": True})
    result = runner.run(
        rude, "tests.designs.bench_rude", parameters={"fault": 0, "empty": True}, check=False
    )
    assert len(result.failures) == 1 and len(result.outcomes) == 2


def test_scoreboard():
    board = Scoreboard("x")
    with pytest.raises(AssertionError, match="nothing was compared"):
        board.check()
    board.expect(1, 2, 3)
    board.got(1)
    with pytest.raises(AssertionError, match="2 expected values did not come"):
        board.check()
    board.got(5)
    board.got(3)
    with pytest.raises(AssertionError, match=r"1 of 3 differ: x\[1\]: 5, expected 2"):
        board.check()
    board.got(9)
    assert board.counts() == {"compared": 4, "mismatched": 2, "missing": 0}


def test_packing_agrees_with_amaranth():
    rng = np.random.default_rng(5)
    shape = data.StructLayout({"a": signed(5), "b": data.ArrayLayout(WORD, 2), "c": 1})
    packing = Packing(shape)
    assert packing.width == shape.size == 38
    for _ in range(50):
        bits = int.from_bytes(rng.bytes(5), "little") >> 2
        value = packing.unpack(bits)
        constant = shape.from_bits(bits)
        assert value["a"] == constant.a and value["c"] == constant.c
        assert value["b"][1]["value"][1] == constant.b[1].value[1]
        assert packing.pack(value) == bits


@pytest.mark.parametrize(
    "value, message",
    [
        ({"tag": 16, "value": [0, 0]}, "tag must be from 0 to 15, not 16"),
        ({"tag": 1}, "fields of payload must be"),
        ({"tag": 1, "value": [0]}, "length of value must be 2, not 1"),
    ],
)
def test_packing_refuses(value, message):
    with pytest.raises(ValueError, match=message):
        Packing(WORD).pack(value)
