# SPDX-License-Identifier: Apache-2.0
"""The blocks that `jalapeno verilog` emits, by name; a block is imported when it is asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from amaranth.lib import wiring

from hw.config import ChipConfig
from hw.isa import Engine
from sim.errors import InputError


def _nothing(config: ChipConfig) -> Mapping[str, Any]:
    return {}


def _tile(config: ChipConfig) -> Mapping[str, Any]:
    return {"config": config.tile}


@dataclass(frozen=True)
class Block:
    """Where the class of a block is, and its arguments for a configuration."""

    module: str
    name: str
    arguments: Callable[[ChipConfig], Mapping[str, Any]] = _nothing

    def make(self, config: ChipConfig) -> wiring.Component:
        return getattr(import_module(self.module), self.name)(**self.arguments(config))


def _cell(config: ChipConfig) -> Mapping[str, Any]:
    return {"row_bits": max(1, (config.tile.rows - 1).bit_length())}


def _array(config: ChipConfig) -> Mapping[str, Any]:
    tile = config.tile
    return {
        "rows": tile.rows,
        "cols": tile.cols,
        "acc_rows": tile.acc_rows,
        "result_depth": tile.result_depth,
    }


def _kv_sram(config: ChipConfig) -> Mapping[str, Any]:
    from hw.weight_loader import load_meta

    return {"config": config.tile, "meta_bits": load_meta(config.tile.rows).size}


def _chip(config: ChipConfig) -> Mapping[str, Any]:
    return {"config": config}


def _sequencer(config: ChipConfig) -> Mapping[str, Any]:
    return {"config": config.tile, "engines": list(Engine)}


BLOCKS: dict[str, Block] = {
    "cell": Block("hw.cell", "Cell", _cell),
    "array": Block("hw.array", "MatmulArray", _array),
    "kv_sram": Block("hw.kv_sram", "KvSram", _kv_sram),
    "kv_append": Block("hw.kv_append", "KvAppend", _tile),
    "vector_engine": Block("hw.vector_engine", "VectorEngine", _tile),
    "command_processor": Block("hw.command_processor", "CommandProcessor", _sequencer),
    "tile": Block("hw.tile", "Tile", _tile),
    "chip": Block("hw.chip", "Chip", _chip),
    "matrix_engine": Block("hw.matrix_engine", "MatrixEngine", _tile),
    "tile_sram": Block("hw.tile_sram", "TileSram", _tile),
    "topk": Block("hw.topk", "TopkEngine", _tile),
    "sequencer": Block("hw.sequencer", "Sequencer", _sequencer),
    "dma": Block("hw.dma", "Dma", _tile),
    "weight_stream": Block("hw.weight_stream", "WeightStream", _tile),
    "noc_port": Block("hw.noc_port", "NocPort", _tile),
    "router": Block("hw.router", "Router"),
    "collective_node": Block("hw.collective_node", "CollectiveNode"),
}


def block(name: str) -> Block:
    """The named block; InputError lists the known ones."""
    if name not in BLOCKS:
        raise InputError(
            "BLOCK", name, f"it must be one of {', '.join(BLOCKS)}", "name one of these"
        )
    return BLOCKS[name]
