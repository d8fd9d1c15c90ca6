# SPDX-License-Identifier: Apache-2.0
"""Experts whose weights stay in the KV SRAM and whose biases stay in tile SRAM.

The chosen experts of a token run side by side: each stage of all of them comes before the next
stage, so that the matrix and the vector engine overlap. The arithmetic is that of
`golden.kernels.moe.expert`.
"""

from dataclasses import dataclass

import numpy as np

from golden.formats import Format
from golden.fp32 import bits
from golden.kernels.moe import Expert
from golden.kernels.trace import Stored
from hw.isa import Init
from sim.assembler import Reg
from sim.programs.access import Within
from sim.programs.builder import TileProgram
from sim.programs.memory import Buffer, TileMemory, Weights
from sim.programs.moe import close_gate, columns, open_gate

ACTIVATION = "clamped-swiglu"  # of GPT-OSS, whose layers use this


@dataclass(frozen=True)
class ResidentExperts:
    """All experts: `gate_up` and `down` are those of expert 0, an expert takes `rows` KV rows, and
    the buffers have one row of biases per expert.
    """

    gate_up: Weights
    down: Weights
    rows: int
    gate_up_bias: Buffer
    down_bias: Buffer
    intermediate: int


def place_resident(memory: TileMemory, experts: list[Expert]) -> ResidentExperts:
    """Puts all experts into KV SRAM and tile SRAM."""
    placed = [
        memory.weights(name, m.codes, m.scales, m.fmt, stream=False)
        for e in experts
        for name, m in (("experts.gate_up", e.gate_up), ("experts.down", e.down))
    ]
    gate_up, down = placed[:2]
    biases = []
    for name, vectors in (
        ("gate_up_bias", [e.gate_up.bias for e in experts]),
        ("down_bias", [e.down.bias for e in experts]),
    ):
        codes = bits(np.stack(vectors))
        buffer = memory.buffer(f"experts.{name}", *codes.shape)
        biases.append(memory.fill(buffer, Stored(codes, Format.FP32)))
    return ResidentExperts(
        gate_up, down, gate_up.rows + down.rows, biases[0], biases[1], experts[0].intermediate
    )


def experts(
    p: TileProgram, x: Buffer, image: ResidentExperts, ids: Buffer, count: int
) -> list[Buffer]:
    """The outputs (FP32) of the experts whose ids are the first `count` of `ids`, on x."""
    memory, size = p.memory, image.intermediate
    half = image.gate_up.n // 2
    number = p.program.reg("expert")
    down_rows, opened = [], []
    for i in range(count):
        p.load(number, ids.at(0, i))
        row = p.program.reg(f"expert{i}.row")
        p.program.mul(row, number, imm=image.rows)
        biases = []
        for buffer in (image.gate_up_bias, image.down_bias):
            bias = p.program.reg(f"expert{i}.{buffer.name}")
            p.program.mul(bias, number, imm=buffer.stride)
            biases.append(bias)
        both = memory.buffer(f"e{i}.gate_up", x.rows, 2 * half)
        _take(p, x, image, image.gate_up, row, image.gate_up_bias, biases[0], both)
        opened.append(both)
        down_rows.append((row, biases[1]))
    hiddens = []
    for i, both in enumerate(opened):
        gated = memory.buffer(f"e{i}.gated", x.rows, size)
        open_gate(p, ACTIVATION, columns(both, 0, size), gated)
        hidden = memory.buffer(f"e{i}.hidden", x.rows, size, x.fmt, weight=image.down.fmt)
        close_gate(p, ACTIVATION, columns(both, half, size), gated, hidden)
        hiddens.append(hidden)
    results = []
    for i, (hidden, (row, bias)) in enumerate(zip(hiddens, down_rows, strict=True)):
        result = memory.buffer(f"e{i}.down", x.rows, image.down.n)
        _take(p, hidden, image, image.down, row, image.down_bias, bias, result)
        results.append(result)
    return results


def _take(
    p: TileProgram,
    act: Buffer,
    image: ResidentExperts,
    weights: Weights,
    row: Reg,
    biases: Buffer,
    bias: Reg,
    out: Buffer,
) -> None:
    """A matmul with the weights and the bias whose offsets from expert 0's are in registers."""
    assert weights.row is not None and image.gate_up.row is not None
    first, end = image.gate_up.row, image.gate_up.row + image.rows * biases.rows
    p.command(
        "matmul",
        act_addr=act.address,
        act_stride=act.stride_lines,
        m=act.rows,
        n=weights.n,
        k=weights.k,
        weight_addr=Within(row.index, weights.row, first, end),
        weight_gstride=1,
        weight_nstride=weights.groups,
        out_addr=out.address,
        out_stride=out.stride_lines,
        bias_addr=Within(bias.index, biases.address, biases.address, biases.at(biases.rows)),
        act_format=act.fmt,
        weight_format=weights.fmt,
        init=Init.BIAS,
    )
