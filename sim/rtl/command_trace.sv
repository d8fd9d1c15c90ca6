// SPDX-License-Identifier: Apache-2.0
// Recorder of a tile's trace port (hw/trace.py): writes what happens to a file when +trace<ID>=file is given.
//
// One line per event, in hexadecimal: `S cycle` a run starts, `B cycle index pc word0 .. word3 base` a beat is executed,
// `T cycle engines` and `D cycle engines` commands are taken and done. In a cycle, D comes before T.
module command_trace #(
    parameter ID = 0,
    parameter ENGINES = 8,
    parameter PC_BITS = 17
) (
    input wire clk,
    input wire [163+PC_BITS+2*ENGINES:0] trace
);
    localparam BEAT = 1 + 2 * ENGINES;
    localparam WORDS = BEAT + 3 + PC_BITS;
    string file;
    integer fd = 0;
    reg [31:0] cycle = 0;
    initial if ($value$plusargs($sformatf("trace%0d=%%s", ID), file)) fd = $fopen(file, "w");

    wire started = trace[0];
    wire [ENGINES-1:0] taken = trace[1 +: ENGINES];
    wire [ENGINES-1:0] done = trace[1 + ENGINES +: ENGINES];
    always @(posedge clk) begin
        cycle <= cycle + 1;
        if (fd != 0 && (started || |taken || |done || trace[BEAT])) begin
            if (started) $fdisplay(fd, "S %h", cycle);
            if (|done) $fdisplay(fd, "D %h %h", cycle, done);
            if (|taken) $fdisplay(fd, "T %h %h", cycle, taken);
            if (trace[BEAT])
                $fdisplay(fd, "B %h %h %h %h %h %h %h %h", cycle, trace[BEAT + 1 +: 2], trace[BEAT + 3 +: PC_BITS],
                    trace[WORDS +: 32], trace[WORDS + 32 +: 32], trace[WORDS + 64 +: 32], trace[WORDS + 96 +: 32],
                    trace[WORDS + 128 +: 32]);
            $fflush(fd);
        end
    end
endmodule
