// SPDX-License-Identifier: Apache-2.0
// Simulation model of a host that fills a tile's memories: writes lines from a file, one per cycle if it can.
//
// +host<ID>=file, $readmemh of 168-bit words: address in bits 31..0, line in 159..32, scale in 167..160. `go` for one
// cycle starts writing `count` words from word `first`; `busy` is high until the last one has been taken.
module host_loader #(
    parameter ID = 0,
    parameter WORDS = 1 << 19
) (
    input  wire         clk,
    input  wire         rst,
    input  wire         go,
    input  wire [31:0]  first,
    input  wire [31:0]  count,
    output reg          busy,
    output wire         valid,
    input  wire         ready,
    output wire [167:0] word
);
    reg [167:0] words [0:WORDS-1];
    reg [31:0] next, last;
    string file;
    initial if ($value$plusargs($sformatf("host%0d=%%s", ID), file)) $readmemh(file, words);

    assign valid = busy;
    assign word = words[next[$clog2(WORDS)-1:0]];
    always @(posedge clk) begin
        if (rst) busy <= 0;
        else if (go) begin
            busy <= count != 0;
            next <= first;
            last <= first + count - 1;
        end else if (busy && ready) begin
            busy <= next != last;
            next <= next + 1;
        end
    end
endmodule
