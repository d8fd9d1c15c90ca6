# SPDX-License-Identifier: Apache-2.0
"""Cuts pieces of HBM into AXI bursts."""

from amaranth import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.config import LINE_BYTES, TileConfig
from hw.hbm_channel import PIECE, PIECE_BITS
from hw.ports import LINE_ADDRESS_BITS

AXI_BOUNDARY = 4096  # no burst crosses a multiple of this (AXI4, A3.4.1)


def burst_beats(config: TileConfig) -> int:
    """Beats of the longest burst: 4 KiB at every port, which is at most 256 beats."""
    return AXI_BOUNDARY // config.hbm_port_bytes


def burst_layout(config: TileConfig) -> data.StructLayout:
    """`beats` beats from beat number `beat`; in the first beat the lines from `start` are wanted,
    in the last one those before `end`."""
    lines = config.hbm_beat_bytes // LINE_BYTES
    return data.StructLayout(
        {
            "beat": LINE_ADDRESS_BITS - (lines - 1).bit_length(),
            "beats": range(burst_beats(config) + 1),
            "start": range(lines + 1),
            "end": range(lines + 1),
        }
    )


class BurstSplitter(wiring.Component):
    """Pieces in, bursts out, in order: as long as they can be without crossing 4 KiB at a port.

    One burst per cycle, latency two cycles. A piece of no lines is not allowed. `idle` is high when
    nothing is inside.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        super().__init__(
            {
                "piece": In(stream.Signature(PIECE)),
                "burst": Out(stream.Signature(burst_layout(config))),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        lines = self.config.hbm_beat_bytes // LINE_BYTES
        shift = (lines - 1).bit_length()
        most = burst_beats(self.config)

        active = Signal()
        address = Signal(LINE_ADDRESS_BITS, reset_less=True)
        left = Signal(PIECE_BITS, reset_less=True)

        offset = Signal(range(lines + 1))
        beat = Signal(LINE_ADDRESS_BITS - shift)
        reach = Signal(PIECE_BITS + 1)  # lines from the start of the first beat to the end
        total = Signal(PIECE_BITS + 1 - shift)
        room = Signal(range(most + 1))
        beats = Signal(range(most + 1))
        final = Signal()
        end_index = Signal(range(lines + 1))
        m.d.comb += [
            offset.eq(address[:shift]),
            beat.eq(address[shift:]),
            reach.eq(left + offset),
            total.eq((reach + (lines - 1))[shift:]),
            room.eq(most - beat[: (most - 1).bit_length()]),
            final.eq(total <= room),
            beats.eq(Mux(final, total, room)),
            end_index.eq((reach - 1)[:shift]),
        ]
        advance, load = Signal(), Signal()
        m.d.comb += [
            advance.eq(active & (~self.burst.valid | self.burst.ready)),
            self.piece.ready.eq(~active | (advance & final)),
            load.eq(self.piece.valid & self.piece.ready),
            self.idle.eq(~active & ~self.burst.valid),
        ]
        with m.If(self.burst.ready):
            m.d.sync += self.burst.valid.eq(0)
        with m.If(advance):
            m.d.sync += [
                self.burst.valid.eq(1),
                self.burst.p.beat.eq(beat),
                self.burst.p.beats.eq(beats),
                self.burst.p.start.eq(offset),
                self.burst.p.end.eq(Mux(final, end_index + 1, lines)),
                address.eq((beat + beats) << shift),
                left.eq(reach - (beats << shift)),
                active.eq(~final),
            ]
        with m.If(load):
            m.d.sync += [
                active.eq(1),
                address.eq(self.piece.p.address),
                left.eq(self.piece.p.lines),
            ]
        return m
