# SPDX-License-Identifier: Apache-2.0
"""Single-error correction and double-error detection of KV SRAM lines (the code of `golden.ecc`).

Both parts are combinational. A check bit is the parity of at most 58 bits, a balanced tree of six
XOR gates; a corrected bit needs a comparison of nine bits and one XOR gate more.
"""

from amaranth import Cat, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden.ecc import CHECK_BITS, CODE_BITS, COLUMNS, DATA_BITS
from hw.wires import wire


def _parities(m: Module, word, count: int) -> list:
    """Parity, for each check bit, of those of the lowest `count` bits of `word` that it covers."""
    result = []
    for i in range(CHECK_BITS):
        covered = wire(m, f"covered{i}", Cat(word[b] for b in range(count) if COLUMNS[b] >> i & 1))
        result.append(wire(m, f"parity{i}", covered.xor()))
    return result


class EccEncoder(wiring.Component):
    """`code` is the code word of `data`: the data below, nine check bits above."""

    emit_name = "ecc_encoder"
    clocked = False

    def __init__(self) -> None:
        super().__init__({"data": In(DATA_BITS), "code": Out(CODE_BITS)})

    def elaborate(self, platform):
        m = Module()
        m.d.comb += self.code.eq(Cat(self.data, *_parities(m, self.data, DATA_BITS)))
        return m


class EccDecoder(wiring.Component):
    """`data` of a code word, a single flipped bit corrected.

    `corrected`: one bit was flipped. `double`: more were, at least two; `data` is then as read.
    """

    emit_name = "ecc_decoder"
    clocked = False

    def __init__(self) -> None:
        super().__init__(
            {
                "code": In(CODE_BITS),
                "data": Out(DATA_BITS),
                "corrected": Out(1),
                "double": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        syndrome = wire(m, "syndrome", Cat(*_parities(m, self.code, CODE_BITS)))
        flips = wire(m, "flips", Cat(syndrome == column for column in COLUMNS))
        m.d.comb += [
            self.data.eq(self.code[:DATA_BITS] ^ flips[:DATA_BITS]),
            self.corrected.eq(flips.any()),
            self.double.eq(syndrome.any() & ~self.corrected),
        ]
        return m
