# SPDX-License-Identifier: Apache-2.0
"""Kernels on the simulated system: programs against bit-exact models, with and without stalls."""

import pytest

from hw.config import preset
from sim.errors import InputError
from sim.kernels import KERNELS
from sim.kernels.types import KernelRequest

# Runs without stalls are in the cycle suite too.
LIGHT = pytest.param("light", marks=pytest.mark.slow)
NONE = pytest.param("none", marks=pytest.mark.slow)


def simulate(kernel, config, stall="none", seed=0, model="gpt-oss", **settings):
    chosen = KERNELS[kernel]
    given = chosen.settings({name: str(value) for name, value in settings.items()}, model)
    print(kernel, config, model, stall, "seed", seed, given)
    # On small tiles the order of the commands is checked too.
    checked = config == "tiny"
    result = chosen.run(
        KernelRequest(preset(config), model, given, stall, seed, check_order=checked)
    )
    assert not result.order_faults and (result.order_checked > 0) == checked, result.order_faults
    assert result.compared > 0 and result.mismatched == 0, result.differences
    assert result.passed
    assert 0 < result.fraction_of_roofline <= 1 and result.fraction_of_peak <= 1
    return result


# Sizes and formats are swept by test_gemm_shapes.py.
@pytest.mark.parametrize(
    "stall, shape",
    [
        ("heavy", {"m": 9, "n": 9, "k": 129, "weights": "hbm"}),
        ("none", {"m": 5, "n": 6, "k": 50, "act": "mxint8", "weight": "bf16", "out": "fp32"}),
    ],
    ids=str,
)
def test_gemm(shape, stall):
    simulate("gemm", "tiny", stall, seed=1, **shape)


# More in test_attention_tile.py.
@pytest.mark.parametrize("stall", [NONE, "heavy"])
@pytest.mark.parametrize(
    "settings",
    [{"context": 33, "head_dim": 64, "heads": 8}, {"context": 512, "head_dim": 64, "heads": 2}],
    ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()),
)
def test_attention(settings, stall):
    simulate("attention", "tiny", stall, seed=4, **settings)


# Cycles from the last score until ids and scores are written, without stalls (tests/test_topk.py).
LAST_SCORE_TO_IDS = {"gpt-oss": 10, "deepseek-r1": 98, "kimi-k2.5": 19}


@pytest.mark.parametrize(
    ("model", "stall"),
    [
        ("gpt-oss", "heavy"),
        ("deepseek-r1", "none"),
        pytest.param("gpt-oss", "none", marks=pytest.mark.slow),
        pytest.param("deepseek-r1", "heavy", marks=pytest.mark.slow),
        pytest.param("kimi-k2.5", "none", marks=pytest.mark.slow),
        pytest.param("kimi-k2.5", "heavy", marks=pytest.mark.slow),
    ],
)
def test_gate(model, stall):
    result = simulate("gate", "tiny", stall, seed=8, model=model, tokens=3)
    if stall == "none":
        assert result.extra["last_score_to_ids"] == LAST_SCORE_TO_IDS[model]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"experts": 512, "top_k": 8},
        {"experts": 1, "top_k": 1},
        {"experts": 37, "top_k": 5, "tokens": 1},
        {"scoring": "sigmoid", "experts": 509, "top_k": 7},
        {"scoring": "sigmoid", "experts": 6, "top_k": 3, "groups": 2, "kept": 1},
        {"scoring": "sigmoid", "experts": 512, "top_k": 8, "groups": 4, "kept": 2},
    ],
    ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()),
)
def test_gates_of_other_sizes(settings):
    simulate("gate", "tiny", "light", seed=9, **settings)


@pytest.mark.parametrize("stall", [NONE, LIGHT, "heavy"])
def test_layer(stall):
    result = simulate("layer", "tiny", stall)
    assert result.compared > 20_000


def test_layer_of_other_sizes():
    simulate(
        "layer",
        "tiny",
        seed=6,
        heads=2,
        kv_heads=1,
        tokens=3,
        hidden=40,
        intermediate=24,
        experts=4,
        top_k=3,
        window=0,
        context=8,
    )


