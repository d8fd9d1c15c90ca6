# SPDX-License-Identifier: Apache-2.0
"""Programs of a tile: builder, text assembler and disassembler, made from the tables of `hw.isa`.

p = Program()
row, ready = p.reg("row"), p.semaphore("ready")
p.li(row, 0x1000)
with p.loop(p.reg("i"), 4):
    p.topk(score_addr=row, count=32, k=4, ids_addr=row + 512, scores_addr=row + 768, post=ready)
    p.wait(ready)
    p.add(row, row, imm=1024)
p.halt()
beats = p.assemble()
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hw import isa

WORD_MASK = 0xFFFF_FFFF
_MNEMONICS = {c.name.lower(): c for c in isa.COMMANDS}
_KEYWORDS = ("wait", "post")  # an operand of such a name is written with a trailing underscore


@dataclass(frozen=True)
class Indirect:
    """A register plus a constant: the value of an operand, read as the command is fetched."""

    index: int
    offset: int

    def __add__(self, offset: int) -> "Indirect":
        return Indirect(self.index, self.offset + operator.index(offset))

    def __sub__(self, offset: int) -> "Indirect":
        return Indirect(self.index, self.offset - operator.index(offset))

    def __str__(self) -> str:
        return f"r{self.index}{self.offset:+d}"


@dataclass(frozen=True)
class Reg:
    """A scalar register; `Reg(3) + 16` is an indirect operand. Register 0 reads as zero."""

    index: int
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.index < isa.REGISTERS:
            raise ValueError(f"register must be from 0 to {isa.REGISTERS - 1}, not {self.index!r}")

    def __add__(self, offset: int) -> Indirect:
        return Indirect(self.index, 0) + offset

    def __sub__(self, offset: int) -> Indirect:
        return Indirect(self.index, 0) - offset

    def __str__(self) -> str:
        return f"r{self.index}"


@dataclass(frozen=True)
class Semaphore:
    """A semaphore of the tile; usable wherever its number is."""

    index: int
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.index < isa.SEMAPHORES:
            raise ValueError(
                f"semaphore must be from 0 to {isa.SEMAPHORES - 1}, not {self.index!r}"
            )

    def __index__(self) -> int:
        return self.index

    def __str__(self) -> str:
        return f"s{self.index}"


Number = int | float | Semaphore | np.integer | np.floating
Value = Number | Reg | Indirect
Semaphores = Semaphore | int | Iterable[Semaphore | int]
Target = str | int

ZERO = Reg(0, "zero")


def fp32_bits(value: float) -> int:
    """The bits of `value` rounded to FP32."""
    return int(np.float32(value).view(np.uint32))


def _semaphore_list(what: str, semaphores: Semaphores) -> list[int]:
    if isinstance(semaphores, Iterable):
        given = [operator.index(s) for s in semaphores]
    else:
        given = [operator.index(semaphores)]
    if len(given) > 2:
        raise ValueError(f"{what} must name at most 2 semaphores, not {len(given)}")
    for s in given:
        if not 0 <= s < isa.SEMAPHORES:
            raise ValueError(
                f"{what} must name semaphores from 0 to {isa.SEMAPHORES - 1}, not {s!r}"
            )
    return given


def operand_keyword(operand: isa.Operand) -> str:
    """Name of `operand` as the builder's keyword."""
    return operand.name + "_" if operand.name in _KEYWORDS else operand.name


