# SPDX-License-Identifier: Apache-2.0
"""Tile SRAM of experts: the buffers that one after the other works in, and how much of an expert
fits at once.
"""

from dataclasses import dataclass, replace

from golden.formats import Format
from golden.models import GateSpec
from hw.config import TileConfig
from sim.errors import InputError
from sim.programs.builder import TileProgram
from sim.programs.memory import Buffer, TileMemory, Weights, align_up, widest
from sim.programs.moe import ExpertImage

BLOCK_CYCLES = 100  # what a block costs (measured on `small`): waits between the two engines


@dataclass(frozen=True)
class MoeShape:
    """Sizes and formats of a block of experts, `shared` that of the shared expert's weights if
    there is one; `residual`: its result is added to a stream.
    """

    hidden: int
    intermediate: int
    act: Format
    weight: Format
    shared: Format | None = None
    residual: bool = False


@dataclass(frozen=True)
class Space:
    """Buffers of one expert at a time, in blocks. `both` and `down` take turns from block to block,
    where there are several. An MLP's result that has a place of its own has none in `down`.
    """

    both: tuple[Buffer, ...]
    gated: Buffer
    hidden: Buffer
    down: tuple[Buffer, ...]
    block: int  # columns of a block of the result

    @classmethod
    def allocate(
        cls,
        memory: TileMemory,
        rows: int,
        image: ExpertImage,
        act: Format,
        name: str = "expert",
        results: int | None = None,
    ) -> "Space":
        """`results` counts the blocks in `down`: 1 is the whole result, None is as many as needed
        for blocks.
        """
        width = 2 * image.blocks()[0][1]
        count, n = len(image.blocks()), image.down.n
        block = n if count == 1 or results is not None else min(image.block, n)
        turns = range(1 if count == 1 else 2)
        downs = turns if results is None else range(results)
        return cls(
            tuple(memory.buffer(f"{name}.gate_up{i or ''}", rows, width) for i in turns),
            memory.buffer(f"{name}.gated", rows, image.blocks()[0][2]),
            memory.buffer(f"{name}.hidden", rows, image.intermediate, act, weight=image.down.fmt),
            tuple(memory.buffer(f"{name}.down{i or ''}", rows, block) for i in downs),
            block,
        )


def dense(tokens: int, experts: int) -> bool:
    """Whether every token is sure to have chosen every expert that is visited."""
    return tokens == 1 or experts == 1


def check_block(config: TileConfig, intermediate: int, act: Format, block: int) -> None:
    """InputError unless an expert can be computed in blocks of `block` places (0: what fits).

    Blocks must begin where the vector engine can write: at a multiple of its lanes, and of an MX
    format at a new scale.
    """
    unit = config.lanes if act is Format.BF16 else max(32, config.lanes)
    whole = align_up(intermediate, config.lanes)
    if block < whole and block % unit:
        raise InputError(
            "block",
            block,
            f"it must be a multiple of {unit} on this tile, or {whole} or more",
            f"take {align_up(block, unit)}, or 0 for what fits",
        )


