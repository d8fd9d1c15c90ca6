# SPDX-License-Identifier: Apache-2.0
"""Prefill and caches in E4M3: schedules, and the bit-exact kernels against float64."""

from dataclasses import replace

import numpy as np
import pytest

from golden.bounds import attention_bound, prefill_bound
from golden.formats import Format, to_bf16_codes
from golden.kernels.attention import attention, chunks, window_slots
from golden.kernels.kv import Held, kv_scale
from golden.kernels.prefill import RowBlock, prefill, schedule
from golden.kernels.trace import Machine, Trace
from golden.models import GPT_OSS_120B
from golden.quantise import quantise_fixed
from golden.reference.attention import GqaWeights, attention_core, gqa_project, visible_keys
from golden.reference.linear import linear
from golden.reference.rope import rope_tables
from golden.vector import counted
from tests.kernel_checks import MACHINES, SMALL, TINY, load, near, rng_of, within

E4M3 = Format.MXFP8_E4M3


def tokens_of(slots: int, newest: int, ring: int) -> np.ndarray:
    """[slots]: the token that lies in each slot when `newest` was the last to be appended."""
    slot = np.arange(slots)
    return newest - (newest - slot) % ring


def seen_by(blocks: list[RowBlock], count: int, slots: int) -> np.ndarray:
    """[count, slots]: what the masks of a schedule let through; no slot may be walked twice."""
    seen = np.zeros((count, slots), int)
    for block in blocks:
        for part in block.parts:
            assert 0 <= part.start < part.stop <= slots
            for r in range(block.rows):
                shown = np.ones(part.stop - part.start, bool)
                if part.mask is not None:
                    steps = {"mask_lo_step": part.lo_step, "mask_hi_step": part.hi_step}
                    shown = counted(part.stop - part.start, *part.mask, r, **steps)
                seen[block.first + r, part.start : part.stop] += shown
    assert seen.max() == 1
    return seen == 1


