# SPDX-License-Identifier: Apache-2.0
"""Blocks with known codes and scales for conversions to MX formats, from tables of ml_dtypes.

What a code means comes from ml_dtypes (MXINT8: code / 64); which code a value gets is written down
with the value, from the definition of rounding, so nothing here converts to an MX format.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from golden.formats import SPECS, Format

DTYPES = {
    Format.MXFP4: ml_dtypes.float4_e2m1fn,
    Format.MXFP6_E2M3: ml_dtypes.float6_e2m3fn,
    Format.MXFP6_E3M2: ml_dtypes.float6_e3m2fn,
    Format.MXFP8_E4M3: ml_dtypes.float8_e4m3fn,
    Format.MXFP8_E5M2: ml_dtypes.float8_e5m2,
}
LARGEST = {Format.FP32: 2.0**128 - 2.0**104, Format.BF16: 2.0**128 - 2.0**120}
SOURCES = (Format.FP32, Format.BF16)
LOWEST = -127  # exponent of the smallest scale


@dataclass
class Blocks:
    """FP32 values [blocks, 32] and what they become: codes [blocks, 32], E8M0 codes [blocks]."""

    values: np.ndarray
    codes: np.ndarray
    scales: np.ndarray


def magnitudes(fmt: Format) -> np.ndarray:
    """Values of the codes 0 .. max_code, float64."""
    codes = np.arange(SPECS[fmt].max_code + 1, dtype=np.uint8)
    if fmt is Format.MXINT8:
        return codes / 64
    return codes.view(DTYPES[fmt]).astype(np.float64)


def signed_code(fmt: Format, code: int, negative: bool) -> int:
    if not negative:
        return code
    return -code & 0xFF if fmt is Format.MXINT8 else code | 1 << (SPECS[fmt].bits - 1)


def beside(value: float, step: int, source: Format) -> float:
    """The neighbour of a positive value of `source`, above for +1, below for -1."""
    drop = 16 if source is Format.BF16 else 0
    bits = int(np.float32(value).view(np.uint32))
    return float(np.uint32(bits + (step << drop)).view(np.float32))


def exists(value: float, source: Format) -> bool:
    """Whether `source` has this value."""
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return float(rounded) == value and not (
        source is Format.BF16 and int(rounded.view(np.uint32)) & 0xFFFF
    )


def targets(fmt: Format, shift: int, source: Format) -> list[tuple[float, int] | None]:
    """Values * 2^shift with their codes under the scale 2^shift, None for what `source` lacks.

    Every code; every tie and both its neighbours; what lies between the largest code and the next
    power of two. Positive only; always in the same order.
    """
    table = magnitudes(fmt)
    top = SPECS[fmt].max_code
    limit = 2.0 ** (SPECS[fmt].max_exponent + 1)
    found = [(float(v), code, 0) for code, v in enumerate(table)]
    for code in range(top):
        middle = float(table[code] + table[code + 1]) / 2
        found += [(middle, code, -1), (middle, code + code % 2, 0), (middle, code + 1, 1)]
    beyond = float(table[top] + (table[top] - table[top - 1]) / 2)
    found += [(beyond, top, step) for step in (-1, 0, 1)] + [(limit, top, -1)]
    result: list[tuple[float, int] | None] = []
    for value, code, step in found:
        scaled = float(np.ldexp(value, shift))
        # The limit itself may be beyond FP32; the value below it is not.
        if scaled == 2.0**128:
            result.append((LARGEST[source], code))
            continue
        there = exists(scaled, source)
        near = beside(scaled, step, source) if there and step else scaled
        there &= near < np.ldexp(limit, shift)
        result.append((near, code) if there else None)
    return result


def highest(fmt: Format) -> int:
    """Exponent of the largest scale that a finite FP32 block gets."""
    return 127 - SPECS[fmt].max_exponent


def blocks(fmt: Format, source: Format, shifts: tuple[int, ...]) -> Blocks:
    """All of `targets`, both signs, in blocks of which each has a value of the top binade.

    Every target is there once; the blocks have the shifts in turns.
    """
    lists = [targets(fmt, shift, source) for shift in shifts]
    table = magnitudes(fmt)
    anchors = [code for code, v in enumerate(table) if v >= 2.0 ** SPECS[fmt].max_exponent]
    result: list[tuple[list[float], list[int], int]] = []
    places = [(i, negative) for i in range(len(lists[0])) for negative in (False, True)]
    for number in range(-(-len(places) // 31)):
        shift, items = shifts[number % len(shifts)], lists[number % len(shifts)]
        row = []
        for i, negative in places[31 * number : 31 * (number + 1)]:
            if (item := items[i]) is not None:
                row.append((-item[0] if negative else item[0], signed_code(fmt, item[1], negative)))
        anchor, negative = anchors[number % len(anchors)], number % 2 == 1
        scaled = float(np.ldexp(table[anchor], shift))
        row.insert(
            number * 7 % (len(row) + 1),
            (-scaled if negative else scaled, signed_code(fmt, anchor, negative)),
        )
        row += [(0.0, 0)] * (32 - len(row))
        result.append(([v for v, _ in row], [c for _, c in row], shift + 127))
    values = np.array([r[0] for r in result], np.float32)
    assert (values.astype(np.float64) == np.array([r[0] for r in result])).all()
    return Blocks(values, np.array([r[1] for r in result]), np.array([r[2] for r in result]))


def by_hand(fmt: Format, source: Format) -> Blocks:
    """Blocks written down one by one: saturation, E2M1's ties, the ends of the scales, NaN."""
    spec = SPECS[fmt]
    inf, nan = float("inf"), float("nan")
    lead = int(np.flatnonzero(magnitudes(fmt) == 2.0**spec.max_exponent)[0])  # code of that power
    minus = signed_code(fmt, lead, True)
    zero = signed_code(fmt, 0, True)
    top = spec.max_code
    power = spec.max_exponent
    largest = LARGEST[source]
    rows: list[tuple[list[float], list[int], int]] = [
        ([0.0], [0], 0),
        ([-0.0] * 32, [0] * 32, 0),
        ([1.0] * 31 + [nan], [0] * 32, 255),
        ([2.0**power, -0.0, 0.0], [lead, zero, 0], 127),
        ([nan], [0], 255),
        ([inf], [0], 255),
        ([0.0] * 5 + [-inf, 2.0**100], [0] * 7, 255),
        # The largest value of all, and the smallest scales: 2^-127 and what would be below it.
        ([largest, -largest], [top, signed_code(fmt, top, True)], 127 + highest(fmt)),
        ([2.0**127], [lead], 127 + highest(fmt)),
        ([2.0 ** (power - 127), -(2.0 ** (power - 127))], [lead, minus], 0),
        ([2.0 ** (power - 126)], [lead], 1),
        # A block far below the smallest scale: -2^-133 is -2^-6 of it, which is below half of the
        # smallest code but in formats that have 2^-6 itself.
        (
            [-(2.0**-133)],
            [signed_code(fmt, int(np.flatnonzero(magnitudes(fmt) <= 2.0**-6)[-1]), True)],
            0,
        ),
    ]
    if fmt is Format.MXFP8_E4M3:
        rows += [
            ([448.0], [0x7E], 127),
            ([-464.0, 1.0], [0xFE, 0x38], 127),
            ([480.0], [0x7E], 127),
            ([510.0], [0x7E], 127),
            ([512.0], [0x78], 128),
            ([896.0], [0x7E], 128),
            ([1020.0], [0x7E], 128),
            ([1024.0], [0x78], 129),
        ]
        if source is Format.FP32:
            rows += [([957.0], [0x7E], 128), ([1.0] * 31 + [-957.0], [0x30] * 31 + [0xFE], 128)]
    if fmt is Format.MXFP4:
        rows += [([0.25, 1.25, 2.5, 5.0], [0, 2, 4, 6], 127)]
        rows += [([v], [6], s) for v, s in ((0.25, 123), (1.25, 125), (2.5, 126), (5.0, 127))]
        rows += [([6.0], [7], 127), ([-7.5], [15], 127), ([8.0], [6], 128)]
        if source is Format.FP32:
            rows += [([5.0, 0.25000006, -0.25000006], [6, 1, 9], 127), ([0.25000006], [6], 123)]
    values, codes = np.zeros((len(rows), 32), np.float32), np.zeros((len(rows), 32), np.int64)
    for i, (v, c, _) in enumerate(rows):
        values[i, : len(v)], codes[i, : len(c)] = v, c
    return Blocks(values, codes, np.array([s for _, _, s in rows]))


def together(*parts: Blocks) -> Blocks:
    return Blocks(
        np.concatenate([p.values for p in parts]),
        np.concatenate([p.codes for p in parts]),
        np.concatenate([p.scales for p in parts]),
    )
