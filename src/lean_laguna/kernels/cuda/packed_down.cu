// experts_down.cu with packed weights: down of the chosen experts, their weighted sum, the shared expert's down and the
// residual, in one store.
//
// -D: E, A, N, F, FS, WARPS, COLS, PROGRAMS as in experts_down.cu; FORMAT and TALL of packed.cuh; PLACES for experts'
// weights on their way. A program owns 16 output columns, which are the 16 rows of the matrix instruction, and walks the
// live experts in ascending id, which it finds itself as in experts_down.cu. WARPS share F; a token's first experts and its
// last are added up apart. ALONE: a lone row, a place for each of its experts, 2 * WARPS warps, which take halves of
// experts and leave all parts' sums to be added up as the others do.
#include "packed.cuh"
#include "routing.cuh"

#define PART (F / WARPS)
#define SHARED_PART (FS / WARPS)
#define STRIDE (F + 8)
#define SHARED_STRIDE (FS + 8)
#define HALVES (COLS > 8 ? 2 : 1)
// Of a token's experts.
#define FIRST_ONES ((A + 1) / 2)
// Experts whose places are used again together.
#define REFILL (PLACES > 1 ? PLACES / 2 : 1)

// Floats of sums, or what a contest takes.
#define OWN_SUMS (ALONE ? (A + 2) * WARPS * 16 : 2 * WARPS * COLS * SUM_STRIDE)
#define SUMS (COLS > 1 || OWN_SUMS * 4 > (int)sizeof(Contest) ? OWN_SUMS : (int)sizeof(Contest) / 4)
#define ALL_WARPS (ALONE ? 2 * WARPS : WARPS)

