# SPDX-License-Identifier: Apache-2.0
"""`jalapeno sim generate`: the character model writes text, token by token.

The host gives the tile a row of the embedding and reads the id of the best next token, whose row
it gives next. Everything else is on the tile; the KV cache stays in the KV SRAM.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib.resources import as_file, files

import numpy as np
from numpy.typing import NDArray

from golden import decoder as weight_file
from golden import fp32
from golden.characters import CONTEXT, START, VOCABULARY, encode
from golden.decoder import Decoder
from golden.formats import Format
from golden.kernels.attention import chunks, window_slots
from golden.kernels.decoder import (
    HEAD,
    DecoderWeights,
    generate,
    hardware_weights,
)
from golden.kernels.decoder_rows import all_logits
from golden.kernels.kv import Held
from golden.kernels.layer import LayerCache, rope_rows
from golden.kernels.trace import Machine, Stored
from golden.reference import decoder as reference
from sim.errors import InputError
from sim.kernels.caches import kv_checks
from sim.kernels.layer import place_layer, vector
from sim.kernels.results import kernel_result
from sim.kernels.system import Check, KvCheck, Pick, TileRun, simulate
from sim.kernels.types import Kernel, KernelRequest, KernelResult, Option
from sim.programs.builder import TileProgram
from sim.programs.decoder import DecoderPlace
from sim.programs.decoder import decoder as program
from sim.programs.memory import Buffer, TileMemory
from sim.programs.work import Work

PROMPT = "The "
LOSS_SHARE = 0.005  # how far the hardware's loss may be from the reference's
OPTIONS = {
    "prompt": Option(PROMPT, "what the text begins with, printable ASCII"),
    "tokens": Option(24, "characters to add", most=CONTEXT),
    "held_out": Option(512, "characters of held-out text for the loss", least=2, most=8192),
    "weights": Option(
        "sram", "where matrices stay: KV SRAM, or the HBM slice", choices=("sram", "hbm")
    ),
}


@cache
def model() -> Decoder:
    """The character model of the package."""
    with as_file(files("sim") / "data" / "characters.npz") as path:
        return weight_file.load(path)


def prompt_ids(prompt: str, tokens: int) -> NDArray[np.int64]:
    """Ids of the prompt, behind the id that starts a text."""
    unknown = sorted(set(prompt) - set(VOCABULARY))
    if unknown:
        raise InputError(
            "prompt",
            prompt,
            f"{unknown[0]!r} is not printable ASCII",
            f"give for example --prompt {PROMPT.strip()!r}",
        )
    if len(prompt) + tokens > CONTEXT:
        raise InputError(
            "prompt",
            f"{len(prompt)} characters and {tokens} to add",
            f"the model's context is {CONTEXT}",
            f"take tokens={CONTEXT // 2} and a shorter prompt",
        )
    return np.concatenate([[START], encode(prompt)])


def losses(
    decoder: Decoder, machine: Machine, weights: DecoderWeights, characters: int
) -> tuple[float, float, int]:
    """Bits per character of held-out text, in float64 and by the hardware, and the characters.

    Paragraphs are cut to the context, the last one to what is left. The host takes the softmax of
    the logits.
    """
    exact = rounded = 0.0
    seen = 0
    for line in decoder.held_out:
        ids = np.concatenate([[START], encode(line[: characters - seen])])
        if len(ids) == 1:
            break
        exact += reference.bits(reference.logits(decoder, ids[:-1]), ids[1:]).sum()
        rounded += reference.bits(all_logits(machine, weights, ids[:-1]), ids[1:]).sum()
        seen += len(ids) - 1
    return float(exact / seen), float(rounded / seen), seen


def write(memory: TileMemory, buffer: Buffer, values: NDArray) -> None:
    """The host writes one FP32 row before a run."""
    memory.fill(buffer, Stored(fp32.bits(np.asarray(values, np.float32))[None, :], Format.FP32))


def place(p: TileProgram, weights: DecoderWeights, stream: bool) -> DecoderPlace:
    """Puts the weights into the tile, and reserves what the host writes and reads."""
    memory, matrix = p.memory, weights.unembedding
    hidden, half = weights.embedding.shape[1], weights.cosines.shape[1]
    return DecoderPlace(
        [
            place_layer(p, shape, mine, stream)
            for shape, mine in zip(weights.shapes, weights.layers, strict=True)
        ],
        vector(memory, "final_norm", weights.final_norm),
        memory.weights("unembedding", matrix.codes, matrix.scales, matrix.fmt, stream),
        memory.buffer("x", 1, hidden),
        memory.buffer("cosine", 1, 2 * half),
        memory.buffer("sine", 1, 2 * half),
        memory.scalars("ids", 1),
    )


def cache_checks(
    where: DecoderPlace, caches: list[LayerCache], context: int, cols: int
) -> list[KvCheck]:
    """What the KV SRAM must hold after `context` tokens."""
    return [
        check
        for i, (mine, cache) in enumerate(zip(where.layers, caches, strict=True))
        for g, region in enumerate(mine.regions)
        for check in kv_checks(
            f"layer{i}.kv{g}",
            region,
            Held(cache.keys[: min(context, region.ring), g]),
            Held(cache.values[: min(context, region.ring), g]),
            cols,
        )
    ]


def run(request: KernelRequest) -> KernelResult:
    """Every token is one run of a program of its own, all in one simulation."""
    config, s = request.config, request.settings
    if config.tiles != 1:
        raise InputError(
            "--config", config.name, "the model runs on one tile", "give --config small"
        )
    tile = config.tile
    prompt = prompt_ids(str(s["prompt"]), int(s["tokens"]))
    made, machine = model(), Machine(tile.rows, tile.lanes)
    weights = hardware_weights(made, tile.lanes, max(8, tile.cols))
    memory, work, runs = TileMemory(tile), Work(), []
    where = place(TileProgram(memory), weights, s["weights"] == "hbm")
    mark, last = memory.mark(), len(prompt) + int(s["tokens"]) - 2
    for t, (token, step, caches) in enumerate(generate(machine, weights, prompt, int(s["tokens"]))):
        memory.rewind(mark)
        if t:
            memory.forget()
        cosine, sine = rope_rows(weights.cosines[t], weights.sines[t])
        write(memory, where.cosine, cosine)
        write(memory, where.sine, sine)
        pick = None
        if t < len(prompt):
            write(memory, where.x, weights.embedding[token])
        else:
            pick = Pick(where.ids, where.x)
        p = TileProgram(memory)
        valid = [window_slots(t + 1, shape.ring, shape.window) for shape in weights.shapes]
        parts = [chunks(len(v), v, x.chunk) for v, x in zip(valid, weights.shapes, strict=True)]
        buffers = program(p, weights.shapes, where, t, parts)
        work.include(p.work)
        # Every intermediate of the last token, else what decides the text.
        checks = [
            Check(replace(buffers[part][name], name=f"{part}.{name}"), stored)
            for part, trace in step.traces.items()
            for name, stored in trace.buffers.items()
            if t == last or (part == HEAD and name in ("logits", "ids"))
        ]
        held = cache_checks(where, caches, t + 1, tile.cols) if t == last else []
        runs.append(TileRun([p.finish()], [memory.snapshot()], checks, held, pick))
    # The simulator is a process of its own: the loss is computed meanwhile.
    with ThreadPoolExecutor(1) as pool:
        loss = pool.submit(losses, made, machine, weights, int(s["held_out"]))
        result = simulate(request, [memory], runs, rows=weights.embedding)
        exact, rounded, characters = loss.result()
    said = [int(found[f"{HEAD}.ids"].codes[0, 0]) for found in result.read[len(prompt) - 1 :]]
    done = kernel_result(
        "generate", request, s, result, [work], abs(rounded - exact), LOSS_SHARE * exact
    )
    extra = {
        "cycles_per_token": done.cycles / len(runs),
        "bits_per_character_float64": exact,
        "bits_per_character_hardware": rounded,
        "held_out_characters": characters,
    }
    return replace(
        done,
        extra=extra,
        sources={**done.sources, **dict.fromkeys(extra, "derived")},
        text=str(s["prompt"]) + "".join(VOCABULARY[i % len(VOCABULARY)] for i in said),
    )


KERNEL = Kernel("generate", "the character model writes text from a prompt", OPTIONS, run)
