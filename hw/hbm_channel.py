# SPDX-License-Identifier: Apache-2.0
"""Payloads and signatures between the HBM port and the engines that use it.

A *beat* is what all HBM ports together move in one transfer: W neighbouring lines of 16 bytes,
the first one's address a multiple of W. A *piece* is a contiguous range of lines in HBM.
"""

from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.ports import LINE_ADDRESS_BITS, LINE_BITS, SCALE_BITS

PIECE_BITS = LINE_ADDRESS_BITS + 1  # a piece may be the whole address range

PIECE = data.StructLayout({"address": LINE_ADDRESS_BITS, "lines": PIECE_BITS})


def line_beat(lines: int) -> data.StructLayout:
    """Lines `start` <= i < `end` of `data` count; `error`: the HBM slice answered with an error."""
    return data.StructLayout(
        {
            "data": data.ArrayLayout(LINE_BITS, lines),
            "start": range(lines + 1),
            "end": range(lines + 1),
            "error": 1,
        }
    )


def line_write(lines: int) -> data.StructLayout:
    """Write of the lines with `enable` set; `address` is a multiple of `lines`."""
    return data.StructLayout(
        {
            "address": LINE_ADDRESS_BITS,
            "data": data.ArrayLayout(LINE_BITS, lines),
            "scales": data.ArrayLayout(SCALE_BITS, lines),
            "enable": lines,
        }
    )


class HbmRead(wiring.Signature):
    """Read channel, seen from the engine: pieces are answered in order by the beats they lie in."""

    def __init__(self, lines: int):
        self.lines = lines
        super().__init__(
            {
                "request": Out(stream.Signature(PIECE)),
                "data": In(stream.Signature(line_beat(lines))),
            }
        )


class HbmWrite(wiring.Signature):
    """Write channel, seen from the engine: for each piece, in order, the beats it lies in.

    `idle` is high when every burst that was requested has been answered; `error` pulses when a
    burst was answered with an error.
    """

    def __init__(self, lines: int):
        self.lines = lines
        super().__init__(
            {
                "request": Out(stream.Signature(PIECE)),
                "data": Out(
                    stream.Signature(
                        data.StructLayout(
                            {"data": data.ArrayLayout(LINE_BITS, lines), "enable": lines}
                        )
                    )
                ),
                "idle": In(1),
                "error": In(1),
            }
        )
