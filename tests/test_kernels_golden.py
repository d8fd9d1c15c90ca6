# SPDX-License-Identifier: Apache-2.0
"""Bit-exact kernels against float64: within their bounds, and near independent implementations."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from golden import fp32
from golden.bounds import attention_bound, layer_bound, moe_bound
from golden.bounds.affine import Noise
from golden.bounds.layer import TokenCache
from golden.bounds.layer import attend as attend_form
from golden.bounds.roundings import stored
from golden.formats import Format, bf16_to_float32, to_bf16_codes
from golden.kernels.attention import (
    Chunk,
    attend,
    attention,
    chunks,
    exponent_factor,
    sink_starts,
    window_slots,
)
from golden.kernels.layer import LayerCache, LayerShape, LayerWeights, layer, rope_rows
from golden.kernels.moe import Expert, Matrix, moe
from golden.kernels.trace import Machine, Trace
from golden.models import GateSpec
from golden.quantise import dequantise
from golden.reference.attention import GqaWeights, KvCache, attention_core
from golden.reference.experts import clamped_swiglu, routed_experts
from golden.reference.gate import router_logits
from golden.reference.layer import GptOssLayerWeights, GptOssMoeWeights, gptoss_layer
from sim.kernels.vectors import gptoss_layer0
from tests.kernel_checks import MACHINES, SMALL, TINY, VECTORS, Arrays, load, near, rng_of, within

# Attention

MOST_ATTENTION = 0.05


def random_attention(
    rng: np.random.Generator, heads: int, kv_heads: int, dim: int, slots: int
) -> dict:
    keys, values = (
        rng.standard_normal((slots, kv_heads, dim)).astype(np.float32) for _ in range(2)
    )
    return {
        "queries": rng.standard_normal((heads, dim)).astype(np.float32),
        "keys": to_bf16_codes(keys),
        "values": to_bf16_codes(values),
        "sinks": rng.standard_normal(heads).astype(np.float32),
        "scale": float(np.float32(dim**-0.5)),
    }


def check_attention(
    machine: Machine,
    case: dict,
    valid: np.ndarray,
    chunk: int,
    out_format: Format = Format.BF16,
    most: float = MOST_ATTENTION,
) -> np.ndarray:
    """Kernel against bound, and the bound's reference against `golden.reference`."""
    parts = chunks(len(valid), valid, chunk)
    found = attention(machine, Trace(), **case, parts=parts, out_format=out_format)
    reference, bound = attention_bound(**case, valid=valid, out_format=out_format)
    wanted = attention_core(
        case["queries"][None],
        *(bf16_to_float32(case[name]) for name in ("keys", "values")),
        valid[None],
        case["scale"],
        case["sinks"],
    )[0]
    np.testing.assert_allclose(reference, wanted, rtol=1e-9, atol=1e-12)
    within(found, reference, bound, most)
    return found


@pytest.mark.parametrize("context", [1, 7, 8, 9, 127, 128, 129, 512])
def test_attention_over_contexts(context: int) -> None:
    rng = rng_of(context)
    for machine, kv_heads, dim, chunk in (
        (SMALL, 1, 64, 512),
        (SMALL, 2, 16, 128),
        (TINY, 1, 16, 100),
        (TINY, 2, 64, 64),
    ):
        case = random_attention(rng, 4, kv_heads, dim, context)
        check_attention(machine, case, window_slots(context, context, None), chunk)


@pytest.mark.parametrize("chunk", [1, 7, 16, 128, 1000])
def test_attention_over_chunks(chunk: int) -> None:
    rng = rng_of(chunk)
    case = random_attention(rng, 4, 2, 16, 130)
    check_attention(SMALL, case, np.ones(130, bool), chunk)


