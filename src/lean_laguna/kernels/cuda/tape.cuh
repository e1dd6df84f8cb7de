// All weights that a block multiplies in a step, in their order, as one tape that is read ahead.
//
// The ring in shared memory holds the next RING items of 4 KiB, whatever phase or layer they belong to: while a block
// waits for other blocks, what comes next is on its way. A lane copies and reads its own 16 bytes of an item: 8 weight
// rows times 32 columns of each warp's part of K. Every group of GROUP items is a group of the copy engine's, an empty
// one where nothing can be issued, so at least GROUPS - 1 later ones exist whenever a group is taken.
// A run is 8 rows of D columns, or 16 rows of any length, 8 and 8 in turn. Each warp lays out up to 32 runs of one
// kind at a time, a lane each.
#pragma once
#include "step_types.cuh"

#if E
#define KNOWN (E / 8 + FS / 4)
#else
#define KNOWN 0
#endif

// Start of the run of a unit (of rows or pairs, of its kind) or slot; also the kind's row length and the distance of
// its second four rows. Null past the last.
DEVICE const u16 *start_of_run(const Shared &s, const Layer &at, int kind, int unit, int slot, u32 &k, u32 &half) {
    k = D, half = 4 * D;
    if (kind == ROWS_QKV) return unit < at.width / 8 ? at.qkv + (size_t)unit * (8 * D) : 0;
    if (kind == PAIRS_OUT) {
        k = at.heads * P, half = 4 * k;
        return unit < D / 16 ? at.out + (size_t)unit * (16 * k) : 0;
    }
    if (!at.sparse) {
        if (kind == ROWS_UP) half = at.dense * D;
        if (kind == ROWS_UP) return unit < at.dense / 4 ? at.gate_up + (size_t)unit * (4 * D) : 0;
        k = at.dense, half = 4 * k;
        return kind == PAIRS_DOWN && unit < D / 16 ? at.down + (size_t)unit * (16 * k) : 0;
    }
#if E
    const Routing &r = s.routing;
    if (kind == ROWS_ROUTER) return unit < E / 8 ? at.router + (size_t)unit * (8 * D) : 0;
    if (kind == ROWS_SHARED) {
        half = FS * D;
        return unit < KNOWN ? at.router + (size_t)(E + (unit - E / 8) * 4) * D : 0;
    }
    if (kind == ROWS_UP) {
        half = F * D;
        const int index = unit - KNOWN;
        if (index >= r.num_slots * (F / 4)) return 0;
        return at.gate_up + (size_t)r.experts[index / (F / 4)] * (2 * F * D) + (size_t)(index % (F / 4)) * (4 * D);
    }
    k = kind == PAIRS_DOWN ? F : FS, half = 4 * k;
    if (unit >= D / 16) return 0;
    if (kind == PAIRS_SHARED) return slot == 0 ? at.shared_down + (size_t)unit * (16 * FS) : 0;
    return slot < r.num_slots ? at.down + (size_t)r.experts[slot] * (D * F) + (size_t)unit * (16 * F) : 0;
#else
    return 0;
#endif
}

// Lay out the warp's next batch of runs: none where the tape has ended or what comes is not known yet.
NOT_INLINED void lay_out(Shared &s, int thread, int block, int grid) {
    const int warp = thread >> 5, lane = thread & 31;
    Place place = s.places[warp];
    place.count = 0;
    while (place.count == 0 && place.layer < LAYERS) {
        const Layer &at = s.layers[place.layer];
        const int kind = place.kind;
        if (kind == ROWS_UP && at.sparse && s.routed != place.layer) break;
        const bool is_by_slot = at.sparse && kind >= PAIRS_DOWN;
        const int unit = is_by_slot ? place.unit : place.unit + lane * grid;
        const u16 *start = start_of_run(s, at, kind, unit, place.slot + lane, place.k, place.half);
        s.starts[warp][lane] = start;
        place.count = bits_set(lanes_where(start != 0));
        place.is_pair = kind == PAIRS_OUT || kind >= PAIRS_DOWN;
        if (is_by_slot)
            place.slot += place.count;
        else
            place.unit += place.count * grid;
        if (place.count > 0) continue;
        place.slot = 0;
        if (is_by_slot && kind == PAIRS_SHARED && place.unit + grid < D / 16) {
            place.unit += grid, place.kind = PAIRS_DOWN;
            continue;
        }
        // The router's units, the shared expert's and the routed ones are numbered through; so are a pair's two kinds.
        if (kind != ROWS_ROUTER && kind != ROWS_SHARED && !(is_by_slot && kind == PAIRS_DOWN)) place.unit = block;
        if (kind == PAIRS_OUT || kind == PAIRS_SHARED) place.unit = block;
        place.kind = kind + 1 == KINDS ? 0 : kind + 1;
        place.layer += kind + 1 == KINDS;
        if (place.kind == ROWS_ROUTER && !at.sparse) place.kind = ROWS_UP;
    }
    __syncwarp();
    s.places[warp] = place;
    __syncwarp();
}

struct Tape {
    Shared &s;
    u16 *ring;                        // this thread's
    const u16 *from;                  // of the run's next group
    u32 odd, even, offset;            // of odd items, of each two, of this lane in a run
    int left, run, runs, length;      // groups left in the run; runs taken and laid out; groups of each
    int write, read, owed, taken;     // groups

    METHOD void start(Self &self) {
        from = 0, odd = even = offset = 0;
        left = run = runs = length = write = read = owed = taken = 0;
        if (self.lane == 0) s.places[self.warp] = {0, ROWS_QKV, self.block, 0, 0, 0, 0, 0};
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < GROUPS; i++) issue(self);
    }
    METHOD bool next_run(Self &self) {
        if (run == runs) {
            lay_out(s, self.thread, self.block, self.grid);
            const Place &place = s.places[self.warp];
            run = 0, runs = place.count;
            if (runs == 0) return false;
            const u32 k = place.k;
            offset = (self.g & 3) * k + (self.g >> 2) * place.half + self.warp * (k / WARPS) + 8 * self.t;
            odd = place.is_pair ? 8 * k : 32, even = place.is_pair ? 32 : 64;
            length = k / (place.is_pair ? 128 : 256) / GROUP;
        }
        from = s.starts[self.warp][run++] + offset;
        left = length;
        return true;
    }
    METHOD bool copy(Self &self) {
        if (left == 0 && !next_run(self)) return false;
        u16 *to = ring + write * (GROUP * ITEM);
#pragma unroll
        for (int i = 0; i < GROUP; i++) stream_item(to + i * ITEM, from + ((i & 1) * odd + (i >> 1) * even));
        from += (GROUP / 2) * even, left--;
        write = write + 1 == GROUPS ? 0 : write + 1;
        return true;
    }
    // Issue the next group, or owe it.
    METHOD void issue(Self &self) {
        owed += !copy(self);
        end_stream_group();
    }
    // Issue what is owed.
    METHOD void catch_up(Self &self) {
#pragma unroll 1
        while (owed > 0 && copy(self)) {
            owed--;
            end_stream_group();
        }
    }
    // Take the oldest group, and issue another in its place.
    METHOD void take(uint4 (&w)[GROUP], Self &self) {
        wait_for_stream<GROUPS - 1>();
        const u16 *at = ring + read * (GROUP * ITEM);
#pragma unroll
        for (int i = 0; i < GROUP; i++) w[i] = *(const uint4 *)(at + i * ITEM);
        read = read + 1 == GROUPS ? 0 : read + 1;
        taken++;
        issue(self);
    }
};
