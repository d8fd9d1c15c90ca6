# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: gate, fetch of the chosen experts, weighted sum (`golden.kernels.moe`)."""

from dataclasses import dataclass

import numpy as np

from golden.formats import Format
from golden.fp32 import bits
from golden.hbm_layout import pack_codes, pack_lines
from golden.kernels.moe import ALPHA, LIMIT, Expert, Matrix
from golden.kernels.trace import Stored
from golden.models import GateSpec
from hw.config import LINE_BYTES
from sim.assembler import Reg
from sim.programs.builder import TileProgram
from sim.programs.gate import gate as gate
from sim.programs.gate import gates
from sim.programs.memory import Buffer, TileMemory, Weights


@dataclass(frozen=True)
class ExpertImage:
    """The experts in HBM, `size` bytes apart: per expert both matrices and both biases."""

    base: int
    size: int
    count: int
    gate_up: Weights
    down: Weights
    gate_up_bias: int  # offsets into an expert's bytes
    down_bias: int
    gate_up_lines: int
    down_lines: int
    down_offset: int
    intermediate: int


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


def place_experts(memory: TileMemory, experts: list[Expert]) -> ExpertImage:
    """Packs all experts into the HBM slice."""
    images = []
    offsets: list[int] = []
    for e in experts:
        parts: list[bytes] = []
        for matrix in (e.gate_up, e.down):
            scratch = TileMemory(memory.config)
            weights = scratch.weights("expert", matrix.codes, matrix.scales, matrix.fmt, True)
            parts += [bytes(scratch.hbm_image), bias_lines(matrix.bias)]
            if matrix is e.gate_up:
                gate_up = weights
            else:
                down = weights
        offsets = list(np.cumsum([0] + [len(part) for part in parts]))
        images.append(b"".join(parts))
    base = memory.hbm("experts", b"".join(images))
    return ExpertImage(
        base,
        len(images[0]),
        len(experts),
        gate_up,
        down,
        int(offsets[1]),
        int(offsets[3]),
        int(offsets[2] - offsets[1]) // LINE_BYTES,
        int(offsets[4] - offsets[3]) // LINE_BYTES,
        int(offsets[2]),
        experts[0].intermediate,
    )


def expert(
    p: TileProgram, name: str, x: Buffer, image: ExpertImage, ids: Buffer, place: int
) -> Buffer:
    """The expert whose id is the `place`-th of `ids`, on activations x: its output in FP32."""
    memory, size = p.memory, image.intermediate
    half = image.gate_up.n // 2
    number, where = p.program.reg("expert"), p.program.reg("expert_address")
    p.load(number, ids.at(0, place))
    p.program.mul(where, number, imm=image.size)
    p.program.add(where, where, imm=image.base)
    bias1, bias2 = (
        memory.scalars(f"{name}.bias1", 2 * half),
        memory.scalars(f"{name}.bias2", image.down.n),
    )
    p.stream(image.gate_up, where)
    stream_down(p, image, where)
    for bias, offset, lines in (
        (bias1, image.gate_up_bias, image.gate_up_lines),
        (bias2, image.down_bias, image.down_lines),
    ):
        p.command("dma", hbm_addr=where + offset, local_addr=bias.address, lines=lines, rows=1)
    both = memory.buffer(f"{name}.gate_up", x.rows, 2 * half)
    take(p, x, image.gate_up, both, bias1)
    gates = Buffer(both.name, both.address, x.rows, size, both.fmt, both.stride)
    ups = Buffer(both.name, both.at(0, half), x.rows, size, both.fmt, both.stride)
    gated = memory.buffer(f"{name}.gated", x.rows, size)
    p.vector(
        gates,
        gated,
        b=ALPHA,
        clamp=LIMIT,
        clamp_hi=True,
        mul=True,
        function="sigmoid",
        mul2=True,
        s4="x",
    )
    hidden = memory.buffer(f"{name}.hidden", x.rows, size, x.fmt, weight=image.down.fmt)
    p.vector(
        ups,
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
    result = memory.buffer(f"{name}.down", x.rows, image.down.n)
    take(p, hidden, image.down, result, bias2)
    return result


def stream_down(p: TileProgram, image: ExpertImage, where: Reg) -> None:
    """Starts the stream of the down projection behind that of gate and up."""
    p.stream(image.down, where + image.down_offset)


def take(p: TileProgram, act: Buffer, weights: Weights, out: Buffer, bias: Buffer) -> None:
    """A matmul with weights whose stream has been started."""
    p.command(
        "matmul",
        act_addr=act.address,
        act_stride=act.stride_lines,
        m=act.rows,
        n=weights.n,
        k=weights.k,
        out_addr=out.address,
        out_stride=out.stride_lines,
        bias_addr=bias.address,
        act_format=act.fmt,
        weight_format=weights.fmt,
        stream=1,
        init=1,
    )


def moe(
    p: TileProgram,
    x: Buffer,
    router: Weights,
    router_bias: Buffer,
    image: ExpertImage,
    k: int,
    act: Format,
    out: Buffer,
) -> None:
    """Normed FP32 activations x [tokens, hidden] to the weighted sum `out` [tokens, hidden]."""
    memory = p.memory
    rounded = memory.buffer("x_bf16", x.rows, x.cols, Format.BF16, weight=image.gate_up.fmt)
    p.vector(x, rounded)
    given = rounded
    if act is not Format.BF16:
        given = memory.buffer("x_act", x.rows, x.cols, act, weight=image.gate_up.fmt)
        p.vector(x, given)
    logits = memory.buffer("logits", x.rows, router.n)
    p.matmul(rounded, router, logits, router_bias)
    ids, shares = gates(p, "gate", logits, GateSpec(router.n, k, "softmax"))
    for t in range(x.rows):
        for i in range(k):
            result = expert(p, f"t{t}.e{i}", given.row(t), image, ids.row(t), i)
            share = Buffer("share", shares.at(t, i), 1, 1, Format.FP32, 4)
            if i == 0:
                p.vector(result, out.row(t), b=share, b_row=True, mul=True)
            else:
                p.vector(
                    result,
                    out.row(t),
                    b=share,
                    b_row=True,
                    d=out.row(t),
                    mul=True,
                    add=True,
                    s3="d",
                )
