// SPDX-License-Identifier: Apache-2.0
// SRAM macro, one port: the synthesisable default that a memory compiler's cell replaces.
// Reads when no write_en bit is set; read_data is held until the next read.
module jalapeno_sram_1rw #(
    parameter WIDTH = 8,
    parameter DEPTH = 2,
    parameter GRANULARITY = WIDTH
) (
    input  wire                         clk,
    input  wire                         en,
    input  wire [WIDTH/GRANULARITY-1:0] write_en,
    input  wire [$clog2(DEPTH)-1:0]     addr,
    input  wire [WIDTH-1:0]             write_data,
    output reg  [WIDTH-1:0]             read_data
);
    reg [WIDTH-1:0] mem [0:DEPTH-1];
    integer i;
    always @(posedge clk) begin
        if (en) begin
            if (|write_en) begin
                for (i = 0; i < WIDTH / GRANULARITY; i = i + 1)
                    if (write_en[i])
                        mem[addr][i*GRANULARITY +: GRANULARITY] <= write_data[i*GRANULARITY +: GRANULARITY];
            end else
                read_data <= mem[addr];
        end
    end
endmodule
