# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: router, gate, the chosen experts, weighted sum (`golden.kernels.moe`).

Which experts are fetched is decided at run time, by the tile's own sequencer from the ids that
the top-k unit leaves in tile SRAM (`sim.programs.visits`).
"""

from golden.formats import Format
from golden.models import GateSpec
from sim.programs.builder import TileProgram
from sim.programs.gate import gates
from sim.programs.memory import Buffer, Weights
from sim.programs.moe import ExpertImage, close_gate, columns, open_gate, take
from sim.programs.visits import Visits


def mixture(
    p: TileProgram,
    x: Buffer,
    router: Weights,
    router_bias: Buffer | None,
    image: ExpertImage,
    spec: GateSpec,
    act: Format,
    out: Buffer,
    choice_bias: Buffer | None = None,
    shared: ExpertImage | None = None,
) -> None:
    """Normed FP32 activations x [tokens, hidden] to the weighted sum `out` [tokens, hidden].

    `out` may have the place of x where `dense` holds. The program ends with this: what comes
    behind it would not know of its commands.
    """
    memory = p.memory
    p.stream(router)
    if shared is not None:
        # These weights depend on nothing: they are fetched while the gate decides.
        p.stream(shared.gate_up, shared.base)
        p.stream(shared.down, shared.base + shared.down_offset)
    given = None
    if act is not Format.BF16:
        given = memory.buffer("x_act", x.rows, x.cols, act, weight=image.gate_up.fmt)
        p.vector(x, given)
    rounded = memory.buffer("x_bf16", x.rows, x.cols, Format.BF16, weight=image.gate_up.fmt)
    p.vector(x, rounded)
    given = given or rounded
    logits = memory.buffer("logits", x.rows, router.n)
    take(p, rounded, router, logits, None if router_bias is None else router_bias.address)
    ids, shares = gates(p, "gate", logits, spec, choice_bias)
    if shared is None:
        p.vector(x, out, mask=(0, 0))  # zeros
    else:
        shared_expert(p, shared, given, out)
    p.load(p.program.reg("expert.id"), ids.at(x.rows - 1))
    Visits(p, x, given, image, spec, ids, shares, out).issue()


def shared_expert(p: TileProgram, image: ExpertImage, x: Buffer, out: Buffer) -> None:
    """The expert that every token takes, its streams having been started: `out`, in FP32."""
    memory = p.memory
    size = image.intermediate
    hidden = memory.buffer("shared.hidden", x.rows, size, x.fmt, weight=image.down.fmt)
    turns = range(min(2, len(image.blocks())))
    width, places = image.blocks()[0][1:]
    boths = [memory.buffer(f"shared.gate_up{i or ''}", x.rows, 2 * width) for i in turns]
    gated = memory.buffer("shared.gated", x.rows, places)
    for i, (first, padded, count) in enumerate(image.blocks()):
        both = boths[i % len(boths)]
        take(p, x, image.gate_up, both, None, 2 * padded)
        part = columns(gated, 0, count)
        open_gate(p, image.activation, columns(both, 0, count), part)
        close_gate(
            p, image.activation, columns(both, padded, count), part, columns(hidden, first, count)
        )
    take(p, hidden, image.down, out, None)
