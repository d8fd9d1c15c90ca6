# SPDX-License-Identifier: Apache-2.0
"""Coefficients of the lane functions: one quadratic per interval, as integers.

An interval's polynomial is c0 + c1 t + c2 t^2 for t in [0, 1) across the interval, the coefficients
in units of 2^-FRACTION_BITS. It interpolates the function at the roots of the cubic Chebyshev
polynomial, which is close to the smallest error possible; in the first interval the leftmost root
is moved to t = 0, so that 1 / 1, 1 / sqrt(1) and 2^0 are met exactly. All is computed in decimal
arithmetic of 50 digits: the tables are the same on every machine.

The error of such a quadratic has the sign of f''' at the left end of an interval and the other one
at its right end, so for all three functions (f''' > 0 and rising, f''' < 0 and falling) the steps
between intervals go the way the function goes: monotonicity survives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import cache

FRACTION_BITS = 34  #: fraction bits of a coefficient and of a polynomial's value
INDEX_BITS = 8  #: every table has 2^INDEX_BITS intervals
EXP2_OFFSET_BITS = 20  #: bits of t in the exp2 polynomial
INVERSE_OFFSET_BITS = 22  #: bits of t in the reciprocal and reciprocal square root polynomials

C0_BITS = FRACTION_BITS + 1
C1_BITS = 27
C2_BITS = 19


@dataclass(frozen=True)
class Table:
    """Coefficients of one function, each a tuple of 2^INDEX_BITS non-negative integers.

    `c1` is a magnitude; the term is subtracted for the falling functions (all but exp2).
    """

    c0: tuple[int, ...]
    c1: tuple[int, ...]
    c2: tuple[int, ...]


def _fit(
    f: Callable[[Decimal], Decimal], lower: Decimal, width: Decimal, exact: bool
) -> tuple[int, int, int]:
    """Coefficients for f over [lower, lower + width); `exact` puts a node at `lower`."""
    root = Decimal(3).sqrt() / 2
    if exact:
        nodes = [Decimal(0), root / (1 + root), 2 * root / (1 + root)]
    else:
        nodes = [(1 - root) / 2, Decimal(1) / 2, (1 + root) / 2]
    y = [f(lower + width * t) for t in nodes]
    first = (y[1] - y[0]) / (nodes[1] - nodes[0])
    second = ((y[2] - y[1]) / (nodes[2] - nodes[1]) - first) / (nodes[2] - nodes[0])
    real = (
        y[0] - first * nodes[0] + second * nodes[0] * nodes[1],
        first - second * (nodes[0] + nodes[1]),
        second,
    )
    unit = Decimal(2) ** FRACTION_BITS
    c0, c1, c2 = (int((c * unit).to_integral_value(ROUND_HALF_EVEN)) for c in real)
    return c0, c1, c2


def _table(pieces: list[tuple[Callable[[Decimal], Decimal], Decimal, Decimal]]) -> Table:
    with localcontext(Context(prec=50)):
        rows = [_fit(f, lower, width, index == 0) for index, (f, lower, width) in enumerate(pieces)]
    table = Table(*(tuple(abs(row[k]) for row in rows) for k in range(3)))
    for values, bits in zip(
        (table.c0, table.c1, table.c2), (C0_BITS, C1_BITS, C2_BITS), strict=True
    ):
        assert max(values) < 1 << bits
    return table


@cache
def exp2_table() -> Table:
    """2^x for x in [0, 1): 256 intervals."""
    size = 1 << INDEX_BITS
    width = Decimal(1) / size
    return _table([(lambda x: Decimal(2) ** x, i * width, width) for i in range(size)])


@cache
def reciprocal_table() -> Table:
    """1 / m for m in [1, 2): 256 intervals."""
    size = 1 << INDEX_BITS
    width = Decimal(1) / size
    return _table([(lambda m: 1 / m, 1 + i * width, width) for i in range(size)])


@cache
def rsqrt_table() -> Table:
    """1 / sqrt(m), then 1 / sqrt(2 m), for m in [1, 2): 128 intervals each."""
    size = 1 << (INDEX_BITS - 1)
    width = Decimal(1) / size
    return _table(
        [(lambda m: 1 / m.sqrt(), 1 + i * width, width) for i in range(size)]
        + [(lambda m: 1 / (2 * m).sqrt(), 1 + i * width, width) for i in range(size)]
    )
