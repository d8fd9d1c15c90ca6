# SPDX-License-Identifier: Apache-2.0
"""Rewrites of RTLIL and Verilog text, without a change of meaning, for what lint tools object to.

Amaranth shortens the operands of its operators and leaves it to the Verilog to extend them; Yosys
writes a selection as a function of `a`, `b` and `s` around a `casez` that is only right with the
attribute `parallel_case`. Both drown real faults in warnings.
"""

import re

# Operators whose operands are as wide as each other, and those that are as wide as the result.
_COMPARES = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_ADDS = frozenset(("add", "sub"))
_SHIFTS = frozenset(("shl", "shr", "sshr"))
_CELL = re.compile(r"^  cell \$(\w+) \S+\n((?:    .*\n)+)  end\n", re.MULTILINE)
_FUNCTION = re.compile(
    r"^  function \[(?P<high>\d+):0\] (?P<name>\S+) ;\n(?P<body>.*?)^  endfunction\n",
    re.MULTILINE | re.DOTALL,
)


def _parameter(cell: str, name: str) -> int:
    found = re.search(rf"^    parameter \\{name} (\d+)$", cell, re.MULTILINE)
    assert found is not None, cell
    return int(found[1])


def _extended(cell: str, operand: str, width: int) -> str:
    """`cell` with `operand` ("A" or "B") extended to `width` bits by its signedness."""
    old = _parameter(cell, f"{operand}_WIDTH")
    if old >= width:
        return cell
    cell = cell.replace(f"\\{operand}_WIDTH {old}\n", f"\\{operand}_WIDTH {width}\n")

    def replace(found: re.Match[str]) -> str:
        value = found[1]
        if _parameter(cell, f"{operand}_SIGNED"):
            high = " ".join([f"{value} [{old - 1}]"] * (width - old))
        else:
            high = f"{width - old}'{'0' * (width - old)}"
        return f"    connect \\{operand} {{ {high} {value} }}"

    return re.sub(rf"^    connect \\{operand} (.*)$", replace, cell, flags=re.MULTILINE)


def _cell(found: re.Match[str]) -> str:
    kind, cell = found[1], found[0]
    if kind == "meminit_v2":
        data = re.search(r"^    connect \\DATA \d+'([01]*)$", cell, re.MULTILINE)
        if data is None or "1" in data[1]:
            raise ValueError("init of a memory must be 0: silicon has no contents at power-up")
        return ""
    if kind in _COMPARES or kind in _ADDS:
        width = max(_parameter(cell, "A_WIDTH"), _parameter(cell, "B_WIDTH"))
        if kind in _ADDS and _parameter(cell, "Y_WIDTH") > width + 1:  # more than the carry
            width = _parameter(cell, "Y_WIDTH")
        return _extended(_extended(cell, "A", width), "B", width)
    if kind in _SHIFTS or kind == "neg":
        return _extended(cell, "A", _parameter(cell, "Y_WIDTH"))
    return cell


def explicit(text: str) -> str:
    """RTLIL of Amaranth with operands extended and without the zeros that memories start from.

    ValueError if a memory starts from anything else: it would be lost.
    """
    return _CELL.sub(_cell, text)


def _one_hot(found: re.Match[str]) -> str:
    """A selection as AND and OR: its selects exclude each other, which no `case` can say to all
    tools without pragmas.
    """
    name, width = found["name"], int(found["high"]) + 1
    choices = re.findall(r"^ {8}\S+ += b(\[[\d:]+\])?;$", found["body"], re.MULTILINE)
    high = len(choices) - 1
    assert high >= 0 and f"    input [{high}:0] s;\n" in found["body"], found[0]
    terms = [
        f"({{{width}{{select_i[{i}]}}}} & choices_i{part or ''})" for i, part in enumerate(choices)
    ]
    terms.append(f"({{{width}{{~|select_i}}}} & otherwise_i)")
    inputs = (("otherwise_i", width), ("choices_i", width * (high + 1)), ("select_i", high + 1))
    return "".join(
        [
            f"  function [{width - 1}:0] {name} ;\n",
            *(f"    input [{size - 1}:0] {port};\n" for port, size in inputs),
            f"    {name} = " + " |\n      ".join(terms) + ";\n",
            "  endfunction\n",
        ]
    )


def plain(text: str) -> str:
    """Verilog of Yosys with selections free of pragmas and of names that hide others, and `!` of
    vectors as NOR.
    """
    text = _FUNCTION.sub(_one_hot, text)
    return re.sub(r"^(  assign .* =) ! ", r"\1 ~| ", text, flags=re.MULTILINE)
