# SPDX-License-Identifier: Apache-2.0
"""The checked-in cycle table holds: what the runs take now is what was recorded."""

import pytest

from sim import cycles

RECORDS = cycles.load()


def test_the_table_covers_every_kernel():
    kernels = {"gemm", "attention", "mla", "gate", "moe", "layer"}  # a text has its own figures
    assert {record.kernel for record in RECORDS} == kernels
    assert all(record.cycles for record in RECORDS)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(record, marks=pytest.mark.slow if record.config == "small" else ())
        for record in RECORDS
    ],
    ids=lambda r: f"{r.kernel}-{r.config}-{'-'.join(map(str, r.settings.values()))}",
)
def test_cycles_are_as_recorded(record):
    (comparison,) = cycles.measure([record], lambda _: None)
    assert not comparison.changed, comparison.row()
