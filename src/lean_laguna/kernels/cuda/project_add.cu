// Project and add to the residual: hidden += x @ weight^T, rounded before the sum; weights streamed once.
//
// -D: K, N, COLS, FORMAT, TALL as in project.cu; WARPS that share a row; RING steps of weights on their way, of 32
// columns or, packed, 64; AHEAD blocks of 32 columns of x, several rows of it; they divide a warp's part of K.
// One program owns 16 weight rows: the grid is N / 16. They are the 16 rows of the matrix instruction here, and tokens
// its columns. Each warp takes its own part of K; x comes straight from L2, a lone row by way of shared memory.
#include "packed.cuh"

#define PART (K / WARPS)
#define BLOCKS (PART / 32)
#define STAGED (COLS == 1)
#define HALVES (COLS > 8 ? 2 : 1)

// Chunk c of a step's columns: the first 8 rows, or the 8 below.
template <int KIND> DEVICE uint4 chunk_of_rows(const uint4 (&w)[2], const u32 (&by)[2], int half, int c) {
    return bits_of(KIND) == 4 ? decoded<KIND>(w[0], by[0], 2 * half + c) : decoded<KIND>(w[half], by[half], c);
}

KERNEL(WARPS * 32, 2)
project_add(const u16 *x, const u16 *weight, const u32 *scales, const float *factor, u16 *hidden, u16 *tap,
            const int *num_rows, int x_stride, int hidden_stride, int tap_stride) {
    using Own = Pair<FORMAT, K, WARPS>;
    EXTERN_SHARED(u16, ring);
    float *sums = (float *)(ring + RING * Own::ITEMS * WARPS * 256);
    u16 *row = (u16 *)(sums + WARPS * COLS * 16);
    u32 *words = (u32 *)(row + (STAGED ? K : 0)) + threadIdx.x;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const Own own(weight, scales, blockIdx.x, warp, g, t);
    const uint4 zero = make_uint4(0, 0, 0, 0);
    stamp(STARTED);
    u16 *slot = ring + thread * 8;
#pragma unroll
    for (int j = 0; j < RING; j++) {
#pragma unroll
        for (int half = 0; half < Own::ITEMS; half++) {
            const int item = j * Own::ITEMS + half;
            stream_packed<FORMAT>(slot + item * WARPS * 256, words + item * WARPS * 32, own.codes(j, half),
                                  own.scales(j, half), true);
        }
    }
    const float by = FORMAT == FP4 ? *factor : 1.0f;
    const int live = load_fresh32(num_rows);
    let_next_start();
    stamp(ASKED);
    wait_for_inputs();
    stamp(WAITED);
    const u16 *x_at = x + (size_t)g * x_stride + warp * PART + 8 * t;
    uint4 b[HALVES][AHEAD];
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
            for (int h = 0; h < HALVES; h++)
                b[h][j] = g + 8 * h < live ? load_fresh(x_at + (size_t)(8 * h) * x_stride + j * 32) : zero;
    }
    const int token = thread / 16, n = blockIdx.x * 16 + thread % 16;
    const bool writes = token < live && token < COLS;
    u16 *out = hidden + (size_t)token * hidden_stride + n;
    const float old = writes ? from_bf16(load_fresh16(out)) : 0.0f;
    stamp(PREPARED);
    float even[HALVES][4] = {}, odd[HALVES][4] = {};
    int j = 0;
    for (int first = 0; first < BLOCKS; first += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i += Own::COLUMNS) {
            const int k = first + i, step = k / Own::COLUMNS;
            uint4 w[2];
            u32 word[2];
            wait_for_stream<Own::ITEMS * (RING - 1)>();
#pragma unroll
            for (int half = 0; half < Own::ITEMS; half++) {
                const int item = j * Own::ITEMS + half;
                w[half] = *(const uint4 *)(slot + item * WARPS * 256);
                word[half] = FORMAT == PLAIN ? 0 : words[item * WARPS * 32];
            }
#pragma unroll
            for (int c = 0; c < Own::COLUMNS; c++) {
                const uint4 w0 = chunk_of_rows<FORMAT>(w, word, 0, c), w8 = chunk_of_rows<FORMAT>(w, word, 1, c);
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    if (STAGED) b[h][i + c] = g == 0 ? *(const uint4 *)(own_row + (k + c) * 32 + 8 * t) : zero;
                    multiply_block(even[h], odd[h], w0, w8, b[h][i + c]);
                }
            }
#pragma unroll
            for (int half = 0; half < Own::ITEMS; half++) {
                const int item = j * Own::ITEMS + half;
                stream_packed<FORMAT>(slot + item * WARPS * 256, words + item * WARPS * 32,
                                      own.codes(step + RING, half), own.scales(step + RING, half),
                                      step + RING < Own::STEPS);
            }
            if (!STAGED)
#pragma unroll
                for (int c = 0; c < Own::COLUMNS; c++)
                    if (k + c + AHEAD < BLOCKS)
#pragma unroll
                        for (int h = 0; h < HALVES; h++)
                            b[h][i + c] = g + 8 * h < live ? load_fresh(x_at + (size_t)(8 * h) * x_stride +
                                                                        (k + c + AHEAD) * 32)
                                                           : zero;
            j = j + 1 == RING ? 0 : j + 1;
        }
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = 8 * h + 2 * t + (i & 1);
            if (column < COLS) sums[(warp * COLS + column) * 16 + g + (i < 2 ? 0 : 8)] = even[h][i] + odd[h][i];
        }
    __syncthreads();
    if (writes) {
        float y = 0.0f;
        for (int w = 0; w < WARPS; w++) y += sums[(w * COLS + token) * 16 + thread % 16];
        const u16 result = to_bf16(old + rounded(y * by));
        *out = result;
        if (tap) tap[(size_t)token * tap_stride + n] = result;
    }
    stamp(ENDED);
}
