# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention, bit-exact: within its bound of float64, and near the vectors."""

from dataclasses import replace

import numpy as np
import pytest

from golden.bounds import attention_bound, mla_bound
from golden.bounds.affine import Affine
from golden.bounds.roundings import fixed_error
from golden.formats import Format, to_bf16_codes
from golden.fp32 import from_bits
from golden.kernels.kv import Held, kv_scale
from golden.kernels.mla import MlaCache, MlaMatrices, MlaShape, mla, rope_rows, rotate
from golden.kernels.moe import Matrix
from golden.kernels.trace import Machine, Trace
from golden.models import DEEPSEEK_R1, KIMI_K25, Rope
from golden.quantise import dequantise
from golden.reference.mla import MlaCache as ReferenceCache
from golden.reference.mla import MlaWeights, mla_attention
from golden.reference.rope import rope_interleaved, rope_tables
from tests.kernel_checks import MACHINES, SMALL, TINY, Arrays, load, near, rng_of, within

E4M3 = Format.MXFP8_E4M3


def weights_of(arrays: Arrays) -> MlaWeights:
    return MlaWeights(
        *(
            arrays[f"w_{name}_weight"]
            for name in (
                "q_a_proj",
                "q_a_layernorm",
                "q_b_proj",
                "kv_a_proj_with_mqa",
                "kv_a_layernorm",
                "kv_b_proj",
                "o_proj",
            )
        )
    )


def values_of(matrix: Matrix) -> np.ndarray:
    return dequantise(matrix.codes, matrix.scales, matrix.fmt)


def reference_weights(shape: MlaShape, weights: MlaMatrices) -> MlaWeights:
    """The quantised weights in a model's layout."""
    nope, rope = (
        values_of(part).reshape(shape.heads, -1, shape.q_lora)
        for part in (weights.q_nope, weights.q_rope)
    )
    kv_b = [
        np.concatenate([values_of(absorb).T, values_of(expand)])
        for absorb, expand in zip(weights.absorb, weights.expand, strict=True)
    ]
    return MlaWeights(
        values_of(weights.q_a),
        weights.q_a_norm,
        np.concatenate([nope, rope], axis=1).reshape(-1, shape.q_lora),
        values_of(weights.kv_a),
        weights.kv_a_norm,
        np.concatenate(kv_b),
        values_of(weights.output),
    )


def random_weights(rng: np.random.Generator, shape: MlaShape, hidden: int) -> MlaWeights:
    def matrix(out: int, contraction: int) -> np.ndarray:
        return rng.standard_normal((out, contraction)) / np.sqrt(contraction)

    return MlaWeights(
        matrix(shape.q_lora, hidden),
        1 + 0.1 * rng.standard_normal(shape.q_lora),
        2 * matrix(shape.heads * (shape.nope + shape.rope), shape.q_lora),
        matrix(shape.width, hidden),
        1 + 0.1 * rng.standard_normal(shape.kv_lora),
        matrix(shape.heads * (shape.nope + shape.v), shape.kv_lora),
        matrix(hidden, shape.heads * shape.v),
    )


