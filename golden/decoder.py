# SPDX-License-Identifier: Apache-2.0
"""A decoder's weights by name, as the weight file holds them: experts MXFP4, the rest BF16."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.characters import CHARACTERS
from golden.formats import BLOCK, Format, bf16_to_float32, to_bf16_codes
from golden.models import Gqa, ModelConfig
from golden.quantise import dequantise, quantise

EXPERTS = ("gate_up", "gate_up_bias", "down", "down_bias")
QUANTISED = ("gate_up", "down")


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter; matrices are [out, in], `gate_up` has interleaved rows."""
    if not isinstance(config.attention, Gqa):
        raise ValueError(f"attention must be grouped-query attention, not {config.attention!r}")
    gqa, moe, hidden = config.attention, config.moe, config.hidden
    if hidden % BLOCK or moe.intermediate % BLOCK:
        raise ValueError(
            f"hidden and intermediate must be multiples of {BLOCK}, "
            f"not {hidden!r} and {moe.intermediate!r}"
        )
    queries = gqa.heads * gqa.head_dim
    width = queries + 2 * gqa.kv_heads * gqa.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "qkv": (width, hidden),
        "qkv_bias": (width,),
        "sinks": (gqa.heads,),
        "output": (hidden, queries),
        "output_bias": (hidden,),
        "moe_norm": (hidden,),
        "router": (moe.experts, hidden),
        "router_bias": (moe.experts,),
        "gate_up": (moe.experts, 2 * moe.intermediate, hidden),
        "gate_up_bias": (moe.experts, 2 * moe.intermediate),
        "down": (moe.experts, hidden, moe.intermediate),
        "down_bias": (moe.experts, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab, hidden)}
    for i in range(config.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes | {"final_norm": (hidden,), "unembedding": (config.vocab, hidden)}


def quantised(name: str) -> bool:
    """Whether a parameter is stored as MXFP4."""
    return name.rsplit(".", 1)[-1] in QUANTISED


@dataclass(frozen=True)
class Decoder:
    """`values` are exact, by the names of `parameter_shapes`; `held_out` is text that the training
    did not see, cut to the context; `meta` says how the weights came about.
    """

    config: ModelConfig
    values: Mapping[str, NDArray[np.float64]]
    held_out: list[str] = field(default_factory=list)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = parameter_shapes(self.config)
        found = {name: value.shape for name, value in self.values.items()}
        if found != shapes:
            wrong = sorted(n for n in {*shapes, *found} if shapes.get(n) != found.get(n))
            raise ValueError(f"values must have the names and shapes of the model, not {wrong}")

    def layer(self, index: int) -> dict[str, NDArray[np.float64]]:
        """The parameters of one layer, by the part of their names behind the layer."""
        start = f"layers.{index}."
        return {n.removeprefix(start): v for n, v in self.values.items() if n.startswith(start)}


def rounded(config: ModelConfig, parameters: Mapping[str, NDArray]) -> Decoder:
    """The decoder whose weights are those of `parameters`, rounded to their formats."""
    values = {}
    for name, value in parameters.items():
        if quantised(name):
            values[name] = dequantise(*quantise(value, Format.MXFP4), Format.MXFP4)
        else:
            values[name] = bf16_to_float32(to_bf16_codes(value)).astype(np.float64)
    return Decoder(config, values)


def save(
    path: Path, parameters: Mapping[str, NDArray], held_out: list[str], meta: Mapping[str, Any]
) -> None:
    """Rounds parameters to their formats and writes them.

    BF16 codes are uint16; MXFP4 codes are packed in twos, the even element in the low nibble, with
    their E8M0 scales in an array of their own.
    """
    arrays: dict[str, NDArray] = {}
    for name, value in parameters.items():
        if quantised(name):
            codes, scales = quantise(value, Format.MXFP4)
            assert scales is not None
            arrays[name] = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
            arrays[f"{name}.scales"] = scales
        else:
            arrays[name] = to_bf16_codes(value)
    text = json.dumps({"held_out": held_out, "meta": dict(meta)})
    np.savez_compressed(path, allow_pickle=False, __text__=np.array(text), **arrays)


def load(path: Path, config: ModelConfig = CHARACTERS) -> Decoder:
    """The decoder of a weight file; ValueError when its weights are not those of `config`."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files if name != "__text__"}
        text = json.loads(str(file["__text__"]))
    values = {}
    for name, stored in arrays.items():
        if quantised(name):
            pairs = np.stack([stored & 15, stored >> 4], axis=-1)
            codes = pairs.reshape(*stored.shape[:-1], -1)
            values[name] = dequantise(codes, arrays[f"{name}.scales"], Format.MXFP4)
        elif not name.endswith(".scales"):
            values[name] = bf16_to_float32(stored).astype(np.float64)
    return Decoder(config, values, text["held_out"], text["meta"])
