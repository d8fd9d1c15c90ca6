# SPDX-License-Identifier: Apache-2.0
"""Random legal programs of the commands that attention is made of, on buffers that share places.

Every program goes on with the memories as the one before has left them.
"""

import numpy as np

from golden.formats import SPECS, Format
from golden.kernels.trace import Stored
from hw.config import LINE_BYTES
from hw.isa import Direction, Init
from sim.programs.builder import TileProgram
from sim.programs.memory import Buffer, TileMemory
from sim.programs.regions import KvRegion
from sim.programs.regions import place as placed

BF16, FP32 = Format.BF16, Format.FP32
PLACES, ROOM = 8, 1024  # places in tile SRAM that buffers take turns in, and bytes of each
RING, KEY_DIM, VALUE_DIM = 40, 16, 8
HBM_LINES = 256  # of either format that programs move
ROWS, COLS = 5, 28  # of buffers, at most
BLOCK, ENTRIES = 16, 8  # tokens of a block, and entries of the block table that are used


class RandomPrograms:
    """`memory` with random contents, and programs on it by `program`."""

    def __init__(self, rng, config):
        self.rng = rng
        self.memory = memory = TileMemory(config)
        self.live: dict[str, Buffer] = {}  # by place
        self.ids: dict[str, Buffer] = {}  # those of `live` that hold ids of TOPK
        self.places = {}
        self.names = self.programs = 0
        self.commands: dict[str, int] = {}
        p = TileProgram(memory)
        self.region = KvRegion.allocate(p, "kv", RING, KEY_DIM, VALUE_DIM)
        rows = memory.kv_rows("more", 8)
        self.kv_rows = rows + 8
        self.hbm = {
            fmt: memory.hbm(fmt.name, self.values(fmt, HBM_LINES * self.per_line(fmt)).tobytes())
            for fmt in (BF16, FP32)
        }
        self.weights = [
            memory.weights(f"w{k}", self.values(BF16, n * k).reshape(n, k), None, BF16, True)
            for n, k in ((3, KEY_DIM), (9, VALUE_DIM), (8, 13), (KEY_DIM, 20), (4, 24))
        ]
        self.loaded: set[int] = set()  # entries of the block table
        self.blocks = memory.buffer("blocks", 1, 4 * ENTRIES)
        per_block = BLOCK // config.cols * KEY_DIM // 8 + BLOCK // 8 * -(-VALUE_DIM // config.cols)
        first_rows = rng.integers(0, self.kv_rows - per_block, (1, 4 * ENTRIES))
        for i in range(PLACES):
            place = f"place{i}"
            first = memory.buffer(place, 1, ROOM // 2, BF16, BF16, share=place)
            self.places[place] = first.address
        self.bytes = first.address + ROOM
        zeros = np.zeros((self.bytes // LINE_BYTES, LINE_BYTES), np.uint8)
        memory.sram_images.append((0, zeros, np.full(len(zeros), 127, np.uint8)))
        memory.fill(self.blocks, Stored(first_rows.astype(np.uint32), FP32))
        lines = self.values(BF16, self.kv_rows * config.cols * 8).view(np.uint8)
        lines = lines.reshape(-1, LINE_BYTES)
        memory.kv_images.append((0, lines, np.full(len(lines), 127, np.uint8)))
        for i, (cols, fmt) in enumerate(
            [(KEY_DIM, BF16), (VALUE_DIM, BF16), (KEY_DIM, BF16), (20, FP32), (8, FP32)]
        ):
            made = self.new(int(rng.integers(1, ROWS)), cols, fmt, place=f"place{i}")
            codes = self.values(fmt, made.rows * cols).reshape(made.rows, cols)
            memory.fill(made, Stored(codes, fmt))

    @staticmethod
    def per_line(fmt):
        return SPECS[fmt].codes_per_line

    def values(self, fmt, count):
        """Codes of normal values."""
        bits = self.rng.standard_normal(count).astype(np.float32).view(np.uint32)
        return (bits >> 16).astype(np.uint16) if fmt is BF16 else bits

    def chance(self, share):
        return bool(self.rng.random() < share)

    def pick(self, items):
        items = list(items)
        return items[int(self.rng.integers(len(items)))]

    def new(self, rows, cols, fmt, keep=(), place=None):
        """A buffer in a place that holds none of `keep`; what was there is no more. The last rows
        that could be a query or a value stay.
        """
        busy = {b.address // ROOM for b in keep if b is not None}
        for size in (KEY_DIM, VALUE_DIM):
            left = [b for b in self.live.values() if (b.fmt, b.cols) == (BF16, size)]
            busy |= {b.address // ROOM for b in left} if len(left) == 1 else set()
        free = [n for n, address in self.places.items() if address // ROOM not in busy]
        place = place or self.pick(free)
        self.names += 1
        weight = BF16 if fmt is BF16 else None
        name = f"b{self.names}"
        made = self.memory.buffer(name, rows, cols, fmt, weight, share=place)
        assert made.address == self.places[place], "buffers must fit their place"
        self.live[place] = made
        self.ids.pop(place, None)
        return made

    def find(self, fmt=None, cols=None, rows=None, least=1):
        """A random buffer, or None."""
        fitting = [
            b
            for b in self.live.values()
            if fmt in (None, b.fmt)
            and cols in (None, b.cols)
            and rows in (None, b.rows)
            and b.cols >= least
        ]
        return self.pick(fitting) if fitting else None

    # Commands: each gives False when there is nothing that it could work on.

    def product_of(self, p, act, n, weights, keep=()):
        """A MATMUL with weights where `weights` says; bias and format of the result at random."""
        bias = self.find(FP32, rows=1, least=n) if self.chance(0.3) else None
        out = self.new(act.rows, n, self.pick((BF16, FP32)), (act, bias, *keep))
        more = {"init": Init.BIAS, "bias_addr": bias.address} if bias is not None else {}
        p.command(
            "matmul",
            **placed(act, out),
            n=n,
            k=act.cols,
            out_bf16=int(out.fmt is BF16),
            **weights,
            **more,
        )
        return True

    def scores(self, p):
        queries = self.find(BF16, KEY_DIM)
        if queries is None:
            return False
        start = 8 * int(self.rng.integers(RING // 8))
        n = int(self.rng.integers(1, min(COLS, RING - start) + 1))
        lines = KEY_DIM // 8
        where = self.region.keys + start // p.config.cols * lines
        strides = {"weight_gstride": 1, "weight_nstride": lines}
        return self.product_of(p, queries, n, {"weight_addr": where, **strides})

    def product(self, p):
        probs = self.find(BF16)
        if probs is None:
            return False
        start = 8 * int(self.rng.integers((RING - probs.cols) // 8 + 1))
        tiles = -(-VALUE_DIM // p.config.cols)
        where = self.region.values + start // 8 * tiles
        strides = {"weight_gstride": tiles, "weight_nstride": 1}
        return self.product_of(p, probs, VALUE_DIM, {"weight_addr": where, **strides})

    def load_table(self, p):
        """Entries of the block table: any rows that a block fits in, in or beside the ring."""
        count = int(self.rng.integers(1, ENTRIES + 1))
        first = int(self.rng.integers(ENTRIES - count + 1))
        source = self.blocks.at(0, int(self.rng.integers(self.blocks.cols - count + 1)))
        p.command("blocktable", addr=source, count=count, table=first)
        self.loaded |= set(range(first, first + count))
        return True

    def paged(self, p):
        """Scores or a product on the blocks of neighbouring entries."""
        act, cols = self.find(BF16), p.config.cols
        if act is None:
            return False
        if not self.loaded:
            return self.load_table(p)
        tokens = act.cols
        scores = act.cols == KEY_DIM and self.chance(0.6)
        if scores:
            tokens = int(self.rng.integers(1, COLS + 1))
        blocks = -(-tokens // BLOCK)
        fitting = [t for t in self.loaded if set(range(t, t + blocks)) <= self.loaded]
        if not fitting:
            return False
        pages = {"paged": 1, "block_log2": BLOCK.bit_length() - 1, "table": self.pick(fitting)}
        if scores:
            strides = {"weight_gstride": 1, "weight_nstride": KEY_DIM // 8, "weight_addr": 0}
            return self.product_of(p, act, tokens, pages | strides)
        values = BLOCK // cols * KEY_DIM // 8
        strides = {"weight_gstride": -(-VALUE_DIM // cols), "weight_nstride": 1}
        return self.product_of(
            p, act, VALUE_DIM, pages | strides | {"weight_addr": values, "page_k": 1}
        )

    def streamed(self, p):
        fitting = [(b, w) for b in self.live.values() for w in self.weights if b.cols == w.k]
        fitting = [(b, w) for b, w in fitting if b.fmt is BF16]
        if not fitting:
            return False
        act, weights = self.pick(fitting)
        bias = self.find(FP32, rows=1, least=weights.n) if self.chance(0.3) else None
        out = self.new(act.rows, weights.n, self.pick((BF16, FP32)), (act, bias))
        p.matmul(act, weights, out, bias)
        return True

    def append(self, p):
        key, value = self.find(BF16, KEY_DIM), self.find(BF16, VALUE_DIM)
        if key is None or value is None:
            return False
        row, other = (b.row(int(self.rng.integers(b.rows))) for b in (key, value))
        # On the second lap the rest of a line of values stays.
        self.region.append(p, row, other, int(self.rng.integers(2 * RING)))
        return True

    def vector(self, p):
        a = self.find()
        rng, options = self.rng, {}
        rows, cols = a.rows, a.cols
        sources = {}
        for name in "bd":
            kind = self.pick(("none", "float", "vector", "matrix", "row"))
            if kind == "float":
                sources[name] = float(np.float32(rng.standard_normal()))
            elif kind in ("vector", "matrix"):
                sources[name] = self.find(cols=cols, rows=rows if kind == "matrix" else 1)
            elif kind == "row":
                sources[name] = self.find(FP32, rows=1, least=rows)
                options[f"{name}_row"] = sources[name] is not None
        given = {name: value for name, value in sources.items() if value is not None}
        selects = ["x", *given]
        options["op1"] = self.pick(("none", "add", "sub", "max", "min"))
        options |= {s: self.pick(selects) for s in ("s1", "s2", "s3", "s4")}
        options |= {stage: self.chance(0.4) for stage in ("mul", "add", "mul2")}
        options["function"] = self.pick(("none", "none", "exp2", "reciprocal", "rsqrt", "sigmoid"))
        if self.chance(0.2):
            options |= {"clamp": 1.5, "clamp_hi": self.chance(0.5), "clamp_lo": self.chance(0.5)}
        if self.chance(0.2) and cols % 4 == 0:
            options["permute"] = int(rng.integers(1, 3))
        if self.chance(0.5):
            options["mask"] = tuple(int(x) for x in rng.integers(0, cols + 2, 2))
            options |= {f"mask_{end}_step": self.chance(0.3) for end in ("lo", "hi")}
        keep = (a, *(b for b in given.values() if isinstance(b, Buffer)))
        out = into = None
        reduce = self.pick(("none", "none", "sum", "max"))
        if reduce == "none" or self.chance(0.6):
            if self.chance(0.2):
                out = a  # in place
                self.forget_ids(a)
            else:
                out = self.new(rows, cols, self.pick((BF16, FP32)), keep)
        if reduce != "none":
            into = self.new(1, rows, FP32, (*keep, out))
        p.vector(a, out, **given, reduce=reduce, into=into, **options)
        return True

    def forget_ids(self, buffer):
        self.ids = {place: b for place, b in self.ids.items() if b.address != buffer.address}

    def topk(self, p):
        given = self.find(FP32, least=2)
        if given is None:
            return False
        bias = self.find(FP32, least=given.cols) if self.chance(0.3) else None
        k = int(self.rng.integers(1, min(8, given.cols) + 1))
        ids = self.new(1, k, FP32, (given, bias))
        scores = self.new(1, k, FP32, (given, bias, ids))
        p.command(
            "topk",
            score_addr=given.at(int(self.rng.integers(given.rows))),
            count=given.cols,
            k=k,
            ids_addr=ids.address,
            scores_addr=scores.address,
            bias_addr=bias.address if bias else 0,
            use_bias=int(bias is not None),
        )
        place = next(n for n, b in self.live.items() if b is ids)
        self.ids[place] = ids
        return True

    def fetch(self, p, address=None):
        """Rows of HBM to a new buffer, gaps between its rows left as they are or filled."""
        fmt = BF16 if address is not None else self.pick((BF16, FP32))
        rows = int(self.rng.integers(1, ROWS + 1))
        cols = self.pick((VALUE_DIM, KEY_DIM, int(self.rng.integers(1, COLS + 1))))
        made = self.new(rows, cols, fmt, self.ids.values())
        lines = -(-cols * SPECS[fmt].storage_bits // (8 * LINE_BYTES))
        far = lines + int(self.rng.integers(3))
        if address is None:
            last = HBM_LINES - (rows - 1) * far - lines
            address = self.hbm[fmt] + LINE_BYTES * int(self.rng.integers(last + 1))
        p.command(
            "dma",
            hbm_addr=address,
            hbm_stride=LINE_BYTES * far,
            local_addr=made.address,
            local_stride=made.stride_lines,
            lines=lines,
            rows=rows,
        )
        return True

    def fetch_by_id(self, p):
        if not self.ids:
            return False
        ids = self.pick(self.ids.values())
        number, where = p.program.reg("id"), p.program.reg("where")
        p.load(number, ids.at(0, int(self.rng.integers(ids.cols))))
        p.program.mul(where, number, imm=LINE_BYTES)
        p.program.add(where, where, imm=self.hbm[BF16])
        return self.fetch(p, where + LINE_BYTES * int(self.rng.integers(8)))

    def save(self, p):
        buffer = self.find()
        lines = -(-buffer.cols * SPECS[buffer.fmt].storage_bits // (8 * LINE_BYTES))
        far = lines + int(self.rng.integers(3))
        last = HBM_LINES - (buffer.rows - 1) * far - lines
        p.command(
            "dma",
            hbm_addr=self.hbm[buffer.fmt] + LINE_BYTES * int(self.rng.integers(last + 1)),
            hbm_stride=LINE_BYTES * far,
            local_addr=buffer.address,
            local_stride=buffer.stride_lines,
            lines=lines,
            rows=buffer.rows,
            direction=Direction.SRAM_TO_HBM,
        )
        return True

    def fill_cache(self, p):
        lines = int(self.rng.integers(1, 24))
        p.command(
            "dma",
            hbm_addr=self.hbm[BF16] + LINE_BYTES * int(self.rng.integers(HBM_LINES - lines)),
            local_addr=int(self.rng.integers(self.kv_rows * p.config.cols - lines)),
            lines=lines,
            rows=1,
            direction=Direction.HBM_TO_KV,
        )
        return True

    def program(self, count):
        """A program of `count` commands or a few more, and the images that it needs."""
        p = TileProgram(self.memory)
        mix = {"scores": 4, "product": 4, "vector": 7, "append": 3, "streamed": 2}
        # No more engines than the semaphores of a tile keep apart.
        mix |= (
            {"fetch": 3, "save": 2, "fill_cache": 1},
            {"topk": 2, "load_table": 1, "paged": 4},
            {"topk": 2, "fetch": 1, "fetch_by_id": 2, "append": 0},
        )[self.programs % 3]
        self.programs += 1
        names = [name for name, weight in mix.items() for _ in range(weight)]
        issued = 0
        while issued < count:
            name = self.pick(names)
            if getattr(self, name)(p):
                self.commands[name] = self.commands.get(name, 0) + 1
                issued += 1
        images = self.memory.snapshot()
        self.memory.forget()
        return p.finish(), images
