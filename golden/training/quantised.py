# SPDX-License-Identifier: Apache-2.0
"""Quantisation in the loop: the loss sees the experts as MXFP4, the gradient goes straight
through to the values behind them.
"""

import numpy as np

from golden.decoder import quantised
from golden.formats import BLOCK
from golden.training.layers import Array
from golden.training.network import Parameters


def mxfp4(weights: Array) -> Array:
    """Weights [..., K] as their MXFP4 codes and scales give them: `golden.quantise`, but in the
    precision of `weights` and fast. K is a multiple of 32.
    """
    if weights.shape[-1] % BLOCK:
        raise ValueError(f"weights must have whole blocks of {BLOCK}, not {weights.shape}")
    blocks = weights.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    # E2M1's largest exponent is 2; an all-zero block may have any scale.
    exponent = np.frexp(np.where(largest > 0, largest, 1))[1] - 1 - 2
    scaled = np.ldexp(blocks, -exponent)
    size = np.abs(scaled)
    step = np.where(size < 2, 0.5, np.where(size < 4, 1.0, 2.0)).astype(weights.dtype)
    rounded = np.clip(np.rint(scaled / step) * step, -6, 6)
    return np.ldexp(rounded, exponent).astype(weights.dtype).reshape(weights.shape)


def in_the_loop(parameters: Parameters) -> Parameters:
    """The parameters with the experts' matrices as MXFP4 gives them."""
    return {name: mxfp4(value) if quantised(name) else value for name, value in parameters.items()}
