// project.cu with packed weights: normalise and project, or silu(gate) * up of it; weights streamed once.
//
// -D: K, N, COLS, GATED, WARPS, PROGRAMS as in project.cu; FORMAT and TALL of packed.cuh; PLACES units on their way.
// A unit is 16 weight rows (GATED: 8 of gate and 8 of up), which are the 16 rows of the matrix instruction; tokens are
// its columns. Each warp takes its own part of K, the parts are added in warp order.
#include "packed.cuh"

#define PART (K / WARPS)
#define HALVES (COLS > 8 ? 2 : 1)
#define STRIDE (K + 8)
#define OUTPUTS (GATED ? 8 : 16)

KERNEL(WARPS * 32, PROGRAMS)
packed_project(const u16 *x, const u16 *norm, const u8 *weight, const u8 *scales, const float *factors, u16 *out,
               const int *num_rows, float eps, int x_stride, int out_stride) {
    using Own = Unit<FORMAT, K, WARPS>;
    EXTERN_SHARED(u8, slots);
    u16 *tokens = (u16 *)(slots + PLACES * Own::BYTES);
    float *sums = (float *)(tokens + COLS * STRIDE);
    float *squares = sums + 2 * WARPS * COLS * SUM_STRIDE;
    u64 *arrivals = (u64 *)(squares + (COLS == 1 ? K / 8 : 0));
    u16 *scale = (u16 *)sums;  // of several rows, before there are sums
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int count = N / OUTPUTS, step = gridDim.x;

    stamp(STARTED);
    auto ask = [&](int slot, int unit) {
        const size_t first = GATED ? unit : 2 * unit;
        if (unit < count)
            Own::ask<!GATED>(slots + slot * Own::BYTES, weight, scales, first, first + (GATED ? N / 8 : 1), arrivals + slot);
    };
    if (thread == 0) {
        for (int slot = 0; slot < PLACES; slot++) init_arrival(arrivals + slot);
        show_arrivals();
        for (int slot = 0; slot < PLACES; slot++) ask(slot, blockIdx.x + slot * step);
    }
    uint4 own_scale[OWN_PIECES(K, WARPS)];
    if (COLS == 1) {
#pragma unroll
        for (int i = 0; i < OWN_PIECES(K, WARPS); i++)
            if (i * 32 + lane < PART / 8) own_scale[i] = *(const uint4 *)(norm + warp * PART + (i * 32 + lane) * 8);
    } else {
        for (int k = thread * 8; k < K; k += WARPS * 256) *(uint4 *)(scale + k) = *(const uint4 *)(norm + k);
    }
    // What the sums of this thread's output are multiplied by, a unit ahead.
    const int token = thread / OUTPUTS, n = thread % OUTPUTS;
    float by = 1.0f, by_up = 1.0f;
    if (FORMAT == FP4) by = factors[GATED ? 0 : 2 * blockIdx.x + n / 8];
    if (FORMAT == FP4 && GATED) by_up = factors[1];
    // How many rows there are changes only at the end of a step.
    const int live = min(load_fresh32(num_rows), COLS);
    let_next_start();
    stamp(ASKED);
    const u16 *own_tokens = tokens + g * STRIDE + warp * PART + 8 * t;
    int slot = 0, parity = 0, buffer = 0;
    wait_for_inputs();
    stamp(WAITED);
    if (COLS == 1)
        normalise_row<K, WARPS>(x, own_scale, tokens, squares, eps);
    else
        normalise_rows<K, WARPS>(x, scale, tokens, live, eps, x_stride);
    stamp(PREPARED);
    for (int unit = blockIdx.x; unit < count; unit += step) {
        float even[HALVES][4] = {}, odd[HALVES][4] = {}, by_next = by;
        if (FORMAT == FP4 && !GATED && unit + step < count) by_next = factors[2 * (unit + step) + n / 8];
        wait_for_bytes(arrivals + slot, parity);
        Own::multiply<HALVES>(even, odd, slots + slot * Own::BYTES, own_tokens, STRIDE, live);
        leave_sums<COLS, HALVES>(sums + (buffer * WARPS + warp) * COLS * SUM_STRIDE, even, odd);
        __syncthreads();
        if (thread == 0) ask(slot, unit + PLACES * step);
        if (token < live) {
            const float *from = sums + (buffer * WARPS * COLS + token) * SUM_STRIDE + n;
            float y = 0.0f, up = 0.0f;
            for (int w = 0; w < WARPS; w++) {
                y += from[w * COLS * SUM_STRIDE];
                if (GATED) up += from[w * COLS * SUM_STRIDE + 8];
            }
            out[(size_t)token * out_stride + unit * OUTPUTS + n] = GATED ? gated(y * by, up * by_up) : to_bf16(y * by);
        }
        by = by_next;
        buffer ^= 1;
        if (++slot == PLACES) slot = 0, parity ^= 1;
        if (unit == blockIdx.x) stamp(FIRST_DONE);
    }
    stamp(ENDED);
}
