# SPDX-License-Identifier: Apache-2.0
"""The float64 references against vectors of independent implementations, and their own edges.

The vectors are those of transformers (float32 unless a float64 output is stored beside it). Every
tensor must agree to 2e-5 of its largest value.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from golden.models import MODELS, Rope
from golden.reference.attention import (
    GqaWeights,
    KvCache,
    attention_core,
    attention_probs,
    gqa_attention,
    gqa_project,
    softmax_with_sinks,
    visible_keys,
)
from golden.reference.experts import (
    GatedMlpWeights,
    clamped_swiglu,
    gated_mlp,
    routed_experts,
    silu,
    swiglu,
)
from golden.reference.gate import (
    group_scores,
    mask_groups,
    router_logits,
    sigmoid,
    sigmoid_gate,
    softmax_gate,
)
from golden.reference.layer import (
    DeepseekLayerWeights,
    DeepseekMoeWeights,
    GptOssLayerWeights,
    GptOssMoeWeights,
    deepseek_layer,
    deepseek_moe,
    gptoss_layer,
    gptoss_moe,
)
from golden.reference.linear import linear
from golden.reference.mla import (
    MlaCache,
    MlaWeights,
    mla_attention,
    mla_core_absorbed,
    mla_core_naive,
    mla_latents,
    mla_queries,
)
from golden.reference.norm import rms_norm
from golden.reference.rope import (
    rope_half_split,
    rope_interleaved,
    rope_tables,
    yarn_inv_freq,
    yarn_mscale,
    yarn_ramp,
)

VECTORS = Path(__file__).parent / "vectors"
TOLERANCE = 2e-5
Arrays = dict[str, np.ndarray]

GPTOSS_ROPE, R1_ROPE, KIMI_ROPE = (
    MODELS[name].rope for name in ("gpt-oss", "deepseek-r1", "kimi-k2.5")
)


def load(name: str) -> tuple[Arrays, dict]:
    with np.load(VECTORS / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files if key != "__meta__"}
        return arrays, json.loads(str(file["__meta__"]))


def close(got: np.ndarray, want: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """The largest error is at most `tolerance` of the largest reference value."""
    assert got.shape == want.shape
    assert want.size > 0
    error = np.max(np.abs(got - want.astype(np.float64)))
    assert error <= tolerance * np.max(np.abs(want)), f"largest error {error}"


# GPT-OSS


def gqa_weights(arrays: Arrays, prefix: str = "w_") -> GqaWeights:
    parts = {f"{p}": arrays[f"{prefix}{p}_proj_weight"] for p in "qkvo"}
    biases = {f"{p}_bias": arrays[f"{prefix}{p}_proj_bias"] for p in "qkvo"}
    return GqaWeights(**parts, **biases, sinks=arrays[f"{prefix}sinks"])


def gptoss_tables(positions: np.ndarray, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    return replace(GPTOSS_ROPE, dim=head_dim).tables(positions)


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
def test_gptoss_attention(name: str) -> None:
    arrays, meta = load(f"gptoss_attn_{name}")
    config = meta["config"]
    window = config["window"] if meta["layer_type"] == "sliding_attention" else None
    x, positions = arrays["x"][0], arrays["positions"][0]
    weights = gqa_weights(arrays)

    inv_freq = replace(GPTOSS_ROPE, dim=config["hd"]).inv_freq()
    close(inv_freq, arrays["inv_freq"])
    close(np.full(1, yarn_mscale(32.0)), arrays["attention_scaling"])
    cos, sin = gptoss_tables(positions, config["hd"])
    close(cos, arrays["cos"][0])
    if len(positions) > 1:
        close(sin, arrays["sin"][0])

    allowed = visible_keys(positions, positions, window)
    np.testing.assert_array_equal(allowed, arrays["mask_allowed"][0, 0])
    q, k, v = gqa_project(x, weights, config["hd"], cos, sin)
    close(q.swapaxes(0, 1), arrays["q_rot"][0])
    close(k.swapaxes(0, 1), arrays["k_rot"][0])
    close(v.swapaxes(0, 1), arrays["v"][0])
    probs = attention_probs(q, k, allowed, meta["scaling"], weights.sinks)
    close(probs.swapaxes(0, 1), arrays["probs"][0])
    close(1.0 - probs.sum(axis=-1).T, arrays["sink_prob"][0])
    core = attention_core(q, k, v, allowed, meta["scaling"], weights.sinks)
    close(core, arrays["core"][0])

    empty = KvCache.empty(config["kv"], config["hd"])
    out, cache = gqa_attention(
        x, weights, cos, sin, positions, empty, scale=meta["scaling"], window=window
    )
    close(out, arrays["out"][0])
    close(out, arrays["out_f64"][0])
    assert len(cache.positions) == len(x)


@pytest.mark.parametrize("name, window", [("full", None), ("sliding", 8)])
@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_gptoss_decode(name: str, window: int | None, chunk: int) -> None:
    arrays, _ = load(f"gptoss_attn_decode_{name}")
    x, weights = arrays["x"][0], gqa_weights(arrays)
    positions = np.arange(len(x))
    cos, sin = gptoss_tables(positions, 16)
    cache, outputs = KvCache.empty(2, 16), []
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        out, cache = gqa_attention(
            x[part],
            weights,
            cos[part],
            sin[part],
            positions[part],
            cache,
            scale=0.25,
            window=window,
        )
        outputs.append(out)
        if window is not None and chunk == 1:  # a ring of the window's size holds enough
            cache = cache.last(window)
            assert len(cache.positions) <= window
    close(np.concatenate(outputs), arrays["out_decode"][0])
    close(np.concatenate(outputs), arrays["out_prefill"][0])


@pytest.mark.parametrize("name, window", [("full_ctx257", None), ("win128_ctx129", 128)])
def test_gptoss_core_real_heads(name: str, window: int | None) -> None:
    arrays, meta = load(f"gptoss_core_real_{name}")
    q, k, v = (arrays[part][0].swapaxes(0, 1) for part in ("q", "k", "v"))
    positions = np.arange(len(k))
    allowed = visible_keys(positions[-1:], positions, window)
    np.testing.assert_array_equal(allowed, arrays["mask_allowed"])
    probs = attention_probs(q, k, allowed, meta["scaling"], arrays["sinks"])
    # Stored as a float32 difference from 1, of some thousandths: its noise is that of the 1.
    np.testing.assert_allclose(1.0 - probs.sum(axis=-1).T, arrays["sink_prob"][0], atol=5e-7)
    core = attention_core(q, k, v, allowed, meta["scaling"], arrays["sinks"])
    close(core, arrays["out"][0])
    close(core, arrays["out_f64"][0])


def gptoss_moe_weights(arrays: Arrays, prefix: str = "w_") -> GptOssMoeWeights:
    return GptOssMoeWeights(
        router=arrays[f"{prefix}router_weight"],
        router_bias=arrays[f"{prefix}router_bias"],
        gate_up=arrays[f"{prefix}experts_gate_up_proj"].swapaxes(1, 2),
        gate_up_bias=arrays[f"{prefix}experts_gate_up_proj_bias"],
        down=arrays[f"{prefix}experts_down_proj"].swapaxes(1, 2),
        down_bias=arrays[f"{prefix}experts_down_proj_bias"],
    )


@pytest.mark.parametrize("name", ["s0", "clamp", "tie_pair", "zero_input"])
def test_gptoss_moe(name: str) -> None:
    arrays, meta = load(f"gptoss_moe_{name}")
    x, weights, k = arrays["x"][0], gptoss_moe_weights(arrays), meta["config"]["topk"]
    logits = router_logits(x, weights.router, weights.router_bias)
    close(logits, arrays["router_logits"])
    ids, shares = softmax_gate(logits, k)
    np.testing.assert_array_equal(ids, arrays["idx_lowest"])
    close(shares, arrays["scores_lowest"])
    experts = len(weights.router)
    hidden = np.stack(
        [
            clamped_swiglu(linear(x, weights.gate_up[e], weights.gate_up_bias[e]))
            for e in range(experts)
        ],
        axis=1,
    )
    close(hidden, arrays["act_all_experts"])
    out = gptoss_moe(x, weights, k)
    close(out, arrays["out_lowest"][0])
    close(out, arrays["out_lowest_f64"][0])


def test_gptoss_layer() -> None:
    arrays, meta = load("gptoss_layer0")
    x, eps = arrays["x"][0], meta["rms_norm_eps"]
    close(rms_norm(x, arrays["w_input_layernorm_weight"], eps), arrays["norm1"][0])
    weights = GptOssLayerWeights(
        attention_norm=arrays["w_input_layernorm_weight"],
        attention=gqa_weights(arrays, "w_self_attn_"),
        moe_norm=arrays["w_post_attention_layernorm_weight"],
        moe=gptoss_moe_weights(arrays, "w_mlp_"),
    )
    positions = np.arange(len(x))
    cos, sin = gptoss_tables(positions, 16)
    for chunk in (len(x), 1):
        cache, outputs = KvCache.empty(2, 16), []
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            out, cache = gptoss_layer(
                x[part],
                weights,
                cos[part],
                sin[part],
                positions[part],
                cache,
                topk=2,
                scale=0.25,
                window=8,
                eps=eps,
            )
            outputs.append(out)
        close(np.concatenate(outputs), arrays["out"][0])


# DeepSeek and Kimi


def mla_weights(arrays: Arrays, prefix: str = "w_") -> MlaWeights:
    return MlaWeights(
        q_a=arrays[f"{prefix}q_a_proj_weight"],
        q_a_norm=arrays[f"{prefix}q_a_layernorm_weight"],
        q_b=arrays[f"{prefix}q_b_proj_weight"],
        kv_a=arrays[f"{prefix}kv_a_proj_with_mqa_weight"],
        kv_a_norm=arrays[f"{prefix}kv_a_layernorm_weight"],
        kv_b=arrays[f"{prefix}kv_b_proj_weight"],
        o=arrays[f"{prefix}o_proj_weight"],
    )


def halves(x: np.ndarray) -> np.ndarray:
    """The vectors' order of rotated elements: even members of the pairs first."""
    return np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


