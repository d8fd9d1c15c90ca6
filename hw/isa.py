# SPDX-License-Identifier: Apache-2.0
"""The tile's instruction set: every command's encoding, once.

A program is a sequence of 128-bit *beats* of four 32-bit words. A scalar instruction is one beat;
an engine command is four beats (sixteen words): word 0 the header, word 1 the semaphores, words 2
to 15 the operands.

Header: bits 5..0 opcode, bits 23..8 the indirect mask: bit 8 + i set means that word i (2 to 15) is
not an immediate but `registers[word >> 27] + sign_extended(word & 0x07FF_FFFF)`, taken as the beat
is fetched. Such a word belongs to one operand only. Bits that belong to no field are 0; a resolved
word with any of them set, that is, a value too wide for its operand, is an illegal command.

Assembler, disassembler, decoder and `docs/isa.md` are all made from the tables below.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from amaranth.lib import data

BEAT_WORDS = 4
COMMAND_BEATS = 4
COMMAND_WORDS = BEAT_WORDS * COMMAND_BEATS
REGISTERS = 32  # register 0 reads as zero
SEMAPHORES = 32
REMOTE_SEMAPHORES = 8  # the last ones: other tiles may post them, so waiting on one is no deadlock
SEMAPHORE_MAX = 0xFFFF
OPCODE_BITS = 6
INDIRECT_LO = 8
OFFSET_BITS = 27
ENGINE_NONE = 15  # engine field of the status when the sequencer itself is meant


class Engine(IntEnum):
    """Engines that execute commands; the value indexes queues, counters and status."""

    MATRIX = 0
    VECTOR = 1
    TOPK = 2
    DMA = 3
    STREAM = 4
    KV = 5
    NOC = 6
    COLLECTIVE = 7


# What counts its cycles, by number: the engines, then the array's load port.
COUNTED = (*(engine.name for engine in Engine), "LOAD")


class Status(IntEnum):
    """Why a tile stopped; the host reads it with the engine and the beat address of the command."""

    RUNNING = 0
    DONE = 1
    ILLEGAL_COMMAND = 2
    ADDRESS_RANGE = 3
    SEMAPHORE_OVERFLOW = 4
    DEADLOCK = 5
    CYCLE_LIMIT = 6
    HBM_ERROR = 7
    NO_DESTINATION = 8
    KV_ERROR = 10
    IDLE = 15


class Activity(IntEnum):
    """What an engine does in a cycle; every cycle is exactly one of these."""

    IDLE = 0  # no command
    BUSY = 1
    STARVED = 2  # has a command, lacks input
    BLOCKED = 3  # has output, lacks room downstream


class Scalar(IntEnum):
    """Opcodes of the sequencer's own instructions (one beat); SCALAR_DOCS says what they do."""

    HALT = 0
    ADD = 1
    SUB = 2
    MUL = 3
    AND = 4
    SHL = 5
    SHR = 6
    WRAP = 7
    LOAD = 8
    BEQ = 9
    BNE = 10
    BLT = 11
    WAIT = 12
    POST = 13
    FENCE = 14


# Word 1 of a scalar instruction: rd, rs, rt in bits 4..0, 9..5, 14..10; word 2: imm.
SCALAR_FIELDS = {"rd": (1, 0, 5), "rs": (1, 5, 5), "rt": (1, 10, 5), "imm": (2, 0, 32)}

_ARITHMETIC = ("rd", "rs", "rt", "imm")
_BRANCH = ("rs", "rt", "imm")
# Fields that an instruction uses; the others are 0.
SCALAR_USES: dict[Scalar, tuple[str, ...]] = {
    Scalar.HALT: (),
    Scalar.ADD: _ARITHMETIC,
    Scalar.SUB: _ARITHMETIC,
    Scalar.MUL: _ARITHMETIC,
    Scalar.AND: _ARITHMETIC,
    Scalar.SHL: _ARITHMETIC,
    Scalar.SHR: _ARITHMETIC,
    Scalar.WRAP: _ARITHMETIC,
    Scalar.LOAD: ("rd", "rs", "imm"),
    Scalar.BEQ: _BRANCH,
    Scalar.BNE: _BRANCH,
    Scalar.BLT: _BRANCH,
    Scalar.WAIT: ("imm",),
    Scalar.POST: ("imm",),
    Scalar.FENCE: (),
}
SCALAR_DOCS: dict[Scalar, str] = {
    Scalar.HALT: "wait until every engine is idle, then stop with DONE",
    Scalar.ADD: "rd = rs + rt + imm",
    Scalar.SUB: "rd = rs - rt - imm",
    Scalar.MUL: "rd = low word of rs * (rt + imm)",
    Scalar.AND: "rd = rs & (rt + imm)",
    Scalar.SHL: "rd = rs << (rt + imm); amounts of 32 and more give 0",
    Scalar.SHR: "rd = rs >> (rt + imm), logical; amounts of 32 and more give 0",
    Scalar.WRAP: "rd = rs + 1, or 0 when that equals rt + imm (ring slots)",
    Scalar.LOAD: "rd = 32-bit word of tile SRAM at byte address rs + imm, a multiple of 4",
    Scalar.BEQ: "to beat imm if rs == rt",
    Scalar.BNE: "to beat imm if rs != rt",
    Scalar.BLT: "to beat imm if rs < rt, signed",
    Scalar.WAIT: "wait for semaphore imm and take one",
    Scalar.POST: "add one to semaphore imm",
    Scalar.FENCE: "wait until every engine is idle and its queue empty",
}

