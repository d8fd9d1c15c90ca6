# SPDX-License-Identifier: Apache-2.0
"""The check of the commands' order: on records made by hand, and on good programs with faults
planted in them.
"""

import numpy as np
import pytest

from golden.formats import Format
from golden.kernels.attention import chunks, exponent_factor
from golden.kernels.trace import Stored
from hw import isa
from hw.config import preset
from sim.assembler import Program
from sim.kernels.system import TileRun, simulate
from sim.kernels.types import KernelRequest
from sim.order_check import check
from sim.order_check.record import parse
from sim.programs import attention
from sim.programs.access import access
from sim.programs.builder import TileProgram
from sim.programs.memory import TileMemory
from sim.programs.regions import KvRegion

TINY, MESH = preset("tiny"), preset("mesh4")
BF16, FP32 = Format.BF16, Format.FP32


def record(program, *events, first=1):
    """The lines of a trace: `events` are (cycle, "T" or "D", engine), beats come one per cycle.

    An integer as event gives the cycle from which beats go on: (cycle,).
    """
    lines, cycle = [(first - 1, 0, f"S {first - 1:x}")], first
    beats = program.assemble().tolist()
    moves = [e[0] for e in events if len(e) == 1]
    at = 0
    while at < len(beats):
        command = beats[at][0] & 63 >= 32
        for index in range(4 if command else 1):
            words = " ".join(f"{w:08x}" for w in beats[at + index])
            lines.append((cycle, 3, f"B {cycle:x} {index} {at:x} {words} 0"))
            cycle += 1
        if beats[at][0] in (isa.Scalar.WAIT, isa.Scalar.FENCE) and moves:
            # The instruction ended in the cycle that the test says.
            cycle = moves.pop(0)
            lines[-1] = (cycle, 3, lines[-1][2].replace(lines[-1][2].split()[1], f"{cycle:x}", 1))
            cycle += 1
        at += 4 if command else 1
    for event in events:
        if len(event) == 3:
            when, kind, engine = event
            bit = 1 << isa.Engine[engine.upper()]
            lines.append((when, 1 if kind == "D" else 2, f"{kind} {when:x} {bit:x}"))
    return [text for _, _, text in sorted(lines, key=lambda line: line[:2])]


