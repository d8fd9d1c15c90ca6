# SPDX-License-Identifier: Apache-2.0
"""Tile programs, one file per kernel, written with the builder of `sim.assembler`."""
