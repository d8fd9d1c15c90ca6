# SPDX-License-Identifier: Apache-2.0
"""The text to learn from: paragraphs of prose in the documentation that Python ships with.

That is the topics of `pydoc_data`, the docstrings of the standard library and `this`. It differs
between versions of Python; whole sources are held out, not paragraphs.
"""

import ast
import codecs
import contextlib
import io
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from golden.characters import START, encode

SHORTEST = 40
LETTERS = 0.9  # least share of letters and spaces in prose
HELD_OUT = 0.04  # of the sources
# Tests, other people's packages, and what is no documentation of Python.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "pydoc_data", "turtledemo"}
LEFT_OUT |= {"site-packages", "dist-packages", "this.py"}


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of prose, each on one line: whole sentences, few signs and digits."""
    for part in re.split(r"\n\s*\n", text):
        line = re.sub(r"(\w)- (\w)", r"\1-\2", " ".join(part.split()))
        prose = sum(c.isalpha() or c == " " for c in line)
        if (
            len(line) >= SHORTEST
            and line.isascii()
            and line.isprintable()
            and line[0].isupper()
            and line[-1] in ".:!"
            and prose >= LETTERS * len(line)
        ):
            yield line


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Every docstring of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def sources() -> Iterator[tuple[str, list[str]]]:
    """(name, texts) of every topic and every module of the standard library, in a fixed order."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield name, [topics[name]]
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    yield "this", ["\n\n".join(codecs.decode(this.s, "rot13").splitlines())]
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(root).parts):
            with contextlib.suppress(SyntaxError, UnicodeDecodeError):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                yield str(path.relative_to(root)), list(docstrings(tree))


@dataclass(frozen=True)
class Corpus:
    """Paragraphs to learn from and held-out ones; no paragraph occurs twice."""

    train: list[str]
    held_out: list[str]


def corpus(rng: np.random.Generator) -> Corpus:
    """The text of this version of Python; `rng` chooses the sources that are held out."""
    seen: set[str] = set()
    found = Corpus([], [])
    for _, texts in sources():
        chosen = found.held_out if rng.random() < HELD_OUT else found.train
        for text in texts:
            for line in paragraphs(text):
                if line not in seen:
                    seen.add(line)
                    chosen.append(line)
    return found


class Windows:
    """Windows of `length` ids, half of them from the start of a paragraph."""

    def __init__(self, lines: list[str], length: int, rng: np.random.Generator):
        order = rng.permutation(len(lines))
        self.ids = encode("\n" + "\n".join(lines[i] for i in order) + "\n")
        self.starts = np.flatnonzero(self.ids == START)
        self.starts = self.starts[self.starts <= len(self.ids) - length]
        self.length, self.rng = length, rng
        if not len(self.starts):
            raise ValueError(f"length must be at most {len(self.ids)}, not {length!r}")

    def take(self, count: int) -> NDArray[np.int64]:
        """`count` windows [count, length]."""
        first = self.rng.integers(0, len(self.ids) - self.length + 1, count)
        first[::2] = self.rng.choice(self.starts, len(first[::2]))
        return self.ids[first[:, None] + np.arange(self.length)]
