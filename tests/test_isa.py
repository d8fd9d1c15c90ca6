# SPDX-License-Identifier: Apache-2.0
"""The instruction set's tables, the program builder, assembler and disassembler, docs/isa.md."""

import numpy as np
import pytest

from hw import isa
from sim import isa_doc
from sim.assembler import ZERO, Program, Reg, assemble_text, disassemble


def test_tables_are_consistent():
    assert [c.opcode for c in isa.COMMANDS] == list(range(32, 32 + len(isa.COMMANDS)))
    assert {c.engine for c in isa.COMMANDS} == set(isa.Engine)
    for command in isa.COMMANDS:
        used = {}
        for op in command.operands:
            assert 2 <= op.word < isa.COMMAND_WORDS and op.lo + op.width <= 32
            bits = ((1 << op.width) - 1) << op.lo
            assert not used.get(op.word, 0) & bits, (command.name, op.name)
            used[op.word] = used.get(op.word, 0) | bits
        for word, bits in used.items():
            assert command.owned_bits(word) == bits
        names = [op.name for op in command.operands]
        assert len(set(names)) == len(names)
    # Operands of equal name that one engine gets have one place.
    for commands in isa.BY_ENGINE.values():
        places: dict[str, tuple[int, int, int]] = {}
        for op in (op for command in commands for op in command.operands):
            assert places.setdefault(op.name, (op.word, op.lo, op.width)) == (
                op.word,
                op.lo,
                op.width,
            )
        assert "code" not in places
    assert set(isa.SCALAR_USES) == set(isa.SCALAR_DOCS) == set(isa.Scalar)
    taken = 0
    for lo, width in isa.SYNC_FIELDS.values():
        bits = ((1 << width) - 1) << lo
        assert not taken & bits
        taken |= bits
    assert taken == (1 << isa.SYNC_LAYOUT.size) - 1
    # The sequencer copies word 1 into the layout as it is.
    for name, (lo, width) in isa.SYNC_FIELDS.items():
        assert (isa.SYNC_LAYOUT[name].offset, isa.SYNC_LAYOUT[name].width) == (lo, width)


def test_document_is_up_to_date():
    assert isa_doc.PATH.read_text(encoding="utf-8") == isa_doc.markdown()


def test_encoding_of_a_command():
    p = Program()
    p.topk(score_addr=Reg(3) - 16, count=32, k=4, ids_addr=0x100, wait=(1, 30), post=7)
    beats = p.assemble()
    assert beats.dtype == np.uint32 and beats.shape == (4, 4)
    flat = [int(w) for w in beats.reshape(-1)]
    assert flat[0] == 34 | 1 << (8 + 2)
    assert flat[1] == 1 | 1 << 5 | 30 << 6 | 1 << 11 | 7 << 12 | 1 << 17
    assert flat[2:7] == [3 << 27 | (1 << 27) - 16, 32, 4, 0x100, 0]
    p = Program()
    p.vector(b_addr=-1.5, d_addr=np.float32(0.1), a_stride=7, out_format=7)
    flat = p.assemble().reshape(-1)
    assert flat[5] == 0xBFC0_0000 and flat[6] == 0x3DCC_CCCD and flat[9] == 7 and flat[2] == 7 << 9


def test_encoding_of_scalars_and_labels():
    p = Program()
    x, y = p.reg("x"), p.reg("y")
    assert (x.index, y.index, p.reg("x")) == (1, 2, x)
    p.add(x, y, x, imm=-1)
    p.beq(x, y, "end")
    with p.loop(y, 3):
        p.load(x, y, imm=8)
    p.label("end")
    p.halt()
    beats = p.assemble(base=100)
    assert beats[0].tolist() == [1, 1 | 2 << 5 | 1 << 10, 0xFFFF_FFFF, 0]
    assert beats[1].tolist() == [9, 1 << 5 | 2 << 10, 106, 0]
    assert beats[5].tolist() == [10, 2 << 5, 103, 0]
    p = Program()
    p.li(Reg(4), 1.0)
    assert p.assemble()[0].tolist() == [1, 4, 0x3F80_0000, 0]


