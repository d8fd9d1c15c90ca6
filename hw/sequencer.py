# SPDX-License-Identifier: Apache-2.0
"""The tile's sequencer: fetches the program, runs scalar instructions, issues engine commands."""

from collections.abc import Sequence

from amaranth import Array, Cat, Module, Mux, ResetInserter, Signal
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

from hw import isa
from hw.command_queue import queue_status
from hw.config import TileConfig
from hw.ports import LINE_BITS, SramClient
from hw.semaphores import ENGINE_BITS, ID_BITS, POST_ONE, TakeRequest
from hw.sram import Sram1R1W
from hw.trace import BEAT

WORD = 32
_SCALAR_OPS = tuple(isa.Scalar)
_BRANCHES = (isa.Scalar.BEQ, isa.Scalar.BNE, isa.Scalar.BLT)
_SEMAPHORE_OPS = (isa.Scalar.WAIT, isa.Scalar.POST)


def pc_bits(config: TileConfig) -> int:
    """Width of a beat address; the address past the last beat is one of its values."""
    return config.program_beats.bit_length()


def _scalar_mask(opcode: isa.Scalar, word: int) -> int:
    """Bits of `word` that the instruction `opcode` may set."""
    mask = 0
    for name in isa.SCALAR_USES[opcode]:
        field_word, lo, width = isa.SCALAR_FIELDS[name]
        if field_word == word:
            mask |= ((1 << width) - 1) << lo
    if word == isa.SCALAR_FIELDS["imm"][0] and opcode in _SEMAPHORE_OPS:
        mask = isa.SEMAPHORES - 1
    return mask


