# SPDX-License-Identifier: Apache-2.0
"""One decode step of grouped-query attention on the KV SRAM (`golden.kernels.attention`)."""

from dataclasses import dataclass

from golden.formats import Format
from golden.kernels.attention import LOG2E, Chunk
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
    sinks: Buffer,
    region: KvRegion,
    parts: list[Chunk],
    out: Buffer,
) -> None:
    """Queries [heads, D] (scaled, BF16) on one KV head's slots; normalised output to `out`."""
    memory, bf16 = p.memory, Format.BF16
    heads, dim, cols = queries.rows, region.head_dim, p.config.cols
    dim_tiles = -(-dim // cols)
    largest, total, output = sinks, None, None
    for index, part in enumerate(parts):
        tag, size = f"{name}.c{index}", part.stop - part.start
        scores = memory.buffer(f"{tag}.scores", heads, size)
        keys = Weights(
            size, dim, bf16, 0, dim // 8, False, row=region.keys + part.start // cols * (dim // 8)
        )
        p.matmul(queries, keys, scores)
        top = memory.scalars(f"{tag}.chunk_max", heads)
        p.vector(scores, reduce="max", into=top, mask=part.mask)
        new = memory.scalars(f"{tag}.max", heads)
        p.vector(top, new, b=largest, op1="max")
        shrink = memory.scalars(f"{tag}.shrink", heads)
        p.vector(largest, shrink, b=new, d=LOG2E, op1="sub", mul=True, s2="d", function="exp2")
        probs = memory.buffer(f"{tag}.probs", heads, size, bf16, weight=bf16)
        chunk_sum = memory.scalars(f"{tag}.chunk_sum", heads)
        p.vector(
            scores,
            probs,
            b=new,
            b_row=True,
            d=LOG2E,
            op1="sub",
            mul=True,
            s2="d",
            function="exp2",
            reduce="sum",
            into=chunk_sum,
            mask=part.mask,
        )
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
        if output is None:
            output = product
        else:
            grown = memory.buffer(f"{tag}.output", heads, dim)
            p.vector(output, grown, b=shrink, b_row=True, d=product, mul=True, add=True, s3="d")
            output = grown
        largest, total = new, after
    assert output is not None and total is not None
    inverse = memory.scalars(f"{name}.inverse", heads)
    p.vector(total, inverse, function="reciprocal")
    p.vector(output, out, b=inverse, b_row=True, mul=True)


def attention(
    p: TileProgram,
    queries: Buffer,
    key: Buffer,
    value: Buffer,
    sinks: Buffer,
    regions: list[KvRegion],
    slot: int,
    scale: float,
    parts: list[Chunk],
    out: Buffer,
) -> None:
    """Appends the new token, then attends: rotated queries [heads, D] in FP32, `key` and `value`
    [kv_heads, D] in BF16, to `out` [heads, D].
    """
    heads, dim = queries.rows, queries.cols
    group = heads // len(regions)
    scaled = p.memory.buffer("queries", heads, dim, Format.BF16, weight=Format.BF16)
    for g, region in enumerate(regions):
        append(p, key.row(g), value.row(g), slot, region)
    p.vector(queries, scaled, b=float(scale), mul=True)
    attend_groups(p, scaled, sinks, regions, group, parts, out)


def attend_groups(
    p: TileProgram,
    queries: Buffer,
    sinks: Buffer,
    regions: list[KvRegion],
    group: int,
    parts: list[Chunk],
    out: Buffer,
) -> None:
    """`attend` for every KV head with its `group` query heads; `sinks` has one row per KV head."""

    def rows(buffer: Buffer, g: int) -> Buffer:
        return Buffer(
            buffer.name, buffer.at(g * group), group, buffer.cols, buffer.fmt, buffer.stride
        )

    for g, region in enumerate(regions):
        attend(p, f"g{g}", rows(queries, g), sinks.row(g), region, parts, rows(out, g))
