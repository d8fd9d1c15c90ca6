# SPDX-License-Identifier: Apache-2.0
"""The gates: from a tile's logits to the ids and shares of each token (`golden.kernels.gate`)."""

from golden.kernels.attention import LOG2E
from golden.kernels.gate import sum_constants
from golden.models import GateSpec
from hw.isa import Function, Kind, Op1, Reduce, Select
from sim.programs.builder import TileProgram
from sim.programs.memory import Buffer


def gates(
    p: TileProgram, name: str, logits: Buffer, spec: GateSpec, bias: Buffer | None = None
) -> tuple[Buffer, Buffer]:
    """The gate of all rows of logits [T, experts]: (ids, shares), [T, top_k] each.

    One TOPK per token; VECTOR commands for all tokens together: two for softmax scoring, three for
    sigmoid. `bias` [experts] is that of the choice.
    """
    memory, tokens, k = p.memory, logits.rows, spec.top_k
    scores = logits
    if spec.scoring == "sigmoid":
        scores = memory.buffer(f"{name}.scores", tokens, spec.experts)
        p.vector(logits, scores, function="sigmoid")
    ids = memory.buffer(f"{name}.ids", tokens, k)
    chosen = memory.buffer(f"{name}.chosen", tokens, k)
    for t in range(tokens):
        p.work.scores(spec.experts)
        p.command(
            "topk",
            score_addr=scores.at(t),
            count=spec.experts,
            k=k,
            ids_addr=ids.at(t),
            scores_addr=chosen.at(t),
            bias_addr=0 if bias is None else bias.address,
            use_bias=int(bias is not None),
            groups_log2=spec.groups.bit_length() - 1,
            groups_kept=spec.groups_kept,
        )
    total = memory.scalars(f"{name}.total", tokens)
    parts = chosen
    if spec.scoring == "softmax":
        parts = memory.buffer(f"{name}.terms", tokens, k)
        exponentials(p, chosen, parts, total)
    else:
        factor, addend = sum_constants(spec)
        p.vector(
            chosen,
            b=float(factor),
            d=float(addend),
            mul=True,
            add=True,
            s3="d",
            reduce="sum",
            into=total,
        )
    shares = memory.buffer(f"{name}.shares", tokens, k)
    p.vector(
        parts,
        shares,
        b=total,
        b_row=True,
        op1="sub",
        s1="x",
        add=True,
        function="reciprocal",
        mul2=True,
        s4="x",
    )
    return ids, shares


def exponentials(p: TileProgram, chosen: Buffer, terms: Buffer, total: Buffer) -> None:
    """exp2((x - first of the row) log2 e) and its row sums."""
    p.command(
        "vector",
        a_addr=chosen.address,
        a_stride=chosen.stride_words if chosen.rows > 1 else 0,
        a_format=chosen.fmt,
        # The first of each row, which is the largest, is a scalar of that row.
        b_kind=Kind.ROW,
        b_addr=chosen.address,
        b_stride=chosen.stride_words,
        b_format=chosen.fmt,
        d_kind=Kind.IMMEDIATE,
        d_addr=LOG2E,
        rows=chosen.rows,
        cols=chosen.cols,
        op1=Op1.SUB,
        s1=Select.B,
        mul=1,
        s2=Select.D,
        function=Function.EXP2,
        store=1,
        out_addr=terms.address,
        out_format=terms.fmt,
        out_stride=terms.stride_words if terms.rows > 1 else 0,
        reduce=Reduce.SUM,
        reduce_addr=total.address,
    )


def gate(p: TileProgram, name: str, logits: Buffer, k: int) -> tuple[Buffer, Buffer]:
    """Top-k of one row of logits and the softmax over the chosen: (ids, shares)."""
    return gates(p, name, logits, GateSpec(logits.cols, k, "softmax"))
