# SPDX-License-Identifier: Apache-2.0
"""Layers of DeepSeek and Kimi, bit-exact: within the bound of float64, and near the vector."""

from dataclasses import replace

import numpy as np
import pytest

from golden.bounds import middle_bound, mla_layer_bound, mlp_bound
from golden.formats import Format
from golden.kernels.mla import MlaCache, MlaShape
from golden.kernels.mla_layer import MlaLayerShape, MlaLayerWeights, mla_layer
from golden.kernels.moe import Expert
from golden.kernels.trace import Machine, Trace
from golden.models import DEEPSEEK_R1, GateSpec
from golden.reference.experts import GatedMlpWeights
from golden.reference.layer import DeepseekLayerWeights, DeepseekMoeWeights, deepseek_layer
from golden.reference.mla import MlaCache as ReferenceCache
from golden.topk import choose
from tests.kernel_checks import MACHINES, SMALL, TINY, load, near, rng_of, within
from tests.test_mla_golden import reference_weights, tables
from tests.test_mla_golden import weights_of as attention_of
from tests.test_moe_golden import halves, values

BF16, MXFP4 = Format.BF16, Format.MXFP4
GATE = GateSpec(16, 4, "sigmoid", "choice", 4, 2, 2.5)


def case(lanes: int, fmt: Format = BF16, dense: bool = False, act: Format = BF16):
    """(shape, weights, xs, cos, sin, what the vector says) of the vector's layer.

    `dense`: with its shared expert as the only MLP, of which the vector says nothing.
    """
    arrays, meta = load("dsv3_layer_moe")
    attention = attention_of(
        {
            name.replace("w_self_attn_", "w_"): array
            for name, array in arrays.items()
            if name.startswith("w_self_attn_")
        }
    )
    shared = GatedMlpWeights(
        *(arrays[f"w_mlp_shared_experts_{p}_proj_weight"] for p in ("gate", "up", "down"))
    )
    routed = DeepseekMoeWeights(
        arrays["w_mlp_gate_weight"],
        arrays["w_mlp_gate_e_score_correction_bias"],
        arrays["w_mlp_experts_gate_up_proj"],
        arrays["w_mlp_experts_down_proj"],
        shared,
    )
    weights = DeepseekLayerWeights(
        arrays["w_input_layernorm_weight"],
        attention,
        arrays["w_post_attention_layernorm_weight"],
        shared if dense else routed,
    )
    xs = arrays["x"][0]
    q_lora, kv_lora = len(attention.q_a_norm), len(attention.kv_a_norm)
    inner = MlaShape(4, q_lora, kv_lora, 16, 8, 16, 0.38249888, 1e-6, 16, 8, 4, 8)
    shape = MlaLayerShape(inner, meta["rms_norm_eps"], None if dense else GATE, act)
    cos, sin = tables(DEEPSEEK_R1.rope, 8, np.arange(len(xs)))
    made = MlaLayerWeights.of(weights, inner, lanes, fmt, fmt)
    return shape, made, xs, cos, sin, arrays["out"][0]


def run(machine: Machine, shape, weights, xs, cos, sin, steps):
    """Result [T, hidden], and the experts [T, top_k] of a layer that has any."""
    cache = MlaCache.empty(shape.attention)
    outputs, ids, start = [], [], 0
    for step in steps:
        part, trace = slice(start, start + step), Trace()
        given = shape, weights, cache, xs[part], cos[part], sin[part]
        outputs.append(mla_layer(machine, trace, *given))
        if "gate.ids" in trace.buffers:
            ids.append(trace.buffers["gate.ids"].codes.astype(np.int64))
        start += step
    assert start == len(xs) == cache.length
    return np.concatenate(outputs), np.concatenate(ids) if ids else None


def reference(shape, weights, xs, cos, sin):
    """The float64 layer on the quantised weights, its experts chosen by itself."""
    mlp = weights.mlp
    if isinstance(mlp, Expert):
        given = GatedMlpWeights(*halves(mlp), values(mlp.down))
    else:
        given = DeepseekMoeWeights(
            values(mlp.router),
            mlp.choice_bias,
            np.stack([np.concatenate(halves(e)) for e in mlp.experts]),
            np.stack([values(e.down) for e in mlp.experts]),
            GatedMlpWeights(*halves(mlp.shared), values(mlp.shared.down)),
        )
    inner = shape.attention
    layer = DeepseekLayerWeights(
        weights.attention_norm,
        reference_weights(inner, weights.attention),
        weights.mlp_norm,
        given,
    )
    gate = shape.gate or GateSpec(1, 1, "sigmoid", "choice")
    return deepseek_layer(
        xs,
        layer,
        cos,
        sin,
        np.arange(len(xs)),
        ReferenceCache.empty(inner.kv_lora, inner.rope),
        heads=inner.heads,
        scale=inner.scale,
        eps=shape.eps,
        latent_eps=inner.eps,
        topk=gate.top_k,
        groups=gate.groups,
        groups_kept=gate.groups_kept,
        gate_scale=gate.scale,
    )[0]