# Word 1 of an engine command: two semaphores to take before it starts, two to post when it is
# complete.
SYNC_FIELDS = {
    "wait0": (0, 5),
    "wait0_en": (5, 1),
    "wait1": (6, 5),
    "wait1_en": (11, 1),
    "post0": (12, 5),
    "post0_en": (17, 1),
    "post1": (18, 5),
    "post1_en": (23, 1),
}


@dataclass(frozen=True)
class Operand:
    """A field of an engine command: `width` bits from bit `lo` of word `word`."""

    name: str
    word: int
    width: int
    doc: str
    lo: int = 0
    fp32: bool = False  # may hold the bits of an FP32 value


@dataclass(frozen=True)
class Command:
    name: str
    opcode: int
    engine: Engine
    doc: str
    operands: tuple[Operand, ...]

    def owned_bits(self, word: int) -> int:
        """Mask of the bits of word `word` (2 to 15) that belong to an operand; others must be 0."""
        return sum(((1 << op.width) - 1) << op.lo for op in self.operands if op.word == word)

    def owns_word(self, operand: Operand) -> bool:
        """Whether `operand` has its word to itself, so that the word can be register-indirect."""
        return [op for op in self.operands if op.word == operand.word] == [operand]

    def operand(self, name: str) -> Operand:
        for op in self.operands:
            if op.name == name:
                return op
        raise ValueError(
            f"operand of {self.name} must be one of "
            f"{', '.join(o.name for o in self.operands)}, not {name!r}"
        )


class Init(IntEnum):
    """What the first partial sum of a result is added to."""

    ZERO = 0
    BIAS = 1  # FP32 row vector at bias_addr
    # Accumulation onto a matrix in tile SRAM would be the third.


class Kind(IntEnum):
    """Where a vector operand comes from."""

    NONE = 0
    VECTOR = 1  # one element per lane, row stride applies
    ROW = 2  # one FP32 per row, broadcast
    IMMEDIATE = 3  # the address word is the FP32 value itself, broadcast


class Select(IntEnum):
    """Second operand of a lane stage."""

    B = 0
    D = 1
    X = 2  # the clamped first operand itself (square, x * f(x))


class Op1(IntEnum):
    NONE = 0
    ADD = 1  # x + s
    SUB = 2  # x - s
    MAX = 3
    MIN = 4


class Function(IntEnum):
    NONE = 0
    EXP2 = 1
    RECIPROCAL = 2
    RSQRT = 3
    SIGMOID = 4


class Reduce(IntEnum):
    NONE = 0
    SUM = 1
    MAX = 2


class Direction(IntEnum):
    HBM_TO_SRAM = 0
    SRAM_TO_HBM = 1
    HBM_TO_KV = 2


class CollectiveOp(IntEnum):
    ALLREDUCE_SUM = 0
    ALLREDUCE_MAX = 1
    BROADCAST = 2


class Scope(IntEnum):
    MESH = 0
    ROW = 1
    COLUMN = 2


