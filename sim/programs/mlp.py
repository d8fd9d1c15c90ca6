# SPDX-License-Identifier: Apache-2.0
"""A gated MLP that every token takes: a shared expert, or the MLP of a dense layer
(`golden.kernels.moe.expert`).

Its blocks follow each other: while the array works on one, the vector engine has the one before.
"""

from sim.programs.builder import TileProgram
from sim.programs.expert_space import Space
from sim.programs.memory import Buffer
from sim.programs.moe import ExpertImage, close_gate, columns, open_gate, take


def fetch(p: TileProgram, image: ExpertImage) -> None:
    """Starts the streams of the MLP's weights, which depend on nothing."""
    p.stream(image.gate_up, image.base)
    p.stream(image.down, image.base + image.down_offset)


def mlp(p: TileProgram, name: str, image: ExpertImage, x: Buffer, out: Buffer | None) -> Buffer:
    """The MLP of activations x [tokens, hidden], its streams having been started.

    The result, in FP32, is `out` or else a buffer `{name}.down`.
    """
    space = Space.allocate(p.memory, x.rows, image, x.fmt, name, int(out is None))
    result = space.down[0] if out is None else out
    for i, (first, padded, count) in enumerate(image.blocks()):
        both = space.both[i % len(space.both)]
        take(p, x, image.gate_up, both, None, 2 * padded)
        part = columns(space.gated, 0, count)
        open_gate(p, image.activation, columns(both, 0, count), part)
        hidden = columns(space.hidden, first, count)
        close_gate(p, image.activation, columns(both, padded, count), part, hidden)
    take(p, space.hidden, image.down, result, None)
    return result
