# SPDX-License-Identifier: Apache-2.0
"""The three configurations, and that bytes, parameters and FLOPs follow from them as published.

The expected figures were computed independently from the public configurations and agree with the
sizes of the published checkpoints; GB are 1e9 bytes.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from golden import traffic
from golden.models import FP8_128X128, INT4_32, MODELS, MXFP4, Gqa, Mla, ModelConfig
from golden.traffic import Part

GPT_OSS, R1, KIMI = (MODELS[name] for name in ("gpt-oss", "deepseek-r1", "kimi-k2.5"))
CONTEXT = 8192


def giga(value: float, want: float, digits: int = 4) -> None:
    """`value` / 1e9 is `want` to half a unit of its last digit."""
    assert value / 1e9 == pytest.approx(want, abs=0.5001 * 10**-digits)


def test_names() -> None:
    assert list(MODELS) == ["gpt-oss", "deepseek-r1", "kimi-k2.5"]
    assert all(model.name == name for name, model in MODELS.items())


@pytest.mark.parametrize(
    "model, total, active",
    [(GPT_OSS, 116.829, 5.133), (R1, 671.026, 36.626), (KIMI, 1026.408, 31.687)],
)
def test_parameters(model: ModelConfig, total: float, active: float) -> None:
    giga(traffic.total_parameters(model), total, 3)
    giga(traffic.active_parameters(model), active, 3)


def test_checkpoint_bytes() -> None:
    giga(traffic.checkpoint_bytes(GPT_OSS), 65.25, 2)
    assert traffic.checkpoint_bytes(GPT_OSS) / 2**30 == pytest.approx(60.77, abs=0.005)
    giga(traffic.checkpoint_bytes(R1), 673.15, 2)
    assert traffic.checkpoint_bytes(R1, mtp=True) == pytest.approx(688.587e9, rel=3e-5)
    assert traffic.checkpoint_bytes(KIMI) / 2**30 == pytest.approx(553.40, abs=0.005)
    assert traffic.checkpoint_bytes(KIMI, mtp=True) == traffic.checkpoint_bytes(KIMI)


def test_mtp_layer() -> None:
    layer = [t for t in traffic.mtp_tensors(R1) if t.name not in ("embedding row", "lm_head")]
    attention, expert, hidden = 187_105_280 + 1536 + 512, 3 * 7168 * 2048, 7168
    moe = 257 * expert + 256 * (hidden + 1)
    extra = 2 * hidden * hidden + 5 * hidden
    assert sum(t.parameters * t.copies for t in layer) == attention + moe + extra
    giga(attention + moe, 11.5, 1)
    assert not traffic.mtp_tensors(GPT_OSS) and not traffic.mtp_tensors(KIMI)


@pytest.mark.parametrize(
    "model, parts, total",
    [
        (GPT_OSS, [1.9116, 0.0, 1.9036, 0.0, 0.0295, 1.1583], 5.0029),
        (R1, [11.4162, 1.1894, 20.4396, 2.5550, 0.2149, 1.8534], 37.6685),
        (KIMI, [12.3369, 0.7927, 11.8909, 5.2848, 0.3324, 2.3488], 32.9865),
    ],
)
def test_weight_bytes_per_token(model: ModelConfig, parts: list[float], total: float) -> None:
    read = traffic.weight_bytes_per_token(model)
    order = [Part.ATTENTION, Part.DENSE, Part.ROUTED, Part.SHARED, Part.OTHER, Part.HEAD]
    assert list(read) == order
    for part, want in zip(order, parts, strict=True):
        giga(read[part], want)
    giga(sum(read.values()), total)


@pytest.mark.parametrize(
    "model, stored, read, total",
    [
        (GPT_OSS, 73728, 0.3067, 5.3096),
        (R1, 70272, 0.5757, 38.2441),
        (KIMI, 70272, 0.5757, 33.5621),
    ],
)
def test_kv_and_total_bytes(model: ModelConfig, stored: int, read: float, total: float) -> None:
    assert traffic.kv_bytes_stored(model) == stored
    assert traffic.kv_bytes_stored(model, element_bytes=1) == stored // 2
    giga(traffic.kv_bytes_read(model, CONTEXT), read)
    # The stated totals add rounded parts: one unit of the last digit.
    assert traffic.bytes_per_token(model, CONTEXT) / 1e9 == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize(
    "model, linear, attention, total, intensity",
    [
        (GPT_OSS, 10.26, 2.45, 12.72, 2.4),
        (R1, 73.25, 139.18, 212.43, 5.6),
        (KIMI, 63.37, 69.59, 132.96, 4.0),
    ],
)
def test_flops(
    model: ModelConfig, linear: float, attention: float, total: float, intensity: float
) -> None:
    giga(traffic.linear_flops(model), linear, 2)
    giga(traffic.attention_flops(model, CONTEXT), attention, 2)
    flops = traffic.linear_flops(model) + traffic.attention_flops(model, CONTEXT)
    giga(flops, total, 2)
    assert flops / traffic.bytes_per_token(model, CONTEXT) == pytest.approx(intensity, abs=0.05)


@pytest.mark.parametrize(
    "model, rate, terabytes, teraflops",
    [(GPT_OSS, 1459, 7.75, 18.6), (R1, 700, 26.77, 148.7), (KIMI, 694, 23.29, 92.3)],
)
def test_rates_at_the_official_results(
    model: ModelConfig, rate: int, terabytes: float, teraflops: float
) -> None:
    flops = traffic.linear_flops(model) + traffic.attention_flops(model, CONTEXT)
    got = rate * traffic.bytes_per_token(model, CONTEXT) / 1e12
    assert got == pytest.approx(terabytes, abs=0.0051)
    assert rate * flops / 1e12 == pytest.approx(teraflops, abs=0.051)


@pytest.mark.parametrize("model, chips", [(GPT_OSS, 1), (R1, 4), (KIMI, 3)])
def test_chips_by_capacity(model: ModelConfig, chips: int) -> None:
    assert math.ceil(traffic.checkpoint_bytes(model) * 1.05 / (216 * 2**30)) == chips


def test_windows_of_gpt_oss() -> None:
    assert [GPT_OSS.window(layer) for layer in range(4)] == [128, None, 128, None]
    assert sum(GPT_OSS.window(layer) is None for layer in range(36)) == 18
    assert R1.window(0) is None
    for context, seen in ((1, 36), (128, 36 * 128), (129, 18 * 128 + 18 * 129)):
        assert traffic.keys_seen(GPT_OSS, context) == seen
    assert traffic.keys_seen(KIMI, 7) == 61 * 7
    with pytest.raises(ValueError, match="layer must be"):
        GPT_OSS.window(36)
    with pytest.raises(ValueError, match="context must be"):
        traffic.keys_seen(GPT_OSS, 0)


def test_softmax_scales() -> None:
    assert GPT_OSS.attention.scale == 64**-0.5
    assert R1.attention.scale == pytest.approx(0.135234, abs=5e-7)
    assert KIMI.attention.scale == pytest.approx(0.144680, abs=5e-7)
    assert GPT_OSS.rope.table_scale == pytest.approx(1.34657359, abs=5e-9)


@pytest.mark.parametrize(
    "model, key", [(GPT_OSS, "gptoss120b"), (R1, "deepseek_r1"), (KIMI, "kimi_k25")]
)
def test_rope_parameters_are_those_of_the_vectors(model: ModelConfig, key: str) -> None:
    with np.load(Path(__file__).parent / "vectors" / "rope_real_params.npz") as file:
        stated = json.loads(str(file["__meta__"]))["models"][key]
    rope, parameters = model.rope, stated["rope_parameters"]
    assert rope.table_scale == pytest.approx(stated["attention_scaling"], rel=1e-12)
    assert rope.theta == parameters["rope_theta"]
    assert rope.factor == parameters["factor"]
    assert (rope.beta_fast, rope.beta_slow) == (parameters["beta_fast"], parameters["beta_slow"])
    assert rope.original_positions == parameters["original_max_position_embeddings"]
    assert rope.truncate == parameters.get("truncate", True)
    cos, sin = rope.tables(np.arange(3))
    assert cos.shape == sin.shape == (3, 32)
    np.testing.assert_array_equal(cos[0], rope.table_scale)
    attention = model.attention
    assert rope.dim == (attention.head_dim if isinstance(attention, Gqa) else attention.rope)


def test_shapes_of_attention() -> None:
    assert isinstance(GPT_OSS.attention, Gqa)
    assert GPT_OSS.attention.heads * GPT_OSS.attention.head_dim == 4096 != GPT_OSS.hidden
    for model, heads in ((R1, 128), (KIMI, 64)):
        attention = model.attention
        assert isinstance(attention, Mla)
        assert attention.heads == heads
        assert (attention.kv_lora + attention.rope, attention.nope + attention.rope) == (576, 192)


def test_weight_formats() -> None:
    assert MXFP4.matrix_bytes(5760, 2880) == 5760 * 90 * 17
    assert INT4_32.matrix_bytes(10, 64) == 10 * 2 * 18
    assert FP8_128X128.matrix_bytes(128, 128) == 128 * 128 + 4
    assert FP8_128X128.matrix_bytes(576, 7168) == 576 * 7168 + 5 * 56 * 4


@pytest.mark.parametrize(
    "broken",
    [
        lambda: replace(GPT_OSS.attention, kv_heads=7),
        lambda: replace(GPT_OSS.moe, topk=0),
        lambda: replace(R1.moe, groups=7),
        lambda: replace(R1.moe, groups_kept=9),
        lambda: replace(R1.rope, dim=63),
        lambda: replace(R1.rope, max_positions=4096),
        lambda: replace(R1, dense_layers=62),
    ],
)
def test_impossible_configurations_are_refused(broken) -> None:
    with pytest.raises(ValueError, match="must"):
        broken()
