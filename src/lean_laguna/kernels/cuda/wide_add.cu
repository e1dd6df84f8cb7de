// Project and add to the residual in steps of more than 16 rows: the sums of project_add.cu, shared out otherwise.
//
// -D: K, N; CLUSTER 4; COLS tokens of a cluster, 32 or 64; GROUPS clusters that take the same weights, each tokens of its
// own, at about the same time; RING stages of 64 columns, one of which is free.
// Of many tokens x is more than a program's weights, and all of it comes through L2. So the programs of a cluster share
// 64 weight rows: each has two of the eight parts of K, whose tokens pass through its shared memory beside the weights. A
// warp has 16 rows of one part. Each program then adds up 16 of the rows over the parts, in their order.
// No program leaves before it has all that is handed over to it.
#include "common.cuh"

#define WARPS 8
#define PARTS 8
#define PART (K / PARTS)
#define STAGES (PART / 64)
#define EIGHTS (COLS / 8)
// Elements of a stage: 64 rows of weights, and tokens, of two parts each.
#define WEIGHTS (2 * 64 * 64)
#define TOKENS (2 * COLS * 64)
#define STAGE (WEIGHTS + TOKENS)
// Sums of a row, by token, and two more, so that threads of one token meet no other's bank.
#define ROW_SUMS (COLS + 2)
#define OWN_SUMS (COLS * 16 / (WARPS * 32))

CLUSTER_KERNEL(200, CLUSTER)
wide_add(const u16 *x, const u16 *weight, u16 *hidden, u16 *tap, const int *num_rows, int x_stride, int hidden_stride,
         int tap_stride) {
    EXTERN_SHARED(u16, ring);
    float *inbox = (float *)(ring + RING * STAGE);
    u64 *arrival = (u64 *)(inbox + PARTS * 16 * ROW_SUMS);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, half = warp & 1, owner = warp >> 1;
    const int first_row = cluster % GROUPS * COLS, first_n = cluster / GROUPS * 64;
    const u16 *own = weight + (size_t)(first_n + owner * 16 + g) * K + (2 * rank + half) * PART + 8 * t;
    stamp(STARTED);
    // A lane copies the fragments that it multiplies.
    auto ask_weights = [&](int stage) {
        u16 *to = ring + stage % RING * STAGE + thread * 8;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (stage < STAGES) copy_passing(to + i * 2048, own + (i & 1 ? 8 * K : 0) + stage * 64 + i / 2 * 32);
    };
    if (thread == 0) {
        init_arrival(arrival);
        show_arrivals();
        expect_bytes(arrival, PARTS * 16 * COLS * (int)sizeof(float));
    }
#pragma unroll 1
    for (int stage = 0; stage < RING - 1; stage++) ask_weights(stage), end_stream_group();
    const int live = load_fresh32(num_rows) - first_row;
    __syncthreads();
    show_cluster();  // sums may be handed over
    let_next_start();
    stamp(ASKED);
    wait_for_inputs();
    stamp(WAITED);
    // Columns of a token: of every other token the two halves of 128 bytes change places, so that the eight lanes which are
    // served at once use different banks.
    auto ask_tokens = [&](int stage) {
        u16 *to = ring + stage % RING * STAGE + WEIGHTS;
#pragma unroll
        for (int i = thread; i < TOKENS / 8; i += WARPS * 32) {
            const int piece = i % 8, token = i / 8 % COLS, part = 2 * rank + i / 8 / COLS;
            const u16 *from = x + (size_t)(first_row + token) * x_stride + part * PART + stage * 64 + piece * 8;
            if (stage < STAGES) copy_async(to + i / 8 * 64 + (piece ^ (token & 1) * 4) * 8, from, token < live);
        }
    };
#pragma unroll 1
    for (int stage = 0; stage < RING - 1; stage++) ask_tokens(stage), end_stream_group();
    const int n = first_n + rank * 16 + thread % 16;
    float old[OWN_SUMS];
#pragma unroll
    for (int i = 0; i < OWN_SUMS; i++) {
        const int token = thread / 16 + i * WARPS * 2;
        old[i] = token < live ? from_bf16(load_fresh16(hidden + (size_t)(first_row + token) * hidden_stride + n)) : 0.0f;
    }
    stamp(PREPARED);
    float even[EIGHTS][4] = {}, odd[EIGHTS][4] = {};
#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) {
        wait_for_stream<RING - 2>();
        __syncthreads();  // tokens are there, and what lay in the free place has been read
        ask_weights(stage + RING - 1);
        ask_tokens(stage + RING - 1);
        end_stream_group();
        const u16 *weights = ring + stage % RING * STAGE + thread * 8;
        const u16 *tokens = ring + stage % RING * STAGE + WEIGHTS + (half * COLS + g) * 64 + 8 * t;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint4 w = *(const uint4 *)(weights + k * 4096), w8 = *(const uint4 *)(weights + k * 4096 + 2048);
#pragma unroll
            for (int h = 0; h < EIGHTS; h++)
                multiply_block(even[h], odd[h], w, w8, *(const uint4 *)(tokens + h * 512 + (k ^ (g & 1)) * 32));
        }
    }
    stamp(FIRST_DONE);
    wait_for_cluster();
    float *to = inbox + (2 * rank + half) * 16 * ROW_SUMS + 2 * t;
#pragma unroll
    for (int h = 0; h < EIGHTS; h++)
#pragma unroll
        for (int i = 0; i < 4; i += 2)
            send2((float2 *)(to + (g + 4 * i) * ROW_SUMS + 8 * h), owner,
                  make_float2(even[h][i] + odd[h][i], even[h][i + 1] + odd[h][i + 1]), arrival);
    wait_for_bytes(arrival, 0);
#pragma unroll
    for (int i = 0; i < OWN_SUMS; i++) {
        const int token = thread / 16 + i * WARPS * 2;
        if (token >= live) continue;
        float y = 0.0f;
#pragma unroll
        for (int part = 0; part < PARTS; part++) y += inbox[(part * 16 + thread % 16) * ROW_SUMS + token];
        const u16 result = to_bf16(old[i] + rounded(y));
        hidden[(size_t)(first_row + token) * hidden_stride + n] = result;
        if (tap) tap[(size_t)(first_row + token) * tap_stride + n] = result;
    }
    stamp(ENDED);
}