@pytest.mark.parametrize(
    "context, ring, window",
    [
        (5, 16, 8),
        (8, 8, 8),
        (9, 8, 8),
        (13, 16, 8),
        (20, 16, 8),
        (29, 16, 8),
        (300, 136, 128),
        (31, 32, 1),
    ],
)
def test_attention_in_a_window_and_a_ring(context: int, ring: int, window: int) -> None:
    rng = rng_of(context * ring + window)
    valid = window_slots(context, ring, window)
    assert valid.sum() == min(context, window)
    case = random_attention(rng, 8, 1, 16, len(valid))
    for codes in (case["keys"], case["values"]):
        codes[~valid] = to_bf16_codes(np.float32(3e8))  # what nobody sees has no influence
    found = [check_attention(SMALL, case, valid, chunk) for chunk in (len(valid), 8)]
    near(found[1], found[0], 0.02)


@pytest.mark.parametrize("sink", [-np.inf, -40.0, 0.0, 12.0, 60.0])
def test_attention_with_sinks(sink: float) -> None:
    rng = rng_of(3)
    case = random_attention(rng, 4, 2, 16, 24)
    case["sinks"] = np.float32([sink, -np.inf, 0.0, sink])
    for chunk in (8, 64):
        found = check_attention(TINY, case, np.ones(24, bool), chunk)
    if sink == 60.0:
        assert np.abs(found[0]).max() < 1e-20 < np.abs(found[1]).max()


@pytest.mark.parametrize("starts", [None, -np.inf, 0.5])
def test_rows_that_see_nothing(starts: float | None) -> None:
    """A chunk that is masked changes nothing; a row without any slot gives +0, never NaN."""
    rng = rng_of(8)
    case = random_attention(rng, 2, 1, 16, 24)
    factor = exponent_factor(case["scale"])
    given = None if starts is None else sink_starts(np.full(2, starts), case["scale"])

    def run(*parts: Chunk) -> np.ndarray:
        queries = to_bf16_codes(case["queries"])
        kv = case["keys"][:, 0], case["values"][:, 0]
        return attend(SMALL, Trace(), "g", queries, *kv, given, factor, list(parts))

    seen, other, masked = Chunk(0, 8, None), Chunk(8, 24, (2, 5)), Chunk(8, 24, (0, 0))
    np.testing.assert_array_equal(fp32.bits(run()), 0)
    assert np.abs(run(seen)).min() > 0
    np.testing.assert_array_equal(run(seen, masked), run(seen))
    np.testing.assert_array_equal(run(seen, masked, other), run(seen, other))
    if given is None:
        with pytest.raises(ValueError, match="parts must begin"):
            run(masked, seen)
    else:
        np.testing.assert_array_equal(fp32.bits(run(masked)), 0)
        np.testing.assert_array_equal(fp32.bits(run(masked, masked)), 0)
        np.testing.assert_array_equal(run(masked, seen), run(seen))


def test_no_sinks_and_sinks_of_minus_infinity_are_the_same() -> None:
    rng = rng_of(9)
    case = random_attention(rng, 2, 1, 16, 40)
    starts = sink_starts(np.full(2, -np.inf), case["scale"])
    found, names = [], []
    for given in (None, starts):
        trace = Trace()
        queries, kv = to_bf16_codes(case["queries"]), (case["keys"][:, 0], case["values"][:, 0])
        parts = chunks(40, np.ones(40, bool), 16)
        factor = exponent_factor(case["scale"])
        found.append(attend(TINY, trace, "g", queries, *kv, given, factor, parts))
        names.append({name.removeprefix("g.") for name in trace.buffers})
    np.testing.assert_array_equal(*found)
    assert names[1] - names[0] == {"c0.max", "c0.shrink", "c0.sum"} and not names[0] - names[1]
    assert {"c1.output", "c2.scaled", "inverse"} <= names[0]


def test_impossible_softmaxes_are_refused() -> None:
    for sink in (np.inf, np.nan):
        with pytest.raises(ValueError, match="sinks must be"):
            sink_starts(np.float32([0, sink]), 0.5)
    for scale in (0.0, -1.0, np.inf):
        with pytest.raises(ValueError, match="scale must be"):
            exponent_factor(scale)


def test_attention_of_one_sharp_key() -> None:
    rng = rng_of(4)
    case = random_attention(rng, 2, 1, 64, 40)
    case["keys"][17, 0] = to_bf16_codes(40 * case["queries"][0])
    for chunk in (8, 40):
        found = check_attention(SMALL, case, np.ones(40, bool), chunk)
    np.testing.assert_allclose(found[0], bf16_to_float32(case["values"][17, 0]), rtol=0.01)


