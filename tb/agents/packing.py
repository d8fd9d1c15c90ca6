# SPDX-License-Identifier: Apache-2.0
"""Packed payloads as Python values: structures are dicts, arrays lists, all else integers."""

from typing import Any

from hw.verilog import layout


class Packing:
    """Packs and unpacks the values of an Amaranth shape, element 0 and the first field in the low
    bits.

    Parameters
    ----------
    shape
        A shape or layout of Amaranth, or the JSON of one as `hw.verilog.layout` gives it.
    """

    def __init__(self, shape: Any):
        self.layout: dict[str, Any] = shape if isinstance(shape, dict) else layout(shape)

    @property
    def width(self) -> int:
        return self.layout["width"]

    def pack(self, value: Any) -> int:
        """Bits of `value`; every field must be given, and fit."""
        return self._pack(self.layout, value, "payload")

    def unpack(self, bits: int) -> Any:
        """Value of `bits`."""
        return self._unpack(self.layout, bits)

    def _pack(self, shape: dict[str, Any], value: Any, name: str) -> int:
        if "fields" in shape:
            names = {field["name"] for field in shape["fields"]}
            if names != set(value):
                raise ValueError(f"fields of {name} must be {sorted(names)}, not {sorted(value)}")
            return sum(
                self._pack(field, value[field["name"]], field["name"]) << field["offset"]
                for field in shape["fields"]
            )
        if "length" in shape:
            if len(value) != shape["length"]:
                raise ValueError(f"length of {name} must be {shape['length']}, not {len(value)}")
            step = shape["element"]["width"]
            return sum(
                self._pack(shape["element"], item, name) << (i * step)
                for i, item in enumerate(value)
            )
        width, number = shape["width"], int(value)
        least = -(1 << width - 1) if shape.get("signed") else 0
        most = (1 << width - 1) - 1 if shape.get("signed") else (1 << width) - 1
        if not least <= number <= most:
            raise ValueError(f"{name} must be from {least} to {most}, not {number!r}")
        return number & ((1 << width) - 1)

    def _unpack(self, shape: dict[str, Any], bits: int) -> Any:
        if "fields" in shape:
            return {
                field["name"]: self._unpack(field, bits >> field["offset"])
                for field in shape["fields"]
            }
        if "length" in shape:
            step = shape["element"]["width"]
            return [
                self._unpack(shape["element"], bits >> (i * step)) for i in range(shape["length"])
            ]
        number = bits & ((1 << shape["width"]) - 1)
        if shape.get("signed") and number >> (shape["width"] - 1):
            number -= 1 << shape["width"]
        return number
