# SPDX-License-Identifier: Apache-2.0
"""Verilog around `HbmBench`: with standard AXI names for third-party models, or an HBM slice."""

from collections.abc import Mapping
from importlib import resources

from hw.config import TileConfig
from hw.emit import flat_ports
from hw.verilog import emit
from tb.hbm_bench import HbmBench

BENCH = "hbm_bench"
TOP = "hbm_top"
ADDRESS_FIELDS = (("addr", 32), ("id", 1), ("len", 8), ("size", 3), ("burst", 2))


def _fields(channel: str, port_bytes: int) -> tuple[tuple[str, int], ...]:
    """Fields of an AXI channel's payload, from the low end, as in `hw.ports.Axi4`."""
    return {
        "ar": ADDRESS_FIELDS,
        "aw": ADDRESS_FIELDS,
        "r": (("data", 8 * port_bytes), ("id", 1), ("resp", 2), ("last", 1)),
        "w": (("data", 8 * port_bytes), ("strb", port_bytes), ("last", 1)),
        "b": (("id", 1), ("resp", 2)),
    }[channel]


def _declaration(direction: str, width: int, name: str) -> str:
    return f"{direction} wire [{width - 1}:0] {name}"


def _top(config: TileConfig, ports: list[str], body: list[str]) -> dict[str, str]:
    """The files: the top has the bench's ports, but AXI as wires, and `ports`."""
    bench = HbmBench(config)
    declared, connections = ["input wire clk", "input wire rst"], [".clk(clk)", ".rst(rst)"]
    inner = []
    for name, is_input, value in flat_ports(bench):
        width = len(value if not hasattr(value, "as_value") else value.as_value())
        connections.append(f".{name}({name})")
        if name.startswith("axi__"):
            inner.append(f"wire [{width - 1}:0] {name};")
        else:
            declared.append(_declaration("input" if is_input else "output", width, name))
    text = "\n".join(
        [
            "// SPDX-License-Identifier: Apache-2.0",
            f"module {TOP} (",
            "  " + ",\n  ".join(declared + ports),
            ");",
            *(f"  {line}" for line in inner),
            f"  {BENCH} bench (",
            "    " + ",\n    ".join(connections),
            "  );",
            *(f"  {line}" for line in body),
            "endmodule",
            "",
        ]
    )
    return emit(bench, BENCH) | {f"{TOP}.v": text}


def axi_top(config: TileConfig) -> dict[str, str]:
    """Port 0's AXI as `m_axi_araddr` and so on, ports of the top."""
    if config.hbm_ports != 1:
        raise ValueError(f"hbm_ports must be 1, not {config.hbm_ports!r}")
    ports, body = [], []
    for channel in ("ar", "r", "aw", "w", "b"):
        answers = channel in ("r", "b")
        fields = _fields(channel, config.hbm_port_bytes)
        ours, theirs = ("input", "output") if answers else ("output", "input")
        ports += [_declaration(ours, width, f"m_axi_{channel}{name}") for name, width in fields]
        ports += [
            _declaration(ours, 1, f"m_axi_{channel}valid"),
            _declaration(theirs, 1, f"m_axi_{channel}ready"),
        ]
        packed = ", ".join(f"m_axi_{channel}{name}" for name, _ in reversed(fields))
        inner = f"axi__0__{channel}__"
        if answers:
            body += [
                f"assign {inner}payload = {{{packed}}};",
                f"assign {inner}valid = m_axi_{channel}valid;",
                f"assign m_axi_{channel}ready = {inner}ready;",
            ]
        else:
            body += [
                f"assign {{{packed}}} = {inner}payload;",
                f"assign m_axi_{channel}valid = {inner}valid;",
                f"assign {inner}ready = m_axi_{channel}ready;",
            ]
    return _top(config, ports, body)


def slice_top(config: TileConfig, parameters: Mapping[str, int]) -> dict[str, str]:
    """AXI ports on an `hbm_slice` of the configuration's size and rate; `parameters` go to it."""
    values = {
        "PORTS": config.hbm_ports,
        "PORT_BYTES": config.hbm_port_bytes,
        "BYTES": config.hbm_bytes,
        "RATE_NUM": config.hbm_rate.numerator,
        "RATE_DEN": config.hbm_rate.denominator,
    } | dict(parameters)
    given = ", ".join(f".{name}({value})" for name, value in values.items())
    ports = [
        _declaration("input", width, name)
        for name, width in (("stall", 8), ("err_lo", 33), ("err_hi", 33))
    ]
    connections = [".clk(clk)", ".rst(rst)", ".stall(stall)", ".err_lo(err_lo)", ".err_hi(err_hi)"]
    for channel in ("ar", "r", "aw", "w", "b"):
        for part in ("valid", "ready", "payload"):
            packed = ", ".join(
                f"axi__{p}__{channel}__{part}" for p in reversed(range(config.hbm_ports))
            )
            connections.append(f".{channel}_{part}({{{packed}}})")
    body = [f"hbm_slice #({given}) memory (", "  " + ",\n    ".join(connections), ");"]
    model = (resources.files("sim") / "rtl" / "hbm_slice.sv").read_text()
    return _top(config, ports, body) | {"hbm_slice.sv": model}