def encode_command(
    command: isa.Command, wait: Semaphores, post: Semaphores, values: dict[str, Value]
) -> list[list[int]]:
    """The four beats of an engine command; ValueError names command, operand, value and limit."""
    words = [0] * isa.COMMAND_WORDS
    words[0] = command.opcode
    for what, semaphores in (("wait", wait), ("post", post)):
        for i, s in enumerate(_semaphore_list(f"{command.name}: {what}", semaphores)):
            lo, _ = isa.SYNC_FIELDS[f"{what}{i}"]
            enable, _ = isa.SYNC_FIELDS[f"{what}{i}_en"]
            words[1] |= s << lo | 1 << enable
    operands = {operand_keyword(op): op for op in command.operands}
    for name, value in values.items():
        if name not in operands:
            raise ValueError(
                f"{command.name}: operand must be one of {', '.join(operands)}, not {name!r}"
            )
        op = operands[name]
        if isinstance(value, Reg):
            value = value + 0
        if isinstance(value, Indirect):
            words[op.word] = _encode_indirect(command, op, value)
            words[0] |= 1 << (isa.INDIRECT_LO + op.word)
            continue
        if isinstance(value, float | np.floating):
            if not op.fp32:
                raise ValueError(
                    f"{command.name}: {name} must be an integer or a register, not {value!r}"
                )
            number = fp32_bits(float(value))
        else:
            number = operator.index(value)
        limit = (1 << op.width) - 1
        if not 0 <= number <= limit:
            raise ValueError(f"{command.name}: {name} must be from 0 to {limit}, not {number!r}")
        words[op.word] |= number << op.lo
    return [words[i : i + isa.BEAT_WORDS] for i in range(0, isa.COMMAND_WORDS, isa.BEAT_WORDS)]


def _encode_indirect(command: isa.Command, op: isa.Operand, value: Indirect) -> int:
    if not command.owns_word(op):
        raise ValueError(
            f"{command.name}: {op.name} must be a constant, not {value}: it shares its word"
        )
    limit = 1 << (isa.OFFSET_BITS - 1)
    if not -limit <= value.offset < limit:
        raise ValueError(
            f"{command.name}: offset of {op.name} must be from {-limit} to "
            f"{limit - 1}, not {value.offset!r}"
        )
    return value.index << isa.OFFSET_BITS | value.offset & ((1 << isa.OFFSET_BITS) - 1)


def encode_scalar(opcode: isa.Scalar, fields: dict[str, int]) -> list[int]:
    """The beat of a scalar instruction; `imm` may be negative."""
    words = [int(opcode), 0, 0, 0]
    for name, value in fields.items():
        word, lo, width = isa.SCALAR_FIELDS[name]
        low, high = (-(1 << 31), WORD_MASK) if name == "imm" else (0, (1 << width) - 1)
        if not low <= value <= high:
            raise ValueError(f"{opcode.name}: {name} must be from {low} to {high}, not {value!r}")
        words[word] |= (value & ((1 << width) - 1)) << lo
    return words


