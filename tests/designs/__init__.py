# SPDX-License-Identifier: Apache-2.0
"""Small components on which the tests of emission, simulation and benches run."""
