# SPDX-License-Identifier: Apache-2.0
"""Number formats of the matmul array: the one place that names and describes them.

OCP Microscaling (MX) v1.0 element formats, BF16 and FP32. The integer value of a `Format` is its three-bit
code in hardware commands. MX formats carry one E8M0 scale per block of 32 elements along the contraction.
"""

from enum import IntEnum


class Format(IntEnum):
    """Element formats; the value is the three-bit code used in commands."""

    MXFP4 = 0  # E2M1
    MXFP6_E2M3 = 1
    MXFP6_E3M2 = 2
    MXFP8_E4M3 = 3
    MXFP8_E5M2 = 4
    MXINT8 = 5
    BF16 = 6
    FP32 = 7


BLOCK = 32  # elements that share one E8M0 scale