class Program:
    """Builds a program in order; every instruction method returns the beat it was placed at.

    Each engine command is a method of its lower-case name with the operands as keywords (missing
    ones are 0), for example `p.matmul(act_addr=row + 64, m=1, wait=(a, b), post=c)`. Values are
    integers, enums, semaphores, floats where the operand may be an FP32 immediate, or
    `register + offset` where the operand has a word of its own. SEND's operand `post` is the
    keyword `post_`.
    """

    def __init__(self) -> None:
        self._beats: list[list[int]] = []
        self._labels: dict[str, int] = {}
        self._branches: list[tuple[int, str]] = []
        self._registers: dict[str, Reg] = {}
        self._semaphores: dict[str, Semaphore] = {}
        self._free_registers = iter(range(1, isa.REGISTERS))
        first_remote = isa.SEMAPHORES - isa.REMOTE_SEMAPHORES
        self._free_local = iter(range(first_remote))
        self._free_remote = iter(range(first_remote, isa.SEMAPHORES))
        self._loops = 0

    def __len__(self) -> int:
        """Beats so far, which is the beat address of the next instruction."""
        return len(self._beats)

    def __getattr__(self, name: str) -> Callable[..., int]:
        command = _MNEMONICS.get(name)
        if command is None:
            raise AttributeError(f"Program has no instruction {name!r}")

        def emit(*, wait: Semaphores = (), post: Semaphores = (), **operands: Value) -> int:
            return self.command(command, wait=wait, post=post, **operands)

        return emit

    # Names.

    def reg(self, name: str) -> Reg:
        """The register of that name, allocated at its first use."""
        if name not in self._registers:
            index = next(self._free_registers, None)
            if index is None:
                raise ValueError(
                    f"registers must be at most {isa.REGISTERS - 1}, no room for {name!r}"
                )
            self._registers[name] = Reg(index, name)
        return self._registers[name]

    def semaphore(self, name: str) -> Semaphore:
        """The tile's own semaphore of that name, allocated at its first use."""
        return self._semaphore(
            name, self._free_local, "semaphores", isa.SEMAPHORES - isa.REMOTE_SEMAPHORES
        )

    def remote_semaphore(self, name: str) -> Semaphore:
        """A semaphore that other tiles post.

        The same order of first uses gives the same numbers in every tile.
        """
        return self._semaphore(name, self._free_remote, "remote semaphores", isa.REMOTE_SEMAPHORES)

    def _semaphore(self, name: str, free: Iterator[int], what: str, count: int) -> Semaphore:
        if name in self._semaphores:
            known = self._semaphores[name]
            if (known.index >= isa.SEMAPHORES - isa.REMOTE_SEMAPHORES) != (what[0] == "r"):
                raise ValueError(f"name must not be both local and remote, not {name!r}")
            return known
        index = next(free, None)
        if index is None:
            raise ValueError(f"{what} must be at most {count}, no room for {name!r}")
        self._semaphores[name] = Semaphore(index, name)
        return self._semaphores[name]

    def label(self, name: str) -> str:
        """Names the next instruction's beat as a branch target; branches may come before it."""
        if name in self._labels:
            raise ValueError(f"label must be new, not {name!r}")
        self._labels[name] = len(self)
        return name

    # Instructions.

    def command(
        self,
        command: isa.Command,
        *,
        wait: Semaphores = (),
        post: Semaphores = (),
        **operands: Value,
    ) -> int:
        """An engine command that takes `wait` before it starts and posts `post` when complete."""
        at = len(self)
        self._beats += encode_command(command, wait, post, operands)
        return at

    def post_after(self, at: int, semaphore: Semaphore | int) -> None:
        """Makes the engine command placed at beat `at` post one more semaphore when complete."""
        (index,) = _semaphore_list("post_after", (semaphore,))
        word = self._beats[at][1]
        for slot in ("post0", "post1"):
            lo, _ = isa.SYNC_FIELDS[slot]
            enable, _ = isa.SYNC_FIELDS[f"{slot}_en"]
            if not word >> enable & 1:
                self._beats[at][1] = word | index << lo | 1 << enable
                return
        raise ValueError(f"command at beat {at} must post at most 2 semaphores, not 3")

    def posts_free(self, at: int) -> bool:
        """Whether the engine command placed at beat `at` can post one more semaphore."""
        word = self._beats[at][1]
        return not all(word >> isa.SYNC_FIELDS[f"post{i}_en"][0] & 1 for i in range(2))

    def scalar(self, opcode: isa.Scalar, **fields: int) -> int:
        """A scalar instruction by its fields."""
        unknown = set(fields) - set(isa.SCALAR_USES[opcode])
        if unknown:
            raise ValueError(
                f"{opcode.name}: fields must be among "
                f"{isa.SCALAR_USES[opcode]}, not {sorted(unknown)}"
            )
        at = len(self)
        self._beats.append(encode_scalar(opcode, fields))
        return at

    def _alu(self, opcode: isa.Scalar, rd: Reg, rs: Reg, rt: Reg, imm: int) -> int:
        return self.scalar(opcode, rd=rd.index, rs=rs.index, rt=rt.index, imm=operator.index(imm))

    def li(self, rd: Reg, value: Number) -> int:
        """rd = value; a float gives the bits of its FP32."""
        number = fp32_bits(float(value)) if isinstance(value, float | np.floating) else value
        return self._alu(isa.Scalar.ADD, rd, ZERO, ZERO, operator.index(number))

    def move(self, rd: Reg, rs: Reg) -> int:
        """rd = rs"""
        return self._alu(isa.Scalar.ADD, rd, rs, ZERO, 0)

    def add(self, rd: Reg, rs: Reg, rt: Reg = ZERO, imm: int = 0) -> int:
        """rd = rs + rt + imm"""
        return self._alu(isa.Scalar.ADD, rd, rs, rt, imm)

    def sub(self, rd: Reg, rs: Reg, rt: Reg = ZERO, imm: int = 0) -> int:
        """rd = rs - rt - imm"""
        return self._alu(isa.Scalar.SUB, rd, rs, rt, imm)

    def mul(self, rd: Reg, rs: Reg, rt: Reg = ZERO, imm: int = 0) -> int:
        """rd = low word of rs * (rt + imm)"""
        return self._alu(isa.Scalar.MUL, rd, rs, rt, imm)

    def and_(self, rd: Reg, rs: Reg, rt: Reg = ZERO, imm: int = 0) -> int:
        """rd = rs & (rt + imm)"""
        return self._alu(isa.Scalar.AND, rd, rs, rt, imm)

    def shl(self, rd: Reg, rs: Reg, rt: Reg = ZERO, imm: int = 0) -> int:
        """rd = rs << (rt + imm); amounts of 32 and more give 0"""
        return self._alu(isa.Scalar.SHL, rd, rs, rt, imm)

    def shr(self, rd: Reg, rs: Reg, rt: Reg = ZERO, imm: int = 0) -> int:
        """rd = rs >> (rt + imm), logical"""
        return self._alu(isa.Scalar.SHR, rd, rs, rt, imm)

    def wrap(self, rd: Reg, rs: Reg, rt: Reg = ZERO, imm: int = 0) -> int:
        """rd = rs + 1, or 0 when that equals rt + imm (the ring's length)"""
        return self._alu(isa.Scalar.WRAP, rd, rs, rt, imm)

    def load(self, rd: Reg, rs: Reg = ZERO, imm: int = 0) -> int:
        """rd = the 32-bit word of tile SRAM at byte address rs + imm, a multiple of 4"""
        return self.scalar(isa.Scalar.LOAD, rd=rd.index, rs=rs.index, imm=operator.index(imm))

    def _branch(self, opcode: isa.Scalar, rs: Reg, rt: Reg, target: Target) -> int:
        if isinstance(target, str):
            self._branches.append((len(self), target))
            imm = 0
        else:
            imm = operator.index(target)
        return self.scalar(opcode, rs=rs.index, rt=rt.index, imm=imm)

    def beq(self, rs: Reg, rt: Reg, target: Target) -> int:
        """To the label, or absolute beat, `target` if rs == rt"""
        return self._branch(isa.Scalar.BEQ, rs, rt, target)

    def bne(self, rs: Reg, rt: Reg, target: Target) -> int:
        """To the label, or absolute beat, `target` if rs != rt"""
        return self._branch(isa.Scalar.BNE, rs, rt, target)

    def blt(self, rs: Reg, rt: Reg, target: Target) -> int:
        """To the label, or absolute beat, `target` if rs < rt, signed"""
        return self._branch(isa.Scalar.BLT, rs, rt, target)

    def jump(self, target: Target) -> int:
        """To the label, or absolute beat, `target`"""
        return self.beq(ZERO, ZERO, target)

    def wait(self, semaphore: Semaphore | int) -> int:
        """Wait until the semaphore is not zero and take one."""
        return self._sync(isa.Scalar.WAIT, semaphore)

    def post(self, semaphore: Semaphore | int) -> int:
        """Add one to the semaphore."""
        return self._sync(isa.Scalar.POST, semaphore)

    def _sync(self, opcode: isa.Scalar, semaphore: Semaphore | int) -> int:
        (index,) = _semaphore_list(opcode.name, (semaphore,))
        return self.scalar(opcode, imm=index)

    def fence(self) -> int:
        """Wait until every engine is idle and its queue empty."""
        return self.scalar(isa.Scalar.FENCE)

    def halt(self) -> int:
        """Wait until every engine is idle, then stop with DONE."""
        return self.scalar(isa.Scalar.HALT)

    @contextmanager
    def loop(self, counter: Reg, count: int | Reg) -> Iterator[Reg]:
        """Runs the body `count` times, at least once; `counter` counts the passes left down to 1.

        Costs 2 cycles before and 5 per pass; the body must leave `counter` alone.
        """
        if counter.index == 0:
            raise ValueError("counter must be from 1 on, not register 0")
        if isinstance(count, Reg):
            self.move(counter, count)
        else:
            if not 1 <= operator.index(count) <= WORD_MASK:
                raise ValueError(f"count must be from 1 to {WORD_MASK}, not {count!r}")
            self.li(counter, count)
        top = self.label(f"loop.{self._loops}")
        self._loops += 1
        yield counter
        self.sub(counter, counter, imm=1)
        self.bne(counter, ZERO, top)

    # Output.

    def raw(self, words: Sequence[int]) -> int:
        """A beat as it is: data in program memory, or what no other method can express."""
        if len(words) != isa.BEAT_WORDS or not all(0 <= w <= WORD_MASK for w in words):
            raise ValueError(f"words must be {isa.BEAT_WORDS} words of 32 bits, not {words!r}")
        at = len(self)
        self._beats.append([int(w) for w in words])
        return at

    def assemble(self, base: int = 0) -> np.ndarray:
        """uint32 [beats, 4] of the program when its first beat stands at beat address `base`.

        ValueError for a branch to a label that is not defined.
        """
        if base < 0:
            raise ValueError(f"base must be at least 0, not {base!r}")
        out = np.array(self._beats, dtype=np.uint32).reshape(-1, isa.BEAT_WORDS)
        word, _, _ = isa.SCALAR_FIELDS["imm"]
        for at, name in self._branches:
            if name not in self._labels:
                raise ValueError(f"label must be one of {', '.join(self._labels)}, not {name!r}")
            out[at, word] = base + self._labels[name]
        return out