@pytest.mark.parametrize(
    "act,message",
    [
        (lambda p: p.topk(sale=1), "TOPK: operand must be one of score_addr, .*, not 'sale'"),
        (lambda p: p.topk(k=256), "TOPK: k must be from 0 to 255, not 256"),
        (lambda p: p.topk(k=-1), "TOPK: k must be from 0 to 255, not -1"),
        (lambda p: p.topk(score_addr=1.0), "TOPK: score_addr must be an integer or a register"),
        (lambda p: p.vector(a_stride=Reg(1)), "VECTOR: a_stride must be a constant, not r1"),
        (
            lambda p: p.topk(score_addr=Reg(1) + (1 << 26)),
            "TOPK: offset of score_addr must be from",
        ),
        (lambda p: p.topk(wait=(1, 2, 3)), "TOPK: wait must name at most 2 semaphores, not 3"),
        (lambda p: p.topk(post=32), "TOPK: post must name semaphores from 0 to 31, not 32"),
        (lambda p: p.add(ZERO, ZERO, imm=1 << 32), "ADD: imm must be from"),
        (lambda p: p.wait(32), "WAIT must name semaphores"),
        (lambda p: (p.label("a"), p.label("a")), "label must be new, not 'a'"),
        (lambda p: (p.jump("a"), p.assemble()), "label must be one of"),
        (lambda p: [p.reg(str(i)) for i in range(32)], "registers must be at most 31"),
        (lambda p: [p.semaphore(str(i)) for i in range(25)], "semaphores must be at most 24"),
        (lambda p: [p.remote_semaphore(str(i)) for i in range(9)], "remote semaphores must be at"),
        (lambda p: (p.semaphore("s"), p.remote_semaphore("s")), "not be both local and remote"),
        (lambda p: p.loop(Reg(1), 0).__enter__(), "count must be from 1"),
        (lambda p: p.raw([1, 2, 3]), "words must be 4 words"),
        (lambda p: Reg(32), "register must be from 0 to 31, not 32"),
    ],
)
def test_errors(act, message):
    with pytest.raises(ValueError, match=message):
        act(Program())


def test_unknown_instruction():
    with pytest.raises(AttributeError, match="no instruction 'matmull'"):
        Program().matmull()


def random_program(rng) -> Program:
    p = Program()
    for _ in range(40):
        kind = rng.random()
        if kind < 0.5:
            command = isa.COMMANDS[rng.integers(len(isa.COMMANDS))]
            values = {}
            for op in command.operands:
                name = "post_" if op.name == "post" else op.name
                if command.owns_word(op) and rng.random() < 0.3:
                    values[name] = Reg(int(rng.integers(32))) + int(
                        rng.integers(-(1 << 26), 1 << 26)
                    )
                elif rng.random() < 0.7:
                    values[name] = int(rng.integers(1 << op.width))
            semaphores = rng.integers(32, size=(2, 2)).tolist()
            p.command(
                command,
                wait=semaphores[0][: rng.integers(3)],
                post=semaphores[1][: rng.integers(3)],
                **values,
            )
        elif kind < 0.9:
            opcode = isa.Scalar(int(rng.integers(len(isa.Scalar))))
            p.scalar(
                opcode,
                **{
                    f: int(rng.integers(1 << isa.SCALAR_FIELDS[f][2]))
                    for f in isa.SCALAR_USES[opcode]
                },
            )
        else:
            p.raw([int(w) for w in rng.integers(1 << 32, size=4)])
    return p


@pytest.mark.parametrize("seed", range(20))
def test_disassembly_assembles_back(seed):
    print("seed", seed)
    beats = random_program(np.random.default_rng(seed)).assemble()
    lines = disassemble(beats)
    assert len(lines) < len(beats)
    assert (assemble_text(lines) == beats).all()


def test_disassembly_of_anything():
    rng = np.random.default_rng(7)
    beats = rng.integers(1 << 32, size=(400, 4), dtype=np.uint32)
    beats[:, 0] %= 64
    assert (assemble_text(disassemble(beats)) == beats).all()
    # An enabled second semaphore without the first has no text of its own.
    words = np.zeros((4, 4), np.uint32)
    words[0, 0], words[0, 1] = 34, 1 << 11
    lines = disassemble(words)
    assert lines[0].startswith(".beat") and (assemble_text(lines) == words).all()


def test_text():
    beats = assemble_text(
        [
            "# ring of 4",
            "add rd=r1 imm=0x10",
            "again:",
            "topk score_addr=r1-16 k=4 wait=s1,s2",
            "wrap rd=r1 rs=r1 imm=4",
            "bne rs=r1 imm=again  # once more",
            "halt",
        ]
    )
    p = Program()
    p.li(Reg(1), 16)
    p.label("again")
    p.topk(score_addr=Reg(1) - 16, k=4, wait=(1, 2))
    p.wrap(Reg(1), Reg(1), imm=4)
    p.bne(Reg(1), ZERO, "again")
    p.halt()
    assert (beats == p.assemble()).all()
    for bad, message in (
        ("frob", "line 2: instruction must be"),
        ("topk k", "line 2: argument"),
        ("topk k=999", "line 2: TOPK: k must be"),
        ("wait rd=r1", "line 2: WAIT: fields"),
    ):
        with pytest.raises(ValueError, match=message):
            assemble_text(["halt", bad])
