# SPDX-License-Identifier: Apache-2.0
"""The loop over the experts that tokens have chosen, which the tile's sequencer runs by itself.

It visits them in ascending order of their ids, each once: it looks for the least id above the
current one, starts that expert's streams and the fetch of its biases, and only then issues the
commands of the current one. So weights of the next expert follow those of the current one without
a pause while the array, the vector engine and the sequencer work.

The rows of the tokens that chose an expert are gathered by copies (which convert the residual
stream to the format of the activations), go through the expert together, and are added by share to
their tokens' results one by one. With a single token or a single expert all rows take part and
nothing is copied.

Inside an expert, blocks of its intermediate places follow each other: while the array works on a
block, the vector engine has the one before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from golden.formats import Format
from golden.models import GateSpec
from sim.assembler import ZERO, Reg, Semaphores
from sim.programs.builder import TileProgram
from sim.programs.expert_space import Space, dense
from sim.programs.memory import Buffer
from sim.programs.moe import ExpertImage, close_gate, columns, fetch_biases, open_gate, take

REGISTERS = (
    *("current", "following", "least", "none", "id", "pointer", "tokens", "where"),
    *("fetched", "used", "rows", "source", "target", "share", "sum"),
)
SEMAPHORES = ("gathered", "biases", "product", "opened", "hidden", "added", "spent")
OUTSIDE = 0xFFFF_FFF0  # an address beyond every HBM slice
NONE = (1 << 31) - 1  # what the search for an id finds when there is none; ids compare as signed


class Explicit(TileProgram):
    """Commands of a loop: they take and post the semaphores that `at` names, and nothing else.

    Operands in `at` replace those of the command, such as a number of rows that is in a register.
    """

    def __init__(self, p: TileProgram):
        self.memory, self.config, self.program = p.memory, p.config, p.program
        self._given: dict[str, Any] = {}

    def at(self, wait: Semaphores = (), post: Semaphores = (), **operands: Any) -> TileProgram:
        """This program, for one command."""
        self._given = {"wait": wait, "post": post, **operands}
        return self

    def command(self, name: str, **operands: Any) -> None:
        given, self._given = self._given, {}
        getattr(self.program, name)(**operands | given)


def held(register: Reg, offset: int = 0) -> int:
    """An address in a register, where `Buffer` has a number: both can be added to."""
    return cast(int, register + offset)


class Visits:
    """The loop over the chosen experts.

    Semaphores: `gathered` (rows are there), `biases` (they are), `product` (a MATMUL is complete),
    `opened` (a block of gate and up may be overwritten), `hidden` (it is complete), `added` (a
    block of the result may be overwritten), `spent` (a buffer of biases may be). Whatever else
    must come after something does: engines start their commands in order, the vector engine
    one when the last is complete, and each expert's stages wait for one another.
    """

    def __init__(
        self,
        p: TileProgram,
        x: Buffer,
        given: Buffer,
        image: ExpertImage,
        spec: GateSpec,
        ids: Buffer,
        shares: Buffer,
        out: Buffer,
    ):
        self.x, self.image, self.top_k = x, image, spec.top_k
        self.ids, self.shares, self.out = ids, shares, out
        self.dense = dense(x.rows, spec.experts)
        memory = p.memory
        self.space = Space.allocate(memory, x.rows, image, given.fmt)
        self.act = given
        if not self.dense:
            self.act = memory.buffer(
                "expert.x", x.rows, x.cols, given.fmt, weight=image.gate_up.fmt
            )
        if image.biased:
            self.biases = memory.buffer("expert.biases", 2, image.bias_words)
        self.scratch = memory.buffer("scratch", 1, 1)
        self.issuer = Explicit(p)
        self.program = p.program
        self.reg = {name: p.program.reg(f"expert.{name}") for name in REGISTERS}
        self.sem = {name: p.program.semaphore(f"expert.{name}") for name in SEMAPHORES}
        self.labels = 0

    def label(self) -> str:
        """A new name for a branch target."""
        self.labels += 1
        return f"expert.{self.labels}"

    def issue(self) -> None:
        """The whole loop."""
        p, reg = self.program, self.reg
        p.li(reg["none"], NONE)
        p.li(reg["least"], 0)
        self.search()
        if self.image.biased:
            p.li(reg["fetched"], self.biases.address)
            p.li(reg["used"], self.biases.address)
            p.post(self.sem["spent"])
            p.post(self.sem["spent"])
        self.fetch()
        top, last = p.label(self.label()), self.label()
        p.move(reg["current"], reg["following"])
        p.add(reg["least"], reg["current"], imm=1)
        self.search()
        p.beq(reg["following"], reg["none"], last)
        self.fetch()
        p.label(last)
        self.expert()
        p.bne(reg["following"], reg["none"], top)
        if self.image.biased:  # a later program finds its semaphores at zero
            p.wait(self.sem["spent"])
            p.wait(self.sem["spent"])

    def check(self) -> None:
        """Stops the tile with ADDRESS_RANGE if `following` is no expert.

        TOPK gives no such id; should one come all the same, what lies there must not be computed.
        """
        p, reg, good = self.program, self.reg, self.label()
        p.li(reg["where"], self.image.count)
        p.blt(reg["following"], reg["where"], good)
        p.stream(hbm_addr=OUTSIDE, rows=1)
        p.label(good)

    def search(self) -> None:
        """following = the least id that is chosen and not below `least`, or NONE."""
        p, reg = self.program, self.reg
        p.move(reg["following"], reg["none"])
        with self.every_token(1 if self.dense else self.ids.rows):
            for i in range(self.top_k):
                skip = self.label()
                p.load(reg["id"], reg["pointer"], imm=4 * i)
                p.blt(reg["id"], reg["least"], skip)
                p.blt(reg["following"], reg["id"], skip)
                p.move(reg["following"], reg["id"])
                p.label(skip)

    @contextmanager
    def every_token(self, count: int, **walks: Buffer) -> Iterator[None]:
        """The body for each token, `pointer` at its ids and other registers at rows of buffers."""
        p, reg = self.program, self.reg
        each = {"pointer": self.ids, **walks}
        for name, buffer in each.items():
            p.li(reg[name], buffer.address)
        if count == 1:
            yield
            return
        with p.loop(reg["tokens"], count):
            yield
            for name, buffer in each.items():
                p.add(reg[name], reg[name], imm=buffer.stride)

    @contextmanager
    def every_row(self, shares: bool, **walks: Buffer) -> Iterator[None]:
        """The body for each token that chose the current expert; `share` at its share."""
        p, reg = self.program, self.reg
        if shares:
            walks["share"] = self.shares
        with self.every_token(self.ids.rows, **walks):
            found, none = self.label(), self.label()
            for i in range(self.top_k):
                p.load(reg["id"], reg["pointer"], imm=4 * i)
                if shares:
                    p.add(reg["where"], reg["share"], imm=4 * i)
                p.beq(reg["id"], reg["current"], found)
            p.jump(none)
            p.label(found)
            yield
            p.label(none)

    def fetch(self) -> None:
        """Starts the streams and the fetch of the biases of the expert `following`."""
        p, reg, image = self.program, self.reg, self.image
        where = reg["where"]
        self.check()
        p.mul(where, reg["following"], imm=image.size)
        p.add(where, where, imm=image.base)
        for weights, offset in ((image.gate_up, 0), (image.down, image.down_offset)):
            p.stream(hbm_addr=where + offset, rows=weights.rows, scaled=int(weights.scaled))
        if image.biased:
            issuer = self.issuer.at(self.sem["spent"], self.sem["biases"])
            fetch_biases(issuer, image, where + image.bias_offset, reg["fetched"])
            self.turn(reg["fetched"])

    def turn(self, register: Reg) -> None:
        """The other one of the two buffers of biases."""
        # rd = 0 - rt - imm
        both = self.biases.at(0) + self.biases.at(1)
        self.program.sub(register, ZERO, register, imm=-both)

    def expert(self) -> None:
        """The commands of the expert `current`, whose streams have been started."""
        reg, sem, image, space = self.reg, self.sem, self.image, self.space
        at = self.issuer.at
        rows: dict[str, Any] = {}
        first_waits = [sem["biases"]] if image.biased else []
        if not self.dense:
            self.gather()
            rows, first_waits = {"rows": reg["rows"]}, [*first_waits, sem["gathered"]]
        m = {"m": reg["rows"]} if rows else {}
        bias = reg["used"] if image.biased else None
        blocks = image.blocks()
        for i in range(len(blocks) + 1):
            if i < len(blocks):
                first, padded, _ = blocks[i]
                waits = first_waits if i == 0 else [sem["opened"]] if i >= 2 else []
                both = space.both[i % len(space.both)]
                take(
                    at(waits, sem["product"], **m),
                    self.act,
                    image.gate_up,
                    both,
                    None if bias is None else bias + 8 * first,
                    2 * padded,
                )
            if i == 0:
                continue
            first, padded, count = blocks[i - 1]
            both = space.both[(i - 1) % len(space.both)]
            gated = columns(space.gated, 0, count)
            open_gate(at(sem["product"], **rows), image.activation, columns(both, 0, count), gated)
            posts = [sem["opened"]] if i + 1 < len(blocks) else []
            if i == len(blocks):
                posts = [sem["hidden"]]
            close_gate(
                at((), posts, **rows),
                image.activation,
                columns(both, padded, count),
                gated,
                columns(space.hidden, first, count),
            )
        firsts = range(0, image.down.n, space.block)
        for i in range(len(firsts) + 1):
            if i < len(firsts):
                last = i + 1 == len(firsts)
                waits = [sem["hidden"]] if i == 0 else [sem["added"]] if i >= 2 else []
                posts = [sem["product"], *([sem["spent"]] if last and image.biased else [])]
                take(
                    at(waits, posts, **m),
                    space.hidden,
                    image.down,
                    space.down[i % len(space.down)],
                    None if bias is None else bias + 4 * (image.gate_up.n + firsts[i]),
                    min(space.block, image.down.n - firsts[i]),
                )
            if i:
                self.add(i - 1, firsts[i - 1], i + 1 < len(firsts))
        if image.biased:
            self.turn(reg["used"])

    def gather(self) -> None:
        """Copies the rows of x to `act`; `rows` counts them."""
        p, reg = self.program, self.reg
        p.li(reg["rows"], 0)
        p.li(reg["target"], self.act.address)
        with self.every_row(False, source=self.x):
            row = Buffer("x", held(reg["source"]), 1, self.x.cols, self.x.fmt, self.x.stride)
            copy = Buffer("act", held(reg["target"]), 1, self.x.cols, self.act.fmt, 0)
            self.issuer.at().vector(row, copy)
            p.add(reg["target"], reg["target"], imm=self.act.stride)
            p.add(reg["rows"], reg["rows"], imm=1)
        self.mark((), self.sem["gathered"])

    def add(self, block: int, first: int, reused: bool) -> None:
        """Adds a block of the result by share; `reused`: a later block has the same place."""
        p, reg, sem = self.program, self.reg, self.sem
        source = self.space.down[block % len(self.space.down)]
        width = min(self.space.block, self.image.down.n - first)
        posts = [sem["added"]] if reused else []
        if self.dense:
            self.add_all(columns(source, 0, width), columns(self.out, first, width), posts)
            return
        self.mark(sem["product"], ())
        p.li(reg["target"], source.address)
        with self.every_row(True, sum=columns(self.out, first, width)):
            share = Buffer("share", held(reg["where"]), 1, 1, Format.FP32, 4)
            row = Buffer("down", held(reg["target"]), 1, width, source.fmt, 0)
            total = Buffer("moe", held(reg["sum"]), 1, width, self.out.fmt, 0)
            self.issuer.at().vector(
                row, total, b=share, b_row=True, d=total, mul=True, add=True, s3="d"
            )
            p.add(reg["target"], reg["target"], imm=source.stride)
        if posts:
            self.mark((), posts)

    def add_all(self, source: Buffer, total: Buffer, posts: Semaphores) -> None:
        """The same for every token at once: each has its share of the expert in one place."""
        p, reg = self.program, self.reg
        if self.ids.rows == 1:
            found = self.label()
            for i in range(self.top_k):
                p.li(reg["where"], self.shares.at(0, i))
                p.load(reg["id"], imm=self.ids.at(0, i))
                p.beq(reg["id"], reg["current"], found)
            p.label(found)
        else:
            p.li(reg["where"], self.shares.address)
        share = Buffer("share", held(reg["where"]), 1, 1, Format.FP32, 4)
        stride = self.shares.stride_words
        self.issuer.at(self.sem["product"], posts, b_stride=stride).vector(
            source, total, b=share, b_row=True, d=total, mul=True, add=True, s3="d"
        )

    def mark(self, wait: Semaphores, post: Semaphores) -> None:
        """A vector command that only takes or posts, after and before others of a varying count."""
        self.issuer.at(wait, post).vector(columns(self.x.row(0), 0, 1), self.scratch)