@pytest.mark.parametrize(
    "name, rope",
    [("dsv3_mla_s0", R1_ROPE), ("dsv3_mla_pos5000", R1_ROPE), ("kimi_mla_s0", KIMI_ROPE)],
)
def test_mla(name: str, rope: Rope) -> None:
    arrays, meta = load(name)
    config, scale = meta["config"], meta["scaling"]
    heads, eps = config["heads"], config["q_a_kv_a_norm_eps"]
    x, positions, weights = arrays["x"][0], arrays["positions"][0], mla_weights(arrays)
    width = config["nope"] + config["rope"]
    assert scale == pytest.approx(width**-0.5 * yarn_mscale(rope.factor) ** 2, rel=1e-12)

    inv_freq = replace(rope, dim=config["rope"]).inv_freq()
    close(inv_freq, arrays["inv_freq"])
    cos, sin = rope_tables(positions, inv_freq)
    half = config["rope"] // 2
    close(cos, arrays["cos"][0][:, :half])
    close(sin, arrays["sin"][0][:, half:])

    q_nope, q_rope = mla_queries(x, weights, cos, sin, heads=heads, eps=eps)
    q = np.concatenate([q_nope, halves(q_rope)], axis=-1)
    close(q.swapaxes(0, 1), arrays["q"][0])
    latent, k_rope = mla_latents(x, weights, cos, sin, eps)
    close(latent, arrays["cache_latent"][0])
    close(halves(k_rope), arrays["cache_k_rot_halfsplit"][0, 0])
    expanded = linear(latent, weights.kv_b).reshape(len(x), heads, -1)
    shared = np.repeat(halves(k_rope)[:, None, :], heads, axis=1)
    k = np.concatenate([expanded[..., : config["nope"]], shared], axis=-1)
    close(k.swapaxes(0, 1), arrays["k"][0])
    close(expanded[..., config["nope"] :].swapaxes(0, 1), arrays["v"][0])

    allowed = visible_keys(positions, positions)
    np.testing.assert_array_equal(allowed, arrays["mask_allowed"][0, 0])
    close(attention_probs(q, k, allowed, scale).swapaxes(0, 1), arrays["probs"][0])
    cache = MlaCache(latent, k_rope, positions)
    for core_of in (mla_core_naive, mla_core_absorbed):
        close(core_of(q_nope, q_rope, weights, cache, allowed, scale), arrays["core"][0])

    empty = MlaCache.empty(config["kv_lora"], config["rope"])
    outputs = []
    for absorbed in (False, True):
        out, _ = mla_attention(
            x,
            weights,
            cos,
            sin,
            positions,
            empty,
            heads=heads,
            scale=scale,
            eps=eps,
            absorbed=absorbed,
        )
        close(out, arrays["out"][0])
        close(out, arrays["out_f64_f32softmax"][0])
        outputs.append(out)
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_mla_decode(absorbed: bool, chunk: int) -> None:
    arrays, _ = load("dsv3_mla_decode")
    x, weights = arrays["x"][0], mla_weights(arrays)
    positions = np.arange(len(x))
    cos, sin = rope_tables(positions, replace(R1_ROPE, dim=8).inv_freq())
    cache, outputs = MlaCache.empty(32, 8), []
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        out, cache = mla_attention(
            x[part],
            weights,
            cos[part],
            sin[part],
            positions[part],
            cache,
            heads=4,
            scale=24**-0.5 * yarn_mscale(40.0) ** 2,
            eps=1e-6,
            absorbed=absorbed,
        )
        outputs.append(out)
    assert cache.latent.shape == (16, 32)
    close(np.concatenate(outputs), arrays["out_decode"][0])
    close(np.concatenate(outputs), arrays["out_prefill"][0])


