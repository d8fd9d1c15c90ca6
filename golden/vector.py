# SPDX-License-Identifier: Apache-2.0
"""Bit-exact model of a VECTOR command, on numpy arrays.

The stages have the names of the command's operands and act in this order on every element:

1. `permute` = p > 0: the element i of a row is taken from i XOR 2^(p - 1);
2. `clamp_hi`: minimum with `clamp`; `clamp_lo`: maximum with -`clamp`; the result is operand X;
3. `op1`: add, sub, max or min with operand `s1`;
4. `mul`: times operand `s2`;
5. `add`: plus operand `s3`;
6. `function`: exp2, reciprocal, rsqrt or sigmoid;
7. `mul2`: times operand `s4`;
8. `mask`: elements outside the cyclic range [mask_lo, mask_hi) become +0 and leave the reduction;
   with `mask_lo_step` or `mask_hi_step` that end grows by 1 from each row to the next;
9. `reduce`: sum or max over the row, in the order of `golden.fp32.reduce_sum`.

Codes of the command are lower-case strings here: `op1="sub"`, `s1="b"`, `function="exp2"`.
"""

import numpy as np
import numpy.typing as npt

from golden import fp32, functions
from golden.formats import Format
from golden.fp32 import Float32
from golden.quantise import dequantise, quantise

OP1 = {"add": fp32.add, "sub": fp32.sub, "max": fp32.maximum, "min": fp32.minimum}
FUNCTIONS = {
    "exp2": functions.exp2,
    "reciprocal": functions.reciprocal,
    "rsqrt": functions.rsqrt,
    "sigmoid": functions.sigmoid,
}
MASK_MODULUS = 1 << 16  # both ends of the mask are 16 bits wide
SELECTS = ("b", "d", "x")
REDUCES = ("none", "sum", "max")


def load(codes: npt.ArrayLike, fmt: Format, scales: npt.NDArray[np.uint8] | None = None) -> Float32:
    """FP32 values [..., K] of stored codes [..., K], of MX ones with scales [..., ceil(K / 32)].

    Exact, save that values beyond FP32 become infinite; every NaN is canonical.
    """
    if fmt is Format.FP32:
        return fp32.canonical(fp32.from_bits(codes))
    if fmt is Format.BF16:
        return fp32.from_bf16(codes)
    with np.errstate(over="ignore"):
        return fp32.canonical(dequantise(np.asarray(codes), scales, fmt).astype(np.float32))


def store(
    values: npt.ArrayLike, fmt: Format, fixed_scale: int | None = None
) -> tuple[npt.NDArray, npt.NDArray[np.uint8] | None]:
    """Codes [..., K] of values [..., K], and scales [..., ceil(K / 32)] (None for FP32, BF16).

    The scales are the blocks' own or, with `fixed_scale` (MX formats only), all that E8M0 code.
    """
    if fmt is Format.FP32 and fixed_scale is None:
        return fp32.bits(values), None
    return quantise(values, fmt, fixed_scale)


def rounded(values: npt.ArrayLike, fmt: Format, fixed_scale: int | None = None) -> Float32:
    """What is loaded after `values` were stored in `fmt`."""
    codes, scales = store(values, fmt, fixed_scale)
    return load(codes, fmt, scales)


def counted(
    cols: int,
    mask_lo: int,
    mask_hi: int,
    row: int = 0,
    *,
    mask_lo_step: bool = False,
    mask_hi_step: bool = False,
) -> npt.NDArray[np.bool_]:
    """[cols]: whether an element lies in the cyclic range [lo, hi) of a row; lo = hi is empty.

    lo is `mask_lo`, or `mask_lo` + `row` modulo 2^16 with `mask_lo_step`; hi likewise. So a causal
    mask of queries from position p on is lo = 0, hi = p + 1 with a step, and one with a sliding
    window steps both.
    """
    lo = (mask_lo + row * bool(mask_lo_step)) % MASK_MODULUS
    hi = (mask_hi + row * bool(mask_hi_step)) % MASK_MODULUS
    index = np.arange(cols)
    above, below = index >= lo, index < hi
    return above | below if lo > hi else above & below


