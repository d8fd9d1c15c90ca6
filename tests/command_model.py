# SPDX-License-Identifier: Apache-2.0
"""A tile as an interpreter of programs: commands one after the other, in the program's order, on
memory images, with the arithmetic of `golden`.

Written from the instruction set. BF16 and FP32 in tile SRAM, BF16 weights; no networks.
"""

from collections import deque

import numpy as np

from golden import fp32
from golden.formats import SPECS, Format, to_bf16_codes
from golden.hbm_layout import unpack_codes
from golden.kv_layout import key_place, value_place
from golden.matmul import matmul
from golden.topk import choose
from golden.vector import load, store, vector
from hw import isa
from hw.config import LINE_BYTES
from sim.order_check.record import decode

SELECT = {isa.Select.B: "b", isa.Select.D: "d", isa.Select.X: "x"}


class TileModel:
    """Memories of a tile: bytes `sram`, lines `kv` [rows, cols, 16], bytes `hbm`."""

    def __init__(self, config):
        self.config = config
        self.sram = np.zeros(config.sram_bytes, np.uint8)
        self.kv = np.zeros((config.kv_rows, config.cols, LINE_BYTES), np.uint8)
        self.hbm = np.zeros(config.hbm_bytes, np.uint8)
        self.registers = [0] * isa.REGISTERS
        self.table = np.zeros(config.block_entries, np.int64)
        self.stream = deque()
        self.executed = 0  # commands and LOADs

    def host(self, memory):
        """Loads the images of `memory` but for HBM."""
        for line, lines, _ in memory.sram_images:
            self.sram[LINE_BYTES * line :][: lines.size] = lines.reshape(-1)
        for line, lines, _ in memory.kv_images:
            self.kv.reshape(-1, LINE_BYTES)[line : line + len(lines)] = lines

    def run(self, beats):
        """Executes a program without branches."""
        beats, at = beats.tolist(), 0
        while beats[at][0] != isa.Scalar.HALT:
            if beats[at][0] & 63 < 32:
                self._scalar(beats[at])
                at += 1
                continue
            words = sum(beats[at : at + isa.COMMAND_BEATS], [])
            for i in range(2, isa.COMMAND_WORDS):
                if words[0] >> (isa.INDIRECT_LO + i) & 1:
                    offset = words[i] & ((1 << isa.OFFSET_BITS) - 1)
                    offset -= offset >> (isa.OFFSET_BITS - 1) << isa.OFFSET_BITS
                    words[i] = self.registers[words[i] >> isa.OFFSET_BITS] + offset
            command, operands, _, _ = decode(words)
            getattr(self, f"_{command.name.lower()}")(operands)
            self.executed += 1
            at += isa.COMMAND_BEATS

    def _scalar(self, words):
        opcode = isa.Scalar(words[0])
        field = {}
        for name, (word, lo, width) in isa.SCALAR_FIELDS.items():
            field[name] = words[word] >> lo & ((1 << width) - 1)
        rs, rt = (self.registers[field[name]] for name in ("rs", "rt"))
        if opcode is isa.Scalar.ADD:
            value = rs + rt + field["imm"]
        elif opcode is isa.Scalar.MUL:
            value = rs * (rt + field["imm"])
        elif opcode is isa.Scalar.LOAD:
            value = int(self.sram[rs + field["imm"] :][:4].view("<u4")[0])
            self.executed += 1
        else:
            assert opcode in (isa.Scalar.WAIT, isa.Scalar.FENCE), opcode
            return
        self.registers[field["rd"]] = value & 0xFFFF_FFFF if field["rd"] else 0

    # Rows in tile SRAM.

    def _places(self, address, rows, stride, cols, fmt):
        size = cols * SPECS[fmt].storage_bits // 8
        return address + stride * np.arange(rows)[:, None] + np.arange(size)

    def _codes(self, address, rows, stride, cols, fmt):
        raw = np.ascontiguousarray(self.sram[self._places(address, rows, stride, cols, fmt)])
        return raw.view(f"<u{SPECS[fmt].storage_bits // 8}")

    def _put(self, address, stride, codes, fmt):
        rows, cols = codes.shape
        raw = np.ascontiguousarray(codes, f"<u{SPECS[fmt].storage_bits // 8}").view(np.uint8)
        for row, places in zip(raw, self._places(address, rows, stride, cols, fmt), strict=True):
            self.sram[places] = row

    # Commands.

    def _weights(self, o):
        """BF16 codes [n, k] of a MATMUL."""
        cols, n, k = self.config.cols, o["n"], o["k"]
        groups = -(-k // 8)
        if o["stream"]:
            rows = [self.stream.popleft() for _ in range(-(-n // cols) * groups)]
            lines = np.stack(rows).reshape(-1, groups, cols, LINE_BYTES).swapaxes(1, 2)
            lines = lines.reshape(-1, groups, LINE_BYTES)[:n]
        else:
            column, group = np.arange(n)[:, None], np.arange(groups)
            tile, base = column // cols, 0
            if o["paged"]:
                tokens = 1 << o["block_log2"]
                if o["page_k"]:
                    base, group = (
                        self.table[o["table"] + group * 8 // tokens],
                        group % (tokens // 8),
                    )
                else:
                    base = self.table[o["table"] + tile * cols // tokens]
                    tile = tile % (tokens // cols)
            row = base + o["weight_addr"] + tile * o["weight_nstride"] + group * o["weight_gstride"]
            lines = self.kv[row, column % cols]
        return unpack_codes(lines, Format.BF16)[:, :k]

    def _matmul(self, o):
        act = self._codes(
            o["act_addr"], o["m"], LINE_BYTES * o["act_stride"], o["k"], Format(o["act_format"])
        )
        assert o["act_format"] == o["weight_format"] == Format.BF16
        init = None
        if o["init"] == isa.Init.BIAS:
            init = fp32.from_bits(self._codes(o["bias_addr"], 1, 0, o["n"], Format.FP32))[0]
        out = matmul(
            act, None, Format.BF16, self._weights(o), None, Format.BF16, self.config.rows, init
        )
        fmt = Format.BF16 if o["out_bf16"] else Format.FP32
        codes = to_bf16_codes(out) if o["out_bf16"] else fp32.bits(out)
        self._put(o["out_addr"], LINE_BYTES * o["out_stride"], codes, fmt)

    def _vector(self, o):
        rows, cols = o["rows"], o["cols"]
        operands = {}
        for name in "abd":
            kind = isa.Kind.VECTOR if name == "a" else o[f"{name}_kind"]
            address, value = o[f"{name}_addr"], None
            if kind == isa.Kind.IMMEDIATE:
                value = fp32.from_bits(np.uint32(address))
            elif kind != isa.Kind.NONE:
                row = kind == isa.Kind.ROW
                fmt = Format.FP32 if row else Format(o[f"{name}_format"])
                stride = 4 * o[f"{name}_stride"]
                value = load(self._codes(address, rows, stride, 1 if row else cols, fmt), fmt)
            operands[name] = value
        flags = ("clamp_hi", "clamp_lo", "mul", "add", "mul2", "mask", "mask_lo_step")
        flags += ("mask_hi_step",)
        out, reduced = vector(
            **operands,
            lanes=self.config.lanes,
            permute=o["permute"],
            clamp=fp32.from_bits(np.uint32(o["clamp"])),
            op1=isa.Op1(o["op1"]).name.lower(),
            function=isa.Function(o["function"]).name.lower(),
            reduce=isa.Reduce(o["reduce"]).name.lower(),
            mask_lo=o["mask_lo"],
            mask_hi=o["mask_hi"],
            **{name: bool(o[name]) for name in flags},
            **{name: SELECT[o[name]] for name in ("s1", "s2", "s3", "s4")},
        )
        if o["store"]:
            fmt = Format(o["out_format"])
            codes, scales = store(out, fmt)
            assert scales is None
            self._put(o["out_addr"], 4 * o["out_stride"], codes, fmt)
        if reduced is not None:
            self._put(o["reduce_addr"], 0, fp32.bits(reduced)[None], Format.FP32)

    def _topk(self, o):
        def floats(name):
            return fp32.from_bits(self._codes(o[name], 1, 0, o["count"], Format.FP32))[0]

        bias = floats("bias_addr") if o["use_bias"] else None
        ids, scores, _ = choose(floats("score_addr"), o["k"], bias=bias)
        self._put(o["ids_addr"], 0, ids[None], Format.FP32)
        self._put(o["scores_addr"], 0, scores.view(np.uint32)[None], Format.FP32)

    def _dma(self, o):
        assert not o["scaled"]
        size = LINE_BYTES * o["lines"]
        kv = o["direction"] == isa.Direction.HBM_TO_KV
        near = self.kv.reshape(-1) if kv else self.sram
        for r in range(o["rows"]):
            far = self.hbm[o["hbm_addr"] + r * o["hbm_stride"] :][:size]
            at = o["local_addr"] * (LINE_BYTES if kv else 1) + r * LINE_BYTES * o["local_stride"]
            if o["direction"] == isa.Direction.SRAM_TO_HBM:
                far[:] = near[at : at + size]
            else:
                near[at : at + size] = far

    def _stream(self, o):
        assert not o["scaled"]
        size = LINE_BYTES * self.config.cols
        lines = self.hbm[o["hbm_addr"] :][: size * o["rows"]].copy()
        self.stream.extend(lines.reshape(-1, self.config.cols, LINE_BYTES))

    def _kvappend(self, o):
        dim, slot, cols = o["head_dim"], o["slot"], self.config.cols
        assert o["format"] == Format.BF16
        lines = self.kv.view("<u2")
        for use, source, base, place in (
            ("keys", "k_addr", "k_base", key_place),
            ("values", "v_addr", "v_base", value_place),
        ):
            if o[use]:
                row, bank, element = place(slot, np.arange(dim), dim, cols)
                if use == "values" and slot % 8 == 0 and not o["wrapped"]:
                    lines[row + o[base], bank] = 0
                codes = self._codes(o[source], 1, 0, dim, Format.BF16)[0]
                lines[row + o[base], bank, element] = codes

    def _blocktable(self, o):
        words = self._codes(o["addr"], 1, 0, o["count"], Format.FP32)[0]
        self.table[o["table"] : o["table"] + o["count"]] = words