def deepseek_moe_weights(arrays: Arrays, prefix: str = "w_") -> DeepseekMoeWeights:
    return DeepseekMoeWeights(
        router=arrays[f"{prefix}gate_weight"],
        router_bias=arrays[f"{prefix}gate_e_score_correction_bias"],
        gate_up=arrays[f"{prefix}experts_gate_up_proj"],
        down=arrays[f"{prefix}experts_down_proj"],
        shared=GatedMlpWeights(
            *(
                arrays[f"{prefix}shared_experts_{part}_proj_weight"]
                for part in ("gate", "up", "down")
            )
        ),
    )


@pytest.mark.parametrize(
    "name",
    [
        "dsv3_moe_s0",
        "dsv3_moe_bias_flips",
        "dsv3_moe_tie_pair",
        "dsv3_router_256",
        "kimi_moe_s0",
        "kimi_router_384",
    ],
)
def test_deepseek_moe(name: str) -> None:
    arrays, meta = load(name)
    config = meta["config"]
    x, weights = arrays["x"][0], deepseek_moe_weights(arrays)
    k, groups, kept = config["topk"], config["n_group"], config["topk_group"]
    logits = router_logits(x, weights.router)
    close(logits, arrays["router_logits"])
    biased = sigmoid(logits) + weights.router_bias
    close(group_scores(biased, groups), arrays["group_scores"])
    masked = mask_groups(biased, groups, kept)
    open_groups = np.isfinite(masked).reshape(len(x), groups, -1).all(axis=-1)
    np.testing.assert_array_equal(open_groups, arrays["group_mask_lowest"])
    ids, shares = sigmoid_gate(
        logits,
        weights.router_bias,
        k,
        groups=groups,
        groups_kept=kept,
        scale=config["scale"],
    )
    # The stored order of a token's experts is that of the biased scores.
    np.testing.assert_array_equal(ids, arrays["idx_lowest"])
    close(shares, arrays["weights_lowest"])
    close(gated_mlp(x, weights.shared), arrays["shared_out"][0])
    out = deepseek_moe(
        x, weights, topk=k, groups=groups, groups_kept=kept, gate_scale=config["scale"]
    )
    close(out, arrays["out_lowest"][0])


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("chunk", [1, 12])
def test_deepseek_layer(absorbed: bool, chunk: int) -> None:
    arrays, meta = load("dsv3_layer_moe")
    x = arrays["x"][0]
    weights = DeepseekLayerWeights(
        attention_norm=arrays["w_input_layernorm_weight"],
        attention=mla_weights(arrays, "w_self_attn_"),
        mlp_norm=arrays["w_post_attention_layernorm_weight"],
        mlp=deepseek_moe_weights(arrays, "w_mlp_"),
    )
    positions = np.arange(len(x))
    cos, sin = rope_tables(positions, replace(R1_ROPE, dim=8).inv_freq())
    cache, outputs = MlaCache.empty(32, 8), []
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        out, cache = deepseek_layer(
            x[part],
            weights,
            cos[part],
            sin[part],
            positions[part],
            cache,
            heads=4,
            scale=24**-0.5 * yarn_mscale(40.0) ** 2,
            eps=meta["rms_norm_eps"],
            latent_eps=1e-6,
            topk=4,
            groups=4,
            groups_kept=2,
            gate_scale=2.5,
            absorbed=absorbed,
        )
        outputs.append(out)
    close(np.concatenate(outputs), arrays["out"][0])