def vector(
    a: npt.ArrayLike,
    b: npt.ArrayLike | None = None,
    d: npt.ArrayLike | None = None,
    *,
    lanes: int,
    permute: int = 0,
    clamp: float = 0.0,
    clamp_hi: bool = False,
    clamp_lo: bool = False,
    op1: str = "none",
    s1: str = "b",
    mul: bool = False,
    s2: str = "b",
    add: bool = False,
    s3: str = "b",
    function: str = "none",
    mul2: bool = False,
    s4: str = "b",
    mask: bool = False,
    mask_lo: int = 0,
    mask_hi: int = 0,
    mask_lo_step: bool = False,
    mask_hi_step: bool = False,
    reduce: str = "none",
) -> tuple[Float32, Float32 | None]:
    """One command: (y [rows, cols] before the store's rounding, the reduction [rows] or None).

    `a` is [rows, cols], loaded FP32 values. `b` and `d` broadcast against it: [rows, cols] or
    [cols] is kind VECTOR, [rows, 1] ROW, a scalar IMMEDIATE, None NONE. `lanes` only decides the
    order of a sum. ValueError for what the engine calls an illegal command.
    """
    x = fp32.canonical(a)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"a must be [rows, cols] with at least one element, not {x.shape}")
    cols = x.shape[1]
    if not 0 <= permute <= 15 or (permute and cols % (1 << permute)):
        raise ValueError(f"permute must keep elements inside {cols} cols, not {permute!r}")
    if op1 != "none" and op1 not in OP1:
        raise ValueError(f"op1 must be none or one of {', '.join(OP1)}, not {op1!r}")
    if function != "none" and function not in FUNCTIONS:
        known = ", ".join(FUNCTIONS)
        raise ValueError(f"function must be none or one of {known}, not {function!r}")
    if reduce not in REDUCES:
        raise ValueError(f"reduce must be one of {', '.join(REDUCES)}, not {reduce!r}")

    if permute:
        x = x[:, np.arange(cols) ^ (1 << (permute - 1))]
    if clamp_hi:
        x = fp32.minimum(x, np.float32(clamp))
    if clamp_lo:
        x = fp32.maximum(x, -np.float32(clamp))

    def operand(stage: str, select: str) -> Float32:
        if select not in SELECTS:
            raise ValueError(f"{stage} must be one of {', '.join(SELECTS)}, not {select!r}")
        value = {"b": b, "d": d, "x": x}[select]
        if value is None:
            raise ValueError(f"{stage} must select an operand that is given, not {select!r}")
        return np.asarray(value, np.float32)

    y = x
    if op1 != "none":
        y = OP1[op1](y, operand("s1", s1))
    if mul:
        y = fp32.mul(y, operand("s2", s2))
    if add:
        y = fp32.add(y, operand("s3", s3))
    if function != "none":
        y = FUNCTIONS[function](y)
    if mul2:
        y = fp32.mul(y, operand("s4", s4))
    y = np.broadcast_to(y, x.shape)

    present = np.ones(x.shape, bool)
    if mask:
        steps = {"mask_lo_step": mask_lo_step, "mask_hi_step": mask_hi_step}
        present = np.stack([counted(cols, mask_lo, mask_hi, r, **steps) for r in range(len(x))])
    out = np.where(present, y, np.float32(0.0))
    if reduce == "sum":
        return out, fp32.reduce_sum(out, lanes)
    if reduce == "max":
        return out, fp32.reduce_max(np.where(present, y, np.float32(-np.inf)), lanes)
    return out, None


# ---- single commands that kernels are made of


def row_max(a: npt.ArrayLike, *, lanes: int, **stages) -> Float32:
    """[rows]: the largest element of each row."""
    reduced = vector(a, lanes=lanes, reduce="max", **stages)[1]
    assert reduced is not None
    return reduced


def row_sum(a: npt.ArrayLike, *, lanes: int, **stages) -> Float32:
    """[rows]: the sum of each row."""
    reduced = vector(a, lanes=lanes, reduce="sum", **stages)[1]
    assert reduced is not None
    return reduced


def square_sum(a: npt.ArrayLike, *, lanes: int, **stages) -> Float32:
    """[rows]: the sum of squares of each row."""
    return row_sum(a, lanes=lanes, mul=True, s2="x", **stages)


def exponentials(
    a: npt.ArrayLike, largest: npt.ArrayLike, scale: float, *, lanes: int, **stages
) -> tuple[Float32, Float32]:
    """(exp2((a - largest) * scale) [rows, cols], its row sums [rows]); `largest` is [rows]."""
    column = np.asarray(largest, np.float32)[:, None]
    out, reduced = vector(
        a,
        column,
        np.float32(scale),
        lanes=lanes,
        op1="sub",
        s1="b",
        mul=True,
        s2="d",
        function="exp2",
        reduce="sum",
        **stages,
    )
    assert reduced is not None
    return out, reduced


def scale_rows(
    a: npt.ArrayLike, factors: npt.ArrayLike, weight: npt.ArrayLike | None = None, *, lanes: int
) -> Float32:
    """(a * factors) * weight with `factors` [rows] and `weight` [cols] (None: left out)."""
    column = np.asarray(factors, np.float32)[:, None]
    return vector(
        a, column, weight, lanes=lanes, mul=True, s2="b", mul2=weight is not None, s4="d"
    )[0]


def rotate(
    a: npt.ArrayLike, cosine: npt.ArrayLike, sine: npt.ArrayLike, permute: int, *, lanes: int
) -> Float32:
    """RoPE in two commands: a * cosine + a' * sine, a' the permuted a.

    `sine` carries the signs of the pairs. `permute` is 1 for interleaved pairs and
    log2(cols / 2) + 1 for the half-split layout of rows of one head.
    """
    turned = vector(a, sine, lanes=lanes, permute=permute, mul=True, s2="b")[0]
    return vector(a, cosine, turned, lanes=lanes, mul=True, s2="b", add=True, s3="d")[0]
