// What the routing of a step of more than 16 rows leaves for the kernels after it: which pairs are whose expert's.
//
// -D: E experts, A of them a row, ROWS at most.
#pragma once
#include "common.cuh"

#define PAIRS (ROWS * A)

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
    alignas(16) u16 pairs[PAIRS];  // by slot
    alignas(16) float weights[PAIRS];

    METHOD Rows rows(int slot) const { return {pairs + starts[slot], starts[slot + 1] - starts[slot]}; }
};

// Of all that the kernel reads: by its first threads; a barrier must follow.
DEVICE void load_table(Table &table, const void *from) {
    for (int i = threadIdx.x; i < (int)(sizeof(Table) / 16); i += WARPS * 32)
        ((uint4 *)&table)[i] = load_fresh((const uint4 *)from + i);
}
