# SPDX-License-Identifier: Apache-2.0
"""Weights and tokens in the package: the GPT-OSS layer of `sim/data/gptoss_layer0.npz`."""

import json
from importlib.resources import as_file, files

import numpy as np
from numpy.typing import NDArray

from golden.formats import Format
from golden.fp32 import Float32
from golden.kernels.layer import LayerShape, LayerWeights
from golden.kernels.moe import Expert, Matrix

HEAD_DIM = 16
WINDOW = 8
TOP_K = 2


def gptoss_layer0(
    lanes: int, expert_format: Format
) -> tuple[LayerShape, LayerWeights, Float32, Float32, Float32]:
    """A small GPT-OSS decoder layer: (shape, weights, xs [16, 64], cos [16, 8], sin [16, 8]).

    4 query heads and 2 KV heads of 16, window 8 (and a ring of 8), the best 2 of 8 experts of width
    64. Experts are rounded to `expert_format` and padded to `lanes`, other matrices are BF16. The
    vector is of an independent implementation; the copy beside the tests holds its output too.
    """
    with as_file(files("sim") / "data" / "gptoss_layer0.npz") as path, np.load(path) as file:
        arrays = {name: file[name] for name in file.files if name != "__meta__"}
        meta = json.loads(str(file["__meta__"]))

    def attention(parts: str, kind: str) -> NDArray:
        return np.concatenate([arrays[f"w_self_attn_{part}_proj_{kind}"] for part in parts])

    # The file's experts are [E, in, out].
    experts = [
        Expert.of(gate_up.T, gate_up_bias, down.T, down_bias, expert_format, lanes)
        for gate_up, gate_up_bias, down, down_bias in zip(
            *(
                arrays[f"w_mlp_experts_{name}"]
                for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
            ),
            strict=True,
        )
    ]
    weights = LayerWeights(
        arrays["w_input_layernorm_weight"],
        Matrix.of(attention("qkv", "weight"), Format.BF16, attention("qkv", "bias")),
        arrays["w_self_attn_sinks"],
        Matrix.of(attention("o", "weight"), Format.BF16, attention("o", "bias")),
        arrays["w_post_attention_layernorm_weight"],
        Matrix.of(arrays["w_mlp_router_weight"], Format.BF16, arrays["w_mlp_router_bias"]),
        experts,
    )
    xs, cos, sin = arrays["x"][0], arrays["cos"][0], arrays["sin"][0]
    heads = len(weights.sinks)
    kv_heads = len(arrays["w_self_attn_k_proj_bias"]) // HEAD_DIM
    shape = LayerShape(
        xs.shape[1], heads, kv_heads, HEAD_DIM, WINDOW, WINDOW, TOP_K, meta["rms_norm_eps"]
    )
    return shape, weights, xs, cos, sin
