# SPDX-License-Identifier: Apache-2.0
"""The error analysis itself: each step against the arithmetic, at random and at its worst."""

from dataclasses import replace

import numpy as np
import pytest

from golden import functions
from golden.bounds import NoBound, attention_bound, layer_bound, moe_bound
from golden.bounds.affine import Affine, Noise, growth
from golden.bounds.layer import norm, rotate
from golden.bounds.moe import swish
from golden.bounds.roundings import BF16_LIMIT, array_error, mx_error, stored
from golden.bounds.softmax import shares_of, softmax
from golden.formats import ARRAY_FORMATS, MX_FORMATS, Format, bf16_to_float32, to_bf16_codes
from golden.kernels.layer import norm as kernel_norm
from golden.kernels.layer import rope_rows
from golden.kernels.moe import Expert, Matrix, gate
from golden.kernels.trace import Machine, Trace
from golden.matmul import matmul, matmul_reference
from golden.models import GateSpec
from golden.quantise import dequantise, quantise
from golden.vector import rotate as kernel_rotate
from golden.vector import rounded
from sim.kernels.vectors import gptoss_layer0

MACHINES = [Machine(8, 16), Machine(2, 4), Machine(1, 1)]


def rng_of(seed: int) -> np.random.Generator:
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def random_form(
    rng: np.random.Generator, shape: tuple[int, ...], symbols: int, size: float = 0.1
) -> Affine:
    terms = size / max(symbols, 1) * rng.standard_normal((symbols, *shape))
    return Affine(rng.standard_normal(shape), terms, 0.1 * size * rng.random(shape))


def outcomes(rng: np.random.Generator, form: Affine, noise: np.ndarray) -> np.ndarray:
    """One possible computed value for symbols `noise`, its unknown part at an end."""
    ends = rng.choice([-1.0, 1.0], form.value.shape)
    return form.value + np.tensordot(noise[: len(form.terms)], form.terms, 1) + ends * form.rest


def unexplained(form: Affine, noise: np.ndarray, found: np.ndarray) -> np.ndarray:
    """How much of `rest` explains `found` with the same symbols: at most 1 for a right form."""
    distance = np.abs(found - form.value - np.tensordot(noise[: len(form.terms)], form.terms, 1))
    return distance / (form.rest + 1e-12)


def test_operations_hold_for_every_value_of_the_symbols() -> None:
    rng = rng_of(1)
    weights = rng.standard_normal((5, 6))
    largest = 0.0
    for _ in range(300):
        a, b = random_form(rng, (6,), 4), random_form(rng, (6,), 7)
        noise = rng.choice([-1.0, 1.0, rng.uniform(-1, 1)], 7)
        x, y = outcomes(rng, a, noise), outcomes(rng, b, noise)
        for form, found in (
            (a + b, x + y),
            (a.times(b.value), x * b.value),
            (a.product(b), x * y),
            (a.matrix(weights), weights @ x),
            (a.clamped(-0.5, 0.7), np.clip(x, -0.5, 0.7)),
            (a[1:4], x[1:4]),
            (a.reshape(2, 3), x.reshape(2, 3)),
            (a.function(np.sin(a.value), np.cos(a.value), np.ones(6)), np.sin(x)),
        ):
            excess = unexplained(form, noise, found)
            assert np.all(excess <= 1 + 1e-9)
            assert np.all(np.abs(found - form.value) <= form.bound)
            largest = max(largest, float(excess.max()))
    assert largest > 0.99  # the ends are reached


def test_shared_symbols_cancel() -> None:
    a = Affine(np.ones(2), np.full((1, 2), 0.25), np.zeros(2))
    np.testing.assert_array_equal(a.matrix(np.array([[1.0, -1.0]])).radius, a.radius[:1] * 2.0**-50)
    np.testing.assert_array_equal((a + a.times(-1.0)).radius, 0.0)


