# SPDX-License-Identifier: Apache-2.0
"""What Python costs in a simulation, against a C++ loop around the same model."""

import pytest

from hw.config import preset
from sim.cli import main
from sim.errors import InputError
from sim.speed import Speed, measure


def test_share_of_python():
    found = Speed("tiny", 1000, 300.0, 400.0, 1.0)
    assert found.python_share == 0.25


def test_a_mesh_is_refused():
    with pytest.raises(InputError, match="single tile"):
        measure(preset("mesh4"), 1, 4, 32)


@pytest.mark.parametrize(
    "name, size, most", [("--m", 0, 256), ("--n", 4097, 4096), ("--k", 0, 16384)]
)
def test_sizes_out_of_range_are_refused(name, size, most, capsys):
    assert main(["speed", "--config", "tiny", name, str(size)]) == 2
    wanted = f"{name} is {size}, but it must be from 1 to {most}; give for example {name} "
    assert wanted in capsys.readouterr().err


@pytest.mark.slow
def test_python_takes_less_than_half_of_the_time():
    found = measure(preset("small"), 64, 128, 2048)
    print(found)
    assert found.cycles >= 64 * 128 * 2048 / (128 * 16)
    assert found.python_share < 0.5