#if ALONE
CAPPED_KERNEL(DOWN_REGISTERS)
#else
KERNEL(ALL_WARPS * 32, PROGRAMS)
#endif
packed_down(const u16 *act, const u16 *shared_act, const u16 *scores, const float *bias, const u8 *weight,
            const u8 *scales, const u8 *shared_weight, const u8 *shared_scales, const float *factors, u16 *hidden,
            u16 *tap, const int *num_rows, float scaling, float softcap, int tap_stride) {
    using Own = Pair16<FORMAT, F, WARPS, true>;
    using SharedOwn = Pair16<FORMAT, FS, WARPS, true>;
    EXTERN_SHARED(u8, slots);
    u16 *tokens = (u16 *)(slots + PLACES * Own::BYTES + SharedOwn::BYTES);
    u16 *shared_tokens = tokens + COLS * A * STRIDE;
    float *sums = (float *)(shared_tokens + COLS * SHARED_STRIDE);
    Routing &routing = *(Routing *)(sums + SUMS);
    const int thread = threadIdx.x, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int warp = thread >> 5;
    Contest &contest = *(Contest *)sums;  // before there are sums
    u64 *arrivals = (u64 *)(&routing + 1);
    float *own_factors = (float *)(arrivals + PLACES + 1);
    const uint4 zero = make_uint4(0, 0, 0, 0);

    stamp(STARTED);
    u8 *shared_slot = slots + PLACES * Own::BYTES;
    if (thread == 0) {
        for (int place = 0; place <= PLACES; place++) init_arrival(arrivals + place);
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
    // Of so many from one on, each by another warp.
    auto ask_some = [&](int from, int many) {
        if (lane == 0)
#pragma unroll 1
            for (int i = warp; i < many; i += ALL_WARPS) ask(from + i);
    };
    ask_some(0, PLACES);
    if (FORMAT == FP4 && thread < num_slots) own_factors[thread] = factors[routing.experts[thread] * 3 + 2];
    const float shared_factor = FORMAT == FP4 ? factors[E * 3 + 2] : 1.0f;
    let_next_start();
    stamp(ASKED);
    const int token = thread / 16, column = blockIdx.x * 16 + thread % 16;
    u16 *out = hidden + (size_t)token * N + column;
    const bool writes = token < rows;
    if (ALONE) __syncthreads();  // the contest is over, where sums will be
    wait_for_inputs();
    stamp(WAITED);
    const float old = writes ? from_bf16(load_fresh16(out)) : 0.0f;
#if ALONE
    // Each warp what it multiplies itself: half of an expert's row, and a part of the shared one's.
#pragma unroll 1
    for (int expert = warp / 2; expert < num_slots; expert += WARPS)
        for (int k = warp % 2 * (F / 2) + lane * 8; k < (warp % 2 + 1) * (F / 2); k += 256)
            copy_async(tokens + expert * STRIDE + k, act + expert * F + k, true);
    for (int k = warp / 2 * SHARED_PART + lane * 8; k < (warp / 2 + 1) * SHARED_PART; k += 256)
        copy_async(shared_tokens + k, shared_act + k, rows > 0);
    wait_for_copies();
    __syncwarp();
#else
    for (int i = thread; i < rows * A * (F / 8); i += blockDim.x)
        copy_async(tokens + i / (F / 8) * STRIDE + i % (F / 8) * 8, act + (size_t)i * 8, true);
    for (int i = thread; i < rows * (FS / 8); i += blockDim.x)
        copy_async(shared_tokens + i / (FS / 8) * SHARED_STRIDE + i % (FS / 8) * 8, shared_act + (size_t)i * 8, true);
    wait_for_copies();
    __syncthreads();
#endif
    stamp(PREPARED);
#if ALONE
    float *parts = sums + 2 * WARPS * 16;  // of every expert
    auto multiply_part = [&](float (&even)[4], float (&odd)[4], const uint4 a, const uint4 a8, const u16 *x) {
        multiply_block(even, odd, a, a8, g ? zero : *(const uint4 *)x);
    };
#pragma unroll 1
    for (int expert = warp / 2; expert < num_slots; expert += WARPS) {
        wait_for_bytes(arrivals + expert, 0);
#pragma unroll 1
        for (int i = 0; i < WARPS / 2; i++) {
            const int part = warp % 2 * (WARPS / 2) + i;
            const u16 *x = tokens + expert * STRIDE + part * PART + 8 * t;
            float even[4] = {}, odd[4] = {};
#pragma unroll
            for (int k = 0; k < Own::STEPS; k++) {
                uint4 w[2];
                Scales<FORMAT> by[2];
                Own::take(w, by, slots + expert * Own::BYTES, k, part, lane);
#pragma unroll
                for (int c = 0; c < 2; c++)
                    multiply_part(even, odd, Own::chunk(w, by, 0, c), Own::chunk(w, by, 1, c), x + (2 * k + c) * 32);
            }
            if (t == 0) {
                float *to = parts + (expert * WARPS + part) * 16 + g;
                to[0] = even[0] + odd[0], to[8] = even[2] + odd[2];
            }
        }
    }
    stamp(FIRST_DONE);
    wait_for_bytes(arrivals + PLACES, 0);
    {
        const int part = warp / 2, half = warp % 2;
        const u16 *x = shared_tokens + part * SHARED_PART + 8 * t;
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (int k = 0; k < SharedOwn::STEPS; k++) {
            uint4 w[2];
            Scales<FORMAT> by[2];
            SharedOwn::take(w, by, shared_slot, k, part, lane);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                if (half)
                    multiply_part(even, odd, zero, SharedOwn::chunk(w, by, 1, c), x + (2 * k + c) * 32);
                else
                    multiply_part(even, odd, SharedOwn::chunk(w, by, 0, c), zero, x + (2 * k + c) * 32);
            }
        }
        if (t == 0) sums[(WARPS + part) * 16 + 8 * half + g] = half ? even[2] + odd[2] : even[0] + odd[0];
    }
    __syncthreads();
    if (thread < WARPS * 16) {
        float first = 0.0f, last = 0.0f;
#pragma unroll 2
        for (int expert = 0; expert < num_slots; expert++) {
            float y = parts[expert * WARPS * 16 + thread] * (FORMAT == FP4 ? own_factors[expert] : 1.0f);
            if (expert < FIRST_ONES)
                first = fmaf(y, routing.slot_weights[expert][0], first);
            else
                last = fmaf(y, routing.slot_weights[expert][0], last);
        }
        sums[thread] = first + last;
    }
    __syncthreads();
    const float *from = sums + thread % 16;
    const int pitch = 16;
#else
    const u16 *own_tokens = tokens + g * (A * STRIDE) + warp * PART + 8 * t;
    float total[2][HALVES][4] = {}, even[HALVES][4], odd[HALVES][4];
    for (int first = 0; first < num_slots; first += REFILL) {
        const int last = min(num_slots, first + REFILL);
#pragma unroll 1
        for (int expert = first; expert < last; expert++) {
            const int place = expert % PLACES;
            const u16 *b_at[HALVES];
            bool takes[HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                const int rank = g + 8 * h < rows ? routing.rank[expert][g + 8 * h] : NOT_CHOSEN;
                takes[h] = rank != NOT_CHOSEN;
                b_at[h] = own_tokens + (8 * h * A + (takes[h] ? rank : 0)) * STRIDE;
            }
            wait_for_bytes(arrivals + place, expert / PLACES & 1);
            clear(even), clear(odd);
#pragma unroll
            for (int k = 0; k < Own::STEPS; k++) {
                uint4 w[2];
                Scales<FORMAT> by[2];
                Own::take(w, by, slots + place * Own::BYTES, k, warp, lane);
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
                    const int rank = own < rows ? routing.rank[expert][own] : NOT_CHOSEN;
                    if (rank == NOT_CHOSEN) continue;
                    // Said so, or every width would round in its own way.
                    const float y = (even[h][i] + odd[h][i]) * factor, by = routing.slot_weights[expert][own];
                    if (rank < FIRST_ONES)
                        total[0][h][i] = fmaf(y, by, total[0][h][i]);
                    else
                        total[1][h][i] = fmaf(y, by, total[1][h][i]);
                }
        }
        if (first + PLACES < num_slots) {
            __syncthreads();  // all warps are done with these places
            ask_some(first + PLACES, REFILL);
        }
    }
    stamp(FIRST_DONE);
    wait_for_bytes(arrivals + PLACES, 0);
    clear(even), clear(odd);
#pragma unroll
    for (int k = 0; k < SharedOwn::STEPS; k++) {
        uint4 w[2];
        Scales<FORMAT> by[2];
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
    leave_sums<COLS, HALVES>(sums + warp * COLS * SUM_STRIDE, total[0], total[1]);
    leave_sums<COLS, HALVES>(sums + (WARPS + warp) * COLS * SUM_STRIDE, even, odd);
    __syncthreads();
    const float *from = sums + token * SUM_STRIDE + thread % 16;
    const int pitch = COLS * SUM_STRIDE;
#endif
    if (writes) {
        float routed = 0.0f, shared = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            routed += from[w * pitch];
            shared += from[(WARPS + w) * pitch];
        }
        shared *= shared_factor;
        const float y = rounded(rounded(rounded(routed) * scaling) + rounded(shared));
        const u16 result = to_bf16(old + y);
        *out = result;
        if (tap) tap[(size_t)token * tap_stride + column] = result;
    }
    stamp(ENDED);
}
