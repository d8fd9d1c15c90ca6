# SPDX-License-Identifier: Apache-2.0
"""What Python costs in a simulation, against a C++ loop around the same model."""

import pytest

from hw.config import preset
from sim.errors import InputError
from sim.speed import Speed, measure


def test_share_of_python():
    found = Speed("tiny", 1000, 300.0, 400.0, 1.0)
    assert found.python_share == 0.25


def test_a_mesh_is_refused():
    with pytest.raises(InputError, match="single tile"):
        measure(preset("mesh4"), 1, 4, 32)


@pytest.mark.slow
def test_python_takes_less_than_half_of_the_time():
    found = measure(preset("small"), 64, 128, 2048)
    print(found)
    assert found.cycles >= 64 * 128 * 2048 / (128 * 16)
    assert found.python_share < 0.5