def test_symbols_run_out_without_losing_error() -> None:
    short, long = Noise(most=3), Noise()
    a = Affine.exact(np.ones((2, 2)))
    b, c = a.stored(short, 0.5), a.stored(long, 0.5)
    assert len(b.terms) == 0 and len(c.terms) == 4
    np.testing.assert_array_equal(b.radius, c.radius)
    assert short.take(3) == 0 and short.take(1) is None and long.take(1) == 4


def test_growth_counts_roundings() -> None:
    assert growth(1) == pytest.approx(2.0**-24) and growth(1000) >= 1000 * 2.0**-24
    x = np.float32(1)
    for _ in range(1000):
        x = x * np.float32(1 + 2.0**-23)  # any FP32 product
    assert abs(float(x) / (1 + 2.0**-23) ** 1000 - 1) <= growth(1000)


@pytest.mark.parametrize("fmt", [Format.BF16, *MX_FORMATS])
def test_stores_are_within_their_error(fmt: Format) -> None:
    rng = rng_of(2)
    sizes = 2.0 ** rng.integers(-140, 100, (400, 1))
    x = (rng.standard_normal((400, 70)) * sizes).astype(np.float32)
    x[:20] *= 2.0 ** rng.integers(-9, 1, (20, 70))
    x[20:24] = 0.0
    ends = np.float32([1.0, 1.5, 1.75, 1.875, 1.99, 2.0 - 2.0**-23])
    x[24:60] = rng.choice(ends, (36, 70)) * 2.0 ** rng.integers(-3, 3, (36, 70))
    form = stored(Affine.exact(x), Noise(), fmt)
    error = np.abs(rounded(x, fmt) - x.astype(np.float64))
    assert np.all(error <= form.radius)
    np.testing.assert_array_equal(form.radius[20:24], 0.0)
    normal = error[form.radius > 1e-30] / form.radius[form.radius > 1e-30]
    assert normal.max() > 0.99 and normal.mean() > 0.2

    # The same with the value known only roughly: the store takes the scale and the binade of what
    # is computed.
    wide = Affine(
        x.astype(np.float64), np.zeros((0, *x.shape)), 0.05 * np.abs(x.astype(np.float64))
    )
    error_of = stored(wide, Noise(), fmt).radius
    for _ in range(5):
        near = (wide.value + rng.uniform(-1, 1, x.shape) * wide.rest).astype(np.float32)
        assert np.all(
            np.abs(rounded(near, fmt) - wide.value) <= error_of + np.abs(x) * 2.0**-22 + 2.0**-149
        )


def test_e4m3_saturates_by_two_steps() -> None:
    x = np.full((1, 32), 511.0, np.float32)
    assert mx_error(Affine.exact(x), Format.MXFP8_E4M3)[0, 0] == 63.0  # half a step is 16
    assert np.all(rounded(x, Format.MXFP8_E4M3) == 448.0)


def test_overflow_has_no_bound() -> None:
    stored(Affine.exact(np.full(3, BF16_LIMIT * (1 - 2.0**-20))), Noise())
    with pytest.raises(ValueError, match="x must stay below"):
        stored(Affine.exact(np.full(3, BF16_LIMIT)), Noise())


@pytest.mark.parametrize("weight_fmt", ARRAY_FORMATS)
def test_array_is_within_its_error_whatever_its_rows(weight_fmt: Format) -> None:
    rng = rng_of(3)
    for act_fmt in (Format.BF16, Format.MXFP8_E4M3, Format.MXFP8_E5M2):
        act = (rng.standard_normal((3, 200)) * 2.0 ** rng.integers(-18, 18, (3, 200))).astype(
            np.float32
        )
        weight = (rng.standard_normal((7, 200)) * 2.0 ** rng.integers(-12, 12, (7, 200))).astype(
            np.float32
        )
        bias = rng.standard_normal(7).astype(np.float32)
        operands = (*quantise(act, act_fmt), act_fmt, *quantise(weight, weight_fmt), weight_fmt)
        wanted = matmul_reference(*operands, bias)
        values = [np.abs(dequantise(*operands[i : i + 3])) for i in (0, 3)]
        bound = array_error(act_fmt, weight_fmt, *values, np.abs(bias))
        for rows in (1, 2, 7, 100):
            error = np.abs(matmul(*operands, rows, bias) - wanted)
            assert error.max() > 0 and np.all(error <= bound)


