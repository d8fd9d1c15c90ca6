# SPDX-License-Identifier: Apache-2.0
"""Golden models: bit-exact numpy of what the hardware does, float64 references of what is meant."""
