// The routing of a step of more than 16 rows, once for all programs of the experts' kernels: a warp a row.
//
// -D: E, A, SOFTCAP, NORM_TOPK of routing.cuh; WARPS of a program.
#define COLS 1
#include "routing.cuh"

KERNEL(WARPS * 32, 1)
wide_route(const u16 *scores, const float *bias, float *weights, int *expert_ids, int *num_dealt, const int *num_rows,
           float softcap) {
    EXTERN_SHARED(float, chosen_weights);
    u8 *chosen = (u8 *)(chosen_weights + WARPS * A);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.x * WARPS + warp;
    float own_bias[E / 32], gates[E / 32];
    stamp(STARTED);
#pragma unroll
    for (int i = 0; i < E / 32; i++) own_bias[i] = bias[i * 32 + lane];
    const bool is_live = row < load_fresh32(num_rows);
    let_next_start();
    wait_for_inputs();
    stamp(WAITED);
    if (blockIdx.x == 0 && threadIdx.x == 0) *num_dealt = 0;
    if (is_live) {
        load_scores(scores, row * E + lane, gates);
        choose(chosen + warp * A, chosen_weights + warp * A, gates, own_bias, softcap);
        __syncwarp();
        for (int a = lane; a < A; a += 32) {
            expert_ids[row * A + a] = chosen[warp * A + a];
            weights[row * A + a] = chosen_weights[warp * A + a];
        }
    }
    stamp(ENDED);
}