def test_softmax_of_uncertain_scores() -> None:
    rng = rng_of(4)
    tightest = np.inf
    for _ in range(300):
        scores = random_form(rng, (9,), 5, size=rng.choice([0.01, 0.3, 1.0]))
        scores = replace(scores, value=scores.value * rng.choice([0.1, 1.0, 20.0]))
        known = softmax(scores, 0)
        assert known.weights.sum() == pytest.approx(1.0)
        noise = rng.choice([-1.0, 1.0], 5)
        found = np.exp(outcomes(rng, scores, noise) - scores.value.max())
        shares = shares_of(scores)
        error = np.abs(found / found.sum() - shares.value)
        assert np.all(error <= shares.bound)
        tightest = min(tightest, float((shares.radius / np.maximum(error, 1e-300)).min()))
    assert tightest < 2


def test_scores_that_move_together_leave_the_shares() -> None:
    scores = Affine(np.array([0.0, 1.0, 3.0]), np.full((1, 3), 0.5), np.zeros(3))
    assert shares_of(scores).radius.max() < 2e-6


def test_far_scores_have_a_bound() -> None:
    scores = Affine(np.array([0.0, -1e9, 1e9]), np.zeros((0, 3)), np.full(3, 4.0))
    assert np.all(np.isfinite(shares_of(scores).radius))


def test_shares_of_the_kernel() -> None:
    rng = rng_of(5)
    for machine in MACHINES:
        for spread in (0.1, 1.0, 30.0):
            logits = (spread * rng.standard_normal(32)).astype(np.float32)
            ids, shares = gate(machine, Trace(), "gate", logits, 4)
            form = shares_of(Affine.exact(logits[ids]))
            assert np.all(np.abs(shares - form.value) <= form.bound)
            assert form.radius.max() < 1e-5


def test_norm_and_rotation_of_the_kernel() -> None:
    rng = rng_of(6)
    for machine in MACHINES:
        for size in (1e-4, 1.0, 100.0):
            x = (size * rng.standard_normal((1, 70))).astype(np.float32)
            weight = rng.standard_normal(70).astype(np.float32)
            found = kernel_norm(machine, Trace(), "norm", x, weight, 1e-5)[0]
            form = norm(Affine.exact(x[0]), weight, 1e-5)
            wanted = x[0] / np.sqrt(np.mean(x[0].astype(np.float64) ** 2) + 1e-5) * weight
            np.testing.assert_allclose(form.value, wanted, rtol=1e-12)
            error = np.abs(found - form.value)
            assert np.all(error <= form.bound) and form.radius.max() < 2e-5 * np.abs(wanted).max()

        x = rng.standard_normal((3, 16)).astype(np.float32)
        angle = rng.uniform(0, 7, 8)
        cosine, sine = rope_rows(np.cos(angle), np.sin(angle))
        rotated = rotate(Affine.exact(x), cosine.astype(np.float64), sine.astype(np.float64))
        error = np.abs(kernel_rotate(x, cosine, sine, 4, lanes=machine.lanes) - rotated.value)
        assert np.all(error <= rotated.bound) and rotated.radius.max() < 1e-6


def test_norm_of_an_uncertain_row() -> None:
    rng = rng_of(7)
    for size in (0.0, 1e-3, 1.0):
        form = random_form(rng, (40,), 6)
        form = replace(form, value=size * form.value)
        out = norm(form, np.ones(40, np.float32), 1e-5)
        for _ in range(20):
            x = outcomes(rng, form, rng.choice([-1.0, 1.0], 6))
            assert np.all(np.abs(x / np.sqrt(np.mean(x * x) + 1e-5) - out.value) <= out.bound)
    with pytest.raises(ValueError, match="eps must be above 0"):
        norm(Affine.exact(np.zeros(4)), np.ones(4, np.float32), 0.0)


