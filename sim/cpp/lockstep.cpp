// SPDX-License-Identifier: Apache-2.0
// Steps a model with the ports clk, rst, stimulus and observed as its standard input says.
//
// A request is one byte (bit 0: a clock cycle, bit 1: reset) and the bytes of `stimulus`, low end
// first; the answer is the bytes of `observed`, after the cycle if there is one. Both ports have
// more than 64 bits, so they are arrays of words.

#include <unistd.h>

#include <cstddef>

#include "Vtop.h"
#include "verilated.h"

static bool fetch(char *to, size_t count) {
    while (count > 0) {
        const ssize_t got = read(0, to, count);
        if (got <= 0) return false;
        to += got;
        count -= static_cast<size_t>(got);
    }
    return true;
}

static bool answer(const char *from, size_t count) {
    while (count > 0) {
        const ssize_t put = write(1, from, count);
        if (put <= 0) return false;
        from += put;
        count -= static_cast<size_t>(put);
    }
    return true;
}

double sc_time_stamp() { return 0; }

int main(int argc, char **argv) {
    VerilatedContext context;
    context.commandArgs(argc, argv);
    Vtop top{&context};
    char flags;
    while (fetch(&flags, 1) &&
           fetch(reinterpret_cast<char *>(top.stimulus.data()), sizeof top.stimulus)) {
        top.rst = flags >> 1 & 1;
        top.eval();
        if (flags & 1) {
            top.clk = 1;
            top.eval();
            top.clk = 0;
            top.eval();
        }
        if (!answer(reinterpret_cast<const char *>(top.observed.data()), sizeof top.observed)) {
            return 1;
        }
    }
    top.final();
    return 0;
}
