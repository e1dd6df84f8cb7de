// Down of the chosen experts, their weighted sum, the shared expert's down and the residual, in steps of more than 16 rows.
//
// -D: as in wide.cuh, K the width of all experts, N the hidden size; AHEAD times 16 rows are asked for ahead. A
// program owns 16 output columns and walks the live experts in ascending id; a warp adds up its part of K for itself,
// so a row's sum has one order whichever experts other rows chose. Weights come before the experts' activations are there.
#include "wide.cuh"

#define UNIT (8 * K)
#define COLUMNS 16
// Outputs of a thread.
#define OUTS (ROWS * COLUMNS / (WARPS * 32))
#define NOWHERE (-1)

// Up to 16 rows of one expert on their way: rows g and g + 8 of this lane, where their sums are, and by what they count.
struct Item {
    Gathered rows;
    int to[2];
    float by[2];
    bool is_last;  // of the expert's
};

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
    float *mine = sums + warp * ROWS * COLUMNS + 2 * t;
    auto outputs = [&](int i) {
        float y = 0.0f;
        for (int w = 0; w < WARPS; w++) y += sums[w * ROWS * COLUMNS + i * WARPS * 32 + thread];
        return y;
    };
    // The shared expert comes first, as one of weight 1 that all rows chose.
    Item ahead[AHEAD];
    int next_slot = -1, next_row = 0;
    auto hold_next = [&](Item &item) {
        if (next_slot >= slots) return;
        const bool is_shared = next_slot < 0;
        const Rows rows = is_shared ? Rows{nullptr, live} : table.rows(next_slot);
        const u16 *from = is_shared ? shared_act : act;
        const float *weights = table.weights + (is_shared ? 0 : table.starts[next_slot]);
#pragma unroll
        for (int high = 0; high < 2; high++) {
            const int at = next_row + high * 8 + g;
            const bool is_there = at < rows.count;
            Gathered::hold(high ? item.rows.high : item.rows.low, is_there ? from + (size_t)rows.pair(at) * K : nullptr);
            item.to[high] = is_there ? rows.row(at) * COLUMNS : NOWHERE;
            item.by[high] = is_there && !is_shared ? weights[at] : 1.0f;
        }
        next_row += GROUP;
        item.is_last = next_row >= rows.count;
        if (item.is_last) next_slot++, next_row = 0;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) hold_next(ahead[i]);
    float old[OUTS], shared[OUTS];
#pragma unroll
    for (int i = 0; i < OUTS; i++) {
        const int row = (i * WARPS * 32 + thread) / COLUMNS;
        old[i] = row < live ? from_bf16(load_fresh16(hidden + (size_t)row * N + blockIdx.x * COLUMNS + thread % COLUMNS)) : 0.0f;
    }
    auto clear = [&]() {
        for (int i = lane; i < live * COLUMNS; i += 32) sums[warp * ROWS * COLUMNS + i] = 0.0f;
        __syncwarp();
    };
    clear();
    stamp(PREPARED);
    int passed = 0;
    for (int slot = -1, stop = 0;; stop = slots) {
        while (slot < stop) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                // Where the walk before ended.
                if (i < passed) continue;
                if (slot == stop) {
                    passed = i;
                    break;
                }
                passed = 0;
                const Item &item = ahead[i];
                float even[2][4] = {}, odd[2][4] = {};
                turn.wait_for_weights(arrivals);
#pragma unroll
                for (int half = 0; half < 2; half++)
                    item.rows.multiply(even[half], odd[half], ring + (turn.at * 2 + half) * UNIT);
#pragma unroll
                for (int high = 0; high < 2; high++) {
                    if (item.to[high] == NOWHERE) continue;
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float2 *total = (float2 *)(mine + item.to[high] + half * 8), v = *total;
                        v.x += (even[half][high * 2] + odd[half][high * 2]) * item.by[high];
                        v.y += (even[half][high * 2 + 1] + odd[half][high * 2 + 1]) * item.by[high];
                        *total = v;
                    }
                }
                if (item.is_last) turn.leave(arrivals), slot++;
                hold_next(ahead[i]);
            }
        }
        if (stop == slots) break;
        sync_first(WARPS * 32);
#pragma unroll
        for (int i = 0; i < OUTS; i++) shared[i] = outputs(i);
        sync_first(WARPS * 32);
        clear();
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
