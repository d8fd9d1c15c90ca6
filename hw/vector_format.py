# SPDX-License-Identifier: Apache-2.0
"""Sizes of vectors in memory by format."""

from golden.formats import SPECS, Format

MAX_STEP = 3  # largest `width_step`


def width_step(fmt: Format) -> int:
    """How often an FP32 vector has to be halved to the size of a vector of `fmt`."""
    return (32 // SPECS[fmt].storage_bits).bit_length() - 1


def size_bits(lanes: int, fmt: Format) -> int:
    """log2 of the bytes of a vector of `lanes` elements of `fmt`."""
    return (lanes * SPECS[fmt].storage_bits // 8).bit_length() - 1