def _format(value: int, width: int) -> str:
    return hex(value) if width == 32 else str(value)


def _decode_command(words: Sequence[int]) -> str | None:
    """Text of an engine command, or None when the text could not give the same words."""
    command = isa.BY_OPCODE.get(words[0] & ((1 << isa.OPCODE_BITS) - 1))
    if command is None:
        return None
    parts = [command.name.lower()]
    values: dict[str, Value] = {}
    for op in command.operands:
        value: int | Indirect
        if words[0] >> (isa.INDIRECT_LO + op.word) & 1:
            offset = words[op.word] & ((1 << isa.OFFSET_BITS) - 1)
            offset -= (offset >> (isa.OFFSET_BITS - 1)) << isa.OFFSET_BITS
            value = Indirect(words[op.word] >> isa.OFFSET_BITS, offset)
            text = str(value)
        else:
            value = words[op.word] >> op.lo & ((1 << op.width) - 1)
            text = _format(value, op.width)
            if value == 0:
                continue
        values[operand_keyword(op)] = value
        parts.append(f"{operand_keyword(op)}={text}")
    sync: dict[str, list[Semaphore]] = {}
    for what in _KEYWORDS:
        sync[what] = [
            Semaphore(words[1] >> isa.SYNC_FIELDS[f"{what}{i}"][0] & (isa.SEMAPHORES - 1))
            for i in range(2)
            if words[1] >> isa.SYNC_FIELDS[f"{what}{i}_en"][0] & 1
        ]
        if sync[what]:
            parts.append(f"{what}={','.join(map(str, sync[what]))}")
    try:
        beats = encode_command(command, sync["wait"], sync["post"], values)
    except ValueError:
        return None
    return " ".join(parts) if sum(beats, []) == list(words) else None


