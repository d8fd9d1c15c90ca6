# SPDX-License-Identifier: Apache-2.0
"""Bit-exact models of whole kernels: what a tile program leaves in memory, command by command.

Each function follows the tile program of the same name in `sim/programs/` and gives every
intermediate that leaves an engine to a `Trace`, under the name of its buffer.
"""
