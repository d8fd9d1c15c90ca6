# SPDX-License-Identifier: Apache-2.0
"""Errors of softmax: of expert shares, and of attention over cached keys and values.

A sink is one more score, rounded once to the unit of the array's scores, whose value is 0. With
reference probabilities w_t and scores that are off by d_t the kernel computes w_t e^d_t, all times
one unknown factor that the division takes out: the running maximum, whatever it is. The analysis
chooses that factor such that the d_t have mean 0 under w (their symbols, that is). Then

    e^d is 1 + d and a remainder of at most e^|d| - 1 - |d|,
    the sum D of the w_t e^d_t is 1 and remainders only,
    sum of w_t e^d_t v_t over D is o + (sum of w_t (e^d_t - 1) (v_t - o)) / D with o the reference
    output,

so that what all scores share cancels, and so do errors of scores whose values are near the output.

FP32's part: exp2 is 1 ulp; its argument's roundings (subtraction, product, the constant: log2(e),
in attention times the scale) are 3 units of the distance to the maximum, and over chunks these
distances add up to that to the final one. Terms that underflow are off by less than 2^-120 of the
largest term, which is 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from golden.bounds.affine import FP32_TINY, FP32_UNIT, Affine, Array, NoBound, Noise, growth
from golden.bounds.roundings import BF16_UNIT, array_error
from golden.formats import Format

UNDERFLOW = 2.0**-120
FAR = 1000.0
ARGUMENT_UNITS = 3


@dataclass(frozen=True)
class Softmax:
    """Reference `weights` [T], and what is known of the computed ones before the division.

    Computed: weights * (1 + f) with f a form of value 0, `factors`, then off by `single` [T] more
    for FP32, separately where they are used and where they are summed. The inverse of the sum is 1
    up to `off`.
    """

    weights: Array
    factors: Affine
    single: Array
    off: float


def softmax(scores: Affine, units: int) -> Softmax:
    """Softmax of scores [T], sink included.

    `units` are the FP32 roundings of a term until it is summed up.
    """
    largest = scores.value.max()
    powers = np.exp(scores.value - largest)
    weights = powers / powers.sum()
    most = scores.radius.max()

    terms = scores.terms - (scores.terms @ weights)[:, None]
    linear = np.abs(terms).sum(axis=0) + scores.rest
    remainder = np.expm1(linear) - linear
    factors = Affine(np.zeros(len(weights)), terms, scores.rest + remainder)

    # Terms beyond FAR are nothing on either side.
    reach = np.minimum(largest - scores.value + scores.radius + most, FAR)
    relative = np.expm1(ARGUMENT_UNITS * FP32_UNIT * reach) * (1 + growth(units)) + growth(units)
    single = weights * np.exp(linear) * relative + UNDERFLOW * np.exp(2 * most)

    distance = float(weights @ factors.rest + single.sum())
    # The sum is no smaller than its smallest part either, which serves when the distance does not.
    least = max(1 - distance, float(np.exp(-linear.max()) - single.sum()))
    if least <= 0:
        raise NoBound(f"scores must be near enough for a bound, not {most:.3g} off")
    return Softmax(weights, factors, single, distance / least)


def shares_of(logits: Affine) -> Affine:
    """Shares [k] of the chosen experts' logits [k]: softmax over them alone, in FP32."""
    known = softmax(logits, 2 + len(logits.value))
    error = known.factors.times(known.weights).widened(known.single)
    rest = error.rest + (known.weights + error.radius) * known.off
    # Reciprocal and product.
    return Affine(known.weights, error.terms, rest).rounded(3)


class Cached:
    """Keys or values [T, D] of one KV head, token by token, with symbols of each token's own."""

    def __init__(self, tokens: Sequence[Affine]):
        self.values = np.stack([token.value for token in tokens])
        self.rests = np.stack([token.rest for token in tokens])
        self.radii = np.stack([token.radius for token in tokens])
        self.terms = [token.terms for token in tokens]

    def forget(self, token: int) -> None:
        """Makes a token's symbols part of its rest."""
        self.rests[token] = self.radii[token]
        self.terms[token] = self.terms[token][:0]


