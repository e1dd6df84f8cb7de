// Down of the chosen experts, their weighted sum, the shared expert's down and the residual, in steps of more than 16 rows.
//
// -D: as in wide.cuh, K the width of all experts, N the hidden size; AHEAD experts whose rows are asked for ahead. A
// program owns 16 output columns and walks the live experts in ascending id; a warp adds up its part of K for itself,
// so a row's sum has one order whichever experts other rows chose. Weights come before the experts' activations are there.
#include "wide.cuh"

#define UNIT (8 * K)
#define COLUMNS 16
// Outputs of a thread.
#define OUTS (ROWS * COLUMNS / (WARPS * 32))

KERNEL(THREADS, 1)
wide_down(const u16 *act, const u16 *shared_act, const int *expert_ids, const int *expert_weights, const u16 *weight,
          const u16 *shared_weight, u16 *hidden, u16 *tap, const int *num_rows, float scaling, int tap_stride) {
    EXTERN_SHARED(u16, ring);
    float *sums = (float *)(ring + RING * 2 * UNIT);  // [WARPS, ROWS, COLUMNS]
    Table &table = *(Table *)(sums + WARPS * ROWS * COLUMNS);
    u64 *arrivals = (u64 *)(&table + 1);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int live = min(load_fresh32(num_rows), ROWS);
    const bool is_asker = warp == WARPS;
    Turn turn;
    stamp(STARTED);
    auto ask = [&](const u16 *rows) {
        turn.wait_till_free(arrivals);
        if (asks()) {
            expect_bytes(arrivals + turn.at, 2 * UNIT * 2);
            copy_bulk(ring + turn.at * 2 * UNIT, rows + (size_t)blockIdx.x * COLUMNS * K, 2 * UNIT * 2, arrivals + turn.at);
        }
        turn.next();
    };
    if (asks()) make_places(arrivals);
    if (is_asker)
        ask(shared_weight);
    else
        make_table(table, *(TableScratch *)sums, expert_ids, expert_weights, live);
    __syncthreads();
    const int slots = table.num_slots;
    if (is_asker) {
        for (int slot = 0; slot < slots; slot++) ask(weight + (size_t)table.experts[slot] * N * K);
        return;
    }
    stamp(ASKED);
    let_next_start();
    wait_for_inputs();
    stamp(WAITED);
    // Sixteen rows times the weights that lie at a turn.
    auto multiply = [&](const Gathered &operands, float (&even)[2][4], float (&odd)[2][4]) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            operands.multiply(even[half], odd[half], ring + (turn.at * 2 + half) * UNIT);
    };
    float *mine = sums + warp * ROWS * COLUMNS + 2 * t;
    auto outputs = [&](int i) {
        float y = 0.0f;
        for (int w = 0; w < WARPS; w++) y += sums[w * ROWS * COLUMNS + i * WARPS * 32 + thread];
        return y;
    };
    Gathered operands;
    // Of the next experts, rows 0 to 7: few have more.
    uint4 ahead[AHEAD][LOADS];
    auto hold_ahead = [&](uint4 (&to)[LOADS], int slot) {
        const Rows rows = slot < slots ? table.rows(slot) : Rows{nullptr, 0};
        Gathered::hold(to, g < rows.count ? act + (size_t)rows.pairs[g] * K : nullptr);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) hold_ahead(ahead[i], i);
    float old[OUTS], shared[OUTS];
#pragma unroll
    for (int i = 0; i < OUTS; i++) {
        const int row = (i * WARPS * 32 + thread) / COLUMNS;
        old[i] = row < live ? from_bf16(load_fresh16(hidden + (size_t)row * N + blockIdx.x * COLUMNS + thread % COLUMNS)) : 0.0f;
    }
    turn.wait_for_weights(arrivals);
    for (int first = 0; first < live; first += GROUP) {
        float even[2][4] = {}, odd[2][4] = {};
        operands.hold(first, live, [&](int row) { return shared_act + (size_t)row * K; });
        multiply(operands, even, odd);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *to = mine + (first + g) * COLUMNS + half * 8;
            *(float2 *)to = make_float2(even[half][0] + odd[half][0], even[half][1] + odd[half][1]);
            *(float2 *)(to + 8 * COLUMNS) = make_float2(even[half][2] + odd[half][2], even[half][3] + odd[half][3]);
        }
    }
    turn.leave(arrivals);
    sync_first(WARPS * 32);
#pragma unroll
    for (int i = 0; i < OUTS; i++) shared[i] = outputs(i);
    sync_first(WARPS * 32);
    for (int i = lane; i < live * COLUMNS; i += 32) sums[warp * ROWS * COLUMNS + i] = 0.0f;
    __syncwarp();
    stamp(PREPARED);
    for (int from = 0; from < slots; from += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int slot = from + i;
            if (slot >= slots) break;
            const Rows rows = table.rows(slot);
            const float *weights = table.weights + table.starts[slot];
            turn.wait_for_weights(arrivals);
            for (int first = 0; first < rows.count; first += GROUP) {
                float even[2][4] = {}, odd[2][4] = {};
                if (rows.count > GROUP / 2)
                    operands.hold(first, rows.count, [&](int at) { return act + (size_t)rows.pairs[at] * K; });
                else
                    operands.take(ahead[i]);
                multiply(operands, even, odd);
#pragma unroll
                for (int high = 0; high < 2; high++) {
                    const int at = first + high * 8 + g;
                    if (at >= rows.count) continue;
                    const float by = weights[at];
                    float2 *total = (float2 *)(mine + rows.row(at) * COLUMNS);
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float2 v = total[half * 4];
                        v.x += (even[half][high * 2] + odd[half][high * 2]) * by;
                        v.y += (even[half][high * 2 + 1] + odd[half][high * 2 + 1]) * by;
                        total[half * 4] = v;
                    }
                }
            }
            turn.leave(arrivals);
            hold_ahead(ahead[i], slot + AHEAD);
        }
    }
    stamp(FIRST_DONE);
    sync_first(WARPS * 32);
#pragma unroll
    for (int i = 0; i < OUTS; i++) {
        const int row = (i * WARPS * 32 + thread) / COLUMNS, column = blockIdx.x * COLUMNS + thread % COLUMNS;
        if (row >= live) break;
        const float y = rounded(rounded(rounded(outputs(i)) * scaling) + rounded(shared[i]));
        const u16 result = to_bf16(old[i] + y);
        hidden[(size_t)row * N + column] = result;
        if (tap) tap[(size_t)row * tap_stride + column] = result;
    }
    stamp(ENDED);
}
