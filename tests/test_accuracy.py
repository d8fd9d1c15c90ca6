# SPDX-License-Identifier: Apache-2.0
"""The table of attention's accuracy in docs/numerics.md: its figures, and their bounds."""

from pathlib import Path

import pytest

from golden.accuracy import CONTEXTS, FORMATS, measure, row
from golden.formats import Format
from golden.models import MODELS

PAGE = (Path(__file__).parent.parent / "docs" / "numerics.md").read_text()


def check(model: str, context: int, bounded: bool) -> None:
    found = [measure(model, context, fmt, bounded=bounded) for fmt in FORMATS]
    assert row(*found) in PAGE
    for one in found:
        most = 0.01 if one.fmt is Format.BF16 else 0.1
        assert 0 < one.error < most and one.error < one.largest < 12 * one.error
        assert 0 < one.kernel < 0.05
        if bounded:  # `measure` holds every element to its bound
            assert one.bound is not None and one.kernel < one.bound < 2
    assert found[0].error < found[1].error  # E4M3 costs more than the kernel


@pytest.mark.parametrize("model", MODELS)
def test_short_contexts(model: str) -> None:
    check(model, 128, bounded=True)
    check(model, 512, bounded=False)


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS[1:])
@pytest.mark.parametrize("model", MODELS)
def test_contexts_within_their_bounds(model: str, context: int) -> None:
    check(model, context, bounded=True)


def test_the_page_has_every_row() -> None:
    rows = [
        line for line in PAGE.splitlines() if line.startswith(tuple(f"| {m} |" for m in MODELS))
    ]
    assert len(rows) == len(MODELS) * len(CONTEXTS)
