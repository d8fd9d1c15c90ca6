# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention in RTL: decode and prefill against the bit-exact model."""

import numpy as np
import pytest

from golden.bounds import mla_bound
from golden.formats import Format
from golden.kernels.mla import MlaCache
from golden.models import DEEPSEEK_R1, KIMI_K25
from hw.config import preset
from sim.assembler import disassemble
from sim.errors import InputError
from sim.kernels.mla import KERNEL, OPTIONS, Sizes, random_mla, shape_of
from sim.kernels.system import Check
from sim.kernels.types import KernelRequest
from sim.programs.builder import TileProgram
from sim.programs.memory import TileMemory
from tests.kernel_checks import rng_of

TINY = {
    "heads": 3,
    "q_lora": 24,
    "kv_lora": 32,
    "nope": 16,
    "rope": 8,
    "v": 8,
    "hidden": 32,
    "context": 20,
}
# Nothing that may be something else is a multiple of the array's sizes.
ODD = {"hidden": 33, "q_lora": 23, "nope": 9, "v": 12, "heads": 5}


def simulate(config, stall="none", seed=0, model="deepseek-r1", **settings):
    given = KERNEL.settings({name: str(value) for name, value in settings.items()})
    print("mla", config, model, stall, "seed", seed, given)
    result = KERNEL.run(KernelRequest(preset(config), model, given, stall, seed))
    assert result.compared > 0 and result.mismatched == 0, result.differences
    assert result.passed and 0 < result.fraction_of_roofline <= 1
    return result


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("settings", "stall", "model"),
    [
        # Steps after the first start in what the one before has left.
        ({"steps": 3, "chunk": 8} | ODD, "heavy", "deepseek-r1"),
        ({"tokens": 5, "steps": 2, "chunk": 8} | ODD, "none", "kimi-k2.5"),
        pytest.param({}, "none", "kimi-k2.5", marks=SLOW),
        pytest.param({"context": 1}, "none", "deepseek-r1", marks=SLOW),
        pytest.param({"context": 9, "tokens": 9}, "heavy", "deepseek-r1", marks=SLOW),
        pytest.param({"heads": 1, "tokens": 3}, "light", "kimi-k2.5", marks=SLOW),
        pytest.param({"heads": 1, "context": 17}, "light", "kimi-k2.5", marks=SLOW),
        pytest.param({"tokens": 4, "steps": 5}, "heavy", "deepseek-r1", marks=SLOW),
        pytest.param({"stream": 0, "steps": 2}, "heavy", "deepseek-r1", marks=SLOW),
        pytest.param({"stream": 0, "tokens": 5} | ODD, "none", "deepseek-r1", marks=SLOW),
        pytest.param({"heads": 20, "hidden": 40}, "heavy", "deepseek-r1", marks=SLOW),
        pytest.param({"heads": 20, "tokens": 2, "steps": 2}, "none", "kimi-k2.5", marks=SLOW),
        pytest.param({"kv_lora": 40, "rope": 16, "v": 4}, "light", "kimi-k2.5", marks=SLOW),
    ],
    ids=str,
)
def test_mla(settings, stall, model):
    simulate("tiny", stall, seed=10, model=model, **(TINY | settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"steps": 2, "context": 600, "hidden": 64, "kv_lora": 32},  # two chunks
        {"tokens": 70, "context": 90, "heads": 2, "hidden": 64, "kv_lora": 32},  # two blocks
        {"tokens": 9},
    ],
    ids=str,
)
def test_small_tile(settings):
    simulate("small", seed=11, **settings)


def test_every_buffer_is_compared(monkeypatch):
    """Each buffer of the model has a check, those of the chunks while they have their places."""
    seen = []

    class Stop(Exception):
        pass

    def note(request, memories, runs, **_):
        seen.extend(runs)
        raise Stop

    monkeypatch.setattr("sim.kernels.mla.simulate", note)
    for tokens in (1, 3):
        with pytest.raises(Stop):
            simulate("tiny", **(TINY | {"tokens": tokens, "context": 9}))
        (run,) = seen
        seen.clear()
        names = {check.buffer.name for check in run.checks if isinstance(check, Check)}
        wanted = {
            *("x", "q_a", "q_norm.squares", "q_norm.inverse", "q_latent", "q_rope", "q_turned"),
            *("kv_a", "kv_norm.squares", "kv_norm.inverse", "k_turned", "key", "queries"),
            *("mixed", "attended", "projected", "q_nope.h0", "q_nope.h1", "q_nope.h2"),
            *(("g0.c0.scores", "g0.inverse") if tokens == 1 else ("h2.b0.c0.scores",)),
        }
        assert wanted <= names and len(run.kv_checks) == 2
        assert len(run.checks) == len(names)


