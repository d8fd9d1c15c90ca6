# SPDX-License-Identifier: Apache-2.0
"""Signatures of ports that blocks share: SRAM clients, KV SRAM accesses, engines, host, AXI4."""

from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.isa import Activity, Command, Status, operand_layout

LINE_BITS = 128
SCALE_BITS = 8
GRANULE_BITS = 16  # smallest part of a line that a write can change
GRANULES = LINE_BITS // GRANULE_BITS
LINE_ADDRESS_BITS = 28  # byte addresses are 32 bits; wide on purpose, so that a bad address is seen


def sram_request(lines: int) -> data.StructLayout:
    """Access to `lines` neighbouring lines; `address` is a multiple of `lines`."""
    return data.StructLayout(
        {
            "address": LINE_ADDRESS_BITS,
            "write": 1,
            "data": data.ArrayLayout(LINE_BITS, lines),
            "scales": data.ArrayLayout(SCALE_BITS, lines),
            "mask": data.ArrayLayout(GRANULES, lines),  # granules to write
            "scale_mask": lines,  # scales to write
        }
    )


def sram_response(lines: int) -> data.StructLayout:
    return data.StructLayout(
        {
            "data": data.ArrayLayout(LINE_BITS, lines),
            "scales": data.ArrayLayout(SCALE_BITS, lines),
        }
    )


class SramClient(wiring.Signature):
    """A client of the tile SRAM, seen from the client.

    A request is taken when valid and ready. A read answers `TileSram.LATENCY` cycles after it was
    taken, in order, for one cycle (`valid`): the client must have room. `fault` pulses when an
    accepted request was out of range: it had no effect, a read then answers zeros.
    """

    def __init__(self, lines: int):
        self.lines = lines
        super().__init__(
            {
                "request": Out(stream.Signature(sram_request(lines))),
                "valid": In(1),
                "response": In(sram_response(lines)),
                "fault": In(1),
            }
        )


class ActivationClient(wiring.Signature):
    """Read of `rows` lines at once for the array: line `address` + r * 2^step for r < rows.

    The lines lie in one aligned block of rows * 2^step lines; step is 0, 1 or 2. Same timing as
    `SramClient`.
    """

    def __init__(self, rows: int):
        self.rows = rows
        super().__init__(
            {
                "request": Out(
                    stream.Signature(data.StructLayout({"address": LINE_ADDRESS_BITS, "step": 2}))
                ),
                "valid": In(1),
                "response": In(sram_response(rows)),
                "fault": In(1),
            }
        )


def weight_command(cols: int, meta_bits: int) -> data.StructLayout:
    """A read of one KV SRAM row: see `WeightRead`."""
    return data.StructLayout(
        {"valid": 1, "row": 24, "columns": cols.bit_length(), "meta": meta_bits}
    )


class WeightRead(wiring.Signature):
    """Read of one KV SRAM row, seen from the reader: column c's line comes c cycles after column
    0's.

    `command` is sampled every cycle and never stalls; the lines of the first `columns` columns are
    used, so errors in them count. Column c's line, scale and the command's `meta` appear on
    `column[c]` exactly `KvSram.READ_LATENCY + c` cycles later, with `valid` high for that cycle.
    """

    def __init__(self, cols: int, meta_bits: int):
        super().__init__(
            {
                "command": Out(weight_command(cols, meta_bits)),
                "column": In(
                    data.ArrayLayout(
                        data.StructLayout(
                            {"valid": 1, "meta": meta_bits, "line": LINE_BITS, "scale": SCALE_BITS}
                        ),
                        cols,
                    )
                ),
            }
        )


class EngineControl(wiring.Signature):
    """Command side of an engine that executes `commands`, seen from the engine.

    `command` is offered when its semaphores have been taken. `done` pulses once per command, in
    order, when every effect of it is visible in the memories; `error` is then the reason it failed,
    or Status.RUNNING. An illegal command is taken, has no effect, and is done with an error.
    """

    def __init__(self, *commands: Command):
        super().__init__(
            {
                "command": In(stream.Signature(operand_layout(*commands))),
                "done": Out(1),
                "error": Out(Status),
                "activity": Out(Activity),
            }
        )


class HostPort(wiring.Signature):
    """Host access to a tile, seen from the tile: one request at a time is answered by one response.

    `address` is the line address in the host map (docs/programming.md); reads and writes are whole
    lines. `error` says that the address is not mapped.
    """

    def __init__(self):
        super().__init__(
            {
                "request": In(
                    stream.Signature(
                        data.StructLayout(
                            {"write": 1, "address": 32, "data": LINE_BITS, "scale": SCALE_BITS}
                        )
                    )
                ),
                "response": Out(
                    stream.Signature(
                        data.StructLayout({"data": LINE_BITS, "scale": SCALE_BITS, "error": 1})
                    )
                ),
            }
        )


class Axi4(wiring.Signature):
    """AXI4 master port towards an HBM slice: INCR bursts of whole beats, one ID per direction."""

    def __init__(self, data_bytes: int, address_bits: int = 32, id_bits: int = 1):
        self.data_bytes = data_bytes
        bits = 8 * data_bytes
        address = {"addr": address_bits, "id": id_bits, "len": 8, "size": 3, "burst": 2}
        super().__init__(
            {
                "ar": Out(stream.Signature(data.StructLayout(address))),
                "r": In(
                    stream.Signature(
                        data.StructLayout({"data": bits, "id": id_bits, "resp": 2, "last": 1})
                    )
                ),
                "aw": Out(stream.Signature(data.StructLayout(address))),
                "w": Out(
                    stream.Signature(
                        data.StructLayout({"data": bits, "strb": data_bytes, "last": 1})
                    )
                ),
                "b": In(stream.Signature(data.StructLayout({"id": id_bits, "resp": 2}))),
            }
        )
