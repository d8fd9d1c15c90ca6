# SPDX-License-Identifier: Apache-2.0
"""A tile stops with a status the host reads: illegal command, bad address, overflow, deadlock."""

import numpy as np
import pytest

from golden.formats import Format
from golden.kernels.trace import Stored
from hw.config import preset
from hw.isa import SEMAPHORE_MAX
from sim.assembler import Program
from sim.harness import build_system
from sim.kernels.system import tile_words
from sim.programs.memory import TileMemory
from sim.runner import run

TINY = preset("tiny")
FAR = 1 << 30


def status_of(*programs, err=(0, 0), limit=20_000, memory=None):
    """Runs the programs one after the other, a host reset between them; their statuses."""
    words, plan = [], []
    for i, program in enumerate(programs):
        images = memory if memory is not None and i == 0 else TileMemory(TINY.tile)
        fresh = tile_words(images, program, TINY)
        plan.append(
            {
                "load": [[len(words), len(fresh)]],
                "start": [0],
                "limit": limit,
                "reads": [],
                "reset": int(i > 0),
            }
        )
        words += fresh
    result = run(
        build_system(TINY),
        "tb.bench_tile",
        files={"host0.hex": "\n".join(words) + "\n"},
        plusargs=["+host0=host0.hex"],
        seed=5,
        parameters={"runs": plan, "stall": 0, "err": list(err)},
    )
    return [done["status"][0] for done in result.report["runs"]]


def program(*commands):
    """A program of (name, operands) commands and a halt."""
    p = Program()
    for name, operands in commands:
        getattr(p, name)(**operands)
    p.halt()
    return p


VECTOR = {"rows": 1, "cols": 4, "a_format": 7, "out_format": 7, "store": 1}
MATMUL = {"m": 1, "n": 4, "k": 8, "act_format": 6, "weight_format": 6, "weight_gstride": 1}
GOOD = program(("vector", VECTOR | {"a_addr": 0, "out_addr": 64}))

ILLEGAL = {
    "matmul": MATMUL | {"m": 0},
    "vector": VECTOR | {"cols": 0},
    "topk": {"count": 0, "k": 1},
    "dma": {"lines": 0, "rows": 1},
    "stream": {"rows": 0},
    "kvappend": {"head_dim": 12, "keys": 1, "format": 6},
    "send": {"lines": 0, "rows": 1},
    "collective": {"lines": 1, "op": 3},
}
OUT_OF_RANGE = {
    "matmul": MATMUL | {"act_addr": FAR},
    "vector": VECTOR | {"a_addr": FAR},
    "topk": {"count": 4, "k": 1, "score_addr": FAR},
    "dma": {"lines": 1, "rows": 1, "local_addr": FAR},
    "stream": {"rows": 1, "hbm_addr": FAR},
    "kvappend": {"head_dim": 8, "keys": 1, "k_base": 1 << 20, "format": 6},
    "send": {"lines": 1, "rows": 1, "src_addr": FAR},
    "collective": {"lines": 1, "src_addr": FAR},
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_command(name):
    bad, good = status_of(program((name, ILLEGAL[name])), GOOD)
    assert (bad["status"], bad["pc"]) == ("ILLEGAL_COMMAND", 0)
    assert good["status"] == "DONE"


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_address_out_of_range(name):
    bad, good = status_of(program((name, OUT_OF_RANGE[name])), GOOD)
    assert (bad["status"], bad["pc"]) == ("ADDRESS_RANGE", 0)
    assert good["status"] == "DONE"


def test_unknown_opcode():
    p = Program()
    p.raw([63, 0, 0, 0])
    assert status_of(p)[0]["status"] == "ILLEGAL_COMMAND"


def test_destination_that_does_not_exist():
    bad, good = status_of(program(("send", {"x": 5, "y": 0, "lines": 1, "rows": 1})), GOOD)
    assert bad["status"] == "NO_DESTINATION" and good["status"] == "DONE"


@pytest.mark.slow  # 65,536 posts; the semaphores' own tests overflow too
def test_semaphore_overflow():
    p = Program()
    with p.loop(p.reg("count"), SEMAPHORE_MAX + 1):
        p.post(3)
    p.halt()
    (status,) = status_of(p, limit=2_000_000)
    assert (status["status"], status["semaphore"]) == ("SEMAPHORE_OVERFLOW", 3)


def test_deadlock_and_cycle_limit():
    local, remote = Program(), Program()
    local.vector(wait=(2,), **VECTOR)
    local.halt()
    remote.wait(31)  # another tile may still post it
    remote.halt()
    first, second = status_of(local, remote, limit=3_000)
    assert first["status"] == "DEADLOCK"
    assert second["status"] == "CYCLE_LIMIT" and second["cycles"] >= 3_000


@pytest.mark.parametrize(
    "command",
    [("dma", {"lines": 4, "rows": 1, "hbm_addr": 4096}), ("stream", {"rows": 2, "hbm_addr": 4096})],
    ids=lambda c: c[0],
)
def test_hbm_error(command):
    bad, good = status_of(program(command), GOOD, err=(4096, 8192))
    assert bad["status"] == "HBM_ERROR" and good["status"] == "DONE"


def test_rows_of_nan_are_reported_and_give_ids():
    memory = TileMemory(TINY.tile)
    scores = memory.buffer("scores", 1, 8)
    nan = np.full((1, 8), 0x7FC00000, np.uint32)
    memory.fill(scores, Stored(nan, Format.FP32))
    p = program(
        (
            "topk",
            {"count": 8, "k": 2, "score_addr": scores.address, "ids_addr": 256, "scores_addr": 512},
        )
    )
    status = status_of(p, memory=memory)[0]
    assert status["status"] == "DONE" and status["nan_row"] == 1