def test_dense_layer_is_the_layer_with_only_a_shared_expert() -> None:
    arrays, _ = load("dsv3_layer_moe")
    moe = deepseek_moe_weights(arrays, "w_mlp_")
    silent = replace(moe, down=np.zeros_like(moe.down))
    x = arrays["x"][0]
    positions = np.arange(len(x))
    cos, sin = rope_tables(positions, replace(R1_ROPE, dim=8).inv_freq())
    outputs = []
    for mlp in (moe.shared, silent):
        weights = DeepseekLayerWeights(
            attention_norm=arrays["w_input_layernorm_weight"],
            attention=mla_weights(arrays, "w_self_attn_"),
            mlp_norm=arrays["w_post_attention_layernorm_weight"],
            mlp=mlp,
        )
        empty = MlaCache.empty(32, 8)
        out, _ = deepseek_layer(
            x, weights, cos, sin, positions, empty, heads=4, scale=0.4, eps=1e-6, latent_eps=1e-6
        )
        outputs.append(out)
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert np.max(np.abs(outputs[0] - x)) > 0.01


# Rotary tables


@pytest.mark.parametrize(
    "model, rope",
    [("gptoss120b", GPTOSS_ROPE), ("deepseek_r1", R1_ROPE), ("kimi_k25", KIMI_ROPE)],
)
def test_rope_of_real_models(model: str, rope: Rope) -> None:
    arrays, meta = load("rope_real_params")
    scale = rope.table_scale
    assert scale == pytest.approx(meta["models"][model]["attention_scaling"], rel=1e-12)
    positions, reference = arrays["positions"][0], arrays[f"{model}_inv_freq"]
    inv_freq = rope.inv_freq()
    # float32 powers differ by an ulp between platforms; at most three of these 32 do.
    ulps = np.abs(inv_freq.view(np.int32) - reference.view(np.int32))
    assert np.max(ulps) <= 1 and np.count_nonzero(ulps) <= 3
    # The tables of the reference's frequencies agree at every position, ...
    for got, part in zip(rope_tables(positions, reference, scale), ("cos", "sin"), strict=True):
        close(got, arrays[f"{model}_{part}"][0], 2e-7)
    # ... ours wherever the frequency is the same, and elsewhere as far as the ulp turns the angle.
    turned = positions[:, None] * np.abs(inv_freq - reference.astype(np.float64))
    rounding = np.spacing(np.float32(1)) * positions[:, None] * reference * (ulps > 0)
    for got, part in zip(rope_tables(positions, inv_freq, scale), ("cos", "sin"), strict=True):
        error = np.abs(got - arrays[f"{model}_{part}"][0])
        assert np.all(error <= scale * (2e-7 + turned + rounding))


