# SPDX-License-Identifier: Apache-2.0
"""FP32 adder and subtracter."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.carry import greater
from hw.psum_adder import ALIGNED, GUARDED_BITS, SUMMED, PsumRound, PsumSum
from hw.wires import wire

STAGES = 3


class Fp32Align(wiring.Component):
    """Combinational. Orders the operands by magnitude and moves the small one under the big one."""

    def __init__(self) -> None:
        super().__init__(
            {"a": In(32), "b": In(32), "subtract": In(1), "aligned": Out(ALIGNED)}
        )  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        significands, exponents, infinite, nan = [], [], [], []
        for name, operand in (("a", self.a), ("b", self.b)):
            field, mantissa = operand[23:31], operand[:23]
            normal = wire(m, f"{name}_normal", field.any())
            significands.append(wire(m, f"{name}_significand", Cat(mantissa, normal)))
            # Subnormals have the exponent of field 1.
            exponents.append(wire(m, f"{name}_exponent", Cat(field[0] | ~normal, field[1:])))
            special = wire(m, f"{name}_special", field.all())
            infinite.append(special)
            nan.append(special & mantissa.any())
        a_sign, b_sign = self.a[31], wire(m, "b_sign", self.b[31] ^ self.subtract)
        differ = wire(m, "differ", a_sign ^ b_sign)
        b_big = greater(m, "b_big", self.b[:31], self.a[:31], 5)
        # Both differences at once: no carry chain waits for the other's sign.
        above = wire(m, "above", exponents[0] - exponents[1], signed(9))
        below = wire(m, "below", exponents[1] - exponents[0], signed(9))
        distance = wire(m, "distance", Mux(above[-1], below, above), 8)
        other = wire(m, "other", Mux(b_big, significands[0], significands[1]))
        moved, sticky = Cat(Const(0, 2), other), Const(0, 1)
        for k in range(5):
            step = 1 << k
            lost = distance[k] & moved[:step].any()
            sticky = wire(m, f"sticky_{step}", sticky | lost)
            moved = wire(m, f"moved_{step}", Mux(distance[k], moved >> step, moved), 26)
        far = wire(m, "far", distance[5:].any())
        either = wire(m, "infinite", infinite[0] | infinite[1])
        opposite = wire(m, "opposite", differ & ~either)
        m.d.comb += [
            self.aligned.big.eq(Mux(b_big, significands[1], significands[0])),
            self.aligned.small.eq(
                Mux(far, other.any(), Cat(sticky, moved)) ^ opposite.replicate(GUARDED_BITS)
            ),
            self.aligned.exponent.eq(Mux(above[-1], exponents[1], exponents[0])),
            self.aligned.sign.eq(Mux(b_big, b_sign, a_sign)),
            self.aligned.opposite.eq(opposite),
            self.aligned.infinite.eq(either),
            self.aligned.nan.eq(nan[0] | nan[1] | (infinite[0] & infinite[1] & differ)),
        ]
        return m


class Fp32Add(wiring.Component):
    """a + b, or a - b, as `golden.fp32.add` and `golden.fp32.sub`.

    IEEE 754, round to nearest even, subnormals kept, every NaN result 0x7FC00000.

    Latency `LATENCY` cycles from operands to result, one operation per cycle: 3, or 2 with longer
    paths. While `enable` is low the whole pipeline stands still.

    Members
    -------
    enable : In(1)
    a, b : In(32)
    subtract : In(1)
        Sampled with the operands.
    result : Out(32)
        Registered; undefined until the first operands come through.
    """

    LATENCY = STAGES

    def __init__(self, stages: int = STAGES) -> None:
        if stages not in (2, 3):
            raise ValueError(f"stages must be 2 or 3, not {stages!r}")
        self.LATENCY = stages
        super().__init__(
            {
                "enable": In(1),
                "a": In(32),
                "b": In(32),
                "subtract": In(1),
                "result": Out(32),
            }
        )

    @property
    def emit_name(self) -> str:
        return "fp32_add" if self.LATENCY == STAGES else f"fp32_add_{self.LATENCY}"

    def elaborate(self, platform):
        m = Module()
        m.submodules.align = align = Fp32Align()
        m.submodules.sum = total = PsumSum()
        m.submodules.round = rounding = PsumRound()
        aligned = Signal(ALIGNED, reset_less=True)
        summed = Signal(SUMMED)
        result = Signal(32, reset_less=True)
        m.d.comb += [
            align.a.eq(self.a),
            align.b.eq(self.b),
            align.subtract.eq(self.subtract),
            total.aligned.eq(aligned),
            summed.eq(total.summed),
            summed.exponent[8:].eq(0),  # exponents only shrink from the field of the big operand
            self.result.eq(result),
        ]
        with m.If(self.enable):
            m.d.sync += [aligned.eq(align.aligned), result.eq(rounding.psum)]
        if self.LATENCY == STAGES:
            registered = Signal(SUMMED, reset_less=True)
            with m.If(self.enable):
                m.d.sync += registered.eq(summed)
            m.d.comb += rounding.summed.eq(registered)
        else:
            m.d.comb += rounding.summed.eq(summed)
        return m
