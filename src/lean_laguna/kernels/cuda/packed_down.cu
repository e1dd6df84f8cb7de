// experts_down.cu with packed weights: down of the chosen experts, their weighted sum, the shared expert's down and the
// residual, in one store.
//
// -D: E, A, N, F, FS, WARPS, COLS, PROGRAMS as in experts_down.cu; FORMAT and TALL of packed.cuh; PLACES for experts' weights on their way. A program owns 16 output columns, which are the 16 rows of the matrix instruction, and walks the
// live experts in ascending id, which it finds itself as in experts_down.cu; each warp takes its own part of F.
#include "packed.cuh"
#include "routing.cuh"

#define PART (F / WARPS)
#define SHARED_PART (FS / WARPS)
#define STRIDE (F + 8)
#define SHARED_STRIDE (FS + 8)
#define HALVES (COLS > 8 ? 2 : 1)
// Experts that are multiplied side by side; their places are used again together.
#define GROUP (PLACES > 7 ? 4 : PLACES > 1 ? PLACES / 2 : 1)

KERNEL(WARPS * 32, PROGRAMS)
packed_down(const u16 *act, const u16 *shared_act, const u16 *scores, const float *bias, const u8 *weight,
            const u8 *scales, const u8 *shared_weight, const u8 *shared_scales, const float *factors, u16 *hidden,
            u16 *tap, const int *num_rows, float scaling, float softcap, int tap_stride) {
    using Own = Pair16<FORMAT, F, WARPS, true>;
    using SharedOwn = Pair16<FORMAT, FS, WARPS, true>;
    EXTERN_SHARED(u8, slots);
    u16 *tokens = (u16 *)(slots + PLACES * Own::BYTES + SharedOwn::BYTES);
    u16 *shared_tokens = tokens + COLS * A * STRIDE;
    float *sums = (float *)(shared_tokens + COLS * SHARED_STRIDE);
    Routing &routing = *(Routing *)(sums + 2 * WARPS * COLS * SUM_STRIDE);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    Contest &contest = *(Contest *)(&routing + 1);
    u64 *arrivals = (u64 *)((u8 *)(&routing + 1) + (COLS == 1 ? sizeof(Contest) : 0));
    float *own_factors = (float *)(arrivals + PLACES + 1);
    const uint4 zero = make_uint4(0, 0, 0, 0);

    stamp(STARTED);
    u8 *shared_slot = slots + PLACES * Own::BYTES;
    if (thread == 0) {
        for (int slot = 0; slot <= PLACES; slot++) init_arrival(arrivals + slot);
        show_arrivals();
        SharedOwn::ask(shared_slot, shared_weight, shared_scales, blockIdx.x, 0, arrivals + PLACES);
    }
    const int rows = min(load_fresh32(num_rows), COLS);
#if COLS == 1
    route_one(routing, contest, scores, thread < E ? bias[thread] : 0.0f, rows > 0, softcap);
#else
    float own_bias[E / 32];
#pragma unroll
    for (int i = 0; i < E / 32; i++) own_bias[i] = bias[i * 32 + lane];
    route(routing, scores, own_bias, rows, softcap);
#endif
    stamp(ROUTED);
    const int num_slots = routing.num_slots;
    auto ask = [&](int expert) {
        if (expert < num_slots)
            Own::ask(slots + expert % PLACES * Own::BYTES, weight, scales,
                     (size_t)routing.experts[expert] * (N / 16) + blockIdx.x, 0, arrivals + expert % PLACES);
    };
    if (thread == 0)
        for (int i = 0; i < PLACES; i++) ask(i);
    if (FORMAT == FP4 && thread < num_slots) own_factors[thread] = factors[routing.experts[thread] * 3 + 2];
    const float shared_factor = FORMAT == FP4 ? factors[E * 3 + 2] : 1.0f;
    let_next_start();
    stamp(ASKED);
    const int token = thread / 16, column = blockIdx.x * 16 + thread % 16;
    u16 *out = hidden + (size_t)token * N + column;
    const bool writes = token < rows;
    const u16 *own_tokens = tokens + g * (A * STRIDE) + warp * PART + 8 * t;
    float total[HALVES][4], even[HALVES][4], odd[HALVES][4];
    wait_for_inputs();
    stamp(WAITED);
    for (int i = thread; i < rows * A * (F / 8); i += blockDim.x)
        copy_async(tokens + i / (F / 8) * STRIDE + i % (F / 8) * 8, act + (size_t)i * 8, true);
    for (int i = thread; i < rows * (FS / 8); i += blockDim.x)
        copy_async(shared_tokens + i / (FS / 8) * SHARED_STRIDE + i % (FS / 8) * 8, shared_act + (size_t)i * 8, true);
    const float old = writes ? from_bf16(load_fresh16(out)) : 0.0f;
    wait_for_copies();
    __syncthreads();
    stamp(PREPARED);
    clear(total);
    int place = 0, parity = 0;
    for (int first = 0; first < num_slots; first += GROUP) {
#pragma unroll
            for (int j = 0; j < GROUP; j++)
                if (first + j < num_slots) {
                    const bool wraps = place + j >= PLACES;
                    wait_for_bytes(arrivals + place + j - (wraps ? PLACES : 0), parity ^ wraps);
                }
#pragma unroll
        for (int j = 0; j < GROUP; j++) {
            const bool is_one = first + j < num_slots;
            const int expert = is_one ? first + j : first;
            const u8 *from = slots + (place + j - (place + j >= PLACES ? PLACES : 0)) * Own::BYTES;
            const u16 *b_at[HALVES];
            bool takes[HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                const int rank = is_one && g + 8 * h < rows ? routing.rank[expert][g + 8 * h] : NOT_CHOSEN;
                takes[h] = rank != NOT_CHOSEN;
                b_at[h] = own_tokens + (8 * h * A + (takes[h] ? rank : 0)) * STRIDE;
            }
            clear(even), clear(odd);
#pragma unroll
            for (int k = 0; k < Own::STEPS; k++) {
                uint4 w[2];
                u32 by[2];
                Own::take(w, by, from, k, warp, lane);
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const uint4 a = Own::chunk(w, by, 0, c), a8 = Own::chunk(w, by, 1, c);
#pragma unroll
                    for (int h = 0; h < HALVES; h++)
                        multiply_block(even[h], odd[h], a, a8,
                                       takes[h] ? *(const uint4 *)(b_at[h] + (2 * k + c) * 32) : zero);
                }
            }
            const float factor = FORMAT == FP4 ? own_factors[expert] : 1.0f;
#pragma unroll
            for (int h = 0; h < HALVES; h++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int own = 8 * h + 2 * t + (i & 1);
                    if (is_one && own < rows && routing.rank[expert][own] != NOT_CHOSEN)
                        total[h][i] += (even[h][i] + odd[h][i]) * factor * routing.slot_weights[expert][own];
                }
        }
        if ((place += GROUP) >= PLACES) place -= PLACES, parity ^= 1;
        if (first + PLACES < num_slots) {
            __syncthreads();  // all warps are done with these places
            if (thread == 0)
                for (int j = 0; j < GROUP; j++) ask(first + j + PLACES);
        }
    }
    stamp(FIRST_DONE);
    wait_for_bytes(arrivals + PLACES, 0);
    clear(even), clear(odd);
