# SPDX-License-Identifier: Apache-2.0
"""`jalapeno sim gemm`: any M, N, K and pair of formats, on one tile or split over a mesh."""

import numpy as np
from numpy.typing import NDArray

from golden import fp32
from golden.collective import allreduce_sum
from golden.formats import SPECS, Format, parse_format, to_bf16_codes
from golden.kernels.trace import Stored
from golden.matmul import matmul, matmul_bound, matmul_reference
from golden.quantise import quantise
from hw.isa import CollectiveOp, Scope
from sim.errors import InputError
from sim.kernels.results import kernel_result, largest_error
from sim.kernels.system import Check, TileRun, simulate
from sim.kernels.types import MODELS, Kernel, KernelRequest, KernelResult, Option
from sim.programs.builder import TileProgram
from sim.programs.gemm import gemm as program
from sim.programs.memory import Buffer, TileMemory, require

FORMATS = tuple(SPECS[f].name for f in Format if f is not Format.FP32)
OPTIONS = {
    "m": Option(16, "activation rows"),
    "n": Option(64, "result columns"),
    "k": Option(256, "contraction length"),
    "act": Option("mxfp8-e4m3", "format of the activations", choices=FORMATS),
    "weight": Option("mxfp4", "format of the weights", choices=FORMATS),
    "out": Option("bf16", "format of the results in tile SRAM", choices=("bf16", "fp32")),
    "weights": Option("sram", "where the weights start", choices=("sram", "hbm")),
    "split": Option("none", "what a mesh splits over its tiles", choices=("none", "n", "k")),
}


def operand(rng: np.random.Generator, rows: int, cols: int, fmt: Format) -> Stored:
    """Random values [rows, cols] of mixed magnitude, rounded to `fmt`."""
    values = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-3, 4, (rows, 1)))
    values = values.astype(np.float32)
    if fmt is Format.BF16:
        return Stored(to_bf16_codes(values), fmt)
    codes, scales = quantise(values, fmt)
    return Stored(codes, fmt, scales)


