// SPDX-License-Identifier: Apache-2.0
// Runs one tile's program without Python: loads the host file, starts the tile, counts cycles until
// it stops. Arguments: +words=N lines of the host file, +limit=CYCLES, and those of the models.
// Prints the cycles simulated, the cycles of the program, and the loop's
// seconds of processor time.
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>

#include "Vtop.h"
#include "verilated.h"

static uint64_t argument(VerilatedContext& context, const char* name) {
    const std::string found = context.commandArgsPlusMatch(name);
    const size_t equals = found.find('=');
    return equals == std::string::npos ? 0 : std::strtoull(found.c_str() + equals + 1, nullptr, 10);
}

int main(int argc, char** argv) {
    const auto context = std::make_unique<VerilatedContext>();
    context->commandArgs(argc, argv);
    const auto top = std::make_unique<Vtop>(context.get());
    const uint64_t words = argument(*context, "words="), limit = argument(*context, "limit=");
    uint64_t cycles = 0;
    const auto tick = [&] {
        top->clk = 1;
        top->eval();
        top->clk = 0;
        top->eval();
        ++cycles;
    };
    const std::clock_t start = std::clock();  // processor time
    top->clk = 0;
    top->rst = 1;
    top->stall = 0;
    top->load_go = 0;
    top->host_valid = 0;
    for (int i = 0; i < 4; ++i) tick();
    top->rst = 0;
    tick();
    top->load_first = 0;
    top->load_count = words;
    top->load_go = 1;
    tick();
    top->load_go = 0;
    tick();
    while (top->load_busy && cycles < limit) tick();
    for (int i = 0; i < 8; ++i) tick();
    top->host_write = 1;
    top->host_address = 0;
    for (int i = 0; i < 4; ++i) top->host_data[i] = i == 0;  // start at beat 0, no limit
    top->host_scale = 127;
    top->host_valid = 1;
    while (!top->host_ready && cycles < limit) tick();
    tick();
    top->host_valid = 0;
    const uint64_t before = cycles;
    for (int i = 0; i < 8; ++i) tick();
    while (top->running && cycles < limit) tick();
    const double taken = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    std::printf("%llu %llu %.6f\n", static_cast<unsigned long long>(cycles),
                static_cast<unsigned long long>(cycles - before), taken);
    top->final();
    return cycles < limit ? 0 : 1;
}
