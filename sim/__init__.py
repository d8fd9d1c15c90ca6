# SPDX-License-Identifier: Apache-2.0
"""Everything that runs or interprets a simulation: simulator set-up, programs, cycles, scaling, command line."""
