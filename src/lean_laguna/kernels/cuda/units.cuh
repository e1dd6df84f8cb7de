// What project.cu and experts_up.cu share: units of 8 weight rows times all tokens, each warp its own part of K, whose
// sums are added in the order of warps.
//
// -D: K row length; WARPS; COLS tokens (1, 8 or 16; the instruction is the same, and so a row's bits); BULK 1: whole rows
// come by the copy engine, RING units ahead; otherwise RING 16-byte loads in flight a lane. GROUPS programs take the same
// units, each COLS tokens of its own: neighbours, so that memory is read once for all of them.
#pragma once
#include "common.cuh"

#define PART (K / WARPS)
#define LOADS (PART / 32)
#define STRIDE (K + 8)
#define UNIT (8 * K)
#define RING_SIZE (BULK ? RING * UNIT : RING * WARPS * 256)  // elements
// By the copy engine, one warp more asks for units, when the others have ended their turns at a place.
#define THREADS ((WARPS + BULK) * 32)
#ifndef GROUPS
#define GROUPS 1
#endif
// A program's number among those of its group, and how many they are.
#define PROGRAM (blockIdx.x / GROUPS)
#define NUM_PROGRAMS (gridDim.x / GROUPS)
// Floats of a unit's sums, of which there are two in turn.
#define SUMS (WARPS * COLS * 8)
// Floats set aside for the norm: a lone row's squares, or the rows' inverses.
#define NORM_FLOATS (COLS == 1 ? K / 8 : 16)
// Wider steps keep their tokens in registers; a lone row's four lanes read theirs for next to nothing.
#ifndef HELD
#define HELD (BULK && COLS > 1)
#endif

// Tokens g and g + 8 in a warp's part of K, zeros where there are none.
struct Tokens {
    const u16 *at;
    bool has_low, has_high;
    uint4 low[HELD ? LOADS : 1], high[HELD && COLS > 8 ? LOADS : 1];

    METHOD Tokens(const u16 *tokens, int live) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        at = tokens + g * STRIDE + (threadIdx.x >> 5) * PART + 8 * t;
        has_low = g < live, has_high = COLS > 8 && g + 8 < live;
    }
    METHOD uint4 read_low(int j) const { return has_low ? *(const uint4 *)(at + j * 32) : make_uint4(0, 0, 0, 0); }
    METHOD uint4 read_high(int j) const {
        return has_high ? *(const uint4 *)(at + 8 * STRIDE + j * 32) : make_uint4(0, 0, 0, 0);
    }
    // When they are in shared memory.
    METHOD void hold() {
#pragma unroll
        for (int j = 0; j < (HELD ? LOADS : 0); j++) {
            low[j] = read_low(j);
            if (COLS > 8) high[j] = read_high(j);
        }
    }
    // Block j of 32 columns times a lane's piece of a weight row.
    METHOD void multiply_piece(float (&even)[4], float (&odd)[4], int j, uint4 w) const {
        if (HELD)
            multiply_block(even, odd, low[j], COLS > 8 ? high[j] : make_uint4(0, 0, 0, 0), w);
        else
            multiply_block(even, odd, read_low(j), read_high(j), w);
    }
    // A unit whose rows lie one after another in shared memory.
    METHOD void multiply_unit(float (&even)[4], float (&odd)[4], const u16 *unit) const {
        take_pieces<K, LOADS>(unit, [&](int j, uint4 w) { multiply_piece(even, odd, j, w); });
    }
};

