# SPDX-License-Identifier: Apache-2.0
"""What the tests of bit-exact kernels share: seeds, reference vectors, and how near is near."""

import json
from pathlib import Path

import numpy as np

from golden.kernels.trace import Machine

VECTORS = Path(__file__).parent / "vectors"
SMALL, TINY = Machine(rows=8, lanes=16), Machine(rows=2, lanes=4)
MACHINES = [SMALL, TINY]
Arrays = dict[str, np.ndarray]


def rng_of(seed: int) -> np.random.Generator:
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def load(name: str) -> tuple[Arrays, dict]:
    with np.load(VECTORS / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files if key != "__meta__"}
        return arrays, json.loads(str(file["__meta__"]))


def within(found: np.ndarray, reference: np.ndarray, bound: np.ndarray, most: float) -> float:
    """Every element is within its bound, which is at most `most` of the largest reference value.

    Returns bound over error.
    """
    assert found.shape == reference.shape == bound.shape and found.size
    error, largest = np.abs(found - reference), np.abs(reference).max()
    assert np.all(error <= bound)
    share = bound.max() / largest
    ratio = bound.max() / error.max()
    print(
        f"error {error.max():.3g}, bound {bound.max():.3g}: {ratio:.1f} times, "
        f"{share:.3f} of {largest:.3g}"
    )
    assert error.max() > 0 and share <= most
    return ratio


def near(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    """The largest error is at most `tolerance` of the largest wanted value."""
    assert found.shape == wanted.shape and wanted.size
    error = np.abs(found - wanted.astype(np.float64)).max() / np.abs(wanted).max()
    assert error <= tolerance, f"largest error {error}"
