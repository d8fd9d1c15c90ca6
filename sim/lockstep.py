# SPDX-License-Identifier: Apache-2.0
"""The Verilog of a component under a testbench that was written for Amaranth's simulator.

`Simulator` has the part of `amaranth.sim.Simulator` that testbenches of one clock need: `get`,
`set` and `tick` with `sample`, `until` and `repeat`. The model is a process of its own, stepped
through pipes, which costs far less per cycle than VPI or Amaranth's simulator. All registers and
memories start with random bits, then come cycles of reset.
"""

import dataclasses
import enum
import inspect
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping
from fractions import Fraction
from functools import cache as cached
from pathlib import Path
from typing import Any, cast

from amaranth import Cat, Const, Module, Shape, Signal, Value
from amaranth.hdl import ShapeCastable, ValueCastable
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim._pyeval import eval_assign, eval_value

from hw import verilog
from hw.emit import flat_ports, place
from sim import cache
from sim.emission import sources_digest
from sim.errors import ToolError
from sim.harness import BLOCKS
from sim.verilator import Build, build

MAIN = Path(__file__).parent / "cpp" / "lockstep.cpp"
TOP = "lockstep_top"
LEAST_WIDTH = 65  # so that Verilator makes arrays of words of the ports
RESET_CYCLES = 4
TICK, RESET = 1, 2

Port = tuple[str, bool, Any]