class CachedTokens:
    """Keys and values of one KV head as `Cached`, their symbols placed among those of the token
    that attends.

    A token's key and value share symbols; `starts` are where they begin. The same places serve all
    heads of the group. `fmt` is the format that both are stored in.
    """

    def __init__(
        self,
        keys: Sequence[Affine],
        values: Sequence[Affine],
        noise: Noise,
        fmt: Format = Format.BF16,
    ):
        self.fmt = fmt
        self.keys, self.values = Cached(keys), Cached(values)
        self.starts: list[int] = []
        for token, terms in enumerate(zip(self.keys.terms, self.values.terms, strict=True)):
            first = noise.take(max(map(len, terms)))
            if first is None:
                self.keys.forget(token)
                self.values.forget(token)
            self.starts.append(first or 0)


def scores_of(query: Affine, cache: CachedTokens, noise: Noise) -> Affine:
    """Scores [T] of a stored query [D] on cached keys."""
    keys = cache.keys
    terms = np.zeros((noise.count, len(keys.values)))
    terms[: len(query.terms)] = query.terms @ keys.values.T
    for token, (start, own) in enumerate(zip(cache.starts, keys.terms, strict=True)):
        if len(own):
            terms[start : start + len(own), token] += own @ query.value
    sizes = np.abs(keys.values)
    rest = sizes @ query.rest + keys.rests @ np.abs(query.value) + keys.radii @ query.radius
    error = array_error(Format.BF16, cache.fmt, query.magnitude[None], sizes + keys.radii)[0]
    return Affine(keys.values @ query.value, terms, rest + error)


def with_sink(scores: Affine, sink: float) -> Affine:
    """Scores [T] and the sink logit, which is stored rounded, as the last one [T + 1]; unchanged
    for -inf.
    """
    if np.isneginf(sink):
        return scores
    return Affine(
        np.append(scores.value, sink),
        np.pad(scores.terms, ((0, 0), (0, 1))),
        np.append(scores.rest, float(growth(1)) * abs(sink)),
    )


def mixed(scores: Affine, sink: float, cache: CachedTokens, slots: int, noise: Noise) -> Affine:
    """Attention's output [D] before it is stored: softmax of scores [T] and a sink, times cached
    values.

    `slots` of the ring are walked, in chunks of whatever size c. A product goes through at most 2 +
    4 ceil(c / 8) roundings in the array and 4 units (shrink is exp2 and a product, then an
    addition) in each of ceil(slots / c) chunks: most for c = 1. A term of the sum goes through c
    additions and 4 units per chunk, which is no more. The array flushes products that are less than
    2^-29 of the largest (E4M3 values: three of at most 2^-27 per slice). P is rounded to BF16 for
    the product alone.
    """
    units = 2 + 6 + 4 * slots + 4
    known = softmax(with_sink(scores, sink), units)
    tokens, weights = len(scores.value), known.weights
    # The sink's value is 0.
    values, rests, radii = (
        np.pad(part, ((0, len(weights) - tokens), (0, 0)))
        for part in (cache.values.values, cache.values.rests, cache.values.radii)
    )
    out = weights @ values
    gaps = values - out

    first = noise.take(tokens)
    terms = np.zeros((noise.count, len(out)))
    terms[: len(known.factors.terms)] = (known.factors.terms * weights) @ gaps
    for start, weight, own in zip(cache.starts, weights[:tokens], cache.values.terms, strict=True):
        if len(own):
            terms[start : start + len(own)] += weight * own
    changed = weights * known.factors.radius + known.single
    rest = (weights * known.factors.rest) @ np.abs(gaps) + weights @ rests + changed @ radii
    rest += known.single @ (np.abs(values) + np.abs(out))
    rest += BF16_UNIT * (changed @ np.abs(values) + (weights + changed) @ radii)
    rounding = BF16_UNIT * weights[:tokens, None] * values[:tokens]
    if first is None:
        rest += np.abs(rounding).sum(axis=0)
    else:
        terms[first : first + tokens] = rounding
    error = Affine(out, terms, rest + units * FP32_TINY)
    # Reciprocal and product.
    return error.widened(error.radius * known.off).rounded(3)