def test_projections_come_before_what_the_vector_engine_does_for_them(monkeypatch):
    """The array has the latent's product before the queries', whose norm it covers, and all
    projections before the first scores.
    """
    programs = []

    class Stop(Exception):
        pass

    def note(request, memories, runs, **_):
        programs.extend(runs[0].programs)
        raise Stop

    monkeypatch.setattr("sim.kernels.mla.simulate", note)
    with pytest.raises(Stop):
        simulate("tiny", **TINY)
    (program,) = programs
    issued = [line.split()[0] for line in disassemble(program.assemble())]
    engines = [name for name in issued if name in ("matmul", "vector", "kvappend")]
    assert engines[:6] == ["matmul", "matmul", "vector", "vector", "vector", "matmul"]
    # q_a, kv_a, q_rope, q_nope, absorb, scores, product, expand, output
    assert engines.count("matmul") == 4 + 3 + 2 + 3 + 1
    assert engines.count("kvappend") == 2
    # The streams of the value matrices are started before the attention that covers them.
    streams = [i for i, name in enumerate(issued) if name == "stream"]
    products = [i for i, name in enumerate(issued) if name == "matmul"]
    assert len(streams) == 4 + 3 + 3 + 1
    assert max(streams[:-1]) < products[4 + 3]


def test_bound_of_the_last_tokens_alone():
    """`first` leaves out tokens and changes nothing else."""
    rng = rng_of(12)
    given = {name: option.default for name, option in OPTIONS.items()} | TINY
    shape = shape_of(DEEPSEEK_R1.attention, Sizes(**given), 8)
    weights = random_mla(rng, shape, 32)
    xs = rng.standard_normal((7, 32)).astype(np.float32)
    cos, sin = rng.standard_normal((2, 7, 4)).astype(np.float32)
    args = shape, weights, MlaCache.empty(shape), xs, cos, sin
    reference, bound = mla_bound(*args)
    for first in (0, 1, 6):
        last = mla_bound(*args, first)
        np.testing.assert_array_equal(last[0], reference[first:])
        np.testing.assert_array_equal(last[1], bound[first:])
    with pytest.raises(ValueError, match="first must be 0 to 6, not 7"):
        mla_bound(*args, 7)


@pytest.mark.parametrize("model", [DEEPSEEK_R1, KIMI_K25], ids=lambda m: m.name)
def test_scale_at_the_models_own_sizes(model):
    own = model.attention
    names = ("heads", "q_lora", "kv_lora", "nope", "rope", "v")
    sizes = {name: option.default for name, option in OPTIONS.items()}
    sizes |= {name: getattr(own, name) for name in names} | {"hidden": model.hidden}
    shape = shape_of(own, Sizes(**sizes), 64)
    assert shape.scale == own.scale and shape.eps == own.norm_eps
    assert all(getattr(shape, name) == getattr(own, name) for name in names)


def test_shared_places_end_with_a_rewind():
    """A place above the mark is free again: the next buffer of its kind must not take it."""
    memory = TileMemory(preset("tiny").tile)
    kept = memory.buffer("kept", 1, 8, share="below")
    mark = memory.mark()
    memory.buffer("first", 4, 8, share="above")
    memory.rewind(mark)
    other = memory.buffer("other", 4, 8)
    again = memory.buffer("again", 4, 8, share="above")
    assert again.address >= other.at(3, 8)
    assert memory.buffer("kept again", 1, 8, share="below").address == kept.address


def test_a_stream_that_was_started_is_not_started_again():
    p = TileProgram(TileMemory(preset("tiny").tile))
    weights = p.memory.weights("w", np.zeros((8, 16), np.uint16), None, Format.BF16, True)
    x = p.memory.buffer("x", 1, 16, Format.BF16, weight=Format.BF16)
    y = p.memory.buffer("y", 1, 8)
    p.stream(weights)
    p.matmul(x, weights, y, fetched=True)
    p.matmul(x, weights, y)
    issued = [line.split()[0] for line in disassemble(p.finish().assemble())]
    assert issued[:4] == ["stream", "matmul", "stream", "matmul"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_lora": 36}, "kv_lora is 36, but it must be a multiple of 8"),
        ({"rope": 4}, "rope is 4, but it must be a multiple of 8"),
        ({"v": 6}, "v is 6, but it must be a multiple of 4"),
        ({"chunk": 12}, "chunk is 12, but it must be a multiple of 8"),
        ({"tokens": 7, "steps": 3}, "context is 20, but 21 of its tokens are new"),
        ({"heads": 257}, "heads is 257, but the array takes 256 rows"),
        ({"tokens": 257, "context": 300}, "tokens is 257, but the array takes 256 rows"),
        ({"heads": 65535, "tokens": 2}, "the tile has"),
        ({"hidden": 65535, "q_lora": 65535}, "the tile has"),
        ({"context": 65535}, "the tile has"),
        ({"stream": 0, "hidden": 4096}, "the tile has"),
        ({"context": 65535, "kv_lora": 8, "steps": 65535}, "KV SRAM"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(settings, message):
    with pytest.raises(InputError) as error:
        simulate("tiny", **(TINY | settings))
    assert message in str(error.value) and "\n" not in str(error.value)