@pytest.mark.parametrize("fmt", [BF16, MXFP4])
@pytest.mark.parametrize("dense", [False, True])
def test_the_layer_of_the_vector(fmt: Format, dense: bool) -> None:
    for machine in MACHINES:
        shape, weights, xs, cos, sin, out = case(machine.lanes, fmt, dense)
        found, ids = run(machine, shape, weights, xs, cos, sin, [len(xs)])
        cache = MlaCache.empty(shape.attention)
        wanted, bound = mla_layer_bound(shape, weights, cache, xs, cos, sin, ids)
        within(found, wanted, bound, 0.3 if dense else 0.6)
        own = reference(shape, weights, xs, cos, sin)
        clear = slice(None) if dense else settled(machine, shape, weights, xs, cos, sin)
        np.testing.assert_allclose(own[clear], wanted[clear], rtol=1e-9, atol=1e-10)
        if not dense and fmt is BF16:
            near(found[clear], out[clear], 0.02)


def settled(machine: Machine, shape, weights, xs, cos, sin) -> np.ndarray:
    """Tokens whose experts do not change with scores that are 0.02 off, as rounded weights make
    them.
    """
    trace, gate = Trace(), shape.gate
    mla_layer(machine, trace, shape, weights, MlaCache.empty(shape.attention), xs, cos, sin)
    rng = rng_of(3)
    scores, own = (trace.buffers[f"gate.{name}"] for name in ("scores", "ids"))
    same = np.ones(len(xs), bool)
    for _ in range(50):
        moved = scores.values + rng.uniform(-0.02, 0.02, scores.codes.shape).astype(np.float32)
        ids, _, _ = choose(
            moved,
            gate.top_k,
            bias=weights.mlp.choice_bias,
            groups=gate.groups,
            groups_kept=gate.groups_kept,
        )
        same &= (np.sort(ids, axis=1) == np.sort(own.codes, axis=1)).all(axis=1)
    assert same.mean() >= 0.5
    return same


@pytest.mark.parametrize("dense", [False, True])
def test_a_token_has_the_same_result_in_any_step(dense: bool) -> None:
    shape, weights, xs, cos, sin, _ = case(TINY.lanes, MXFP4, dense)
    together, _ = run(TINY, shape, weights, xs, cos, sin, [12])
    for steps in ([1] * 12, [5, 1, 6]):
        found, _ = run(TINY, shape, weights, xs, cos, sin, steps)
        np.testing.assert_array_equal(found, together)


@pytest.mark.parametrize("dense", [False, True])
def test_narrow_activations(dense: bool) -> None:
    shape, weights, xs, cos, sin, _ = case(TINY.lanes, MXFP4, dense, Format.MXFP8_E4M3)
    found, ids = run(TINY, shape, weights, xs, cos, sin, [12])
    cache = MlaCache.empty(shape.attention)
    # The worst case of a whole layer says little at this precision, but it holds.
    within(found, *mla_layer_bound(shape, weights, cache, xs, cos, sin, ids), 4)


def test_tokens_that_are_only_attended_to() -> None:
    shape, weights, xs, cos, sin, _ = case(SMALL.lanes)
    _, ids = run(SMALL, shape, weights, xs, cos, sin, [12])
    cache = MlaCache.empty(shape.attention)
    whole = mla_layer_bound(shape, weights, cache, xs, cos, sin, ids)
    last = mla_layer_bound(shape, weights, cache, xs, cos, sin, ids[9:], 9)
    np.testing.assert_array_equal(last[0], whole[0][9:])
    np.testing.assert_array_equal(last[1], whole[1][9:])
    with pytest.raises(ValueError, match="first must be 0 to 11, not 12"):
        mla_layer_bound(shape, weights, cache, xs, cos, sin, ids, 12)
    with pytest.raises(ValueError, match="gate and ids must be given"):
        mla_layer_bound(shape, weights, cache, xs, cos, sin)
    with pytest.raises(ValueError, match="gate must be given"):
        run(SMALL, replace(shape, gate=None), weights, xs, cos, sin, [12])


@pytest.mark.parametrize("dense", [False, True])
def test_halves_of_the_layer(dense: bool) -> None:
    """Each is within a bound of its own; that of the second starts from the kernel's stream."""
    shape, weights, xs, cos, sin, _ = case(TINY.lanes, MXFP4, dense, Format.MXFP8_E4M3)
    trace, cache = Trace(), MlaCache.empty(shape.attention)
    out = mla_layer(TINY, trace, shape, weights, cache, xs, cos, sin)
    middle = trace.buffers["middle"].values
    ids = None if dense else trace.buffers["gate.ids"].codes.astype(np.int64)
    empty = MlaCache.empty(shape.attention)
    within(middle, *middle_bound(shape, weights, empty, xs, cos, sin), 0.15)
    within(out, *mlp_bound(shape, weights, middle, ids), 0.8)
    with pytest.raises(ValueError, match="ids must be of 12 tokens, not 2"):
        mlp_bound(shape, weights, middle, np.zeros((2, 4), np.int64))


def test_faults_are_out_of_bounds() -> None:
    shape, weights, xs, cos, sin, _ = case(SMALL.lanes)
    _, ids = run(SMALL, shape, weights, xs, cos, sin, [12])
    cache = MlaCache.empty(shape.attention)
    wanted, bound = mla_layer_bound(shape, weights, cache, xs, cos, sin, ids)
    mlp = weights.mlp
    swapped = replace(weights, attention_norm=weights.mlp_norm, mlp_norm=weights.attention_norm)
    unshared = replace(weights, mlp=replace(mlp, shared=None))
    for other, given, tables_ in (
        (shape, swapped, (cos, sin)),
        (shape, unshared, (cos, sin)),
        (replace(shape, eps=1.0), weights, (cos, sin)),
        (shape, weights, (cos, -sin)),
    ):
        found, _ = run(SMALL, other, given, xs, *tables_, [12])
        assert np.any(np.abs(found - wanted) > bound)
