// experts_up.cu with packed weights: routing, then silu(gate) * up of the shared expert and of every chosen one.
//
// -D: E, A, SOFTCAP, NORM_TOPK of routing.cuh; K, F, FS, WARPS, COLS, PROGRAMS as in experts_up.cu; PLACES, FORMAT (of both weights) and TALL as in packed_project.cu. A unit is 8 gate rows and 8 up rows of one expert; the shared expert's come
// first and need no routing, so they stream while the router still runs.
#include "packed.cuh"
#include "routing.cuh"

#define PART (K / WARPS)
#define HALVES (COLS > 8 ? 2 : 1)
#define STRIDE (K + 8)

KERNEL(WARPS * 32, PROGRAMS)
packed_up(const u16 *x, const u16 *scores, const float *bias, const u8 *weight, const u8 *scales, const u8 *shared_weight,
          const u8 *shared_scales, const float *factors, u16 *act, u16 *shared_act, int *expert_ids, const int *num_rows, float softcap) {
    using Own = Unit<FORMAT, K, WARPS>;
    EXTERN_SHARED(u8, slots);
    u16 *tokens = (u16 *)(slots + PLACES * Own::BYTES);
    float *sums = (float *)(tokens + COLS * STRIDE);
    Routing &routing = *(Routing *)(sums + 2 * WARPS * COLS * SUM_STRIDE);
    Contest &contest = *(Contest *)(&routing + 1);
    u64 *arrivals = (u64 *)((u8 *)(&routing + 1) + (COLS == 1 ? sizeof(Contest) : 0));
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    float2 *own_factors = (float2 *)(arrivals + PLACES);  // of each live expert's gate and up
    const int shared_units = FS / 8, step = gridDim.x;
    int count = shared_units;  // till the routing is known

    stamp(STARTED);
    auto ask = [&](int slot, int unit) {
        if (unit >= count) return;
        const int routed = unit - shared_units;
        u8 *to = slots + slot * Own::BYTES;
        if (routed < 0) {
            Own::ask<false>(to, shared_weight, shared_scales, unit, unit + FS / 8, arrivals + slot);
        } else {
            const size_t first = (size_t)routing.experts[routed / (F / 8)] * (2 * F / 8) + routed % (F / 8);
            Own::ask<false>(to, weight, scales, first, first + F / 8, arrivals + slot);
        }
    };
    if (thread == 0) {
        for (int slot = 0; slot < PLACES; slot++) init_arrival(arrivals + slot);
        show_arrivals();
        for (int slot = 0; slot < PLACES; slot++) ask(slot, blockIdx.x + slot * step);
    }
    const int live = min(load_fresh32(num_rows), COLS);
    float own_bias[COLS == 1 ? 1 : E / 32];
    if (COLS == 1)
        own_bias[0] = thread < E ? bias[thread] : 0.0f;
    else
#pragma unroll
        for (int i = 0; i < E / 32; i++) own_bias[i] = bias[i * 32 + lane];
    float2 shared_factors = make_float2(1.0f, 1.0f);
    if (FORMAT == FP4) shared_factors = make_float2(factors[E * 3], factors[E * 3 + 1]);
    stamp(ASKED);
    const u16 *own_tokens = tokens + g * STRIDE + warp * PART + 8 * t;
    int slot = 0, parity = 0, buffer = 0;
    wait_for_inputs();
    stamp(WAITED);
    let_next_start();  // not before: the next kernel reads the scores before it waits
    for (int i = thread; i < live * (K / 8); i += WARPS * 32)
        copy_async(tokens + i / (K / 8) * STRIDE + i % (K / 8) * 8, x + (size_t)i * 8, true);
#if COLS == 1
    route_one(routing, contest, scores, own_bias[0], live > 0, softcap);
#else
    route(routing, scores, own_bias, live, softcap);
#endif
    count = shared_units + routing.num_slots * (F / 8);
    stamp(ROUTED);
    if (thread == 0)
        for (int i = 0; i < PLACES; i++)
            if (blockIdx.x + i * step >= shared_units) ask(i, blockIdx.x + i * step);
    if (FORMAT == FP4 && thread < routing.num_slots)
        own_factors[thread] = make_float2(factors[routing.experts[thread] * 3], factors[routing.experts[thread] * 3 + 1]);
    wait_for_copies();
    if (blockIdx.x == gridDim.x - 1)
        for (int i = thread; i < live * A; i += blockDim.x) expert_ids[i] = (&routing.chosen[0][0])[i];
    __syncthreads();
    stamp(PREPARED);
    for (int unit = blockIdx.x; unit < count; unit += step) {
        float even[HALVES][4] = {}, odd[HALVES][4] = {};
        wait_for_bytes(arrivals + slot, parity);
        Own::multiply<HALVES>(even, odd, slots + slot * Own::BYTES, own_tokens, STRIDE, live);
        leave_sums<COLS, HALVES>(sums + (buffer * WARPS + warp) * COLS * SUM_STRIDE, even, odd);
        __syncthreads();
        if (thread == 0) ask(slot, unit + PLACES * step);
        const int token = thread / 8, n = thread % 8, routed = unit - shared_units;
        if (token < live) {
            const int rank = routed < 0 ? 0 : routing.rank[routed / (F / 8)][token];
            if (rank != NOT_CHOSEN) {
                const float *from = sums + (buffer * WARPS * COLS + token) * SUM_STRIDE + n;
                float gate = 0.0f, up = 0.0f;
                for (int w = 0; w < WARPS; w++) {
                    gate += from[w * COLS * SUM_STRIDE];
                    up += from[w * COLS * SUM_STRIDE + 8];
                }
                if (FORMAT == FP4) {
                    const float2 by = routed < 0 ? shared_factors : own_factors[routed / (F / 8)];
                    gate *= by.x, up *= by.y;
                }
                const u16 y = gated(gate, up);
                if (routed < 0)
                    shared_act[token * FS + unit * 8 + n] = y;
                else
                    act[(token * A + rank) * F + routed % (F / 8) * 8 + n] = y;
            }
        }
        buffer ^= 1;
        if (++slot == PLACES) slot = 0, parity ^= 1;
        if (unit == blockIdx.x) stamp(FIRST_DONE);
    }
    stamp(ENDED);
}
