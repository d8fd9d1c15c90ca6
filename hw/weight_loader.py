# SPDX-License-Identifier: Apache-2.0
"""Loads weight tiles into the array's shadow registers, one row of cells per cycle.

A *walker* cuts a job into weight tiles (column tiles outer, K tiles inner) and appends a descriptor
of each to a short ring. Every row of cells walks the ring on its own: it is *free* when the swap of
its last word has passed it, and the loader serves the row that has been free longest. So a row r
lags ROW_HOP * r cycles behind row 0, and tiles follow each other every `rows` cycles although a
swap takes ROW_HOP * rows cycles to pass down the array.

A swap may be issued before its tile is loaded, since it meets row r only ROW_HOP * r cycles after
row 0. The rule for resident weights: swaps are at least `rows` cycles apart, and a tile is swapped
in when it has been described. Why every load is in time then: let e be the cycles from a swap until
it has passed row 0, at least 1. Tile i, swapped in cycle t(i), frees row r in cycle
t(i) + ROW_HOP * r + e, and must be loaded there by D = t(i) + ROW_HOP * r + e - 1. A row *waits*
when it is free and its next tile is described.

1. While a row waits, each other row goes before it at most once: after that it is freed later. So
   no row waits more than rows - 1 cycles, whatever is described late.
2. If row r was freed when tile i was described already, it is loaded at most rows - 1 cycles after
   t(i-1) + ROW_HOP * r + e, which is at most D.
3. Otherwise row r was freed before t(i), and in cycle D nothing goes before it any more. Newer
   tiles: their rows are freed after t(i). The same tile: rows below are freed later, and rows above
   are loaded by their own D, by induction. Older tiles: a row that was freed before row r, so at
   the latest in t(i-1) + ROW_HOP * r + e - 1, had its tile described, since that was swapped by
   t(i-1); it is loaded at most rows - 1 cycles later, before D.

Of rows that have been free equally long the lowest is served first: after a reset, and when counted
ages have come to the largest, that is the order in which a swap reaches them.

So the first tile of an idle array is swapped in while its first row is read. Paged weights are no
exception: the block table takes its cycle for every address. Tiles of fewer rows skip the others,
which takes no turn. Weights that stream from HBM may be late, so there a swap waits until all rows
of its tile are loaded; then none of its rows is left to be considered as an older tile's.
"""

from amaranth import Array, Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.array import MatmulArray
from hw.block_table import ENTRY_BITS, BlockTable
from hw.config import TileConfig
from hw.isa import Activity
from hw.matrix_job import JOB_LAYOUT
from hw.ports import weight_command
from hw.weight_walk import WeightWalk, place_layout

RING = 8  # weight tiles between the walker and the row that lags most
AHEAD = 3  # tiles described before their swap
POSITION_BITS = 16


def load_meta(rows: int) -> data.StructLayout:
    """What travels beside a weight row's address through the KV SRAM."""
    return data.StructLayout(
        {
            "row": max(1, (rows - 1).bit_length()),
            "format": 3,
            "half": 1,
            "length": 6,
        }
    )


def tile_layout(config: TileConfig) -> data.StructLayout:
    """A weight tile as the issuer takes it: elements along K, and its place in the job."""
    return data.StructLayout(
        {
            "count": (32 * config.rows).bit_length(),
            "first_k": 1,
            "last_k": 1,
            "last_tile": 1,
        }
    )


