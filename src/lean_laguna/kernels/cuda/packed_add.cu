// project_add.cu with packed weights: hidden += x @ weight^T, rounded before the sum; weights streamed once.
//
// -D: K, N, COLS, WARPS, PROGRAMS as in project_add.cu; FORMAT and TALL of packed.cuh; PACE warps whose weights are on
// their way at first. One program owns 16 weight rows, which are the 16 rows of the matrix instruction: the grid is N / 16.
// Each warp takes its own part of K and asks for all of its weights at once; x comes straight from L2, a lone row by way of
// shared memory.
#include "packed.cuh"

#define PART (K / WARPS)
#define STAGED (COLS == 1)
// A lone row of FP8 is loaded by the lanes of its column alone.
#define SPARES (STAGED && FORMAT == FP8)
#define HALVES (COLS > 8 ? 2 : 1)
#define BLOCKS (PART / 32)
#define AHEAD (BLOCKS % 4 || HALVES > 1 ? 2 : 4)

KERNEL(WARPS * 32, PROGRAMS)
packed_add(const u16 *x, const u8 *weight, const u8 *scales, const float *factors, u16 *hidden, u16 *tap,
           const int *num_rows, int x_stride, int hidden_stride, int tap_stride) {
    using Own = Pair16<FORMAT, K, WARPS, false>;
    EXTERN_SHARED(u8, slots);
    float *sums = (float *)(slots + WARPS * Own::BYTES);
    u16 *row = (u16 *)(sums + WARPS * COLS * SUM_STRIDE);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    u64 *arrivals = (u64 *)(row + (STAGED ? K : 0)), *arrival = arrivals + warp;
    u8 *slot = slots + warp * Own::BYTES;
    const uint4 zero = make_uint4(0, 0, 0, 0);

    stamp(STARTED);
    if (thread == 0) {
        for (int i = 0; i < WARPS; i++) init_arrival(arrivals + i);
        show_arrivals();
    }
    __syncthreads();
    if (lane == 0) {
        // What attention asks for meanwhile must not wait behind all of these.
        if (warp >= PACE) wait_for_bytes(arrival - PACE, 0);
        Own::ask(slot, weight, scales, blockIdx.x, warp, arrival);
    }
    __syncwarp();
    const int live = min(load_fresh32(num_rows), COLS);
    let_next_start();
    stamp(ASKED);
    const u16 *x_at = x + (size_t)g * x_stride + warp * PART + 8 * t;
    u16 *own_row = row + warp * PART;
    uint4 b[HALVES][AHEAD];
    if (SPARES) leave_open(b[0]);
    float even[HALVES][4] = {}, odd[HALVES][4] = {};
    const int token = thread / 16, n = blockIdx.x * 16 + thread % 16;
    const bool writes = token < live;
    u16 *out = hidden + (size_t)token * hidden_stride + n;
    const float factor = FORMAT == FP4 ? factors[2 * blockIdx.x + thread % 16 / 8] : 1.0f;
    wait_for_inputs();
    stamp(WAITED);
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
    const float old = writes ? from_bf16(load_fresh16(out)) : 0.0f;
    stamp(PREPARED);
    wait_for_bytes(arrival, 0);
#pragma unroll(STAGED ? 4 : 1)
    for (int first = 0; first < BLOCKS; first += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i += 2) {
            const int k = first + i;
            uint4 w[2];
            Scales<FORMAT> by[2];
            Own::take(w, by, slot, k / 2, warp, lane);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const uint4 a = Own::chunk(w, by, 0, c), a8 = Own::chunk(w, by, 1, c);
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    // Of a token that there is not, anything: columns keep apart.
                    uint4 &own = b[h][SPARES ? c : i + c];
                    if (SPARES)
                        load_if(own, own_row + (k + c) * 32 + 8 * t, g == 0);
                    else if (STAGED)
                        own = *(const uint4 *)(own_row + (k + c) * 32 + 8 * t);
                    multiply_block(even[h], odd[h], a, a8, own);
                    if (!STAGED && k + c + AHEAD < BLOCKS)
                        own = g + 8 * h < live ? load_fresh(x_at + (size_t)(8 * h) * x_stride + (k + c + AHEAD) * 32) : zero;
                }
            }
        }
    }
    leave_sums<COLS, HALVES>(sums + warp * COLS * SUM_STRIDE, even, odd);
    __syncthreads();
    if (writes) {
        float y = 0.0f;
        for (int w = 0; w < WARPS; w++) y += sums[(w * COLS + token) * SUM_STRIDE + thread % 16];
        y *= factor;
        const u16 result = to_bf16(old + rounded(y));
        *out = result;
        if (tap) tap[(size_t)token * tap_stride + n] = result;
    }
    stamp(ENDED);
}
