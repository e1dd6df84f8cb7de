// project.cu with packed weights: normalise and project, or silu(gate) * up of it; weights streamed once.
//
// -D: K, COLS, GATED, WARPS, PROGRAMS as in project.cu; NORM 0: rows are taken as they are, being normalised already;
// FORMAT and TALL of packed.cuh; PLACES for blocks of 8 weight rows
// on their way; BLOCKS that a team has at most; KEEPS 1: all of a lone row's blocks have places for their sums
// (SUM_PLACES), which are added up at the end, and FP8's go one by one; of others all have places themselves too. Two blocks are the 16 rows of the matrix instruction (GATED: of gate and of
// up), tokens its columns. A program is TEAMS of WARPS, each with weights of its own; each warp takes its own part of K,
// the parts are added in warp order.
#include "packed.cuh"

#define PART (K / WARPS)
#define HALVES (COLS > 8 ? 2 : 1)
#define STRIDE (K + 8)
#define OUTPUTS (GATED ? 8 : 16)
// Each block leaves its place as soon as it has been read.
#define ONE_BY_ONE (KEEPS && is_whole(FORMAT))
// Of one team: two units' in turn, or each unit's own.
#define SUM_FLOATS (SUM_PLACES * WARPS * COLS * SUM_STRIDE)

#if COLS == 1
CAPPED_KERNEL(BESIDE_ATTENTION)
#else
KERNEL(TEAMS * WARPS * 32, PROGRAMS)
#endif
packed_project(const u16 *x, const u16 *norm, const u8 *weight, const u8 *scales, const float *factors, u16 *out,
               const int *num_rows, int num_columns, float eps, int x_stride, int out_stride) {
    using Own = Rows8<FORMAT, K, WARPS>;
    EXTERN_SHARED(u8, shared);
    u16 *tokens = (u16 *)(shared + TEAMS * PLACES * Own::BYTES);
    float *squares = (float *)(tokens + COLS * STRIDE), *all_sums = squares + (COLS == 1 ? K / 8 : 0);
    u16 *scale = (u16 *)all_sums;  // of several rows, before there are sums
    const int team = threadIdx.x / (WARPS * 32), thread = threadIdx.x % (WARPS * 32), warp = thread >> 5;
    const int lane = thread & 31, g = lane >> 2, t = lane & 3;
    float *sums = all_sums + team * SUM_FLOATS;
    u64 *all_arrivals = (u64 *)(all_sums + TEAMS * SUM_FLOATS), *arrivals = all_arrivals + team * PLACES;
    u64 *turns = all_arrivals + (TEAMS + team) * PLACES;  // one by one
    float *own_factors = (float *)(all_arrivals + (ONE_BY_ONE ? 2 : 1) * TEAMS * PLACES) + team * BLOCKS;
    u8 *slots = shared + team * PLACES * Own::BYTES;

    // This team's blocks: gate and up in turn, or a stretch.
    const int all = num_columns / 8, step = gridDim.x * TEAMS, own = blockIdx.x * TEAMS + team;
    const int first = GATED ? own : own * all / step;
    const int count = GATED ? (all - first + step - 1) / step * 2 : (own + 1) * all / step - first;

    stamp(STARTED);
    auto block_of = [&](int i) { return GATED ? first + i / 2 * step + i % 2 * all : first + i; };
    auto ask = [&](int i) {
        if (i < count) Own::ask(slots + i % PLACES * Own::BYTES, weight, scales, block_of(i), arrivals + i % PLACES);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < TEAMS * PLACES; i++) init_arrival(all_arrivals + i);
        for (int i = 0; i < (ONE_BY_ONE ? TEAMS * PLACES : 0); i++) init_turns(all_arrivals + TEAMS * PLACES + i, WARPS);
        show_arrivals();
    }
    __syncthreads();
    if (lane == 0)
#pragma unroll 1
        for (int i = warp; i < PLACES; i += WARPS) ask(i);
    constexpr int ALL = TEAMS * WARPS;
    const int own_k = (threadIdx.x >> 5) * (K / ALL) + lane * 8;
    if (NORM && COLS == 1) {  // till it is wanted, where the row will be
        for (int k = 0; k < K / ALL && k + lane * 8 < K / ALL; k += 256)
            *(uint4 *)(tokens + own_k + k) = *(const uint4 *)(norm + own_k + k);
    } else if (NORM) {
        for (int k = threadIdx.x * 8; k < K; k += ALL * 256) *(uint4 *)(scale + k) = *(const uint4 *)(norm + k);
    }
    // What sums are multiplied by.
    if (FORMAT == FP4)
