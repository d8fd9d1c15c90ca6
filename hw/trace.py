# SPDX-License-Identifier: Apache-2.0
"""The trace port of a tile: what it executes, for a recorder outside; there when `trace` is set."""

from amaranth.lib import data

from hw.isa import BEAT_WORDS, COMMAND_BEATS, Engine

WORD_BITS = 32
TRACE_PC_BITS = 17  # a beat address of the largest program memory

# A beat that the sequencer executes in this cycle. `pc` is the instruction's first beat, `index`
# the beat of a command, `words` the beat with indirect words resolved. `base` is the value of a
# scalar instruction's register rs. A LOAD, WAIT or FENCE is executed in the cycle that ends it.
BEAT = data.StructLayout(
    {
        "valid": 1,
        "index": range(COMMAND_BEATS),
        "pc": TRACE_PC_BITS,
        "words": data.ArrayLayout(WORD_BITS, BEAT_WORDS),
        "base": WORD_BITS,
    }
)

# started: a run starts. taken: an engine takes a command, in the order of issue. done: its oldest
# command is done without an error; its posts are made in this cycle. Bit i is engine i.
TRACE = data.StructLayout(
    {"started": 1, "taken": len(Engine), "done": len(Engine), "beat": BEAT},
)
