# SPDX-License-Identifier: Apache-2.0
"""The tile's SRAM: single-port banks of lines behind a crossbar of wide ports."""

from dataclasses import dataclass
from typing import Any

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out, connect

from hw.config import TileConfig
from hw.emit import place
from hw.ports import (
    GRANULE_BITS,
    LINE_BITS,
    SCALE_BITS,
    ActivationClient,
    SramClient,
    sram_response,
)
from hw.sram import Sram1RW
from hw.sram_arbiter import SramArbiter

WORD_BITS = LINE_BITS + SCALE_BITS  # a bank's word: the line below, its scale above
ENABLES = WORD_BITS // SCALE_BITS  # write enables of a word, one per byte
STEPS = 3  # activation strides: 1, 2 and 4 lines


def _log2(value: int) -> int:
    return value.bit_length() - 1


def bank_write(lanes: int) -> data.ArrayLayout:
    """Words and byte enables that `lanes` writers offer to a bank; no enable set means a read."""
    return data.ArrayLayout(data.StructLayout({"word": WORD_BITS, "enable": ENABLES}), lanes)


class TileSramBank(wiring.Component):
    """One bank: the macro and the choice among the crossbar's ports.

    At most one bit of `select` is high; that port's row is accessed. Ports 0 to `readers` - 1 only
    read, the others write when their `enable` is not 0. `word` is the word read in the last cycle
    with a read.
    """

    def __init__(self, depth: int, readers: int, writers: int):
        self.depth, self.readers, self.writers = depth, readers, writers
        ports = readers + writers
        super().__init__(
            {
                "select": In(ports),
                "row": In(data.ArrayLayout((depth - 1).bit_length(), ports)),
                "write": In(bank_write(writers)),
                "word": Out(WORD_BITS),
            }
        )

    @property
    def emit_name(self) -> str:
        return f"tile_sram_bank_{self.depth}_{self.readers}r{self.writers}w"

    def elaborate(self, platform):
        m = Module()
        m.submodules.sram = sram = Sram1RW(WORD_BITS, self.depth, granularity=SCALE_BITS)
        m.d.comb += [sram.en.eq(self.select.any()), self.word.eq(sram.read_data)]
        for p in range(self.readers + self.writers):
            with m.If(self.select[p]):
                m.d.comb += sram.addr.eq(self.row[p])
                if p >= self.readers:
                    write = self.write[p - self.readers]
                    m.d.comb += [sram.write_data.eq(write.word), sram.write_en.eq(write.enable)]
        return m


@dataclass
class _Port:
    """A port of the crossbar; line i of an access lies in bank `banks[choice][i]`."""

    name: str
    client: Any
    lines: int
    banks: list[tuple[int, ...]]
    choice: Value
    stepped: bool = False
    reads: bool = True
    writes: bool = False


