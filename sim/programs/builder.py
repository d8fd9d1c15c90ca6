# SPDX-License-Identifier: Apache-2.0
"""A tile program under construction: commands in terms of buffers, kept in order by semaphores.

Engines run decoupled: a command waits only for those before it on other engines that touch what it
reads or writes (`sim.programs.order`); weight streams run ahead of the commands that take them,
held only by room in their ring. So the order of commands is the schedule: an engine gets its
commands in the order of the program.
"""

from typing import Any

from golden.formats import SPECS, Format
from hw.config import LINE_BYTES
from hw.isa import COMMANDS, Function, Init, Kind, Op1, Reduce, Select
from sim.assembler import Indirect, Program, Reg
from sim.programs.access import SRAM, Access, access
from sim.programs.memory import Buffer, TileMemory, Weights
from sim.programs.order import Order
from sim.programs.work import Work

Address = int | Reg | Indirect
Operand = Buffer | float | None

ENGINES = {command.name.lower(): command.engine.name.lower() for command in COMMANDS}
_OP1 = {"add": Op1.ADD, "sub": Op1.SUB, "max": Op1.MAX, "min": Op1.MIN}
_SELECT = {"b": Select.B, "d": Select.D, "x": Select.X}
_FUNCTION = {
    "exp2": Function.EXP2,
    "reciprocal": Function.RECIPROCAL,
    "rsqrt": Function.RSQRT,
    "sigmoid": Function.SIGMOID,
}


