// SPDX-License-Identifier: Apache-2.0
// Simulation model of one HBM slice: AXI4 slave ports on one memory, with latency, rate and pauses.
//
// Payloads are packed as hw/ports.py's Axi4 packs them (first field in the low bits). With several ports, port p's
// beat b is bytes (b * PORTS + p) * PORT_BYTES of the slice: the ports take its address space in turn.
//
// Rate: each transferred beat costs PORT_BYTES out of a bucket that RATE_NUM / RATE_DEN bytes per cycle flow into;
// reads and writes of all ports share it. Whole beats count, whatever their strobes. The rate is net of
// refresh; REFRESH_CYCLES of every REFRESH_PERIOD cycles can be made a pause to see bursts of waiting.
// Latency: LATENCY cycles from the handshake of AR to the first data beat being valid, and from the last
// W handshake to B.
//
// Contents: +hbm<ID>=file, $readmemh of 16-byte words, or the array `words`.
// Errors: beats in [err_lo, err_hi) of the slice's bytes answer SLVERR, beyond BYTES DECERR; such writes are dropped.
// Stalls: `stall` / 256 is the probability that a channel pauses in a cycle.
module hbm_slice #(
    parameter ID = 0,
    parameter PORTS = 1,
    parameter PORT_BYTES = 16,
    parameter [63:0] BYTES = 64 * 1024 * 1024,
    parameter LATENCY = 160,
    parameter RATE_NUM = 16,
    parameter RATE_DEN = 1,
    parameter REFRESH_PERIOD = 0,
    parameter REFRESH_CYCLES = 0,
    parameter [63:0] SEED = 64'h1234_5678_9abc_def1
) (
    input  wire                              clk,
    input  wire                              rst,
    input  wire [7:0]                        stall,
    input  wire [32:0]                       err_lo,
    input  wire [32:0]                       err_hi,
    input  wire [PORTS-1:0]                  ar_valid,
    output reg  [PORTS-1:0]                  ar_ready,
    input  wire [PORTS*46-1:0]               ar_payload,
    output reg  [PORTS-1:0]                  r_valid,
    input  wire [PORTS-1:0]                  r_ready,
    output reg  [PORTS*(8*PORT_BYTES+4)-1:0] r_payload,
    input  wire [PORTS-1:0]                  aw_valid,
    output reg  [PORTS-1:0]                  aw_ready,
    input  wire [PORTS*46-1:0]               aw_payload,
    input  wire [PORTS-1:0]                  w_valid,
    output reg  [PORTS-1:0]                  w_ready,
    input  wire [PORTS*(9*PORT_BYTES+1)-1:0] w_payload,
    output reg  [PORTS-1:0]                  b_valid,
    input  wire [PORTS-1:0]                  b_ready,
    output reg  [PORTS*3-1:0]                b_payload
);
    localparam DATA_BITS = 8 * PORT_BYTES;
    localparam R_BITS = DATA_BITS + 4;
    localparam W_BITS = 9 * PORT_BYTES + 1;
    localparam BEAT_WORDS = PORT_BYTES / 16;
    localparam [63:0] WORDS = BYTES / 16;
    localparam DEPTH = 128;  // bursts that may be queued per port and direction
    localparam COST = PORT_BYTES * RATE_DEN;
    localparam BUCKET = 4 * PORTS * COST + RATE_NUM;
    localparam [1:0] OKAY = 0, SLVERR = 2, DECERR = 3;

    reg [127:0] words [0:WORDS-1] /*verilator public_flat_rw*/;

    string file;
    initial if ($value$plusargs($sformatf("hbm%0d=%%s", ID), file)) $readmemh(file, words);

    // Queues of accepted bursts (rings), and of write answers.
    reg [31:0] read_addr [0:PORTS-1][0:DEPTH-1];
    reg [8:0]  read_beats [0:PORTS-1][0:DEPTH-1];
    reg        read_id [0:PORTS-1][0:DEPTH-1];
    longint    read_due [0:PORTS-1][0:DEPTH-1];
    reg [31:0] write_addr [0:PORTS-1][0:DEPTH-1];
    reg        write_id [0:PORTS-1][0:DEPTH-1];
    reg [2:0]  answer [0:PORTS-1][0:DEPTH-1];
    longint    answer_due [0:PORTS-1][0:DEPTH-1];
    int        read_head [0:PORTS-1], read_count [0:PORTS-1], read_done [0:PORTS-1];
    int        write_head [0:PORTS-1], write_count [0:PORTS-1], write_done [0:PORTS-1];
    int        answer_head [0:PORTS-1], answer_count [0:PORTS-1];
    reg [1:0]  write_resp [0:PORTS-1];

    longint cycle;
    longint bucket;
    longint phase;
    int     turn;  // the port that is served first
    bit     writes_first;
    reg [63:0] random;

    // The byte of the slice at byte `address` of port `p`.
    function automatic longint place(input longint address, input int p);
        place = (address / PORT_BYTES * PORTS + longint'(p)) * PORT_BYTES;
    endfunction

    function automatic [1:0] response(input longint where);
        if (where >= longint'(BYTES)) response = DECERR;
        else if (where >= longint'({31'b0, err_lo}) && where < longint'({31'b0, err_hi})) response = SLVERR;
        else response = OKAY;
    endfunction

    function automatic [63:0] step(input [63:0] state);
        reg [63:0] s;
        s = state;
        s = s ^ (s << 13);
        s = s ^ (s >> 7);
        step = s ^ (s << 17);
    endfunction

    // Everything happens at the clock edge, in one order, so that the model is the same in every simulator. Readies
    // are registered: a ready W port has paid for its beat.
    always @(posedge clk) begin
        if (rst) begin
            ar_ready <= 0; aw_ready <= 0; w_ready <= 0; r_valid <= 0; b_valid <= 0;
            cycle = 0; bucket = 0; phase = 0; turn = 0; writes_first = 0; random = SEED + 64'(ID);
            if (random == 0) random = 1;
            for (int p = 0; p < PORTS; p++) begin
                read_head[p] = 0; read_count[p] = 0; read_done[p] = 0;
                write_head[p] = 0; write_count[p] = 0; write_done[p] = 0;
                answer_head[p] = 0; answer_count[p] = 0; write_resp[p] = OKAY;
            end
        end else begin
            cycle = cycle + 1;
            phase = (REFRESH_PERIOD != 0 && phase + 1 >= REFRESH_PERIOD) ? 0 : phase + 1;
            bucket = bucket + RATE_NUM;
            if (bucket > BUCKET) bucket = BUCKET;

            for (int p = 0; p < PORTS; p++) begin
                // What was handed over at this edge.
                if (ar_valid[p] && ar_ready[p]) begin
                    int slot;
                    slot = (read_head[p] + read_count[p]) % DEPTH;
                    read_addr[p][slot] = ar_payload[p*46 +: 32];
                    read_id[p][slot] = ar_payload[p*46 + 32];
                    read_beats[p][slot] = {1'b0, ar_payload[p*46 + 33 +: 8]} + 9'd1;
                    read_due[p][slot] = cycle + LATENCY - 1;
                    read_count[p] = read_count[p] + 1;
                end
                if (aw_valid[p] && aw_ready[p]) begin
                    int slot;
                    slot = (write_head[p] + write_count[p]) % DEPTH;
                    write_addr[p][slot] = aw_payload[p*46 +: 32];
                    write_id[p][slot] = aw_payload[p*46 + 32];
                    write_count[p] = write_count[p] + 1;
                end
                if (w_ready[p] && !w_valid[p]) bucket = bucket + COST;
                if (w_valid[p] && w_ready[p]) begin
                    longint where;
                    reg [1:0] resp;
                    where = place(longint'({32'b0, write_addr[p][write_head[p]]})
                                  + longint'(write_done[p]) * PORT_BYTES, p);
                    resp = response(where);
                    if (resp > write_resp[p]) write_resp[p] = resp;
                    if (resp == OKAY)
                        for (int i = 0; i < PORT_BYTES; i++)
                            if (w_payload[p*W_BITS + DATA_BITS + i])
                                words[(where + longint'(i)) / 16][(i % 16) * 8 +: 8]
                                    = w_payload[p*W_BITS + i*8 +: 8];
                    write_done[p] = write_done[p] + 1;
                    if (w_payload[p*W_BITS + W_BITS - 1]) begin
                        int slot;
                        slot = (answer_head[p] + answer_count[p]) % DEPTH;
                        answer[p][slot] = {write_resp[p], write_id[p][write_head[p]]};
                        answer_due[p][slot] = cycle + LATENCY - 1;
                        answer_count[p] = answer_count[p] + 1;
                        write_resp[p] = OKAY;
                        write_done[p] = 0;
                        write_head[p] = (write_head[p] + 1) % DEPTH;
                        write_count[p] = write_count[p] - 1;
                    end
                end

                // Readies of the address channels for the next edge, and write answers.
                random = step(random);
                ar_ready[p] <= read_count[p] < DEPTH - 1 && random[7:0] >= stall;
                aw_ready[p] <= write_count[p] < DEPTH - 1 && answer_count[p] < DEPTH / 2
                               && random[15:8] >= stall;
                if (!b_valid[p] || b_ready[p]) begin
                    b_valid[p] <= 0;
                    if (answer_count[p] != 0 && answer_due[p][answer_head[p]] <= cycle
                            && random[23:16] >= stall) begin
                        b_valid[p] <= 1;
                        b_payload[p*3 +: 3] <= answer[p][answer_head[p]];
                        answer_head[p] = (answer_head[p] + 1) % DEPTH;
                        answer_count[p] = answer_count[p] - 1;
                    end
                end
            end

            // Data beats, as far as the bucket goes; ports and directions take turns to be first.
            for (int n = 0; n < 2 * PORTS; n++) begin
                int p;
                bit writing;
                p = (turn + n / 2) % PORTS;
                writing = (n % 2 == 0) == writes_first;
                if (writing) begin
                    w_ready[p] <= 0;
                    if (write_count[p] != 0 && w_valid[p] && bucket >= COST
                            && answer_count[p] < DEPTH - 2 && random[31:24] >= stall
                            && phase >= REFRESH_CYCLES) begin
                        w_ready[p] <= 1;
                        bucket = bucket - COST;
                    end
                end else if (!r_valid[p] || r_ready[p]) begin
                    r_valid[p] <= 0;
                    if (read_count[p] != 0 && read_due[p][read_head[p]] <= cycle && bucket >= COST
                            && random[39:32] >= stall && phase >= REFRESH_CYCLES) begin
                        longint where;
                        reg [1:0] resp;
                        reg last;
                        where = place(longint'({32'b0, read_addr[p][read_head[p]]})
                                      + longint'(read_done[p]) * PORT_BYTES, p);
                        resp = response(where);
                        last = read_done[p] + 1 == int'({23'b0, read_beats[p][read_head[p]]});
                        for (int i = 0; i < BEAT_WORDS; i++)
                            r_payload[p*R_BITS + i*128 +: 128]
                                <= resp == OKAY ? words[where / 16 + longint'(i)] : '0;
                        r_payload[p*R_BITS + DATA_BITS +: 4]
                            <= {last, resp, read_id[p][read_head[p]]};
                        r_valid[p] <= 1;
                        bucket = bucket - COST;
                        read_done[p] = read_done[p] + 1;
                        if (last) begin
                            read_done[p] = 0;
                            read_head[p] = (read_head[p] + 1) % DEPTH;
                            read_count[p] = read_count[p] - 1;
                        end
                    end
                end
                random = step(random);
            end
            turn = (turn + 1) % PORTS;
            writes_first = !writes_first;
        end
    end
endmodule
