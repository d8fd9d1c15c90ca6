# SPDX-License-Identifier: Apache-2.0
"""Where a cell wants the bits of its operands: free wiring at the array's edge that saves each cell
most of its selection and decoding.

A *quad* is 16 bits of the activation and 16 of the weight word. A quad of activations is two bytes,
one for each pair of lanes; one of weights is the byte of the lower slices and that of the upper
ones. In every byte, bits 0, 1 and 4 are the lowest digits of the significand, so that digits of all
formats and E2M1's codes come from the same places; the exponent's bits share places too.
"""

from golden.formats import DIGITS, LANES, Native

LINE_BITS = 128
QUADS = 8
QUAD_BITS = 16

# Code bit in each place of a byte, or of the two bytes of a BF16 word.
_E4M3 = (0, 1, 4, 5, 2, 3, 6, 7)
_E5M2 = (6, 0, 3, 4, 1, 2, 5, 7)
_BF16_LOW = (0, 1, 8, 9, 2, 3, 10, 7)
_BF16_HIGH = (4, 5, 11, 12, 6, 13, 14, 15)
_EIGHT = {Native.E4M3: _E4M3, Native.E5M2: _E5M2}


def _nibble_home(i: int) -> tuple[int, int]:
    """Quad and byte of the `i`-th of sixteen elements that meet E2M1 weights."""
    return 4 * (i >> 3 & 1) + (i & 3), i >> 2 & 1


def activation_places(act: Native, weight: Native) -> list[int]:
    """For each bit of a cell's activation word, its place in the slice's codes, side by side."""
    places = [0] * LINE_BITS
    if act is Native.E2M1:
        for i in range(LANES):
            quad, byte = _nibble_home(i)
            for b in range(4):
                places[QUAD_BITS * quad + 8 * byte + 4 * (i >> 4) + b] = 4 * i + b
    elif act is Native.BF16:
        elements = QUADS // DIGITS[weight]
        for quad in range(QUADS):
            for b, source in enumerate(_BF16_LOW + _BF16_HIGH):
                places[QUAD_BITS * quad + b] = 16 * (quad % elements) + source
    else:
        single = DIGITS[weight] == 1
        for i in range(LANES // 2 if single else QUADS):
            for quad, byte in [_nibble_home(i)] if single else [(i, 0), (i, 1)]:
                for b, source in enumerate(_EIGHT[act]):
                    places[QUAD_BITS * quad + 8 * byte + b] = 8 * i + source
    return places


def weight_places(weight: Native) -> list[int]:
    """For each bit of a cell's weight word, its place in the group's codes, side by side."""
    places = [0] * LINE_BITS
    if weight is Native.E2M1:
        for i in range(LANES):
            quad, upper_nibble = _nibble_home(i)
            for b in range(4):
                places[QUAD_BITS * quad + 8 * (i >> 4) + 4 * upper_nibble + b] = 4 * i + b
    elif weight is Native.BF16:
        for i in range(8):
            low, half = 4 * (i >> 1 & 1) + (i & 1), i >> 2
            for quad, sources in ((low, _BF16_LOW), (low + 2, _BF16_HIGH)):
                for b, source in enumerate(sources):
                    places[QUAD_BITS * quad + 8 * half + b] = 16 * i + source
    else:
        for i in range(16):
            for b, source in enumerate(_EIGHT[weight]):
                places[QUAD_BITS * (i & 7) + 8 * (i >> 3) + b] = 8 * i + source
    return places