class Flat(wiring.Component):
    """A component with its inputs in `stimulus` and its outputs in `observed`, from the low end.

    The ports are those of `dut` and of the interfaces `ports` of components inside it. `inputs` and
    `outputs` give the position and width of each port by its Verilog name, `fields` by its signal.
    """

    def __init__(self, dut: wiring.Component, ports: Iterable[Any] = ()):
        self.dut = dut
        found: list[Port] = flat_ports(dut)
        for i, port in enumerate(ports):
            found += [
                (f"port{i}__{'__'.join(str(part) for part in path)}", member.flow is In, value)
                for path, member, value in port.signature.flatten(port)
            ]
        self.inputs: dict[str, tuple[int, int]] = {}
        self.outputs: dict[str, tuple[int, int]] = {}
        self.fields: dict[int, tuple[bool, int, Signal]] = {}
        self._values: tuple[list[Value], list[Value]] = ([], [])
        widths = [0, 0]
        for name, is_input, value in found:
            signal = cast(Signal, Value.cast(value))
            place, side = (self.inputs, 0) if is_input else (self.outputs, 1)
            place[name] = (widths[side], len(signal))
            self.fields[id(signal)] = (is_input, widths[side], signal)
            self._values[side].append(signal)
            widths[side] += len(signal)
        super().__init__(
            {
                "stimulus": In(max(widths[0], LEAST_WIDTH)),
                "observed": Out(max(widths[1], LEAST_WIDTH)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        place(m, platform, "dut", self.dut)
        m.d.comb += [Cat(self._values[0]).eq(self.stimulus), self.observed.eq(Cat(self._values[1]))]
        return m


def _signature(signature: wiring.Signature) -> str:
    """Text of a signature's members, whatever its class says of itself."""
    parts = []
    for name, member in signature.members.items():
        inner = _signature(member.signature) if member.is_signature else repr(member.shape)
        parts.append(f"{name} {member.flow} {member.dimensions} {inner}")
    return f"{type(signature).__qualname__}({', '.join(parts)})"


def _identity(value: Any, seen: dict[int, Any], files: set[str]) -> str:
    """Text that differs when the hardware of two components may; `files` gets where classes are.

    Whatever `elaborate` can depend on is in the component's attributes and in the sources.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | Fraction | enum.Enum):
        return repr(value)
    if isinstance(value, type | Shape | ShapeCastable):
        return repr(value)
    if isinstance(value, wiring.Signature):
        return _signature(value)
    if id(value) in seen:
        return "seen"
    seen[id(value)] = value
    if isinstance(value, Value | ValueCastable):
        signal = Value.cast(value)
        return f"{signal.shape()} {getattr(signal, 'init', '')}"
    if not isinstance(value, wiring.Component) and hasattr(value, "signature"):
        return _signature(value.signature)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_identity(item, seen, files) for item in value) + "]"
    if isinstance(value, dict):
        parts = [
            f"{_identity(k, seen, files)}: {_identity(v, seen, files)}" for k, v in value.items()
        ]
        return "{" + ", ".join(parts) + "}"
    kind = type(value)
    if dataclasses.is_dataclass(value):
        attributes = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif isinstance(value, wiring.Component):
        attributes = {k: v for k, v in vars(value).items() if not k.startswith("_MustUse")}
    else:
        raise TypeError(f"attributes of a component must be plain data or ports, not {value!r}")
    files.add(inspect.getfile(kind))
    return f"{kind.__module__}.{kind.__qualname__}{_identity(attributes, seen, files)}"


@cached
def _text(file: str) -> str:
    return Path(file).read_text()


def sources(flat: Flat) -> dict[str, str]:
    """Verilog of `flat` as module `TOP`, from the cache if it is there."""
    files: set[str] = set()
    identity = _identity([flat.dut, flat.inputs, flat.outputs], {}, files)
    key = cache.digest([sources_digest(), identity, *(_text(file) for file in sorted(files))])

    def write(work: Path) -> None:
        (work / "files.json").write_text(json.dumps(verilog.emit(flat, TOP)))

    place, _ = cache.entry("verilog", key, write)
    return json.loads((place / "files.json").read_text())


def shared(files: Mapping[str, str]) -> list[str]:
    """Modules to compile once: those of `BLOCKS` that have several instances."""
    names = [name.removesuffix(".v") for name in files if name.startswith(BLOCKS)]
    text = "\n".join(files.values())
    return [name for name in names if len(re.findall(rf"^  {name} ", text, re.MULTILINE)) > 1]


class _Slot:
    """One port's value, in the form that Amaranth's evaluator of expressions wants."""

    def __init__(self, simulator: "Simulator", is_input: bool, position: int, signal: Signal):
        self.is_comb = not is_input
        self._simulator, self._position = simulator, position
        self._mask = (1 << len(signal)) - 1
        self._sign = 1 << len(signal) >> 1 if signal.shape().signed else 0

    @property
    def curr(self) -> int:
        simulator = self._simulator
        word = simulator._observed() if self.is_comb else simulator._stimulus
        value = word >> self._position & self._mask
        return value - 2 * self._sign if value & self._sign else value

    @property
    def next(self) -> int:
        return self.curr

    def update(self, value: int) -> None:
        simulator = self._simulator
        changed = (simulator._stimulus >> self._position ^ value) & self._mask
        if changed:
            simulator._stimulus ^= changed << self._position
            simulator._stale = True


class Tick:
    """A clock edge to await: (True, False, the values sampled just before it)."""

    def __init__(self, context: "Context", sampled: tuple[Any, ...] = ()):
        self._context, self._sampled = context, sampled

    def sample(self, *values: Any) -> "Tick":
        return Tick(self._context, self._sampled + values)

    def __await__(self) -> Generator["Tick", tuple[Any, ...], tuple[Any, ...]]:
        values = yield self
        return (True, False, *values)

    async def until(self, condition: Any) -> tuple[Any, ...]:
        tick = self.sample(condition)
        while True:
            *values, met = (await tick)[2:]
            if met:
                return tuple(values)

    async def repeat(self, count: int) -> tuple[Any, ...]:
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count!r}")
        for _ in range(count):
            values = (await self)[2:]
        return values

    async def __aiter__(self) -> AsyncIterator[tuple[Any, ...]]:
        while True:
            yield await self


class Context:
    """What a testbench is given."""

    def __init__(self, simulator: "Simulator"):
        self._simulator = simulator

    def get(self, expression: Any) -> Any:
        value = eval_value(self._simulator, Value.cast(expression))
        if isinstance(expression, ValueCastable):
            shape = expression.shape()
            if isinstance(shape, ShapeCastable):
                return shape.from_bits(value)
        return value

    def set(self, expression: Any, value: Any) -> None:
        if isinstance(expression, ValueCastable):
            shape = expression.shape()
            if isinstance(shape, ShapeCastable):
                value = shape.const(value)
        eval_assign(self._simulator, Value.cast(expression), Const.cast(value).value)

    def tick(self) -> Tick:
        return Tick(self)


Testbench = Callable[[Context], Coroutine[Tick, tuple[Any, ...], None]]


class Simulator:
    """Testbenches on the Verilog of `dut`; they see its ports and the interfaces `ports` inside it.

    As in Amaranth's simulator, testbenches run one after the other, in the order in which they were
    added, at the start and after each clock edge.
    """

    def __init__(self, dut: wiring.Component, ports: Iterable[Any] = (), seed: int = 0):
        self._flat = dut if isinstance(dut, Flat) else Flat(dut, ports)
        for part in (self._flat, self._flat.dut):
            part._MustUse__used = True  # type: ignore[union-attr]  # emitted perhaps long ago
        self._seed = seed
        self._benches: list[tuple[Testbench, bool]] = []
        self._stimulus = 0
        self._seen = 0
        self._stale = False
        self._pipes: tuple[int, int] = (-1, -1)
        self._sizes = tuple(
            4 * -(-len(port) // 32) for port in (self._flat.stimulus, self._flat.observed)
        )
        self._slots = {key: _Slot(self, *field) for key, field in self._flat.fields.items()}
        for port, is_input in ((self._flat.stimulus, True), (self._flat.observed, False)):
            self._slots[id(port)] = _Slot(self, is_input, 0, port)

    @property
    def slots(self) -> dict[int, _Slot]:
        return self._slots

    def get_signal(self, signal: Signal) -> int:
        if id(signal) not in self._slots:
            raise ValueError(f"a testbench must use ports only, not {signal!r}")
        return id(signal)

    def add_clock(self, period: float) -> None:
        """The clock is always there; its period has no meaning."""

    def add_testbench(self, bench: Testbench, *, background: bool = False) -> None:
        self._benches.append((bench, background))

    def build(self) -> Build:
        files = sources(self._flat)
        return build(files, TOP, blocks=shared(files), main=MAIN)

    def run(self) -> None:
        """Run until all testbenches that are not in the background have returned."""
        program = [
            str(self.build().program),
            "+verilator+rand+reset+2",
            f"+verilator+seed+{self._seed + 1}",
        ]
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as model:
            assert model.stdin is not None and model.stdout is not None
            self._pipes = (model.stdin.fileno(), model.stdout.fileno())
            try:
                self._run()
            finally:
                model.kill()

    def _run(self) -> None:
        for _ in range(RESET_CYCLES):
            self._step(TICK | RESET)
        self._step(0)
        running = [(bench(Context(self)), background) for bench, background in self._benches]
        answers: list[tuple[Any, ...] | None] = [None] * len(running)
        while True:
            waiting, ticks = [], []
            for (bench, background), answer in zip(running, answers, strict=True):
                try:
                    ticks.append(bench.send(answer))  # type: ignore[arg-type]
                    waiting.append((bench, background))
                except StopIteration:
                    pass
            if all(background for _, background in waiting):
                break
            running = waiting
            answers = [tuple(t._context.get(v) for v in t._sampled) for t in ticks]
            self._step(TICK)
        for bench, _ in waiting:
            bench.close()

    def _observed(self) -> int:
        if self._stale:
            self._step(0)
        return self._seen

    def _step(self, flags: int) -> None:
        into, out = self._pipes
        given, wanted = self._sizes
        request = bytes([flags]) + self._stimulus.to_bytes(given, "little")
        while request:
            request = request[os.write(into, request) :]
        answer = os.read(out, wanted)
        while len(answer) < wanted:
            part = os.read(out, wanted - len(answer))
            if not part:
                raise ToolError("the simulation ended before its testbench")
            answer += part
        self._seen, self._stale = int.from_bytes(answer, "little"), False