#pragma unroll 1
        for (int i = thread; i < (GATED ? 2 : count); i += WARPS * 32) own_factors[i] = factors[GATED ? i : first + i];
    // How many rows there are changes only at the end of a step.
    const int live = min(load_fresh32(num_rows), COLS);
    let_next_start();
    stamp(ASKED);
    const u16 *own_tokens = tokens + (COLS > 1 ? g * STRIDE : 0) + warp * PART + 8 * t;
    int buffer = 0;
    wait_for_inputs();
    stamp(WAITED);
    if (!NORM) {
        const auto place_of = [&](int i) { return tokens + i / (K / 8) * STRIDE + i % (K / 8) * 8; };
        for (int i = threadIdx.x; i < live * (K / 8); i += ALL * 32)
            copy_async(place_of(i), x + (size_t)(i / (K / 8)) * x_stride + i % (K / 8) * 8, true);
        wait_for_copies();
        for (int i = threadIdx.x; i < live * (K / 8); i += ALL * 32) prepare<FORMAT>(place_of(i));
        __syncthreads();
    } else if (COLS == 1) {
        uint4 own_scale[OWN_PIECES(K, ALL)];
#pragma unroll
        for (int j = 0; j < OWN_PIECES(K, ALL); j++)
            if (j * 32 + lane < K / ALL / 8) own_scale[j] = *(const uint4 *)(tokens + own_k + j * 256);
        normalise_row<K, ALL>(x, own_scale, tokens, squares, eps);
#pragma unroll
        for (int j = 0; j < OWN_PIECES(K, ALL); j++)
            if (j * 32 + lane < K / ALL / 8) prepare<FORMAT>(tokens + own_k + j * 256);
        __syncwarp();
        if (TEAMS > 1) __syncthreads();
    } else
        normalise_rows<K, ALL>(x, scale, tokens, live, eps, x_stride);
    stamp(PREPARED);
    // An output of the unit that begins with block `i` and has `width` of them.
    auto add_up = [&](int token, int n, int i, int width) {
        if (token >= live || (!GATED && n >= 8 * width)) return;
        const float *from = sums + (buffer * WARPS * COLS + token) * SUM_STRIDE + n;
        float y = 0.0f, up = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            y += from[w * COLS * SUM_STRIDE];
            if (GATED) up += from[w * COLS * SUM_STRIDE + 8];
        }
        if (FORMAT == FP4) y *= own_factors[GATED ? 0 : i + n / 8], up *= own_factors[GATED ? 1 : 0];
        out[(size_t)token * out_stride + block_of(i) * 8 + n] = GATED ? gated(y, up) : to_bf16(y);
    };
#if KEEPS
    // Where pairs leave theirs, too.
    if (ONE_BY_ONE)
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const int place = i % PLACES, odd = count % 2;
            float total[2] = {};
            wait_for_bytes(arrivals + place, i / PLACES & 1);
            Own::template multiply_lone<1>(total, slots + place * Own::BYTES, nullptr, own_tokens, warp, [&] {
                __syncwarp();
                if (lane == 0 && i + PLACES < count) {
                    end_turn(turns + place);
                    // Another block goes where all warps have ended their turns.
                    if (warp == 0) wait_for_turns(turns + place, i / PLACES & 1), ask(i + PLACES);
                }
                __syncwarp();
            });
            float *to = sums + ((i + odd) / 2 * WARPS + warp) * SUM_STRIDE + (i ? (i - odd) % 2 * 8 : 0);
            if (t == 0) to[g] = total[0];
            if (i == 0) stamp(FIRST_DONE);
        }
#endif
    // An odd block first, so that its place is soon another's.
    int width = count % 2 ? 1 : 2;
#pragma unroll 1
    for (int i = ONE_BY_ONE ? count : 0; i < count; i += width, width = 2) {
        float even[HALVES][4] = {}, odd[HALVES][4] = {};
        // One block alone stands for both.
        const int second = i + width - 1, place = i % PLACES, next = second % PLACES;
        wait_for_bytes(arrivals + place, i / PLACES & 1);
        wait_for_bytes(arrivals + next, second / PLACES & 1);
        Own::template multiply<HALVES, false>(even, odd, slots + place * Own::BYTES, slots + next * Own::BYTES,
                                              own_tokens, STRIDE, warp);
        leave_sums<COLS, HALVES>(sums + (buffer * WARPS + warp) * COLS * SUM_STRIDE, even, odd);
        if (i == 0) stamp(FIRST_DONE);
        if (KEEPS) {
            buffer++;
            continue;
        }
        sync_team(team, WARPS * 32);
        if (lane == 0 && warp < width) ask(i + PLACES + warp);
        add_up(thread / OUTPUTS, thread % OUTPUTS, i, width);
        buffer ^= 1;
    }
    if (KEEPS) {
        sync_team(team, WARPS * 32);
        buffer = thread / 16;
        const int odd = count % 2, i = buffer ? 2 * buffer - odd : 0;
        if (i < count) add_up(0, thread % 16, i, i || !odd ? 2 : 1);
    }
    stamp(ENDED);
}
