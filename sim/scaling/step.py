# SPDX-License-Identifier: Apache-2.0
"""Cycles of one decode step of a full model on full-size slices, layer by layer.

The work is shared evenly by S slices. Parts of a layer follow one another and are added; inside a
part the longer of HBM and array counts:

    matrices   max(bytes / S / HBM rate / f_stream, MAC / S / array rate / f_dense)
    experts    the same with f_experts for HBM, bytes of the experts that the batch touches
    attention  max(cache bytes / S / HBM rate / f_stream, MAC / S / array rate / f_attention)
    commands   the part of a measured layer that none of these explains, once per layer
    exchange   exposed collectives

The fractions f are the measured ones; all equal to 1 and no commands is the roofline.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields

from golden.formats import Format, products_per_slice
from golden.models import ModelConfig
from golden.traffic import Part, attention_flops, kv_bytes_read, tensors
from hw.config import preset
from sim.scaling.assumptions import Assumptions
from sim.scaling.records import (
    CONFIG,
    Measurement,
    attention_work,
    experts_stream,
    layer_dense,
)

# Formats in which the array takes a checkpoint's weights, for its rate; INT4 values fit E4M3.
ARRAY_FORMAT = {
    "bf16": Format.BF16,
    "fp32": Format.BF16,
    "mxfp4": Format.MXFP4,
    "fp8-e4m3-128x128": Format.MXFP8_E4M3,
    "int4-32": Format.MXFP8_E4M3,
}
EXPERT_ACTIVATIONS = Format.MXFP8_E4M3  # of routed experts; everything else has BF16


@dataclass(frozen=True)
class Fractions:
    """Measured fractions of rooflines, and cycles of a layer beside them."""

    stream: float = 1.0
    dense: float = 1.0
    attention: float = 1.0
    experts: float = 1.0
    commands: float = 0.0


ROOFLINE = Fractions()


@dataclass(frozen=True)
class Step:
    """Cycles of a decode step, by part."""

    matrices: float
    experts: float
    attention: float
    commands: float
    exchange: float

    @property
    def total(self) -> float:
        return sum(astuple(self))

    def __add__(self, other: "Step") -> "Step":
        return Step(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def touched(experts: int, chosen: int, batch: int) -> float:
    """Expected distinct experts of `batch` tokens that choose evenly: E (1 - (1 - k / E)^B)."""
    return experts * (1.0 - (1.0 - chosen / experts) ** batch)


def matrix_cycles(
    size: float,
    macs: Mapping[tuple[Format, Format], float],
    a: Assumptions,
    stream: float,
    dense: float,
) -> float:
    """The longer of reading `size` bytes and doing `macs` by pair of formats, over all slices."""
    tile = a.chip.tile
    read = size / a.slices / float(tile.hbm_rate) / stream
    cells = tile.rows * tile.cols
    work = sum(n / (cells * products_per_slice(*pair)) for pair, n in macs.items())
    return max(read, work / a.slices / dense)


def sums(
    model: ModelConfig, layer: int | None, batch: int
) -> dict[bool, tuple[float, dict[tuple[Format, Format], float]]]:
    """Bytes and MACs by pair of formats of a layer's routed experts (True) and of the rest (False).

    `layer` None is what comes once: embedding row, final norm, head. A tensor is spread evenly over
    the layers that have it.
    """
    found: dict[bool, tuple[float, dict[tuple[Format, Format], float]]] = {
        False: (0.0, {}),
        True: (0.0, {}),
    }
    for t in tensors(model):
        once = t.part is Part.HEAD or t.name in ("embedding row", "final norm")
        if once != (layer is None):
            continue
        layers = 1
        if layer is not None:
            sparse = (
                t.part in (Part.ROUTED, Part.SHARED)
                or "router" in t.name
                or (t.part is Part.OTHER and t.name in ("gate and up bias", "down bias"))
            )
            if (sparse and layer < model.dense_layers) or (
                t.part is Part.DENSE and layer >= model.dense_layers
            ):
                continue
            layers = (
                model.moe_layers
                if sparse
                else model.dense_layers
                if t.part is Part.DENSE
                else model.layers
            )
        routed = t.part is Part.ROUTED
        used = t.used / layers
        read = used
        if routed:
            read *= touched(model.moe.experts, model.moe.topk, batch) / model.moe.topk
        act = EXPERT_ACTIVATIONS if routed else Format.BF16
        pair = act, ARRAY_FORMAT[t.format.name]
        size, macs = found[routed]
        if t.multiplies:
            macs[pair] = macs.get(pair, 0.0) + t.parameters * used * batch
        found[routed] = size + t.bytes * read, macs
    return found


def layer_step(model: ModelConfig, layer: int, a: Assumptions, f: Fractions, batch: int) -> Step:
    """Cycles of one layer for `batch` tokens."""
    parts = sums(model, layer, batch)
    window = model.window(layer)
    keys = a.context if window is None else min(a.context, window)
    one, all_keys = kv_bytes_read(model, 1), attention_flops(model, 1)
    cache = one / model.layers * keys * batch
    scores = all_keys / model.layers / 2 * keys * batch
    bf16 = Format.BF16
    return Step(
        matrix_cycles(*parts[False], a, f.stream, f.dense),
        matrix_cycles(*parts[True], a, f.experts, f.dense),
        matrix_cycles(cache, {(bf16, bf16): scores}, a, f.stream, f.attention),
        f.commands,
        a.collectives_per_layer * a.collective_s * a.clock_hz,
    )


def decode_step(model: ModelConfig, a: Assumptions, f: Fractions, batch: int = 1) -> Step:
    """All layers, and the head."""
    head = sums(model, None, batch)[False]
    step = Step(matrix_cycles(*head, a, f.stream, f.dense), 0.0, 0.0, 0.0, 0.0)
    for layer in range(model.layers):
        step = step + layer_step(model, layer, a, f, batch)
    return step


def fractions(found: Mapping[str, Measurement]) -> Fractions:
    """The fractions of measurements; 1 and no commands where one is missing, which the caller
    tells.

    `commands` is what a measured layer's token takes beyond its parts: cycles / tokens less
    dense bytes / rate / f_stream, expert bytes / rate / f_experts and attention / f_attention.
    """
    parts = [f.name for f in fields(Fractions) if f.name != "commands"]
    got = {name: found[name].fraction for name in parts if name in found}
    if len(got) < len(parts) or "layer" not in found:
        return Fractions(**got)
    tile, one = preset(CONFIG).tile, found["layer"]
    s = one.settings
    # Decoding starts from an empty cache, so a token sees half of the keys on average.
    keys = -(-s["tokens"] // 2)
    explained = (
        float(layer_dense(tile, s)) / got["stream"]
        + float(experts_stream(tile, s)) / got["experts"]
        + float(attention_work(tile, {**s, "context": keys})) / got["attention"]
    )
    return Fractions(**got, commands=max(0.0, one.cycles / s["tokens"] - explained))
