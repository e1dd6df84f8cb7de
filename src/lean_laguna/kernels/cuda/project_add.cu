// Project and add to the residual: hidden += x @ weight^T, rounded before the sum; weights streamed once.
//
// -D: K, N, COLS as in project.cu; WARPS that share a row; RING blocks of 32 columns on their way, at most PACE of them
// while the inputs are awaited; AHEAD such blocks of x, several rows of it; they divide a warp's part of K. GROUPS programs
// take the same weights, each COLS tokens of its own, at about the same time: memory is read once for all of them.
// One program owns 16 weight rows: the grid is N / 16 * GROUPS. They are the 16 rows of the matrix instruction here, and tokens
// its columns. Each warp takes its own part of K; x comes straight from L2, a lone row by way of shared memory.
#include "common.cuh"

#define PART (K / WARPS)
#define BLOCKS (PART / 32)
#define STAGED (COLS == 1)
#define EIGHTS ((COLS + 7) / 8)
#define ITEM (WARPS * 256)
#ifndef GROUPS
#define GROUPS 1
#endif
// Sums that a thread adds up over the warps.
#define OWN_SUMS ((COLS * 16 + WARPS * 32 - 1) / (WARPS * 32))

KERNEL(WARPS * 32, COLS == 1 ? 3 : 1)
project_add(const u16 *x, const u16 *weight, u16 *hidden, u16 *tap, const int *num_rows, int x_stride,
            int hidden_stride, int tap_stride) {
    EXTERN_SHARED(u16, ring);
    float *sums = (float *)(ring + RING * 2 * ITEM);
    u16 *row = (u16 *)(sums + WARPS * COLS * 16);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const u32 first_n = blockIdx.x / GROUPS * 16, first_row = blockIdx.x % GROUPS * COLS;
    const u16 *own = weight + (size_t)(first_n + g) * K + warp * PART + 8 * t, *own8 = own + 8 * K;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    stamp(STARTED);
    u16 *slots = ring + thread * 8;
    const int live = load_fresh32(num_rows) - (int)first_row;
    // No more at once than the memory needs to stay busy: what others ask for meanwhile waits behind all of it.
#pragma unroll
    for (int j = 0; j < RING; j++) {
        if (j == PACE) let_next_start();
        if (j >= PACE) wait_for_stream<2 * (PACE - 1)>();
        stream(slots + j * 2 * ITEM, own + j * 32, true);
        stream(slots + j * 2 * ITEM + ITEM, own8 + j * 32, true);
    }
    if (PACE >= RING) let_next_start();
    stamp(ASKED);
    wait_for_inputs();
    stamp(WAITED);
    const u16 *x_at = x + (size_t)(first_row + g) * x_stride + warp * PART + 8 * t;
    uint4 b[EIGHTS][AHEAD];
    u16 *own_row = row + warp * PART;
    if (STAGED) {
        uint4 piece[(PART + 255) / 256];
#pragma unroll
        for (int k = 0; k < PART; k += 256)
            if (k + lane * 8 < PART) piece[k / 256] = load_fresh(x + warp * PART + k + lane * 8);
#pragma unroll
        for (int k = 0; k < PART; k += 256)
            if (k + lane * 8 < PART) *(uint4 *)(own_row + k + lane * 8) = piece[k / 256];
        __syncwarp();
    } else {
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
#pragma unroll
            for (int h = 0; h < EIGHTS; h++)
                b[h][j] = g + 8 * h < live ? load_fresh(x_at + (size_t)(8 * h) * x_stride + j * 32) : zero;
    }
    stamp(PREPARED);
    const int n = first_n + thread % 16;
    float old[OWN_SUMS];
#pragma unroll
    for (int i = 0; i < OWN_SUMS; i++) {
        const int token = thread / 16 + i * WARPS * 2;
        const bool writes = token < live && token < COLS;
        old[i] = writes ? from_bf16(load_fresh16(hidden + (size_t)(first_row + token) * hidden_stride + n)) : 0.0f;
    }
    float even[EIGHTS][4] = {}, odd[EIGHTS][4] = {};
    int slot = 0;
#pragma unroll 1
    for (int first = 0; first < BLOCKS; first += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = first + i, next = k + RING;
            u16 *at = slots + slot * 2 * ITEM;
            wait_for_stream<2 * (RING - 1)>();
            const uint4 w = *(const uint4 *)at, w8 = *(const uint4 *)(at + ITEM);
#pragma unroll
            for (int h = 0; h < EIGHTS; h++) {
                if (STAGED) b[h][i] = g == 0 ? *(const uint4 *)(own_row + k * 32 + 8 * t) : zero;
                multiply_block(even[h], odd[h], w, w8, b[h][i]);
            }
            stream(at, own + next * 32, next < BLOCKS);
            stream(at + ITEM, own8 + next * 32, next < BLOCKS);
            if (!STAGED && k + AHEAD < BLOCKS)
#pragma unroll
                for (int h = 0; h < EIGHTS; h++)
                    b[h][i] = g + 8 * h < live
                                  ? load_fresh(x_at + (size_t)(8 * h) * x_stride + (k + AHEAD) * 32)
                                  : zero;
            slot = slot + 1 == RING ? 0 : slot + 1;
        }
    }
#pragma unroll
    for (int h = 0; h < EIGHTS; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = 8 * h + 2 * t + (i & 1);
            if (column < COLS) sums[(warp * COLS + column) * 16 + g + (i < 2 ? 0 : 8)] = even[h][i] + odd[h][i];
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN_SUMS; i++) {
        const int token = thread / 16 + i * WARPS * 2;
        if (token >= live || token >= COLS) continue;
        float y = 0.0f;
        for (int w = 0; w < WARPS; w++) y += sums[(w * COLS + token) * 16 + thread % 16];
        const u16 result = to_bf16(old[i] + rounded(y));
        hidden[(size_t)(first_row + token) * hidden_stride + n] = result;
        if (tap) tap[(size_t)(first_row + token) * tap_stride + n] = result;
    }
    stamp(ENDED);
}
