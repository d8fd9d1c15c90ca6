# SPDX-License-Identifier: Apache-2.0
"""The simulated system: a chip, an HBM slice, a host loader and a trace recorder at each tile, and
stall control.
"""

from dataclasses import replace
from functools import cache
from importlib import resources

from hw.chip import Chip
from hw.config import ChipConfig
from hw.emit import flat_ports
from hw.isa import Engine
from hw.trace import TRACE_PC_BITS
from sim.emission import emitted
from sim.verilator import OPTIMISE_MODEL, Build, build

TOP = "simulation_top"
CHIP = "chip"
HOST_WORDS = 1 << 19
CHANNELS = ("ar", "r", "aw", "w", "b")
# Module name prefixes compiled once each: they repeat, and their outputs are registered.
BLOCKS = ("activation_edge", "weight_edge", "cell", "accumulator", "vector_lane")


def simulated(config: ChipConfig) -> ChipConfig:
    """The configuration with stall gates and trace ports, which every simulation has."""
    return replace(config, tile=replace(config.tile, stall_gates=True, trace=True))


def top_text(config: ChipConfig) -> str:
    """Verilog of the top: all tiles share one host bus, `host_valid` selects the tile."""
    chip, tiles, tile = Chip(config), config.tiles, config.tile
    chip._MustUse__used = True  # type: ignore[attr-defined]  # only its ports are looked at
    ports = tile.hbm_ports
    wires, connections = [], [".clk(clk)", ".rst(rst)"]
    for name, _, value in flat_ports(chip):
        width = len(value.as_value() if hasattr(value, "as_value") else value)
        if name == "stall":
            connections.append(".stall({stall_seed, stall})")
        else:
            if name != "running":
                wires.append(f"wire [{width - 1}:0] {name};")
            connections.append(f".{name}({name})")
    body = []
    for i in range(tiles):
        axi = []
        for channel in CHANNELS:
            for part in ("valid", "ready", "payload"):
                packed = ", ".join(
                    f"axi__{i * ports + p}__{channel}__{part}" for p in reversed(range(ports))
                )
                axi.append(f".{channel}_{part}({{{packed}}})")
        rate = tile.hbm_rate
        body += [
            f"hbm_slice #(.ID({i}), .PORTS({ports}), .PORT_BYTES({tile.hbm_port_bytes}), "
            f".BYTES({tile.hbm_bytes}), .RATE_NUM({rate.numerator}), "
            f".RATE_DEN({rate.denominator})) hbm_{i} (.clk(clk), .rst(rst), .stall(stall), "
            f".err_lo(err_lo), .err_hi(err_hi), {', '.join(axi)});",
            f"wire loader_valid_{i}; wire [167:0] loader_word_{i};",
            f"host_loader #(.ID({i}), .WORDS({HOST_WORDS})) loader_{i} (.clk(clk), .rst(rst), "
            f".go(load_go[{i}]), .first(load_first), .count(load_count), .busy(load_busy[{i}]), "
            f".valid(loader_valid_{i}), .ready(host__{i}__request__ready & load_busy[{i}]), "
            f".word(loader_word_{i}));",
            f"assign host__{i}__request__valid = load_busy[{i}] ? loader_valid_{i} : "
            f"host_valid[{i}];",
            f"assign host__{i}__request__payload = load_busy[{i}] ? {{loader_word_{i}, 1'b1}} : "
            "{host_scale, host_data, host_address, host_write};",
            f"assign host_ready[{i}] = host__{i}__request__ready & ~load_busy[{i}];",
            f"assign host__{i}__response__ready = 1'b1;",
            f"assign response_valid[{i}] = host__{i}__response__valid & ~load_busy[{i}];",
            f"assign response[{i} * 137 +: 137] = host__{i}__response__payload;",
            f"command_trace #(.ID({i}), .ENGINES({len(Engine)}), .PC_BITS({TRACE_PC_BITS})) "
            f"trace_{i} (.clk(clk), .trace(command_trace__{i}));",
        ]
    return "\n".join(
        [
            "// SPDX-License-Identifier: Apache-2.0",
            f"module {TOP} (",
            "  input wire clk, input wire rst, input wire [7:0] stall, "
            "input wire [31:0] stall_seed,",
            "  input wire [32:0] err_lo, input wire [32:0] err_hi,",
            f"  input wire [{tiles - 1}:0] load_go, input wire [31:0] load_first,",
            f"  input wire [31:0] load_count, output wire [{tiles - 1}:0] load_busy,",
            f"  input wire [{tiles - 1}:0] host_valid, output wire [{tiles - 1}:0] host_ready,",
            "  input wire host_write, input wire [31:0] host_address, "
            "input wire [127:0] host_data,",
            f"  input wire [7:0] host_scale, output wire [{tiles - 1}:0] response_valid,",
            f"  output wire [{tiles * 137 - 1}:0] response, output wire [{tiles - 1}:0] running",
            ");",
            *(f"  {line}" for line in wires),
            f"  {CHIP} chip (",
            "    " + ",\n    ".join(connections),
            "  );",
            *(f"  {line}" for line in body),
            "endmodule",
            "",
        ]
    )


@cache
def sources(config: ChipConfig) -> dict[str, str]:
    """All files of the simulated system."""
    files = dict(emitted(lambda: Chip(simulated(config)), CHIP, repr(simulated(config))))
    models = resources.files("sim") / "rtl"
    for name in ("hbm_slice.sv", "host_loader.sv", "command_trace.sv"):
        files[name] = (models / name).read_text()
    return files | {f"{TOP}.v": top_text(simulated(config))}


def blocks(config: ChipConfig, files: dict[str, str]) -> list[str]:
    """Modules that Verilator compiles once: those that repeat, and tiles when there are several."""
    names = [name.removesuffix(".v") for name in files if name.endswith(".v")]
    chosen = [n for n in names if n.startswith(BLOCKS)]
    return chosen + ([n for n in names if n.startswith("tile_core")] if config.tiles > 1 else [])


def build_system(config: ChipConfig, waves: bool = False) -> Build:
    """The simulation of `config`, from the cache if it is there."""
    files = sources(config)
    # Several tiles take minutes to optimise, which short runs on a mesh do not earn back.
    optimise = OPTIMISE_MODEL if config.tiles == 1 else "-O0"
    return build(files, TOP, blocks=blocks(config, files), waves=waves, optimise=optimise)
