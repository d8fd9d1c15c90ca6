# SPDX-License-Identifier: Apache-2.0
"""Bench of the vector engine: memory with stalls and faults, random commands, expected memory."""

from dataclasses import dataclass, field

import numpy as np

from golden import fp32
from golden.formats import SPECS, Format
from golden.vector import load, store, vector
from hw.isa import VECTOR, Activity, Function, Kind, Op1, Reduce, Select, Status
from hw.tile_sram import TileSram
from hw.vector_engine import VectorEngine
from tests.simulators import Simulator

SPECIAL = np.array(
    [
        0x00000000,
        0x80000000,
        0x00000001,
        0x807FFFFF,
        0x00800000,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x7F800001,
        0xFFC12345,
        0x3F800000,
        0xBF800000,
    ],
    np.uint32,
)


class Memory:
    """Tile SRAM as bytes, and the scales of its lines."""

    def __init__(self, size: int, rng: np.random.Generator):
        self.data = rng.integers(0, 256, size, np.uint8)
        self.scales = rng.integers(0, 256, size // 16, np.uint8)

    def copy(self) -> "Memory":
        other = object.__new__(Memory)
        other.data, other.scales = self.data.copy(), self.scales.copy()
        return other

    def codes(self, address: int, cols: int, fmt: Format) -> tuple[np.ndarray, np.ndarray]:
        """Codes of `cols` elements and the scale code of each one's line."""
        bits = SPECS[fmt].storage_bits
        place = address * 8 + np.arange(cols) * bits
        if bits >= 8:
            bytes_ = self.data[(place[:, None] + np.arange(0, bits, 8)) // 8].astype(np.uint32)
            codes = (bytes_ << np.arange(0, bits, 8).astype(np.uint32)).sum(axis=1)
        else:
            codes = (self.data[place // 8] >> (place % 8)) & ((1 << bits) - 1)
        return codes.astype(np.uint32), self.scales[place // 128]

    def load(self, address: int, cols: int, fmt: Format) -> np.ndarray:
        codes, scales = self.codes(address, cols, fmt)
        if not SPECS[fmt].scaled:
            return load(codes, fmt)
        return load(codes[:, None], fmt, scales[:, None])[:, 0]

    def put(
        self, address: int, values: np.ndarray, fmt: Format, fixed_scale: int | None = None
    ) -> None:
        codes, scales = store(values, fmt, fixed_scale if SPECS[fmt].scaled else None)
        bits = SPECS[fmt].storage_bits
        if not SPECS[fmt].scaled:
            raw = codes.astype({16: np.uint16, 32: np.uint32}[bits]).view(np.uint8)
        else:
            # Writes have a grain of 16 bits; the codes that fill one up are zeros.
            grain = 16 // bits
            codes = np.pad(codes, (0, -len(codes) % grain))
            raw = codes.astype(np.uint8)
            if bits == 4:
                raw = raw[0::2] | raw[1::2] << 4
            lines = -(-len(raw) // 16)
            self.scales[address // 16 : address // 16 + lines] = np.repeat(
                scales, 32 * bits // 128
            )[:lines]
        self.data[address : address + len(raw)] = raw


def blank() -> dict[str, int]:
    return {op.name: 0 for op in VECTOR.operands} | {"rows": 1, "cols": 1}


def stages(command: dict[str, int]) -> dict:
    """The command's stages as keyword arguments of the model."""
    same = (
        *("permute", "clamp_hi", "clamp_lo", "mul", "add", "mul2"),
        *("mask", "mask_lo", "mask_hi", "mask_lo_step", "mask_hi_step"),
    )
    return (
        {name: command[name] for name in same}
        | {
            "clamp": fp32.from_bits(command["clamp"])[()],
            "op1": Op1(command["op1"]).name.lower(),
            "function": Function(command["function"]).name.lower(),
            "reduce": Reduce(command["reduce"]).name.lower(),
        }
        | {s: Select(command[s]).name.lower() for s in ("s1", "s2", "s3", "s4")}
    )


def apply(memory: Memory, command: dict[str, int], lanes: int) -> None:
    """What a legal command does to the memory."""
    rows, cols = command["rows"], command["cols"]

    def whole(name: str) -> np.ndarray:
        return np.stack(
            [
                memory.load(
                    command[f"{name}_addr"] + 4 * r * command[f"{name}_stride"],
                    cols,
                    Format(command[f"{name}_format"]),
                )
                for r in range(rows)
            ]
        )

    def operand(name: str):
        kind = command[f"{name}_kind"]
        if kind == Kind.VECTOR:
            return whole(name)
        if kind == Kind.ROW:
            return np.stack(
                [
                    memory.load(
                        command[f"{name}_addr"] + 4 * r * command[f"{name}_stride"], 1, Format.FP32
                    )
                    for r in range(rows)
                ]
            )
        return fp32.from_bits(command[f"{name}_addr"]) if kind == Kind.IMMEDIATE else None

    out, reduced = vector(whole("a"), operand("b"), operand("d"), lanes=lanes, **stages(command))
    if command["store"]:
        for r in range(rows):
            memory.put(
                command["out_addr"] + 4 * r * command["out_stride"],
                out[r],
                Format(command["out_format"]),
                command["scale"] if command["fixed_scale"] else None,
            )
    if reduced is not None:
        for r in range(rows):
            memory.put(command["reduce_addr"] + 4 * r, reduced[r : r + 1], Format.FP32)


class Layout:
    """Hands out disjoint regions of the memory in a random order of commands' operands."""

    def __init__(self, memory: Memory, rng: np.random.Generator):
        self.memory, self.rng, self.top = memory, rng, 0

    def take(self, size: int, align: int) -> int:
        start = -(-self.top // align) * align + align * int(self.rng.integers(0, 3))
        if start + size > len(self.memory.data):
            raise ValueError(f"size must fit into the memory, not {size!r}")
        self.top = start + size
        return start

    def matrix(self, rows: int, cols: int, fmt: Format, lanes: int, least: int = 4) -> tuple:
        """Address and stride of rows x cols elements, filled with values that exercise `fmt`."""
        size = max(lanes * SPECS[fmt].storage_bits // 8, least)
        row_bytes = -(-cols * SPECS[fmt].storage_bits // 8)
        pitch = -(-max(row_bytes, 1) // size) * size + size * int(self.rng.integers(0, 2))
        address = self.take(rows * pitch + size, size)
        region = slice(address, address + rows * pitch)
        count = rows * pitch
        if fmt in (Format.FP32, Format.BF16):
            values = self.rng.standard_normal(count // 4).astype(np.float32)
            values *= np.exp2(self.rng.integers(-6, 7, count // 4)).astype(np.float32)
            codes = values.view(np.uint32)
            special = self.rng.random(len(codes)) < self.rng.choice([0, 0.02, 0.3])
            codes = np.where(special, self.rng.choice(SPECIAL, len(codes)), codes)
            if fmt is Format.BF16:
                codes = codes >> 16 | np.roll(codes, 1) >> 16 << 16
            self.memory.data[region] = codes.astype(np.uint32).view(np.uint8)
        else:
            self.memory.data[region] = self.rng.integers(0, 256, count, np.uint8)
            lines = slice(address // 16, -(-(address + count) // 16))
            scales = self.memory.scales[lines]
            scales[:] = self.rng.integers(118, 136, len(scales))
            scales[self.rng.random(len(scales)) < 0.05] = self.rng.choice([0, 254, 255])
        return address, pitch // 4


def random_command(rng, memory: Memory, lanes: int, rows: int, cols: int) -> dict[str, int]:
    """A legal command, its operands in `memory` filled with values."""
    layout = Layout(memory, rng)
    command = blank() | {"rows": rows, "cols": cols}

    def float_bits() -> int:
        if rng.random() < 0.2:
            return int(rng.choice(SPECIAL))
        return int(fp32.bits(np.float32(rng.standard_normal())))

    def matrix(name: str, fmt: Format, least: int = 4) -> None:
        address, stride = layout.matrix(rows, cols, fmt, lanes, least)
        command.update(
            {f"{name}_addr": address, f"{name}_stride": stride, f"{name}_format": int(fmt)}
        )

    formats = [Format.FP32, Format.FP32, *Format]
    matrix("a", Format(rng.choice(formats)))
    available = [Select.X]
    for name, select in (("b", Select.B), ("d", Select.D)):
        kind = Kind(rng.integers(0, 4))
        command[f"{name}_kind"] = int(kind)
        if kind is not Kind.NONE:
            available.append(select)
        if kind is Kind.VECTOR:
            matrix(name, Format(rng.choice(formats)))
            if rng.random() < 0.3:
                command[f"{name}_stride"] = 0
        elif kind is Kind.ROW:
            stride = int(rng.choice([0, 1, 3]))
            address = layout.take(4 * rows * max(stride, 1), 4)
            memory.data[address : address + 4 * rows * max(stride, 1)] = np.array(
                [float_bits() for _ in range(rows * max(stride, 1))], np.uint32
            ).view(np.uint8)
            command.update({f"{name}_addr": address, f"{name}_stride": stride})
        elif kind is Kind.IMMEDIATE:
            command[f"{name}_addr"] = float_bits()
    for s in ("s1", "s2", "s3", "s4"):
        command[s] = int(rng.choice(available))
    for flag in ("clamp_hi", "clamp_lo", "mul", "add", "mul2", "mask"):
        command[flag] = int(rng.random() < 0.4)
    command["clamp"] = float_bits() & 0x7FFFFFFF if rng.random() < 0.8 else float_bits()
    command["op1"] = int(rng.integers(0, 5))
    command["function"] = int(rng.integers(0, 5)) if rng.random() < 0.5 else 0
    command["mask_lo"], command["mask_hi"] = (int(v) for v in rng.integers(0, cols + 2, 2))
    for end in ("mask_lo", "mask_hi"):
        command[f"{end}_step"] = int(rng.random() < 0.5)
        if rng.random() < 0.1:
            command[end] = int(rng.integers(0xFFFA, 0x10000))  # wraps in some row
    command["fixed_scale"] = int(rng.random() < 0.3)
    command["scale"] = int(rng.choice([0, 1, 254, *range(118, 137)]))
    command["reduce"] = int(rng.integers(0, 3))
    command["store"] = int(rng.random() < 0.8)
    possible = [p for p in range(16) if cols % (1 << p) == 0]
    command["permute"] = int(rng.choice(possible))
    if command["store"]:
        fmt = Format(rng.choice(formats))
        matrix("out", fmt, 16 if SPECS[fmt].scaled else 4)
    if command["reduce"]:
        command["reduce_addr"] = layout.take(4 * rows, 4)
    return command


@dataclass
class Result:
    """`done` is the cycle of each command's end, from the one before it was first offered."""

    errors: list[Status] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    activity: list[Activity] = field(default_factory=list)


def run(
    engine: VectorEngine,
    memory: Memory,
    commands: list[dict[str, int]],
    *,
    stall: float | dict[str, float] = 0.0,
    seed: int = 0,
    limit: int = 20_000,
    prepare=None,
    check=None,
) -> Result:
    """Executes `commands` on `memory`; `check(i)` is called after command i, in its `done` cycle.

    `stall` is the probability of a cycle without a command or room, or one for each of "command",
    "a", "b" and "out". `prepare(i)`, if given, makes command i when the one before is done, instead
    of `commands`.
    """
    rng = np.random.default_rng(seed)
    names = ("command", "a", "b", "out")
    stalls = stall if isinstance(stall, dict) else dict.fromkeys(names, stall)
    result = Result()

    def stalled(name: str) -> bool:
        return bool(stalls.get(name)) and rng.random() < stalls[name]

    lines = engine.config.vector_lines
    total = len(memory.scales)
    ports = {"a": engine.a, "b": engine.b, "out": engine.out}
    layout = engine.out.request.payload.shape()
    fields = {
        name: layout[name] for name in ("address", "write", "data", "mask", "scales", "scale_mask")
    }

    def get(payload: int, name: str) -> int:
        offset, width = fields[name].offset, fields[name].width
        return payload >> offset & ((1 << width) - 1)

    def access(payload: int) -> tuple[int, int, bool]:
        """Response word, scales and fault of a request; a write takes effect."""
        address = get(payload, "address")
        assert address % lines == 0
        if address + lines > total:
            return 0, 0, True
        region = slice(address * 16, (address + lines) * 16)
        line_region = slice(address, address + lines)
        if not get(payload, "write"):
            return (
                int.from_bytes(memory.data[region].tobytes(), "little"),
                int.from_bytes(memory.scales[line_region].tobytes(), "little"),
                False,
            )
        data, mask = get(payload, "data"), get(payload, "mask")
        scales, scale_mask = get(payload, "scales"), get(payload, "scale_mask")
        for g in range(lines * 8):
            if mask >> g & 1:
                at = address * 16 + 2 * g
                memory.data[at : at + 2] = [data >> 16 * g & 0xFF, data >> 16 * g + 8 & 0xFF]
        for k in range(lines):
            if scale_mask >> k & 1:
                memory.scales[address + k] = scales >> 8 * k & 0xFF
        return 0, 0, False

    async def bench(ctx):
        control = engine.control
        pipes = {name: [None] * TileSram.LATENCY for name in ports}
        offered = {name: None for name in ports}
        fetched = None
        count = len(commands)
        index = 0
        for cycle in range(limit):
            if fetched is None and index < count and (prepare is None or len(result.done) == index):
                fetched = prepare(index) if prepare else commands[index]
                ctx.set(control.command.payload, fetched)
            offer = fetched is not None and not stalled("command")
            ctx.set(control.command.valid, offer)
            ready = {}
            for name, port in ports.items():
                ready[name] = not stalled(name)
                ctx.set(port.request.ready, ready[name])
                answer = pipes[name].pop()
                ctx.set(port.fault, answer is not None and answer[2])
                reads = answer is not None and name != "out"
                ctx.set(port.valid, reads)
                word, scales, _ = (
                    answer
                    if answer is not None
                    else (int.from_bytes(rng.bytes(lines * 16), "little"), 0, False)
                )
                ctx.set(port.response.data.as_value(), word)
                ctx.set(port.response.scales.as_value(), scales)
            if offer and ctx.get(control.command.ready):
                result.taken.append(cycle)
                fetched = None
                index += 1
            result.activity.append(Activity(ctx.get(control.activity)))
            if ctx.get(control.done):
                result.done.append(cycle)
                result.errors.append(Status(ctx.get(control.error)))
                if check is not None:
                    check(len(result.done) - 1)
            for name, port in ports.items():
                request = port.request
                valid = ctx.get(request.valid)
                payload = ctx.get(request.payload.as_value()) if valid else None
                if offered[name] is not None:
                    assert payload == offered[name], f"{name} changed what it offered"
                taken = valid and ready[name]
                offered[name] = payload if valid and not taken else None
                if taken and name != "out":
                    assert not get(payload, "write")
                pipes[name].insert(0, access(payload) if taken else None)
            if len(result.done) == count:
                return
            await ctx.tick()
        raise AssertionError(f"{len(result.done)} of {count} commands done in {limit} cycles")

    simulator = Simulator(engine)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    assert len(result.done) == len(commands)
    return result