// RMSNorm of all rows, eight at a time: a thread keeps its pieces of each, a warp adds up a row's squares.
DEVICE void normalise_rows(const u16 *x, const uint4 (&by)[OWN_PIECES(K, WARPS)], u16 *tokens, float *inverses,
                           u16 *normed, int live, float eps, int x_stride) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, own = warp * (PART / 8), count = PART / 8;
    for (int first = 0; first < live; first += 8) {
        const int rows = min(live - first, 8);
        uint4 pieces[8][OWN_PIECES(K, WARPS)];
        float *squares = (float *)(tokens + first * STRIDE);  // before the rows themselves
#pragma unroll
        for (int r = 0; r < 8; r++)
#pragma unroll
            for (int i = 0; i < OWN_PIECES(K, WARPS); i++)
                if (r < rows && i * 32 + lane < count)
                    pieces[r][i] = load_fresh(x + (size_t)(first + r) * x_stride + (own + i * 32 + lane) * 8);
#pragma unroll
        for (int r = 0; r < 8; r++)
#pragma unroll
            for (int i = 0; i < OWN_PIECES(K, WARPS); i++)
                if (r < rows && i * 32 + lane < count) squares[r * (K / 8) + own + i * 32 + lane] = squares_of(pieces[r][i]);
        __syncthreads();
        for (int r = warp; r < rows; r += WARPS) {
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < K / 256; i++) total += squares[r * (K / 8) + i * 32 + lane];
            total = sum_over_warp(total);
            if (lane == 0) inverses[first + r] = rsqrtf(total / K + eps);
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 8; r++) {
            if (r >= rows) continue;
            const int row = first + r;
            const float inverse = inverses[row];
#pragma unroll
            for (int i = 0; i < OWN_PIECES(K, WARPS); i++) {
                if (i * 32 + lane >= count) continue;
                const int k = (own + i * 32 + lane) * 8;
                const uint4 y = scaled(pieces[r][i], inverse, by[i]);
                *(uint4 *)(tokens + row * STRIDE + k) = y;
                if (normed && row % NUM_PROGRAMS == PROGRAM) *(uint4 *)(normed + (size_t)row * K + k) = y;
            }
        }
    }
    __syncwarp();
}

// The norm's barriers, for the warp that has no part of it.
DEVICE void meet_norm(int live) {
    if (COLS == 1)
        __syncthreads();
    else
        for (int first = 0; first < live; first += 8) __syncthreads(), __syncthreads();
}

// Leave a warp's part of a unit's sums; a barrier must follow.
DEVICE void leave_sums(float *sums, const float (&even)[4], const float (&odd)[4]) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float *mine = sums + (threadIdx.x >> 5) * COLS * 8;
    if (g < COLS) *(float2 *)(mine + g * 8 + 2 * t) = make_float2(even[0] + odd[0], even[1] + odd[1]);
    if (COLS > 8) *(float2 *)(mine + (g + 8) * 8 + 2 * t) = make_float2(even[2] + odd[2], even[3] + odd[3]);
}
// The warps' parts of one product.
DEVICE float sum_of(const float *from) {
    float y = 0.0f;
    for (int w = 0; w < WARPS; w++) y += from[w * COLS * 8];
    return y;
}

#if BULK
// Make the arrivals of places, and behind them where turns end; called by the thread that asks.
DEVICE bool asks() { return threadIdx.x == THREADS - 1; }
DEVICE void make_arrivals(u64 *arrivals, int slots) {
#pragma unroll 1
    for (int slot = 0; slot < slots; slot++) {
        init_arrival(arrivals + slot);
        init_turns(arrivals + slots + slot, WARPS);
    }
    show_arrivals();
}
// Multiply a program's units as they come and call `add_up(unit, sums)` for each, and `ask(slot, unit)` for those that were
// not asked for at first.
template <class Ask, class AddUp>
DEVICE void take_units(int step, int count, int slots, const u16 *ring, float *sums, u64 *arrivals, const Tokens &operands,
                       Ask ask, AddUp add_up) {
    u64 *turns = arrivals + slots;
    int slot = 0, parity = 0, buffer = 0;
    if (threadIdx.x >= WARPS * 32) {
        for (int unit = PROGRAM + slots * step; unit < count; unit += step) {
            wait_for_turns(turns + slot, parity);
            if (asks()) ask(slot, unit);
            if (++slot == slots) slot = 0, parity ^= 1;
        }
        return;
    }
    for (int unit = PROGRAM; unit < count; unit += step) {
        float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
        wait_for_bytes(arrivals + slot, parity);
        operands.multiply_unit(even, odd, ring + slot * UNIT);
        __syncwarp();
        if (threadIdx.x % 32 == 0) end_turn(turns + slot);
        leave_sums(sums + buffer * SUMS, even, odd);
        // Another unit's sums may be written once this barrier is passed.
        sync_first(WARPS * 32);
        add_up(unit, sums + buffer * SUMS);
        buffer ^= 1;
        if (++slot == slots) slot = 0, parity ^= 1;
    }
}
#endif
