// experts_up.cu with packed weights: routing, then silu(gate) * up of the shared expert and of every chosen one.
//
// -D: E, A, SOFTCAP, NORM_TOPK of routing.cuh; K, F, FS, WARPS, COLS, PROGRAMS as in experts_up.cu; FORMAT (of both
// weights) and TALL of packed.cuh; TEAMS as in packed_project.cu; PLACES for a team's units on their way; UNITS that a
// team has at most of a lone row, or 0: their sums are kept, and added up at the end. A unit is 8 gate rows and 8 up rows of
// one expert; the shared expert's come first and need no routing, so they stream while the router still runs.
#include "packed.cuh"
#include "routing.cuh"

#define PART (K / WARPS)
#define HALVES (COLS > 8 ? 2 : 1)
#define STRIDE (K + 8)
// Of one team: two units' in turn, or each unit's own.
#define SUM_FLOATS ((UNITS ? UNITS : 2) * WARPS * COLS * SUM_STRIDE)

#if COLS == 1
CAPPED_KERNEL(OTHER_REGISTERS)
#else
KERNEL(TEAMS * WARPS * 32, PROGRAMS)
#endif
packed_up(const u16 *x, const u16 *scores, const float *bias, const u8 *weight, const u8 *scales, const u8 *shared_weight,
          const u8 *shared_scales, const float *factors, u16 *act, u16 *shared_act, int *expert_ids, const int *num_rows, float softcap) {
    using Own = Rows8<FORMAT, K, WARPS>;
    EXTERN_SHARED(u8, shared);
    u16 *tokens = (u16 *)(shared + TEAMS * 2 * PLACES * Own::BYTES);
    float *all_sums = (float *)(tokens + COLS * STRIDE);
    Routing &routing = *(Routing *)(all_sums + TEAMS * SUM_FLOATS);
    Contest &contest = *(Contest *)(&routing + 1);
    u64 *all_arrivals = (u64 *)((u8 *)(&routing + 1) + (COLS == 1 ? sizeof(Contest) : 0));
    const int team = threadIdx.x / (WARPS * 32), thread = threadIdx.x % (WARPS * 32), warp = thread >> 5;
    const int lane = thread & 31, g = lane >> 2, t = lane & 3;
    float *sums = all_sums + team * SUM_FLOATS;
    u64 *arrivals = all_arrivals + team * 3 * PLACES, *turns = arrivals + 2 * PLACES;
    u8 *slots = shared + team * 2 * PLACES * Own::BYTES;
    float2 *own_factors = (float2 *)(all_arrivals + TEAMS * 3 * PLACES) + team * SLOTS;  // of each live expert's gate and up
    const int shared_units = FS / 8, step = gridDim.x * TEAMS, own = team * gridDim.x + blockIdx.x;
    int count = shared_units;  // till the routing is known

    stamp(STARTED);
    // Half of a unit, gate or up, in its place.
    auto ask = [&](int slot, int half, int unit) {
        const int routed = unit - shared_units, at = 2 * slot + half;
        u8 *to = slots + at * Own::BYTES;
        if (routed < 0)
            Own::ask(to, shared_weight, shared_scales, unit + half * (FS / 8), arrivals + at);
        else
            Own::ask(to, weight, scales,
                     ((size_t)routing.experts[routed / (F / 8)] * 2 + half) * (F / 8) + routed % (F / 8), arrivals + at);
    };
    // Those of the first units from `from` on, by several warps.
    auto ask_first = [&](int from) {
        if (lane == 0)
#pragma unroll 1
            for (int i = warp; i < 2 * PLACES; i += WARPS) {
                const int unit = own + i / 2 * step;
                if (unit >= from && unit < count) ask(i / 2, i % 2, unit);
            }
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < TEAMS * 3 * PLACES; i++)
            if (i % (3 * PLACES) < 2 * PLACES)
                init_arrival(all_arrivals + i);
            else
                init_turns(all_arrivals + i, WARPS);
        show_arrivals();
    }
    __syncthreads();
    ask_first(0);
    const int live = min(load_fresh32(num_rows), COLS);
    float own_bias[COLS == 1 ? 1 : E / 32];
    if (COLS == 1)
        own_bias[0] = threadIdx.x < E ? bias[threadIdx.x] : 0.0f;
    else
#pragma unroll
        for (int i = 0; i < E / 32; i++) own_bias[i] = bias[i * 32 + lane];
    float2 shared_factors = make_float2(1.0f, 1.0f);
    if (FORMAT == FP4) shared_factors = make_float2(factors[E * 3], factors[E * 3 + 1]);
    stamp(ASKED);
    const u16 *own_tokens = tokens + (COLS > 1 ? g * STRIDE : 0) + warp * PART + 8 * t;
    wait_for_inputs();
    stamp(WAITED);
    // Each warp what it multiplies itself, or, what is changed where it lies, the first team for both.
    for (int i = lane; i < (is_whole(FORMAT) && team ? 0 : live * (PART / 8)); i += 32) {
        const int at = i % (PART / 8) * 8 + warp * PART, token = i / (PART / 8);
        copy_async(tokens + token * STRIDE + at, x + (size_t)token * K + at, true);
    }
#if COLS == 1
    route_one(routing, contest, scores, own_bias[0], live > 0, softcap);
#else
    route(routing, scores, own_bias, live, softcap);
