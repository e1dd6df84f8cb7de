// Project and add to the residual: hidden += x @ weight^T, rounded before the sum; weights streamed once.
//
// -D: K, N, COLS, FORMAT, TALL as in project.cu; WARPS that share a row; RING steps of weights on their way, of 32
// columns or, packed, 64; AHEAD blocks of 32 columns of x.
// One program owns 16 weight rows: the grid is N / 16. x comes straight from L2, each warp its own part of K.
#include "packed.cuh"

#define PART (K / WARPS)
#define BLOCKS (PART / 32)

KERNEL(WARPS * 32, 2)
project_add(const u16 *x, const u16 *weight, const u32 *scales, const float *factor, u16 *hidden, u16 *tap,
            const int *num_rows, int x_stride, int hidden_stride, int tap_stride) {
    using Own = Pair<FORMAT, K, WARPS>;
    EXTERN_SHARED(u16, ring);
    u32 *words = (u32 *)(ring + RING * Own::ITEMS * WARPS * 256) + threadIdx.x;
    float *sums = (float *)(words - threadIdx.x + (FORMAT == PLAIN ? 0 : RING * Own::ITEMS * WARPS * 32));
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const Own own(weight, scales, blockIdx.x, warp, g, t);
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 a[AHEAD], a8[AHEAD];
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
    wait_for_inputs();
    const bool has_low = g < live, has_high = COLS > 8 && g + 8 < live;
    const u16 *x_at = x + (size_t)g * x_stride + warp * PART + 8 * t;
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        a[j] = has_low ? load_fresh(x_at + j * 32) : zero;
        a8[j] = has_high ? load_fresh(x_at + (size_t)8 * x_stride + j * 32) : zero;
    }
    const int token = thread / 16, n = blockIdx.x * 16 + thread % 16;
    const bool writes = token < live && token < COLS;
    u16 *out = hidden + (size_t)token * hidden_stride + n;
    const float old = writes ? from_bf16(load_fresh16(out)) : 0.0f;
    float even[2][4] = {}, odd[2][4] = {};
#pragma unroll
    for (int step = 0; step < Own::STEPS; step++) {
        const int j = step % RING;
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
        for (int c = 0; c < Own::COLUMNS; c++)
            multiply_chunk<FORMAT>(even, odd, a[(step * Own::COLUMNS + c) % AHEAD],
                                   a8[(step * Own::COLUMNS + c) % AHEAD], w, word, c);
#pragma unroll
        for (int half = 0; half < Own::ITEMS; half++) {
            const int item = j * Own::ITEMS + half;
            stream_packed<FORMAT>(slot + item * WARPS * 256, words + item * WARPS * 32, own.codes(step + RING, half),
                                  own.scales(step + RING, half), step + RING < Own::STEPS);
        }
#pragma unroll
        for (int c = 0; c < Own::COLUMNS; c++) {
            const int k = step * Own::COLUMNS + c, i = k % AHEAD;
            if (k + AHEAD < BLOCKS) {
                a[i] = has_low ? load_fresh(x_at + (k + AHEAD) * 32) : zero;
                a8[i] = has_high ? load_fresh(x_at + (size_t)8 * x_stride + (k + AHEAD) * 32) : zero;
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float *mine = sums + (warp * COLS + g) * 16 + half * 8 + 2 * t;
        *(float2 *)mine = make_float2(even[half][0] + odd[half][0], even[half][1] + odd[half][1]);
        if (COLS > 8)
            *(float2 *)(mine + 8 * 16) = make_float2(even[half][2] + odd[half][2], even[half][3] + odd[half][3]);
    }
    __syncthreads();
    if (writes) {
        float y = 0.0f;
        for (int w = 0; w < WARPS; w++) y += sums[(w * COLS + token) * 16 + thread % 16];
        const u16 result = to_bf16(old + rounded(y * by));
        *out = result;
        if (tap) tap[(size_t)token * tap_stride + n] = result;
    }
}