MATMUL = Command(
    "MATMUL",
    32,
    Engine.MATRIX,
    (
        "out[m, n] = init + sum over k of act[m, k] * weight[k, n], in the array's order. "
        "Activation rows lie in tile SRAM; weights are rows of the KV SRAM (column tile t, group "
        "g in row weight_addr + t * weight_nstride + g * weight_gstride, bank = column) or come "
        "in order from the weight stream. Paged weights lie in blocks of 2^block_log2 tokens; the "
        "first row of token block b is that of table entry table + b, to which weight_addr and the "
        "strides within the block are added. Along N (tokens are columns) t counts the block's "
        "column tiles, along K (tokens are contracted) g counts the block's groups."
    ),
    (
        Operand(
            "act_addr",
            2,
            32,
            "byte address of activation row 0; a multiple of 16 * rows * lines per group",
        ),
        Operand("act_stride", 3, 16, "lines from one activation row to the next; same multiple"),
        Operand("m", 4, 16, "activation rows, 1 to acc_rows"),
        Operand("n", 5, 16, "result columns"),
        Operand("k", 6, 16, "contraction length in elements"),
        Operand("weight_addr", 7, 24, "KV SRAM row"),
        Operand("weight_gstride", 8, 16, "rows from one group to the next"),
        Operand("weight_nstride", 9, 16, "rows from one column tile to the next"),
        Operand(
            "out_addr",
            10,
            32,
            "byte address of result row 0; a multiple of the size of cols results",
        ),
        Operand("out_stride", 11, 16, "lines from one result row to the next"),
        Operand(
            "bias_addr", 12, 32, "byte address of the FP32 bias vector; a multiple of 4 * cols"
        ),
        Operand("act_format", 13, 3, "Format of the activations", 0),
        Operand("weight_format", 13, 3, "Format of the weights", 3),
        Operand("stream", 13, 1, "1: weights from the weight stream", 6),
        Operand("init", 13, 1, "Init", 7),
        Operand("out_bf16", 13, 1, "1: results rounded to BF16, 0: FP32", 8),
        Operand("paged", 13, 1, "1: rows by the block table (not from the weight stream)", 9),
        Operand("page_k", 13, 1, "1: blocks along K, 0: along N", 10),
        Operand("block_log2", 13, 3, "log2 of the tokens of a block, 4 to 7", 11),
        Operand("table", 14, 16, "block table entry of the first block"),
    ),
)

VECTOR = Command(
    "VECTOR",
    33,
    Engine.VECTOR,
    (
        "For each of rows x cols elements: x = clamp(a); y = op1(x, s1); y = y * s2; y = y + s3; "
        "y = f(y); y = y * s4; masked elements give +0; y is stored at out and the row's y are "
        "reduced to one FP32 at reduce_addr. Every stage is optional."
    ),
    (
        Operand("a_addr", 4, 32, "byte address of a (always a vector operand)"),
        Operand("b_addr", 5, 32, "byte address of b, or its FP32 value", fp32=True),
        Operand("d_addr", 6, 32, "byte address of d, or its FP32 value", fp32=True),
        Operand("out_addr", 7, 32, "byte address of the result"),
        Operand(
            "reduce_addr", 8, 32, "byte address of the reduction of row 0; row r goes to + 4 r"
        ),
        Operand("a_stride", 9, 16, "bytes / 4 from row to row of a", 0),
        Operand("b_stride", 9, 16, "bytes / 4 from row to row of b (VECTOR and ROW)", 16),
        Operand("d_stride", 10, 16, "bytes / 4 from row to row of d", 0),
        Operand("out_stride", 10, 16, "bytes / 4 from row to row of the result", 16),
        Operand("rows", 11, 16, "rows, at least 1"),
        Operand("cols", 12, 16, "elements of a row, at least 1"),
        Operand("clamp", 13, 32, "FP32 limit c of the clamp", fp32=True),
        Operand(
            "mask_lo", 14, 16, "first element of the cyclic range [mask_lo, mask_hi) that counts"
        ),
        Operand("mask_hi", 15, 16, "end of that range; lo > hi wraps: elements >= lo or < hi"),
        Operand("mask_lo_step", 2, 1, "1: mask_lo of row r is mask_lo + r, modulo 2^16", 24),
        Operand("mask_hi_step", 2, 1, "1: mask_hi of row r is mask_hi + r, modulo 2^16", 25),
        Operand("fixed_scale", 2, 1, "1: an MX result is stored with the given scale", 26),
        Operand("scale", 3, 8, "that scale as an E8M0 code, 0 to 254", 24),
        Operand("a_format", 2, 3, "Format of a", 0),
        Operand("b_format", 2, 3, "Format of b (VECTOR)", 3),
        Operand("d_format", 2, 3, "Format of d (VECTOR)", 6),
        Operand("out_format", 2, 3, "Format of the result", 9),
        Operand("b_kind", 2, 2, "Kind", 12),
        Operand("d_kind", 2, 2, "Kind", 14),
        Operand(
            "permute", 2, 4, "0: none, else a's element i is taken from i XOR 2^(permute - 1)", 16
        ),
        Operand("clamp_hi", 2, 1, "x = minimum(a, c)", 20),
        Operand("clamp_lo", 2, 1, "x = maximum(x, -c)", 21),
        Operand("mask", 2, 1, "1: apply the element mask", 22),
        Operand("store", 2, 1, "1: store the result", 23),
        Operand("op1", 3, 3, "Op1", 0),
        Operand("s1", 3, 2, "Select of op1", 3),
        Operand("mul", 3, 1, "multiply by s2", 5),
        Operand("s2", 3, 2, "Select", 6),
        Operand("add", 3, 1, "add s3", 8),
        Operand("s3", 3, 2, "Select", 9),
        Operand("function", 3, 3, "Function", 11),
        Operand("mul2", 3, 1, "multiply by s4", 14),
        Operand("s4", 3, 2, "Select", 15),
        Operand("reduce", 3, 2, "Reduce", 17),
    ),
)