def test_ends_of_the_yarn_ramp_stay_inside() -> None:
    assert yarn_ramp(8, 1.5, 4096, 32.0, 1.0, True)[1] == 7
    assert yarn_ramp(8, 10000.0, 4096, 1e6, 1.0, True)[0] == 0
    low, high = yarn_ramp(64, 150000.0, 4096, 32.0, 1.0, False)
    assert (low, high) == pytest.approx((8.0927798, 17.3980244), rel=1e-7)


def test_impossible_rope_size_is_refused() -> None:
    with pytest.raises(ValueError, match="dim must be"):
        yarn_inv_freq(7, 10000.0, 40.0, 4096, 32.0, 1.0, True)


def test_norm_of_small_rows_is_held_by_eps() -> None:
    x = np.stack([np.zeros(8), np.full(8, 1e-3)])
    got = rms_norm(x, np.full(8, 2.0), 1e-6)
    np.testing.assert_allclose(got, [[0.0] * 8, [2**0.5] * 8], rtol=1e-12)


def test_rope_layouts_are_a_permutation_of_each_other() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, 3, 8))
    cos, sin = rope_tables(np.arange(5), replace(R1_ROPE, dim=8).inv_freq())
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    turned = rope_interleaved(x, cos, sin)
    np.testing.assert_array_equal(turned[..., order], rope_half_split(x[..., order], cos, sin))
    np.testing.assert_array_equal(turned[0], x[0])
    assert np.max(np.abs(turned[1:] - x[1:])) > 0.1
    np.testing.assert_allclose((turned**2).sum(-1), (x**2).sum(-1))


