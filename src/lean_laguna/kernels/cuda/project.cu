// Normalise and project: out = rmsnorm(x) @ weight^T, or silu(gate) * up of it; weights streamed once.
//
// -D: K row length; N output columns; WARPS that share a row; COLS tokens (1, 8 or 16; the instruction is the same, and so
// a row's bits); PROGRAMS a multiprocessor should hold; BULK 1: whole rows come by the copy engine, RING units of 8 rows
// ahead; otherwise RING 16-byte loads in flight a lane;
// GATED 1: the weight is [2N, K], gate rows first; NORMED 1: also write the normalised rows.
// FORMAT of the weight (packed.cuh), TALL; REHEARSE 1: see below; AHEAD pieces of 8 KiB that a program asks for into L2 for
// a later kernel, while this one leaves memory idle.
// A program takes 8 weight rows at a time; each warp its own part of K, the parts added in warp order.
#include "packed.cuh"

#define PART (K / WARPS)
#define BITS (bits_of(FORMAT))
#define CHUNKS (chunks_of(FORMAT))
#define LOADS (PART / 32 / CHUNKS)
#define ROW (K * BITS / 16)
#define UNITS ((RING) / (LOADS) > 0 ? (RING) / (LOADS) : 1)
#define STRIDE (K + 8)
// Rows of a bulk unit lie so that the eight lanes which shared memory serves at once find it in different banks.
#define ROW_STRIDE (K + 32)
#define RING_SIZE (BULK ? RING * 8 * ROW_STRIDE : RING * WARPS * 256)
// Elements set aside for the norm's weights, or for the squares of a lone row.
#define SCALES (COLS == 1 ? K / 4 : K)
#define OUTPUTS (GATED ? 4 : 8)

// The weight row that lane group g of a unit reads.
DEVICE size_t row_at(int unit, int g) {
    if (GATED) return (size_t)(unit * 4 + (g & 3) + (g < 4 ? 0 : N));
    return (size_t)(unit * 8 + g);
}

// RMSNorm of all rows, each by one warp, where they stay.
DEVICE void normalise_rows(const u16 *x, const u16 *scale, u16 *tokens, u16 *normed, int live, float eps, int x_stride) {
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    for (int first = 0; first < live * (K / 8); first += 8 * WARPS * 32) {
        uint4 piece[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int at = first + i * WARPS * 32 + thread, row = at / (K / 8);
            if (row < live) piece[i] = load_fresh(x + (size_t)row * x_stride + at % (K / 8) * 8);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int at = first + i * WARPS * 32 + thread, row = at / (K / 8);
            if (row < live) *(uint4 *)(tokens + row * STRIDE + at % (K / 8) * 8) = piece[i];
        }
    }
    __syncthreads();
    for (int row = warp; row < live; row += WARPS) {
        u16 *own_row = tokens + row * STRIDE;
        float squares = 0.0f;
        for (int k = lane * 8; k < K; k += 256) squares += squares_of(*(const uint4 *)(own_row + k));
        const float inverse = rsqrtf(sum_over_warp(squares) / K + eps);
        for (int k = lane * 8; k < K; k += 256) {
            const uint4 y = scaled(*(const uint4 *)(own_row + k), inverse, *(const uint4 *)(scale + k));
            *(uint4 *)(own_row + k) = y;
            if (NORMED && normed && row % gridDim.x == blockIdx.x) *(uint4 *)(normed + (size_t)row * K + k) = y;
        }
    }
    __syncthreads();
}

