// Routing, then silu(gate) * up of the shared expert and of every expert that a token chose.
//
// -D: E, A, SOFTCAP, NORM_TOPK of routing.cuh; K hidden size; F and FS width of a routed and of the shared expert;
// WARPS, BULK, RING, COLS, PROGRAMS, FORMAT (of both weights), TALL as in project.cu. A unit is 4 gate rows and 4 up rows of one expert; the shared expert's come
// first and need no routing, so they stream while the router still runs.
#include "packed.cuh"
#include "routing.cuh"

#define PART (K / WARPS)
#define BITS (bits_of(FORMAT))
#define CHUNKS (chunks_of(FORMAT))
#define LOADS (PART / 32 / CHUNKS)
#define ROW (K * BITS / 16)
#define UNITS (RING / LOADS)
#define STRIDE (K + 8)
#define RING_SIZE (BULK ? RING * 8 * K : RING * WARPS * 256)

struct Start {
    const u16 *codes;
    const u32 *words;
};

KERNEL(WARPS * 32, PROGRAMS)
experts_up(const u16 *x, const u16 *scores, const float *bias, const u16 *weight, const u32 *scales,
           const u16 *shared_weight, const u32 *shared_scales, const float *factors, u16 *act, u16 *shared_act,
           int *expert_ids, int *counter, const int *num_rows, float softcap) {
    EXTERN_SHARED(u16, ring);
    u16 *tokens = ring + RING_SIZE;
    float *sums = (float *)(tokens + COLS * STRIDE);
    Routing &routing = *(Routing *)(sums + 2 * WARPS * COLS * 8);
    Contest &contest = *(Contest *)(&routing + 1);
    u8 *behind = (u8 *)(&routing + 1) + (COLS == 1 ? sizeof(Contest) : 0);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int shared_units = FS / 4, step = gridDim.x;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    int count = shared_units;  // till the routing is known

    stamp(STARTED);
    // Row r of a unit, counted through its bank: four gate rows, four up rows.
    auto row_of = [&](int unit, int r) {
        const int routed = unit - shared_units, width = routed < 0 ? FS : F;
        const size_t first = routed < 0 ? unit * 4 : (size_t)routing.experts[routed / (F / 4)] * 2 * F + routed % (F / 4) * 4;
        return first + (r & 3) + (r < 4 ? 0 : width);
    };
#if BULK
    u64 *arrivals = (u64 *)behind;
    int *given = (int *)(arrivals + RING);
    // Items as in project.cu; half a unit is two gate rows and two up rows.
    const bool asks = thread == WARPS * 32 - 1;
    int whole = shared_units, items = shared_units;
    auto ask = [&](int slot, int item) {
        given[slot] = item < items ? item : -1;
        if (item >= items) {
            expect_nothing(arrivals + slot);
            return;
        }
        const int unit = item < whole ? item : whole + (item - whole) / 2, first = item < whole ? 0 : (item - whole) % 2 * 2;
        const u16 *from = unit < shared_units ? shared_weight : weight;
        u16 *to = ring + (slot * 8 + first) * K;
        const u32 bytes = (item < whole ? 4 : 2) * K * 2;
        expect_bytes(arrivals + slot, 2 * bytes);
        copy_bulk(to, from + row_of(unit, first) * K, bytes, arrivals + slot);
        copy_bulk(to + 4 * K, from + row_of(unit, first + 4) * K, bytes, arrivals + slot);
    };
    if (asks) {
        for (int slot = 0; slot < RING; slot++) init_arrival(arrivals + slot);
        show_arrivals();
#pragma unroll 1
        for (int slot = 0; slot < RING; slot++)
            if (blockIdx.x + slot * step < shared_units) ask(slot, blockIdx.x + slot * step);
    }
#else
    u32 *words = (u32 *)behind + thread;
    u16 *slot = ring + thread * 8;
    const size_t own = warp * (PART * BITS / 16) + 8 * t;
    const size_t shared_row = (size_t)((g & 3) + (g < 4 ? 0 : FS)), routed_row = (size_t)((g & 3) + (g < 4 ? 0 : F));
#pragma unroll
    for (int j = 0; j < RING; j++) {
        const int unit = blockIdx.x + (j / LOADS) * step;
        const size_t row = shared_row + (size_t)unit * 4;
        if (unit < shared_units)
            copy_packed<FORMAT>(slot + j * WARPS * 256, words + j * WARPS * 32,
                                shared_weight + row * ROW + own + (j % LOADS) * 32,
                                words_of_row<FORMAT, K, WARPS>(shared_scales, row, warp, t) +
                                    (j % LOADS) * words_an_item(FORMAT));
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
    const u16 *a_at = tokens + g * STRIDE + warp * PART + 8 * t;
    const bool has_low = g < live, has_high = COLS > 8 && g + 8 < live;
    int buffer = 0;
    auto choose = [&]() {
        for (int i = thread; i < live * (K / 8); i += WARPS * 32)
            copy_async(tokens + i / (K / 8) * STRIDE + i % (K / 8) * 8, x + (size_t)i * 8, true);
#if COLS == 1
        route_one(routing, contest, scores, own_bias[0], live > 0, softcap);
#else
        route(routing, scores, own_bias, live, softcap);
#endif
    };
    auto write_ids = [&]() {
        if (blockIdx.x != gridDim.x - 1) return;
        for (int i = thread; i < live * A; i += blockDim.x) expert_ids[i] = (&routing.chosen[0][0])[i];
    };
    // Adds up the warps' parts of a unit; another unit's sums may be written once this barrier is passed.
    auto leave = [&](const float (&even)[4], const float (&odd)[4]) {
        float *mine = sums + (buffer * WARPS + warp) * COLS * 8;
        if (g < COLS) *(float2 *)(mine + g * 8 + 2 * t) = make_float2(even[0] + odd[0], even[1] + odd[1]);
        if (COLS > 8) *(float2 *)(mine + (g + 8) * 8 + 2 * t) = make_float2(even[2] + odd[2], even[3] + odd[3]);
        __syncthreads();
    };
    auto add_up = [&](int unit, float2 by, int live) {
        const int token = thread / 4, n = thread % 4, routed = unit - shared_units;
        if (token < live) {
            const int rank = routed < 0 ? 0 : routing.rank[routed / (F / 4)][token];
            if (rank != NOT_CHOSEN) {
                const float *from = sums + buffer * WARPS * COLS * 8 + token * 8 + n;
                float gate = 0.0f, up = 0.0f;
                for (int w = 0; w < WARPS; w++) {
                    gate += from[w * COLS * 8];
                    up += from[w * COLS * 8 + 4];
                }
                const u16 y = gated(gate * by.x, up * by.y);
                if (routed < 0)
                    shared_act[token * FS + unit * 4 + n] = y;
                else
                    act[(token * A + rank) * F + routed % (F / 4) * 4 + n] = y;
            }
        }
        buffer ^= 1;
        if (unit == blockIdx.x) stamp(FIRST_DONE);
    };
    wait_for_inputs();
    stamp(WAITED);
    // Not before: the next kernel reads the scores before it waits.
    let_next_start();
    choose();
    count = shared_units + routing.num_slots * (F / 4);
    stamp(ROUTED);
#if BULK
    const bool deals = counter && count > (RING + 1) * step && count - step >= shared_units;
    whole = deals ? count - step : count, items = 2 * count - whole;
    int next = blockIdx.x + RING * step;
    auto take = [&]() {
        const int number = take_number(counter);
        if (number == items - RING * step + step - 1) *counter = 0;  // the last that any program takes
        return RING * step + number;
    };
    if (asks) {
#pragma unroll 1
        for (int slot = 0; slot < RING; slot++)
            if (blockIdx.x + slot * step >= shared_units) ask(slot, blockIdx.x + slot * step);
        if (deals) next = take();
    }
    wait_for_copies();
    write_ids();
    __syncthreads();
    stamp(PREPARED);
    for (int slot = 0, parity = 0;;) {
        float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
        const u16 *w = ring + (slot * 8 + g) * K + warp * PART + 8 * t;
        wait_for_bytes(arrivals + slot, parity);
        const int item = given[slot];
        if (item < 0) break;
#pragma unroll
        for (int k = 0; k < PART; k += 64) {
            uint4 w0, w1;
            if (k + 32 < PART)
                load_pair(w + k, g & 1, w0, w1);
            else
                w0 = *(const uint4 *)(w + k);
            multiply_block(even, odd, has_low ? *(const uint4 *)(a_at + k) : zero,
                           has_high ? *(const uint4 *)(a_at + 8 * STRIDE + k) : zero, w0);
            if (k + 32 < PART)
                multiply_block(even, odd, has_low ? *(const uint4 *)(a_at + k + 32) : zero,
                               has_high ? *(const uint4 *)(a_at + 8 * STRIDE + k + 32) : zero, w1);
        }
        leave(even, odd);
        if (asks) {
            ask(slot, next);
            if (next < items) next = deals ? take() : next + step;
        }
        const bool is_there = item < whole || thread % 4 / 2 == (item - whole) % 2;
        add_up(item < whole ? item : whole + (item - whole) / 2, make_float2(1.0f, 1.0f), is_there ? live : 0);
        if (++slot == RING) slot = 0, parity ^= 1;
    }
#else
    // Where a unit's weights start for this lane; units past the end read the first one again.
    auto start_of = [&](int unit) -> Start {
        if (unit < shared_units || unit >= count) {
            const size_t row = shared_row + (unit >= count ? 0 : (size_t)unit * 4);
            return {shared_weight + row * ROW + own, words_of_row<FORMAT, K, WARPS>(shared_scales, row, warp, t)};
        }
        const size_t row = row_of(unit, g);
        return {weight + row * ROW + own, words_of_row<FORMAT, K, WARPS>(scales, row, warp, t)};
    };
    // What a unit's sums are multiplied by, gate and up.
    auto factors_of = [&](int unit) {
        const int routed = unit - shared_units;
        const float *from = factors + (routed < 0 ? E : routing.experts[routed / (F / 4)]) * 3;
        return make_float2(from[0], from[1]);
    };
    // The tokens and the shared expert's weights have had the time of the routing to come.
    wait_for_copies();
#pragma unroll
    for (int j = 0; j < RING; j++) {
        const int unit = blockIdx.x + (j / LOADS) * step;
        const Start start = start_of(unit);
        stream_packed<FORMAT>(slot + j * WARPS * 256, words + j * WARPS * 32, start.codes + (j % LOADS) * 32,
                              start.words + (j % LOADS) * words_an_item(FORMAT), unit >= shared_units && unit < count);
    }
    write_ids();
    __syncthreads();
    stamp(PREPARED);
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
    float2 by = make_float2(1.0f, 1.0f);
    for (int first = blockIdx.x; first < count; first += step * UNITS) {
        Start next = {0, 0};
#pragma unroll
        for (int j = 0; j < RING; j++) {
            const int at = j % LOADS, unit = first + (j / LOADS) * step;
            if (at == 0) next = start_of(unit + UNITS * step);
            if (FORMAT == FP4 && at == 0 && unit < count) by = factors_of(unit);
            const u16 *a = a_at + at * 32 * CHUNKS;
            wait_for_stream<RING - 1>();
            const uint4 item = *(const uint4 *)(slot + j * WARPS * 256);
            const u32 word = FORMAT == PLAIN ? 0 : words[j * WARPS * 32];
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                multiply_block(even, odd, has_low ? *(const uint4 *)(a + c * 32) : zero,
                               has_high ? *(const uint4 *)(a + 8 * STRIDE + c * 32) : zero,
                               decoded<FORMAT>(item, word, c));
            stream_packed<FORMAT>(slot + j * WARPS * 256, words + j * WARPS * 32, next.codes + at * 32,
                                  next.words + at * words_an_item(FORMAT), unit + UNITS * step < count);
            if (at == LOADS - 1 && unit < count) {
                leave(even, odd);
                add_up(unit, by, live);
            }
            if (at == LOADS - 1)
                for (int i = 0; i < 4; i++) even[i] = odd[i] = 0.0f;
        }
    }
#endif
    stamp(ENDED);
}
