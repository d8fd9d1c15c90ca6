// SPDX-License-Identifier: Apache-2.0
// SRAM macro, one read and one write port: the synthesisable default that a memory compiler's cell replaces.
// A read in the cycle of a write to the same word returns the word before the write.
module jalapeno_sram_1r1w #(
    parameter WIDTH = 8,
    parameter DEPTH = 2,
    parameter GRANULARITY = WIDTH
) (
    input  wire                         clk,
    input  wire [WIDTH/GRANULARITY-1:0] write_en,
    input  wire [$clog2(DEPTH)-1:0]     write_addr,
    input  wire [WIDTH-1:0]             write_data,
    input  wire                         read_en,
    input  wire [$clog2(DEPTH)-1:0]     read_addr,
    output reg  [WIDTH-1:0]             read_data
);
    reg [WIDTH-1:0] mem [0:DEPTH-1];
    integer i;
    always @(posedge clk) begin
        if (read_en) read_data <= mem[read_addr];
        if (|write_en)
            for (i = 0; i < WIDTH / GRANULARITY; i = i + 1)
                if (write_en[i])
                    mem[write_addr][i*GRANULARITY +: GRANULARITY] <= write_data[i*GRANULARITY +: GRANULARITY];
    end
endmodule
