# SPDX-License-Identifier: Apache-2.0
"""Adders, comparators and counters whose depth does not grow with every bit.

Synthesis for area turns any adder into a ripple of carries, whatever it is described as. The
carries between blocks are therefore kept signals, which no optimisation goes through.
"""

from collections.abc import Sequence
from typing import Any

from amaranth import Cat, Const, Module, Mux, Signal, Value

from hw.wires import wire


def kept(m: Module, name: str, value: Any) -> Signal:
    """A named signal that stays as it is in synthesis."""
    signal = Signal(len(Value.cast(value)), name=name, attrs={"keep": 1})
    m.d.comb += signal.eq(value)
    return signal


def add(
    m: Module,
    name: str,
    a: Value,
    b: Value,
    carry: Value | int = 0,
    *,
    blocks: Sequence[int],
) -> Signal:
    """a + b + carry, unsigned, of equal widths, with the carry out as the top bit.

    A carry skips a block whose bits all pass it on. `blocks`: widths, the lowest first; what they
    leave is the last one.
    """
    width = len(a)
    if len(b) != width:
        raise ValueError(f"operands must be of equal width, not {width} and {len(b)}")
    into: Value = Value.cast(carry)[:1]
    parts: list[Value] = []
    low = 0
    for k, size in enumerate([*blocks, width - sum(blocks)]):
        x, y = a[low : low + size], b[low : low + size]
        total = wire(m, f"{name}_part{k}", (Cat(into, x) + Cat(into, y))[1:], size + 1)
        low += size
        if low == width:
            parts.append(total)
            break
        parts.append(total[:size])
        made = wire(m, f"{name}_made{k}", x + y, size + 1)[size]
        if k == 0 and isinstance(carry, int) and carry == 0:
            into = kept(m, f"{name}_carry{k}", made)
            continue
        generate = kept(m, f"{name}_generate{k}", made)
        passes = kept(m, f"{name}_passes{k}", (x | y).all())
        into = kept(m, f"{name}_carry{k}", generate | (passes & into))
    return wire(m, name, Cat(parts), width + 1)


def increment(m: Module, name: str, a: Value, carry: Value, *, blocks: Sequence[int]) -> Signal:
    """a + carry, unsigned, with the carry out as the top bit; `blocks` as for `add`."""
    into = carry
    parts: list[Value] = []
    low = 0
    for k, size in enumerate([*blocks, len(a) - sum(blocks)]):
        parts.append(wire(m, f"{name}_part{k}", a[low : low + size] + into, size + 1)[:size])
        low += size
        ones = kept(m, f"{name}_ones{k}", a[:low].all())
        into = kept(m, f"{name}_carry{k}", ones & carry)
    return wire(m, name, Cat(parts, into), len(a) + 1)


def greater(m: Module, name: str, a: Value, b: Value, size: int = 3) -> Signal:
    """a > b, unsigned, of equal widths, by blocks of `size` bits."""
    result: Value = Const(0, 1)
    for k, low in enumerate(range(0, len(a), size)):
        x, y = a[low : low + size], b[low : low + size]
        above = kept(m, f"{name}_above{k}", x > y)
        if low == 0:
            result = above
            continue
        equal = kept(m, f"{name}_level{k}", ~(~x & y).any())
        result = kept(m, f"{name}_from{k}", above | (equal & result))
    return wire(m, name, result)


def leading_zeros(m: Module, name: str, value: Value) -> Signal:
    """Number of zeros above the top one; for zero, the width or more.

    All halves, quarters and so on are counted at once.
    """
    bits = (len(value) - 1).bit_length()
    padded = Cat(Const(1).replicate((1 << bits) - len(value)), value)
    empty: list[Value] = [~padded[i] for i in range(1 << bits)]
    counts: list[list[Value]] = [[] for _ in empty]
    for k in range(bits):
        below, fewer = empty, counts
        empty, counts = [], []
        for i in range(0, len(below), 2):
            lower, upper = fewer[i], fewer[i + 1]
            skip = below[i + 1]
            empty.append(wire(m, f"{name}_empty{k}_{i}", skip & below[i]))
            rest: list[Value] = []
            if k:
                rest = list(wire(m, f"{name}_rest{k}_{i}", Mux(skip, Cat(lower), Cat(upper)), k))
            counts.append([*rest, skip])
    return wire(m, f"{name}_count", Cat(counts[0]))
