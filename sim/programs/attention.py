# SPDX-License-Identifier: Apache-2.0
"""One decode step of grouped-query attention on the KV SRAM (`golden.kernels.attention`)."""

from dataclasses import dataclass
from typing import Any

from golden.formats import Format
from golden.kernels.attention import Chunk
from golden.kv_layout import LINE_ELEMENTS, key_rows, value_rows
from sim.programs.builder import TileProgram
from sim.programs.memory import Buffer


@dataclass(frozen=True)
class KvRegion:
    """One KV head's cache in KV SRAM: `ring` slots from rows `keys` and `values`.

    Keys have `head_dim` elements, values `value_dim`.
    """

    keys: int
    values: int
    ring: int
    head_dim: int
    value_dim: int

    @classmethod
    def allocate(
        cls, p: TileProgram, name: str, ring: int, head_dim: int, value_dim: int | None = None
    ) -> "KvRegion":
        cols, width = p.config.cols, value_dim or head_dim
        keys = p.memory.kv_rows(f"{name}.keys", key_rows(ring, head_dim, cols))
        values = p.memory.kv_rows(f"{name}.values", value_rows(ring, width, cols))
        return cls(keys, values, ring, head_dim, width)

    def scores(self, p: TileProgram, queries: Buffer, part: Chunk, out: Buffer) -> None:
        """Queries times the keys of slots [start, stop)."""
        lines = self.head_dim // LINE_ELEMENTS
        p.command(
            "matmul",
            **operands(queries, part.stop - part.start, self.head_dim, out),
            weight_addr=self.keys + part.start // p.config.cols * lines,
            weight_gstride=1,
            weight_nstride=lines,
        )

    def product(self, p: TileProgram, probs: Buffer, part: Chunk, out: Buffer) -> None:
        """Probabilities of slots [start, stop) times their values."""
        tiles = -(-self.value_dim // p.config.cols)
        p.command(
            "matmul",
            **operands(probs, self.value_dim, part.stop - part.start, out),
            weight_addr=self.values + part.start // LINE_ELEMENTS * tiles,
            weight_gstride=tiles,
            weight_nstride=1,
        )


def operands(act: Buffer, n: int, k: int, out: Buffer) -> dict[str, int]:
    """Operands of a MATMUL in BF16 but for where its weights lie."""
    return {
        "act_addr": act.address,
        "act_stride": act.stride_lines,
        "m": act.rows,
        "n": n,
        "k": k,
        "out_addr": out.address,
        "out_stride": out.stride_lines,
        "act_format": Format.BF16,
        "weight_format": Format.BF16,
    }


def seen(part: Chunk) -> dict[str, Any]:
    """The slots that count, as keywords of `TileProgram.vector`."""
    return {"mask": part.mask, "mask_lo_step": part.lo_step, "mask_hi_step": part.hi_step}


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


class Attend:
    """Queries [heads, D] (BF16) on one KV head's slots, chunk by chunk; normalised output to `out`.

    `starts` holds the heads' `sink_starts` (None: a softmax without sinks), `factor` is the
    `exponent_factor`. For each chunk `scores`, `soften` and `values` are issued in this order and
    `grow` after the next chunk's `soften`, so that the array never waits for a softmax
    (`interleave`). With `share` the chunks' buffers take turns in places of their own kind.
    """

    def __init__(
        self,
        p: TileProgram,
        name: str,
        queries: Buffer,
        starts: Buffer | None,
        region: KvRegion,
        factor: float,
        parts: list[Chunk],
        out: Buffer,
        share: bool = False,
    ):
        self.p, self.name, self.queries, self.region = p, name, queries, region
        self.factor, self.parts, self.out, self.share = factor, parts, out, share
        self.largest = starts
        self.total: Buffer | None = None
        self.output: Buffer | None = None
        self.made: list[dict[str, Buffer | None]] = []

    def _buffer(self, index: int, kind: str, cols: int, fmt: Format = Format.FP32) -> Buffer:
        """[heads, cols] of a chunk; chunk i may use the place of chunk i - 2 again."""
        weight = Format.BF16 if fmt is Format.BF16 else None
        return self.p.memory.buffer(
            f"{self.name}.c{index}.{kind}",
            self.queries.rows,
            cols,
            fmt,
            weight,
            share=f"{kind}{index % 2}" if self.share else None,
        )

    def _scalars(self, index: int, kind: str) -> Buffer:
        return self.p.memory.scalars(f"{self.name}.c{index}.{kind}", self.queries.rows)

    def scores(self, index: int) -> None:
        """Issues the scores of chunk `index`."""
        part = self.parts[index]
        scores = self._buffer(index, "scores", part.stop - part.start)
        self.region.scores(self.p, self.queries, part, scores)
        self.made.append({"scores": scores})

    def soften(self, index: int) -> None:
        """Issues the softmax of the chunk: probabilities, and the running maximum and sum."""
        p, part, made = self.p, self.parts[index], self.made[index]
        scores = made["scores"]
        assert scores is not None
        top = self._scalars(index, "chunk_max")
        p.vector(scores, reduce="max", into=top, **seen(part))
        largest, new = self.largest, top
        if largest is not None:
            new = self._scalars(index, "max")
            p.vector(top, new, b=largest, op1="max")
        probs = self._buffer(index, "probs", part.stop - part.start, Format.BF16)
        chunk_sum = self._scalars(index, "chunk_sum")
        p.vector(
            scores,
            probs,
            b=new,
            b_row=True,
            d=self.factor,
            op1="sub",
            mul=True,
            s2="d",
            function="exp2",
            reduce="sum",
            into=chunk_sum,
            **seen(part),
        )
        total, shrink = chunk_sum, None
        if largest is not None:
            shrink = self._scalars(index, "shrink")
            p.vector(
                largest,
                shrink,
                b=new,
                d=self.factor,
                op1="sub",
                mul=True,
                s2="d",
                function="exp2",
            )
            total = self._scalars(index, "sum")
            before = 1.0 if self.total is None else self.total
            p.vector(shrink, total, b=before, d=chunk_sum, mul=True, add=True, s3="d")
        made |= {"probs": probs, "shrink": shrink}
        self.largest, self.total = new, total

    def values(self, index: int) -> None:
        """Issues the product of the chunk's probabilities and values."""
        probs = self.made[index]["probs"]
        assert probs is not None
        product = self._buffer(index, "product", self.region.value_dim)
        self.region.product(self.p, probs, self.parts[index], product)
        self.made[index]["product"] = product

    def grow(self, index: int) -> None:
        """Adds the chunk's product to the output so far, or gives the final output."""
        p, shrink, product = self.p, self.made[index]["shrink"], self.made[index]["product"]
        output = self.output
        assert product is not None
        if index < len(self.parts) - 1:
            if output is None or shrink is None:
                self.output = product
                return
            self.output = self._buffer(index, "output", self.region.value_dim)
            p.vector(
                output, self.output, b=shrink, b_row=True, d=product, mul=True, add=True, s3="d"
            )
        elif output is None or shrink is None:
            p.vector(product, self.out, b=self.inverse, b_row=True, mul=True)
        else:
            p.vector(
                product,
                self.out,
                b=self.inverse,
                b_row=True,
                d=self.scaled,
                op1="add",
                s1="d",
                mul=True,
            )

    def prepare(self) -> None:
        """Issues what the final output needs besides the last product."""
        p, last = self.p, len(self.parts) - 1
        assert self.total is not None
        self.inverse = p.memory.scalars(f"{self.name}.inverse", self.queries.rows)
        p.vector(self.total, self.inverse, function="reciprocal")
        shrink = self.made[last]["shrink"]
        if self.output is not None and shrink is not None:
            self.scaled = self._buffer(last, "scaled", self.region.value_dim)
            p.vector(self.output, self.scaled, b=shrink, b_row=True, mul=True)


def interleave(attends: list[Attend]) -> None:
    """Issues all chunks so that each softmax runs beside the array's work on other chunks.

    The array gets: scores 0, scores 1, product 0, scores 2, product 1, ..; what follows a product
    is issued one softmax later.
    """
    items = [(attend, i) for attend in attends for i in range(len(attend.parts))]
    for attend in attends:
        if not attend.parts:  # nothing counts: zeros
            attend.p.vector(attend.queries, attend.out, mask=(0, 0))
    grown: tuple[Attend, int] | None = None
    for number, (attend, index) in enumerate(items):
        if number == 0:
            attend.scores(index)
        if number + 1 < len(items):
            following, part = items[number + 1]
            following.scores(part)
        attend.soften(index)
        attend.values(index)
        if grown is not None:
            grown[0].grow(grown[1])
        if index == len(attend.parts) - 1:
            attend.prepare()
        grown = attend, index
    if grown is not None:
        grown[0].grow(grown[1])


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
    memory = p.memory
    slots = sum(part.stop - part.start for part in parts)
    own = queries.rows * (slots * 6 + len(parts) * (regions[0].value_dim * 12 + 80))
    share = own > memory.sram_free * 3 // 4

    def rows(buffer: Buffer, g: int) -> Buffer:
        return Buffer(
            buffer.name, buffer.at(g * group), group, buffer.cols, buffer.fmt, buffer.stride
        )

    interleave(
        [
            Attend(
                p,
                f"g{g}",
                rows(queries, g),
                starts.row(g),
                region,
                factor,
                parts,
                rows(out, g),
                share,
            )
            for g, region in enumerate(regions)
        ]
    )
