# SPDX-License-Identifier: Apache-2.0
"""Settings of every test: no colours, a wide terminal, one compiler per worker when several run."""

import os

import pytest

from tests import simulators


@pytest.fixture(autouse=True, scope="session")
def plain_output():
    """Output of the command line that tests can read, and no more compilers than cores."""
    os.environ.update({"NO_COLOR": "1", "COLUMNS": "200", "TERM": "dumb"})
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    os.environ.setdefault("JALAPENO_JOBS", str(max(1, (os.cpu_count() or 1) // workers)))


@pytest.fixture(params=simulators.NAMES)
def simulator(request, monkeypatch):
    """Which simulator `tests.simulators.Simulator` is."""
    monkeypatch.setattr(simulators, "chosen", request.param)
    return request.param