def test_rope_scores_depend_on_distance_alone() -> None:
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 1, 64))
    inv_freq = GPTOSS_ROPE.inv_freq()
    scores = []
    for base in (0, 77):
        q_tables = rope_tables(np.array([base + 9]), inv_freq)
        k_tables = rope_tables(np.array([base + 4]), inv_freq)
        scores.append(rope_half_split(q, *q_tables) @ rope_half_split(k, *k_tables).T)
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4)


# Edges of attention


def test_rows_that_see_nothing_are_zero() -> None:
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((2, 4, 8)), rng.standard_normal((5, 2, 8)), np.ones((5, 2, 6))
    allowed = np.zeros((2, 5), bool)
    allowed[1, 2] = True
    for sinks in (None, np.zeros(4), np.full(4, -np.inf)):
        core = attention_core(q, k, v, allowed, 0.5, sinks)
        np.testing.assert_array_equal(core[0], 0.0)
        assert np.all(core[1] > 0)
    assert attention_core(q, k[:0], v[:0], allowed[:, :0], 0.5).shape == (2, 4, 6)


def test_keys_that_nobody_sees_have_no_influence() -> None:
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((3, 4, 8)), rng.standard_normal((6, 2, 8)), np.ones((6, 2, 8))
    allowed = visible_keys(np.arange(1, 4), np.arange(6))
    want = attention_core(q, k, v, allowed, 0.5)
    k[4:], v[4:] = np.nan, np.nan
    np.testing.assert_array_equal(attention_core(q, k, v, allowed, 0.5), want)


def test_sink_is_one_more_column() -> None:
    rng = np.random.default_rng(5)
    scores, sinks = 9 * rng.standard_normal((7, 3, 11)), 9 * rng.standard_normal(3)
    wide = np.concatenate([scores, np.broadcast_to(sinks[:, None], (7, 3, 1))], axis=-1)
    plain = softmax_with_sinks(wide, np.ones((7, 12), bool))
    got = softmax_with_sinks(scores, np.ones((7, 11), bool), sinks)
    np.testing.assert_allclose(got, plain[..., :-1], rtol=1e-12)
    np.testing.assert_allclose(plain.sum(axis=-1), 1.0, rtol=1e-12)


def test_a_huge_sink_takes_everything_without_overflow() -> None:
    with np.errstate(over="raise", invalid="raise"):
        probs = softmax_with_sinks(
            np.array([[[-1e3, 1e3]]] * 2), np.ones((2, 2), bool), np.array([1e4])
        )
    np.testing.assert_array_equal(probs, 0.0)


def test_cache_keeps_the_newest() -> None:
    empty = KvCache.empty(2, 4, 3)
    cache = empty.append(np.ones((5, 2, 4)), np.ones((5, 2, 3)), np.arange(5))
    assert cache.last(2).positions.tolist() == [3, 4]
    assert cache.last(9).positions.tolist() == [0, 1, 2, 3, 4]
    assert cache.last(2).values.shape == (2, 2, 3) and cache.last(2).keys.shape == (2, 2, 4)