def tables(rope: Rope, dim: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = rope_tables(positions, replace(rope, dim=dim).inv_freq(), rope.table_scale)
    return cos.astype(np.float32), sin.astype(np.float32)


def run(
    machine: Machine,
    shape: MlaShape,
    weights: MlaMatrices,
    cache: MlaCache,
    xs: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    steps: list[int],
) -> np.ndarray:
    """Tokens xs in runs of `steps` tokens each."""
    outputs, start = [], 0
    for step in steps:
        part = slice(start, start + step)
        outputs.append(mla(machine, Trace(), shape, weights, cache, xs[part], cos[part], sin[part]))
        start += step
    assert start == len(xs) == cache.length
    return np.concatenate(outputs)


VECTOR_CASES = [
    ("dsv3_mla_s0", DEEPSEEK_R1.rope),
    ("dsv3_mla_pos5000", DEEPSEEK_R1.rope),
    ("kimi_mla_s0", KIMI_K25.rope),
]


def vector_case(name: str, rope: Rope) -> tuple:
    arrays, meta = load(name)
    sizes = {key: meta["config"][key] for key in ("heads", "q_lora", "kv_lora", "nope", "rope")}
    shape = MlaShape(
        **sizes,
        v=meta["config"]["v"],
        scale=meta["scaling"],
        eps=meta["config"]["q_a_kv_a_norm_eps"],
        ring=32,
        chunk=8,
        block=4,
        unit=8,
    )
    cos, sin = tables(rope, shape.rope, arrays["positions"][0])
    return arrays, shape, MlaMatrices.of(weights_of(arrays), shape), arrays["x"][0], cos, sin


@pytest.mark.parametrize("name, rope", VECTOR_CASES)
def test_mla_of_the_vectors(name: str, rope: Rope) -> None:
    """Prefill, decode and a mixture within one bound; naive and absorbed references agree."""
    arrays, shape, weights, xs, cos, sin = vector_case(name, rope)
    reference, bound = mla_bound(shape, weights, MlaCache.empty(shape), xs, cos, sin)
    for absorbed in (False, True):
        wanted, _ = mla_attention(
            xs,
            reference_weights(shape, weights),
            cos,
            sin,
            np.arange(len(xs)),
            ReferenceCache.empty(shape.kv_lora, shape.rope),
            heads=shape.heads,
            scale=shape.scale,
            eps=shape.eps,
            absorbed=absorbed,
        )
        np.testing.assert_allclose(reference, wanted, rtol=1e-9, atol=1e-10)
    for machine in MACHINES:
        for steps in ([16], [1] * 16, [5, 1, 10]):
            found = run(machine, shape, weights, MlaCache.empty(shape), xs, cos, sin, steps)
            assert within(found, reference, bound, 0.15) < 40
            near(found, arrays["out"][0], 0.02)


def test_decode_and_prefill_agree_bit_for_bit() -> None:
    _, shape, weights, xs, cos, sin = vector_case(*VECTOR_CASES[0])
    found = [
        run(TINY, shape, weights, MlaCache.empty(shape), xs, cos, sin, steps)
        for steps in ([16], [1] * 16, [3, 13])
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_decode_vector() -> None:
    arrays, _ = load("dsv3_mla_decode")
    _, shape, _, _, _, _ = vector_case(*VECTOR_CASES[0])
    xs, weights = arrays["x"][0], MlaMatrices.of(weights_of(arrays), shape)
    cos, sin = tables(DEEPSEEK_R1.rope, shape.rope, np.arange(len(xs)))
    found = run(SMALL, shape, weights, MlaCache.empty(shape), xs, cos, sin, [1] * len(xs))
    near(found, arrays["out_decode"][0], 0.02)


def test_faults_are_out_of_bounds() -> None:
    _, shape, weights, xs, cos, sin = vector_case(*VECTOR_CASES[0])
    reference, bound = mla_bound(shape, weights, MlaCache.empty(shape), xs, cos, sin)
    swapped = replace(weights, absorb=weights.absorb[::-1])
    for other, matrices, tables_ in (
        (replace(shape, scale=24**-0.5), weights, (cos, sin)),  # YaRN's square left out
        (replace(shape, eps=1.0), weights, (cos, sin)),
        (shape, swapped, (cos, sin)),
        (shape, weights, (cos, -sin)),
    ):
        found = run(SMALL, other, matrices, MlaCache.empty(other), xs, *tables_, [16])
        assert np.any(np.abs(found - reference) > bound)


@pytest.mark.parametrize("fmt", [Format.MXFP8_E4M3, Format.MXFP4])
def test_mla_with_narrow_weights(fmt: Format) -> None:
    arrays, shape, _, xs, cos, sin = vector_case(*VECTOR_CASES[0])
    weights = MlaMatrices.of(weights_of(arrays), shape, fmt)
    reference, bound = mla_bound(shape, weights, MlaCache.empty(shape), xs, cos, sin)
    found = run(TINY, shape, weights, MlaCache.empty(shape), xs, cos, sin, [7, 1, 8])
    within(found, reference, bound, 0.15)


def test_mla_on_a_cache_in_e4m3() -> None:
    arrays, shape, weights, xs, cos, sin = vector_case(*VECTOR_CASES[0])
    scales = kv_scale(8.0), kv_scale(16.0)

    def cache() -> MlaCache:
        return MlaCache.empty(shape, E4M3, *scales)

    reference, bound = mla_bound(shape, weights, cache(), xs, cos, sin)
    plain, _ = mla_bound(shape, weights, MlaCache.empty(shape), xs, cos, sin)
    np.testing.assert_array_equal(reference, plain)  # rounding the cache is part of the bound
    for machine, steps in ((SMALL, [16]), (TINY, [1] * 16)):
        used = cache()
        found = run(machine, shape, weights, used, xs, cos, sin, steps)
        assert used.keys.scales is not None and used.keys.scales.tolist() == list(scales)
        within(found, reference, bound, 1.6)
        near(found, arrays["out"][0], 0.06)


@pytest.mark.parametrize("fmt", [Format.BF16, E4M3])
def test_attention_inside_mla(fmt: Format) -> None:
    """What attention leaves of the queries and the cache as they are stored, which is bounded more
    closely than the whole.
    """
    _, shape, weights, xs, cos, sin = vector_case(*VECTOR_CASES[0])
    scales = (kv_scale(8.0), kv_scale(16.0)) if fmt is E4M3 else ()
    cache = MlaCache.empty(shape, fmt, *scales)
    mla(SMALL, Trace(), shape, weights, cache, xs[:13], cos[:13], sin[:13])
    trace = Trace()
    mla(SMALL, trace, shape, weights, cache, xs[13:14], cos[13:14], sin[13:14])
    reference, bound = attention_bound(
        trace.buffers["queries"].values,
        [cache.keys],
        [cache.values(shape)],
        None,
        shape.scale,
        np.arange(shape.ring) < 14,
    )
    within(trace.buffers["mixed"].values, reference, bound, 0.03)


def test_buffers() -> None:
    _, shape, weights, xs, cos, sin = vector_case(*VECTOR_CASES[0])
    cache = MlaCache.empty(shape)
    for count, tag in ((3, "h3.b0"), (1, "g0")):
        trace = Trace()
        part = slice(cache.length, cache.length + count)
        out = mla(SMALL, trace, shape, weights, cache, xs[part], cos[part], sin[part])
        found = {name: (kept.codes.shape, kept.fmt) for name, kept in trace.buffers.items()}
        wanted = {
            "x": (count, 64),
            "q_latent": (count, 24),
            "q_nope": (count, 64),
            "key": (count, 40),
            "queries": (4 * count, 40),
            "mixed": (4 * count, 32),
            "attended": (count, 64),
        }
        for name, size in wanted.items():
            assert found[name] == (size, Format.BF16)
        for name, size in {
            "q_a": (count, 24),
            "q_norm.inverse": (1, count),
            "q_rope": (count, 32),
            "q_turned": (4 * count, 8),
            "kv_a": (count, 40),
            "kv_norm.squares": (1, count),
            "k_turned": (count, 8),
            "projected": (count, 64),
        }.items():
            assert found[name] == (size, Format.FP32)
        assert f"{tag}.c0.scores" in found and f"{tag}.c0.shrink" not in found
        np.testing.assert_array_equal(trace.buffers["projected"].values, out)


def test_impossible_caches_are_refused() -> None:
    _, shape, weights, xs, cos, sin = vector_case(*VECTOR_CASES[0])
    small = replace(shape, ring=8)
    with pytest.raises(ValueError, match="ring must hold 16"):
        mla(SMALL, Trace(), small, weights, MlaCache.empty(small), xs, cos, sin)
    with pytest.raises(ValueError, match="kv_lora must be"):
        MlaCache.empty(replace(shape, kv_lora=24), E4M3, 127, 127)


def test_rope_rows_turn_interleaved_pairs() -> None:
    rng = rng_of(1)
    x = rng.standard_normal((5, 64)).astype(np.float32)
    cos, sin = tables(KIMI_K25.rope, 64, np.array([0, 1, 100, 4097, 200000]))
    found = rotate(SMALL, Trace(), "turned", x, *rope_rows(cos, sin))
    wanted = rope_interleaved(x, cos.astype(np.float64), sin.astype(np.float64))
    assert 0 < np.abs(found - wanted).max() < 4 * 2.0**-24 * np.abs(x).max()


def test_errors_of_fixed_scales() -> None:
    rng = rng_of(2)
    x = (rng.standard_normal((300, 64)) * 2.0 ** rng.integers(-12, 3, (300, 64))).astype(np.float32)
    for scales in ([120, 122], [110, 130]):
        held = Held.of(x, E4M3, scales)
        error = np.abs(held.values - x)
        limit = fixed_error(Affine.exact(x), E4M3, np.uint8(scales))
        assert np.all(error <= limit) and np.all(error[limit == 0] == 0)
        assert (error / np.maximum(limit, 1e-300)).max() > 0.99
    with pytest.raises(ValueError, match="fmt must be"):
        fixed_error(Affine.exact(x), Format.BF16, np.uint8([127, 127]))


@pytest.mark.slow
@pytest.mark.parametrize("model", [DEEPSEEK_R1, KIMI_K25], ids=lambda m: m.name)
def test_mla_of_the_full_size(model) -> None:
    """Two heads of the real sizes on the full-size array, against float64 on the same weights."""
    rng = rng_of(3)
    shape = MlaShape.of(model.attention, 192, heads=2)
    machine = Machine(rows=32, lanes=64)
    weights = MlaMatrices.of(random_weights(rng, shape, 512), shape)
    xs = rng.standard_normal((140, 512)).astype(np.float32)
    cos, sin = tables(model.rope, shape.rope, np.arange(140))
    found = run(machine, shape, weights, MlaCache.empty(shape), xs, cos, sin, [128] + [1] * 12)
    wanted, _ = mla_attention(
        from_bits(to_bf16_codes(xs).astype(np.uint32) << 16),
        reference_weights(shape, weights),
        cos,
        sin,
        np.arange(140),
        ReferenceCache.empty(shape.kv_lora, shape.rope),
        heads=2,
        scale=shape.scale,
        eps=shape.eps,
    )
    near(found, wanted, 0.02)
