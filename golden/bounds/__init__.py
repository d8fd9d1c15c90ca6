# SPDX-License-Identifier: Apache-2.0
"""How far the bit-exact kernels may be from float64 on the same quantised weights.

Each function gives the float64 reference and, element by element, a bound on the kernel's error:
worst-case running error analysis through the kernel's own steps (`affine` says how), with no
assumption on the distribution of roundings. It assumes only that nothing overflows or is NaN. All
functions raise NoBound, a ValueError, where there is no finite bound.
"""

from golden.bounds.affine import NoBound
from golden.bounds.attention import attention_bound, prefill_bound
from golden.bounds.layer import layer_bound
from golden.bounds.mla import mla_bound
from golden.bounds.mla_layer import middle_bound, mla_layer_bound, mlp_bound
from golden.bounds.moe import moe_bound

__all__ = [
    "NoBound",
    "attention_bound",
    "layer_bound",
    "middle_bound",
    "mla_bound",
    "mla_layer_bound",
    "mlp_bound",
    "moe_bound",
    "prefill_bound",
]
