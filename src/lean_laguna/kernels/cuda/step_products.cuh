// The products of a step: weights from the tape, tokens from the mail straight into the registers that multiply them.
//
// Tokens are rows of the matrix instruction, K is cut by warp and added in warp order: a row's bits are its own.
#pragma once
#include "mail.cuh"
#include "tape.cuh"

// A warp's part of normalised rows: what tokens g and g + 8 multiply with, all of K = D.
struct Tokens {
    uint4 low[LOADS], high[HIGH ? LOADS : 1];
};

// Receive the live rows, from the mail or (first layer) from the embedding, normalise them, and take what this lane
// multiplies into registers. Ends with a barrier: the place where rows are received is free.
DEVICE void receive_normed(Tokens &to, const u32 *mail, const u16 *embed, const int *ids, const u16 *norm, float eps,
                           Self &self) {
    enum { ACROSS = PART / 8, PIECES = (ACROSS + 31) / 32, WIDE = PART + 32 };
    u16 *own = self.s.received + self.warp * AREA;
    const int column = self.lane * 8, part = self.warp * PART;
    uint4 by[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++) by[i] = *(const uint4 *)(norm + part + min(column + 256 * i, PART - 8));
    if (embed) {
#pragma unroll 1
        for (int row = 0; row < self.live; row++)
#pragma unroll
            for (int i = 0; i < PIECES; i++)
                if (column + 256 * i < PART)
                    *(uint4 *)(own + row * WIDE + column + 256 * i) =
                        *(const uint4 *)(embed + (size_t)ids[row] * D + part + column + 256 * i);
        __syncwarp();
    } else
        receive_rows(own, WIDE, mail + part, D, self.live, PART, self);
    float *all = self.s.squares;
#pragma unroll 1
    for (int row = 0; row < self.live; row++) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            if (column + 256 * i < PART) squares += squares_of(*(const uint4 *)(own + row * WIDE + column + 256 * i));
        squares = sum_over_warp(squares);
        if (self.lane == 0) all[self.warp * 16 + row] = squares;
    }
    __syncthreads();
#pragma unroll 1
    for (int row = 0; row < self.live; row++) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += all[w * 16 + row];
        const float inverse = rsqrtf(total / D + eps);
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            uint4 *at = (uint4 *)(own + row * WIDE + column + 256 * i);
            if (column + 256 * i < PART) *at = scaled(*at, inverse, by[i]);
        }
    }
    __syncwarp();
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const u16 *low = own + self.g * WIDE + 8 * self.t;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        to.low[i] = self.has_low ? *(const uint4 *)(low + 32 * i) : zero;
        if (HIGH) to.high[HIGH * i] = self.has_high ? *(const uint4 *)(low + 8 * WIDE + 32 * i) : zero;
    }
    __syncthreads();
}

// A warp's sums of 8 weight rows, left where all warps' are added: [COLS][stride] a warp.
DEVICE void leave_sums(float *mine, const float (&a)[4], const float (&b)[4], int g, int t, int stride) {
    *(float2 *)(mine + g * stride + 2 * t) = make_float2(a[0] + b[0], a[1] + b[1]);
    if (HIGH) *(float2 *)(mine + (g + 8) * stride + 2 * t) = make_float2(a[2] + b[2], a[3] + b[3]);
}
DEVICE float added(const float *from, int stride) {
    float y = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) y += from[w * stride];
    return y;
}

// Multiply the tape's next 8 rows of D columns by the tokens and leave the warp's sums in the unit's buffer. Warps do
// not wait for each other; one of them, in turn, adds the sums, some units later.
DEVICE void multiply_rows(Tape &tape, const Tokens &x, Self &self) {
    float sums[4][4] = {};
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int q = 0; q < LOADS / GROUP; q++) {
        uint4 w[GROUP];
        tape.take(w, self);
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            multiply_block(sums[2 * (i & 1)], sums[2 * (i & 1) + 1], x.low[q * GROUP + i],
                           HIGH ? x.high[HIGH * (q * GROUP + i)] : zero, w[i]);
    }
    const int buffer = self.units % BUFFERS, round = self.units / BUFFERS;
    while (load_shared(&self.s.freed[buffer]) < round && may_poll(self)) {
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sums[0][i] += sums[1][i], sums[2][i] += sums[3][i];
    leave_sums(self.s.unit_sums[buffer] + self.warp * COLS * 8, sums[0], sums[2], self.g, self.t, 8);
    __syncwarp();
    if (self.lane == 0) add_shared(&self.s.filled[buffer], 1);
    self.units++;
}
// All warps' sums of an earlier unit, `free_sums` afterwards.
DEVICE const float *wait_for_sums(int unit, Self &self) {
    const int buffer = unit % BUFFERS, round = unit / BUFFERS;
    while (load_shared(&self.s.filled[buffer]) < WARPS * (round + 1) && may_poll(self)) {
    }
    __syncwarp();
    return self.s.unit_sums[buffer];
}
DEVICE void free_sums(int unit, Self &self) {
    __syncwarp();
    if (self.lane == 0) add_shared(&self.s.freed[unit % BUFFERS], 1);
}