class WeightLoader(wiring.Component):
    """Walks jobs and loads their weight tiles.

    `job` is taken when its last tile has been described; `tile` gives each tile to the issuer, in
    order. `swap_ready` says that the swap of the oldest tile not yet swapped may be issued in this
    cycle; `swap` says that it is. `command` goes to the KV SRAM (one row per cycle, never
    stalls); `available` counts rows of the weight stream not yet taken, `taken` releases one.
    `activity` is BUSY in a cycle that loads a row, STARVED while the next rows have not come from
    HBM, BLOCKED while all that are there wait for their cells to be free. `lookup` asks the block
    table as a row is chosen, `table_row` and `table_outside` answer a cycle later, and the row's
    `command` is given then. `swap_delay`: cycles from `swap` until its slice reaches the array,
    less the cycles from the choice of a row until it reaches the array.
    """

    CHOICE_LATENCY = BlockTable.LATENCY  # from the choice of a row to its command

    def __init__(self, config: TileConfig, swap_delay: int):
        if MatmulArray.ROW_HOP + AHEAD >= RING:
            raise ValueError(
                f"ROW_HOP must be at most {RING - AHEAD - 1}, not {MatmulArray.ROW_HOP}"
            )
        least = 1 - min(MatmulArray.load_after_swap(r) for r in range(config.rows))
        if swap_delay < least:
            # A release comes a cycle after its swap at the earliest.
            raise ValueError(f"swap_delay must be at least {least}, not {swap_delay!r}")
        self.config = config
        self.swap_delay = swap_delay
        self.meta = load_meta(config.rows)
        super().__init__(
            {
                "job": In(stream.Signature(JOB_LAYOUT)),
                "tile": Out(stream.Signature(tile_layout(config))),
                "swap_ready": Out(1),
                "swap": In(1),
                "command": Out(weight_command(config.cols, self.meta.size)),
                "lookup": Out(data.StructLayout({"valid": 1, "entry": ENTRY_BITS})),
                "table_row": In(config.kv_rows.bit_length() - 1),
                "table_outside": In(1),
                "available": In(POSITION_BITS),
                "taken": Out(1),
                "activity": Out(Activity),
            }
        )

    def elaborate(self, platform):
        m = Module()
        rows, cols = self.config.rows, self.config.cols
        row_bits = rows.bit_length() - 1
        ring_bits = RING.bit_length() - 1
        count_bits = (32 * rows).bit_length()
        descriptor = data.StructLayout(
            {
                "place": place_layout(self.config),
                "format": 3,
                "group": 3,
                "halves": 1,
                "stream": 1,
                "count": count_bits,
                "columns": cols.bit_length(),
                "position": POSITION_BITS,
            }
        )
        ring = Array(Signal(descriptor, name=f"ring{i}", reset_less=True) for i in range(RING))

        # Walker: `described` tiles have been put into the ring, `swapped` have been swapped.
        described = Signal(ring_bits + 1)
        swapped = Signal(ring_bits + 1)
        job, pair = self.job.payload.command, self.job.payload.pair
        walking = Signal()
        k_left, n_left = Signal(16, reset_less=True), Signal(16, reset_less=True)
        first_k = Signal(reset_less=True)
        position = Signal(POSITION_BITS)  # of the next stream row, since reset
        k_now, n_now = Signal(16), Signal(16)
        tile_elements = Signal(count_bits)
        groups = Signal(row_bits + 1)
        lines = Signal(row_bits + 1)
        count = Signal(count_bits)
        last_k, last_n = Signal(), Signal()
        waiting = Signal(ring_bits + 1)
        push = Signal()
        m.d.comb += [
            k_now.eq(Mux(walking, k_left, job.k)),
            n_now.eq(Mux(walking, n_left, job.n)),
            tile_elements.eq(rows << pair.group),
            last_k.eq(k_now <= tile_elements),
            last_n.eq(n_now <= cols),
            count.eq(Mux(last_k, k_now, tile_elements)),
            groups.eq((count + ((1 << pair.group) - 1)[:6]) >> pair.group),
            lines.eq(Mux(pair.halves, (groups + 1) >> 1, groups)),
            self.tile.payload.count.eq(count),
            self.tile.payload.first_k.eq(Mux(walking, first_k, 1)),
            self.tile.payload.last_k.eq(last_k),
            self.tile.payload.last_tile.eq(last_k & last_n),
            waiting.eq(described - swapped),
            self.tile.valid.eq(self.job.valid & (waiting != AHEAD)),
            push.eq(self.tile.valid & self.tile.ready),
            self.job.ready.eq(push & last_k & last_n),
        ]
        m.submodules.walk = walk = WeightWalk(self.config)
        m.d.comb += [
            walk.job.eq(self.job.payload),
            walk.walking.eq(walking),
            walk.step.eq(push),
            walk.last_k.eq(last_k),
        ]
        with m.If(push):
            slot = ring[described[:ring_bits]]
            m.d.sync += [
                slot.place.eq(walk.place),
                slot.format.eq(job.weight_format),
                slot.group.eq(pair.group),
                slot.halves.eq(pair.halves),
                slot.stream.eq(job.stream),
                slot.count.eq(count),
                slot.columns.eq(Mux(last_n, n_now, cols)),
                slot.position.eq(position),
                described.eq(described + 1),
                walking.eq(~(last_k & last_n)),
                first_k.eq(last_k),
            ]
            with m.If(job.stream):
                m.d.sync += position.eq(position + lines)
            with m.If(last_k):
                m.d.sync += [
                    k_left.eq(job.k),
                    n_left.eq(n_now - cols),
                ]
            with m.Else():
                m.d.sync += [k_left.eq(k_now - tile_elements), n_left.eq(n_now)]

        # Releases: the swap of a tile passes row r LOAD_AFTER_SWAP(r) cycles after the slice
        # enters.
        delays = [self.swap_delay + MatmulArray.load_after_swap(r) for r in range(rows)]
        history = Signal(max(delays))
        m.d.sync += history.eq(Cat(self.swap, history))

        age_bits = (2 * rows).bit_length() + 1
        free = Signal(rows, init=(1 << rows) - 1)
        released = Signal(rows)
        tiles = [Signal(ring_bits + 1, name=f"tile_of_row{r}") for r in range(rows)]
        # Reset: the first tile's rows must be served in their order, see the module's docstring.
        ages = [Signal(age_bits, name=f"age{r}") for r in range(rows)]
        eligible, skip = Signal(rows), Signal(rows)
        length = [Signal(6, name=f"length{r}") for r in range(rows)]
        stream_row = [Signal(POSITION_BITS, name=f"stream_row{r}") for r in range(rows)]
        entries, waits = [], []
        released_rows = Signal(POSITION_BITS)  # stream rows taken since reset
        for r in range(rows):
            m.d.comb += released[r].eq(history[delays[r] - 1])
            entry = Signal(descriptor, name=f"entry{r}")
            entries.append(entry)
            below = Signal(count_bits + 1, name=f"below{r}")
            left = Signal(count_bits, name=f"left{r}")
            here, arrived = Signal(name=f"here{r}"), Signal(name=f"arrived{r}")
            ahead = Signal(POSITION_BITS, name=f"ahead{r}")
            late = Signal(name=f"late{r}")
            waits.append(late)
            m.d.comb += [
                entry.eq(ring[tiles[r][:ring_bits]]),
                here.eq((tiles[r] != described) & (free[r] | released[r])),
                below.eq(r << entry.group),
                left.eq(Mux(entry.count > below, entry.count - below, 0)),
                length[r].eq(Mux(left >= (1 << entry.group), 1 << entry.group, left)),
                stream_row[r].eq(entry.position + Mux(entry.halves, r >> 1, r)),
                ahead.eq(stream_row[r] - released_rows),
                arrived.eq(~entry.stream | (ahead < self.available)),
                eligible[r].eq(here & (length[r] != 0) & arrived),
                late.eq(here & (length[r] != 0) & ~arrived),
                skip[r].eq(here & (length[r] == 0)),
            ]

        # The row that has been free longest; the lowest of equals.
        best, best_age, best_row = self._oldest(m, eligible, ages)
        chosen = Signal(rows)
        with m.If(best):
            m.d.comb += chosen.eq(1 << best_row)
        for r in range(rows):
            with m.If(chosen[r] | skip[r]):
                m.d.sync += [tiles[r].eq(tiles[r] + 1), free[r].eq(0), ages[r].eq(0)]
            with m.Elif(released[r]):
                m.d.sync += [free[r].eq(1), ages[r].eq(1)]
            with m.Elif(free[r] & ~ages[r].all()):
                m.d.sync += ages[r].eq(ages[r] + 1)

        entry = Signal(descriptor, name="chosen_entry")
        chosen_length, ring_row = Signal(6), Signal(range(self.config.stream_rows))
        with m.Switch(best_row):
            for r in range(rows):
                with m.Case(r):
                    m.d.comb += [
                        entry.eq(entries[r]),
                        chosen_length.eq(length[r]),
                        ring_row.eq(stream_row[r]),
                    ]
        meta = Signal(self.meta)
        m.d.comb += [
            meta.row.eq(best_row),
            meta.format.eq(entry.format),
            meta.half.eq(entry.halves & best_row[0]),
            meta.length.eq(chosen_length),
        ]
        self._address(m, best, entry, best_row, ring_row, meta)

        starved, pending = Signal(), Signal()
        m.d.comb += [
            starved.eq(Cat(*waits).any()),
            pending.eq(self.job.valid | Cat(*(t != described for t in tiles)).any()),
            self.activity.eq(
                Mux(
                    best,
                    Activity.BUSY,
                    Mux(starved, Activity.STARVED, Mux(pending, Activity.BLOCKED, Activity.IDLE)),
                )
            ),
        ]

        # A stream row is released when the last column has read it.
        done_with = Signal()
        above = Signal(count_bits)
        m.d.comb += [
            above.eq(entry.count - (best_row << entry.group)),
            done_with.eq(
                best & entry.stream & (~entry.halves | best_row[0] | (above <= chosen_length))
            ),
        ]
        passing = Signal(cols + 2)
        m.d.sync += passing.eq(Cat(done_with, passing))
        m.d.comb += self.taken.eq(passing[-1])
        with m.If(self.taken):
            m.d.sync += released_rows.eq(released_rows + 1)

        self._swap_rule(m, ring, described, swapped, tiles)
        return m

    def _address(self, m, best, entry, best_row, ring_row, meta):
        """The command of the row chosen now, a cycle later: the block table is read in between."""
        config, place = self.config, entry.place
        line_bits = (config.rows - 1).bit_length()
        line, in_blocks = Signal(line_bits), Signal(range(config.rows + (1 << len(place.start))))
        m.d.comb += [
            line.eq(Mux(entry.halves, best_row >> 1, best_row)),
            in_blocks.eq(place.start + line),
            self.lookup.valid.eq(best & place.paged),
            self.lookup.entry.eq(place.entry + Mux(place.along_k, in_blocks >> place.shift, 0)),
        ]
        then = data.StructLayout(
            {
                "meta": self.meta,
                "columns": config.cols.bit_length(),
                "base": 24,
                "gstride": 16,
                "line": max(line_bits, len(place.start)),
                "paged": 1,
                "stream": 1,
                "ring_row": len(ring_row),
            }
        )
        valid, chosen = Signal(), Signal(then, reset_less=True)
        m.d.sync += [
            valid.eq(best),
            chosen.meta.eq(meta),
            chosen.columns.eq(entry.columns),
            chosen.base.eq(place.base),
            chosen.gstride.eq(place.gstride),
            chosen.line.eq(
                Mux(place.along_k, in_blocks & ((1 << place.shift) - 1)[: len(place.start)], line)
            ),
            chosen.paged.eq(place.paged),
            chosen.stream.eq(entry.stream),
            chosen.ring_row.eq(ring_row),
        ]
        plain, paged = Signal(24), Signal(25)
        m.d.comb += [
            plain.eq(chosen.base + chosen.gstride * chosen.line),
            paged.eq(plain + self.table_row),
            self.command.valid.eq(valid),
            self.command.meta.eq(chosen.meta),
            self.command.columns.eq(chosen.columns),
            self.command.row.eq(plain),
        ]
        with m.If(chosen.stream):
            m.d.comb += self.command.row.eq(config.stream_base + chosen.ring_row)
        with m.Elif(chosen.paged):
            # What is no row must not come back into the memory: all ones are beyond every one.
            m.d.comb += self.command.row.eq(
                paged[:24] | (self.table_outside | paged[24]).replicate(24)
            )

    def _oldest(self, m, eligible, ages):
        """Tree of comparisons: (any, age, row) of the eligible row with the greatest age."""
        level = []
        for r in range(self.config.rows):
            level.append((eligible[r], ages[r], r))
        depth = 0
        while len(level) > 1:
            merged = []
            for i in range(0, len(level), 2):
                (any0, age0, row0), (any1, age1, row1) = level[i], level[i + 1]
                name = f"oldest{depth}_{i // 2}"
                any_, age = Signal(name=name), Signal(len(age0), name=f"{name}_age")
                row = Signal(range(self.config.rows), name=f"{name}_row")
                upper = Signal(name=f"{name}_upper")
                m.d.comb += [
                    upper.eq(any1 & (~any0 | (age1 > age0))),
                    any_.eq(any0 | any1),
                    age.eq(Mux(upper, age1, age0)),
                    row.eq(Mux(upper, row1, row0)),
                ]
                merged.append((any_, age, row))
            level, depth = merged, depth + 1
        return level[0] if self.config.rows > 1 else (eligible[0], ages[0], Signal(1))

    def _swap_rule(self, m, ring, described, swapped, tiles):
        """When the next tile may be swapped in; see the module's docstring."""
        rows = self.config.rows
        ring_bits = RING.bit_length() - 1
        apart = Signal(range(rows + 1), init=rows)  # cycles since the last swap, `rows` at most
        settled = Signal()  # all rows have loaded the next tile
        present, loaded, next_stream = Signal(), Signal(), Signal()
        following = Signal(len(swapped))
        m.d.comb += [
            present.eq(described != swapped),
            next_stream.eq(ring[swapped[:ring_bits]].stream),
            following.eq(swapped + 1),
            loaded.eq(present & Cat(*(t == following for t in tiles)).all()),
            self.swap_ready.eq(present & (settled | (~next_stream & (apart == rows)))),
        ]
        m.d.sync += settled.eq(loaded & ~self.swap)
        with m.If(self.swap):
            m.d.sync += [swapped.eq(following), apart.eq(1)]
        with m.Elif(apart != rows):
            m.d.sync += apart.eq(apart + 1)
