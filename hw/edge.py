# SPDX-License-Identifier: Apache-2.0
"""Edges of the matmul array: raw codes from the memories become the cells' native ones, masked.

Elements beyond the end of the contraction turn into zeros here, so that a NaN left in their place
influences nothing, and formats that are not native are recoded without loss (`hw.recode`).
"""

from itertools import product

from amaranth import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from golden.formats import (
    ARRAY_FORMATS,
    DIGITS,
    LINE_BITS,
    SCALE_NAN,
    SCALE_ONE,
    SPECS,
    Format,
    Native,
    native_pair,
    products_per_slice,
)
from hw.arrangement import activation_places, weight_places
from hw.cell import ACTIVATION, load_layout
from hw.dot_multiply import BIAS_BITS, CONTROL, bias_of, control_of, select_slice
from hw.recode import is_special, recode
from hw.wires import wire

LENGTH_BITS = 6
FP6 = (Format.MXFP6_E2M3, Format.MXFP6_E3M2)
SLICE_ROW = data.StructLayout(
    {
        "line": LINE_BITS,
        "scale": 8,
        "act_format": 3,
        "weight_format": 3,
        "index": 2,
        "part": 5,
        "length": LENGTH_BITS,
        "swap": 1,
    }
)


def load_line_layout(row_bits: int) -> data.StructLayout:
    """One weight line for the cell of row `row` in a column.

    `half`: which half of the line's codes an MXINT8 group is. `length`: elements that count.
    """
    return data.StructLayout({
        "valid": 1, "row": row_bits, "line": LINE_BITS, "scale": 8,
        "format": 3, "half": 1, "length": LENGTH_BITS,
    })  # fmt: skip


def _is(m: Module, value: Value, *formats: Format, name: str) -> Signal:
    return wire(m, name, Cat(*(value == fmt for fmt in formats)).any())


def _thermometer(m: Module, length: Value, bits: int) -> Signal:
    """Bit i is set for i < length."""
    return wire(m, "present", Cat(*(length > i for i in range(bits))))


def _eight_bit(m: Module, i: int, byte: Value, fmt: Value) -> tuple[Value, Value]:
    """An eight-bit element as E4M3, or E5M2 if it is that, and whether it is special."""
    small = [recode(m, f"{f.name.lower()}_{i}", byte, f, Native.E4M3) for f in FP6]
    code = Mux(fmt == FP6[0], small[0], Mux(fmt == FP6[1], small[1], byte))
    special = Mux(
        fmt == Format.MXFP8_E4M3,
        is_special(byte, Format.MXFP8_E4M3),
        (fmt == Format.MXFP8_E5M2) & is_special(byte, Format.MXFP8_E5M2),
    )
    return code, special


class ActivationEdge(wiring.Component):
    """Left edge of one row: one slice per cycle, LATENCY cycles, never stalls.

    `part` counts fields of N codes in the line, the slice's elements; `index` is the slice,
    `length` the number of valid elements of its whole group: element i of the slice counts if index
    * N + i < length. A length of 0 makes the slice `empty`. Both formats must be formats of the
    array.
    """

    LATENCY = 2
    emit_name = "activation_edge"

    def __init__(self) -> None:
        super().__init__({"slice": In(SLICE_ROW), "activation": Out(ACTIVATION)})

    def elaborate(self, platform):
        m = Module()
        now = self.slice

        # First stage: what the pair of formats means, and the slice's part of the line.
        native, against = Signal(2), Signal(2)
        control = Signal(CONTROL)
        bias = Signal(signed(BIAS_BITS))
        count_log, field_log = Signal(3), Signal(3)
        with m.Switch(Cat(now.act_format, now.weight_format)):
            for act in ARRAY_FORMATS:
                for weight in ARRAY_FORMATS:
                    natives, n = native_pair(act, weight), products_per_slice(act, weight)
                    field = n * SPECS[act].storage_bits
                    with m.Case(act | weight << 3):
                        m.d.comb += [
                            native.eq(natives[0]),
                            against.eq(natives[1]),
                            bias.eq(bias_of(*natives)),
                            *(control[k].eq(v) for k, v in control_of(*natives).items()),
                            count_log.eq(n.bit_length() - 1),
                            field_log.eq(field.bit_length() - 1),
                        ]
        bytes_off = Signal(4)
        start = Signal(LENGTH_BITS)
        with m.Switch(field_log):
            for k in range(3, 7):
                with m.Case(k):
                    m.d.comb += bytes_off.eq(now.part << (k - 3))
        with m.Switch(count_log):
            for k in range(1, 6):
                with m.Case(k):
                    m.d.comb += start.eq(now.index << k)
        line = now.line
        for k in reversed(range(4)):
            line = wire(m, f"part_{k}", Mux(bytes_off[k], line[8 << k :], line), LINE_BITS)
        left = wire(m, "left", now.length - start, LENGTH_BITS + 1)

        codes = Signal(LINE_BITS, reset_less=True)
        fmt = Signal(3, reset_less=True)
        length = Signal(LENGTH_BITS, reset_less=True)
        pair = Signal(4, reset_less=True)
        scale_nan = Signal(reset_less=True)
        then = Signal(ACTIVATION, reset_less=True)
        scale = wire(m, "scale", Mux(now.act_format == Format.BF16, SCALE_ONE, now.scale))
        whole = wire(m, "whole", (native == Native.BF16) | (native == Native.E2M1))
        m.d.sync += [
            codes.eq(line),
            fmt.eq(now.act_format),
            length.eq(Mux(left[-1], 0, left)),
            pair.eq(Cat(native, against)),
            scale_nan.eq(scale == SCALE_NAN),
            then.bias.eq(scale + bias),
            then.control.eq(control),
            *select_slice(control, then.control, Mux(whole, now.index, now.index << 1)[:2]),
            then.empty.eq(now.length == 0),
            then.swap.eq(now.swap),
        ]  # fmt: skip

        # Second stage: recode, mask, repeat.
        present = _thermometer(m, length, 32)
        nibbles = [codes[4 * i : 4 * i + 4] for i in range(32)]
        octets = [codes[8 * i : 8 * i + 8] for i in range(16)]
        specials = Signal(16)
        fp4, int8 = wire(m, "fp4", fmt == Format.MXFP4), wire(m, "int8", fmt == Format.MXINT8)
        bf16 = wire(m, "bf16", fmt == Format.BF16)
        fp8 = []
        for i in range(16):
            code, special = _eight_bit(m, i, octets[i], fmt)
            if i < 8:
                wide = recode(m, f"mxfp4_{i}", nibbles[i], Format.MXFP4, Native.E4M3)
                code = Mux(fp4, wide, code)
            fp8.append(wire(m, f"fp8_{i}", Mux(present[i], code, 0)))
            if i < 8:
                word = codes[16 * i : 16 * i + 16]
                special = Mux(bf16, is_special(word, Format.BF16), special)
            m.d.comb += specials[i].eq(present[i] & special)
        words = []
        for i in range(8):
            word = codes[16 * i : 16 * i + 16]
            code = Mux(int8, recode(m, f"int8_{i}", octets[i], Format.MXINT8, Native.BF16), word)
            if i < 2:  # only slices of two are wider than their format otherwise
                for source in ARRAY_FORMATS[:5]:
                    raw = nibbles[i] if source is Format.MXFP4 else octets[i]
                    wide = recode(m, f"{source.name.lower()}_{i}_wide", raw, source, Native.BF16)
                    code = Mux(fmt == source, wide, code)
            words.append(wire(m, f"bf16_{i}", Mux(present[i], code, 0)))

        out = Signal(ACTIVATION, reset_less=True)
        selected = Signal(LINE_BITS)
        single = [Mux(present[i], nibbles[i], 0) for i in range(32)]
        with m.Switch(pair):
            for act_native, weight_native in product(Native, Native):
                if DIGITS[act_native] < DIGITS[weight_native]:
                    continue
                elements = Cat({Native.E2M1: single, Native.BF16: words}.get(act_native, fp8))
                placed = Cat(elements[p] for p in activation_places(act_native, weight_native))
                with m.Case(act_native | weight_native << 2):
                    m.d.comb += selected.eq(placed)
        m.d.sync += [
            out.eq(then),
            out.codes.eq(selected),
            out.nan.eq(specials.any() | (present[0] & scale_nan)),
        ]
        m.d.comb += self.activation.eq(out)
        return m


