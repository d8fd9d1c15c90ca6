# SPDX-License-Identifier: Apache-2.0
"""Runs and interprets simulations: simulator set-up, programs, cycles, scaling, command line."""
