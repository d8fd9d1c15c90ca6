# SPDX-License-Identifier: Apache-2.0
"""Checks, on the record of a run, that no command was started before what it depends on was
done.
"""

from sim.order_check.check import Finding, OrderReport, check

__all__ = ["Finding", "OrderReport", "check"]