@pytest.mark.parametrize("out_format", [Format.FP32, Format.MXFP8_E4M3, Format.MXINT8])
def test_attention_to_other_formats(out_format: Format) -> None:
    rng = rng_of(5)
    case = random_attention(rng, 4, 1, 64, 33)
    check_attention(SMALL, case, np.ones(33, bool), 16, out_format, most=0.1)


@pytest.mark.parametrize("name", ["full_ctx257", "win128_ctx129"])
def test_attention_of_real_heads(name: str) -> None:
    """The vector's own inputs; keys and values rounded to BF16 cost about what the kernel does."""
    arrays, meta = load(f"gptoss_core_real_{name}")
    case = {
        "queries": arrays["q"][0, :, 0],
        "keys": to_bf16_codes(arrays["k"][0].swapaxes(0, 1)),
        "values": to_bf16_codes(arrays["v"][0].swapaxes(0, 1)),
        "sinks": arrays["sinks"],
        "scale": meta["scaling"],
    }
    for chunk in (64, 512):
        found = check_attention(SMALL, case, arrays["mask_allowed"][0], chunk)
        near(found, arrays["out_f64"][0, 0], 0.02)


def test_a_fault_in_attention_is_out_of_bounds() -> None:
    """The bound notices a token more or less in the window, and a sink of some weight left out."""
    rng = rng_of(6)
    case = random_attention(rng, 4, 1, 64, 64)
    case["sinks"] += np.float32(2)
    valid = window_slots(64, 64, 60)
    reference, bound = attention_bound(**case, valid=valid)
    for change, seen in (
        ({}, window_slots(64, 64, 59)),
        ({}, window_slots(64, 64, 61)),
        ({"sinks": np.full(4, -np.inf, np.float32)}, valid),
    ):
        found = attention(SMALL, Trace(), **(case | change), parts=chunks(64, seen, 512))
        assert np.any(np.abs(found - reference) > bound)


# Mixture of experts


def moe_vector(name: str, fmt: Format, lanes: int) -> tuple[Arrays, Matrix, list[Expert]]:
    arrays, _ = load(f"gptoss_moe_{name}")
    router = Matrix.of(arrays["w_router_weight"], Format.BF16, arrays["w_router_bias"])
    experts = [
        Expert.of(gate_up.T, gate_up_bias, down.T, down_bias, fmt, lanes)
        for gate_up, gate_up_bias, down, down_bias in zip(
            *(
                arrays[f"w_experts_{part}"]
                for part in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
            ),
            strict=True,
        )
    ]
    return arrays, router, experts


def matrix_values(matrix: Matrix) -> np.ndarray:
    return dequantise(matrix.codes, matrix.scales, matrix.fmt)


def moe_weights(router: Matrix, experts: list[Expert]) -> GptOssMoeWeights:
    """Quantised weights in the reference's layout: gate and up rows interleaved, no padding."""

    def interleaved(rows: np.ndarray, size: int) -> np.ndarray:
        half = len(rows) // 2
        return np.stack([rows[:size], rows[half : half + size]], axis=1).reshape(
            2 * size, *rows.shape[1:]
        )

    return GptOssMoeWeights(
        router=matrix_values(router),
        router_bias=router.bias,
        gate_up=np.stack([interleaved(matrix_values(e.gate_up), e.intermediate) for e in experts]),
        gate_up_bias=np.stack([interleaved(e.gate_up.bias, e.intermediate) for e in experts]),
        down=np.stack([matrix_values(e.down) for e in experts]),
        down_bias=np.stack([e.down.bias for e in experts]),
    )


