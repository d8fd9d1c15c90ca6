# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: router, gate, the chosen experts, weighted sum (`golden.kernels.moe`).

Which experts are fetched is decided at run time, by the tile's own sequencer from the ids that
the top-k unit leaves in tile SRAM (`sim.programs.visits`).
"""

from golden.formats import Format
from golden.models import GateSpec
from sim.programs.builder import TileProgram
from sim.programs.gate import gates
from sim.programs.memory import Buffer, Weights, widest
from sim.programs.mlp import fetch, mlp
from sim.programs.moe import ExpertImage, take
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
    base: Buffer | None = None,
) -> None:
    """Normed FP32 activations x [tokens, hidden] to the weighted sum `out` [tokens, hidden], onto
    the residual stream `base` if it is given.

    `out` may have the place of x where `dense` holds. The program ends with this: what comes
    behind it would not know of its commands.
    """
    memory = p.memory
    p.stream(router)
    if shared is not None:
        fetch(p, shared)  # while the gate decides
    formats = [m.gate_up.fmt for m in (image, shared) if m is not None]
    given = None
    if act is not Format.BF16:
        given = memory.buffer("x_act", x.rows, x.cols, act, weight=widest(act, *formats))
        p.vector(x, given)
    widest_of_all = widest(Format.BF16, router.fmt, *formats)
    rounded = memory.buffer("x_bf16", x.rows, x.cols, Format.BF16, weight=widest_of_all)
    p.vector(x, rounded)
    given = given or rounded
    logits = memory.buffer("logits", x.rows, router.n)
    take(p, rounded, router, logits, None if router_bias is None else router_bias.address)
    ids, shares = gates(p, "gate", logits, spec, choice_bias)
    if shared is not None and base is not None:
        p.vector(base, out, b=mlp(p, "shared", shared, given, None), op1="add")
    elif shared is not None:
        mlp(p, "shared", shared, given, out)
    elif base is not None:
        p.vector(base, out)
    else:
        p.vector(x, out, mask=(0, 0))  # zeros
    p.load(p.program.reg("expert.id"), ids.at(x.rows - 1))
    Visits(p, x, given, image, spec, ids, shares, out).issue()