def _decode_scalar(words: Sequence[int]) -> str | None:
    if words[0] not in isa.Scalar._value2member_map_:
        return None
    opcode = isa.Scalar(words[0])
    parts = [opcode.name.lower()]
    fields: dict[str, int] = {}
    for name in isa.SCALAR_USES[opcode]:
        word, lo, width = isa.SCALAR_FIELDS[name]
        value = words[word] >> lo & ((1 << width) - 1)
        fields[name] = value
        if name != "imm":
            parts.append(f"{name}=r{value}")
        else:
            parts.append(f"imm={value - (value >> 31 << 32)}")
    return " ".join(parts) if encode_scalar(opcode, fields) == list(words) else None


def disassemble(beats: np.ndarray) -> list[str]:
    """One line per instruction of uint32 [beats, 4]; `assemble_text` gives the same beats back.

    What is no valid encoding becomes `.beat` lines with the four words.
    """
    words = np.asarray(beats, dtype=np.uint32)
    if words.ndim != 2 or words.shape[1] != isa.BEAT_WORDS:
        raise ValueError(f"beats must be [beats, {isa.BEAT_WORDS}], not {words.shape}")
    rows = [[int(w) for w in row] for row in words]
    lines = []
    at = 0
    while at < len(rows):
        text = _decode_scalar(rows[at])
        length = 1
        if text is None and at + isa.COMMAND_BEATS <= len(rows):
            text = _decode_command(sum(rows[at : at + isa.COMMAND_BEATS], []))
            length = isa.COMMAND_BEATS
        if text is None:
            text = ".beat " + " ".join(f"0x{w:08x}" for w in rows[at])
            length = 1
        lines.append(text)
        at += length
    return lines