class WeightEdge(wiring.Component):
    """Top edge of one column: one weight line per cycle, LATENCY cycles, never stalls."""

    LATENCY = 1

    def __init__(self, row_bits: int):
        if not isinstance(row_bits, int) or row_bits < 1:
            raise ValueError(f"row_bits must be an integer of at least 1, not {row_bits!r}")
        self.row_bits = row_bits
        super().__init__({
            "line": In(load_line_layout(row_bits)), "load": Out(load_layout(row_bits))
        })  # fmt: skip

    @property
    def emit_name(self) -> str:
        return f"weight_edge_row{self.row_bits}"

    def elaborate(self, platform):
        m = Module()
        now, fmt, line = self.line, self.line.format, self.line.line
        present = _thermometer(m, now.length, 32)
        native = Signal(2)
        with m.Switch(fmt):
            for source in ARRAY_FORMATS:
                with m.Case(source):
                    m.d.comb += native.eq(SPECS[source].native)
        int8, bf16 = wire(m, "int8", fmt == Format.MXINT8), wire(m, "bf16", fmt == Format.BF16)
        half = wire(m, "chosen", Mux(now.half, line[64:], line[:64]))
        specials = Signal(16)
        fp8, words = [], []
        for i in range(16):
            code, special = _eight_bit(m, i, line[8 * i : 8 * i + 8], fmt)
            fp8.append(wire(m, f"fp8_{i}", Mux(present[i], code, 0)))
            if i < 8:
                word = line[16 * i : 16 * i + 16]
                special = Mux(bf16, is_special(word, Format.BF16), special)
                byte = half[8 * i : 8 * i + 8]
                wide = recode(m, f"int8_{i}", byte, Format.MXINT8, Native.BF16)
                words.append(wire(m, f"bf16_{i}", Mux(present[i], Mux(int8, wide, word), 0)))
            m.d.comb += specials[i].eq(present[i] & special)
        single = [Mux(present[i], line[4 * i : 4 * i + 4], 0) for i in range(32)]
        selected = Signal(LINE_BITS)
        with m.Switch(native):
            for target in Native:
                elements = {Native.E2M1: single, Native.BF16: words}.get(target, fp8)
                codes = Cat(elements)
                with m.Case(target):
                    m.d.comb += selected.eq(Cat(codes[p] for p in weight_places(target)))
        scale = wire(m, "scale", Mux(bf16, SCALE_ONE, now.scale))
        valid = Signal()
        row = Signal(self.row_bits, reset_less=True)
        weight = Signal(self.load.weight.shape(), reset_less=True)
        m.d.sync += [
            valid.eq(now.valid),
            row.eq(now.row),
            weight.codes.eq(selected),
            weight.scale.eq(scale),
            weight.nan.eq(specials.any() | (present[0] & (scale == SCALE_NAN))),
        ]
        m.d.comb += [
            self.load.valid.eq(valid), self.load.row.eq(row), self.load.weight.eq(weight),
        ]  # fmt: skip
        return m
