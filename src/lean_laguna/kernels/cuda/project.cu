// Normalise and project: out = rmsnorm(x) @ weight^T, or silu(gate) * up of it; weights streamed once.
//
// -D: as in units.cuh; PROGRAMS a multiprocessor should hold; GATED 1: the weight is [2N, K], gate rows first.
// A program takes 8 weight rows at a time. What differs between the products of a layer is an argument, so that they
// share their code, which is cold otherwise: N output columns, units on their way, and `normed`, which takes the
// normalised rows where it is there.
#include "units.cuh"

#define UNITS ((RING) / (LOADS) > 0 ? (RING) / (LOADS) : 1)
#define OUTPUTS (GATED ? 4 : 8)

// The weight row that lane group g of a unit reads.
DEVICE size_t row_at(int unit, int g, int n) {
    if (GATED) return (size_t)(unit * 4 + (g & 3) + (g < 4 ? 0 : n));
    return (size_t)(unit * 8 + g);
}

KERNEL(THREADS, PROGRAMS)
project(const u16 *x, const u16 *norm, const u16 *weight, u16 *out, u16 *normed, const int *num_rows,
        float eps, int x_stride, int out_stride, int n, int slots) {
    EXTERN_SHARED(u16, ring);
#if BULK
    u16 *tokens = ring + slots * UNIT;
#else
    u16 *tokens = ring + RING_SIZE;
#endif
    float *norms = (float *)(tokens + COLS * STRIDE), *sums = norms + NORM_FLOATS;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int count = n / OUTPUTS, step = NUM_PROGRAMS, first_row = blockIdx.x % GROUPS * COLS;

    stamp(STARTED);
#if BULK
    u64 *arrivals = (u64 *)(sums + 2 * SUMS);
    // Few large copies, each of which takes a while to ask for.
    auto ask = [&](int slot, int unit) {
        u16 *to = ring + slot * UNIT;
        expect_bytes(arrivals + slot, UNIT * 2);
        copy_bulk(to, weight + row_at(unit, 0, n) * K, (GATED ? 4 : 8) * K * 2, arrivals + slot);
        if (GATED) copy_bulk(to + 4 * K, weight + row_at(unit, 4, n) * K, 4 * K * 2, arrivals + slot);
    };
    if (asks()) {
        make_arrivals(arrivals, slots);
#pragma unroll 1
        for (int slot = 0; slot < slots; slot++)
            if (PROGRAM + slot * step < count) ask(slot, PROGRAM + slot * step);
    }
#else
    const u16 *own = weight + warp * PART + 8 * t;
    u16 *slot = ring + thread * 8;
#pragma unroll
    for (int j = 0; j < RING; j++) {
        const int unit = PROGRAM + (LOADS <= RING ? (j / LOADS) * step : 0);
        stream(slot + j * WARPS * 256, own + row_at(unit, g, n) * K + j % LOADS * 32, unit < count);
    }
#endif
    uint4 own_scale[OWN_PIECES(K, WARPS)];
#pragma unroll
    for (int i = 0; i < OWN_PIECES(K, WARPS); i++)
        if (warp < WARPS && i * 32 + lane < PART / 8) own_scale[i] = *(const uint4 *)(norm + warp * PART + (i * 32 + lane) * 8);
    // How many rows there are changes only at the end of a step.
    const int live = min(load_fresh32(num_rows) - first_row, COLS);
    let_next_start();
    stamp(ASKED);
    x += (size_t)first_row * x_stride, out += (size_t)first_row * out_stride;
    if (normed) normed += (size_t)first_row * K;
    auto normalise = [&]() {
        if (warp >= WARPS) {
            meet_norm(live);
        } else if (COLS == 1) {
            normalise_row<K, WARPS>(x, own_scale, tokens, norms, eps);
            if (normed && live && blockIdx.x == 0)
                for (int k = lane * 8; k < PART; k += 256)
                    *(uint4 *)(normed + warp * PART + k) = *(const uint4 *)(tokens + warp * PART + k);
        } else {
            normalise_rows(x, own_scale, tokens, norms, normed, live, eps, x_stride);
        }
    };
    Tokens operands(tokens, live);
    auto add_up = [&](int unit, const float *own_sums) {
        const int token = thread / OUTPUTS, own = thread % OUTPUTS;
        if (token < live) {
            const float *from = own_sums + token * 8 + own;
            const float y = sum_of(from), up = GATED ? sum_of(from + 4) : 0.0f;
            out[(size_t)token * out_stride + unit * OUTPUTS + own] = GATED ? gated(y, up) : to_bf16(y);
        }
        if (unit == PROGRAM) stamp(FIRST_DONE);
    };
#if BULK
    __syncthreads();  // arrivals are made before anybody waits for one, even where no row brings a barrier
#endif
    wait_for_inputs();
    stamp(WAITED);
    normalise();
    stamp(PREPARED);
#if BULK
    if (warp < WARPS) operands.hold();
    take_units(step, count, slots, ring, sums, arrivals, operands, ask, add_up);
#else
    int buffer = 0;
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
    // LOADS <= RING: a turn of the ring is UNITS units; otherwise a unit is several turns.
    const int turns = LOADS <= RING ? 1 : LOADS / RING;
    for (int first = PROGRAM; first < count; first += step * UNITS) {
        for (int turn = 0; turn < turns; turn++) {
#pragma unroll
            for (int j = 0; j < RING; j++) {
                const int at = LOADS <= RING ? j % LOADS : turn * RING + j;
                wait_for_stream<RING - 1>();
                operands.multiply_piece(even, odd, at, *(const uint4 *)(slot + j * WARPS * 256));
                const int unit = first + (LOADS <= RING ? (j / LOADS + UNITS) * step : turn + 1 < turns ? 0 : step);
                const int k = LOADS <= RING ? at : turn + 1 < turns ? at + RING : j;
                stream(slot + j * WARPS * 256, own + row_at(unit, g, n) * K + k * 32, unit < count);
                const bool ends = LOADS <= RING ? at == LOADS - 1 : j == RING - 1 && turn == turns - 1;
                const int done = first + (LOADS <= RING ? (j / LOADS) * step : 0);
                if (ends && done < count) {
                    leave_sums(sums + buffer * SUMS, even, odd);
                    __syncthreads();
                    add_up(done, sums + buffer * SUMS);
                    buffer ^= 1;
                    for (int i = 0; i < 4; i++) even[i] = odd[i] = 0.0f;
                }
            }
        }
    }
#endif
    stamp(ENDED);
}
