# SPDX-License-Identifier: Apache-2.0
"""Attention on a KV cache (`golden.kernels.attention`, `golden.kernels.prefill`): a decode step, or
many queries at once, with the array kept busy.
"""

from collections.abc import Callable, Sequence
from typing import Any

from golden.formats import Format
from golden.kernels.attention import Chunk
from golden.kernels.prefill import RowBlock
from sim.programs.builder import TileProgram
from sim.programs.memory import Buffer
from sim.programs.regions import Appended, Region


def seen(part: Chunk) -> dict[str, Any]:
    """The slots that count, as keywords of `TileProgram.vector`."""
    return {"mask": part.mask, "mask_lo_step": part.lo_step, "mask_hi_step": part.hi_step}


class Appends:
    """New tokens of one KV head, appended as late as the program needs them.

    `tokens` are (slot, key, value) in order: rows in the cache's format.
    """

    def __init__(self, p: TileProgram, region: Appended, tokens: list[tuple[int, Buffer, Buffer]]):
        self.p, self.region, self.tokens = p, region, list(tokens)

    def issue(self, part: Chunk | None = None) -> None:
        """Appends all tokens up to the last that lies in `part` (None: all that are left)."""
        wanted = [
            i
            for i, (slot, _, _) in enumerate(self.tokens)
            if part is None or part.start <= slot < part.stop
        ]
        count = wanted[-1] + 1 if wanted else 0
        for slot, key, value in self.tokens[:count]:
            self.region.append(self.p, key, value, slot)
        del self.tokens[:count]


class Attend:
    """Queries [heads, D] (BF16) on one KV head's slots, chunk by chunk; normalised output to `out`.

    `starts` holds the heads' `sink_starts` (None: a softmax without sinks), `factor` is the
    `exponent_factor`. For each chunk `scores`, `soften` and `values` are issued in this order and
    `grow` after the next chunk's `soften`, so that the array never waits for a softmax
    (`interleave`). With `share` the chunks' buffers take turns in places of their own kind. Before
    a chunk that reads them the new tokens of `appends` are appended.
    """

    def __init__(
        self,
        p: TileProgram,
        name: str,
        queries: Buffer,
        starts: Buffer | None,
        region: Region,
        factor: float,
        parts: list[Chunk],
        out: Buffer,
        share: bool = False,
        appends: "Appends | None" = None,
    ):
        self.p, self.name, self.queries, self.region = p, name, queries, region
        self.factor, self.parts, self.out, self.share = factor, parts, out, share
        self.appends = appends
        self.turn = 0  # chunks of others before this one's first
        self.largest = starts
        self.total: Buffer | None = None
        self.output: Buffer | None = None
        self.made: list[dict[str, Buffer | None]] = []

    def _buffer(self, index: int, kind: str, cols: int, fmt: Format = Format.FP32) -> Buffer:
        """[heads, cols] of a chunk; with `share`, places are used again two chunks later, those of
        products three: a first product is read, as the output so far, after the third is issued.
        """
        weight = self.region.fmt if fmt is Format.BF16 else None
        turns = 3 if kind == "product" else 2
        return self.p.memory.buffer(
            f"{self.name}.c{index}.{kind}",
            self.queries.rows,
            cols,
            fmt,
            weight,
            share=f"{kind}{(self.turn + index) % turns}" if self.share else None,
        )

    def _scalars(self, index: int, kind: str) -> Buffer:
        return self.p.memory.scalars(f"{self.name}.c{index}.{kind}", self.queries.rows)

    def scores(self, index: int) -> None:
        """Issues the scores of chunk `index`."""
        part = self.parts[index]
        if self.appends is not None:
            self.appends.issue(part)
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


def reserve(attends: list[Attend]) -> None:
    """Takes the places that chunks share, each as large as the largest of them needs."""
    sharing = [attend for attend in attends if attend.share and attend.parts]
    if not sharing:
        return
    memory = sharing[0].p.memory
    rows = max(attend.queries.rows for attend in sharing)
    slots = max(part.stop - part.start for attend in sharing for part in attend.parts)
    for turn in range(2):
        for kind, fmt, weight in (
            ("scores", Format.FP32, None),
            ("probs", Format.BF16, sharing[0].region.fmt),
        ):
            memory.buffer(f"{kind}{turn}", rows, slots, fmt, weight, share=f"{kind}{turn}")


