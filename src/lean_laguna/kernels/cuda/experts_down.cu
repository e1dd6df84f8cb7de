// Down of the chosen experts, their weighted sum, the shared expert's down and the residual, in one store.
//
// -D: as in experts_up.cu, with N the hidden size. A program owns 16 output columns and walks the live experts in
// ascending id: no scatter, no atomic, and a token's sum has one order whichever experts other tokens chose.
// It routes by itself: the kernel before (experts_up) lets this one start when the router's scores are there, so the
// right weights stream before the experts' activations are.
#include "routing.cuh"

#define PART (F / WARPS)
#define SHARED_PART (FS / WARPS)
#define STEPS (PART / 32)
#define SHARED_STEPS (SHARED_PART / 32)
// Experts whose weights are on their way.
#define AHEAD (RING / (2 * STEPS))
#define STRIDE (F + 8)
#define SHARED_STRIDE (FS + 8)

KERNEL(WARPS * 32, PROGRAMS)
experts_down(const u16 *act, const u16 *shared_act, const u16 *scores, const float *bias, const u16 *weight,
             const u16 *shared_weight, u16 *hidden, u16 *tap, const int *num_rows, float scaling, float softcap,
             int tap_stride) {
    EXTERN_SHARED(u16, ring);
    u16 *tokens = ring + RING * WARPS * 256;
    u16 *shared_tokens = tokens + COLS * A * STRIDE;
    float *sums = (float *)(shared_tokens + COLS * SHARED_STRIDE);
    Routing &routing = *(Routing *)(sums + WARPS * COLS * 32);
    Contest &contest = *(Contest *)(&routing + 1);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    stamp(STARTED);
    // Where this lane's part of row g starts: of the shared expert, and of a routed one. Row g + 8 lies eight rows on.
    const u16 *shared_own = shared_weight + (size_t)(blockIdx.x * 16 + g) * FS + warp * SHARED_PART + 8 * t;
    const u16 *first_own = weight + (size_t)(blockIdx.x * 16 + g) * F + warp * PART + 8 * t;
    auto own_of = [&](int slot) { return first_own + (size_t)routing.experts[slot] * N * F; };
    const int live = min(load_fresh32(num_rows), COLS);
#if COLS == 1
    route_one(routing, contest, scores, thread < E ? bias[thread] : 0.0f, live > 0, softcap);
#else
    float own_bias[E / 32];
#pragma unroll
    for (int i = 0; i < E / 32; i++) own_bias[i] = bias[i * 32 + lane];
    route(routing, scores, own_bias, live, softcap);
#endif
    stamp(ROUTED);
    uint4 shared_rows[SHARED_STEPS][2];
#pragma unroll
    for (int j = 0; j < SHARED_STEPS; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) shared_rows[j][half] = *(const uint4 *)(shared_own + half * 8 * FS + j * 32);
    const int num_slots = routing.num_slots;
    u16 *slot = ring + thread * 8;
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (i < num_slots) {
            const u16 *own = own_of(i);
#pragma unroll
            for (int k = 0; k < STEPS; k++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    copy_async(slot + ((i * STEPS + k) * 2 + half) * WARPS * 256, own + half * 8 * F + k * 32, true);
        }
    let_next_start();
    stamp(ASKED);
    wait_for_inputs();
    stamp(WAITED);
    const int rows = live;
    for (int i = thread; i < rows * A * (F / 8); i += blockDim.x)
        copy_async(tokens + i / (F / 8) * STRIDE + i % (F / 8) * 8, act + (size_t)i * 8, true);
    for (int i = thread; i < rows * (FS / 8); i += blockDim.x)
        copy_async(shared_tokens + i / (FS / 8) * SHARED_STRIDE + i % (FS / 8) * 8, shared_act + (size_t)i * 8, true);
    const bool has_low = g < live, has_high = COLS > 8 && g + 8 < live;
    const int token = thread / 16, column = blockIdx.x * 16 + thread % 16;
    u16 *out = hidden + (size_t)token * N + column;
    const bool writes = token < rows;
    const float old = writes ? from_bf16(load_fresh16(out)) : 0.0f;
    wait_for_copies();
    __syncthreads();

    stamp(PREPARED);
    const u16 *a_at = tokens + g * (A * STRIDE) + warp * PART + 8 * t;
    const u16 *a8_at = a_at + 8 * (A * STRIDE);
    float total[2][4] = {};
    for (int first = 0; first < num_slots; first += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int expert = first + i, next = expert + AHEAD;
            if (expert >= num_slots) break;
            const int rank = has_low ? routing.rank[expert][g] : NOT_CHOSEN;
            const int rank8 = has_high ? routing.rank[expert][g + 8] : NOT_CHOSEN;
            const bool takes = rank != NOT_CHOSEN, takes8 = rank8 != NOT_CHOSEN;
            const u16 *a = a_at + (takes ? rank : 0) * STRIDE, *a8 = a8_at + (takes8 ? rank8 : 0) * STRIDE;
            const u16 *own = own_of(next < num_slots ? next : 0);
            float even[2][4] = {}, odd[2][4] = {};
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                uint4 w[2];
                // Both of a step's items: the next are issued after the last is taken.
                wait_for_stream<RING - 2>();
#pragma unroll
                for (int half = 0; half < 2; half++)
                    w[half] = *(const uint4 *)(slot + ((i * STEPS + k) * 2 + half) * WARPS * 256);
                const uint4 low = takes ? *(const uint4 *)(a + k * 32) : zero;
                const uint4 high = takes8 ? *(const uint4 *)(a8 + k * 32) : zero;
#pragma unroll
                for (int half = 0; half < 2; half++) multiply_block(even[half], odd[half], low, high, w[half]);
#pragma unroll
                for (int half = 0; half < 2; half++)
                    stream(slot + ((i * STEPS + k) * 2 + half) * WARPS * 256, own + half * 8 * F + k * 32,
                           next < num_slots);
            }
            const float by = takes ? routing.slot_weights[expert][g] : 0.0f;
            const float by8 = takes8 ? routing.slot_weights[expert][g + 8] : 0.0f;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (takes) {
                    total[half][0] += (even[half][0] + odd[half][0]) * by;
                    total[half][1] += (even[half][1] + odd[half][1]) * by;
                }
                if (takes8) {
                    total[half][2] += (even[half][2] + odd[half][2]) * by8;
                    total[half][3] += (even[half][3] + odd[half][3]) * by8;
                }
            }
        }
    }
    stamp(FIRST_DONE);
    // Routed and shared sums of this warp's part: [COLS][32], routed columns first.
    float *mine = sums + (warp * COLS + g) * 32 + 2 * t;
    float even[2][4] = {}, odd[2][4] = {};