CASES = [  # position, count, ring, window, size, block, unit
    (0, 1, 8, None, 8, 4, 8),
    (0, 24, 32, None, 16, 4, 8),
    (5, 30, 40, None, 512, 16, 8),
    (17, 7, 24, None, 8, 1, 8),
    (0, 24, 32, 8, 16, 4, 8),
    (100, 24, 32, 8, 16, 4, 8),
    (61, 20, 40, 9, 8, 20, 8),
    (1000, 8, 16, 1, 16, 3, 4),
    (3, 12, 16, 5, 16, 12, 4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_schedules_show_each_query_what_it_sees(case: tuple) -> None:
    position, count, ring, window, size, block, unit = case
    sizes = {"ring": ring, "window": window, "size": size, "block": block, "unit": unit}
    blocks = schedule(position, count, **sizes)
    slots = min(position + count, ring)
    held = tokens_of(slots, position + count - 1, ring)
    allowed = visible_keys(position + np.arange(count), held, window)
    np.testing.assert_array_equal(seen_by(blocks, count, slots), allowed)
    assert sum(b.rows for b in blocks) == count
    for b in blocks:
        rows = allowed[b.first : b.first + b.rows]
        for part in b.parts:
            assert part.start % unit == 0 and part.stop - part.start <= size
            assert rows[:, part.start : part.stop].any()  # else it is left out
            assert (part.mask is None) == rows[:, part.start : part.stop].all()
        # Least work for these rows: nothing before the first unit, nothing behind the last token.
        needed = int(rows.any(axis=0).sum())
        assert needed <= b.scores // b.rows <= needed + unit - 1


def test_smaller_blocks_skip_more() -> None:
    sizes = {"ring": 1024, "window": None, "size": 512, "unit": 16}
    scores = [
        sum(b.scores for b in schedule(0, 128, block=block, **sizes))
        for block in (1, 4, 16, 64, 128)
    ]
    assert scores == sorted(scores) and scores[0] == 128 * 129 // 2 and scores[-1] == 128 * 128
    assert scores[2] == 128 * (128 + 16) // 2


def test_impossible_schedules_are_refused() -> None:
    good = {"ring": 32, "window": None, "size": 16, "block": 4, "unit": 8}
    for change, match in (
        ({"ring": 12}, "ring must be"),
        ({"size": 4}, "size must be"),
        ({"block": 0}, "block must be"),
        ({"size": 1 << 15}, "size, block and window"),
    ):
        with pytest.raises(ValueError, match=match):
            schedule(0, 16, **good | change)
    for position, window in ((20, None), (20, 20)):
        with pytest.raises(ValueError, match="ring must hold"):
            schedule(position, 16, **good | {"window": window})


def random_prefill(
    rng: np.random.Generator, count: int, heads: int, kv_heads: int, dim: int, slots: int
) -> dict:
    return {
        "queries": rng.standard_normal((count, heads, dim)).astype(np.float32),
        "keys": to_bf16_codes(rng.standard_normal((slots, kv_heads, dim)).astype(np.float32)),
        "values": to_bf16_codes(rng.standard_normal((slots, kv_heads, dim)).astype(np.float32)),
        "sinks": rng.standard_normal(heads).astype(np.float32),
        "scale": dim**-0.5,
    }


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("machine", MACHINES)
def test_prefill_is_within_its_bound(machine: Machine, case: tuple) -> None:
    position, count, ring, window, size, block, unit = case
    sizes = {"ring": ring, "window": window, "size": size, "block": block, "unit": unit}
    rng = rng_of(position + count)
    slots = min(position + count, ring)
    given = random_prefill(rng, count, 4, 2, 16, slots)
    allowed = visible_keys(
        position + np.arange(count), tokens_of(slots, position + count - 1, ring), window
    )
    found = prefill(machine, Trace(), **given, blocks=schedule(position, count, **sizes))
    reference, bound = prefill_bound(**given, allowed=allowed)
    keys, values = (
        np.stack([Held(given[name][:, g]).values for g in range(2)], axis=1)
        for name in ("keys", "values")
    )
    wanted = attention_core(given["queries"], keys, values, allowed, given["scale"], given["sinks"])
    np.testing.assert_allclose(reference, wanted.reshape(count, -1), rtol=1e-9, atol=1e-12)
    within(found, reference, bound, 0.05)


def test_prefill_equals_decode_bit_for_bit() -> None:
    """Masked scores leave a row's bits alone, whatever the block and the rows beside it."""
    rng = rng_of(2)
    given = random_prefill(rng, 12, 4, 2, 16, 49)
    for sinks in (given["sinks"], None, np.full(4, -np.inf, np.float32)):
        given["sinks"] = sinks
        found = []
        for block in (1, 5, 12):
            blocks = schedule(37, 12, ring=64, window=None, size=16, block=block, unit=8)
            found.append(prefill(TINY, Trace(), **given, blocks=blocks))
        for q in range(12):
            parts = chunks(38 + q, np.ones(38 + q, bool), 16)
            one = given | {"queries": given["queries"][q]}
            out = attention(TINY, Trace(), **one, parts=parts).reshape(-1)
            for other in found:
                np.testing.assert_array_equal(other[q], out)


def test_buffers_of_a_prefill() -> None:
    rng, trace = rng_of(3), Trace()
    given = random_prefill(rng, 6, 2, 1, 16, 14)
    blocks = schedule(8, 6, ring=16, window=None, size=8, block=4, unit=8)
    prefill(SMALL, trace, **given, blocks=blocks)
    shapes = {name: stored.codes.shape for name, stored in trace.buffers.items()}
    assert shapes["queries"] == (12, 16) and shapes["attended"] == (6, 32)
    assert shapes["h1.b0.c0.scores"] == (4, 8) and shapes["h1.b1.c1.probs"] == (2, 6)
    assert shapes["h0.b1.inverse"] == (1, 2) and "h0.b1.c1.scaled" in shapes
    np.testing.assert_array_equal(
        trace.buffers["queries"].codes[6:], to_bf16_codes(given["queries"][:, 1])
    )


@pytest.mark.parametrize(
    "name",
    [
        "full_s0",
        "sliding_s0",
        "sink_dominant",
        "window_edge_n1",
        "window_edge_n8",
        "window_edge_n9",
    ],
)
def test_prefill_of_the_vectors(name: str) -> None:
    arrays, meta = load(f"gptoss_attn_{name}")
    window = 8 if meta["layer_type"] == "sliding_attention" else None
    count = arrays["q_rot"].shape[2]
    given = {
        "queries": arrays["q_rot"][0].swapaxes(0, 1),
        "keys": to_bf16_codes(arrays["k_rot"][0].swapaxes(0, 1)),
        "values": to_bf16_codes(arrays["v"][0].swapaxes(0, 1)),
        "sinks": arrays["w_sinks"],
        "scale": meta["scaling"],
    }
    allowed = arrays["mask_allowed"][0, 0]
    np.testing.assert_array_equal(allowed, visible_keys(np.arange(count), np.arange(count), window))
    for machine in MACHINES:
        blocks = schedule(0, count, ring=24, window=window, size=8, block=4, unit=8)
        found = prefill(machine, Trace(), **given, blocks=blocks)
        reference, bound = prefill_bound(**given, allowed=allowed)
        within(found, reference, bound, 0.06)
        near(found, arrays["core"][0].reshape(count, -1), 0.02)


@pytest.mark.parametrize("name, window", [("full", None), ("sliding", 8)])
def test_decode_vectors(name: str, window: int | None) -> None:
    """A prefill of some tokens and a decode of the rest; projections are those of the reference."""
    arrays, _ = load(f"gptoss_attn_decode_{name}")
    weights = GqaWeights(
        *(arrays[f"w_{p}_proj_{kind}"] for p in "qkvo" for kind in ("weight", "bias")),
        arrays["w_sinks"],
    )
    xs = arrays["x"][0]
    count = len(xs)
    rope = GPT_OSS_120B.rope
    tables = rope_tables(np.arange(count), replace(rope, dim=16).inv_freq(), rope.table_scale)
    q, k, v = (part.astype(np.float32) for part in gqa_project(xs, weights, 16, *tables))
    given = {"sinks": weights.sinks, "scale": 0.25}
    cached = {"keys": to_bf16_codes(k), "values": to_bf16_codes(v)}
    start = 11
    blocks = schedule(0, start, ring=24, window=window, size=8, block=4, unit=8)
    outputs = list(prefill(SMALL, Trace(), q[:start], **cached, **given, blocks=blocks))
    for token in range(start, count):
        valid = window_slots(token + 1, 24, window)
        seen = {part: codes[: token + 1] for part, codes in cached.items()}
        parts = chunks(token + 1, valid, 8)
        outputs.append(attention(SMALL, Trace(), q[token], **seen, **given, parts=parts).ravel())
    near(linear(np.stack(outputs), weights.o, weights.o_bias), arrays["out_decode"][0], 0.01)


# Caches in E4M3


def test_scales_of_a_cache() -> None:
    for largest, code in ((448.0, 127), (448.1, 128), (224.0, 126), (1.0, 119), (2.0**-140, 0)):
        assert kv_scale(largest) == code
    rng = rng_of(4)
    for largest in 2.0 ** rng.uniform(-100, 100, 50):
        code = kv_scale(largest)
        top = 448 * 2.0 ** (code - 127)
        assert top / 2 < largest <= top
    for largest in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="largest must be"):
            kv_scale(largest)


def test_held_tokens() -> None:
    rng = rng_of(5)
    values = rng.standard_normal((5, 72)).astype(np.float32)
    scales = [120, 121, 125]
    held = Held.of(values, E4M3, scales)
    for block, scale in enumerate(scales):
        part = slice(32 * block, 32 * block + 32)
        wanted = quantise_fixed(values[:, part], E4M3, scale)[0]
        np.testing.assert_array_equal(held.codes[:, part], wanted)
    assert np.abs(held.values - values).max() < 0.13
    codes, each = held.columns(1, 4)
    assert codes.shape == (72, 3) and each is not None and each.shape == (72, 1)
    np.testing.assert_array_equal(each[:, 0], np.repeat(scales, 32)[:72])
    np.testing.assert_array_equal(held.dims(64).values, held.values[:, :64])
    empty = Held.empty(5, 72, E4M3, scales)
    empty.put(np.array([4, 2]), values[[4, 2]])
    np.testing.assert_array_equal(empty.codes[[2, 4]], held.codes[[2, 4]])
    assert not empty.codes[[0, 1, 3]].any()
    with pytest.raises(ValueError, match="stop must be"):
        held.dims(40)
    with pytest.raises(ValueError, match="scales must have shape"):
        Held(held.codes, E4M3)
    with pytest.raises(ValueError, match="scales must have shape"):
        Held.of(values, Format.BF16, 127)


@pytest.mark.parametrize("context", [1, 15, 16, 17, 130])
def test_attention_on_a_cache_in_e4m3(context: int) -> None:
    rng = rng_of(context)
    for machine, kv_heads, dim, chunk in ((SMALL, 1, 64, 512), (TINY, 2, 16, 32)):
        raw = rng.standard_normal((2, context, kv_heads, dim)).astype(np.float32)
        raw[1] *= 30
        keys, values = (
            [Held.of(x[:, g], E4M3, kv_scale(float(np.abs(x).max()))) for g in range(kv_heads)]
            for x in raw
        )
        given = {
            "queries": rng.standard_normal((4, dim)).astype(np.float32),
            "keys": keys,
            "values": values,
            "sinks": rng.standard_normal(4).astype(np.float32),
            "scale": dim**-0.5,
        }
        valid = np.ones(context, bool)
        found = attention(machine, Trace(), **given, parts=chunks(context, valid, chunk))
        reference, bound = attention_bound(**given, valid=valid)
        wide = (np.stack([one.values for one in part], axis=1) for part in (keys, values))
        wanted = attention_core(
            given["queries"][None], *wide, valid[None], given["scale"], given["sinks"]
        )[0]
        np.testing.assert_allclose(reference, wanted, rtol=1e-9, atol=1e-10)
        within(found, reference, bound, 0.05)
        # Rounding the cache costs more than the kernel: up to 2^-4 of each element.
        plain = attention_core(
            given["queries"][None], raw[0], raw[1], valid[None], given["scale"], given["sinks"]
        )[0]
        near(found, plain, 0.15)
        assert np.abs(wanted - plain).max() > bound.max()
