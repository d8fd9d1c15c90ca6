# SPDX-License-Identifier: Apache-2.0
"""The control side of a tile, against an interpreter of the instruction set."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from hw import isa
from hw.command_processor import CommandProcessor
from hw.config import preset
from hw.sequencer import Sequencer
from sim.assembler import ZERO, Program, Reg
from tests.simulators import BOTH, VERILOG_FIRST, Simulator

CONFIG = replace(preset("tiny").tile, program_beats=512, queue_depth=2)
MASK = 0xFFFF_FFFF
SRAM_WORDS = 64
ENGINES = tuple(isa.Engine)
FEW = (isa.Engine.MATRIX, isa.Engine.VECTOR, isa.Engine.TOPK, isa.Engine.DMA)  # quick to build


@dataclass
class Taken:
    engine: isa.Engine
    cycle: int
    operands: dict[str, int]
    done: int = -1


@dataclass
class Run:
    status: isa.Status
    engine: int
    pc: int
    cycles: int
    semaphore: int
    log: list[Taken] = field(default_factory=list)
    counters: dict[tuple[isa.Engine, isa.Activity], int] = field(default_factory=dict)
    semaphores: list[int] = field(default_factory=list)

    def of(self, engine: isa.Engine) -> list[dict[str, int]]:
        return [t.operands for t in self.log if t.engine == engine]


def run(
    program,
    *,
    seed=0,
    ready=1.0,
    longest=6,
    latency=2,
    sram=(),
    errors=(),
    limit=0,
    engines=FEW,
    remote=(),
    active_until=0,
    start=0,
    steps=20_000,
    freeze=(),
    again=0,
):
    """Runs `program` (several times with a reset between if `again`) and returns the last Run.

    errors: {(engine, its command's number): status}; remote: (cycle, semaphore) posts; freeze:
    engines that never finish a command.
    """
    dut = CommandProcessor(CONFIG, engines)
    beats = program.assemble() if isinstance(program, Program) else program
    rng = np.random.default_rng(seed)
    errors = dict(errors)
    runs = []

    async def one_run(ctx):
        log, flying = [], {e: [] for e in engines}
        counts = {e: 0 for e in engines}
        pending = None
        ctx.set(dut.start_pc, start)
        ctx.set(dut.cycle_limit, limit)
        ctx.set(dut.start, 1)
        await ctx.tick()
        ctx.set(dut.start, 0)
        settle = 0
        for cycle in range(steps):
            running = ctx.get(dut.running)
            settle = 0 if running else settle + 1
            if settle > 3 * longest + 8:
                break
            ctx.set(dut.network_active, int(cycle < active_until))
            posts = [s for c, s in remote if c == cycle]
            assert len(posts) <= 1
            ctx.set(dut.post_remote.en, len(posts))
            ctx.set(dut.post_remote.semaphore, posts[0] if posts else 0)
            # LOAD from a tile SRAM of SRAM_WORDS words.
            load = dut.load
            ctx.set(load.valid, 0)
            ctx.set(load.fault, 0)
            if pending is not None and pending[0] == cycle:
                ctx.set(load.valid, 1)
                line = pending[1] * 4
                ctx.set(load.fault, int(line >= SRAM_WORDS))
                words = sram[line : line + 4] if line < SRAM_WORDS else [0] * 4
                ctx.set(load.response.data[0], sum(int(w) << 32 * i for i, w in enumerate(words)))
                pending = None
            take_load = rng.random() < ready
            ctx.set(load.request.ready, take_load)
            if take_load and ctx.get(load.request.valid):
                assert pending is None
                pending = (cycle + latency, ctx.get(load.request.p.address))
                assert not ctx.get(load.request.p.write)
            for e in engines:
                port = getattr(dut, f"engine_{e.name.lower()}")
                queue = flying[e]
                finish = bool(queue) and queue[0].done <= cycle
                ctx.set(port.done, finish)
                if finish:
                    number = counts[e]
                    counts[e] += 1
                    ctx.set(port.error, errors.get((e, number), isa.Status.RUNNING))
                    queue.pop(0).done = cycle
                accept = rng.random() < ready and len(queue) < 3
                ctx.set(port.command.ready, accept)
                ctx.set(
                    port.activity,
                    isa.Activity.BUSY
                    if queue
                    else isa.Activity(int(rng.integers(0, 4)))
                    if rng.random() < 0.3
                    else isa.Activity.IDLE,
                )
                if accept and ctx.get(port.command.valid):
                    commands = isa.BY_ENGINE[e]
                    code = ctx.get(port.command.p.code) if len(commands) > 1 else 0
                    operands = {
                        op.name: ctx.get(getattr(port.command.p, op.name))
                        for op in commands[code].operands
                    }
                    taken = Taken(e, cycle, operands)
                    earliest = max(cycle + 1, queue[-1].done + 1 if queue else 0)
                    taken.done = (
                        steps + cycle if e in freeze else earliest + int(rng.integers(0, longest))
                    )
                    queue.append(taken)
                    log.append(taken)
            await ctx.tick()
        else:
            raise AssertionError("the tile did not stop")
        result = Run(
            isa.Status(ctx.get(dut.status)),
            ctx.get(dut.status_engine),
            ctx.get(dut.status_pc),
            ctx.get(dut.cycles),
            ctx.get(dut.status_semaphore),
            log,
        )
        for position, e in enumerate(engines):
            for kind in isa.Activity:
                ctx.set(dut.counter_index, position * len(isa.Activity) + kind)
                await ctx.tick()
                result.counters[e, kind] = ctx.get(dut.counter_value)
        for s in range(isa.SEMAPHORES):
            ctx.set(dut.semaphore_index, s)
            result.semaphores.append(ctx.get(dut.semaphore_value))
        runs.append(result)

    async def bench(ctx):
        for at, words in enumerate(beats):
            ctx.set(dut.program_write_en, 1)
            ctx.set(dut.program_addr, at)
            ctx.set(dut.program_write_data, sum(int(w) << 32 * i for i, w in enumerate(words)))
            await ctx.tick()
        ctx.set(dut.program_write_en, 0)
        assert ctx.get(dut.status) == isa.Status.IDLE.value
        for attempt in range(again + 1):
            if attempt:
                ctx.set(dut.reset, 1)
                for e in engines:
                    ctx.set(getattr(dut, f"engine_{e.name.lower()}").done, 0)
                await ctx.tick()
                ctx.set(dut.reset, 0)
                assert ctx.get(dut.status) == isa.Status.IDLE.value
            await one_run(ctx)

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    result = runs[-1]
    for e in engines:
        assert sum(result.counters[e, kind] for kind in isa.Activity) == result.cycles
    return result


def signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def interpret(beats, sram):
    """What a program that stops by HALT gives to each engine, in order; no semaphores."""
    words = [[int(w) for w in b] for b in beats]
    regs = [0] * 32
    issued = {e: [] for e in ENGINES}
    pc = 0
    for _ in range(100_000):
        w = words[pc]
        opcode = w[0] & 63
        if opcode >= 32:
            flat = sum(words[pc : pc + 4], [])
            for i in range(2, 16):
                if flat[0] >> (8 + i) & 1:
                    flat[i] = (regs[flat[i] >> 27] + signed(flat[i] & 0x7FFFFFF, 27)) & MASK
            command = next(c for c in isa.COMMANDS if c.opcode == opcode)
            issued[command.engine].append(
                {o.name: flat[o.word] >> o.lo & ((1 << o.width) - 1) for o in command.operands}
            )
            pc += 4
            continue
        rd, rs, rt, imm = w[1] & 31, regs[w[1] >> 5 & 31], regs[w[1] >> 10 & 31], w[2]
        b = (rt + imm) & MASK
        pc += 1
        result = None
        match opcode:
            case 0:
                return issued
            case 1:
                result = rs + b
            case 2:
                result = rs - b
            case 3:
                result = rs * b
            case 4:
                result = rs & b
            case 5:
                result = rs << b if b < 32 else 0
            case 6:
                result = rs >> b if b < 32 else 0
            case 7:
                result = 0 if (rs + 1) & MASK == b else rs + 1
            case 8:
                result = int(sram[((rs + imm) & MASK) // 4])
            case 9:
                pc = imm if rs == rt else pc
            case 10:
                pc = imm if rs != rt else pc
            case 11:
                pc = imm if signed(rs) < signed(rt) else pc
            case 14:
                pass
            case _:
                raise AssertionError(f"opcode {opcode}")
        if result is not None and rd:
            regs[rd] = result & MASK
    raise AssertionError("endless")


def random_command(p: Program, rng) -> None:
    command = isa.COMMANDS[rng.integers(len(isa.COMMANDS))]
    values = {}
    for op in command.operands:
        name = "post_" if op.name == "post" else op.name
        if op.width == 32 and command.owns_word(op) and rng.random() < 0.5:
            values[name] = Reg(int(rng.integers(32))) + int(rng.integers(-(1 << 26), 1 << 26))
        elif rng.random() < 0.8:
            values[name] = int(rng.integers(1 << op.width))
    p.command(command, **values)


def random_program(rng, length=60) -> Program:
    p = Program()
    special = [0, 1, 31, 32, 33, 0x7FFF_FFFF, 0x8000_0000, MASK]

    def value():
        return int(rng.choice(special)) if rng.random() < 0.4 else int(rng.integers(1 << 32))

    for i in range(1, 32):
        p.li(Reg(i), value())
    counter = Reg(31)  # kept out of the others' way

    def register(low=0):
        return Reg(int(rng.integers(low, 31)))

    ends = []
    for i in range(length):
        kind = rng.random()
        if kind < 0.45:
            op = getattr(p, rng.choice(["add", "sub", "mul", "and_", "shl", "shr", "wrap"]))
            rd, rs, rt = register(), register(), register()
            imm = int(rng.integers(40)) if rng.random() < 0.5 else value()
            op(rd, rs, ZERO if rng.random() < 0.5 else rt, imm)
        elif kind < 0.55:
            base = register(1)
            p.li(base, 4 * int(rng.integers(SRAM_WORDS // 2)))
            p.load(register(), base, imm=4 * int(rng.integers(SRAM_WORDS // 2)))
        elif kind < 0.7:
            label = f"skip{i}"
            getattr(p, rng.choice(["beq", "bne", "blt"]))(register(), register(), label)
            ends.append((label, i + int(rng.integers(1, 6))))
        elif kind < 0.75:
            with p.loop(counter, int(rng.integers(1, 4))):
                random_command(p, rng)
                p.add(register(), register(), register())
        else:
            random_command(p, rng)
        for label, end in [x for x in ends if x[1] <= i]:
            p.label(label)
            ends.remove((label, end))
    for label, _ in ends:
        p.label(label)
    for i in range(0, 32, 2):
        p.topk(score_addr=Reg(i), ids_addr=Reg(i + 1))
    p.halt()
    return p


@BOTH
@pytest.mark.parametrize("ready,longest,latency", [(1.0, 1, 2), (0.4, 6, 5), (0.8, 3, 1)])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 12))]
)
def test_random_programs(seed, ready, longest, latency):
    print("seed", seed)
    rng = np.random.default_rng([seed, int(10 * ready)])
    sram = rng.integers(1 << 32, size=SRAM_WORDS)
    p = random_program(rng)
    result = run(
        p,
        seed=seed,
        ready=ready,
        longest=longest,
        latency=latency,
        sram=sram,
        engines=ENGINES,
        again=int(seed == 0),
    )
    assert result.status == isa.Status.DONE and result.engine == isa.ENGINE_NONE
    assert result.pc == len(p) - 1
    expected = interpret(p.assemble(), sram)
    assert sum(map(len, expected.values())) > 16
    for engine in ENGINES:
        assert result.of(engine) == expected[engine]


def cycles_of(build) -> int:
    p = Program()
    p.halt()
    empty = run(p).cycles
    p = Program()
    build(p)
    p.halt()
    return run(p).cycles - empty


@BOTH
def test_cycle_costs():
    r = Reg(1)
    assert cycles_of(lambda p: p.li(r, 1)) == 2
    assert cycles_of(lambda p: p.mul(r, r, imm=3)) == 3
    assert cycles_of(lambda p: p.bne(ZERO, ZERO, 0)) == 2
    assert cycles_of(lambda p: (p.beq(ZERO, ZERO, "x"), p.label("x"))) == 3
    assert cycles_of(lambda p: p.post(3)) == 2
    # LOAD: 2 cycles and the SRAM's latency of 2.
    p = Program()
    p.load(r)
    p.halt()
    q = Program()
    q.li(r, 0)
    q.halt()
    assert run(p, sram=[0] * SRAM_WORDS).cycles - run(q).cycles == 2
    p = Program()
    for i in range(8):
        p.command(isa.COMMANDS[i])
    p.halt()
    starts = [t.cycle for t in run(p, longest=1, engines=ENGINES).log]
    assert np.diff(starts).tolist() == [4] * 7


@BOTH
def test_semaphores_order_engines():
    """A producer, two consumers of its two posts, and the producer waits for both to hand back."""
    p = Program()
    full_a, full_b = p.semaphore("full_a"), p.semaphore("full_b")
    free_a, free_b = p.semaphore("free_a"), p.semaphore("free_b")
    for s in (free_a, free_b):
        p.post(s)
        p.post(s)
    with p.loop(p.reg("i"), 8):
        p.dma(lines=1, wait=(free_a, free_b), post=(full_a, full_b))
        p.vector(rows=1, wait=full_a, post=free_a)
        p.topk(k=1, wait=full_b, post=free_b)
    p.halt()
    result = run(p, seed=5, ready=0.7, longest=9)
    assert result.status == isa.Status.DONE and len(result.log) == 24
    assert [result.semaphores[s.index] for s in (full_a, full_b, free_a, free_b)] == [0, 0, 2, 2]
    by = {e: [t for t in result.log if t.engine == e] for e in FEW}
    for i in range(8):
        for consumer in (isa.Engine.VECTOR, isa.Engine.TOPK):
            assert by[consumer][i].cycle > by[isa.Engine.DMA][i].done
            if i >= 2:
                assert by[isa.Engine.DMA][i].cycle > by[consumer][i - 2].done


@BOTH
def test_wait_and_fence_hold_the_sequencer():
    p = Program()
    done = p.semaphore("done")
    p.matmul(m=1, post=done)
    p.wait(done)
    p.vector(rows=1)
    p.fence()
    p.topk(k=1)
    p.halt()
    result = run(p, longest=30, seed=1)
    matrix, vector, topk = result.log
    assert vector.cycle > matrix.done and topk.cycle > vector.done
    assert result.status == isa.Status.DONE


@BOTH
def test_remote_semaphore_is_no_deadlock():
    for wait_in_queue in (False, True):
        p = Program()
        there = p.remote_semaphore("there")
        if wait_in_queue:
            p.matmul(m=1, wait=there)
        else:
            p.wait(there)
        p.halt()
        result = run(p, remote=[(400, there.index)])
        assert result.status == isa.Status.DONE and result.cycles > 400
        result = run(p, limit=300)
        assert result.status == isa.Status.CYCLE_LIMIT and result.cycles == 300


def deadlock_programs():
    p = Program()
    p.wait(3)
    yield "wait", p, 0
    p = Program()
    p.matmul(wait=5)
    p.halt()
    yield "halt", p, 4
    p = Program()
    p.matmul(wait=(5, 30))
    p.fence()
    yield "fence, one of two remote", p, 4
    p = Program()
    p.post(5)
    p.vector(wait=(5, 5))
    p.halt()
    yield "twice the same", p, 5
    p = Program()
    for _ in range(6):
        p.dma(wait=7)
    yield "full queue", p, 12  # two queued, one offered, the fourth waits
    p = Program()
    p.matmul(wait=1, post=2)
    p.vector(wait=2, post=1)
    p.topk(k=1)
    p.wait(9)
    yield "cycle", p, 12


DEADLOCKS = {name: (program, pc) for name, program, pc in deadlock_programs()}


@VERILOG_FIRST
@pytest.mark.parametrize("name", DEADLOCKS)
def test_deadlock(name):
    program, pc = DEADLOCKS[name]
    result = run(program, again=1)
    assert (result.status, result.engine, result.pc) == (isa.Status.DEADLOCK, isa.ENGINE_NONE, pc)
    assert result.cycles < 60
    held = run(program, active_until=200)
    assert held.status == isa.Status.DEADLOCK and held.cycles >= 200


@BOTH
def test_long_command_is_no_deadlock():
    p = Program()
    p.matmul(post=1)
    p.wait(1)
    p.halt()
    assert run(p, freeze=(isa.Engine.MATRIX,), limit=500).status == isa.Status.CYCLE_LIMIT


def raw_program(*beats):
    p = Program()
    p.li(Reg(1), 0x1_0000)
    for words in beats:
        p.raw(words)
    p.halt()
    return p


TOPK = isa.TOPK.opcode
ILLEGAL = {
    "opcode 15": [15, 0, 0, 0],
    "opcode 31": [31, 0, 0, 0],
    "opcode 40": [40, 0, 0, 0],
    "opcode 63": [63, 0, 0, 0],
    "bits above a scalar opcode": [isa.Scalar.ADD | 1 << 6, 0, 0, 0],
    "word 3 of a scalar": [isa.Scalar.ADD, 0, 0, 1],
    "word 1 above the fields": [isa.Scalar.ADD, 1 << 15, 0, 0],
    "rd of a branch": [isa.Scalar.BEQ, 1, 0, 0],
    "imm of a fence": [isa.Scalar.FENCE, 0, 1, 0],
    "semaphore 32": [isa.Scalar.POST, 0, 32, 0],
    "wait 32": [isa.Scalar.WAIT, 0, 32, 0],
    "misaligned load": [isa.Scalar.LOAD, 2, 2, 0],
    "header bit 6": [TOPK | 1 << 6, 0, 0, 0],
    "header bit 24": [TOPK | 1 << 24, 0, 0, 0],
    "word 0 indirect": [TOPK | 1 << 8, 0, 0, 0],
    "sync bit 24": [TOPK, 1 << 24, 0, 0],
    "count above 16 bits": [TOPK, 0, 0, 1 << 16],
    "register too wide for count": [TOPK | 1 << 11, 0, 0, 1 << 27],
    "indirect word of two operands": [isa.VECTOR.opcode | 1 << 17, 0, 0, 0],
}


@VERILOG_FIRST
@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal(name):
    zero = [0, 0, 0, 0]
    result = run(raw_program(ILLEGAL[name], zero, zero, zero), engines=FEW[1:3])
    assert (result.status, result.engine, result.pc) == (
        isa.Status.ILLEGAL_COMMAND,
        isa.ENGINE_NONE,
        1,
    )
    assert not result.log


@BOTH
@pytest.mark.parametrize("beat", [1, 2, 3])
def test_illegal_bits_in_later_beats(beat):
    words = [[TOPK, 0, 0, 0], [0] * 4, [0] * 4, [0] * 4]
    words[beat][0] = 1 << 31  # no operand has this bit
    result = run(raw_program(*words), engines=FEW[2:3])
    assert result.status == isa.Status.ILLEGAL_COMMAND and result.pc == 1 and not result.log


@BOTH
def test_command_of_an_engine_that_is_not_there():
    p = Program()
    p.topk(k=1)
    p.send(lines=1)
    result = run(p, engines=(isa.Engine.MATRIX, isa.Engine.TOPK))
    assert result.status == isa.Status.ILLEGAL_COMMAND and result.pc == 4


@BOTH
def test_address_ranges():
    p = Program()
    p.post(1)
    p.load(Reg(1), imm=4 * SRAM_WORDS)
    result = run(p, sram=[0] * SRAM_WORDS)
    assert result.status == isa.Status.ADDRESS_RANGE and result.pc == 1
    p = Program()
    p.post(1)
    p.jump(CONFIG.program_beats)
    result = run(p)
    assert result.status == isa.Status.ADDRESS_RANGE and result.pc == 1
    p = Program()
    p.bne(ZERO, ZERO, CONFIG.program_beats)  # not taken: fine
    p.jump(CONFIG.program_beats - 1)
    for _ in range(CONFIG.program_beats - len(p)):
        p.post(1)
    result = run(p)
    assert result.status == isa.Status.ADDRESS_RANGE and result.pc == CONFIG.program_beats
    assert run(p, start=CONFIG.program_beats).status == isa.Status.ADDRESS_RANGE


@BOTH
def test_start_address():
    p = Program()
    p.topk(k=1)
    p.topk(k=2)
    p.halt()
    result = run(p, start=4)
    assert [o["k"] for o in result.of(isa.Engine.TOPK)] == [2]


@BOTH
def test_engine_error_stops_the_tile():
    p = Program()
    for i in range(4):
        p.matmul(m=i, post=1)
    p.wait(1)
    p.vector(rows=1)
    for _ in range(8):
        p.topk(wait=20)
    result = run(p, errors={(isa.Engine.MATRIX, 2): isa.Status.ADDRESS_RANGE}, longest=4, seed=2)
    assert (result.status, result.engine, result.pc) == (
        isa.Status.ADDRESS_RANGE,
        isa.Engine.MATRIX,
        8,
    )
    assert not result.of(isa.Engine.TOPK)


@BOTH
def test_nothing_is_issued_after_a_stop():
    p = Program()
    p.matmul(m=1, post=1)
    p.vector(rows=1, wait=1)
    p.halt()
    result = run(p, errors={(isa.Engine.MATRIX, 0): isa.Status.HBM_ERROR})
    assert result.status == isa.Status.HBM_ERROR and len(result.log) == 1
    assert result.semaphores[1] == 0  # a failed command posts nothing


@BOTH
def test_semaphore_overflow():
    """The semaphores' flag reaches the status; test_semaphores makes the counters overflow."""
    for by, pc in ((isa.ENGINE_NONE, 0), (isa.Engine.TOPK, 33)):
        dut = Sequencer(CONFIG, FEW)
        found = []

        async def bench(ctx, dut=dut, by=by, found=found):
            ctx.set(dut.program_write_en, 1)
            ctx.set(dut.program_write_data, isa.Scalar.FENCE)
            for i in range(len(FEW)):
                ctx.set(dut.queue[i].pc, 31 + i)
            await ctx.tick()
            ctx.set(dut.start, 1)
            await ctx.tick()
            ctx.set(dut.start, 0)
            await ctx.tick().repeat(20)
            assert ctx.get(dut.running)
            ctx.set(dut.overflow, 1)
            ctx.set(dut.overflow_semaphore, 17)
            ctx.set(dut.overflow_engine, by)
            await ctx.tick()
            ctx.set(dut.overflow, 0)
            await ctx.tick()
            found += [
                ctx.get(getattr(dut, f"status{x}")) for x in ("", "_engine", "_pc", "_semaphore")
            ]

        simulator = Simulator(dut)
        simulator.add_clock(1e-6)
        simulator.add_testbench(bench)
        simulator.run()
        assert found == [isa.Status.SEMAPHORE_OVERFLOW.value, by, pc, 17]


@BOTH
def test_program_reads_back():
    dut = CommandProcessor(CONFIG, FEW)
    seen = []

    async def bench(ctx):
        for write in (1, 0):
            for at in (0, 5, CONFIG.program_beats - 1):
                ctx.set(dut.program_write_en, write)
                ctx.set(dut.program_read_en, 1 - write)
                ctx.set(dut.program_addr, at)
                ctx.set(dut.program_write_data, at << 96 | 3)
                await ctx.tick()
                if not write:
                    seen.append(ctx.get(dut.program_read_data) == at << 96 | 3)

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    assert seen == [True] * 3
