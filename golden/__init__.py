# SPDX-License-Identifier: Apache-2.0
"""Golden models: bit-exact numpy models of what the hardware does and float64 references of what is meant."""