def moe_reference(
    x: np.ndarray, router: Matrix, experts: list[Expert], ids: np.ndarray
) -> np.ndarray:
    """`golden.reference` with the experts given."""
    w = moe_weights(router, experts)
    chosen = np.take_along_axis(router_logits(x, w.router, w.router_bias), ids, axis=1)
    shares = np.exp(chosen - chosen.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return routed_experts(
        x, ids, shares, w.gate_up, w.down, clamped_swiglu, w.gate_up_bias, w.down_bias
    )


def check_moe(
    machine: Machine,
    x: np.ndarray,
    router: Matrix,
    experts: list[Expert],
    k: int,
    act: Format,
    most: float,
) -> tuple[np.ndarray, np.ndarray]:
    """(the kernel's result, its choices [tokens, k]), the result within its bound."""
    trace = Trace()
    spec = GateSpec(len(experts), k, "softmax")
    found = moe(machine, trace, x, router, experts, spec, act)
    ids = trace.buffers["gate.ids"].codes.astype(np.int64)
    reference, bound = moe_bound(x, router, experts, spec, ids, act)
    np.testing.assert_allclose(
        reference, moe_reference(x, router, experts, ids), rtol=1e-9, atol=1e-12
    )
    within(found, reference, bound, most)
    return found, ids


@pytest.mark.parametrize("name", ["s0", "clamp", "tie_pair", "zero_input"])
@pytest.mark.parametrize("fmt", [Format.MXFP4, Format.BF16])
def test_moe_of_the_vectors(name: str, fmt: Format) -> None:
    for machine in MACHINES:
        arrays, router, experts = moe_vector(name, fmt, machine.lanes)
        x = arrays["x"][0]
        found, ids = check_moe(machine, x, router, experts, 2, Format.BF16, 0.05)
        same = np.all(ids == arrays["idx_lowest"], axis=1)
        assert same.mean() > 0.9  # a near tie may go the other way in BF16
        if fmt is Format.BF16:  # else the weights are others
            near(found[same], arrays["out_lowest_f64"][0][same], 0.02)


@pytest.mark.parametrize("act", [Format.MXFP8_E4M3, Format.MXFP8_E5M2, Format.MXINT8])
def test_moe_with_narrow_activations(act: Format) -> None:
    most = {Format.MXFP8_E4M3: 0.8, Format.MXFP8_E5M2: 1.6, Format.MXINT8: 0.2}[act]
    for machine in MACHINES:
        arrays, router, experts = moe_vector("s0", Format.MXFP4, machine.lanes)
        check_moe(machine, arrays["x"][0], router, experts, 2, act, most)


@pytest.mark.parametrize("fmt", [Format.MXFP6_E2M3, Format.MXFP8_E4M3, Format.MXINT8])
@pytest.mark.parametrize(
    "tokens, hidden, size, count, k", [(1, 40, 9, 3, 3), (3, 96, 33, 16, 4), (1, 128, 64, 5, 1)]
)
def test_moe_of_odd_sizes(
    fmt: Format, tokens: int, hidden: int, size: int, count: int, k: int
) -> None:
    rng = rng_of(tokens + hidden + size)

    def weights(*dims: int) -> np.ndarray:
        return (rng.standard_normal(dims) / np.sqrt(dims[-1])).astype(np.float32)

    router = Matrix.of(weights(count, hidden), Format.BF16, weights(count))
    experts = [
        Expert.of(
            weights(2 * size, hidden),
            weights(2 * size),
            weights(hidden, size),
            weights(hidden),
            fmt,
            4,
        )
        for _ in range(count)
    ]
    check_moe(
        TINY,
        rng.standard_normal((tokens, hidden)).astype(np.float32),
        router,
        experts,
        k,
        Format.BF16,
        0.05,
    )


def test_a_fault_in_the_experts_is_out_of_bounds() -> None:
    arrays, router, experts = moe_vector("s0", Format.MXFP4, 16)
    x = arrays["x"][0]
    trace = Trace()
    spec = GateSpec(len(experts), 2, "softmax")
    moe(SMALL, trace, x, router, experts, spec)
    ids = trace.buffers["gate.ids"].codes.astype(np.int64)
    reference, bound = moe_bound(x, router, experts, spec, ids)
    others = [replace(e, down=replace(e.down, bias=e.down.bias * np.float32(0))) for e in experts]
    assert np.any(np.abs(moe(SMALL, Trace(), x, router, others, spec) - reference) > bound)
    quarter = router.bias * np.float32(0.25)
    assert np.any(
        np.abs(moe(SMALL, Trace(), x, replace(router, bias=quarter), experts, spec) - reference)
        > bound
    )


# Layer


def run_layer(
    machine: Machine,
    shape: LayerShape,
    weights: LayerWeights,
    xs: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Residual stream [T, hidden] token by token, and the experts [T, top_k]."""
    cache, outputs, ids = LayerCache.empty(shape), [], []
    for x, c, s in zip(xs, cos, sin, strict=True):
        trace = Trace()
        outputs.append(layer(machine, trace, shape, weights, cache, x, c, s))
        ids.append(trace.buffers["gate.ids"].codes[0].astype(np.int64))
    assert cache.length == len(xs)
    return np.stack(outputs), np.stack(ids)


def reference_layer(
    shape: LayerShape, weights: LayerWeights, xs: np.ndarray, cos: np.ndarray, sin: np.ndarray
) -> np.ndarray:
    """`golden.reference` on the quantised weights, all tokens at once."""
    qkv, dim = matrix_values(weights.qkv), shape.head_dim
    cuts = [shape.heads * dim, (shape.heads + shape.kv_heads) * dim]
    (q, k, v), (q_bias, k_bias, v_bias) = (np.split(part, cuts) for part in (qkv, weights.qkv.bias))
    out, _ = gptoss_layer(
        xs,
        GptOssLayerWeights(
            attention_norm=weights.attention_norm,
            attention=GqaWeights(
                q,
                q_bias,
                k,
                k_bias,
                v,
                v_bias,
                matrix_values(weights.output),
                weights.output.bias,
                weights.sinks,
            ),
            moe_norm=weights.moe_norm,
            moe=moe_weights(weights.router, weights.experts),
        ),
        cos,
        sin,
        np.arange(len(xs)),
        KvCache.empty(shape.kv_heads, dim),
        topk=shape.top_k,
        scale=dim**-0.5,
        window=shape.window,
        eps=shape.eps,
    )
    return out


@cache
def vector_bound(expert_format: Format, ring: int, window: int | None) -> tuple[np.ndarray, ...]:
    """(reference, bound, experts): of any machine, so those of one serve for all."""
    shape, weights, xs, cos, sin = gptoss_layer0(SMALL.lanes, expert_format)
    shape = replace(shape, ring=ring, window=window)
    _, ids = run_layer(SMALL, shape, weights, xs, cos, sin)
    reference, bound = layer_bound(shape, weights, xs, cos, sin, ids)
    # No choice is near enough a tie to differ, so this is also the reference that chooses by
    # itself.
    wanted = reference_layer(shape, weights, xs, cos, sin)
    np.testing.assert_allclose(reference, wanted, rtol=1e-9, atol=1e-9)
    return reference, bound, ids


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("ring, chunk", [(8, 512), (16, 512), (16, 8)])
@pytest.mark.parametrize("expert_format", [Format.MXFP4, Format.BF16])
def test_layer_of_the_vector(
    machine: Machine, ring: int, chunk: int, expert_format: Format
) -> None:
    arrays, _ = load("gptoss_layer0")
    shape, weights, xs, cos, sin = gptoss_layer0(machine.lanes, expert_format)
    assert (shape.window, shape.ring) == (8, 8)
    shape = replace(shape, ring=ring, chunk=chunk)
    found, ids = run_layer(machine, shape, weights, xs, cos, sin)
    reference, bound, bound_ids = vector_bound(expert_format, ring, 8)
    np.testing.assert_array_equal(ids, bound_ids)
    assert within(found, reference, bound, 0.2) < 100
    if (
        expert_format is Format.BF16
    ):  # 0.004 of the largest value is what BF16 weights and activations cost
        near(found, arrays["out"][0], 0.006)


def test_full_attention_layer() -> None:
    shape, weights, xs, cos, sin = gptoss_layer0(SMALL.lanes, Format.MXFP4)
    full = replace(shape, window=None, ring=16)
    found, _ = run_layer(SMALL, full, weights, xs, cos, sin)
    reference, bound, _ = vector_bound(Format.MXFP4, 16, None)
    within(found, reference, bound, 0.25)
    # The window matters here, or the tests above would not see it.
    windowed, window_bound, _ = vector_bound(Format.MXFP4, 8, 8)
    assert np.any(np.abs(found - windowed) > window_bound)


def test_attention_inside_the_layer() -> None:
    """What attention leaves, before later steps hide it in larger bounds."""
    shape, weights, xs, cos, sin = gptoss_layer0(SMALL.lanes, Format.MXFP4)
    held = LayerCache.empty(shape)
    known: list[TokenCache] = []
    for x, c, s in zip(xs[:10], cos, sin, strict=False):
        trace, noise = Trace(), Noise()
        layer(SMALL, trace, shape, weights, held, x, c, s)
        cosine, sine = (row.astype(np.float64) for row in rope_rows(c, s))
        form = attend_form(shape, weights, known, x.astype(np.float64), cosine, sine, noise)
        form = stored(form, noise)
        within(trace.buffers["attended"].values.reshape(-1), form.value, form.bound, 0.15)
        for name, part in (("key", known[-1].key), ("value", known[-1].value)):
            within(trace.buffers[name].values, part.value, part.bound, 0.03)


def test_layer_on_a_cache_in_e4m3() -> None:
    """Keys and values are rounded from FP32 with each head's scales: attention's bound knows it.

    Of the whole layer there is no worst case: the experts' shares could be anything.
    """
    shape, weights, xs, cos, sin = gptoss_layer0(SMALL.lanes, Format.BF16)
    narrow = replace(shape, kv=Format.MXFP8_E4M3)
    scaled = replace(weights, kv_scales=np.array([[121, 122], [120, 121]], np.uint8))
    held, known, outputs = LayerCache.empty(narrow), [], []
    for x, c, s in zip(xs, cos, sin, strict=True):
        trace, noise = Trace(), Noise()
        outputs.append(layer(SMALL, trace, narrow, scaled, held, x, c, s))
        cosine, sine = (row.astype(np.float64) for row in rope_rows(c, s))
        form = attend_form(narrow, scaled, known, x.astype(np.float64), cosine, sine, noise)
        form = stored(form, noise)
        within(trace.buffers["attended"].values.reshape(-1), form.value, form.bound, 1.0)
    near(np.stack(outputs), load("gptoss_layer0")[0]["out"][0], 0.05)

    cache, trace = LayerCache.empty(narrow), Trace()
    layer(SMALL, trace, narrow, scaled, cache, xs[0], cos[0], sin[0])
    plain = Trace()
    layer(SMALL, plain, shape, weights, LayerCache.empty(shape), xs[0], cos[0], sin[0])
    np.testing.assert_array_equal(trace.buffers["queries"].codes, plain.buffers["queries"].codes)
    for name, codes, scales in (
        ("key", cache.keys, [121, 122]),
        ("value", cache.values, [120, 121]),
    ):
        kept = trace.buffers[name]
        assert kept.fmt is Format.MXFP8_E4M3 and kept.scales is not None
        assert kept.scales.tolist() == [[scale] for scale in scales]
        np.testing.assert_array_equal(kept.codes, codes[0])
        near(kept.values, plain.buffers[name].values, 0.05)
    with pytest.raises(ValueError, match="kv_scales must be"):
        layer(SMALL, Trace(), narrow, weights, LayerCache.empty(narrow), xs[0], cos[0], sin[0])


def test_a_wrong_choice_of_experts_is_noticed() -> None:
    shape, weights, xs, cos, sin = gptoss_layer0(SMALL.lanes, Format.MXFP4)
    _, ids = run_layer(SMALL, shape, weights, xs[:2], cos[:2], sin[:2])
    other = ids.copy()
    other[1] = [e for e in range(8) if e not in ids[1]][:2]
    with pytest.raises(ValueError, match="ids must be the best"):
        layer_bound(shape, weights, xs[:2], cos[:2], sin[:2], other)


def test_the_package_holds_the_vector() -> None:
    packaged = Path(__file__).parent.parent / "sim" / "data" / "gptoss_layer0.npz"
    assert packaged.read_bytes() == (VECTORS / "gptoss_layer0.npz").read_bytes()
