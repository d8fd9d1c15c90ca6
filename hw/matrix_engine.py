# SPDX-License-Identifier: Apache-2.0
"""The matrix engine: executes MATMUL commands on the matmul array, and keeps the block table.

Three stages work on up to three commands at once: the weight loader fills the shadow registers for
the next weight tiles, the slice issuer feeds activations, the result writer empties the array.
Commands overlap; the order of a result and a later read of it is kept by semaphores, not by the
engine.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.array import MatmulArray
from hw.bias_fetch import BiasFetch
from hw.block_table import BlockTable
from hw.config import TileConfig
from hw.emit import place
from hw.fifo import StreamFifo
from hw.isa import BLOCKTABLE, MATMUL, Activity, Init, Status, operand_layout
from hw.kv_sram import KvSram
from hw.matrix_job import JOB_LAYOUT, PairDecoder
from hw.page_check import PageCheck
from hw.ports import ActivationClient, EngineControl, SramClient, WeightRead
from hw.result_writer import ResultWriter
from hw.slice_issuer import ISSUE_LATENCY, SliceIssuer
from hw.tile_sram import TileSram
from hw.weight_loader import AHEAD, POSITION_BITS, WeightLoader, load_meta, tile_layout

JOBS = 4  # commands in the engine at once
COMMANDS = (MATMUL, BLOCKTABLE)


class MatrixEngine(wiring.Component):
    """Matmul array with its control.

    Throughput: one slice per cycle, one row of weights per cycle, one result row per cycle. A
    command of one K tile and one activation row is done about ROW_HOP * rows + cols + 23 cycles
    after it is taken; commands that do not wait for each other follow without a bubble. Illegal: m
    of 0 or above acc_rows, n or k of 0, FP32 operands, misaligned addresses or strides; paged
    weights from the stream, or in blocks below 16 tokens, a column tile (along N) or a line (along
    K). BLOCKTABLE waits until the engine is empty: see `BlockTable`.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        self.array = MatmulArray(
            config.rows, config.cols, acc_rows=config.acc_rows, result_depth=config.result_depth
        )
        super().__init__(
            {
                "control": Out(EngineControl(*COMMANDS)),
                "activation": Out(ActivationClient(config.rows)),
                "memory": Out(SramClient(config.vector_lines)),
                "weights": Out(WeightRead(config.cols, load_meta(config.rows).size)),
                "weights_fault": In(1),
                "weights_error": In(1),  # a line was not correctable
                "available": In(POSITION_BITS),
                "taken": Out(1),
                "load_activity": Out(Activity),  # of the array's load port
            }
        )

    def elaborate(self, platform):
        m = Module()
        config, array = self.config, self.array
        place(m, platform, "array", array)
        m.submodules.pair = pair = PairDecoder()
        m.submodules.loader = loader = WeightLoader(
            config, ISSUE_LATENCY - KvSram.READ_LATENCY - WeightLoader.CHOICE_LATENCY
        )
        m.submodules.table = table = BlockTable(config)
        m.submodules.issuer = issuer = SliceIssuer(config, array)
        m.submodules.bias = bias = BiasFetch(config, array, ISSUE_LATENCY + array.RESULT_LATENCY)
        m.submodules.writer = writer = ResultWriter(config)
        queues = {}
        for name, depth in (("loader", 2), ("issuer", 2), ("bias", 2), ("writer", JOBS)):
            queues[name] = StreamFifo(JOB_LAYOUT, depth)
            m.submodules[f"{name}_jobs"] = queues[name]

        # Acceptance: a legal MATMUL goes to every stage at once, an illegal one to none; the table
        # takes a BLOCKTABLE when nothing else is in the engine.
        command = self.control.command.payload
        legal, room, accept, refuse = Signal(), Signal(), Signal(), Signal()
        matmul, alone, filling = Signal(), Signal(), Signal()
        in_flight = Signal(range(JOBS + 1))
        operands = Signal(operand_layout(MATMUL))
        m.submodules.pages = pages = PageCheck(config)
        m.d.comb += [operands[op.name].eq(command[op.name]) for op in MATMUL.operands]
        m.d.comb += [
            pair.act_format.eq(command.act_format),
            pair.weight_format.eq(command.weight_format),
            matmul.eq(command.code == COMMANDS.index(MATMUL)),
            legal.eq(self._legal(m, command, pair, pages.legal)),
            pages.command.eq(operands),
            pages.pair.eq(pair.pair),
            room.eq(
                queues["loader"].i.ready
                & queues["issuer"].i.ready
                & queues["bias"].i.ready
                & queues["writer"].i.ready
                & (in_flight != JOBS)
                & ~filling
            ),
            accept.eq(self.control.command.valid & matmul & legal & room),
            alone.eq((in_flight == 0) & ~filling),
            refuse.eq(self.control.command.valid & matmul & ~legal & alone),
            self.control.command.ready.eq(Mux(matmul & legal, room, alone)),
            filling.eq(~table.fill.ready),
            table.fill.valid.eq(self.control.command.valid & ~matmul & alone),
            table.fill.payload.addr.eq(command.addr),
            table.fill.payload.table.eq(command.table),
            table.fill.payload.count.eq(command.count),
            table.lookup.eq(loader.lookup),
            loader.table_row.eq(table.row),
            loader.table_outside.eq(table.outside),
        ]
        for name, queue in queues.items():
            m.d.comb += [
                queue.i.payload.command.eq(operands),
                queue.i.payload.pair.eq(pair.pair),
                queue.i.valid.eq(accept & ((command.init == Init.BIAS) if name == "bias" else 1)),
            ]
        for name, stage in (
            ("loader", loader),
            ("issuer", issuer),
            ("bias", bias),
            ("writer", writer),
        ):
            wiring.connect(m, queues[name].o, stage.job)

        # Loader, KV SRAM and array.
        meta = load_meta(config.rows)
        m.d.comb += [
            self.weights.command.eq(loader.command),
            loader.available.eq(self.available),
            self.taken.eq(loader.taken),
            self.load_activity.eq(loader.activity),
            loader.swap.eq(issuer.swap),
            issuer.swap_ready.eq(loader.swap_ready),
        ]
        for c in range(config.cols):
            column = self.weights.column[c]
            fields = Signal(meta, name=f"meta{c}")
            m.d.comb += [
                fields.eq(column.meta),
                array.load[c].valid.eq(column.valid),
                array.load[c].line.eq(column.line),
                array.load[c].scale.eq(column.scale),
                array.load[c].row.eq(fields.row),
                array.load[c].format.eq(fields.format),
                array.load[c].half.eq(fields.half),
                array.load[c].length.eq(fields.length),
            ]
        # The loader runs ahead of the issuer by the tiles in this queue.
        m.submodules.tiles = tiles = StreamFifo(tile_layout(config), AHEAD + 1)
        wiring.connect(m, loader.tile, tiles.i)
        wiring.connect(m, tiles.o, issuer.tile)

        # Slices and results; a result is reserved when its last slice is issued.
        wiring.connect(m, issuer.activation, wiring.flipped(self.activation))
        wiring.connect(m, array.result, writer.result)
        reserved = Signal(range(config.result_depth + 1))
        taken = Signal()
        m.d.comb += [
            array.slice.eq(issuer.slice),
            taken.eq(array.result.valid & array.result.ready),
            issuer.room.eq(reserved != config.result_depth),
            array.bias_write.eq(bias.bias_write),
            issuer.bias_ready.eq(bias.ready),
            bias.used.eq(issuer.bias_used),
        ]
        m.d.sync += reserved.eq(reserved + issuer.reserve - taken)

        self._share_memory(m, bias.memory, writer.memory, table.memory, filling)
        self._finish(m, accept, refuse, in_flight, issuer, bias, writer, table)
        return m

    def _legal(self, m, command, pair, pages):
        config = self.config
        align = Signal(8)  # activation rows start at a multiple of this many lines
        results = Signal(9)  # results start at a multiple of this many bytes
        m.d.comb += [
            align.eq(config.rows << pair.pair.step),
            results.eq(Mux(command.out_bf16, 2 * config.cols, 4 * config.cols)),
        ]
        line = command.act_addr[4:]
        return (
            pair.legal
            & (command.m != 0)
            & (command.m <= config.acc_rows)
            & (command.n != 0)
            & (command.k != 0)
            & ~command.act_addr[:4].any()
            & ~(line & (align - 1)[:8]).any()
            & ~(command.act_stride & (align - 1)[:8]).any()
            & ~(command.out_addr & (results - 1)[:9]).any()
            & ~((command.out_stride << 4) & (results - 1)[:9]).any()
            & ((command.init == Init.ZERO) | ~(command.bias_addr & (4 * config.cols - 1)).any())
            & pages
        )

    def _share_memory(self, m, bias, writer, table, filling):
        """Bias reads before result writes; a request once offered stays. The table is filled when
        neither has anything to do.
        """
        request = self.memory.request
        held, write = Signal(), Signal()
        m.d.comb += [
            write.eq(held | ~bias.request.valid),
            request.valid.eq(
                table.request.valid | Mux(write, writer.request.valid, bias.request.valid)
            ),
            request.payload.eq(
                Mux(
                    filling,
                    table.request.payload,
                    Mux(write, writer.request.payload, bias.request.payload),
                )
            ),
            table.request.ready.eq(request.ready),
            table.valid.eq(self.memory.valid),
            table.response.eq(self.memory.response),
            table.fault.eq(self.memory.fault),
            writer.request.ready.eq(write & request.ready),
            bias.request.ready.eq(~write & request.ready),
            bias.valid.eq(self.memory.valid & ~filling),
            bias.response.eq(self.memory.response),
            bias.fault.eq(self.memory.fault),
            writer.fault.eq(self.memory.fault),
        ]
        m.d.sync += held.eq(write & writer.request.valid & ~request.ready)

    def _finish(self, m, accept, refuse, in_flight, issuer, bias, writer, table):
        """Completion, errors and activity. A fault belongs to the oldest command in the engine."""
        faulty, damaged, done = Signal(), Signal(), Signal()
        refused = Signal()  # the queue wants `done` a cycle after the command at the earliest
        settling = Signal(TileSram.LATENCY + 1)  # a fault of the last write is known only then
        m.d.comb += [
            done.eq(settling[-1]),
            self.control.done.eq(done | refused | table.done),
            self.control.error.eq(
                Mux(
                    refused,
                    Status.ILLEGAL_COMMAND,
                    Mux(
                        table.done,
                        table.error,
                        Mux(
                            faulty,
                            Status.ADDRESS_RANGE,
                            Mux(damaged, Status.KV_ERROR, Status.RUNNING),
                        ),
                    ),
                )
            ),
        ]
        m.d.sync += [
            refused.eq(refuse),
            in_flight.eq(in_flight + accept - done),
            settling.eq(Cat(writer.done, settling)),
            faulty.eq(
                (faulty & ~done) | issuer.fault | bias.fault | writer.fault | self.weights_fault
            ),
            damaged.eq((damaged & ~done) | self.weights_error),
        ]
        with m.If(issuer.issued | ~table.fill.ready):
            m.d.comb += self.control.activity.eq(Activity.BUSY)
        with m.Elif(issuer.blocked | writer.blocked):
            m.d.comb += self.control.activity.eq(Activity.BLOCKED)
        with m.Elif((in_flight != 0) | self.control.command.valid):
            m.d.comb += self.control.activity.eq(Activity.STARVED)
        with m.Else():
            m.d.comb += self.control.activity.eq(Activity.IDLE)
