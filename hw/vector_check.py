# SPDX-License-Identifier: Apache-2.0
"""What makes a VECTOR command illegal."""

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden.formats import SCALE_NAN, SPECS, Format
from hw.isa import VECTOR, Function, Kind, Op1, Reduce, Select, operand_layout
from hw.vector_format import size_bits

LINE_ALIGN = 4  # log2 of the bytes of a line


class VectorCheck(wiring.Component):
    """Registered verdict on `command`, one cycle after it.

    Illegal are: no rows or cols; codes that no enum has; addresses or strides of vectors in memory
    that are no multiple of the vector's size (for MX results of a line, too); addresses of ROW
    operands and reductions that are no multiple of four; a permutation that leaves the row; a
    stage that takes an operand of kind NONE; a fixed scale of NaN for an MX result.

    Members
    -------
    command : In
    illegal : Out(1)
    """

    def __init__(self, lanes: int) -> None:
        if lanes < 4 or lanes & (lanes - 1):
            raise ValueError(f"lanes must be a power of two from 4 on, not {lanes!r}")
        self.lanes = lanes
        super().__init__({"command": In(operand_layout(VECTOR)), "illegal": Out(1)})

    def elaborate(self, platform):
        m = Module()
        command = self.command
        problems: list[Value] = []

        def problem(name: str, condition) -> None:
            signal = Signal(name=name)
            m.d.comb += signal.eq(condition)
            problems.append(signal)

        problem("no_elements", (command.rows == 0) | (command.cols == 0))
        problem(
            "codes",
            (command.op1 > max(Op1))
            | (command.function > max(Function))
            | (command.reduce > max(Reduce))
            | Cat(command[s] > max(Select) for s in ("s1", "s2", "s3", "s4")).any(),
        )

        def misaligned(address, stride, fmt, least: dict[Format, int]) -> Signal:
            result = Signal(name=f"misaligned_{len(problems)}")
            with m.Switch(fmt):
                for code in Format:
                    bits = max(size_bits(self.lanes, code), least.get(code, 0))
                    with m.Case(code):
                        m.d.comb += result.eq(
                            address[:bits].any() | stride[: max(bits - 2, 0)].any()
                        )
            return result

        problem("a", misaligned(command.a_addr, command.a_stride, command.a_format, {}))
        for name in ("b", "d"):
            address, kind = command[f"{name}_addr"], command[f"{name}_kind"]
            vector = misaligned(address, command[f"{name}_stride"], command[f"{name}_format"], {})
            problem(
                name, ((kind == Kind.VECTOR) & vector) | ((kind == Kind.ROW) & address[:2].any())
            )
        blocks = {fmt: LINE_ALIGN for fmt in Format if SPECS[fmt].scaled}
        problem(
            "out",
            command.store
            & misaligned(command.out_addr, command.out_stride, command.out_format, blocks),
        )
        mx = Signal()
        m.d.comb += mx.eq((command.out_format != Format.BF16) & (command.out_format != Format.FP32))
        problem("scale", command.store & mx & command.fixed_scale & (command.scale == SCALE_NAN))
        problem("reduction", (command.reduce != Reduce.NONE) & command.reduce_addr[:2].any())

        outside = Signal()
        with m.Switch(command.permute):
            for code in range(1, 1 << VECTOR.operand("permute").width):
                with m.Case(code):
                    m.d.comb += outside.eq(command.cols[:code].any())
        problem("permutation", outside)

        for stage, select in (
            (command.op1 != Op1.NONE, command.s1),
            (command.mul, command.s2),
            (command.add, command.s3),
            (command.mul2, command.s4),
        ):
            absent = Mux(
                select == Select.B,
                command.b_kind == Kind.NONE,
                (select == Select.D) & (command.d_kind == Kind.NONE),
            )
            problem(f"absent_{len(problems)}", stage & absent)

        verdict = Signal(len(problems))
        m.d.sync += verdict.eq(Cat(problems))
        m.d.comb += self.illegal.eq(verdict.any())
        return m