@pytest.mark.parametrize("stall", [NONE, "heavy"])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"split": "none"}, marks=pytest.mark.slow),
        pytest.param({"split": "n"}, marks=pytest.mark.slow),
        {"split": "n", "out": "fp32", "n": 29},
        pytest.param({"split": "k"}, marks=pytest.mark.slow),
        pytest.param(
            {"split": "k", "weights": "hbm", "act": "bf16", "weight": "bf16"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda s: "-".join(s.values()) if all(isinstance(v, str) for v in s.values()) else "odd",
)
def test_mesh_gemm(settings, stall):
    simulate("gemm", "mesh4", stall, seed=7, **({"m": 5, "n": 36, "k": 150} | settings))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["gemm", "attention", "gate", "layer"])
def test_small_tile(kernel):
    simulate(kernel, "small")


@pytest.mark.parametrize(
    ("kernel", "config", "settings"),
    [
        ("gemm", "tiny", {"m": 600, "n": 600, "k": 64}),
        ("gemm", "tiny", {"split": "n"}),
        ("gemm", "mesh4", {"split": "n", "n": 3}),
        ("gemm", "tiny", {"n": 4000, "k": 4000}),
        ("attention", "tiny", {"heads": 3, "kv_heads": 2}),
        ("attention", "tiny", {"head_dim": 12}),
        ("attention", "tiny", {"context": 30000}),
        ("moe", "tiny", {"top_k": 9}),
        ("moe", "tiny", {"experts": 2, "top_k": 4}),
        ("gate", "tiny", {"top_k": 9}),
        ("gate", "tiny", {"groups": 3, "scoring": "sigmoid"}),
        ("gate", "tiny", {"groups": 16, "scoring": "sigmoid"}),
        ("gate", "tiny", {"groups": 8, "kept": 9, "scoring": "sigmoid"}),
        ("gate", "tiny", {"groups": 2}),  # softmax knows no groups
        ("gate", "tiny", {"tokens": 65535}),
        ("layer", "tiny", {"window": 0, "tokens": 20}),
        ("layer", "tiny", {"head_dim": 24}),  # halves that RoPE cannot exchange
        # Far beyond the tile: refused before the machine's memory or minutes are spent on them.
        ("gemm", "tiny", {"m": 65535, "k": 65535}),
        ("gemm", "tiny", {"m": 65535, "n": 65535, "k": 1}),
        ("gemm", "tiny", {"m": 1, "n": 65535, "k": 65535, "weights": "hbm"}),
        ("gemm", "mesh4", {"m": 1, "n": 65535, "k": 65535, "weights": "hbm", "split": "n"}),
        ("attention", "tiny", {"heads": 65535, "kv_heads": 65535, "context": 65535}),
        ("attention", "tiny", {"head_dim": 65528, "context": 65535}),
        ("moe", "tiny", {"hidden": 65535, "intermediate": 65535, "experts": 512}),
        ("moe", "tiny", {"tokens": 65535, "hidden": 65535}),
        ("moe", "tiny", {"tokens": 40}),
        ("moe", "small", {"tokens": 257, "hidden": 32, "intermediate": 32}),
        ("moe", "tiny", {"shared": "mxfp4"}),  # its model has none
        ("moe", "tiny", {"groups": 2}),
        ("moe", "tiny", {"block": 30, "intermediate": 64, "hidden": 64}),
        ("moe", "tiny", {"block": 16, "intermediate": 64, "hidden": 64, "act": "mxfp8-e4m3"}),
        *(("layer", "tiny", {name: 0}) for name in ("heads", "head_dim", "hidden", "top_k")),
        *(("layer", "tiny", {name: 0}) for name in ("experts", "intermediate")),
        ("layer", "tiny", {"kv": "fp8"}),  # attention's alone
        ("layer", "tiny", {"hidden": 65535, "intermediate": 65535}),
        ("layer", "tiny", {"heads": 65534, "head_dim": 32768}),
        ("layer", "tiny", {"tokens": 65535}),
    ],
)
def test_sizes_that_do_not_fit(kernel, config, settings):
    with pytest.raises(InputError):
        simulate(kernel, config, **settings)
