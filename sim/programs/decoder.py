# SPDX-License-Identifier: Apache-2.0
"""A whole decoder, one token: layers, final norm, unembedding, the best id
(`golden.kernels.decoder`).
"""

from dataclasses import dataclass

from golden.formats import Format
from golden.kernels.attention import Chunk
from golden.kernels.decoder import HEAD
from golden.kernels.layer import LayerShape
from sim.programs.builder import TileProgram
from sim.programs.layer import LayerPlace, layer, norm
from sim.programs.memory import Buffer, Weights


@dataclass(frozen=True)
class DecoderPlace:
    """Where the weights lie, and what the host writes and reads for a token: its row of the
    embedding `x`, its RoPE rows, and the next token's id.
    """

    layers: list[LayerPlace]
    final_norm: Buffer
    unembedding: Weights
    x: Buffer
    cosine: Buffer
    sine: Buffer
    ids: Buffer


def head(p: TileProgram, place: DecoderPlace, x: Buffer, eps: float) -> None:
    """Logits of the next token (buffer `logits`), and the best one (buffers `ids` and `best`)."""
    memory, bf16 = p.memory, Format.BF16
    normed = memory.buffer("normed", 1, x.cols, bf16, weight=bf16)
    norm(p, "norm", x, place.final_norm, eps, normed)
    logits = memory.buffer("logits", 1, place.unembedding.n)
    p.matmul(normed, place.unembedding, logits)
    best = memory.scalars("best", 1)
    p.command(
        "topk",
        score_addr=logits.address,
        count=logits.cols,
        k=1,
        ids_addr=place.ids.address,
        scores_addr=best.address,
    )


def decoder(
    p: TileProgram,
    shapes: list[LayerShape],
    place: DecoderPlace,
    token: int,
    parts: list[list[Chunk]],
) -> dict[str, dict[str, Buffer]]:
    """One token, number `token` of the text; `parts` are those of each layer.

    Returns the buffers of every layer and of the head, by the names of their traces.
    """
    found: dict[str, dict[str, Buffer]] = {}
    x = place.x
    for i, (shape, mine) in enumerate(zip(shapes, place.layers, strict=True)):
        x = layer(p, shape, mine, x, place.cosine, place.sine, token, parts[i])
        found[f"layer{i}"] = dict(p.memory.buffers)
    head(p, place, x, shapes[-1].eps)
    return found | {HEAD: dict(p.memory.buffers)}
