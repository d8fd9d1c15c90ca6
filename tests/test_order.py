# SPDX-License-Identifier: Apache-2.0
"""What commands wait for: dependences through memory, clocks, and shared semaphores."""

from golden.formats import Format
from hw.config import preset
from sim.assembler import disassemble
from sim.programs.access import SRAM, Access
from sim.programs.builder import TileProgram
from sim.programs.memory import TileMemory
from sim.programs.order import Order


def touch(reads=(), writes=()):
    return Access([(SRAM, a, b) for a, b in reads], [(SRAM, a, b) for a, b in writes])


def issue(order, engine, **ranges):
    access = touch(**ranges)
    waits = order.needs(engine, access)
    order.add(engine, access, waits)
    return waits


def test_only_conflicts_wait():
    order = Order()
    assert issue(order, "matrix", writes=[(0, 64)]) == []
    assert issue(order, "vector", reads=[(64, 128)], writes=[(128, 192)]) == []
    assert issue(order, "vector", reads=[(32, 48)], writes=[(192, 256)]) == [("matrix", 0)]
    assert issue(order, "topk", reads=[(128, 132)]) == [("vector", 0)]
    assert issue(order, "dma", writes=[(60, 80)]) == [("matrix", 0), ("vector", 0)]
    assert issue(order, "kv", writes=[(40, 48)]) == [("vector", 1)]  # which waited for the matrix


def test_an_engine_that_overlaps_its_commands_waits_for_its_own_results_only():
    order = Order()
    issue(order, "matrix", reads=[(0, 64)], writes=[(64, 128)])
    assert issue(order, "matrix", reads=[(200, 264)], writes=[(0, 64)]) == []
    assert issue(order, "matrix", reads=[(64, 128)], writes=[(300, 364)]) == [("matrix", 0)]
    assert issue(order, "vector", writes=[(500, 504)]) == []
    assert issue(order, "vector", reads=[(500, 504)]) == []


def test_what_was_waited_for_is_known():
    order = Order()
    issue(order, "matrix", writes=[(0, 64)])
    issue(order, "matrix", writes=[(64, 128)])
    assert issue(order, "vector", reads=[(64, 128)]) == [("matrix", 1)]
    assert issue(order, "vector", reads=[(0, 64)]) == []
    order.learn("vector", 1)
    assert issue(order, "topk", reads=[(0, 64)]) == []


def program():
    return TileProgram(TileMemory(preset("tiny").tile))


def test_a_result_that_many_engines_read_is_posted_by_what_waited_for_it():
    p = program()
    a, b = p.memory.buffer("a", 1, 8), p.memory.buffer("b", 1, 8)
    p.vector(a, b)
    for name in ("ids", "scores"):
        p.memory.buffer(name, 1, 8)
    p.command("topk", score_addr=b.address, count=8, k=1, ids_addr=512, scores_addr=528)
    p.command("dma", local_addr=b.address, hbm_addr=0, lines=1, rows=1, direction=1)
    p.command("send", src_addr=b.address, dst_addr=0, lines=1, rows=1)
    p.load(p.program.reg("r"), b.address)
    text = disassemble(p.finish().assemble())
    posts = [post for line in text if "post=" in line for post in line.split("post=")[1].split(",")]
    assert len(posts) == 4
    assert sum("wait=" in line or line.startswith("wait ") for line in text) == 4


def test_more_than_two_engines_to_wait_for():
    p = program()
    buffers = [p.memory.buffer(f"x{i}", 1, 8) for i in range(4)]
    p.vector(buffers[3], buffers[0])
    p.command("topk", score_addr=1024, count=8, k=1, ids_addr=buffers[1].address, scores_addr=1040)
    p.command("dma", hbm_addr=0, local_addr=buffers[2].address, lines=1, rows=1)
    p.command("send", src_addr=buffers[0].address, dst_addr=0, lines=20, rows=1)
    text = disassemble(p.finish().assemble())
    assert any(line.startswith("wait ") for line in text)
    assert p.order.needs("noc", touch(reads=[(0, 4096)])) == []
    assert buffers[0].fmt is Format.FP32
