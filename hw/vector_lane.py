# SPDX-License-Identifier: Apache-2.0
"""One FP32 lane of the vector engine: the arithmetic stages of a VECTOR command."""

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hw.emit import place
from hw.fp32_add import Fp32Add
from hw.fp32_compare import Fp32Compare
from hw.fp32_multiply import Fp32Multiply
from hw.functions import FunctionUnit
from hw.isa import VECTOR, Function, Op1, Select
from hw.vector_combine import VectorCombine

STAGES = (
    "clamp",
    "clamp_hi",
    "clamp_lo",
    "op1",
    "s1",
    "mul",
    "s2",
    "add",
    "s3",
    "function",
    "mul2",
    "s4",
)

# Operands that leave the other one as it is, bit for bit, when it is no NaN or the canonical one.
NEGATIVE_ZERO = 0x80000000  # of an addition
ONE = 0x3F800000  # of a multiplication
INFINITY = 0x7F800000  # of a minimum
NEGATIVE_INFINITY = 0xFF800000  # of a maximum


def stage_control() -> data.StructLayout:
    """The operands of a command that a lane looks at."""
    return data.StructLayout({name: VECTOR.operand(name).width for name in STAGES})


class VectorLane(wiring.Component):
    """Stages clamp, op1, mul, add, function, mul2 and mask of one element per cycle.

    A stage that is off takes the operand that changes nothing (-0 for an addition, 1 for a
    multiplication, an infinity for the clamp), which costs neither delay registers nor
    multiplexers. The function alone is passed by when it is off, being the longest.

    Latency `LATENCY` cycles from `a`, `b`, `d` to `y`, and `FunctionUnit.LATENCY` more with a
    function. `keep` belongs to the element whose y is there one cycle later: low gives +0. One
    element per cycle. While `enable` is low the whole pipeline stands still.

    Members
    -------
    enable : In(1)
    control : In(stage_control())
        Must not change while elements are under way.
    a, b, d : In(32)
        Operands; NaN in its canonical form only.
    keep : In(1)
    y : Out(32)
        Registered; undefined until the first element comes through.
    """

    BEFORE_FUNCTION = (
        1 + 2 * Fp32Compare.LATENCY + VectorCombine.LATENCY + Fp32Multiply.LATENCY + Fp32Add.LATENCY
    )
    LATENCY = BEFORE_FUNCTION + Fp32Multiply.LATENCY + 1
    emit_name = "vector_lane"

    def __init__(self) -> None:
        super().__init__(
            {
                "enable": In(1),
                "control": In(stage_control()),
                "a": In(32),
                "b": In(32),
                "d": In(32),
                "keep": In(1),
                "y": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        control = self.control

        def late(value: Value, cycles: int, name: str) -> Value:
            for age in range(cycles):
                register = Signal(32, name=f"{name}_{age}", reset_less=True)
                with m.If(self.enable):
                    m.d.sync += register.eq(value)
                value = register
            return value

        def wire(value, name: str) -> Signal:
            signal = Signal(32, name=name)
            m.d.comb += signal.eq(value)
            return signal

        def unit(component, name: str, a: Value, b: Value):
            place(m, platform, name, component)
            m.d.comb += [component.enable.eq(self.enable), component.a.eq(a), component.b.eq(b)]
            return component

        # Clamp.
        high = wire(Mux(control.clamp_hi, control.clamp, INFINITY), "high")
        low = wire(
            Mux(control.clamp_lo, Cat(control.clamp[:31], ~control.clamp[31]), NEGATIVE_INFINITY),
            "low",
        )
        a = late(self.a, 1, "a")
        below = unit(Fp32Compare(), "clamp_high", a, high)
        x = unit(Fp32Compare(), "clamp_low", below.minimum, low).maximum
        b = late(self.b, 1 + 2 * Fp32Compare.LATENCY, "b")
        d = late(self.d, 1 + 2 * Fp32Compare.LATENCY, "d")

        # The second operand of every later stage is chosen here and waits for its turn.
        def operand(select: Value, used: Value, neutral: int, name: str) -> Signal:
            signal = Signal(32, name=name)
            with m.If(~used):
                m.d.comb += signal.eq(neutral)
            with m.Else(), m.Switch(select):
                with m.Case(Select.B):
                    m.d.comb += signal.eq(b)
                with m.Case(Select.D):
                    m.d.comb += signal.eq(d)
                with m.Default():
                    m.d.comb += signal.eq(x)
            return signal

        s1 = operand(control.s1, control.op1 != Op1.NONE, NEGATIVE_ZERO, "s1")
        s2 = operand(control.s2, control.mul, ONE, "s2")
        s3 = operand(control.s3, control.add, NEGATIVE_ZERO, "s3")
        s4 = operand(control.s4, control.mul2, ONE, "s4")

        combined = unit(VectorCombine(), "op1", x, s1)
        m.d.comb += combined.op.eq(control.op1)
        age = VectorCombine.LATENCY
        product = unit(Fp32Multiply(), "mul", combined.result, late(s2, age, "s2"))
        age += Fp32Multiply.LATENCY
        total = unit(Fp32Add(), "add", product.result, late(s3, age, "s3"))
        m.d.comb += total.subtract.eq(0)
        age += Fp32Add.LATENCY

        function = FunctionUnit()
        place(m, platform, "function", function)
        used = Signal()
        m.d.comb += [
            used.eq(control.function != Function.NONE),
            function.enable.eq(self.enable & used),
            function.function.eq(control.function),
            function.x.eq(total.result),
        ]
        early = late(s4, age, "s4")
        patient = late(early, FunctionUnit.LATENCY, "s4_function")
        scaled = unit(
            Fp32Multiply(),
            "mul2",
            wire(Mux(used, function.result, total.result), "f"),
            wire(Mux(used, patient, early), "s4_chosen"),
        )
        m.d.comb += self.y.eq(late(Mux(self.keep, scaled.result, 0), 1, "y"))
        return m
