# SPDX-License-Identifier: Apache-2.0
"""One decode step of grouped-query attention on the KV SRAM (`golden.kernels.attention`)."""

from dataclasses import dataclass

from golden.formats import Format
from golden.kernels.attention import Chunk
from golden.kv_layout import key_rows, value_rows
from sim.programs.builder import TileProgram
from sim.programs.memory import Buffer, Weights


@dataclass(frozen=True)
class KvRegion:
    """One KV head's cache in KV SRAM: `ring` slots of `head_dim` from rows `keys` and `values`."""

    keys: int
    values: int
    ring: int
    head_dim: int

    @classmethod
    def allocate(cls, p: TileProgram, name: str, ring: int, head_dim: int) -> "KvRegion":
        cols = p.config.cols
        keys = p.memory.kv_rows(f"{name}.keys", key_rows(ring, head_dim, cols))
        values = p.memory.kv_rows(f"{name}.values", value_rows(ring, head_dim, cols))
        return cls(keys, values, ring, head_dim)


def append(p: TileProgram, key: Buffer, value: Buffer, slot: int, region: KvRegion) -> None:
    """Appends one token's key and value (BF16 rows) in ring slot `slot`."""
    p.command(
        "kvappend",
        k_addr=key.address,
        v_addr=value.address,
        slot=slot,
        k_base=region.keys,
        v_base=region.values,
        head_dim=region.head_dim,
        keys=1,
        values=1,
    )


def attend(
    p: TileProgram,
    name: str,
    queries: Buffer,
    starts: Buffer | None,
    region: KvRegion,
    factor: float,
    parts: list[Chunk],
    out: Buffer,
) -> None:
    """Queries [heads, D] (BF16) on one KV head's slots; normalised output to `out`.

    `starts` holds the heads' `sink_starts` (None: a softmax without sinks), `factor` is the
    `exponent_factor`.
    """
    memory, bf16 = p.memory, Format.BF16
    heads, dim, cols = queries.rows, region.head_dim, p.config.cols
    dim_tiles = -(-dim // cols)
    if not parts:
        p.vector(queries, out, mask=(0, 0))  # nothing counts: zeros
        return
    largest, total, output = starts, None, None
    for index, part in enumerate(parts):
        tag, size = f"{name}.c{index}", part.stop - part.start
        scores = memory.buffer(f"{tag}.scores", heads, size)
        keys = Weights(
            size, dim, bf16, 0, dim // 8, False, row=region.keys + part.start // cols * (dim // 8)
        )
        p.matmul(queries, keys, scores)
        top = memory.scalars(f"{tag}.chunk_max", heads)
        p.vector(
            scores,
            reduce="max",
            into=top,
            mask=part.mask,
            mask_lo_step=part.lo_step,
            mask_hi_step=part.hi_step,
        )
        new, shrink = top, None
        if largest is not None:
            new = memory.scalars(f"{tag}.max", heads)
            p.vector(top, new, b=largest, op1="max")
            shrink = memory.scalars(f"{tag}.shrink", heads)
            p.vector(largest, shrink, b=new, d=factor, op1="sub", mul=True, s2="d", function="exp2")
        probs = memory.buffer(f"{tag}.probs", heads, size, bf16, weight=bf16)
        chunk_sum = memory.scalars(f"{tag}.chunk_sum", heads)
        p.vector(
            scores,
            probs,
            b=new,
            b_row=True,
            d=factor,
            op1="sub",
            mul=True,
            s2="d",
            function="exp2",
            reduce="sum",
            into=chunk_sum,
            mask=part.mask,
            mask_lo_step=part.lo_step,
            mask_hi_step=part.hi_step,
        )
        if shrink is None:
            total = chunk_sum
        else:
            after = memory.scalars(f"{tag}.sum", heads)
            p.vector(
                shrink,
                after,
                b=1.0 if total is None else total,
                d=chunk_sum,
                mul=True,
                add=True,
                s3="d",
            )
            total = after
        product = memory.buffer(f"{tag}.product", heads, dim)
        p.command(
            "matmul",
            act_addr=probs.address,
            act_stride=probs.stride_lines,
            m=heads,
            n=dim,
            k=size,
            weight_addr=region.values + part.start // 8 * dim_tiles,
            weight_gstride=dim_tiles,
            weight_nstride=1,
            out_addr=product.address,
            out_stride=product.stride_lines,
            act_format=bf16,
            weight_format=bf16,
        )
        if index == len(parts) - 1:
            break
        if output is None or shrink is None:
            output = product
        else:
            grown = memory.buffer(f"{tag}.output", heads, dim)
            p.vector(output, grown, b=shrink, b_row=True, d=product, mul=True, add=True, s3="d")
            output = grown
        largest = new
    assert total is not None  # `parts` is not empty
    inverse = memory.scalars(f"{name}.inverse", heads)
    p.vector(total, inverse, function="reciprocal")
    if output is None or shrink is None:
        p.vector(product, out, b=inverse, b_row=True, mul=True)
        return
    scaled = memory.buffer(f"{tag}.scaled", heads, dim)
    p.vector(output, scaled, b=shrink, b_row=True, mul=True)
    p.vector(product, out, b=inverse, b_row=True, d=scaled, op1="add", s1="d", mul=True)


def attention(
    p: TileProgram,
    queries: Buffer,
    key: Buffer,
    value: Buffer,
    starts: Buffer,
    regions: list[KvRegion],
    slot: int,
    factor: float,
    parts: list[Chunk],
    out: Buffer,
) -> None:
    """Appends the new token, then attends: rotated queries [heads, D], `key` and `value`
    [kv_heads, D], all in BF16, to `out` [heads, D].
    """
    for g, region in enumerate(regions):
        append(p, key.row(g), value.row(g), slot, region)
    attend_groups(p, queries, starts, regions, factor, parts, out)


def attend_groups(
    p: TileProgram,
    queries: Buffer,
    starts: Buffer,
    regions: list[KvRegion],
    factor: float,
    parts: list[Chunk],
    out: Buffer,
) -> None:
    """`attend` for every KV head with its share of the query heads; `starts` has one row per KV
    head.
    """
    group = queries.rows // len(regions)

    def rows(buffer: Buffer, g: int) -> Buffer:
        return Buffer(
            buffer.name, buffer.at(g * group), group, buffer.cols, buffer.fmt, buffer.stride
        )

    for g, region in enumerate(regions):
        attend(p, f"g{g}", rows(queries, g), starts.row(g), region, factor, parts, rows(out, g))