def interleave(attends: list[Attend], done: Callable[[Attend], None] | None = None) -> None:
    """Issues all chunks so that each softmax runs beside the array's work on other chunks.

    The array gets: scores 0, scores 1, product 0, scores 2, product 1, ..; what follows a product
    is issued one softmax later. `done` is called when the output of one of them has been issued.
    """

    def grow(attend: Attend, index: int) -> None:
        attend.grow(index)
        if done is not None and index == len(attend.parts) - 1:
            done(attend)

    items = [(attend, i) for attend in attends for i in range(len(attend.parts))]
    turn = 0
    for attend in attends:
        attend.turn, turn = turn, turn + len(attend.parts)
        if not attend.parts:  # nothing counts: zeros
            attend.p.vector(attend.queries, attend.out, mask=(0, 0))
            if done is not None:
                done(attend)
    reserve(attends)
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
            grow(*grown)
        if index == len(attend.parts) - 1:
            attend.prepare()
        grown = attend, index
    for attend in attends:  # tokens that no query sees are kept too
        if attend.appends is not None:
            attend.appends.issue()
    if grown is not None:
        grow(*grown)


def shares(p: TileProgram, rows: int, parts: list[Chunk], value_dim: int) -> bool:
    """Whether `rows` rows on all parts are too many for a place of their own for every chunk."""
    slots = sum(part.stop - part.start for part in parts)
    return rows * (slots * 6 + len(parts) * (value_dim * 12 + 80)) > p.memory.sram_free * 3 // 4


def row_range(buffer: Buffer, first: int, rows: int) -> Buffer:
    """Some rows of a buffer."""
    return Buffer(buffer.name, buffer.at(first), rows, buffer.cols, buffer.fmt, buffer.stride)


def decode(
    p: TileProgram,
    queries: Buffer,
    starts: Buffer | None,
    regions: Sequence[Region],
    factor: float,
    parts: list[Chunk],
    out: Buffer,
    appends: Sequence[Appends] | None = None,
    prefix: str = "",
    share: bool | None = None,
) -> list[Attend]:
    """One query [heads, D] on every KV head with its share of the heads, for `interleave`.

    `starts` has one row per KV head. `out` [heads, Dv].
    """
    group = queries.rows // len(regions)
    if share is None:
        share = shares(p, queries.rows, parts, regions[0].value_dim)
    return [
        Attend(
            p,
            f"{prefix}g{g}",
            row_range(queries, g * group, group),
            None if starts is None else starts.row(g),
            region,
            factor,
            parts,
            row_range(out, g * group, group),
            share,
            None if appends is None else appends[g],
        )
        for g, region in enumerate(regions)
    ]


def prefill(
    p: TileProgram,
    queries: Buffer,
    heads: int,
    starts: Buffer | None,
    regions: Sequence[Region],
    factor: float,
    blocks: list[RowBlock],
    out: Buffer,
    appends: Sequence[Appends] | None = None,
    prefix: str = "",
) -> list[Attend]:
    """Queries [heads * Q, D], head-major, on every KV head, for `interleave`.

    `starts` [heads, rows of a block] holds a head's start in every column. `out` is [Q, heads *
    Dv], or [heads * Q, Dv] like the queries.
    """
    count, group = queries.rows // heads, heads // len(regions)
    made = []
    for h in range(heads):
        region = regions[h // group]
        width = region.value_dim
        for b, block in enumerate(blocks):
            row, col = (h * count, 0) if out.rows == queries.rows else (0, h * width)
            address = out.at(row + block.first, col)
            into = Buffer(out.name, address, block.rows, width, out.fmt, out.stride)
            made.append(
                Attend(
                    p,
                    f"{prefix}h{h}.b{b}",
                    row_range(queries, h * count + block.first, block.rows),
                    None if starts is None else starts.row(h),
                    region,
                    factor,
                    block.parts,
                    into,
                    True,
                    None if appends is None else appends[h // group],
                )
            )
    return made
