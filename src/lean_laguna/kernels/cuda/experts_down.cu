// Down of the chosen experts, their weighted sum, the shared expert's down and the residual, in one store.
//
// -D: as in experts_up.cu, with N the hidden size. A program owns 8 output columns and walks the live experts in
// ascending id: no scatter, no atomic, and a token's sum has one order whichever experts other tokens chose.
// The kernel before (experts_up) lets this one start once the router is done, so routing is known early and the
// right weights stream before the experts' activations are there.
#include "routing.cuh"

#define PART (F / WARPS)
#define LOADS (PART / 32)
#define AHEAD (RING / LOADS)
#define SHARED_PART (FS / WARPS)
#define SHARED_LOADS (SHARED_PART / 32)
#define STRIDE (F + 8)
#define SHARED_STRIDE (FS + 8)

KERNEL(WARPS * 32, COLS > 8 ? 1 : 2)
experts_down(const u16 *act, const u16 *shared_act, const u16 *scores, const float *bias, const u16 *weight,
             const u16 *shared_weight, u16 *hidden, u16 *tap, const int *num_rows, float softcap, float scaling,
             int tap_stride) {
    EXTERN_SHARED(u16, tokens);
    u16 *shared_tokens = tokens + COLS * A * STRIDE;
    float *sums = (float *)(shared_tokens + COLS * SHARED_STRIDE);
    Routing &routing = *(Routing *)(sums + 2 * WARPS * COLS * 8);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const int live = load_fresh32(num_rows);
    const size_t own = (size_t)g * F + warp * PART + 8 * t;
    const size_t shared_own = (size_t)g * FS + warp * SHARED_PART + 8 * t;
    uint4 shared_ring[SHARED_LOADS], ring[RING];
    int unit = blockIdx.x;
#pragma unroll
    for (int j = 0; j < SHARED_LOADS; j++)
        shared_ring[j] = load_weight(shared_weight + shared_own + (size_t)unit * 8 * FS + j * 32);
    route(routing, scores, bias, live, softcap);
    const int num_slots = routing.num_slots;
#pragma unroll
    for (int j = 0; j < RING; j++)
        if (j / LOADS < num_slots)
            ring[j] = load_weight(weight + ((size_t)routing.experts[j / LOADS] * N + unit * 8) * F + own +
                                  (j % LOADS) * 32);
    let_next_start();
    wait_for_inputs();
    const int rows = min(live, COLS);
    for (int i = thread; i < rows * A * (F / 8); i += blockDim.x)
        copy_async(tokens + i / (F / 8) * STRIDE + i % (F / 8) * 8, act + (size_t)i * 8, true);
    for (int i = thread; i < rows * (FS / 8); i += blockDim.x)
        copy_async(shared_tokens + i / (FS / 8) * SHARED_STRIDE + i % (FS / 8) * 8, shared_act + (size_t)i * 8, true);
    wait_for_copies();
    __syncthreads();

    const bool has_low = g < live, has_high = COLS > 8 && g + 8 < live;
    const int token = thread / 8, column = thread % 8;
    for (; unit < N / 8; unit += gridDim.x) {
        u16 *out = hidden + (size_t)token * N + unit * 8 + column;
        const bool writes = token < rows;
        const float old = writes ? from_bf16(load_fresh16(out)) : 0.0f;
        if (unit != blockIdx.x) {
#pragma unroll
            for (int j = 0; j < SHARED_LOADS; j++)
                shared_ring[j] = load_weight(shared_weight + shared_own + (size_t)unit * 8 * FS + j * 32);
#pragma unroll
            for (int j = 0; j < RING; j++)
                if (j / LOADS < num_slots)
                    ring[j] = load_weight(weight + ((size_t)routing.experts[j / LOADS] * N + unit * 8) * F + own +
                                          (j % LOADS) * 32);
        }
        float total[4] = {0, 0, 0, 0};
        for (int first = 0; first < num_slots; first += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int slot = first + i;
                if (slot < num_slots) {
                    const int rank = has_low ? routing.rank[slot][g] : NOT_CHOSEN;
                    const int rank8 = has_high ? routing.rank[slot][g + 8] : NOT_CHOSEN;
                    const bool takes = rank != NOT_CHOSEN, takes8 = rank8 != NOT_CHOSEN;
                    const u16 *a = tokens + (g * A + (takes ? rank : 0)) * STRIDE + warp * PART + 8 * t;
                    const u16 *a8 = tokens + ((g + 8) * A + (takes8 ? rank8 : 0)) * STRIDE + warp * PART + 8 * t;
                    const int next = slot + AHEAD;
                    const u16 *from =
                        weight + ((size_t)routing.experts[next < num_slots ? next : 0] * N + unit * 8) * F + own;
                    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll
                    for (int k = 0; k < LOADS; k++) {
                        multiply_block(even, odd, takes ? *(const uint4 *)(a + k * 32) : zero,
                                       takes8 ? *(const uint4 *)(a8 + k * 32) : zero, ring[i * LOADS + k]);
                        if (next < num_slots) ring[i * LOADS + k] = load_weight(from + k * 32);
                    }
                    if (takes) {
                        const float by = routing.slot_weights[slot][g];
                        total[0] += (even[0] + odd[0]) * by;
                        total[1] += (even[1] + odd[1]) * by;
                    }
                    if (takes8) {
                        const float by = routing.slot_weights[slot][g + 8];
                        total[2] += (even[2] + odd[2]) * by;
                        total[3] += (even[3] + odd[3]) * by;
                    }
                }
            }
        }
        float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < SHARED_LOADS; k++) {
            const u16 *a = shared_tokens + g * SHARED_STRIDE + warp * SHARED_PART + 8 * t + k * 32;
            multiply_block(even, odd, has_low ? *(const uint4 *)a : zero,
                           has_high ? *(const uint4 *)(a + 8 * SHARED_STRIDE) : zero, shared_ring[k]);
        }
        float *mine = sums + warp * COLS * 16 + g * 16 + 2 * t;
        *(float2 *)mine = make_float2(total[0], total[1]);
        *(float2 *)(mine + 8) = make_float2(even[0] + odd[0], even[1] + odd[1]);
        if (COLS > 8) {
            *(float2 *)(mine + 8 * 16) = make_float2(total[2], total[3]);
            *(float2 *)(mine + 8 * 16 + 8) = make_float2(even[2] + odd[2], even[3] + odd[3]);
        }
        __syncthreads();
        if (writes) {
            float routed = 0.0f, shared = 0.0f;
            for (int w = 0; w < WARPS; w++) {
                routed += sums[w * COLS * 16 + token * 16 + column];
                shared += sums[w * COLS * 16 + token * 16 + 8 + column];
            }
            const float y = rounded(rounded(rounded(routed) * scaling) + rounded(shared));
            const u16 result = to_bf16(old + y);
            *out = result;
            if (tap) tap[(size_t)token * tap_stride + unit * 8 + column] = result;
        }
        __syncthreads();
    }
}
