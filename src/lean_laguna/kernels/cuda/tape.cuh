// All weights that a block multiplies in a step, in their order, as one tape that is read ahead.
//
// The ring in shared memory holds the next RING items of 4 KiB, whatever phase or layer they belong to: while a block
// waits for other blocks, what comes next is on its way. A lane copies and reads its own 16 bytes of an item: 8 weight
// rows times 32 columns of each warp's part of K. Every group of GROUP items is a group of the copy engine's, an empty
// one where nothing can be issued, so at least GROUPS - 1 later ones exist whenever a group is taken.
#pragma once
#include "step_types.cuh"

#if E
#define KNOWN (E / 8 + FS / 4)
#else
#define KNOWN 0
#endif

// A stretch of the tape, one lane's: 8 rows of D columns, or 16 rows of any length, 8 and 8 in turn.
struct Run {
    const u16 *from;
    u32 odd, left;                    // offset of odd items; groups
};
DEVICE Run rows_run(const u16 *weight, int row, int warp, int t) {
    return {weight + (size_t)row * D + warp * PART + 8 * t, 32, LOADS / GROUP};
}
DEVICE Run pair_run(const u16 *weight, int pair, int k, int warp, int g, int t) {
    return {weight + (size_t)(pair * 16 + g) * k + warp * (k / WARPS) + 8 * t, 8u * k, (u32)k / 128 / GROUP};
}

// Units of the second half's first products, in their order: the router's 8 rows, the shared expert's 4 gate and
// 4 up rows, those of every chosen expert; or a dense layer's. Nothing is left (0) past the last.
DEVICE Run up_run(const Shared &s, const Layer &at, int unit, bool is_routed, int warp, int g, int t) {
    const int row4 = g & 3;
    if (!at.sparse) {
        if (unit >= at.dense / 4) return {0, 0, 0};
        return rows_run(at.gate_up, unit * 4 + row4 + (g < 4 ? 0 : at.dense), warp, t);
    }
#if E
    if (unit < E / 8) return rows_run(at.router, unit * 8 + g, warp, t);
    if (unit < KNOWN) return rows_run(at.router, E + (unit - E / 8) * 4 + row4 + (g < 4 ? 0 : FS), warp, t);
    const int index = unit - KNOWN;
    if (is_routed && index < s.routing.num_slots * (F / 4)) {
        const u16 *expert = at.gate_up + (size_t)s.routing.experts[index / (F / 4)] * (2 * F * D);
        return rows_run(expert, index % (F / 4) * 4 + row4 + (g < 4 ? 0 : F), warp, t);
    }
#endif
    return {0, 0, 0};
}

// Find the warp's next run. Nothing left: the tape has ended, or what comes is not known yet.
NOT_INLINED Run find_run(Shared &s, int thread, int block, int grid) {
    const int warp = thread >> 5, g = (thread & 31) >> 2, t = thread & 3;
    Place place = s.places[warp];
    Run run = {0, 0, 0};
    while (run.left == 0 && place.layer < LAYERS) {
        const Layer &at = s.layers[place.layer];
        bool is_last_of_unit = true;
        if (place.phase == QKV) {
            if (place.unit < at.width / 8) run = rows_run(at.qkv, place.unit * 8 + g, warp, t);
        } else if (place.phase == UP) {
            run = up_run(s, at, place.unit, s.routed == place.layer, warp, g, t);
            if (run.left == 0 && at.sparse && s.routed != place.layer) break;
        } else if (place.unit < D / 16) {
            if (place.phase == OUT)
                run = pair_run(at.out, place.unit, at.heads * P, warp, g, t);
            else if (!at.sparse)
                run = pair_run(at.down, place.unit, at.dense, warp, g, t);
#if E
            else if (place.slot < s.routing.num_slots) {
                const u16 *expert = at.down + (size_t)s.routing.experts[place.slot++] * (D * F);
                run = pair_run(expert, place.unit, F, warp, g, t);
                is_last_of_unit = false;
            } else {
                run = pair_run(at.shared_down, place.unit, FS, warp, g, t);
                place.slot = 0;
            }
#endif
        }
        if (run.left == 0) {
            place.unit = block;
            if (place.phase == DOWN) place.layer++;
            place.phase = place.phase == QKV ? OUT : place.phase == OUT ? UP : place.phase == UP ? DOWN : QKV;
        } else if (is_last_of_unit)
            place.unit += grid;
    }
    __syncwarp();
    s.places[warp] = place;
    __syncwarp();
    return run;
}

struct Tape {
    Shared &s;
    u16 *ring;                        // this thread's
    Run run;
    int write, read, owed, taken;     // groups

    METHOD void start(Self &self) {
        run.left = write = read = owed = taken = 0;
        if (self.lane == 0) s.places[self.warp] = {0, QKV, self.block, 0};
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < GROUPS; i++) issue(self);
    }
    METHOD bool copy(Self &self) {
        if (run.left == 0) {
            run = find_run(s, self.thread, self.block, self.grid);
            if (run.left == 0) return false;
        }
        const bool is_pair = run.odd != 32;
        const u32 even = is_pair ? 32 : 64;
        u16 *to = ring + write * (GROUP * ITEM);
#pragma unroll
        for (int i = 0; i < GROUP; i++) stream_item(to + i * ITEM, run.from + ((i & 1) * run.odd + (i >> 1) * even));
        run.from += (GROUP / 2) * even, run.left--;
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
        const u16 *from = ring + read * (GROUP * ITEM);
#pragma unroll
        for (int i = 0; i < GROUP; i++) w[i] = *(const uint4 *)(from + i * ITEM);
        read = read + 1 == GROUPS ? 0 : read + 1;
        taken++;
        issue(self);
    }
};