def block_size(
    config: TileConfig, tokens: int, shape: MoeShape, spec: GateSpec | None, taken: int = 0
) -> int:
    """Places of a block of an expert's intermediate: of the sizes that fit tile SRAM, of which
    `taken` bytes are not free, the one that costs least. `spec` is None for one MLP without a gate.

    A block costs some BLOCK_CYCLES; and the array waits while the vector engine has the last one,
    of as many rows as an expert has on average. InputError when not even the smallest fits.
    """
    whole = align_up(shape.intermediate, config.lanes)
    unit = max(32, config.lanes)
    widths = [whole, *(w for w in (128, 64, 32) if w % unit == 0 and w < whole)]
    rows = tokens if spec is None else max(1, tokens * spec.top_k // spec.experts)

    def cost(width: int) -> float:
        return BLOCK_CYCLES * -(-whole // width) + 2 * rows * width / config.lanes

    def fits(width: int) -> bool:
        try:
            allocate(config, tokens, shape, spec, taken, width)
        except InputError:
            return False
        return True

    fitting = [width for width in widths if fits(width)]
    if not fitting:
        allocate(config, tokens, shape, spec, taken, widths[-1])  # says what does not fit
    return min(fitting, key=cost)


def allocate(
    config: TileConfig,
    tokens: int,
    shape: MoeShape,
    spec: GateSpec | None,
    taken: int,
    width: int,
) -> None:
    """All buffers of a block of experts or of one MLP, in a tile SRAM of which `taken` bytes are
    not free.
    """
    memory = TileMemory(config)
    memory.buffer("taken", 1, taken // 4)
    if spec is None:
        allocate_mlp(memory, tokens, shape, width)
    else:
        allocate_all(memory, tokens, shape, spec, width)


def image_of(config: TileConfig, shape: MoeShape, width: int) -> ExpertImage:
    """An expert of these sizes in blocks of `width`, wherever it lies."""
    half = align_up(shape.intermediate, config.lanes)
    up, down = (
        Weights(n, k, shape.weight, 0, 0, True)
        for n, k in ((2 * half, shape.hidden), (shape.hidden, shape.intermediate))
    )
    return ExpertImage(0, 1, 1, up, down, 0, 0, shape.intermediate, width, "")


def allocate_mlp(memory: TileMemory, tokens: int, shape: MoeShape, width: int) -> None:
    """All buffers of one MLP and its caller."""
    image = image_of(memory.config, shape, width)
    memory.buffer("x", tokens, shape.hidden, shape.act, weight=shape.weight)
    memory.buffer("out", tokens, shape.hidden)
    Space.allocate(memory, tokens, image, shape.act, results=1)


def allocate_all(
    memory: TileMemory, tokens: int, shape: MoeShape, spec: GateSpec, width: int
) -> None:
    """All buffers that `mixture` and its caller take, in no particular order."""
    hidden, act = shape.hidden, shape.act
    alone = dense(tokens, spec.experts)
    formats = [shape.weight] if shape.shared is None else [shape.weight, shape.shared]
    image = image_of(memory.config, shape, width)
    for i in range(1 if alone and not shape.residual else 2):
        memory.buffer(f"x{i}", tokens, hidden)
    for i in range(1 + (act is not Format.BF16)):
        memory.buffer(
            f"rounded{i}", tokens, hidden, Format.BF16, weight=widest(Format.BF16, *formats)
        )
    if not alone:
        memory.buffer("expert.x", tokens, hidden, act, weight=shape.weight)
    for i in range(2 if spec.scoring == "sigmoid" else 1):
        memory.buffer(f"scores{i}", tokens, spec.experts)
        memory.buffer(f"bias{i}", 1, spec.experts)
    for i in range(4):
        memory.buffer(f"gate{i}", tokens, spec.top_k)
    memory.scalars("total", tokens)
    memory.buffer("biases", 2, image.gate_up.n + hidden)
    Space.allocate(memory, tokens, image, act)
    if shape.shared is not None:
        image = image_of(memory.config, replace(shape, weight=shape.shared), width)
        Space.allocate(memory, tokens, image, act, "shared", int(shape.residual))
    memory.buffer("scratch", 1, 1)


def account(
    p: TileProgram, image: ExpertImage, act: Format, counts: list[int], alone: bool
) -> None:
    """Adds the work of visited experts, given the rows of each: which they are is not known when
    the program is made.
    """
    work, config = p.work, p.config
    hidden, size = image.down.n, image.intermediate
    for rows in counts:
        work.bytes(config, image.traffic(p.memory))
        for weights in (image.gate_up, image.down):
            work.matmul(config, rows, weights.n, weights.k, act, weights.fmt)
        for cols in (size, size, hidden) + (() if alone else (hidden,)):
            work.vectors(config, rows, cols)
