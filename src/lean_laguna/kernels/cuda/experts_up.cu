// Routing, then silu(gate) * up of the shared expert and of every expert that a token chose.
//
// -D: E, A, SOFTCAP, NORM_TOPK of routing.cuh; K hidden size; F and FS width of a routed and of the shared expert;
// the rest as in units.cuh and project.cu. A unit is 4 gate rows and 4 up rows of one expert; the shared expert's come
// first and need no routing, so they stream while the router still runs.
#include "routing.cuh"
#include "units.cuh"

#define UNITS (RING / LOADS)

KERNEL(THREADS, PROGRAMS)
experts_up(const u16 *x, const u16 *scores, const float *bias, const u16 *weight, const u16 *shared_weight, u16 *act,
           u16 *shared_act, int *expert_ids, const int *num_rows, float softcap) {
    EXTERN_SHARED(u16, ring);
    u16 *tokens = ring + RING_SIZE;
    float *sums = (float *)(tokens + COLS * STRIDE);
    Routing &routing = *(Routing *)(sums + 2 * SUMS);
    Contest &contest = *(Contest *)(&routing + 1);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int shared_units = FS / 4, step = gridDim.x;
    int count = shared_units;  // till the routing is known

    stamp(STARTED);
    // Row r of a unit, counted through its bank: four gate rows, four up rows.
    auto row_of = [&](int unit, int r) {
        const int routed = unit - shared_units, width = routed < 0 ? FS : F;
        const size_t first = routed < 0 ? unit * 4 : (size_t)routing.experts[routed / (F / 4)] * 2 * F + routed % (F / 4) * 4;
        return first + (r & 3) + (r < 4 ? 0 : width);
    };
#if BULK
    u64 *arrivals = (u64 *)((u8 *)(&routing + 1) + (COLS == 1 ? sizeof(Contest) : 0));
    auto ask = [&](int slot, int unit) {
        const u16 *from = unit < shared_units ? shared_weight : weight;
        u16 *to = ring + slot * UNIT;
        expect_bytes(arrivals + slot, UNIT * 2);
        copy_bulk(to, from + row_of(unit, 0) * K, 4 * K * 2, arrivals + slot);
        copy_bulk(to + 4 * K, from + row_of(unit, 4) * K, 4 * K * 2, arrivals + slot);
    };
    // Ask for the first units from a number on, as far as they are known.
    auto ask_first = [&](int least) {
#pragma unroll 1
        for (int slot = 0; slot < RING; slot++) {
            const int unit = blockIdx.x + slot * step;
            if (unit >= least && unit < count) ask(slot, unit);
        }
    };
    if (asks()) {
        make_arrivals(arrivals, RING);
        ask_first(0);
    }
#else
    u16 *slot = ring + thread * 8;
    const size_t own = warp * PART + 8 * t;
#pragma unroll
    for (int j = 0; j < RING; j++) {
        const int unit = blockIdx.x + (j / LOADS) * step;
        if (unit < shared_units)
            copy_async(slot + j * WARPS * 256, shared_weight + row_of(unit, g) * K + own + j % LOADS * 32, true);
    }
#endif
    const int live = min(load_fresh32(num_rows), COLS);
    float own_bias[COLS == 1 ? 1 : E / 32];
    if (COLS == 1)
        own_bias[0] = thread < E ? bias[thread] : 0.0f;
    else
#pragma unroll
        for (int i = 0; i < E / 32; i++) own_bias[i] = bias[i * 32 + lane];
    stamp(ASKED);
    Tokens operands(tokens, live);
    auto write_ids = [&]() {
        if (blockIdx.x != gridDim.x - 1) return;
        for (int i = thread; i < live * A; i += blockDim.x) expert_ids[i] = (&routing.chosen[0][0])[i];
    };
    auto add_up = [&](int unit, const float *own_sums) {
        const int token = thread / 4, n = thread % 4, routed = unit - shared_units;
        if (token < live) {
            const int rank = routed < 0 ? 0 : routing.rank[routed / (F / 4)][token];
            if (rank != NOT_CHOSEN) {
                const float *from = own_sums + token * 8 + n;
                const u16 y = gated(sum_of(from), sum_of(from + 4));
                if (routed < 0)
                    shared_act[token * FS + unit * 4 + n] = y;
                else
                    act[(token * A + rank) * F + routed % (F / 4) * 4 + n] = y;
            }
        }
        if (unit == blockIdx.x) stamp(FIRST_DONE);
    };
    wait_for_inputs();
    stamp(WAITED);
    auto copy_tokens = [&]() {
        for (int i = thread; i < live * (K / 8); i += THREADS)
            copy_async(tokens + i / (K / 8) * STRIDE + i % (K / 8) * 8, x + (size_t)i * 8, true);
    };
#if COLS == 1
    route_one(routing, contest, scores, own_bias[0], live > 0, softcap, copy_tokens);
#else
    route(routing, scores, own_bias, live, softcap, copy_tokens);
#endif
    count = shared_units + routing.num_slots * (F / 4);
    stamp(ROUTED);
#if BULK
    if (asks()) ask_first(shared_units);
    // Not before: the next kernel reads the scores before it waits, and its weights are wanted after these.
    let_next_start();
    wait_for_copies();
    write_ids();
    __syncthreads();
    if (warp < WARPS) operands.hold();
    stamp(PREPARED);
    take_units(step, count, RING, ring, sums, arrivals, operands, ask, add_up);
#else
    static_assert(RING % LOADS == 0, "units on their way are whole");
    // Where a unit's weights start for this lane; units past the end read the first one again.
    auto start_of = [&](int unit) {
        return (unit < shared_units || unit >= count ? shared_weight : weight) + row_of(unit < count ? unit : 0, g) * K + own;
    };
    // The tokens and the shared expert's weights have had the time of the routing to come.
    wait_for_copies();
#pragma unroll
    for (int j = 0; j < RING; j++) {
        const int unit = blockIdx.x + (j / LOADS) * step;
        // Without a policy for L2: with one, compilers before CUDA 13.1 encode the first copy here, for sm_90 and a lone row,
        // with a register that there is not, which ends in an illegal instruction.
        if (unit >= shared_units && unit < count)
            copy_async(slot + j * WARPS * 256, start_of(unit) + j % LOADS * 32, true);
        end_stream_group();
    }
    let_next_start();
    write_ids();
    __syncthreads();
    stamp(PREPARED);
    int buffer = 0;
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
    for (int first = blockIdx.x; first < count; first += step * UNITS) {
        const u16 *next = shared_weight;
#pragma unroll
        for (int j = 0; j < RING; j++) {
            const int at = j % LOADS, unit = first + (j / LOADS) * step;
            if (at == 0) next = start_of(unit + UNITS * step);
            wait_for_stream<RING - 1>();
            operands.multiply_piece(even, odd, at, *(const uint4 *)(slot + j * WARPS * 256));
            stream(slot + j * WARPS * 256, next + at * 32, unit + UNITS * step < count);
            if (at == LOADS - 1 && unit < count) {
                leave_sums(sums + buffer * SUMS, even, odd);
                __syncthreads();
                add_up(unit, sums + buffer * SUMS);
                buffer ^= 1;
            }
            if (at == LOADS - 1)
                for (int i = 0; i < 4; i++) even[i] = odd[i] = 0.0f;
        }
    }
#endif
    stamp(ENDED);
}