KERNEL(WARPS * 32, PROGRAMS)
project(const u16 *x, const u16 *norm, const u16 *weight, const u32 *scales, const float *factors, u16 *out,
        u16 *normed, const u16 *ahead, const int *num_rows, float eps, int x_stride, int out_stride) {
    EXTERN_SHARED(u16, ring);
    u16 *tokens = ring + RING_SIZE;
    u16 *scale = tokens + COLS * STRIDE;
    float *sums = (float *)(scale + SCALES);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int count = N / OUTPUTS, step = gridDim.x;
    const uint4 zero = make_uint4(0, 0, 0, 0);

    stamp(STARTED);
#if BULK
    u64 *arrivals = (u64 *)(sums + 2 * WARPS * COLS * 8);
    // The first warp asks for a unit, a row a lane.
    auto ask = [&](int slot, int unit) {
        if (warp > 0 || unit >= count) return;
        if (lane == 0) expect_bytes(arrivals + slot, 8 * K * 2);
        __syncwarp();
        if (lane < 8) copy_bulk(ring + (slot * 8 + lane) * ROW_STRIDE, weight + row_at(unit, lane) * K, K * 2, arrivals + slot);
    };
    if (thread == 0) {
        for (int slot = 0; slot < RING; slot++) init_arrival(arrivals + slot);
        show_arrivals();
    }
    __syncwarp();
    for (int slot = 0; slot < RING; slot++) ask(slot, blockIdx.x + slot * step);
#else
    u32 *words = (u32 *)(sums + 2 * WARPS * COLS * 8) + threadIdx.x;
    const u16 *own = weight + warp * (PART * BITS / 16) + 8 * t;
    u16 *slot = ring + thread * 8;
#pragma unroll
    for (int j = 0; j < RING; j++) {
        int unit = blockIdx.x + (LOADS <= RING ? (j / LOADS) * step : 0);
        const size_t row = row_at(unit, g);
        stream_packed<FORMAT>(slot + j * WARPS * 256, words + j * WARPS * 32, own + row * ROW + (j % LOADS) * 32,
                              words_of_row<FORMAT, K, WARPS>(scales, row, warp, t) +
                                  (j % LOADS) * words_an_item(FORMAT),
                              unit < count);
    }
#endif
    uint4 own_scale[OWN_PIECES(K, WARPS)];
    if (COLS == 1) {
#pragma unroll
        for (int i = 0; i < OWN_PIECES(K, WARPS); i++)
            if (i * 32 + lane < PART / 8) own_scale[i] = *(const uint4 *)(norm + warp * PART + (i * 32 + lane) * 8);
    } else {
        for (int k = thread * 8; k < K; k += WARPS * 256) *(uint4 *)(scale + k) = *(const uint4 *)(norm + k);
    }
    // How many rows there are changes only at the end of a step.
    const int live = min(load_fresh32(num_rows), COLS);
    let_next_start();
    stamp(ASKED);
    auto normalise = [&](bool writes) {
        if (COLS == 1) {
            normalise_row<K, WARPS>(x, own_scale, tokens, (float *)scale, eps);
            if (NORMED && writes && live && blockIdx.x == 0)
                for (int k = lane * 8; k < PART; k += 256)
                    *(uint4 *)(normed + warp * PART + k) = *(const uint4 *)(tokens + warp * PART + k);
        } else {
            normalise_rows(x, scale, tokens, writes ? normed : nullptr, live, eps, x_stride);
        }
    };
    const u16 *a_at = tokens + g * STRIDE + warp * PART + 8 * t;
    const bool has_low = g < live, has_high = COLS > 8 && g + 8 < live;
    int buffer = 0;
    // Adds up the warps' parts of a unit; another unit's sums may be written once this barrier is passed.
    auto leave = [&](const float (&even)[4], const float (&odd)[4]) {
        float *mine = sums + (buffer * WARPS + warp) * COLS * 8;
        if (g < COLS) *(float2 *)(mine + g * 8 + 2 * t) = make_float2(even[0] + odd[0], even[1] + odd[1]);
        if (COLS > 8) *(float2 *)(mine + (g + 8) * 8 + 2 * t) = make_float2(even[2] + odd[2], even[3] + odd[3]);
        __syncthreads();
    };
    auto add_up = [&](int unit, float by, float by_up, int live) {
        const int token = thread / OUTPUTS, n = thread % OUTPUTS;
        if (token < live) {
            const float *from = sums + buffer * WARPS * COLS * 8 + token * 8 + n;
            float y = 0.0f, up = 0.0f;
            for (int w = 0; w < WARPS; w++) {
                y += from[w * COLS * 8];
                if (GATED) up += from[w * COLS * 8 + 4];
            }
            out[(size_t)token * out_stride + unit * OUTPUTS + n] = GATED ? gated(y * by, up * by_up) : to_bf16(y * by);
        }
        buffer ^= 1;
        if (unit == blockIdx.x) stamp(FIRST_DONE);
    };
#if BULK
    int slot = 0, parity = 0;
    // The first turn is a rehearsal with whatever lies in memory, for one unit: it writes nothing out, and when the inputs
    // are there the instructions have been fetched, which streams of weights drive out of L2.
#pragma unroll 1
    for (int turn = unknown(REHEARSE ? 0 : 1); turn < 2; turn++) {
        const bool is_real = turn == 1;
        if (is_real) {
            wait_for_inputs();
            stamp(WAITED);
            if (AHEAD && warp == 1)
                for (int i = lane; i < AHEAD; i += 32)
                    prefetch_lasting(ahead + ((size_t)blockIdx.x * AHEAD + i) * 4096, 8192);
        }
        normalise(is_real);
        if (is_real) stamp(PREPARED);
        for (int unit = blockIdx.x; unit < count; unit += step) {
            float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
            const u16 *w = ring + (slot * 8 + g) * ROW_STRIDE + warp * PART + 8 * t;
            if (is_real) wait_for_bytes(arrivals + slot, parity);
#pragma unroll
            for (int k = 0; k < PART; k += 32)
                multiply_block(even, odd, has_low ? *(const uint4 *)(a_at + k) : zero,
                               has_high ? *(const uint4 *)(a_at + 8 * STRIDE + k) : zero, *(const uint4 *)(w + k));
            leave(even, odd);
            if (is_real) ask(slot, unit + RING * step);
            add_up(unit, 1.0f, 1.0f, is_real ? live : 0);
            if (!is_real) break;
            if (++slot == RING) slot = 0, parity ^= 1;
        }
    }
#else
    wait_for_inputs();
    stamp(WAITED);
    normalise(true);
    stamp(PREPARED);
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0}, by = 1.0f, by_up = 1.0f;
    // LOADS <= RING: a turn of the ring is UNITS units; otherwise a unit is several turns.
    const int turns = LOADS <= RING ? 1 : LOADS / RING;
    for (int first = blockIdx.x; first < count; first += step * UNITS) {
        for (int turn = 0; turn < turns; turn++) {
#pragma unroll
            for (int j = 0; j < RING; j++) {
                const int at = LOADS <= RING ? j % LOADS : turn * RING + j;
                const u16 *a = a_at + at * 32 * CHUNKS;
                const int own_unit = first + (LOADS <= RING ? (j / LOADS) * step : 0);
                if (FORMAT == FP4 && at == 0 && own_unit < count) {
                    by = factors[GATED ? 0 : own_unit];
                    if (GATED) by_up = factors[1];
                }
                wait_for_stream<RING - 1>();
                const uint4 item = *(const uint4 *)(slot + j * WARPS * 256);
                const u32 word = FORMAT == PLAIN ? 0 : words[j * WARPS * 32];
#pragma unroll
                for (int c = 0; c < CHUNKS; c++)
                    multiply_block(even, odd, has_low ? *(const uint4 *)(a + c * 32) : zero,
                                   has_high ? *(const uint4 *)(a + 8 * STRIDE + c * 32) : zero,
                                   decoded<FORMAT>(item, word, c));
                int unit = first + (LOADS <= RING ? (j / LOADS + UNITS) * step : turn + 1 < turns ? 0 : step);
                int k = LOADS <= RING ? at : turn + 1 < turns ? at + RING : j;
                const size_t row = row_at(unit, g);
                stream_packed<FORMAT>(slot + j * WARPS * 256, words + j * WARPS * 32, own + row * ROW + k * 32,
                                      words_of_row<FORMAT, K, WARPS>(scales, row, warp, t) + k * words_an_item(FORMAT),
                                      unit < count);
                const bool ends = LOADS <= RING ? at == LOADS - 1 : j == RING - 1 && turn == turns - 1;
                const int done = first + (LOADS <= RING ? (j / LOADS) * step : 0);
                if (ends && done < count) {
                    leave(even, odd);
                    add_up(done, by, by_up, live);
                    for (int i = 0; i < 4; i++) even[i] = odd[i] = 0.0f;
                }
            }
        }
    }
#endif
    stamp(ENDED);
}
