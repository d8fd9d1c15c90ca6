# SPDX-License-Identifier: Apache-2.0
"""The top-k unit equals golden/topk.py in every bit, and takes the cycles that it states."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden.functions import sigmoid
from golden.models import MODELS
from golden.topk import choose
from hw.topk_groups import TopkGroups
from hw.topk_list import TopkList
from hw.topk_unit import TopkUnit, first_pair
from tests.simulators import BOTH, Simulator
from tests.simulators import cases as by_simulator
from tests.test_reference import load

SPECIAL = np.array(
    [
        0,
        0x8000_0000,
        1,
        0x8000_0001,
        0x7F80_0000,
        0xFF80_0000,
        0x7FC0_0000,
        0xFFC0_1234,
        0x7F80_0001,
        0x3F80_0000,
        0xBF80_0000,
        0x7F7F_FFFF,
    ],
    np.uint32,
)
KINDS = 9


def rows(rng, count, kind=None):
    """Bits of a row of random kind: random, few values, specials, all NaN, zeros, equal, sorted,
    neighbours in the last bit, almost all NaN.
    """
    kind = rng.integers(KINDS) if kind is None else kind
    if kind == 0:
        return rng.integers(1 << 32, size=count, dtype=np.uint32)
    if kind == 1:
        return rng.integers(-2, 3, size=count).astype(np.float32).view(np.uint32)
    if kind == 2:
        return rng.choice(SPECIAL, size=count)
    if kind == 3:
        return rng.choice(SPECIAL[6:9], size=count)
    if kind == 4:
        return rng.choice(SPECIAL[[0, 1, 3, 6]], size=count)  # zeros of both signs on top
    if kind == 5:
        return np.full(count, rng.choice(SPECIAL))
    if kind == 6:
        values = np.sort(rng.standard_normal(count).astype(np.float32))
        return (values if rng.random() < 0.5 else values[::-1]).copy().view(np.uint32)
    if kind == 7:
        base = rng.choice(np.array([0x3F80_0000, 0xBF80_0000, 0x3EFF_FFFE], np.uint32))
        return base + rng.integers(3, size=count, dtype=np.uint32)
    few = rng.random(count) < 3 / count
    return np.where(few, rng.choice(SPECIAL, size=count), SPECIAL[6]).astype(np.uint32)


def random_case(rng, most, k_max, max_groups):
    """(score bits, bias bits or None, k, groups, groups_kept) of a row of at most `most` scores."""
    groups = 1 << int(rng.integers(max_groups.bit_length()))
    if groups == 1:
        size = int(rng.choice([1, 2, most])) if rng.random() < 0.3 else int(rng.integers(1, most))
    else:
        size = int(rng.integers(2, most // groups + 1))
    kept = int(rng.integers(1, groups + 1))
    count = size * groups
    bias = rows(rng, count, rng.choice([0, 1, 2, 6, 7])) if rng.random() < 0.5 else None
    k = int(rng.integers(1, min(k_max, size * kept) + 1))
    return rows(rng, count), bias, k, groups, kept


def expected(bits, bias, k, groups, kept):
    ids, scores, nan_row = choose(
        bits.view(np.float32),
        k,
        bias=None if bias is None else bias.view(np.float32),
        groups=groups,
        groups_kept=kept,
    )
    return ids.tolist(), scores.view(np.uint32).tolist(), bool(nan_row)


def run(dut, cases, rng, stall=0.0):
    """Runs rows back to back; each equals the model and, without stalls, takes what is stated."""
    compared = 0

    async def bench(ctx):
        nonlocal compared
        for bits, bias, k, groups, kept in cases:
            size = len(bits) // groups
            ctx.set(dut.k, k)
            ctx.set(dut.biased, bias is not None)
            ctx.set(dut.groups, groups)
            ctx.set(dut.groups_kept, kept if groups > 1 else 0)
            ctx.set(dut.group_size, size)
            sent, ids, scores, nan_row, cycles = 0, [], [], None, 0
            while len(ids) < k:
                ctx.set(dut.input.valid, sent < len(bits) and rng.random() >= stall)
                if sent < len(bits):
                    ctx.set(dut.input.p.score, int(bits[sent]))
                    ctx.set(dut.input.p.bias, int(0x7FC0_0000 if bias is None else bias[sent]))
                    ctx.set(dut.input.p.last, sent == len(bits) - 1)
                ctx.set(dut.output.ready, rng.random() >= stall)
                taken = ctx.get(dut.input.valid) and ctx.get(dut.input.ready)
                assert taken or stall or sent == len(bits)  # a score per cycle
                if ctx.get(dut.output.valid) and ctx.get(dut.output.ready):
                    assert sent == len(bits)
                    if not ids:
                        nan_row = bool(ctx.get(dut.nan_row))
                    ids.append(ctx.get(dut.output.p.id))
                    scores.append(ctx.get(dut.output.p.score))
                    assert ctx.get(dut.output.p.last) == (len(ids) == k)
                sent += taken
                cycles += 1
                assert cycles < 4000
                await ctx.tick()
            assert (ids, scores, nan_row) == expected(bits, bias, k, groups, kept)
            compared += k
            if not stall:
                latency = first_pair(k, biased=bias is not None, groups=groups, group_size=size)
                assert cycles == len(bits) + latency + k - 1

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    assert compared >= len(cases)


@by_simulator("k_max, max_groups", amaranth=[(1, 1), (3, 2), (8, 8)], verilator=[(3, 2), (8, 8)])
@pytest.mark.parametrize("stall", [0.0, 0.4])
def test_random_rows(simulator, k_max, max_groups, stall):
    seed = [k_max, int(10 * stall)]
    print("seed", seed)
    rng = np.random.default_rng(seed)
    chosen = [random_case(rng, 64, k_max, max_groups) for _ in range(40)]
    run(TopkUnit(k_max, 9, max_groups), chosen, rng, stall)


LATENCIES = {  # of the last score, cycles to the first pair
    "gpt-oss": 2,
    "deepseek-r1": 2 + 3 + 7 + 8 + 8 * 8,
    "kimi-k2.5": 2 + 3,
}


@BOTH
@pytest.mark.parametrize("model", MODELS)
def test_gates_of_the_models(model):
    """Scores of the size that they have, ties among them; the stated latency is pinned."""
    spec = MODELS[model].moe.gate_spec
    biased = spec.bias == "choice"
    size = spec.experts // spec.groups
    assert LATENCIES[model] == first_pair(
        spec.top_k, biased=biased, groups=spec.groups, group_size=size
    )
    rng = np.random.default_rng(spec.experts)
    rows_of_all = []
    for offset in (0.0, -2.0):  # biased scores are negative with the second
        scores = np.round(rng.random(spec.experts), 2).astype(np.float32)
        bias = (0.1 * rng.standard_normal(spec.experts) + offset).astype(np.float32)
        bits = scores.view(np.uint32)
        rows_of_all.append(
            (bits, bias.view(np.uint32) if biased else None, spec.top_k, spec.groups)
            + (spec.groups_kept,)
        )
    run(TopkUnit(8, 9, 8), rows_of_all, rng)


@BOTH
@pytest.mark.parametrize(
    "name, tokens",
    [("dsv3_router_256", 2), ("kimi_router_384", 2), ("dsv3_moe_tie_pair", 16)]
    + [("dsv3_moe_bias_flips", 16)],
)
def test_choices_of_an_independent_implementation(name, tokens):
    arrays, meta = load(name)
    config = meta["config"]
    bias = next(v for n, v in arrays.items() if n.endswith("gate_e_score_correction_bias"))
    scores = sigmoid(arrays["router_logits"][:tokens])
    cases = [
        (
            row.view(np.uint32),
            bias.astype(np.float32).view(np.uint32),
            config["topk"],
            config["n_group"],
            config["topk_group"],
        )
        for row in scores
    ]
    for case, wanted in zip(cases, arrays["idx_lowest"], strict=False):
        assert expected(*case)[0] == wanted.tolist()
    run(TopkUnit(8, 9, 8), cases, np.random.default_rng(0))


@BOTH
def test_ids_to_511():
    rng = np.random.default_rng(511)
    rising = np.arange(512, dtype=np.float32).view(np.uint32)
    cases = [
        (rising, None, 8, 1, 1),
        (rising, rising[::-1].copy(), 8, 1, 1),  # all equal
        (rising, None, 8, 8, 3),
    ]
    assert expected(*cases[0])[0][0] == 511 and expected(*cases[1])[0] == list(range(8))
    assert first_pair(8, groups=8, group_size=64) == 2 + 7 + 8 + 64
    run(TopkUnit(8, 9, 8), cases, rng)


@st.composite
def tied_case(draw):
    groups = draw(st.sampled_from([1, 2, 4]))
    size = draw(st.integers(2, 5))
    kept = draw(st.integers(1, groups))
    values = st.sampled_from([0x3F80_0000, 0x3F80_0001, 0xBF80_0000, 0, 0x8000_0000, 0x7FC0_0001])
    bits = draw(st.lists(values, min_size=size * groups, max_size=size * groups))
    biases = draw(st.none() | st.lists(values, min_size=size * groups, max_size=size * groups))
    k = draw(st.integers(1, min(4, size * kept)))
    return (
        np.array(bits, np.uint32),
        None if biases is None else np.array(biases, np.uint32),
        k,
        groups,
        kept,
    )


@settings(max_examples=8, deadline=None)
@given(st.lists(tied_case(), min_size=4, max_size=8))
def test_ties_wherever_a_choice_is_made(cases):
    run(TopkUnit(4, 5, 4), cases, np.random.default_rng(0))


def test_parameters():
    with pytest.raises(ValueError, match="k_max must be at least 1"):
        TopkUnit(0)
    with pytest.raises(ValueError, match="id_bits must be at least 1"):
        TopkUnit(4, 0)
    with pytest.raises(ValueError, match="max_groups must be from 1 to k_max = 4"):
        TopkUnit(4, 9, 8)
    with pytest.raises(ValueError, match="size must be at least 1"):
        TopkList(0, 4)
    with pytest.raises(ValueError, match="max_groups must be from 2 to size = 4"):
        TopkGroups(4, 4, 1)
