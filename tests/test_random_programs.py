# SPDX-License-Identifier: Apache-2.0
"""Random legal programs against the bit-exact model of a tile, with stalls on every stream, and
with the order of their commands checked.
"""

import numpy as np
import pytest

from golden.formats import SCALE_ONE, Format
from golden.kernels.trace import Stored
from hw.config import preset
from sim.kernels.system import Check, KvCheck, TileRun, simulate
from sim.kernels.types import KernelRequest
from sim.programs.memory import Buffer
from tests.command_model import TileModel
from tests.random_programs import RandomPrograms

TINY = preset("tiny")


def run(seed, stall, programs, commands):
    """Programs in one simulation, every byte that they may touch compared after each."""
    print(f"seed {seed}, {stall} stalls, {programs} programs of {commands} commands")
    made = RandomPrograms(np.random.default_rng(seed), TINY.tile)
    model = TileModel(TINY.tile)
    image = np.frombuffer(bytes(made.memory.hbm_image), np.uint8)
    model.hbm[: len(image)] = image
    whole = Buffer("sram", 0, 1, made.bytes // 4, Format.FP32, made.bytes)
    runs, ones = [], np.full((made.kv_rows, TINY.tile.cols), SCALE_ONE, np.uint8)
    for _ in range(programs):
        program, images = made.program(commands)
        model.host(images)
        model.run(program.assemble())
        sram = model.sram[: made.bytes].copy().view("<u4")[None]
        kv = model.kv[: made.kv_rows].copy().view("<u2")
        runs.append(
            TileRun(
                [program],
                [images],
                [Check(whole, Stored(sram, Format.FP32))],
                [KvCheck("kv", 0, kv, np.ones(kv.shape, bool), ones)],
            )
        )
    assert not model.stream
    print(made.commands)
    request = KernelRequest(TINY, "gpt-oss", {}, stall, seed, None, True)
    result = simulate(request, [made.memory], runs)
    assert result.compared > programs * made.bytes // 4 and not result.mismatched, (
        result.differences
    )
    assert result.order is not None and not result.order.findings, result.order.findings[0]
    assert result.order.commands == model.executed
    assert result.order.dependences > 2 * programs * commands // 3
    return made.commands


@pytest.mark.parametrize(("seed", "stall"), [(1, "none"), (2, "light"), (3, "heavy")])
def test_random_programs(seed, stall):
    commands = run(seed, stall, 4, 45)
    assert {"scores", "product", "vector", "append", "paged"} <= set(commands)


@pytest.mark.slow
@pytest.mark.parametrize("stall", ["none", "light", "heavy"])
@pytest.mark.parametrize("seed", range(10, 20))
def test_many_random_programs(seed, stall):
    run(seed, stall, 12, 60)