// The residual stream of the block's columns stays with the block: token and column of a thread in its pair.
DEVICE float &residual_of(Self &self, int pair) {
    return self.s.residual[(pair / self.grid) * (COLS * 16) + self.thread];
}

// Add to the residual stream and send the sum to all blocks.
DEVICE void add_and_send(int at, int pair, float y, Self &self) {
    const int token = self.thread / 16, column = pair * 16 + self.thread % 16;
    float &residual = residual_of(self, pair);
    residual = rounded(residual + y);
    store_mail1(self.mail + at + token * D + column, tagged(residual, self.tag));
}

// 16 rows of 32 * N columns from the tape, times the tokens of a warp's part.
template <int N> DEVICE void multiply_pair(Tape &tape, float (&even)[2][4], float (&odd)[2][4], const uint4 (&a)[N],
                                           const uint4 (&a8)[HIGH ? N : 1], Self &self) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < N; i += GROUP / 2) {
        uint4 w[GROUP];
        tape.take(w, self);
#pragma unroll
        for (int j = 0; j < GROUP; j++)
            multiply_block(even[j & 1], odd[j & 1], a[i + j / 2], HIGH ? a8[HIGH * (i + j / 2)] : zero, w[j]);
    }
}

// This warp's part of x @ weight^T, for rows x of k columns from the mail and 16 weight rows from the tape.
DEVICE void multiply_received(Tape &tape, float (&even)[2][4], float (&odd)[2][4], const u32 *x, int k, Self &self) {
    int columns = k / WARPS;
    while (self.live * (columns + 32) > (int)AREA) columns /= 2;
    const int stride = columns + 32;
    u16 *own = self.s.received + self.warp * AREA;
    const u16 *low = own + self.g * stride + 8 * self.t, *high = low + 8 * stride;
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (int first = 0; first < k / WARPS; first += columns) {
        __syncwarp();
        receive_rows(own, stride, x + self.warp * (k / WARPS) + first, k, self.live, columns, self);
        if (first == 0) mark(self, ROWS_HERE);
#pragma unroll 1
        for (int at = 0; at < columns; at += 16 * GROUP) {
            uint4 a[GROUP / 2], a8[HIGH ? GROUP / 2 : 1];
#pragma unroll
            for (int i = 0; i < GROUP / 2; i++) {
                a[i] = self.has_low ? *(const uint4 *)(low + at + 32 * i) : zero;
                if (HIGH) a8[HIGH * i] = self.has_high ? *(const uint4 *)(high + at + 32 * i) : zero;
            }
            multiply_pair(tape, even, odd, a, a8, self);
        }
    }
}

// hidden += x @ weight^T for rows x of k columns from the mail; `to` and `tap` receive the sum.
DEVICE void project_add(Tape &tape, const u32 *x, int k, int to, const Layer *tapped, Self &self) {
    const int token = self.thread / 16;
    // The sums of units are read.
    __syncthreads();
#pragma unroll 1
    for (int pair = self.block; pair < D / 16; pair += self.grid) {
        float even[2][4] = {}, odd[2][4] = {};
        multiply_received(tape, even, odd, x, k, self);
        float *all = self.s.sums[self.buffer];
        self.buffer ^= 1;
#pragma unroll
        for (int half = 0; half < 2; half++)
            leave_sums(all + self.warp * COLS * 16 + half * 8, even[half], odd[half], self.g, self.t, 16);
        __syncthreads();
        if (token < self.live) {
            add_and_send(to, pair, rounded(added(all + self.thread, COLS * 16)), self);
            if (tapped && tapped->tap)
                tapped->tap[(size_t)token * tapped->tap_stride + pair * 16 + self.thread % 16] =
                    to_bf16(residual_of(self, pair));
        }
    }
}
