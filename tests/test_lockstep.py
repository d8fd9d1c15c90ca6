# SPDX-License-Identifier: Apache-2.0
"""The lockstep simulator behaves as Amaranth's; its cache takes equal components for equal."""

import pytest
from amaranth import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.config import PRESETS
from sim.blocks import BLOCKS
from sim.lockstep import Flat, Simulator, _identity
from tests import simulators
from tests.simulators import BOTH

ITEM = data.StructLayout({"low": 4, "high": data.ArrayLayout(6, 2)})
SMALL = [name for name in BLOCKS if name not in ("chip", "tile")]


class Totals(wiring.Component):
    """Adds up what its stream brings, `step` at a time; half rate."""

    input: In(stream.Signature(ITEM))
    total: Out(8)
    twice: Out(9)

    def __init__(self, step: int):
        self.step = step
        super().__init__()

    def elaborate(self, platform):
        m = Module()
        busy = Signal()
        m.d.comb += [self.input.ready.eq(~busy), self.twice.eq(2 * self.total + self.input.p.low)]
        m.d.sync += busy.eq(self.input.valid & ~busy)
        with m.If(self.input.valid & ~busy):
            m.d.sync += self.total.eq(self.total + self.step * self.input.p.low)
        return m


@BOTH
def test_testbenches_see_what_amaranth_shows_them():
    dut = Totals(2)
    seen, watched, sampled = [], [], []

    async def drive(ctx):
        for low in (1, 5, 7):
            ctx.set(dut.input.p, {"low": low, "high": [low + 1, 3]})
            ctx.set(dut.input.p.high[1], 9)
            ctx.set(dut.input.valid, 1)
            seen.append((ctx.get(dut.twice), ctx.get(dut.input.p).high[1]))
            (total,) = await ctx.tick().sample(dut.total).until(dut.input.ready)
            seen.append((total, ctx.get(dut.total), ctx.get(dut.total + dut.twice)))
        ctx.set(dut.input.valid, 0)
        await ctx.tick().repeat(2)

    async def after(ctx):
        while True:
            watched.append((ctx.get(dut.input.valid), ctx.get(dut.total)))
            await ctx.tick()

    async def samples(ctx):
        async for clock, reset, total in ctx.tick().sample(dut.total):
            sampled.append((clock, reset, total))

    simulator = simulators.Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(drive)
    simulator.add_testbench(after, background=True)
    simulator.add_testbench(samples, background=True)
    simulator.run()
    assert seen == [(1, 9), (0, 2, 7), (9, 9), (2, 12, 41), (31, 9), (12, 26, 85)]
    assert [total for _, total in watched[:7]] == [0, 2, 2, 12, 12, 26, 26]
    assert [valid for valid, _ in watched[:7]] == [1, 1, 1, 1, 1, 0, 0]
    assert sampled[:6] == [(True, False, total) for total in (0, 2, 2, 12, 12, 26)]


def test_only_ports_may_be_used():
    inside = Signal()

    async def look(ctx):
        ctx.get(inside)

    simulator = Simulator(Totals(2))
    simulator.add_testbench(look)
    with pytest.raises(ValueError, match="a testbench must use ports only"):
        simulator.run()


def identity(component: wiring.Component) -> str:
    flat = Flat(component)
    component._MustUse__used = flat._MustUse__used = True
    return _identity([flat.dut, flat.inputs, flat.outputs], {}, set())


@pytest.mark.parametrize("name", SMALL)
def test_equal_components_are_one_in_the_cache(name):
    tiny = identity(BLOCKS[name].make(PRESETS["tiny"]))
    assert tiny == identity(BLOCKS[name].make(PRESETS["tiny"])) and " at 0x" not in tiny


def test_parameters_tell_components_apart():
    assert identity(Totals(1)) != identity(Totals(2))
    engines = [identity(BLOCKS["matrix_engine"].make(PRESETS[p])) for p in ("tiny", "small")]
    assert engines[0] != engines[1]
    odd = Totals(1)
    odd.step = object()
    with pytest.raises(TypeError, match="plain data or ports"):
        identity(odd)