TOPK = Command(
    "TOPK",
    34,
    Engine.TOPK,
    (
        "The k best of `count` FP32 scores: ids as 32-bit words at ids_addr, scores at "
        "scores_addr, best first. The choice goes by score + bias (FP32), descending, lower index "
        "first on equal scores, NaN last; the scores written are those without bias. With groups "
        "(equal runs of the scores) only the best groups_kept of them take part: a group's score "
        "is the FP32 sum of its best two. A row that is all NaN gives ids too and sets a flag "
        "that the host reads."
    ),
    (
        Operand("score_addr", 2, 32, "byte address of the scores, a multiple of 16"),
        Operand("count", 3, 16, "scores, 1 to max_experts"),
        Operand("k", 4, 8, "1 to max_topk and at most the scores of the kept groups"),
        Operand("ids_addr", 5, 32, "byte address, a multiple of 16"),
        Operand("scores_addr", 6, 32, "byte address, a multiple of 16"),
        Operand("bias_addr", 7, 32, "byte address of `count` FP32 biases, a multiple of 16"),
        Operand("groups_log2", 8, 3, "log2 of the groups; each has two scores or more", 0),
        Operand("groups_kept", 8, 5, "1 to the number of groups; 0 or 1 without groups", 3),
        Operand("use_bias", 8, 1, "1: choose by score + bias", 8),
    ),
)

DMA = Command(
    "DMA",
    35,
    Engine.DMA,
    (
        "Moves rows of lines between the HBM slice and an SRAM. A scaled row is a sequence of "
        "runs in HBM: one line of 16 scales, then up to 16 data lines; scales land beside their "
        "lines."
    ),
    (
        Operand("hbm_addr", 2, 32, "byte address in the HBM slice, a multiple of 16"),
        Operand("hbm_stride", 3, 32, "bytes from row to row, a multiple of 16"),
        Operand(
            "local_addr",
            4,
            32,
            "tile SRAM byte address, or KV SRAM line address (row * cols + bank)",
        ),
        Operand("local_stride", 5, 24, "lines from row to row"),
        Operand("lines", 6, 24, "data lines of a row, at least 1"),
        Operand("rows", 7, 16, "rows, at least 1"),
        Operand("direction", 8, 2, "Direction", 0),
        Operand("scaled", 8, 1, "1: rows are sequences of runs (towards the SRAMs only)", 2),
    ),
)

STREAM = Command(
    "STREAM",
    36,
    Engine.STREAM,
    (
        "Streams weight rows from the HBM slice into the ring of the KV SRAM, from which MATMUL "
        "takes them in order. A row is cols lines; scaled streams are sequences of runs as in "
        "DMA, over all lines of the command."
    ),
    (
        Operand("hbm_addr", 2, 32, "byte address in the HBM slice, a multiple of 16"),
        Operand("rows", 3, 24, "weight rows, at least 1"),
        Operand("scaled", 4, 1, "1: lines come in runs with scales, 0: lines only"),
    ),
)

