// silu(gate) * up of the shared expert and of every expert that a row chose, in steps of more than 16 rows.
//
// -D: as in wide.cuh; F width of all experts; RUN units, which F / 4 is a multiple of.
// A unit is 4 gate rows and 4 up rows of one expert. A program asks for its units of the shared expert while the routing
// is still made. All others come in runs of one expert, for which its rows stay in registers; who is done takes the next
// one, for multiprocessors are not equally fast.
#include "wide.cuh"

#define UNIT (8 * K)
// Floats of a unit's sums, of which there are two in turn.
#define SUMS (WARPS * GROUP * 8)

// Leave a warp's part of a unit's sums; a barrier must follow.
DEVICE void leave_sums(float *sums, const float (&even)[4], const float (&odd)[4]) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float *mine = sums + (threadIdx.x >> 5) * GROUP * 8 + g * 8 + 2 * t;
    *(float2 *)mine = make_float2(even[0] + odd[0], even[1] + odd[1]);
    *(float2 *)(mine + 64) = make_float2(even[2] + odd[2], even[3] + odd[3]);
}
// The warps' parts of one product.
DEVICE float sum_of(const float *from) {
    float y = 0.0f;
    for (int w = 0; w < WARPS; w++) y += from[w * GROUP * 8];
    return y;
}

KERNEL(THREADS, 1)
wide_up(const u16 *x, const int *expert_ids, const int *expert_weights, int *num_dealt, const u16 *weight,
        const u16 *shared_weight, u16 *act, u16 *shared_act, const int *num_rows) {
    EXTERN_SHARED(u16, ring);
    float *sums = (float *)(ring + RING * UNIT);
    Table &table = *(Table *)(sums + 2 * SUMS);
    u64 *arrivals = (u64 *)(&table + 1);
    int *next_runs = (int *)(arrivals + 2 * RING);  // of a run that starts at a place, the program's next one
    const int thread = threadIdx.x, warp = thread >> 5, g = (thread & 31) >> 2, programs = gridDim.x, program = blockIdx.x;
    const bool is_asker = warp == WARPS;
    const int live = min(load_fresh32(num_rows), ROWS);
    Turn turn;
    stamp(STARTED);
    if (asks()) make_places(arrivals);
    __syncthreads();
    // Four gate rows from `rows` on, and four up rows.
    auto ask = [&](const u16 *rows) {
        turn.wait_till_free(arrivals);
        if (asks()) {
            u16 *to = ring + turn.at * UNIT;
            expect_bytes(arrivals + turn.at, UNIT * 2);
            copy_bulk(to, rows, UNIT, arrivals + turn.at);
            copy_bulk(to + UNIT / 2, rows + (size_t)F * K, UNIT, arrivals + turn.at);
        }
        turn.next();
    };
    Gathered operands;
    static_assert(sizeof(TableScratch) <= 2 * SUMS * sizeof(float), "the sums' place is free till then");
    auto hold = [&](const Rows &rows, int first) {
        operands.hold(first, rows.count, [&](int i) { return x + (size_t)rows.row(i) * K; });
    };
    float *own_sums = sums;
    // Up to RUN units, `apart` columns from each other, of rows whose first 16 are in `operands`; into columns of `to`.
    auto take = [&](const Rows &rows, u16 *to, int column, int apart, int count) {
        for (int first = 0;; first += GROUP) {
            const bool is_last = first + GROUP >= rows.count;
            Turn at = turn;
#pragma unroll 1
            for (int unit = 0; unit < count; unit++) {
                float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
                at.wait_for_weights(arrivals);
                operands.multiply(even, odd, ring + at.at * UNIT);
                if (is_last)
                    at.leave(arrivals);
                else
                    at.next();
                leave_sums(own_sums, even, odd);
                // Another unit's sums may be written once this barrier is passed.
                sync_first(WARPS * 32);
                const int i = thread / 4, n = thread % 4;
                if (i < GROUP && first + i < rows.count) {
                    const float *from = own_sums + i * 8 + n;
                    to[(size_t)rows.pair(first + i) * F + column + unit * apart + n] = gated(sum_of(from), sum_of(from + 4));
                }
                own_sums = own_sums == sums ? sums + SUMS : sums;
            }
            if (is_last) {
                turn = at;
                break;
            }
            hold(rows, first + GROUP);
        }
    };
    // Of the shared expert.
    const int own = (F / 4 - program + programs - 1) / programs;
    auto ask_shared = [&](int from, int to) {
#pragma unroll 1
        for (int i = from; i < to; i++) ask(shared_weight + (size_t)(program + i * programs) * 4 * K);
    };
    if (is_asker) ask_shared(0, min(own, RING));
    stamp(ASKED);
    wait_for_inputs();
    stamp(WAITED);
    // Not before: the next kernel reads the routing before it waits.
    let_next_start();
    if (!is_asker) make_table(table, *(TableScratch *)sums, expert_ids, expert_weights, live);
    __syncthreads();
    stamp(ROUTED);
    const int per = F / 4 / RUN, runs = table.num_slots * per;
    if (is_asker) {
        ask_shared(RING, own);
#pragma unroll 1
        for (int run = program, next = program + programs; run < runs;) {
            int after = 0;
            if (asks()) after = 2 * programs + atomicAdd(num_dealt, 1);
            turn.wait_till_free(arrivals);
            if (asks()) next_runs[turn.at] = next;
#pragma unroll 1
            for (int i = 0; i < RUN; i++)
                ask(weight + ((size_t)table.experts[run / per] * 2 * F + (run % per * RUN + i) * 4) * K);
            run = next, next = from_lane(after, 31);
        }
        return;
    }
    const Rows all = {nullptr, live};
    for (int i = 0; i < own; i += RUN) {
        hold(all, 0);
        take(all, shared_act, (program + i * programs) * 4, programs * 4, min(RUN, own - i));
    }
    stamp(PREPARED);
    // Rows 0 to 7 of the next run's expert: few have more.
    uint4 ahead[LOADS];
    auto hold_ahead = [&](int run) {
        const Rows next = run < runs ? table.rows(run / per) : Rows{nullptr, 0};
        Gathered::hold(ahead, g < next.count ? x + (size_t)next.row(g) * K : nullptr);
    };
    hold_ahead(program);
    for (int run = program, next; run < runs; run = next) {
        turn.wait_for_weights(arrivals);
        next = next_runs[turn.at];
        const Rows rows = table.rows(run / per);
        operands.take(ahead);
        if (rows.count > GROUP / 2) hold(rows, 0);
        hold_ahead(next);
        take(rows, act, run % per * RUN * 4, 4, RUN);
    }
    stamp(ENDED);
}
