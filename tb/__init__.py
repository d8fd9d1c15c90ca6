# SPDX-License-Identifier: Apache-2.0
"""cocotb benches and their agents: drivers, monitors, scoreboards."""
