# SPDX-License-Identifier: Apache-2.0
"""Agents of every bench: drivers, monitors and protocol monitors of streams, and scoreboards."""

from tb.agents.packing import Packing
from tb.agents.protocol import ProtocolMonitor, Violation
from tb.agents.scoreboard import Scoreboard
from tb.agents.stream import StreamDriver, StreamMonitor

__all__ = ["Packing", "ProtocolMonitor", "Scoreboard", "StreamDriver", "StreamMonitor", "Violation"]
