# SPDX-License-Identifier: Apache-2.0
"""Values with their errors as affine forms: worst cases that remember where an error came from.

An affine form holds a float64 `value` (what is meant) and says of the computed one

    computed = value + sum over k of terms[k] * noise[k] + r,   |noise[k]| <= 1,  |r| <= rest.

Every noise symbol is one rounding (or a handful of them at one place). A matrix acts on `terms`
with its signs, so that errors that came from one rounding may cancel; intervals, which `rest` alone
would be, lose that and grow several times per matrix. Nothing here is probabilistic: all symbols
may be at their worst at once.

All arithmetic is float64. Matrix products account for its roundings; `Affine.bound` covers those of
single operations, some 2^-50 of a value each.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

FP32_UNIT = 2.0**-24  #: relative error of one FP32 rounding
FP32_TINY = 2.0**-149  #: absolute error of an FP32 rounding or function whose result is subnormal
MOST_SYMBOLS = 1 << 14  #: beyond these, errors become part of `rest`: looser, never wrong
FLOAT64_ULP = 2.0**-52  #: relative error of an addition and a product in this analysis
SLACK = 2.0**-40  #: relative error of the analysis itself


class NoBound(ValueError):
    """The worst cases of these data leave no finite bound."""


def growth(units: int | Array) -> Array:
    """Relative error of `units` FP32 roundings in a row; a function of 1 ulp counts as two."""
    return np.expm1(np.asarray(units, np.float64) * np.log1p(FP32_UNIT))


@dataclass
class Noise:
    """Hands out noise symbols, which are numbered from 0; gives none once `most` are out."""

    most: int = MOST_SYMBOLS
    count: int = field(default=0, init=False)

    def take(self, size: int) -> int | None:
        """The first of `size` new symbols; None if there are no more."""
        if self.count + size > self.most:
            return None
        first = self.count
        self.count += size
        return first


@dataclass(frozen=True)
class Affine:
    """`value` [...], `terms` [symbols, ...] and `rest` [...]; see the module.

    Symbols beyond `terms` do not occur.
    """

    value: Array
    terms: Array
    rest: Array

    @classmethod
    def exact(cls, value: ArrayLike) -> "Affine":
        """A value without error."""
        held = np.asarray(value, np.float64)
        return cls(held, np.zeros((0, *held.shape)), np.zeros(held.shape))

    @property
    def radius(self) -> Array:
        """[...]: the largest possible error."""
        return np.abs(self.terms).sum(axis=0) + self.rest

    @property
    def magnitude(self) -> Array:
        """[...]: the largest possible computed magnitude."""
        return np.abs(self.value) + self.radius

    @property
    def bound(self) -> Array:
        """[...]: `radius`, and room for the float64 roundings of value and radius themselves."""
        return self.radius * (1 + SLACK) + np.abs(self.value).max(initial=0.0) * SLACK

    def __getitem__(self, index: object) -> "Affine":
        """The form of value[index]; an index tuple of arrays, slices and integers."""
        where = index if isinstance(index, tuple) else (index,)
        return Affine(self.value[where], self.terms[(slice(None), *where)], self.rest[where])

    def reshape(self, *shape: int) -> "Affine":
        """The same elements in another shape."""
        value = self.value.reshape(shape)
        return Affine(
            value, self.terms.reshape(len(self.terms), *value.shape), self.rest.reshape(shape)
        )

    def __add__(self, other: "Affine") -> "Affine":
        """Exact sum; shapes broadcast."""
        value = self.value + other.value
        terms = np.zeros((max(len(self.terms), len(other.terms)), *value.shape))
        for part in (self, other):
            terms[: len(part.terms)] += part.wide_terms(value.ndim)
        return Affine(value, terms, self.rest + other.rest)

    def wide_terms(self, ndim: int) -> Array:
        """`terms` with axes of 1 inserted, so that they broadcast like a value of `ndim` axes."""
        missing = ndim - self.value.ndim
        return self.terms.reshape(len(self.terms), *(1,) * missing, *self.value.shape)

    def times(self, factor: ArrayLike) -> "Affine":
        """Exact product with constants; they broadcast."""
        held = np.asarray(factor, np.float64)
        value = self.value * held
        return Affine(value, self.wide_terms(value.ndim) * held, self.rest * np.abs(held))

    def product(self, other: "Affine") -> "Affine":
        """Exact product; shapes broadcast. The product of the two errors becomes part of `rest`."""
        first, second = self.times(other.value), other.times(self.value)
        both = Affine(first.value, second.terms, second.rest)
        zero = Affine(np.zeros(first.value.shape), first.terms, first.rest)
        total = zero + both
        return total.widened(self.radius * other.radius)

    def matrix(self, weights: Array) -> "Affine":
        """Exact products of the last axis with weights [N, K]."""
        inexact = np.abs(self.terms).sum(axis=0) * (weights.shape[1] * FLOAT64_ULP)
        rest = (self.rest + inexact) @ np.abs(weights).T
        return Affine(self.value @ weights.T, self.terms @ weights.T, rest)

    def widened(self, error: Array | float) -> "Affine":
        """With `error` more that nothing is known of."""
        return Affine(self.value, self.terms, self.rest + error)

    def rounded(self, units: int = 1) -> "Affine":
        """After `units` FP32 roundings, each of a result of at most this magnitude."""
        return self.widened(growth(units) * self.magnitude + units * FP32_TINY)

    def stored(self, noise: Noise, error: Array | float) -> "Affine":
        """With `error` [...] more; it and `rest` together become new symbols, one per element."""
        size = self.value.size
        first = noise.take(size)
        if first is None:
            return self.widened(error)
        terms = np.zeros((first + size, size))
        terms[: len(self.terms)] = self.terms.reshape(len(self.terms), size)
        terms[first + np.arange(size), np.arange(size)] = (self.rest + error).reshape(size)
        shape = self.value.shape
        return Affine(self.value, terms.reshape(-1, *shape), np.zeros(shape))

    def function(self, value: Array, slope: Array, curvature: Array) -> "Affine":
        """f of every element (Taylor): f and f' at `value`, the largest |f''| within reach."""
        return Affine(
            value, self.terms * slope, self.rest * np.abs(slope) + curvature * self.radius**2 / 2
        )

    def clamped(self, low: float, high: float) -> "Affine":
        """min and max with constants.

        An error stays, vanishes or, where a limit is within reach, is of any sign.
        """
        radius = self.radius
        inside = (self.value - radius >= low) & (self.value + radius <= high)
        outside = (self.value + radius <= low) | (self.value - radius >= high)
        rest = np.where(inside, self.rest, np.where(outside, 0.0, radius))
        return Affine(np.clip(self.value, low, high), self.terms * inside, rest)
