# SPDX-License-Identifier: Apache-2.0
"""Experts in the HBM slice and the commands of their gated MLPs (`golden.kernels.moe.expert`)."""

from dataclasses import dataclass

import numpy as np

from golden.formats import Format
from golden.fp32 import bits
from golden.hbm_layout import pack_codes, pack_lines
from golden.kernels.moe import ALPHA, LIMIT, Expert, Matrix
from golden.kernels.trace import Stored
from hw.isa import Init
from sim.programs.builder import Address, TileProgram
from sim.programs.gate import gate as gate
from sim.programs.memory import Buffer, TileMemory, Weights


@dataclass(frozen=True)
class ExpertImage:
    """Experts in HBM, `size` bytes apart: both matrices, then both biases if they have any.

    The rows of `gate_up` stand in blocks: gate rows of up to `block` places, then the up rows of
    the same places, and so on; so do their biases.
    """

    base: int
    size: int
    count: int
    gate_up: Weights
    down: Weights
    down_offset: int  # into an expert's bytes
    bias_offset: int
    intermediate: int
    block: int
    activation: str

    @property
    def biased(self) -> bool:
        return self.bias_offset < self.size

    @property
    def bias_words(self) -> int:
        """FP32 words of both biases: those of gate and up, then those of down."""
        return self.gate_up.n + self.down.n

    def blocks(self) -> list[tuple[int, int, int]]:
        """(first place, places with padding, places without) of each block."""
        half = self.gate_up.n // 2
        return [
            (first, min(self.block, half - first), min(self.block, self.intermediate - first))
            for first in range(0, half, self.block)
        ]

    def traffic(self, memory: TileMemory) -> int:
        """HBM bytes of one expert."""
        biases = self.size - self.bias_offset
        return memory.traffic(self.gate_up) + memory.traffic(self.down) + biases


def place_matrix(
    memory: TileMemory, name: str, matrix: Matrix, stream: bool
) -> tuple[Weights, Buffer]:
    """A matrix in KV SRAM or HBM, its bias in tile SRAM."""
    weights = memory.weights(name, matrix.codes, matrix.scales, matrix.fmt, stream)
    bias = memory.scalars(f"{name}.bias", len(matrix.bias))
    memory.fill(bias, Stored(bits(matrix.bias)[None, :], Format.FP32))
    return weights, bias


def bias_lines(bias: np.ndarray) -> bytes:
    """HBM image of an FP32 vector."""
    return pack_lines(pack_codes(bits(bias)[None, :], Format.FP32)[0])


def place_experts(
    memory: TileMemory, experts: list[Expert], block: int = 0, name: str = "experts"
) -> ExpertImage:
    """Packs experts into the HBM slice, gate and up in blocks of `block` places (0: one block)."""
    images = []
    first = experts[0]
    half = len(first.gate_up.bias) // 2
    width = min(block, half) or half
    order = np.concatenate(
        [
            np.arange(start, min(start + width, half)) + side
            for start in range(0, half, width)
            for side in (0, half)
        ]
    )
    for e in experts:
        parts: list[bytes] = []
        placed = []
        for matrix, rows in ((e.gate_up, order), (e.down, slice(None))):
            scratch = TileMemory(memory.config)
            scales = None if matrix.scales is None else matrix.scales[rows]
            placed.append(scratch.weights(name, matrix.codes[rows], scales, matrix.fmt, True))
            parts.append(bytes(scratch.hbm_image))
        if e.biased:
            parts.append(bias_lines(np.concatenate([e.gate_up.bias[order], e.down.bias])))
        images.append(b"".join(parts))
    base = memory.hbm(name, b"".join(images))
    return ExpertImage(
        base,
        len(images[0]),
        len(experts),
        placed[0],
        placed[1],
        len(parts[0]),
        len(parts[0]) + len(parts[1]),
        first.intermediate,
        width,
        first.activation,
    )


def expert(
    p: TileProgram, name: str, x: Buffer, image: ExpertImage, ids: Buffer, place: int
) -> Buffer:
    """The expert whose id is the `place`-th of `ids`, on activations x: its output in FP32.

    For experts in one block, with biases.
    """
    memory, size = p.memory, image.intermediate
    half = image.gate_up.n // 2
    number, where = p.program.reg("expert"), p.program.reg("expert_address")
    p.load(number, ids.at(0, place))
    p.program.mul(where, number, imm=image.size)
    p.program.add(where, where, imm=image.base)
    biases = memory.scalars(f"{name}.biases", image.bias_words)
    p.stream(image.gate_up, where)
    p.stream(image.down, where + image.down_offset)
    fetch_biases(p, image, where + image.bias_offset, biases.address)
    both = memory.buffer(f"{name}.gate_up", x.rows, 2 * half)
    take(p, x, image.gate_up, both, biases.address)
    gated = memory.buffer(f"{name}.gated", x.rows, size)
    hidden = memory.buffer(f"{name}.hidden", x.rows, size, x.fmt, weight=image.down.fmt)
    gate_part, up_part = columns(both, 0, size), columns(both, half, size)
    open_gate(p, image.activation, gate_part, gated)
    close_gate(p, image.activation, up_part, gated, hidden)
    result = memory.buffer(f"{name}.down", x.rows, image.down.n)
    take(p, hidden, image.down, result, biases.at(0, 2 * half))
    return result


def columns(buffer: Buffer, first: int, count: int) -> Buffer:
    """`count` columns of a buffer from column `first` on."""
    return Buffer(buffer.name, buffer.at(0, first), buffer.rows, count, buffer.fmt, buffer.stride)


def fetch_biases(p: TileProgram, image: ExpertImage, where: Address, local: Address) -> None:
    """Both biases of an expert from HBM address `where` to tile SRAM."""
    p.command("dma", hbm_addr=where, local_addr=local, lines=-(-image.bias_words // 4), rows=1)


def open_gate(p: TileProgram, activation: str, gate_part: Buffer, gated: Buffer) -> None:
    """gated = g sigmoid(g), or that of the clamped SwiGLU."""
    if activation == "clamped-swiglu":
        p.vector(
            gate_part,
            gated,
            b=ALPHA,
            clamp=LIMIT,
            clamp_hi=True,
            mul=True,
            function="sigmoid",
            mul2=True,
            s4="x",
        )
    else:
        p.vector(gate_part, gated, function="sigmoid", mul2=True, s4="x")


def close_gate(
    p: TileProgram, activation: str, up_part: Buffer, gated: Buffer, hidden: Buffer
) -> None:
    """hidden = gated * up, or gated * (clamped up + 1)."""
    if activation == "clamped-swiglu":
        p.vector(
            up_part,
            hidden,
            b=1.0,
            d=gated,
            clamp=LIMIT,
            clamp_hi=True,
            clamp_lo=True,
            op1="add",
            mul=True,
            s2="d",
        )
    else:
        p.vector(up_part, hidden, d=gated, mul=True, s2="d")


def take(
    p: TileProgram,
    act: Buffer,
    weights: Weights,
    out: Buffer,
    bias: Address | None,
    width: int | None = None,
) -> None:
    """A matmul with weights whose stream has been started; `width` of its columns, else all."""
    p.command(
        "matmul",
        act_addr=act.address,
        act_stride=act.stride_lines,
        m=act.rows,
        n=weights.n if width is None else width,
        k=weights.k,
        out_addr=out.address,
        out_stride=out.stride_lines,
        bias_addr=0 if bias is None else bias,
        act_format=act.fmt,
        weight_format=weights.fmt,
        stream=1,
        init=Init.ZERO if bias is None else Init.BIAS,
    )