#pragma unroll
    for (int k = 0; k < SHARED_STEPS; k++) {
        const u16 *a = shared_tokens + g * SHARED_STRIDE + warp * SHARED_PART + 8 * t + k * 32;
        const uint4 low = has_low ? *(const uint4 *)a : zero, high = has_high ? *(const uint4 *)(a + 8 * SHARED_STRIDE) : zero;
#pragma unroll
        for (int half = 0; half < 2; half++) multiply_block(even[half], odd[half], low, high, shared_rows[k][half]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (g < COLS) {
            *(float2 *)(mine + half * 8) = make_float2(total[half][0], total[half][1]);
            *(float2 *)(mine + 16 + half * 8) = make_float2(even[half][0] + odd[half][0], even[half][1] + odd[half][1]);
        }
        if (COLS > 8) {
            *(float2 *)(mine + 8 * 32 + half * 8) = make_float2(total[half][2], total[half][3]);
            *(float2 *)(mine + 8 * 32 + 16 + half * 8) = make_float2(even[half][2] + odd[half][2], even[half][3] + odd[half][3]);
        }
    }
    __syncthreads();
    if (writes) {
        float routed = 0.0f, shared = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            routed += sums[(w * COLS + token) * 32 + thread % 16];
            shared += sums[(w * COLS + token) * 32 + 16 + thread % 16];
        }
        const float y = rounded(rounded(rounded(routed) * scaling) + rounded(shared));
        const u16 result = to_bf16(old + y);
        *out = result;
        if (tap) tap[(size_t)token * tap_stride + column] = result;
    }
    stamp(ENDED);
}
