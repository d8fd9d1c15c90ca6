// SPDX-License-Identifier: Apache-2.0
// Stand-in for liblz4 where it is not installed: the two functions that Verilator's FST writer calls. It writes
// valid LZ4 blocks that hold literals only, so wave files are larger, and any viewer reads them.
#pragma once

#include <cstring>

static inline int LZ4_compressBound(int size) { return size + size / 255 + 16; }

// Returns the size of the block, or 0 when it does not fit into `capacity`.
static inline int LZ4_compress_default(const char* source, char* target, int size, int capacity) {
    if (capacity < LZ4_compressBound(size)) return 0;
    char* out = target;
    if (size < 15) {
        *out++ = static_cast<char>(size << 4);
    } else {
        *out++ = static_cast<char>(15 << 4);
        int rest = size - 15;
        for (; rest >= 255; rest -= 255) *out++ = static_cast<char>(255);
        *out++ = static_cast<char>(rest);
    }
    std::memcpy(out, source, size);
    return static_cast<int>(out - target) + size;
}
