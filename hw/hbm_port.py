# SPDX-License-Identifier: Apache-2.0
"""AXI4 masters of a tile towards its HBM slice, shared by the tile's channels."""

from fractions import Fraction

from amaranth import Module, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hw.axi_burst import AXI_BOUNDARY, BurstSplitter
from hw.config import LINE_BYTES, TileConfig
from hw.hbm_channel import HbmRead, HbmWrite
from hw.line_fifo import LineFifo
from hw.ports import LINE_BITS, Axi4

COVERED_LATENCY = 256  # cycles from AR to the first beat that a read channel's buffer bridges
OUTSTANDING = 64  # bursts in flight per direction
BURST_INCR = 1


def read_depth(config: TileConfig) -> int:
    """Beats of a read channel's buffer: the rate for `COVERED_LATENCY` cycles, and one burst."""
    port_rate = Fraction(config.hbm_rate) / config.hbm_ports
    beats = (port_rate * COVERED_LATENCY + AXI_BOUNDARY) / config.hbm_port_bytes
    return 1 << (int(beats) - 1).bit_length()


class HbmPort(wiring.Component):
    """`channels` read channels and one write channel on the AXI4 ports of the HBM slice.

    All ports work in lock step as one of W = `hbm_beat_bytes` / 16 lines: beat b of the HBM's
    address space is beat b of every port, and port p carries lines p * W / ports and on. So the
    interleave granule is one port's beat, and a port's byte address is b * `hbm_port_bytes`.

    Reads: a burst is issued only when its channel's buffer has room for all of it, so R is never
    refused and no channel can block another; bursts are chosen round robin. Data leave in order
    of request, one beat per cycle, at least five cycles after AR's answer. Up to 64 bursts are
    in flight. Writes: AW is issued at once, W beats follow in order.

    An error response marks its beat (reads) or pulses `write.error`; nothing else changes.
    """

    def __init__(self, config: TileConfig, channels: int = 2):
        if channels < 1:
            raise ValueError(f"channels must be at least 1, not {channels!r}")
        self.config, self.channels = config, channels
        self.lines = config.hbm_beat_bytes // LINE_BYTES
        super().__init__(
            {
                "axi": Out(Axi4(config.hbm_port_bytes)).array(config.hbm_ports),
                "read": In(HbmRead(self.lines)).array(channels),
                "write": In(HbmWrite(self.lines)),
            }
        )

    def _address_channel(self, m, name, channel):
        """Register stage of an AR or AW channel: `send` and `beat`, `beats` in, `free` out."""
        config = self.config
        send, free = Signal(name=f"{name}_send"), Signal(name=f"{name}_free")
        beat = Signal(32, name=f"{name}_beat")
        beats = Signal(9, name=f"{name}_beats")
        # Ports answer on their own; the next burst waits until all of them have taken this one.
        empty = Signal(len(channel), name=f"{name}_empty")
        m.d.comb += free.eq(empty.all())
        for p, port in enumerate(channel):
            m.d.comb += empty[p].eq(~port.valid | port.ready)
            with m.If(port.ready):
                m.d.sync += port.valid.eq(0)
            with m.If(send):
                m.d.sync += [
                    port.valid.eq(1),
                    port.p.addr.eq(beat * config.hbm_port_bytes),
                    port.p.len.eq(beats - 1),
                ]
            m.d.comb += [
                port.p.size.eq((config.hbm_port_bytes - 1).bit_length()),
                port.p.burst.eq(BURST_INCR),
            ]
        return send, free, beat, beats

    def _reads(self, m):
        lines, ports = self.lines, self.config.hbm_ports
        depth = read_depth(self.config)
        port_lines = lines // ports
        line_range = range(lines + 1)

        send, free, beat, beats = self._address_channel(m, "ar", [axi.ar for axi in self.axi])
        tag_layout = data.StructLayout(
            {"channel": range(max(self.channels, 2)), "start": line_range, "end": line_range}
        )
        tags = []
        tags_ready = Signal(ports)
        for p in range(ports):
            tag = LineFifo(tag_layout, OUTSTANDING)
            m.submodules[f"tags{p}"] = tag
            m.d.comb += tags_ready[p].eq(tag.input.ready)
            tags.append(tag)

        # Choice of the next burst among those with reserved room.
        splitters = []
        eligible = Signal(self.channels)
        chosen = Signal(range(max(self.channels, 2)))
        last = Signal.like(chosen)
        for c in range(self.channels):
            splitter = BurstSplitter(self.config)
            m.submodules[f"splitter{c}"] = splitter
            splitters.append(splitter)
            room = Signal(range(depth + 1), init=depth, name=f"room{c}")
            wiring.connect(m, wiring.flipped(self.read[c].request), splitter.piece)
            issue = Signal(name=f"issue{c}")
            taken = Signal(name=f"taken{c}")
            m.d.comb += [
                eligible[c].eq(splitter.burst.valid & (splitter.burst.p.beats <= room)),
                issue.eq(send & (chosen == c)),
                splitter.burst.ready.eq(issue),
                taken.eq(self.read[c].data.valid & self.read[c].data.ready),
            ]
            reserved = Signal(range(depth + 1), name=f"reserved{c}")
            with m.If(issue):
                m.d.comb += reserved.eq(splitter.burst.p.beats)
            m.d.sync += room.eq(room - reserved + taken)
        with m.Switch(last):
            for before in range(self.channels):
                with m.Case(before):
                    order = [(before + 1 + i) % self.channels for i in range(self.channels)]
                    for c in reversed(order):
                        with m.If(eligible[c]):
                            m.d.comb += chosen.eq(c)
        m.d.comb += send.eq(eligible.any() & free & tags_ready.all())
        with m.If(send):
            m.d.sync += last.eq(chosen)
        tag_in = Signal(tag_layout)
        with m.Switch(chosen):
            for c, splitter in enumerate(splitters):
                with m.Case(c):
                    burst = splitter.burst.p
                    m.d.comb += [
                        beat.eq(burst.beat),
                        beats.eq(burst.beats),
                        tag_in.channel.eq(c),
                        tag_in.start.eq(burst.start),
                        tag_in.end.eq(burst.end),
                    ]

        # Arriving beats go to the buffer of the channel that the oldest burst belongs to.
        part_layout = data.StructLayout(
            {
                "data": data.ArrayLayout(LINE_BITS, port_lines),
                "start": line_range,
                "end": line_range,
                "error": 1,
            }
        )
        buffers = [
            [LineFifo(part_layout, depth) for _ in range(ports)] for _ in range(self.channels)
        ]
        for p, axi in enumerate(self.axi):
            tag = tags[p]
            first = Signal(init=1, name=f"first{p}")
            accept = Signal(name=f"accept{p}")
            part = Signal(part_layout, name=f"part{p}")
            m.d.comb += [
                tag.input.p.eq(tag_in),
                tag.input.valid.eq(send),
                axi.r.ready.eq(tag.output.valid),
                accept.eq(axi.r.valid & axi.r.ready),
                tag.output.ready.eq(accept & axi.r.p.last),
                part.data.as_value().eq(axi.r.p.data),
                part.error.eq(axi.r.p.resp[1]),
                part.end.eq(lines),
            ]
            with m.If(first):
                m.d.comb += part.start.eq(tag.output.p.start)
            with m.If(axi.r.p.last):
                m.d.comb += part.end.eq(tag.output.p.end)
            with m.If(accept):
                m.d.sync += first.eq(axi.r.p.last)
            for c in range(self.channels):
                buffer = buffers[c][p]
                m.submodules[f"buffer{c}_{p}"] = buffer
                m.d.comb += [
                    buffer.input.p.eq(part),
                    buffer.input.valid.eq(accept & (tag.output.p.channel == c)),
                ]
        for c in range(self.channels):
            out = self.read[c].data
            parts = [buffer.output for buffer in buffers[c]]
            present = Signal(ports, name=f"present{c}")
            errors = Signal(ports, name=f"errors{c}")
            m.d.comb += [
                out.valid.eq(present.all()),
                out.p.start.eq(parts[0].p.start),
                out.p.end.eq(parts[0].p.end),
                out.p.error.eq(errors.any()),
            ]
            for p, part in enumerate(parts):
                m.d.comb += [
                    present[p].eq(part.valid),
                    errors[p].eq(part.p.error),
                    part.ready.eq(out.valid & out.ready),
                ]
                for i in range(port_lines):
                    m.d.comb += out.p.data[p * port_lines + i].eq(part.p.data[i])

    def _writes(self, m):
        ports = self.config.hbm_ports
        port_lines = self.lines // ports
        m.submodules.write_splitter = splitter = BurstSplitter(self.config)
        m.submodules.write_lengths = lengths = LineFifo(splitter.burst.p.beats.shape(), OUTSTANDING)
        send, free, beat, beats = self._address_channel(m, "aw", [axi.aw for axi in self.axi])
        wiring.connect(m, wiring.flipped(self.write.request), splitter.piece)

        pending = [Signal(range(2 * OUTSTANDING), name=f"pending{p}") for p in range(ports)]
        room = Signal(ports)
        busy = Signal(ports)
        errors = Signal(ports)
        m.d.comb += [
            send.eq(splitter.burst.valid & free & lengths.input.ready & room.all()),
            splitter.burst.ready.eq(send),
            beat.eq(splitter.burst.p.beat),
            beats.eq(splitter.burst.p.beats),
            lengths.input.valid.eq(send),
            lengths.input.p.eq(splitter.burst.p.beats),
            self.write.idle.eq(splitter.idle & ~busy.any() & ~self.write.request.valid),
            self.write.error.eq(errors.any()),
        ]
        for p, axi in enumerate(self.axi):
            answered = Signal(name=f"answered{p}")
            m.d.comb += [
                axi.b.ready.eq(1),
                answered.eq(axi.b.valid & busy[p]),
                errors[p].eq(answered & axi.b.p.resp[1]),
                busy[p].eq(pending[p] != 0),
                room[p].eq(pending[p] < OUTSTANDING),
            ]
            m.d.sync += pending[p].eq(pending[p] + send - answered)

        # Every port has its own W register, so that one port's pause does not repeat a beat.
        sent = Signal(splitter.burst.p.beats.shape())
        last = Signal()
        stages = Signal(ports)
        take = Signal()
        m.d.comb += [
            last.eq(sent + 1 == lengths.output.p),
            self.write.data.ready.eq(lengths.output.valid & stages.all()),
            take.eq(self.write.data.valid & self.write.data.ready),
            lengths.output.ready.eq(take & last),
        ]
        with m.If(take):
            m.d.sync += sent.eq(sent + 1)
            with m.If(last):
                m.d.sync += sent.eq(0)
        for p, axi in enumerate(self.axi):
            m.d.comb += stages[p].eq(~axi.w.valid | axi.w.ready)
            with m.If(axi.w.ready):
                m.d.sync += axi.w.valid.eq(0)
            with m.If(take):
                m.d.sync += [axi.w.valid.eq(1), axi.w.p.last.eq(last)]
                for i in range(port_lines):
                    line = p * port_lines + i
                    m.d.sync += [
                        axi.w.p.data[i * LINE_BITS : (i + 1) * LINE_BITS].eq(
                            self.write.data.p.data[line]
                        ),
                        axi.w.p.strb[i * LINE_BYTES : (i + 1) * LINE_BYTES].eq(
                            self.write.data.p.enable[line].replicate(LINE_BYTES)
                        ),
                    ]

    def elaborate(self, platform):
        m = Module()
        self._reads(m)
        self._writes(m)
        return m