#pragma unroll
    for (int k = 0; k < SharedOwn::STEPS; k++) {
        uint4 w[2];
        u32 by[2];
        SharedOwn::take(w, by, shared_slot, k, warp, lane);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint4 a = SharedOwn::chunk(w, by, 0, c), a8 = SharedOwn::chunk(w, by, 1, c);
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                const u16 *b = shared_tokens + (g + 8 * h) * SHARED_STRIDE + warp * SHARED_PART + 8 * t;
                multiply_block(even[h], odd[h], a, a8,
                               g + 8 * h < rows ? *(const uint4 *)(b + (2 * k + c) * 32) : zero);
            }
        }
    }
    // Routed sums of this warp's part, then the shared expert's.
    const float none[HALVES][4] = {};
    leave_sums<COLS, HALVES>(sums + warp * COLS * SUM_STRIDE, total, none);
    leave_sums<COLS, HALVES>(sums + (WARPS + warp) * COLS * SUM_STRIDE, even, odd);
    __syncthreads();
    if (writes) {
        const float *from = sums + token * SUM_STRIDE + thread % 16;
        float routed = 0.0f, shared = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            routed += from[w * COLS * SUM_STRIDE];
            shared += from[(WARPS + w) * COLS * SUM_STRIDE];
        }
        shared *= shared_factor;
        const float y = rounded(rounded(rounded(routed) * scaling) + rounded(shared));
        const u16 result = to_bf16(old + y);
        *out = result;
        if (tap) tap[(size_t)token * tap_stride + column] = result;
    }
    stamp(ENDED);
}
