# SPDX-License-Identifier: Apache-2.0
"""A decoder layer of DeepSeek R1 or Kimi K2.5 (`golden.kernels.mla_layer`): norm, multi-head latent
attention, residual, norm, experts or one dense MLP, residual.
"""

from dataclasses import dataclass

from golden.formats import Format
from golden.kernels.mla_layer import MlaLayerShape
from sim.programs.builder import TileProgram
from sim.programs.layer import norm
from sim.programs.memory import Buffer, Weights
from sim.programs.mixture import mixture
from sim.programs.mla import MlaPlace, mla
from sim.programs.mlp import fetch, mlp
from sim.programs.moe import ExpertImage


@dataclass(frozen=True)
class MixturePlace:
    """Where router and experts lie, and the bias of the choice [1, experts] in tile SRAM."""

    router: Weights
    choice_bias: Buffer
    experts: ExpertImage
    shared: ExpertImage | None


@dataclass(frozen=True)
class MlaLayerPlace:
    """Where a layer's weights lie: norm weights in tile SRAM; `mlp` is one image if dense."""

    attention_norm: Buffer
    attention: MlaPlace
    mlp_norm: Buffer
    mlp: MixturePlace | ExpertImage


def attention_part(
    p: TileProgram,
    shape: MlaLayerShape,
    weight: Buffer,
    place: MlaPlace,
    stream: Buffer,
    cosine: Buffer,
    sine: Buffer,
    position: int,
) -> Buffer:
    """The residual stream after attention, of T tokens behind `position` cached ones; `weight` is
    that of the norm before it.
    """
    memory = p.memory
    normed = memory.buffer("x", stream.rows, stream.cols, Format.BF16, weight=place.q_a.fmt)
    norm(p, "norm1", stream, weight, shape.eps, normed)
    projected = mla(p, shape.attention, place, normed, cosine, sine, position)
    middle = memory.buffer("middle", stream.rows, stream.cols)
    p.vector(stream, middle, b=projected, op1="add")
    return middle


def mla_layer(
    p: TileProgram,
    shape: MlaLayerShape,
    place: MlaLayerPlace,
    stream: Buffer,
    cosine: Buffer,
    sine: Buffer,
    position: int,
) -> None:
    """The residual stream [T, hidden] of T tokens through the layer: buffer `moe` or `dense`.

    cosine and sine [T, rope] are the tokens' rows of `golden.kernels.mla.rope_rows`. The program
    ends with this.
    """
    memory = p.memory
    middle = attention_part(
        p, shape, place.attention_norm, place.attention, stream, cosine, sine, position
    )
    count, hidden = stream.rows, stream.cols
    if isinstance(place.mlp, ExpertImage):
        fetch(p, place.mlp)
        normed = memory.buffer("normed2", count, hidden, shape.act, weight=place.mlp.gate_up.fmt)
        norm(p, "norm2", middle, place.mlp_norm, shape.eps, normed)
        result = mlp(p, "mlp", place.mlp, normed, None)
        p.vector(middle, memory.buffer("dense", count, hidden), b=result, op1="add")
        return
    assert shape.gate is not None
    normed = memory.buffer("normed2", count, hidden)
    norm(p, "norm2", middle, place.mlp_norm, shape.eps, normed)
    mixture(
        p,
        normed,
        place.mlp.router,
        None,
        place.mlp.experts,
        shape.gate,
        shape.act,
        memory.buffer("moe", count, hidden),
        place.mlp.choice_bias,
        place.mlp.shared,
        middle,
    )