def test_swish_of_uncertain_gates() -> None:
    gates = np.concatenate([np.linspace(-12, 7, 400), [0.0, -300.0, 1e-40, -1e3]])
    for size in (0.0, 1e-6, 0.1, 2.0):
        form = Affine(gates, np.zeros((0, len(gates))), np.full(len(gates), size))
        out = swish(form)
        for end in (-1.0, -0.5, 0.0, 0.5, 1.0):
            x = (gates + end * size).astype(np.float32)
            found = x * functions.sigmoid(x * np.float32(1.702))
            slack = 2.0**-24 * np.abs(gates)  # x itself was rounded
            assert np.all(np.abs(found - out.value) <= out.bound + 1.2 * slack)
        assert np.all(
            out.radius <= 1.2 * size + 0.45 * size**2 + 2e-6 * (np.abs(gates) + size) + 1e-12
        )


def small_moe(rng: np.random.Generator, fmt: Format) -> tuple[np.ndarray, Matrix, list[Expert]]:
    router = Matrix.of(rng.standard_normal((4, 16)), Format.BF16)
    experts = [
        Expert.of(
            rng.standard_normal((16, 16)),
            rng.standard_normal(16),
            rng.standard_normal((16, 8)),
            rng.standard_normal(16),
            fmt,
            4,
        )
        for _ in range(4)
    ]
    return rng.standard_normal((2, 16)).astype(np.float32), router, experts


def test_choices_are_checked() -> None:
    x, router, experts = small_moe(rng_of(9), Format.BF16)
    logits = x.astype(np.float64) @ bf16_to_float32(router.codes).T
    order = np.argsort(-logits, axis=1)
    two = GateSpec(4, 2, "softmax")
    moe_bound(x, router, experts, two, order[:, :2])
    moe_bound(x, router, experts, two, order[:, 1::-1])
    moe_bound(x, router, experts, replace(two, top_k=4), order)
    with pytest.raises(ValueError, match="ids must be the best"):
        moe_bound(x, router, experts, two, order[:, 1:3])
    with pytest.raises(ValueError, match="ids must differ"):
        moe_bound(x, router, experts, two, order[:, [0, 0]])
    with pytest.raises(ValueError, match="ids must be"):
        moe_bound(x, router, experts, two, order)
    # Two equal router rows: either choice is legitimate.
    twin = replace(router, codes=np.repeat(router.codes[:1], 4, axis=0))
    for ids in ([0, 1], [3, 2]):
        moe_bound(x, twin, experts, two, np.array([ids] * 2))


def test_impossible_arguments_are_refused() -> None:
    kv = np.zeros((3, 1, 8), np.uint16)
    queries, sinks = np.zeros((2, 8), np.float32), np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="valid must be"):
        attention_bound(queries, kv, kv, sinks, 1.0, np.ones(4, bool))
    for part in attention_bound(queries, kv, kv, sinks, 1.0, np.zeros(3, bool)):
        np.testing.assert_array_equal(part, np.zeros((2, 8)))
    shape, weights, xs, cos, sin = gptoss_layer0(4, Format.BF16)
    with pytest.raises(ValueError, match="equal length"):
        layer_bound(shape, weights, xs, cos, sin, np.zeros((3, 2), np.int64))


def test_slots_that_do_not_count_may_hold_anything() -> None:
    rng = rng_of(10)
    queries, sinks = rng.standard_normal((2, 8)).astype(np.float32), np.zeros(2, np.float32)
    kv = to_bf16_codes(rng.standard_normal((2, 5, 1, 8)).astype(np.float32))
    valid = np.array([True, False, True, True, True])
    reference, bound = attention_bound(queries, kv[0], kv[1], sinks, 0.3, valid)
    kv[:, 1] = 0x7FC0
    again = attention_bound(queries, kv[0], kv[1], sinks, 0.3, valid)
    np.testing.assert_array_equal(again, (reference, bound))
    assert bound.shape == reference.shape == (2, 8) and bound.max() < 0.1


def test_scores_that_are_far_off_have_no_bound():
    with pytest.raises(NoBound, match="not 60 off"):
        softmax(Affine.exact(np.zeros(3)).widened(np.full(3, 60.0)), 5)
