// The routing of a step of more than 16 rows, once for all programs of the experts' kernels: a warp a row, then by expert.
//
// -D: E, A, SOFTCAP, NORM_TOPK of routing.cuh; ROWS; WARPS of the one program.
#define COLS 1
#include "routing.cuh"
#include "table.cuh"

#define WORDS ((ROWS + 31) / 32)

KERNEL(WARPS * 32, 1)
wide_route(const u16 *scores, const float *bias, void *out, int *expert_ids, const int *num_rows, float softcap) {
    EXTERN_SHARED(u32, masks);  // of each expert: rows that chose it, 32 a word
    float *weights = (float *)(masks + E * WORDS);
    int *totals = (int *)(weights + PAIRS);
    u16 *starts = (u16 *)(totals + E / 32);
    u8 *chosen = (u8 *)(starts + E);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    Table &table = *(Table *)out;
    float own_bias[E / 32];
#pragma unroll
    for (int i = 0; i < E / 32; i++) own_bias[i] = bias[i * 32 + lane];
    for (int i = thread; i < E * WORDS; i += blockDim.x) masks[i] = 0;
    const int live = min(load_fresh32(num_rows), ROWS);
    let_next_start();
    wait_for_inputs();
    __syncthreads();
    for (int row = warp; row < live; row += WARPS) {
        float gates[E / 32];
        load_scores(scores, row * E + lane, gates);
        choose(chosen + row * A, weights + row * A, gates, own_bias, softcap);
        __syncwarp();
        for (int a = lane; a < A; a += 32) atomicOr(masks + chosen[row * A + a] * WORDS + row / 32, 1u << row % 32);
    }
    __syncthreads();
    // Live experts and pairs below each expert: in its warp, then in those before.
    int both = 0;
    if (thread < E) {
        for (int i = 0; i < WORDS; i++) both += __popc(masks[thread * WORDS + i]);
        if (both) both |= 1 << 16;
    }
    int below = both;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int before = from_lane(below, lane >= apart ? lane - apart : 0);
        if (lane >= apart) below += before;
    }
    if (lane == 31 && thread < E) totals[warp] = below;
    __syncthreads();
    if (thread < E) {
        below -= both;
        for (int i = 0; i < warp; i++) below += totals[i];
        const int slot = below >> 16, start = below & 0xffff;
        starts[thread] = (u16)start;
        if (both) {
            table.experts[slot] = (u8)thread;
            table.starts[slot] = (u16)start;
        }
        if (thread == E - 1) {
            table.num_slots = slot + (both > 0);
            table.starts[slot + (both > 0)] = (u16)(live * A);
        }
    }
    __syncthreads();
    for (int pair = thread; pair < live * A; pair += blockDim.x) {
        const int row = pair / A, expert = chosen[pair];
        int at = starts[expert] + __popc(masks[expert * WORDS + row / 32] & ((1u << row % 32) - 1u));
        for (int i = 0; i < row / 32; i++) at += __popc(masks[expert * WORDS + i]);
        table.pairs[at] = (u16)pair;
        table.weights[at] = weights[pair];
        expert_ids[pair] = expert;
    }
}
