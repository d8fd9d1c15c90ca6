# SPDX-License-Identifier: Apache-2.0
"""The character model: a small decoder in the shape of GPT-OSS that predicts printable text.

Its sizes and its vocabulary: a line feed and the 95 printable characters of ASCII. A text starts
after a line feed, which also ends a paragraph.
"""

import numpy as np
from numpy.typing import NDArray

from golden.models import BF16, MXFP4, Gqa, ModelConfig, Moe, Rope

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
START = 0  # the line feed
CONTEXT = 128

CHARACTERS = ModelConfig(
    name="characters",
    title="character model",
    layers=2,
    dense_layers=0,
    dense_intermediate=0,
    hidden=128,
    vocab=len(VOCABULARY),
    attention=Gqa(heads=8, kv_heads=2, head_dim=16, window=32, scale=0.25),
    moe=Moe(
        experts=8,
        topk=2,
        shared=0,
        intermediate=64,
        gate="softmax",
        activation="clamped-swiglu",
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        expert_bias=True,
    ),
    rope=Rope(
        dim=16,
        layout="half-split",
        theta=1000.0,
        factor=1.0,  # nothing is stretched
        original_positions=CONTEXT,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        table_scale=1.0,
        max_positions=CONTEXT,
    ),
    norm_eps=1e-5,
    attention_format=BF16,
    dense_format=BF16,
    routed_format=MXFP4,
    shared_format=BF16,
)


def encode(text: str) -> NDArray[np.int64]:
    """Ids [S] of the characters of `text`; ValueError names the first that has none."""
    for character in text:
        if character not in VOCABULARY:
            raise ValueError(f"text must be printable ASCII, not {character!r}")
    return np.array([VOCABULARY.index(character) for character in text], np.int64)


def decode(ids: NDArray[np.int64] | list[int]) -> str:
    """The text of ids [S]."""
    return "".join(VOCABULARY[i] for i in ids)