def found(*programs_and_events, config=TINY, hbm=0, fill=((0, 4096),)):
    """(kind, hazard, other) of the findings; one (program, events) per tile."""
    records = [parse(record(p, *events)) for p, events in programs_and_events]
    memory = TileMemory(config.tile)
    for line, end in fill:
        memory.sram_images.append((line // 16, np.zeros(((end - line) // 16, 16)), None))
    tiles = config.tiles
    records += [[[]]] * (tiles - len(records))
    empty = TileMemory(config.tile)
    report = check(
        config, records, [[memory] + [empty] * (tiles - 1)], [hbm] * tiles, [[True] * tiles]
    )
    assert report.commands
    print(*report.findings, sep="\n")
    return [(f.kind, f.hazard, f.other and str(f.other)) for f in report.findings]


VECTOR = {"rows": 1, "cols": 8, "a_format": 7, "out_format": 7, "store": 1}


def two(first_engine_posts=True, reads=1024, writes=2048):
    """A TOPK that writes 1024 .. 1040 and reads 0 .. 32, and a VECTOR."""
    p = Program()
    s = p.semaphore("s")
    sync = {"post": s} if first_engine_posts else {}
    p.topk(score_addr=0, count=8, k=1, ids_addr=1024, scores_addr=1040, **sync)
    wait = {"wait": s} if first_engine_posts else {}
    p.vector(a_addr=reads, out_addr=writes, **VECTOR, **wait)
    p.halt()
    return p


IN_TIME = ((6, "T", "topk"), (20, "D", "topk"), (25, "T", "vector"), (40, "D", "vector"))
EARLY = ((6, "T", "topk"), (12, "T", "vector"), (20, "D", "topk"), (40, "D", "vector"))


def test_a_result_that_is_waited_for():
    assert found((two(), IN_TIME)) == []


@pytest.mark.parametrize(
    ("places", "hazard"),
    [
        ({"reads": 1024}, "reads"),
        ({"reads": 64, "writes": 1040}, "overwrites"),
        ({"reads": 64, "writes": 16}, "overwrites what is read by"),
    ],
)
def test_a_wait_that_is_missing(places, hazard):
    """Whether the result was there or not in this run."""
    other = "TOPK at beat 0"
    assert found((two(False, **places), EARLY)) == [("early", hazard, other)]
    assert found((two(False, **places), IN_TIME)) == [("unordered", hazard, other)]


def test_what_has_nothing_to_do_with_it_needs_no_wait():
    assert found((two(False, reads=64), EARLY)) == []


def test_what_nobody_wrote():
    assert found((two(False, reads=64), EARLY), fill=((0, 32), (1024, 2048))) == [
        ("unwritten", "reads", None)
    ]
    p = Program()
    p.matmul(m=1, n=4, k=9, act_addr=0, out_addr=64, act_format=6, weight_format=6, weight_addr=5)
    p.halt()
    events = (6, "T", "matrix"), (20, "D", "matrix")
    assert found((p, events)) == [("unwritten", "reads", None)]
    p = Program()
    p.dma(lines=3, rows=2, hbm_stride=64, local_stride=3, local_addr=64, hbm_addr=0)
    p.halt()
    events = (6, "T", "dma"), (20, "D", "dma")
    assert found((p, events), hbm=112) == []
    assert found((p, events), hbm=96) == [("unwritten", "reads", None)]


def test_the_report_names_what_is_needed():
    p = two(False)
    report = check(TINY, [parse(record(p, *EARLY))], [[TileMemory(TINY.tile)]], [0], [[True]])
    text = str(report.findings[-1])
    for part in ("VECTOR at beat 4 (vector)", "TOPK at beat 0 (topk)", "SRAM [0x400, 0x420)"):
        assert part in text, text
    assert "taken in cycle 12" in text and "done in cycle 20" in text


def matrix(waits):
    """Two MATMULs, the second of which reads the result of the first."""
    p = Program()
    s = p.semaphore("s")
    common = {"m": 1, "n": 8, "k": 8, "act_format": 6, "weight_format": 6, "stream": 1}
    p.matmul(act_addr=0, out_addr=1024, out_bf16=1, **common, **({"post": s} if waits else {}))
    p.matmul(act_addr=1024, out_addr=0, out_bf16=1, **common, **({"wait": s} if waits else {}))
    p.halt()
    return p


def test_the_matrix_engine_reads_its_own_results_after_a_semaphore():
    late = ((6, "T", "matrix"), (20, "D", "matrix"), (30, "T", "matrix"), (50, "D", "matrix"))
    early = ((6, "T", "matrix"), (12, "T", "matrix"), (20, "D", "matrix"), (50, "D", "matrix"))
    assert found((matrix(True), late)) == []
    assert found((matrix(False), late)) == [("unordered", "reads", "MATMUL at beat 0")]
    assert found((matrix(False), early)) == [("early", "reads", "MATMUL at beat 0")]


def test_engines_that_run_one_command_at_a_time_need_none():
    p = Program()
    p.vector(a_addr=0, out_addr=1024, **VECTOR)
    p.vector(a_addr=1024, out_addr=0, **VECTOR)
    p.halt()
    events = (6, "T", "vector"), (12, "T", "vector"), (20, "D", "vector"), (40, "D", "vector")
    assert found((p, events)) == []


def sequencer(how):
    p = Program()
    s = p.semaphore("s")
    p.topk(score_addr=0, count=8, k=1, ids_addr=1024, scores_addr=1040, post=s)
    if how == "wait":
        p.wait(s)
    elif how == "fence":
        p.fence()
    p.load(p.reg("r"), imm=1024)
    p.vector(a_addr=1040, out_addr=1024, **VECTOR)
    p.halt()
    return p


def test_the_sequencer_waits_for_all_that_follow():
    events = (6, "T", "topk"), (20, "D", "topk"), (25,), (40, "T", "vector"), (50, "D", "vector")
    assert found((sequencer("wait"), events)) == []
    assert found((sequencer("fence"), events)) == []
    faults = found((sequencer(""), events))
    assert [fault[2] for fault in faults] == ["TOPK at beat 0"] * 2
    assert faults[0][0] == "early"  # LOAD in cycle 5


def test_a_wait_stands_for_what_the_awaited_one_knew():
    p = Program()
    s, t = p.semaphore("s"), p.semaphore("t")
    p.topk(score_addr=0, count=8, k=1, ids_addr=1024, scores_addr=1040, post=s)
    p.vector(a_addr=64, out_addr=2048, **VECTOR, wait=s, post=t)
    p.dma(lines=1, rows=1, local_addr=1024, direction=1, wait=t)
    p.halt()
    events = [(6, "T", "topk"), (20, "D", "topk"), (25, "T", "vector"), (40, "D", "vector")]
    events += [(50, "T", "dma"), (70, "D", "dma")]
    assert found((p, events)) == []


def test_what_an_earlier_run_has_posted_proves_nothing():
    p = two()
    again = [*record(p, *IN_TIME), *record(two(), *EARLY, first=1)]
    q = Program()
    q.post(0)
    q.halt()
    lines = [*record(q), *record(p, *EARLY)]
    memory = TileMemory(TINY.tile)
    memory.sram_images.append((0, np.zeros((256, 16)), None))
    empty = TileMemory(TINY.tile)
    report = check(TINY, [parse(lines)], [[memory], [empty]], [0], [[True], [True]])
    assert [f.kind for f in report.findings] == ["early"] and report.findings[0].run == 1
    assert len(parse(again)) == 2


def test_every_pass_of_a_loop_is_a_command_of_its_own():
    lines = record(two(), *IN_TIME)
    first, rest = lines[0], lines[1:]
    memory = TileMemory(TINY.tile)
    memory.sram_images.append((0, np.zeros((256, 16)), None))
    report = check(TINY, [parse([first, *rest, *rest])], [[memory]], [0], [[True]])
    assert report.commands == 4
    # The second TOPK overwrites what the first VECTOR reads, and nothing makes it wait.
    assert [str(f.other) for f in report.findings] == ["VECTOR at beat 4"]


def sent(taken, done, reader):
    """Tile 1 sends lines to 512 of tile 0, whose VECTOR reads them in the cycles of `reader`."""
    p, q = Program(), Program()
    p.vector(a_addr=512, out_addr=1024, **(VECTOR | {"cols": 4}))
    p.halt()
    q.dma(lines=1, rows=1, local_addr=0)
    q.send(x=0, y=0, src_addr=0, dst_addr=512, lines=1, rows=1)
    q.halt()
    mine = [(reader[0], "T", "vector"), (reader[1], "D", "vector")]
    theirs = [(6, "T", "dma"), (taken - 1, "D", "dma"), (taken, "T", "noc"), (done, "D", "noc")]
    got = found((p, mine), (q, theirs), config=MESH, hbm=16, fill=())
    return [fault for fault in got if fault[2] != "DMA at beat 0"]


def test_what_another_tile_sends():
    assert sent(20, 30, (40, 50)) == []
    assert ("unwritten", "reads", None) in sent(60, 70, (40, 50))
    assert ("early", "reads", "SEND at beat 4") in sent(20, 45, (40, 50))


# Faults in programs that run.


def attention_program():
    """Attention of two heads on 40 slots in five chunks, with its new token appended."""
    rng = np.random.default_rng(3)
    memory = TileMemory(TINY.tile)
    p = TileProgram(memory)
    region = KvRegion.allocate(p, "kv", 40, 8)
    cols = TINY.tile.cols
    memory.kv_images.append(
        (0, rng.integers(0, 60, (cols * region.values * 3, 16), np.uint8), None)
    )
    memory.kv_images[0] = (*memory.kv_images[0][:2], np.full(len(memory.kv_images[0][1]), 127))

    def given(name, rows, columns, fmt, weight=None):
        buffer = memory.buffer(name, rows, columns, fmt, weight)
        codes = rng.integers(0x3E00, 0x3F80, (rows, columns))
        codes = codes << 16 if fmt is FP32 else codes
        return memory.fill(buffer, Stored(codes.astype(np.uint32), fmt))

    key, value = given("key", 1, 8, BF16), given("value", 1, 8, BF16)
    queries = given("queries", 2, 8, BF16, BF16)
    starts = given("starts", 1, 2, FP32)
    out = memory.buffer("out", 2, 8, BF16)
    appends = attention.Appends(p, region, [(39, key, value)])
    parts = chunks(40, np.ones(40, bool), 8)
    attends = attention.decode(
        p, queries, starts, [region], exponent_factor(0.3), parts, out, [appends], share=True
    )
    attention.interleave(attends)
    return memory, p


def pairs(beats):
    """(beat that posts, beat that waits, semaphore), and where their bits are, in a program without
    branches.
    """
    posts, waits = {}, {}
    at = 0
    while at < len(beats):
        command = beats[at][0] & 63 >= 32
        if command:
            for what, into in (("post", posts), ("wait", waits)):
                for i in range(2):
                    lo, width = isa.SYNC_FIELDS[f"{what}{i}"]
                    enable, _ = isa.SYNC_FIELDS[f"{what}{i}_en"]
                    if beats[at][1] >> enable & 1:
                        semaphore = beats[at][1] >> lo & ((1 << width) - 1)
                        into.setdefault(semaphore, []).append((at, 1 << enable))
        at += 4 if command else 1
    assert {s: len(p) for s, p in posts.items()} == {s: len(w) for s, w in waits.items()}
    return [pair for s in posts for pair in zip(posts[s], waits[s], strict=True)]


class Without(Program):
    """A program without one pair of post and wait."""

    def __init__(self, program, pair):
        super().__init__()
        for beat in program.assemble().tolist():
            self.raw(beat)
        for at, bit in pair:
            self._beats[at][1] &= ~bit


def test_every_wait_that_is_taken_out_of_attention_is_missed():
    memory, p = attention_program()
    program = p.finish()
    removed = pairs(program.assemble().tolist())
    assert len(removed) >= 12
    programs = [program, *(Without(program, pair) for pair in removed)]
    request = KernelRequest(TINY, "gpt-oss", {}, "none", 1, None, True)
    result = simulate(request, [memory], [TileRun([each], [memory]) for each in programs])
    faulty = {
        run: [f for f in result.order.findings if f.run == run] for run in range(len(programs))
    }
    assert faulty[0] == []
    for run, (poster, waiter) in enumerate(removed, 1):
        kinds = {(f.kind, f.command.beat) for f in faulty[run]}
        assert any(beat >= waiter[0] for _, beat in kinds), (poster, waiter, faulty[run])
        assert any(f.command.beat == waiter[0] for f in faulty[run]), (poster, waiter)
    assert any(f.kind == "early" for f in result.order.findings)


def test_places_lie_within_the_ranges_that_programs_wait_for():
    """`sim.programs.access` may say more than a command touches, never less."""
    from sim.order_check.footprint import footprint

    memory, p = attention_program()
    lines = record(p.finish())
    compared = 0
    for command in parse(lines)[0]:
        exact = footprint(TINY, 0, command.name, command.operands)
        ranges = access(TINY.tile, command.name, command.operands)
        # An append reads the lines that it changes: waiting before it writes them is enough.
        read = ranges.reads + (ranges.writes if command.name == "kvappend" else [])
        for places, given in ((exact.reads, read), (exact.writes, ranges.writes)):
            for where, index in places:
                unit = 16 * TINY.tile.cols if where == "kv" else 1
                inside = np.zeros(len(index), bool)
                for name, first, end in given:
                    inside |= (name == where) & (index >= first * unit) & (index < end * unit)
                assert inside.all(), command
                compared += 1
    assert compared > 40
