// What the experts of steps of more than 16 rows share: places that weights come to, and rows gathered.
//
// -D: K row length of the weights, WARPS that share it out, RING places; the rest as in table.cuh.
// Rows that chose an expert are gathered, 16 at a time, as the rows of the matrix instruction: a row's bits are those of
// narrower steps, where every row is one of them whichever expert it chose.
#pragma once
#include "table.cuh"

#define PART (K / WARPS)
#define LOADS (PART / 32)
#define GROUP 16
// One warp more asks for weights.
#define THREADS ((WARPS + 1) * 32)

// The next place of the ring to ask for or to take, all in turn.
struct Turn {
    int at = 0, round = 0;

    METHOD void next() {
        if (++at == RING) at = 0, round++;
    }
    METHOD void wait_for_weights(u64 *arrivals) const { wait_for_bytes(arrivals + at, round & 1); }
    // Till all warps have taken what was here before.
    METHOD void wait_till_free(u64 *arrivals) const {
        if (round > 0) wait_for_turns(arrivals + RING + at, (round - 1) & 1);
    }
    // A warp has taken what is here.
    METHOD void leave(u64 *arrivals) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) end_turn(arrivals + RING + at);
        next();
    }
};

DEVICE bool asks() { return threadIdx.x == THREADS - 1; }
// By the thread that asks; a barrier must follow.
DEVICE void make_places(u64 *arrivals) {
#pragma unroll 1
    for (int i = 0; i < RING; i++) {
        init_arrival(arrivals + i);
        init_turns(arrivals + RING + i, WARPS);
    }
    show_arrivals();
}

// A warp's part of up to 16 rows: g and g + 8 of this lane.
struct Gathered {
    uint4 low[LOADS], high[LOADS];

    METHOD static void hold(uint4 (&to)[LOADS], const u16 *row) {
        const u16 *from = row + (threadIdx.x >> 5) * PART + 8 * (threadIdx.x & 3);
#pragma unroll
        for (int j = 0; j < LOADS; j++) to[j] = make_uint4(0, 0, 0, 0);
        if (!row) return;
#pragma unroll
        for (int j = 0; j < LOADS; j++) to[j] = load_fresh(from + j * 32);
    }
    // Rows `first` and on of `count`, where `row_of` finds them.
    template <class RowOf> METHOD void hold(int first, int count, RowOf row_of) {
        const int g = (threadIdx.x & 31) >> 2;
        hold(low, first + g < count ? row_of(first + g) : nullptr);
        hold(high, first + 8 + g < count ? row_of(first + 8 + g) : nullptr);
    }
    // Rows 0 to 7, which are there already, and no others.
    METHOD void take(const uint4 (&rows)[LOADS]) {
#pragma unroll
        for (int j = 0; j < LOADS; j++) low[j] = rows[j], high[j] = make_uint4(0, 0, 0, 0);
    }
    // Times eight weight rows that lie one after another in shared memory.
    METHOD void multiply(float (&even)[4], float (&odd)[4], const u16 *rows) const {
        take_pieces<K, LOADS>(rows, [&](int j, uint4 w) { multiply_block(even, odd, low[j], high[j], w); });
    }
};
