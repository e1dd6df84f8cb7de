// Which rows are whose expert's, in steps of more than 16 rows.
//
// -D: E experts, at most 32 * WARPS; A of them a row, ROWS at most; WARPS that make the table.
#pragma once
#include "common.cuh"

#define PAIRS (ROWS * A)
// Of an expert's rows, a bit each.
#define WORDS ((ROWS + 31) / 32)

// An expert's rows, or all of a step, which are the shared expert's.
struct Rows {
    const u16 *pairs;  // null: all
    int count;

    METHOD int row(int i) const { return pairs ? pairs[i] / A : i; }
    METHOD int pair(int i) const { return pairs ? pairs[i] : i; }
};

// A pair is a row and one of its experts: row * A + place among the row's own, best first.
struct alignas(16) Table {
    int num_slots;           // live experts
    u8 experts[E];           // of each slot, ascending
    u16 starts[E + 8];       // of each slot's pairs, and where the last one's end
    u16 pairs[PAIRS];        // by slot
    float weights[PAIRS];

    METHOD Rows rows(int slot) const { return {pairs + starts[slot], starts[slot + 1] - starts[slot]}; }
};

// What making one takes; may be anything afterwards.
struct TableScratch {
    u32 masks[E][WORDS];
    int totals[WARPS];
    u16 starts[E];
};

// By the first threads, from what the routing left of each pair; a barrier must follow.
DEVICE void make_table(Table &table, TableScratch &scratch, const int *ids, const int *weights, int live) {
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, threads = WARPS * 32;
    int own_ids[(PAIRS + threads - 1) / threads], own_weights[(PAIRS + threads - 1) / threads];
    const int count = live * A;
#pragma unroll
    for (int i = 0; i * threads < PAIRS; i++) {
        const int pair = i * threads + thread;
        own_ids[i] = pair < count ? load_fresh32(ids + pair) : 0;
        own_weights[i] = pair < count ? load_fresh32(weights + pair) : 0;
    }
    for (int i = thread; i < E * WORDS; i += threads) (&scratch.masks[0][0])[i] = 0;
    sync_first(threads);
#pragma unroll
    for (int i = 0; i * threads < PAIRS; i++) {
        const int pair = i * threads + thread, row = pair / A;
        if (pair < count) atomicOr(&scratch.masks[own_ids[i]][row / 32], 1u << row % 32);
    }
    sync_first(threads);
    // Live experts and pairs below each expert: in its warp, then in those before.
    int own = 0;
    for (int i = 0; i < WORDS; i++) own += thread < E ? __popc(scratch.masks[thread][i]) : 0;
    if (own) own |= 1 << 16;
    int below = own;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int before = from_lane(below, lane >= apart ? lane - apart : 0);
        if (lane >= apart) below += before;
    }
    if (lane == 31) scratch.totals[warp] = below;
    sync_first(threads);
    below -= own;
    for (int i = 0; i < warp; i++) below += scratch.totals[i];
    const int slot = below >> 16, start = below & 0xffff;
    if (thread < E) scratch.starts[thread] = (u16)start;
    if (own) {
        table.experts[slot] = (u8)thread;
        table.starts[slot] = (u16)start;
    }
    if (thread == E - 1) {
        table.num_slots = slot + (own > 0);
        table.starts[slot + (own > 0)] = (u16)count;
    }
    sync_first(threads);
#pragma unroll
    for (int i = 0; i * threads < PAIRS; i++) {
        const int pair = i * threads + thread, row = pair / A;
        if (pair >= count) break;
        const u32 *mask = scratch.masks[own_ids[i]];
        int at = scratch.starts[own_ids[i]] + __popc(mask[row / 32] & ((1u << row % 32) - 1u));
        for (int word = 0; word < row / 32; word++) at += __popc(mask[word]);
        table.pairs[at] = (u16)pair;
        table.weights[at] = __int_as_float(own_weights[i]);
    }
}