#endif
    count = shared_units + routing.num_slots * (F / 8);
    stamp(ROUTED);
    ask_first(shared_units);
    // Not before: the next kernel reads the scores before it waits, and its weights can come after these.
    let_next_start();
    float2 last_factors = shared_factors;
    if (UNITS && FORMAT == FP4 && thread < 8 * UNITS) {
        const int routed = own + thread / 8 * step - shared_units;
        if (routed >= 0 && routed < count - shared_units) {
            const float *from = factors + routing.experts[routed / (F / 8)] * 3;
            last_factors = make_float2(from[0], from[1]);
        }
    }
    if (!UNITS && FORMAT == FP4)
        for (int i = thread; i < routing.num_slots; i += WARPS * 32)
            own_factors[i] = make_float2(factors[routing.experts[i] * 3], factors[routing.experts[i] * 3 + 1]);
    wait_for_copies();
#pragma unroll 1
    for (int i = lane; i < (is_whole(FORMAT) && team == 0 ? live * (PART / 8) : 0); i += 32)
        prepare<FORMAT>(tokens + i / (PART / 8) * STRIDE + i % (PART / 8) * 8 + warp * PART);
    if (is_whole(FORMAT) && TEAMS > 1)
        __syncthreads();
    else
        __syncwarp();
    if (blockIdx.x == gridDim.x - 1)
        for (int i = threadIdx.x; i < live * A; i += blockDim.x) expert_ids[i] = (&routing.chosen[0][0])[i];
    stamp(PREPARED);
    auto leave = [&](int unit, float gate, float up, float2 by, int token, int rank, int n) {
        const int routed = unit - shared_units;
        if (FORMAT == FP4) gate *= by.x, up *= by.y;
        const u16 y = gated(gate, up);
        if (routed < 0)
            shared_act[token * FS + unit * 8 + n] = y;
        else
            act[(token * A + rank) * F + routed % (F / 8) * 8 + n] = y;
    };
    auto add_up = [&](const float *from, float &gate, float &up) {
        for (int w = 0; w < WARPS; w++) {
            gate += from[w * COLS * SUM_STRIDE];
            up += from[w * COLS * SUM_STRIDE + 8];
        }
    };
#if UNITS
    // All of a team's units leave their sums, which are added up at the end.
#pragma unroll 1
    for (int i = 0; own + i * step < count; i++) {
        float even[HALVES][4] = {}, odd[HALVES][4] = {};
        const int place = unknown(i % PLACES), parity = i / PLACES & 1;
        const u8 *from = slots + 2 * place * Own::BYTES;
        wait_for_bytes(arrivals + 2 * place, parity);
        wait_for_bytes(arrivals + 2 * place + 1, parity);
        float *to = sums + (i * WARPS + warp) * SUM_STRIDE;
        // Another unit goes where all warps have ended their turns.
        auto release = [&] {
            __syncwarp();
            if (lane == 0) end_turn(turns + place);
            if (lane == 0 && warp < 2 && own + (i + PLACES) * step < count) {
                wait_for_turns(turns + place, parity);
                ask(place, warp, own + (i + PLACES) * step);
            }
        };
        if constexpr (is_whole(FORMAT)) {
            float total[2] = {};
            Own::template multiply_lone<2>(total, from, from + Own::BYTES, own_tokens, warp, [&] { release(), __syncwarp(); });
            if (t == 0) to[g] = total[0], to[g + 8] = total[1];
        } else {
            Own::template multiply<HALVES, true>(even, odd, from, from + Own::BYTES, own_tokens, STRIDE, warp);
            leave_sums<COLS, HALVES>(to, even, odd);
            release();
        }
        if (i == 0) stamp(FIRST_DONE);
    }
    sync_team(team, WARPS * 32);
    const int unit = own + thread / 8 * step;
    if (live > 0 && thread < 8 * UNITS && unit < count) {
        const int rank = unit < shared_units ? 0 : routing.rank[(unit - shared_units) / (F / 8)][0];
        float gate = 0.0f, up = 0.0f;
        add_up(sums + thread / 8 * WARPS * SUM_STRIDE + thread % 8, gate, up);
        leave(unit, gate, up, last_factors, 0, rank, thread % 8);
    }
#else
    const int token = thread / 8, n = thread % 8;
    int slot = 0, parity = 0, buffer = 0;
#pragma unroll 1
    for (int unit = own; unit < count; unit += step) {
        float even[HALVES][4] = {}, odd[HALVES][4] = {};
        const int routed = unit - shared_units;
        const u8 *from = slots + 2 * slot * Own::BYTES;
        wait_for_bytes(arrivals + 2 * slot, parity);
        wait_for_bytes(arrivals + 2 * slot + 1, parity);
        Own::template multiply<HALVES, false>(even, odd, from, from + Own::BYTES, own_tokens, STRIDE, warp);
        leave_sums<COLS, HALVES>(sums + (buffer * WARPS + warp) * COLS * SUM_STRIDE, even, odd);
        sync_team(team, WARPS * 32);
        if (lane == 0 && warp < 2 && unit + PLACES * step < count) ask(slot, warp, unit + PLACES * step);
        if (token < live) {
            const int rank = routed < 0 ? 0 : routing.rank[routed / (F / 8)][token];
            if (rank != NOT_CHOSEN) {
                float gate = 0.0f, up = 0.0f;
                add_up(sums + (buffer * WARPS * COLS + token) * SUM_STRIDE + n, gate, up);
                leave(unit, gate, up, routed < 0 ? shared_factors : own_factors[routed / (F / 8)], token, rank, n);
            }
        }
        buffer ^= 1;
        if (++slot == PLACES) slot = 0, parity ^= 1;
        if (unit == own) stamp(FIRST_DONE);
    }
#endif
    stamp(ENDED);
}