KVAPPEND = Command(
    "KVAPPEND",
    37,
    Engine.KV,
    (
        "Appends one token to a KV cache: its key (head_dim values in tile SRAM) as lines of bank "
        "slot mod cols, its value as one element in every bank. The first token of a line of "
        "values (slot a multiple of the elements of a line) makes the line's other elements zero, "
        "unless `wrapped`."
    ),
    (
        Operand("k_addr", 2, 32, "byte address of the key, a multiple of 16"),
        Operand("v_addr", 3, 32, "byte address of the value, a multiple of 16"),
        Operand("slot", 4, 24, "ring slot (token index modulo ring length)"),
        Operand("k_base", 5, 24, "first KV SRAM row of the key region"),
        Operand("v_base", 6, 24, "first KV SRAM row of the value region"),
        Operand("head_dim", 7, 16, "elements, a multiple of those of a line: 8 BF16, 16 MXFP8"),
        Operand("keys", 8, 1, "1: append the key", 0),
        Operand("values", 8, 1, "1: append the value", 1),
        Operand("format", 8, 3, "Format of key and value: BF16 or MXFP8_E4M3", 2),
        Operand("wrapped", 9, 1, "1: the slot is written again, later tokens of its line are kept"),
    ),
)

SEND = Command(
    "SEND",
    38,
    Engine.NOC,
    ("Writes lines of this tile's SRAM into another tile's, then posts a semaphore there."),
    (
        Operand("x", 2, 8, "destination column"),
        Operand("y", 3, 8, "destination row"),
        Operand("src_addr", 4, 32, "byte address here, a multiple of 16"),
        Operand("dst_addr", 5, 32, "byte address there, a multiple of 16"),
        Operand("src_stride", 6, 16, "lines from row to row here"),
        Operand("dst_stride", 7, 16, "lines from row to row there"),
        Operand("lines", 8, 16, "lines of a row, at least 1"),
        Operand("rows", 9, 16, "rows, at least 1"),
        Operand("semaphore", 10, 5, "semaphore to post there, one of the remote ones", 0),
        Operand("post", 10, 1, "1: post it", 5),
    ),
)

COLLECTIVE = Command(
    "COLLECTIVE",
    39,
    Engine.COLLECTIVE,
    (
        "Takes part in a collective operation over FP32 lines; every tile of the scope issues "
        "the same command."
    ),
    (
        Operand("src_addr", 2, 32, "byte address of this tile's contribution, a multiple of 16"),
        Operand("dst_addr", 3, 32, "byte address of the result, a multiple of 16"),
        Operand("lines", 4, 16, "lines, at least 1"),
        Operand("op", 5, 2, "CollectiveOp"),
        Operand("scope", 6, 2, "Scope"),
        Operand(
            "root", 7, 8, "position of the sender in the scope (BROADCAST): y * mesh_x + x, x or y"
        ),
    ),
)

BLOCKTABLE = Command(
    "BLOCKTABLE",
    40,
    Engine.MATRIX,
    (
        "Copies `count` 32-bit words of tile SRAM to the block table's entries from `table` on: "
        "the first KV SRAM row of each block of a paged cache, for MATMUL. It starts when all "
        "MATMUL before it are complete, and those after it see its entries."
    ),
    (
        Operand("addr", 2, 32, "byte address of the words, a multiple of 4"),
        Operand("count", 3, 16, "words, at least 1"),
        Operand("table", 14, 16, "first entry; table + count at most block_entries"),
    ),
)

COMMANDS: tuple[Command, ...] = (
    MATMUL,
    VECTOR,
    TOPK,
    DMA,
    STREAM,
    KVAPPEND,
    SEND,
    COLLECTIVE,
    BLOCKTABLE,
)
BY_OPCODE = {c.opcode: c for c in COMMANDS}
BY_ENGINE = {e: tuple(c for c in COMMANDS if c.engine is e) for e in Engine}


def operand_layout(*commands: Command) -> data.StructLayout:
    """Layout of operands as an engine takes them, in table order.

    An engine of several commands gets the operands of all, those of equal name (which then have
    one place in the encoding) once, and `code`: which of the commands it is, by position.
    """
    fields = {op.name: op.width for command in commands for op in command.operands}
    if len(commands) > 1:
        fields["code"] = (len(commands) - 1).bit_length()
    return data.StructLayout(fields)


SYNC_LAYOUT = data.StructLayout({name: width for name, (_, width) in SYNC_FIELDS.items()})


def queue_entry(commands: Sequence[Command], pc_bits: int) -> data.StructLayout:
    """One of an engine's `commands` on its way: operands, semaphores, and beat address for the
    status.
    """
    return data.StructLayout(
        {"operands": operand_layout(*commands), "sync": SYNC_LAYOUT, "pc": pc_bits}
    )
