# SPDX-License-Identifier: Apache-2.0
"""Writes docs/isa.md from the tables of `hw.isa`: `python -m sim.isa_doc`."""

from enum import IntEnum
from pathlib import Path

from golden.formats import Format
from hw import isa
from sim.assembler import operand_keyword

PATH = Path(__file__).resolve().parent.parent / "docs" / "isa.md"
_ENUMS: tuple[type[IntEnum], ...] = (
    Format,
    isa.Init,
    isa.Kind,
    isa.Select,
    isa.Op1,
    isa.Function,
    isa.Reduce,
    isa.Direction,
    isa.CollectiveOp,
    isa.Scope,
    isa.Engine,
    isa.Status,
    isa.Activity,
)


def _table(*rows: tuple[object, ...]) -> list[str]:
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:], ""]


def _bits(lo: int, width: int) -> str:
    return str(lo) if width == 1 else f"{lo + width - 1}..{lo}"


def _scalar_section() -> list[str]:
    fields = [
        (name, word, _bits(lo, width)) for name, (word, lo, width) in isa.SCALAR_FIELDS.items()
    ]
    ops = [
        (op.value, f"`{op.name}`", ", ".join(isa.SCALAR_USES[op]) or "none", isa.SCALAR_DOCS[op])
        for op in isa.Scalar
    ]
    return [
        "## Scalar instructions",
        "",
        "One beat: word 0 is the opcode alone. Fields that an instruction does not use are 0.",
        "",
        *_table(("field", "word", "bits"), *fields),
        *_table(("opcode", "name", "fields", "effect"), *ops),
    ]


def _command_section(command: isa.Command) -> list[str]:
    rows = [
        (
            f"`{operand_keyword(op)}`",
            op.word,
            _bits(op.lo, op.width),
            "yes" if command.owns_word(op) else "no",
            op.doc,
        )
        for op in sorted(command.operands, key=lambda op: (op.word, op.lo))
    ]
    return [
        f"### {command.name}",
        "",
        f"Opcode {command.opcode}, engine {command.engine.name}. {command.doc}",
        "",
        *_table(("operand", "word", "bits", "indirect", "meaning"), *rows),
    ]


def markdown() -> str:
    """The whole text of docs/isa.md."""
    first_remote = isa.SEMAPHORES - isa.REMOTE_SEMAPHORES
    sync = [(f"`{name}`", _bits(lo, width)) for name, (lo, width) in isa.SYNC_FIELDS.items()]
    lines = [
        "# Instruction set",
        "",
        "Generated from `hw/isa.py` by `python -m sim.isa_doc`; do not edit.",
        "",
        (isa.__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[0],
        "",
        f"There are {isa.REGISTERS} registers of 32 bits; register 0 reads as zero. There are "
        f"{isa.SEMAPHORES} semaphores that count to {isa.SEMAPHORE_MAX}; other tiles may post "
        f"{first_remote} to {isa.SEMAPHORES - 1}, so that waiting for one of these is no "
        "deadlock.",
        "",
        *_scalar_section(),
        "## Engine commands",
        "",
        "An engine's commands run in order. A command starts when the semaphores `wait0` and "
        "`wait1` can both be taken, at once; when all its effects are visible it adds one to "
        "`post0` and `post1`. Word 1:",
        "",
        *_table(("field", "bits"), *sync),
        "The builder (`sim/assembler.py`) takes operands by the names below; `wait` and `post` "
        "are its keywords for word 1.",
        "",
    ]
    for command in isa.COMMANDS:
        lines += _command_section(command)
    lines += ["## Codes", ""]
    for enum in _ENUMS:
        lines += [
            f"### {enum.__name__}",
            "",
            *_table(("code", "name"), *((item.value, item.name) for item in enum)),
        ]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    PATH.write_text(markdown(), encoding="utf-8")
