# SPDX-License-Identifier: Apache-2.0
"""Attention on a simulated tile: contexts around every edge, unusual logits, both kinds of models.

Many sequences share one run of the simulator.
"""

from dataclasses import replace

import numpy as np
import pytest

from golden.formats import to_bf16_codes
from golden.kernels.kv import Held
from hw.config import preset
from sim.kernels import KERNELS
from sim.kernels import attention as kernel
from sim.kernels.attention import execute, make_sequence, prepare
from sim.kernels.types import KernelRequest
from tests.test_kernels import simulate

TINY = preset("tiny")
SMALL_HEADS = {"heads": 4, "head_dim": 8}


def request(stall="none", seed=0, model="gpt-oss", **settings) -> KernelRequest:
    given = KERNELS["attention"].settings({k: str(v) for k, v in settings.items()}, model)
    return KernelRequest(TINY, model, given, stall, seed, check_order=True)


def attend(contexts, stall="none", seed=0, change=None, sinks=None, model="gpt-oss", **settings):
    """Sequences of these contexts in one run; `change` may alter each."""
    asked = request(stall, seed, model, context=max(contexts), **settings)
    sizes = replace(prepare(asked), sequences=len(contexts))
    print("seed", seed, "contexts", contexts, settings)
    rng = np.random.default_rng(seed)
    if sinks is None and sizes.sinks:
        sinks = rng.standard_normal(sizes.heads).astype(np.float32)
    unit = sizes.unit(TINY.tile.cols)
    made = [make_sequence(rng, sizes, i, unit, tokens) for i, tokens in enumerate(contexts)]
    for i, sequence in enumerate(made):
        if change is not None:
            change(i, sequence)
    result = execute(asked, sizes, made, sinks)
    assert result.compared > 0 and result.mismatched == 0, result.differences
    assert result.order_checked and not result.order_faults, result.order_faults
    return result


@pytest.mark.parametrize("stall", [pytest.param("none", marks=pytest.mark.slow), "heavy"])
def test_contexts_around_edges(stall):
    """One token; one less than, at, and one beyond the columns, a line, a K tile, a chunk."""
    edges = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33]
    attend(edges, stall, seed=1, **SMALL_HEADS)


def test_windows_around_edges():
    """Contexts of window - 1, window, window + 1, and every position of a wrapped ring."""
    attend([11, 12, 13, *range(24, 37)], seed=2, window=12, **SMALL_HEADS)


def test_several_kv_heads_and_chunks():
    attend([520, 511, 513], seed=3, **SMALL_HEADS, kv_heads=2)


def test_queries_of_a_prefill_around_edges():
    attend([6, 20, 33], seed=4, queries=6, **SMALL_HEADS)
    attend([20, 33], seed=5, queries=9, window=12, **SMALL_HEADS)


@pytest.mark.slow
def test_prefill_of_more_queries_than_a_block():
    attend([100], seed=6, queries=70, heads=1, head_dim=8, chunk=32)


@pytest.mark.parametrize(
    "model", ["deepseek-r1", pytest.param("kimi-k2.5", marks=pytest.mark.slow)]
)
def test_latent_attention(model):
    sizes = {"heads": 3, "head_dim": 24, "value_dim": 16}
    attend([1, 8, 17, 70], seed=7, model=model, **sizes)


def test_latent_attention_of_many_queries():
    attend([9, 40], seed=8, model="kimi-k2.5", heads=2, head_dim=24, value_dim=16, queries=9)


@pytest.mark.parametrize("block", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_paged_caches(block):
    attend([1, 15, 16, 17, 70], seed=9, block=block, kv_heads=2, **SMALL_HEADS)
    attend([20, 40], seed=10, block=block, queries=5, **SMALL_HEADS)


FP8 = {"kv": "fp8", "head_dim": 32, "heads": 4}


def test_e4m3_caches():
    attend([1, 15, 16, 17, 33, 70], seed=16, **FP8)


@pytest.mark.parametrize(
    "settings",
    [
        {"queries": 5, "window": 24},
        {"block": 32, "kv_heads": 2},
        {"model": "kimi-k2.5", "heads": 2, "head_dim": 96, "value_dim": 64},
    ],
    ids=("window", "paged", "latent"),
)
@pytest.mark.slow
def test_e4m3_caches_of_every_kind(settings):
    attend([40, 70], seed=17, **FP8 | settings)


@pytest.mark.slow
def test_an_e4m3_cache_longer_than_the_sram():
    simulate("attention", "tiny", seed=18, context=1100, place="hbm", **FP8)


def test_a_cache_longer_than_the_sram():
    simulate("attention", "tiny", seed=11, context=1100, place="hbm", **SMALL_HEADS)


def test_large_logits_and_dominant_sinks(monkeypatch):
    """Scores beyond 5e4 of either sign, a sink above all of them, sinks of minus infinity.

    Softmax chooses one token there; how near rounded scores are to a tie has no useful bound.
    """

    def no_bound(queries, keys, values, sinks, scale, valid, out_format):
        shape = len(queries), values[0].codes.shape[1]
        return np.zeros(shape), np.full(shape, np.inf)

    monkeypatch.setattr(kernel, "attention_bound", no_bound)

    def grow(i, sequence):
        sequence.queries *= (1, 300, 3e4, -3e4)[i]

    sinks = np.array([1e6, -np.inf, -1e6, 0], np.float32)
    attend([40, 40, 40, 40], seed=12, change=grow, sinks=sinks, **SMALL_HEADS)


@pytest.mark.slow
def test_a_cache_of_one_direction():
    """All keys equal: a flat softmax; all zero: scores of zero."""

    def flatten(i, sequence):
        rows = np.zeros if i else np.ones
        sequence.keys[0] = Held(to_bf16_codes(rows((sequence.tokens, 8), np.float32)))

    attend([33, 33], seed=13, change=flatten, **SMALL_HEADS)


def test_a_query_that_sees_nothing():
    def blind(i, sequence):
        sequence.parts = []
        sequence.allowed[:] = False

    attend([16, 20], seed=14, change=blind, **SMALL_HEADS)


@pytest.mark.slow
def test_eight_heads_take_turns_in_memory():
    simulate("attention", "tiny", seed=15, heads=8, head_dim=8, context=1500)