class TileProgram:
    """`program` and `memory` of one tile, and the commands that kernels are made of."""

    def __init__(self, memory: TileMemory):
        self.memory = memory
        self.config = memory.config
        self.program = Program()
        self.work = Work()
        self.order = Order()
        self._beats: dict[str, list[int]] = {}  # beat of each command, by engine

    def command(self, name: str, **operands: Any) -> None:
        """A command that waits for what it depends on."""
        self._account(name, operands)
        engine = ENGINES[name]
        touched = access(self.config, name, operands)
        waits: list[tuple[str, int]] = []
        while True:
            needed = self.order.needs(engine, touched)
            if len(needed) <= 2:
                break
            self._sequencer_waits(*needed[-1])
        waits = [self._poster(engine, other, index) for other, index in needed]
        semaphores = tuple(self._channel(other, engine) for other, _ in waits)
        for (other, index), semaphore in zip(waits, semaphores, strict=True):
            self.program.post_after(self._beats[other][index], semaphore)
        self.order.add(engine, touched, waits)
        beat = getattr(self.program, name)(wait=semaphores, **operands)
        self._beats.setdefault(engine, []).append(beat)

    def _channel(self, producer: str, consumer: str) -> int:
        """Semaphore that `producer` posts and only `consumer` waits for, in the same order."""
        return self.program.semaphore(f"{producer}.{consumer}").index

    def _poster(self, consumer: str, engine: str, index: int) -> tuple[str, int]:
        """A command that can still post and whose completion stands for command `index`: one of
        the engine itself if possible.
        """
        others = [other for other in self.order.history if other not in (engine, consumer)]
        for other in (engine, *others):
            for i, issued in enumerate(self.order.history[other]):
                stands = issued.clock.get(engine, -1) >= index
                if stands and self.program.posts_free(self._beats[other][i]):
                    return other, i
        raise RuntimeError(f"no command can post the completion of {engine} command {index}")

    def _sequencer_waits(self, engine: str, index: int) -> None:
        """Makes the sequencer wait for a command before it issues the next."""
        other, at = self._poster("sequencer", engine, index)
        semaphore = self._channel(other, "sequencer")
        self.program.post_after(self._beats[other][at], semaphore)
        self.program.wait(semaphore)
        self.order.learn(other, at)

    def _account(self, name: str, operands: dict[str, Any]) -> None:
        """Adds the command to the program's work."""
        if name == "matmul":
            self.work.matmul(
                self.config,
                operands["m"],
                operands["n"],
                operands["k"],
                Format(operands["act_format"]),
                Format(operands["weight_format"]),
            )
        elif name == "vector":
            self.work.vectors(self.config, operands["rows"], operands["cols"])
        elif name == "dma":
            self.work.bytes(self.config, LINE_BYTES * operands["lines"] * operands["rows"])

    def load(self, register: Reg, address: int) -> None:
        """Loads a register from tile SRAM once the word at `address` is there."""
        touched = Access([(SRAM, address, address + 4)])
        while needed := self.order.needs("sequencer", touched):
            self._sequencer_waits(*needed[0])
        self.program.load(register, imm=address)

    def join(self) -> None:
        """Makes the sequencer wait until every command but weight streams is complete."""
        for engine, commands in self.order.history.items():
            if engine != "stream" and self.order.sequencer.get(engine, -1) < len(commands) - 1:
                self._sequencer_waits(engine, len(commands) - 1)

    def finish(self) -> Program:
        self.program.halt()
        return self.program

    def stream(self, weights: Weights, address: Address | None = None) -> None:
        """Starts the stream of `weights`, from a register's address if given."""
        source = weights.hbm if address is None else address
        self.work.bytes(self.config, self.memory.traffic(weights))
        self.program.stream(hbm_addr=source, rows=weights.rows, scaled=int(weights.scaled))

    def matmul(
        self,
        act: Buffer,
        weights: Weights,
        out: Buffer,
        bias: Buffer | None = None,
        address: Address | None = None,
        fetched: bool = False,
    ) -> None:
        """out = act @ weights^T + bias; streamed weights are fetched from HBM (`address` of it),
        unless their stream has been started already (`fetched`).
        """
        if weights.row is None and not fetched:
            self.stream(weights, address)
        self.command(
            "matmul",
            act_addr=act.address,
            act_stride=act.stride_lines,
            m=act.rows,
            n=weights.n,
            k=weights.k,
            weight_addr=weights.row or 0,
            weight_gstride=1,
            weight_nstride=weights.groups,
            out_addr=out.address,
            out_stride=out.stride_lines,
            bias_addr=bias.address if bias else 0,
            act_format=act.fmt,
            weight_format=weights.fmt,
            stream=int(weights.row is None),
            init=Init.BIAS if bias else Init.ZERO,
            out_bf16=int(out.fmt is Format.BF16),
        )

    def vector(
        self,
        a: Buffer,
        out: Buffer | None = None,
        *,
        b: Operand = None,
        d: Operand = None,
        b_row: bool = False,
        d_row: bool = False,
        reduce: str = "none",
        into: Buffer | None = None,
        op1: str = "none",
        s1: str = "b",
        mul: bool = False,
        s2: str = "b",
        add: bool = False,
        s3: str = "b",
        function: str = "none",
        mul2: bool = False,
        s4: str = "b",
        clamp: float = 0.0,
        clamp_hi: bool = False,
        clamp_lo: bool = False,
        permute: int = 0,
        mask: tuple[int, int] | None = None,
        mask_lo_step: bool = False,
        mask_hi_step: bool = False,
        fixed_scale: int | None = None,
    ) -> None:
        """One VECTOR command over a's rows and columns, with the stages of `golden.vector`.

        A buffer as b or d is a vector per row (a buffer of one row: the same for every row), or
        with `b_row` / `d_row` one FP32 scalar per row; a float is an immediate. `fixed_scale` is
        the E8M0 code that every block of an MX result gets in place of its own.
        """
        operands: dict[str, Any] = {
            "a_addr": a.address,
            "a_stride": a.stride_words if a.rows > 1 else 0,
            "a_format": a.fmt,
            "rows": a.rows,
            "cols": a.cols,
            "permute": permute,
            "clamp": float(clamp),
            "clamp_hi": int(clamp_hi),
            "clamp_lo": int(clamp_lo),
            "op1": _OP1.get(op1, Op1.NONE),
            "s1": _SELECT[s1],
            "mul": int(mul),
            "s2": _SELECT[s2],
            "add": int(add),
            "s3": _SELECT[s3],
            "function": _FUNCTION.get(function, Function.NONE),
            "mul2": int(mul2),
            "s4": _SELECT[s4],
            "reduce": Reduce[reduce.upper()],
        }
        for name, value, scalar in (("b", b, b_row), ("d", d, d_row)):
            if value is None:
                continue
            if isinstance(value, float):
                operands |= {f"{name}_kind": Kind.IMMEDIATE, f"{name}_addr": value}
            elif scalar:
                operands |= {
                    f"{name}_kind": Kind.ROW,
                    f"{name}_addr": value.address,
                    f"{name}_stride": 1,
                    f"{name}_format": Format.FP32,
                }
            else:
                operands |= {
                    f"{name}_kind": Kind.VECTOR,
                    f"{name}_addr": value.address,
                    f"{name}_stride": value.stride_words if value.rows > 1 else 0,
                    f"{name}_format": value.fmt,
                }
        if out is not None:
            operands |= {
                "store": 1,
                "out_addr": out.address,
                "out_format": out.fmt,
                "out_stride": out.stride_words if out.rows > 1 else 0,
            }
        if into is not None:
            operands["reduce_addr"] = into.address
        if mask is not None:
            operands |= {"mask": 1, "mask_lo": mask[0], "mask_hi": mask[1]}
            operands |= {"mask_lo_step": int(mask_lo_step), "mask_hi_step": int(mask_hi_step)}
        elif mask_lo_step or mask_hi_step:
            raise ValueError("mask must be given with mask_lo_step or mask_hi_step, not None")
        if fixed_scale is not None:
            if out is None or not SPECS[out.fmt].scaled:
                raise ValueError(
                    f"fixed_scale must come with a result in an MX format, not {fixed_scale!r}"
                )
            operands |= {"fixed_scale": 1, "scale": fixed_scale}
        self.command("vector", **operands)
