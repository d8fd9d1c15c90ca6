# SPDX-License-Identifier: Apache-2.0
"""Adam (arXiv 1412.6980) with decoupled weight decay (arXiv 1711.05101) and a rate schedule."""

import math

import numpy as np

from golden.training.network import Parameters


def rate(step: int, steps: int, peak: float, warm_up: int) -> float:
    """Learning rate of `step` of `steps`: linear warm-up, then half a cosine down to zero."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


class Adam:
    """Moments of every parameter; `decay` shrinks matrices only."""

    def __init__(self, parameters: Parameters, decay: float, clip: float):
        self.first = {name: np.zeros_like(value) for name, value in parameters.items()}
        self.second = {name: np.zeros_like(value) for name, value in parameters.items()}
        self.steps, self.decay, self.clip = 0, decay, clip
        self.betas, self.eps = (0.9, 0.98), 1e-9

    def step(self, parameters: Parameters, grads: Parameters, rate: float) -> float:
        """Changes `parameters` in place; gradients beyond `clip` in norm are scaled down to it.

        Returns their norm.
        """
        norm = math.sqrt(sum(float(np.vdot(grad, grad)) for grad in grads.values()))
        factor = min(1.0, self.clip / max(norm, 1e-30))
        self.steps += 1
        b1, b2 = self.betas
        unbias1, unbias2 = 1 - b1**self.steps, 1 - b2**self.steps
        for name, value in parameters.items():
            grad = grads[name] * factor
            first, second = self.first[name], self.second[name]
            first += (1 - b1) * (grad - first)
            second += (1 - b2) * (grad * grad - second)
            if value.ndim > 1 and not name.endswith("bias"):
                value *= 1 - rate * self.decay
            value -= rate / unbias1 * first / (np.sqrt(second / unbias2) + self.eps)
        return norm
