# SPDX-License-Identifier: Apache-2.0
"""Float64 references of what the kernels mean, after the published code of the three models.

Conventions of the whole package: no batch axis; tokens come first (`x` is [tokens, hidden]); a
weight matrix is [out, in] and a stack of experts [E, out, in], as in the checkpoints, so that the
contraction is the last axis. Inputs may be of any float type and are widened; results are float64.
"""