def part(stored: Stored, rows: slice, cols: slice) -> Stored:
    """A block of an operand; `cols` starts at a multiple of 32."""
    scales = stored.scales
    if scales is not None:
        start = (cols.start or 0) // 32
        stop = None if cols.stop is None else -(-cols.stop // 32)
        scales = scales[rows, start:stop]
    return Stored(stored.codes[rows, cols], stored.fmt, scales)


def cuts(size: int, tiles: int, unit: int) -> list[slice]:
    """`tiles` pieces of `size`, all but the last multiples of `unit` and none empty."""
    units = -(-size // unit)
    if units < tiles:
        raise InputError(
            "split",
            size,
            f"it must give each of {tiles} tiles at least {unit}",
            f"take at least {unit * (tiles - 1) + 1}",
        )
    edges = [min(size, unit * (units * i // tiles)) for i in range(tiles + 1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def product(act: Stored, weight: Stored, rows: int) -> NDArray[np.float32]:
    """The bit-exact FP32 product."""
    return matmul(act.codes, act.scales, act.fmt, weight.codes, weight.scales, weight.fmt, rows)


def placed(
    memory: TileMemory, act: Stored, weight: Stored, out_fmt: Format, stream: bool = False
) -> tuple[TileProgram, Buffer]:
    """The program of act [M, K] times weight [N, K] with its operands in `memory`, and its result.

    `stream`: the weights start in HBM, else in KV SRAM.
    """
    p = TileProgram(memory)
    (m, k), n = act.codes.shape, len(weight.codes)
    mark = memory.mark()
    try:
        given = memory.buffer("act", m, k, act.fmt, weight.fmt)
        out = memory.buffer("out", m, n, out_fmt)
    except InputError:  # perhaps without padding
        memory.rewind(mark)
        given = memory.buffer("act", m, k, act.fmt, weight.fmt, spread=False)
        out = memory.buffer("out", m, n, out_fmt)
    memory.fill(given, act)
    weights = memory.weights("weights", weight.codes, weight.scales, weight.fmt, stream)
    program(p, given, weights, out)
    return p, out


def run(request: KernelRequest) -> KernelResult:
    """One GEMM. Split over N every tile has its columns and sends them to tile 0; split over K the
    partial products are summed by the collective network.
    """
    s, config = request.settings, request.config
    m, n, k = int(s["m"]), int(s["n"]), int(s["k"])
    act_fmt, weight_fmt = parse_format(str(s["act"])), parse_format(str(s["weight"]))
    split, stream = str(s["split"]), s["weights"] == "hbm"
    if config.tiles == 1 and split != "none":
        raise InputError("split", split, f"{config.name} has one tile", "take --config mesh4")
    size = n * k * SPECS[weight_fmt].storage_bits
    require(
        config.tile,
        1 if split == "none" else config.tiles,
        sram=m * (k * SPECS[act_fmt].storage_bits + n * (32 if s["out"] == "fp32" else 16)),
        kv=0 if stream else size,
        hbm=size if stream else 0,
    )
    rng = np.random.default_rng(request.seed)
    act, weight = operand(rng, m, k, act_fmt), operand(rng, n, k, weight_fmt)
    out_fmt = Format.FP32 if s["out"] == "fp32" or split == "k" else Format.BF16
    reference = matmul_reference(
        act.codes, act.scales, act_fmt, weight.codes, weight.scales, weight_fmt
    )
    bound = matmul_bound(
        act.codes, act.scales, act_fmt, weight.codes, weight.scales, weight_fmt, config.tile.rows
    )

    whole = slice(None)
    if split == "n":
        places = cuts(n, config.tiles, config.tile.cols)
        parts = [(act, part(weight, place, whole)) for place in places]
    elif split == "k":
        places = cuts(k, config.tiles, 32)
        parts = [(part(act, whole, place), part(weight, whole, place)) for place in places]
    else:
        places, parts = [whole], [(act, weight)]
    products = [product(a, w, config.tile.rows) for a, w in parts]

    memories = [TileMemory(config.tile) for _ in range(config.tiles)]
    programs: list[TileProgram | None] = [None] * config.tiles
    checks, works = [], []
    for tile, (a, w) in enumerate(parts):
        p, out = placed(memories[tile], a, w, out_fmt, stream)
        programs[tile] = p
        checks.append(Check(out, stored(products[tile], out_fmt), tile))
        works.append(p.work)
    if split == "n":
        gather(
            config.mesh_x,
            programs,
            memories,
            m,
            n,
            out_fmt,
            places,
            checks,
            np.concatenate(products, axis=1),
        )
        final = np.concatenate(products, axis=1)
    elif split == "k":
        grid = np.stack(products).reshape(config.mesh_y, config.mesh_x, -1)
        final = allreduce_sum(grid)[0, 0].reshape(m, n)
        steps = np.abs(np.stack([p.astype(np.float64) for p in products])).sum(axis=0)
        bound = bound + steps * config.tiles * 2.0**-24
        for tile, own in enumerate(programs):
            assert own is not None
            source = memories[tile].buffers["out"]
            total = memories[tile].buffer("total", m, n, Format.FP32)
            lines = (source.at(m - 1) - source.address) // 16 + -(-n // 4)
            own.command(
                "collective",
                src_addr=source.address,
                dst_addr=total.address,
                lines=lines,
                op=CollectiveOp.ALLREDUCE_SUM,
                scope=Scope.MESH,
                root=0,
            )
            checks.append(Check(total, stored(final, Format.FP32), tile))
    else:
        final = products[0]
    values = stored(final, out_fmt).values
    if out_fmt is Format.BF16:
        bound = bound + np.abs(reference) * 2.0**-8
    error, limit = largest_error(values, reference, bound)
    result = simulate(
        request,
        memories,
        [TileRun([None if p is None else p.finish() for p in programs], memories, checks)],
    )
    shape = dict(s) | {"out": "fp32" if out_fmt is Format.FP32 else "bf16"}
    return kernel_result("gemm", request, shape, result, works, error, limit)


def stored(values: NDArray[np.float32], fmt: Format) -> Stored:
    """FP32 results as they lie in memory."""
    if fmt is Format.BF16:
        return Stored(to_bf16_codes(values), fmt)
    return Stored(fp32.bits(values), fmt)


def gather(
    mesh_x: int,
    programs: list[TileProgram | None],
    memories: list[TileMemory],
    m: int,
    n: int,
    fmt: Format,
    places: list[slice],
    checks: list[Check],
    final: NDArray[np.float32],
) -> None:
    """Every tile sends its columns into tile 0's result, which then waits for all of them."""
    whole = memories[0].buffer("gathered", m, n, fmt)
    arrived = None
    for tile, p in enumerate(programs):
        assert p is not None
        semaphore = p.program.remote_semaphore("gathered")
        arrived = semaphore if tile == 0 else arrived
        mine = memories[tile].buffers["out"]
        width = mine.cols * (4 if fmt is Format.FP32 else 2)
        p.command(
            "send",
            x=0,
            y=0,
            src_addr=mine.address,
            dst_addr=whole.at(0, places[tile].start),
            src_stride=mine.stride_lines,
            dst_stride=whole.stride_lines,
            lines=-(-width // 16),
            rows=m,
            semaphore=semaphore,
            post_=1,
        )
    first = programs[0]
    assert first is not None and arrived is not None
    first.join()
    for _ in programs:
        first.program.wait(arrived)
    checks.append(
        Check(Buffer(whole.name, whole.address, m, n, fmt, whole.stride), stored(final, fmt), 0)
    )


KERNEL = Kernel("gemm", "dense matrix product", OPTIONS, run, MODELS)
