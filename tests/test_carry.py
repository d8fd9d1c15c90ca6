# SPDX-License-Identifier: Apache-2.0
"""Adders, comparators and counters by blocks, and the places of operands' bits in a cell."""

from itertools import product

import numpy as np
import pytest
from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator

from golden.formats import DIGITS, LANES, NATIVE_FORMAT, SPECS, Native
from hw.arrangement import activation_places, weight_places
from hw.carry import add, greater, increment, leading_zeros

WIDTH = 13


class Carries(wiring.Component):
    def __init__(self) -> None:
        super().__init__({
            "a": In(WIDTH), "b": In(WIDTH), "carry": In(1),
            "total": Out(WIDTH + 1), "plain": Out(WIDTH + 1), "more": Out(WIDTH + 1),
            "above": Out(1), "zeros": Out(4),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        m.d.comb += [
            self.total.eq(add(m, "total", self.a, self.b, self.carry, blocks=(3, 4, 4))),
            self.plain.eq(add(m, "plain", self.a, self.b, blocks=(5,))),
            self.more.eq(increment(m, "more", self.a, self.carry, blocks=(4, 4))),
            self.above.eq(greater(m, "above", self.a, self.b)),
            self.zeros.eq(leading_zeros(m, "lead", self.a)),
        ]
        return m


def test_carries():
    rng = np.random.default_rng(5)
    top = (1 << WIDTH) - 1
    near = [(a, min(top, max(0, a + d))) for a in (0, 1, 127, 128, 4095, top) for d in (-1, 0, 1)]
    ones = [(top >> k << k, 1 << j) for k in range(WIDTH) for j in range(WIDTH)]
    free = rng.integers(0, top + 1, (1500, 2)) >> rng.integers(0, WIDTH, (1500, 1))
    dut = Carries()

    async def bench(ctx):
        for a, b in [*near, *ones, *free.tolist()]:
            for carry in (0, 1):
                ctx.set(dut.a, a)
                ctx.set(dut.b, b)
                ctx.set(dut.carry, carry)
                found = [ctx.get(s) for s in (dut.total, dut.plain, dut.more, dut.above, dut.zeros)]
                assert found == [a + b + carry, a + b, a + carry, a > b, WIDTH - a.bit_length()]

    simulator = Simulator(dut)
    simulator.add_testbench(bench)
    simulator.run()


def test_unequal_widths():
    with pytest.raises(ValueError, match="operands must be of equal width, not 3 and 4"):
        add(Module(), "sum", Signal(3), Signal(4), blocks=(2,))


@pytest.mark.parametrize("native", Native)
def test_every_bit_of_a_weight_has_one_place(native):
    assert sorted(weight_places(native)) == list(range(128))


@pytest.mark.parametrize(
    ("act", "weight"), [(a, w) for a, w in product(Native, Native) if DIGITS[a] >= DIGITS[w]]
)
def test_activations_are_repeated_for_each_digit_of_a_weight(act, weight):
    bits = SPECS[NATIVE_FORMAT[act]].bits * LANES // (DIGITS[act] * DIGITS[weight])
    counts = np.bincount(activation_places(act, weight))
    assert counts.tolist() == [DIGITS[weight]] * bits