class TileSram(wiring.Component):
    """Line A lies in bank A mod banks, row A div banks. A line is 128 bits and an 8-bit scale.

    A read answers `LATENCY` cycles after it was taken; a write is seen by every request taken
    later; a fault pulses `LATENCY` cycles after the request was taken. Every port takes one request
    per cycle as long as banks are free: a request takes all its banks in one cycle or waits. Order
    of priority is that of `PORTS`, but a request that has waited `patience` cycles goes before all
    that have not, so none waits longer than `patience` + len(PORTS) - 1 cycles (the single-line
    clients share `small`: that many per turn). Address bits below a request's width are ignored.
    Contents are undefined until written.

    Parameters
    ----------
    config : the tile
    patience : cycles a request waits before it gets the highest priority

    Members
    -------
    activation : strided reads of `rows` lines; step 3 is a fault
    matrix : vector reads and writes
    vector_a, vector_b : vector reads (`write` is ignored)
    vector_out : vector writes (a request without `write` is taken and has no effect)
    dma : reads and writes of an HBM beat
    kv, topk, noc_in, noc_out, collective, sequencer, host : reads and writes of one line
    conflicts : bit i is high in each cycle in which PORTS[i] waits because of banks
    """

    LATENCY = 2
    PORTS = ("activation", "matrix", "vector_out", "vector_a", "vector_b", "dma", "small")
    SMALL = ("kv", "topk", "noc_in", "noc_out", "collective", "sequencer", "host")

    def __init__(self, config: TileConfig, patience: int = 16):
        self.dma_lines = config.hbm_beat_bytes * 8 // LINE_BITS
        if self.dma_lines > config.sram_banks:
            raise ValueError(
                f"sram_banks must be at least the {self.dma_lines} lines of an HBM beat, "
                f"not {config.sram_banks!r}"
            )
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience must be at least 1, not {patience!r}")
        self.config, self.patience = config, patience
        vector = In(SramClient(config.vector_lines))
        super().__init__(
            {
                "activation": In(ActivationClient(config.rows)),
                "matrix": vector,
                "vector_a": vector,
                "vector_b": vector,
                "vector_out": vector,
                "dma": In(SramClient(self.dma_lines)),
                **{name: In(SramClient(1)) for name in self.SMALL},
                "conflicts": Out(len(self.PORTS)),
            }
        )

    def _plain_port(self, name: str, client: Any, lines: int, **kind: bool) -> _Port:
        banks = self.config.sram_banks
        choice = client.request.payload.address[_log2(lines) : _log2(banks)]
        return _Port(
            name,
            client,
            lines,
            [tuple(range(b, b + lines)) for b in range(0, banks, lines)],
            choice,
            **kind,
        )

    def _activation_port(self, m: Module) -> _Port:
        """With step s the choice is s, then the address bits that are not the line's index."""
        rows, bank_bits = self.config.rows, _log2(self.config.sram_banks)
        request = self.activation.request.payload
        row_bits = _log2(rows)
        free_bits = bank_bits - row_bits
        choice = Signal(free_bits + 2, name="activation_choice")
        banks = []
        with m.Switch(request.step):
            for step in range(STEPS):
                free = Cat(request.address[:step], request.address[step + row_bits : bank_bits])
                with m.Case(step):
                    m.d.comb += choice.eq(Cat(free, request.step))
                for code in range(1 << free_bits):
                    first = code >> step << (step + row_bits) | code & ((1 << step) - 1)
                    banks.append(tuple(first + (r << step) for r in range(rows)))
        return _Port("activation", self.activation, rows, banks, choice, stepped=True)

    def _overlap(self, m: Module, p: _Port, q: _Port) -> Value:
        """Whether the requests of two ports, of which only `p` may be stepped, share a bank."""
        bank_bits = _log2(self.config.sram_banks)
        a, b = p.client.request.payload.address, q.client.request.payload.address

        def same(low: int, high: int) -> Value:
            return a[low:high] == b[low:high] if low < high else Const(1)

        result = Signal(name=f"{p.name}_meets_{q.name}")
        q_bits, p_bits = _log2(q.lines), _log2(p.lines)
        if p.stepped:
            with m.Switch(p.client.request.payload.step):
                for step in range(STEPS):
                    with m.Case(step):
                        m.d.comb += result.eq(
                            same(max(q_bits, step + p_bits), bank_bits) & same(q_bits, step)
                        )
        else:
            m.d.comb += result.eq(same(max(q_bits, p_bits), bank_bits))
        return result

    def _arbitrate(self, m: Module, ports: list[_Port], wanted: list[Value]) -> list[Value]:
        """Grants in two passes over the ports: those that have waited long, then the others."""
        urgent = [Signal(name=f"{p.name}_urgent") for p in ports]
        grants = [
            [Signal(name=f"{p.name}_{kind}_grant") for p in ports] for kind in ("urgent", "usual")
        ]
        meets = {
            (i, j): self._overlap(m, ports[i], ports[j])
            for j in range(len(ports))
            for i in range(j)
        }
        before: list[tuple[int, Value]] = []
        for kind, granted in enumerate(grants):
            for i in range(len(ports)):
                blocked = [g & meets[min(i, j), max(i, j)] for j, g in before if j != i]
                ask = wanted[i] & (~urgent[i] if kind else urgent[i])
                m.d.comb += granted[i].eq(ask & ~Cat(blocked).any())
                before.append((i, granted[i]))
        result = []
        for i, port in enumerate(ports):
            grant = Signal(name=f"{port.name}_grant")
            wait = Signal(name=f"{port.name}_wait")
            waited = Signal(range(self.patience + 1), name=f"{port.name}_waited")
            m.d.comb += [
                grant.eq(grants[0][i] | grants[1][i]),
                wait.eq(wanted[i] & ~grant),
                urgent[i].eq(waited == self.patience),
                self.conflicts[i].eq(wait),
            ]
            m.d.sync += waited.eq(Mux(wait, Mux(urgent[i], waited, waited + 1), 0))
            result.append(grant)
        return result

    def elaborate(self, platform):
        m = Module()
        config = self.config
        line_bits, bank_bits = _log2(config.sram_lines), _log2(config.sram_banks)
        row_bits = line_bits - bank_bits

        m.submodules.small = arbiter = SramArbiter(len(self.SMALL), self.LATENCY)
        for i, name in enumerate(self.SMALL):
            connect(m, wiring.flipped(getattr(self, name)), arbiter.clients[i])

        vector = config.vector_lines
        ports = [
            self._activation_port(m),
            self._plain_port("matrix", self.matrix, vector, writes=True),
            self._plain_port("vector_out", self.vector_out, vector, reads=False, writes=True),
            self._plain_port("vector_a", self.vector_a, vector),
            self._plain_port("vector_b", self.vector_b, vector),
            self._plain_port("dma", self.dma, self.dma_lines, writes=True),
            self._plain_port("small", arbiter.sram, 1, writes=True),
        ]

        inside = []
        wanted = []
        for port in ports:
            request = port.client.request
            ok = Signal(name=f"{port.name}_inside")
            want = Signal(name=f"{port.name}_want")
            m.d.comb += ok.eq(request.payload.address[line_bits:] == 0)
            if port.stepped:
                m.d.comb += ok.eq(
                    (request.payload.address[line_bits:] == 0) & (request.payload.step < STEPS)
                )
            m.d.comb += want.eq(request.valid & ok)
            if not port.reads:
                m.d.comb += want.eq(request.valid & ok & request.payload.write)
            inside.append(ok)
            wanted.append(want)
        grants = self._arbitrate(m, ports, wanted)

        # Requests towards the banks; a bank's readers come before its writers.
        order = sorted(range(len(ports)), key=lambda i: ports[i].writes)
        hits = {}
        lanes = {}
        for i, port in enumerate(ports):
            payload = port.client.request.payload
            hits[i] = Signal(len(port.banks), name=f"{port.name}_hit")
            m.d.comb += hits[i].eq(grants[i] << port.choice)
            m.d.comb += port.client.request.ready.eq(
                port.client.request.valid & (grants[i] | ~wanted[i])
            )
            if port.writes:
                lanes[i] = Signal(bank_write(port.lines), name=f"{port.name}_lanes")
                for lane in range(port.lines):
                    granules = [
                        bit.replicate(GRANULE_BITS // SCALE_BITS) for bit in payload.mask[lane]
                    ]
                    enable = Cat(*granules, payload.scale_mask[lane])
                    m.d.comb += [
                        lanes[i][lane].word.eq(Cat(payload.data[lane], payload.scales[lane])),
                        lanes[i][lane].enable.eq(Mux(payload.write, enable, 0)),
                    ]

        writers = [i for i in order if ports[i].writes]
        banks = []
        for b in range(config.sram_banks):
            bank = TileSramBank(1 << row_bits, len(ports) - len(writers), len(writers))
            place(m, platform, f"bank{b}", bank)
            for slot, i in enumerate(order):
                takes = [hits[i][c] for c, taken in enumerate(ports[i].banks) if b in taken]
                m.d.comb += [
                    bank.select[slot].eq(Cat(takes).any()),
                    bank.row[slot].eq(ports[i].client.request.payload.address[bank_bits:line_bits]),
                ]
            for slot, i in enumerate(writers):
                m.d.comb += bank.write[slot].eq(lanes[i][b % ports[i].lines])
            banks.append(bank)

        for i, port in enumerate(ports):
            self._answer(m, port, inside[i], banks)
        return m

    def _answer(self, m: Module, port: _Port, inside: Value, banks: list[TileSramBank]) -> None:
        """The answers of a port: one cycle in the banks, a register behind the choice of them."""
        client = port.client
        request = client.request
        taken = Signal(name=f"{port.name}_taken")
        m.d.comb += taken.eq(request.valid & request.ready)
        fault = [Signal(name=f"{port.name}_fault{age}") for age in range(self.LATENCY)]
        m.d.sync += [fault[0].eq(taken & ~inside), fault[1].eq(fault[0])]
        m.d.comb += client.fault.eq(fault[1])
        if not port.reads:
            return
        read = taken & ~request.payload.write if port.writes else taken
        valid = [Signal(name=f"{port.name}_valid{age}") for age in range(self.LATENCY)]
        m.d.sync += [valid[0].eq(read), valid[1].eq(valid[0])]
        choice = Signal.like(port.choice, name=f"{port.name}_choice0", reset_less=True)
        response = Signal(sram_response(port.lines), name=f"{port.name}_response", reset_less=True)
        m.d.sync += choice.eq(port.choice)
        with m.If(fault[0]):
            m.d.sync += response.eq(0)
        with m.Elif(valid[0]), m.Switch(choice):
            for code, taken_banks in enumerate(port.banks):
                with m.Case(code):
                    for lane, b in enumerate(taken_banks):
                        m.d.sync += [
                            response.data[lane].eq(banks[b].word[:LINE_BITS]),
                            response.scales[lane].eq(banks[b].word[LINE_BITS:]),
                        ]
        m.d.comb += [client.valid.eq(valid[1]), client.response.eq(response)]
