// project.cu with packed weights: normalise and project, or silu(gate) * up of it; weights streamed once.
//
// -D: K, N, COLS, GATED, WARPS, PROGRAMS as in project.cu; FORMAT and TALL of packed.cuh; PLACES for blocks of 8 weight
// rows on their way: for all of a program's, or an even number. Two blocks are the 16 rows of the matrix instruction
// (GATED: of gate and of up), tokens its columns. A program is TEAMS of WARPS, each with weights of its own; each warp
// takes its own part of K, the parts are added in warp order.
#include "packed.cuh"

#define PART (K / WARPS)
#define HALVES (COLS > 8 ? 2 : 1)
#define STRIDE (K + 8)
#define OUTPUTS (GATED ? 8 : 16)

#if COLS == 1
CAPPED_KERNEL(72)
#else
KERNEL(TEAMS * WARPS * 32, PROGRAMS)
#endif
packed_project(const u16 *x, const u16 *norm, const u8 *weight, const u8 *scales, const float *factors, u16 *out,
               const int *num_rows, float eps, int x_stride, int out_stride) {
    using Own = Rows8<FORMAT, K, WARPS>;
    EXTERN_SHARED(u8, shared);
    u16 *tokens = (u16 *)(shared + TEAMS * PLACES * Own::BYTES);
    float *squares = (float *)(tokens + COLS * STRIDE), *all_sums = squares + (COLS == 1 ? K / 8 : 0);
    u16 *scale = (u16 *)all_sums;  // of several rows, before there are sums
    const int team = threadIdx.x / (WARPS * 32), thread = threadIdx.x % (WARPS * 32), warp = thread >> 5;
    const int lane = thread & 31, g = lane >> 2, t = lane & 3;
    float *sums = all_sums + team * 2 * WARPS * COLS * SUM_STRIDE;
    u64 *all_arrivals = (u64 *)(all_sums + TEAMS * 2 * WARPS * COLS * SUM_STRIDE), *arrivals = all_arrivals + team * PLACES;
    u8 *slots = shared + team * PLACES * Own::BYTES;

    // This team's blocks: gate and up in turn, or a stretch.
    const int step = gridDim.x * TEAMS, own = blockIdx.x * TEAMS + team;
    const int first = GATED ? own : own * (N / 8) / step;
    const int count = GATED ? (N / 8 - first + step - 1) / step * 2 : (own + 1) * (N / 8) / step - first;

    stamp(STARTED);
    auto block_of = [&](int i) { return GATED ? first + i / 2 * step + i % 2 * (N / 8) : first + i; };
    auto ask = [&](int i) {
        if (i < count) Own::ask(slots + i % PLACES * Own::BYTES, weight, scales, block_of(i), arrivals + i % PLACES);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < TEAMS * PLACES; i++) init_arrival(all_arrivals + i);
        show_arrivals();
    }
    __syncthreads();
    if (lane == 0)
#pragma unroll 1
        for (int i = warp; i < PLACES; i += WARPS) ask(i);
    constexpr int ALL = TEAMS * WARPS;
    uint4 own_scale[OWN_PIECES(K, ALL)];
    if (COLS == 1) {
#pragma unroll
        for (int i = 0; i < OWN_PIECES(K, ALL); i++)
            if (i * 32 + lane < K / ALL / 8)
                own_scale[i] = *(const uint4 *)(norm + ((threadIdx.x >> 5) * (K / ALL) + (i * 32 + lane) * 8));
    } else {
        for (int k = threadIdx.x * 8; k < K; k += ALL * 256) *(uint4 *)(scale + k) = *(const uint4 *)(norm + k);
    }
    // What the sums of this thread's output are multiplied by, two blocks ahead.
    const int token = thread / OUTPUTS, n = thread % OUTPUTS;
    float by = 1.0f, by_up = 1.0f;
    if (FORMAT == FP4) by = factors[GATED ? 0 : min(first + n / 8, N / 8 - 1)];
    if (FORMAT == FP4 && GATED) by_up = factors[1];
    // How many rows there are changes only at the end of a step.
    const int live = min(load_fresh32(num_rows), COLS);
    let_next_start();
    stamp(ASKED);
    const u16 *own_tokens = tokens + g * STRIDE + warp * PART + 8 * t;
    int buffer = 0;
    wait_for_inputs();
    stamp(WAITED);
    if (COLS == 1) {
        normalise_row<K, ALL>(x, own_scale, tokens, squares, eps);
        if (TEAMS > 1) __syncthreads();
    } else
        normalise_rows<K, ALL>(x, scale, tokens, live, eps, x_stride);
    stamp(PREPARED);
#pragma unroll 1
    for (int i = 0; i < count; i += 2) {
        float even[HALVES][4] = {}, odd[HALVES][4] = {}, by_next = by;
        const bool has_second = i + 1 < count;
        if (FORMAT == FP4 && !GATED && i + 2 + n / 8 < count) by_next = factors[first + i + 2 + n / 8];
        const int place = i % PLACES, next = (i + 1) % PLACES;
        wait_for_bytes(arrivals + place, i / PLACES & 1);
        if (has_second) wait_for_bytes(arrivals + next, (i + 1) / PLACES & 1);
        Own::template multiply<HALVES>(even, odd, slots + place * Own::BYTES, slots + next * Own::BYTES, has_second, own_tokens,
                                       STRIDE, live, warp);
        leave_sums<COLS, HALVES>(sums + (buffer * WARPS + warp) * COLS * SUM_STRIDE, even, odd);
        sync_team(team, WARPS * 32);
        if (lane == 0 && warp < 2) ask(i + PLACES + warp);
        if (token < live && (GATED || n < 8 || has_second)) {
            const float *from = sums + (buffer * WARPS * COLS + token) * SUM_STRIDE + n;
            float y = 0.0f, up = 0.0f;
            for (int w = 0; w < WARPS; w++) {
                y += from[w * COLS * SUM_STRIDE];
                if (GATED) up += from[w * COLS * SUM_STRIDE + 8];
            }
            out[(size_t)token * out_stride + block_of(i) * 8 + n] = GATED ? gated(y * by, up * by_up) : to_bf16(y * by);
        }
        by = by_next;
        buffer ^= 1;
        if (i == 0) stamp(FIRST_DONE);
    }
    stamp(ENDED);
}
