# SPDX-License-Identifier: Apache-2.0
"""Matrix products in float64."""

import numpy as np


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x [..., in] times weight [out, in] transposed, plus bias [out]: [..., out]."""
    y = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return y if bias is None else y + np.asarray(bias, np.float64)
