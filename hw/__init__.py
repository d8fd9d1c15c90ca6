# SPDX-License-Identifier: Apache-2.0
"""Hardware description of the Jalapeño tile, its matmul array, memories and networks (Amaranth)."""