class Sequencer(wiring.Component):
    """In-order processor of `hw.isa` programs for one tile.

    Two stages: a beat is read from program memory and its registers from the register file (1),
    then it is executed (2). An engine command takes one cycle per beat, 4 cycles, without a gap
    to what is before and behind; scalar instructions take 2 cycles, MUL 3, a taken branch 3, LOAD
    2 and the tile SRAM's latency. A command is offered to its queue in the cycle after its last
    beat; while its queue is full the next command waits at its first beat. The registers keep
    their contents over `reset` and are undefined at power-up; register 0 reads as zero.

    Parameters
    ----------
    config : the tile; `program_beats` is used.
    engines : engines there are; a command for another one is illegal.

    Members
    -------
    program_write_en, program_addr, program_write_data : write of a beat, at any time.
    program_read_en, program_read_data : read of beat `program_addr`, data in the next cycle; only
        while not `running`.
    start, start_pc, cycle_limit : a pulse starts the program when the status is IDLE or DONE, else
        it is ignored; the limit counts cycles since start, 0 means none.
    reset : back to IDLE, everything but memory and registers forgotten.
    status, status_engine, status_pc, status_semaphore : why the tile stopped, the engine
        (`isa.ENGINE_NONE`: the sequencer) and the beat address of the command; the semaphore of
        SEMAPHORE_OVERFLOW.
    cycles : cycles of the run so far, or of the last one.
    running : the status is RUNNING. started : a `start` is taken in this cycle.
    load : tile SRAM, for LOAD.
    take, post : semaphores, for WAIT and POST.
    issue_<engine> : `isa.queue_entry` streams to the queues; all share one payload register.
    queue : one `queue_status` per engine.
    overflow, overflow_semaphore, overflow_engine : from the semaphores.
    network_active : something is on its way to this tile; holds back the deadlock status.
    trace : `hw.trace.BEAT`.

    The first reason to stop in time wins; in one cycle: failed engines in order, semaphore
    overflow, the sequencer's own instruction, cycle limit, deadlock. After a stop no command leaves
    the queues (`running` drives their `run`); what is in flight finishes.
    Status.DEADLOCK: the sequencer waits (WAIT for a local semaphore, FENCE, HALT, or a full
    queue) and every queue is `stuck`.
    """

    def __init__(self, config: TileConfig, engines: Sequence[isa.Engine]):
        if not engines or len(set(engines)) != len(engines):
            raise ValueError(f"engines must be different ones, not {engines!r}")
        self.config = config
        self.engines = tuple(engines)
        self.pc_bits = pc_bits(config)
        super().__init__(
            {
                "program_write_en": In(1),
                "program_addr": In(range(config.program_beats)),
                "program_write_data": In(LINE_BITS),
                "program_read_en": In(1),
                "program_read_data": Out(LINE_BITS),
                "start": In(1),
                "start_pc": In(self.pc_bits),
                "cycle_limit": In(32),
                "reset": In(1),
                "status": Out(isa.Status),
                "status_engine": Out(ENGINE_BITS),
                "status_pc": Out(self.pc_bits),
                "status_semaphore": Out(ID_BITS),
                "cycles": Out(32),
                "running": Out(1),
                "started": Out(1),
                "load": Out(SramClient(1)),
                "take": Out(TakeRequest()),
                "post": Out(POST_ONE),
                "queue": In(queue_status(self.pc_bits)).array(len(self.engines)),
                "overflow": In(1),
                "overflow_semaphore": In(ID_BITS),
                "overflow_engine": In(ENGINE_BITS),
                "network_active": In(1),
                "trace": Out(BEAT),
            }
            | {
                f"issue_{e.name.lower()}": Out(
                    stream.Signature(isa.queue_entry(isa.BY_ENGINE[e], self.pc_bits))
                )
                for e in self.engines
            }
        )

    def elaborate(self, platform):
        m = Module()
        beats = self.config.program_beats
        m.submodules.program = program = Sram1R1W(LINE_BITS, beats)
        m.submodules.registers = registers = memory.Memory(shape=WORD, depth=isa.REGISTERS, init=[])
        write = registers.write_port()
        reads = [registers.read_port(domain="comb") for _ in range(isa.BEAT_WORDS)]

        pc = Signal(self.pc_bits)  # next beat to fetch
        d_valid = Signal()  # the memory's output is the beat at d_pc
        d_pc = Signal(self.pc_bits)
        d_take = Signal()  # it goes to execution
        d_past = Signal()  # there is no such beat
        d_index = Signal(range(isa.COMMAND_BEATS))  # which beat of an instruction it is
        x_valid = Signal()  # a beat is executed
        x_scalar = Signal()
        x_index = Signal(range(isa.COMMAND_BEATS))
        x_pc = Signal(self.pc_bits)  # the instruction's first beat
        x_words = [Signal(WORD, name=f"x_word{i}", reset_less=True) for i in range(isa.BEAT_WORDS)]
        x_regs = [Signal(WORD, name=f"x_reg{i}", reset_less=True) for i in range(isa.BEAT_WORDS)]
        x_done = Signal()
        jump = Signal()
        target = Signal(self.pc_bits)
        go = Signal()
        m.d.comb += [
            self.running.eq(self.status == isa.Status.RUNNING),
            self.started.eq(go),
            go.eq(
                self.start & ((self.status == isa.Status.IDLE) | (self.status == isa.Status.DONE))
            ),
        ]

        # Fetch.
        fetch = Signal()
        m.d.comb += [
            fetch.eq(self.running & (~d_valid | d_take) & ~jump),
            d_past.eq(d_pc >= beats),
            program.read_en.eq(Mux(self.running, fetch, self.program_read_en)),
            program.read_addr.eq(Mux(self.running, pc, self.program_addr)),
            program.write_en.eq(self.program_write_en),
            program.write_addr.eq(self.program_addr),
            program.write_data.eq(self.program_write_data),
            self.program_read_data.eq(program.read_data),
        ]
        with m.If(fetch):
            m.d.sync += [d_valid.eq(1), d_pc.eq(pc)]
            with m.If(pc < beats):
                m.d.sync += pc.eq(pc + 1)
        with m.If(jump):
            m.d.sync += [d_valid.eq(0), pc.eq(target)]

        # Registers.
        d_words = [Signal(WORD, name=f"d_word{i}") for i in range(isa.BEAT_WORDS)]
        d_first = Signal()
        d_scalar = Signal()
        m.d.comb += [
            Cat(d_words).eq(program.read_data),
            d_first.eq(d_index == 0),
            d_scalar.eq(d_first & ~d_words[0][isa.OPCODE_BITS - 1]),
            d_take.eq(self.running & d_valid & ~d_past & (~x_valid | (~x_scalar & x_done))),
        ]
        _, rs_lo, rs_width = isa.SCALAR_FIELDS["rs"]
        _, rt_lo, rt_width = isa.SCALAR_FIELDS["rt"]
        for i, read in enumerate(reads):
            index = Signal(range(isa.REGISTERS), name=f"d_register{i}")
            m.d.comb += [index.eq(d_words[i][isa.OFFSET_BITS :]), read.addr.eq(index)]
            with m.If(d_take):
                m.d.sync += [
                    x_words[i].eq(d_words[i]),
                    x_regs[i].eq(Mux(index == 0, 0, read.data)),
                ]
            # Words 0 and 1 of a first beat are never indirect: their ports read rs and rt.
            if i < 2:
                lo, width = ((rs_lo, rs_width), (rt_lo, rt_width))[i]
                with m.If(d_first):
                    m.d.comb += index.eq(d_words[1][lo : lo + width])
        with m.If(d_take):
            m.d.sync += [x_valid.eq(1), x_scalar.eq(d_scalar), x_index.eq(d_index)]
            with m.If(d_first):
                m.d.sync += x_pc.eq(d_pc)
            with m.If(~d_scalar):
                m.d.sync += d_index.eq(d_index + 1)
        with m.Elif(x_done):
            m.d.sync += x_valid.eq(0)

        # Stop reasons of the instruction in execution.
        illegal = Signal()
        out_of_range = Signal()
        halted = Signal()
        waits = Signal()  # for something that only the engines or their posts can bring
        idle = Signal()

        # Engine commands.
        offered = Signal()
        accepted = Signal()
        code = Signal(range(len(isa.COMMANDS)))
        first_code = Signal(isa.OPCODE_BITS)
        code_base = min(isa.BY_OPCODE)
        indirect_field = Signal(isa.COMMAND_WORDS, reset_less=True)
        mask = Signal(isa.COMMAND_WORDS)
        used = {op.word for e in self.engines for c in isa.BY_ENGINE[e] for op in c.operands}
        words = {i: Signal(WORD, name=f"word{i}", reset_less=True) for i in sorted(used | {1})}
        entry_pc = Signal(self.pc_bits, reset_less=True)
        self._offer(m, words, entry_pc, code, offered, accepted)
        m.d.comb += [
            first_code.eq(x_words[0]),
            idle.eq(Cat(q.idle for q in self.queue).all() & ~offered),
            mask.eq(indirect_field),
        ]
        with m.If(accepted):
            m.d.sync += offered.eq(0)

        header_bad = Signal()
        indirect_allowed = Signal(isa.COMMAND_WORDS)
        known = Signal()
        x_code = Signal.like(code)
        m.d.comb += x_code.eq(code)
        with m.If(x_index == 0):
            m.d.comb += [
                mask.eq(x_words[0][isa.INDIRECT_LO :]),
                x_code.eq(first_code - code_base),
            ]
        header_bits = (1 << isa.OPCODE_BITS) - 1 | ((1 << isa.COMMAND_WORDS) - 1) << isa.INDIRECT_LO
        sync_bits = (1 << isa.SYNC_LAYOUT.size) - 1
        with m.Switch(first_code):
            for command in (c for e in self.engines for c in isa.BY_ENGINE[e]):
                with m.Case(command.opcode):
                    m.d.comb += [
                        known.eq(1),
                        indirect_allowed.eq(
                            sum(1 << op.word for op in command.operands if command.owns_word(op))
                        ),
                    ]
        m.d.comb += header_bad.eq(
            ~known
            | (x_words[0] & ~header_bits & 0xFFFF_FFFF).any()
            | (x_words[1] & ~sync_bits & 0xFFFF_FFFF).any()
            | (mask & ~indirect_allowed).any()
        )

        unowned = Signal(isa.BEAT_WORDS)
        for i in range(isa.BEAT_WORDS):
            owned = Signal(WORD, name=f"owned{i}")
            indirect = Signal(name=f"indirect{i}")
            value = Signal(WORD, name=f"value{i}")
            with m.Switch(Cat(x_index, x_code)):
                for number, command in enumerate(isa.COMMANDS):
                    for beat in range(isa.COMMAND_BEATS):
                        word = beat * isa.BEAT_WORDS + i
                        bits = (1 << WORD) - 1 if word < 2 else command.owned_bits(word)
                        with m.Case(number * isa.COMMAND_BEATS + beat):
                            m.d.comb += owned.eq(bits)
            with m.Switch(x_index):
                for beat in range(isa.COMMAND_BEATS):
                    word = beat * isa.BEAT_WORDS + i
                    with m.Case(beat):
                        if word >= 2:
                            m.d.comb += indirect.eq(mask[word])
            m.d.comb += [
                value.eq(
                    Mux(indirect, x_regs[i] + x_words[i][: isa.OFFSET_BITS].as_signed(), x_words[i])
                ),
                unowned[i].eq((value & ~owned).any()),
                self.trace.words[i].eq(value),
            ]
            with m.If(x_valid & ~x_scalar & x_done):
                with m.Switch(x_index):
                    for beat in range(isa.COMMAND_BEATS):
                        word = beat * isa.BEAT_WORDS + i
                        if word in words:
                            with m.Case(beat):
                                m.d.sync += words[word].eq(value)

        with m.If(self.running & x_valid & ~x_scalar):
            with m.If((x_index == 0) & offered & ~accepted):
                m.d.comb += waits.eq(1)
            with m.Else():
                m.d.comb += [
                    illegal.eq(unowned.any() | ((x_index == 0) & header_bad)),
                    x_done.eq(~illegal),
                ]
            with m.If(x_done):
                with m.If(x_index == 0):
                    m.d.sync += [code.eq(x_code), indirect_field.eq(mask), entry_pc.eq(x_pc)]
                with m.If(x_index == isa.COMMAND_BEATS - 1):
                    m.d.sync += offered.eq(1)

        with m.If(self.running & x_valid & x_scalar):
            self._execute(
                m,
                x_words,
                x_regs,
                write,
                idle=idle,
                done=x_done,
                jump=jump,
                target=target,
                illegal=illegal,
                out_of_range=out_of_range,
                halted=halted,
                waits=waits,
            )

        self._control(
            m,
            go=go,
            d_past=d_valid & d_past & (~x_valid | (~x_scalar & x_done)),
            d_pc=d_pc,
            x_pc=x_pc,
            illegal=illegal,
            out_of_range=out_of_range,
            halted=halted,
            waits=waits & ~accepted,
        )
        m.d.comb += [
            self.trace.valid.eq(self.running & x_valid & x_done),
            self.trace.index.eq(x_index),
            self.trace.pc.eq(x_pc),
            self.trace.base.eq(x_regs[0]),
        ]
        with m.If(go):
            m.d.sync += [pc.eq(self.start_pc), d_valid.eq(0), d_index.eq(0), x_valid.eq(0)]
        return ResetInserter(self.reset)(m)

    def _offer(self, m, words, entry_pc, code, offered, accepted) -> None:
        """Drives the issue streams from the gathered `words`, by word number."""
        for engine in self.engines:
            commands = isa.BY_ENGINE[engine]
            port = getattr(self, f"issue_{engine.name.lower()}")
            chosen = Signal(name=f"offer_{engine.name.lower()}")
            codes = [code == isa.COMMANDS.index(command) for command in commands]
            m.d.comb += [
                chosen.eq(offered & Cat(*codes).any()),
                port.valid.eq(chosen),
                port.p.pc.eq(entry_pc),
                port.p.sync.eq(words[1]),
            ]
            if len(commands) > 1:
                for bit in range((len(commands) - 1).bit_length()):
                    with_bit = Cat(*(c for number, c in enumerate(codes) if number >> bit & 1))
                    m.d.comb += port.p.operands.code[bit].eq(with_bit.any())
            for name, op in {op.name: op for c in commands for op in c.operands}.items():
                m.d.comb += getattr(port.p.operands, name).eq(
                    words[op.word][op.lo : op.lo + op.width]
                )
            with m.If(chosen & port.ready):
                m.d.comb += accepted.eq(1)

    def _execute(
        self,
        m,
        words,
        regs,
        write,
        *,
        idle,
        done,
        jump,
        target,
        illegal,
        out_of_range,
        halted,
        waits,
    ) -> None:
        """One scalar instruction, held in `words` and `regs` until `done`."""
        Op = isa.Scalar
        rs, rt, imm = regs[0], regs[1], words[2]
        total = Signal(WORD)  # rt + imm
        address = Signal(WORD)
        taken = Signal()
        multiply = Signal()  # second cycle of MUL
        factor = Signal(WORD, reset_less=True)
        requested = Signal()  # LOAD has been taken by the SRAM
        faulted = Signal()
        result = Signal(WORD)
        writes = Signal()
        shift_out = Signal()
        word1_bits = Signal(WORD)
        word2_bits = Signal(WORD)
        known = Signal()
        bad = Signal()
        _, rd_lo, rd_width = isa.SCALAR_FIELDS["rd"]
        m.d.comb += [
            total.eq(rt + imm),
            address.eq(rs + imm),
            shift_out.eq(total[5:].any()),
            bad.eq(
                ~known
                | (words[1] & ~word1_bits).any()
                | (words[2] & ~word2_bits).any()
                | words[3].any()
            ),
            write.addr.eq(words[1][rd_lo : rd_lo + rd_width]),
            write.data.eq(result),
            write.en.eq(writes),
            self.take.wait0.eq(imm),
            self.take.wait0_en.eq(1),
            self.post.semaphore.eq(imm),
            self.load.request.p.address.eq(address[4:]),
            target.eq(imm),
        ]
        with m.Switch(words[0]):
            for op in _SCALAR_OPS:
                with m.Case(op):
                    m.d.comb += [
                        known.eq(1),
                        word1_bits.eq(_scalar_mask(op, 1)),
                        word2_bits.eq(_scalar_mask(op, 2)),
                    ]
        with m.If(bad):
            m.d.comb += illegal.eq(1)
        with m.Else():
            with m.Switch(words[0][:4]):
                for op, value in (
                    (Op.ADD, rs + total),
                    (Op.SUB, rs - total),
                    (Op.AND, rs & total),
                    (Op.SHL, Mux(shift_out, 0, (rs << total[:5])[:WORD])),
                    (Op.SHR, Mux(shift_out, 0, rs >> total[:5])),
                    (Op.WRAP, Mux((rs + 1)[:WORD] == total, 0, rs + 1)),
                ):
                    with m.Case(op):
                        m.d.comb += [result.eq(value), writes.eq(1), done.eq(1)]
                with m.Case(Op.MUL):
                    m.d.comb += [result.eq(rs * factor), writes.eq(multiply), done.eq(multiply)]
                    m.d.sync += [factor.eq(total), multiply.eq(~multiply)]
                for op, condition in (
                    (Op.BEQ, rs == rt),
                    (Op.BNE, rs != rt),
                    (Op.BLT, rs.as_signed() < rt.as_signed()),
                ):
                    with m.Case(op):
                        m.d.comb += [
                            taken.eq(condition),
                            out_of_range.eq(taken & (imm >= self.config.program_beats)),
                            jump.eq(taken & ~out_of_range),
                            done.eq(~out_of_range),
                        ]
                with m.Case(Op.LOAD):
                    with m.If(address[:2].any()):
                        m.d.comb += illegal.eq(1)
                    with m.Else():
                        m.d.comb += self.load.request.valid.eq(~requested)
                        with m.If(self.load.request.ready):
                            m.d.sync += requested.eq(1)
                        with m.If(self.load.fault):
                            m.d.sync += faulted.eq(1)
                        with m.If(self.load.valid):
                            m.d.comb += [
                                out_of_range.eq(faulted | self.load.fault),
                                done.eq(~out_of_range),
                                writes.eq(done),
                                result.eq(
                                    Array(
                                        self.load.response.data[0].word_select(i, WORD)
                                        for i in range(LINE_BITS // WORD)
                                    )[address[2:4]]
                                ),
                            ]
                            m.d.sync += [requested.eq(0), faulted.eq(0)]
                with m.Case(Op.WAIT):
                    m.d.comb += [
                        self.take.valid.eq(1),
                        done.eq(self.take.grant),
                        waits.eq(self.take.missing_local),
                    ]
                with m.Case(Op.POST):
                    m.d.comb += [self.post.en.eq(1), done.eq(1)]
                with m.Case(Op.FENCE):
                    m.d.comb += [done.eq(idle), waits.eq(~idle)]
                with m.Case(Op.HALT):
                    m.d.comb += [halted.eq(idle), waits.eq(~idle)]

    def _control(self, m, *, go, d_past, d_pc, x_pc, illegal, out_of_range, halted, waits) -> None:
        """Status, and the cycle counter."""
        Status = isa.Status
        status = Signal(Status, init=Status.IDLE)
        next_cycles = Signal(32)
        reason = Signal(Status)  # RUNNING: none
        engine = Signal(ENGINE_BITS)
        where = Signal(self.pc_bits)
        deadlock = Signal()
        m.d.comb += [
            self.status.eq(status),
            next_cycles.eq(self.cycles + 1),
            deadlock.eq(waits & Cat(q.stuck for q in self.queue).all() & ~self.network_active),
            engine.eq(isa.ENGINE_NONE),
            where.eq(x_pc),
        ]
        # Later statements win: lowest priority first.
        with m.If(deadlock):
            m.d.comb += reason.eq(Status.DEADLOCK)
        with m.If((self.cycle_limit != 0) & (next_cycles >= self.cycle_limit)):
            m.d.comb += reason.eq(Status.CYCLE_LIMIT)
        with m.If(d_past):
            m.d.comb += [reason.eq(Status.ADDRESS_RANGE), where.eq(d_pc)]
        with m.If(halted):
            m.d.comb += reason.eq(Status.DONE)
        with m.If(out_of_range):
            m.d.comb += reason.eq(Status.ADDRESS_RANGE)
        with m.If(illegal):
            m.d.comb += reason.eq(Status.ILLEGAL_COMMAND)
        with m.If(illegal | out_of_range | halted):
            m.d.comb += where.eq(x_pc)
        with m.If(self.overflow):
            m.d.comb += [
                reason.eq(Status.SEMAPHORE_OVERFLOW),
                engine.eq(self.overflow_engine),
                where.eq(x_pc),
            ]
            for e, queue in zip(self.engines, self.queue, strict=True):
                with m.If(self.overflow_engine == e):
                    m.d.comb += where.eq(queue.pc)
        for e, queue in reversed(list(zip(self.engines, self.queue, strict=True))):
            with m.If(queue.failed):
                m.d.comb += [reason.eq(queue.reason), engine.eq(e), where.eq(queue.pc)]

        with m.If(self.running):
            m.d.sync += self.cycles.eq(next_cycles)
            with m.If(reason != Status.RUNNING):
                m.d.sync += [
                    status.eq(reason),
                    self.status_engine.eq(engine),
                    self.status_pc.eq(where),
                    self.status_semaphore.eq(self.overflow_semaphore),
                ]
        with m.If(go):
            m.d.sync += [
                status.eq(Status.RUNNING),
                self.cycles.eq(0),
                self.status_engine.eq(0),
                self.status_pc.eq(0),
                self.status_semaphore.eq(0),
            ]