_INDIRECT_TEXT = re.compile(r"r(\d+)(?:([+-]\d+))?")


def _parse_value(text: str) -> Value:
    match = _INDIRECT_TEXT.fullmatch(text)
    if match:
        return Reg(int(match[1])) + int(match[2] or 0)
    return int(text, 0)


def _parse_semaphores(text: str) -> list[int]:
    return [int(part.removeprefix("s")) for part in text.split(",")]


def _parse_line(p: Program, line: str) -> None:
    name, *rest = line.split()
    if name.endswith(":") and not rest:
        p.label(name[:-1])
        return
    if name == ".beat":
        p.raw([int(word, 0) for word in rest])
        return
    arguments: dict[str, str] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals or key in arguments:
            raise ValueError(f"argument must be one name=value per name, not {part!r}")
        arguments[key] = value
    if name in _MNEMONICS:
        wait, post = (
            _parse_semaphores(arguments.pop(key)) if key in arguments else [] for key in _KEYWORDS
        )
        values = {key: _parse_value(value) for key, value in arguments.items()}
        p.command(_MNEMONICS[name], wait=wait, post=post, **values)
        return
    if name.upper() not in isa.Scalar.__members__:
        raise ValueError(f"instruction must be one of the instruction set's, not {name!r}")
    opcode = isa.Scalar[name.upper()]
    fields: dict[str, Any] = {
        key: int(value.removeprefix("r") if key != "imm" else value, 0)
        for key, value in arguments.items()
        if not (key == "imm" and value[:1].isalpha())
    }
    target = arguments.get("imm", "")
    if target[:1].isalpha():
        if opcode not in (isa.Scalar.BEQ, isa.Scalar.BNE, isa.Scalar.BLT):
            raise ValueError(f"{opcode.name}: imm must be a number, not {target!r}")
        p._branch(opcode, Reg(fields.get("rs", 0)), Reg(fields.get("rt", 0)), target)
    else:
        p.scalar(opcode, **fields)


def assemble_text(lines: Iterable[str]) -> np.ndarray:
    """uint32 [beats, 4] of lines like those of `disassemble`.

    `name:` is a label, which a branch's `imm` may name; `#` starts a comment. ValueError tells
    the line.
    """
    p = Program()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            _parse_line(p, text)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return p.assemble()