def test_uneven_heads_are_refused() -> None:
    q, k = np.zeros((1, 3, 4)), np.zeros((1, 2, 4))
    with pytest.raises(ValueError, match="heads must be"):
        attention_core(q, k, k, np.ones((1, 1), bool), 1.0)


# Edges of gates and experts


def test_softmax_gate_takes_the_lowest_index_and_leaves_nan() -> None:
    logits = np.array([[np.nan, 1.0, 2.0, 2.0, 1.0, -np.inf]])
    ids, weights = softmax_gate(logits, 3)
    np.testing.assert_array_equal(ids, [[2, 3, 1]])
    np.testing.assert_allclose(weights.sum(), 1.0)
    np.testing.assert_array_equal(softmax_gate(logits, 6)[0], [[2, 3, 1, 4, 5, 0]])


def test_equal_router_rows_give_equal_logits() -> None:
    rng = np.random.default_rng(6)
    weight = rng.standard_normal((13, 2880))
    weight[[3, 12]] = weight[5]
    logits = router_logits(rng.standard_normal((4, 2880)), weight)
    np.testing.assert_array_equal(logits[:, [3, 12]], logits[:, [5, 5]])


def test_experts_are_the_sum_over_tokens_and_choices() -> None:
    rng = np.random.default_rng(7)
    x, gate_up, down = (rng.standard_normal(shape) for shape in ((6, 8), (5, 12, 8), (5, 8, 6)))
    ids = np.stack([rng.permutation(5)[:3] for _ in range(6)])
    weights = rng.random((6, 3))
    out = routed_experts(x, ids, weights, gate_up, down, clamped_swiglu)
    for token in range(6):
        want = sum(
            weights[token, slot] * (down[e] @ clamped_swiglu(gate_up[e] @ x[token]))
            for slot, e in enumerate(ids[token])
        )
        np.testing.assert_allclose(out[token], want, rtol=1e-9, atol=1e-12)


def test_dropped_groups_lose_against_negative_scores() -> None:
    logits, bias = np.zeros((1, 8)), np.full(8, -2.0)  # every biased score is -1.5
    bias[6] = -1.0
    ids, weights = sigmoid_gate(logits, bias, 3, groups=2, groups_kept=1, scale=2.0)
    np.testing.assert_array_equal(ids, [[6, 4, 5]])
    np.testing.assert_allclose(weights, 2.0 / 3.0)


def test_sigmoid_gate_with_ties_and_nan() -> None:
    logits = np.zeros((2, 8))
    ids, _ = sigmoid_gate(logits, np.zeros(8), 4, groups=4, groups_kept=2)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3]] * 2)  # lowest groups, then lowest experts
    logits[1, 0] = np.nan
    ids, weights = sigmoid_gate(logits, np.zeros(8), 4, groups=4, groups_kept=2)
    np.testing.assert_array_equal(ids[1], [2, 3, 4, 5])  # a group whose score is NaN is last
    assert np.all(np.isfinite(weights[1]))
    ids, _ = sigmoid_gate(logits, np.zeros(8), 8)
    np.testing.assert_array_equal(ids[1], [1, 2, 3, 4, 5, 6, 7, 0])


@pytest.mark.parametrize("groups, kept", [(3, 1), (0, 1), (8, 1), (2, 0), (2, 3)])
def test_impossible_groups_are_refused(groups: int, kept: int) -> None:
    with pytest.raises(ValueError, match="groups"):
        sigmoid_gate(np.zeros((1, 8)), np.zeros(8), 2, groups=groups, groups_kept=kept)


def test_activations_at_their_ends() -> None:
    gate_up = np.array([1e3, 1e3, -1e3, -1e3, 7.0, -7.0, 0.0, 5.0])
    full = 7.0 / (1.0 + np.exp(-1.702 * 7.0))
    np.testing.assert_allclose(clamped_swiglu(gate_up), [full * 8.0, 0.0, full * -6.0, 0.0])
    np.testing.assert_allclose(silu(np.array([-1e3, 0.0, 1e3])), [0.0, 0.0, 1e3])
    np.testing.assert_allclose(swiglu(np.array([0.0, 1e3, 4.0, 2.0])), [0.0, 2e3])
