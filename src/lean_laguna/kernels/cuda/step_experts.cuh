// A mixture of experts: the router, the routing that every block works out for itself, the experts' products.
#pragma once
#include "step_products.cuh"

#if E
DEVICE int ordered(float x) {
    int bits = __float_as_int(x);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

// Receive a token's router logits: of experts lane, lane + 32 and so on.
DEVICE void receive_scores(float (&logits)[E / 32], const u32 *from, Self &self) {
    u32 v[E / 32], differs;
#pragma unroll
    for (int i = 0; i < E / 32; i++) v[i] = load_mail1(from + i * 32);
    do {
        differs = 0;
#pragma unroll
        for (int i = 0; i < E / 32; i++) differs |= (v[i] ^ self.tag) & 0xffffu;
        if (differs == 0 || !may_poll(self)) break;
#pragma unroll
        for (int i = 0; i < E / 32; i++)
            if ((v[i] ^ self.tag) & 0xffffu) v[i] = load_mail1(from + i * 32);
    } while (true);
#pragma unroll
    for (int i = 0; i < E / 32; i++) logits[i] = untagged(v[i]);
    __syncwarp();
}

// Choose a token's experts, by its whole warp: sigmoid, bias for the choice only, ties to the lower id.
DEVICE void choose_experts(Routing &r, int token, const float (&bias)[E / 32], float softcap, Self &self) {
    const int lane = self.lane, lowest = (int)0x80000000;
    float sigmoid[E / 32];
    int keys[E / 32];
    receive_scores(sigmoid, self.mail + SCORES_AT + token * E + lane, self);
#pragma unroll
    for (int i = 0; i < E / 32; i++) {
        float logit = sigmoid[i];
        if (SOFTCAP) logit = softcap * (1.0f - 2.0f / (expf(2.0f * logit / softcap) + 1.0f));
        sigmoid[i] = 1.0f / (1.0f + expf(-logit));
        keys[i] = ordered(sigmoid[i] + bias[i]);
    }
    // Each lane's experts, best first, the lower id among equals.
    int ids[E / 32];
#pragma unroll
    for (int i = 0; i < E / 32; i++) ids[i] = i * 32 + lane;
#pragma unroll
    for (int i = 1; i < E / 32; i++)
#pragma unroll
        for (int j = i; j > 0; j--) {
            const bool swaps = keys[j] > keys[j - 1];
            const int key = keys[j], id = ids[j];
            const float value = sigmoid[j];
            keys[j] = swaps ? keys[j - 1] : key, keys[j - 1] = swaps ? key : keys[j - 1];
            ids[j] = swaps ? ids[j - 1] : id, ids[j - 1] = swaps ? id : ids[j - 1];
            sigmoid[j] = swaps ? sigmoid[j - 1] : value, sigmoid[j - 1] = swaps ? value : sigmoid[j - 1];
        }
    // The warp's best, one after another: its lane takes the next of its own.
#pragma unroll 1
    for (int a = 0; a < A; a++) {
        const int highest = max_over_warp(keys[0]);
        const u32 equals = lanes_where(keys[0] == highest);
        int winner = first_bit(equals);
        if (equals & (equals - 1)) winner = min_over_warp(keys[0] == highest ? ids[0] : E) & 31;
        if (winner != lane) continue;
        r.chosen[token][a] = (u8)ids[0], r.weights[token][a] = sigmoid[0];
#pragma unroll
        for (int i = 1; i < E / 32; i++) keys[i - 1] = keys[i], ids[i - 1] = ids[i], sigmoid[i - 1] = sigmoid[i];
        keys[E / 32 - 1] = lowest;
    }
    __syncwarp();
    float total = 0.0f;
#pragma unroll
    for (int a = 0; a < A; a++) total += r.weights[token][a];
    const float own = r.weights[token][lane < A ? lane : 0];
    __syncwarp();
    if (lane < A) r.weights[token][lane] = rounded(NORM_TOPK ? own / total : own);
}

// Fill the routing tables; called by all threads, ends with a barrier.
DEVICE void route(const Layer &at, Self &self) {
    Routing &r = self.s.routing;
    const int thread = self.thread;
    float bias[E / 32];
#pragma unroll
    for (int i = 0; i < E / 32; i++) bias[i] = at.bias[i * 32 + self.lane];
#pragma unroll 1
    for (int i = thread; i < SLOTS * COLS; i += THREADS) {
        (&r.rank[0][0])[i] = NOT_CHOSEN;
        (&r.slot_weights[0][0])[i] = 0.0f;
    }
    if (thread < 8) r.live[thread] = 0;
#pragma unroll 1
    for (int token = self.warp; token < self.live; token += WARPS) choose_experts(r, token, bias, at.softcap, self);
    __syncthreads();
    const int pairs = self.live * A;
#pragma unroll 1
    for (int i = thread; i < pairs; i += THREADS) {
        int id = (&r.chosen[0][0])[i];
        atomicOr(&r.live[id >> 5], 1u << (id & 31));
    }
    __syncthreads();
    if (thread < 8) {
        int below = 0;
        for (int i = 0; i < thread; i++) below += __popc(r.live[i]);
        r.before[thread] = (u8)below;
        if (thread == 7) r.num_slots = below + __popc(r.live[7]);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < pairs; i += THREADS) {
        const int token = i / A, id = r.chosen[token][i % A];
        const int slot = r.before[id >> 5] + __popc(r.live[id >> 5] & ((1u << (id & 31)) - 1u));
        int rank = 0;
        for (int a = 0; a < A; a++) rank += r.chosen[token][a] < id;
        r.experts[slot] = (u8)id;
        r.rank[slot][token] = (u8)rank;
        r.slot_weights[slot][token] = r.weights[token][i % A];
    }
    if (thread == 0) self.s.routed = self.layer;
    __syncthreads();
}

// Tokens of an expert's down product, on their way: F columns of the token's own row for the expert.
struct Chosen {
    Raw<F / 256> raw;
    const u32 *from;
    bool takes;
    METHOD void load(int slot, int token, bool is_live, Self &self) {
        const Routing &r = self.s.routing;
        const int rank = is_live && slot < r.num_slots ? r.rank[slot][token] : NOT_CHOSEN;
        takes = rank != NOT_CHOSEN;
        from = self.mail + ACT_AT + (token * A + (takes ? rank : 0)) * F + self.warp * (F / WARPS) + 8 * self.t;
        raw.load(from, takes);
    }
};

// 16 rows of K columns from the tape, times the tokens of a warp's part.
template <int N> DEVICE void multiply_pair(Tape &tape, float (&even)[2][4], float (&odd)[2][4], const uint4 (&a)[N],
                                           const uint4 *a8, Self &self) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < N; i += GROUP / 2) {
        uint4 w[GROUP];
        tape.take(w, self);
#pragma unroll
        for (int j = 0; j < GROUP; j++)
            multiply_block(even[j & 1], odd[j & 1], a[i + j / 2], HIGH ? a8[i + j / 2] : zero, w[j]);
    }
}

// total += weight * (even + odd), for a token that takes the expert.
DEVICE void add_weighted(float (&total)[2][4], const float (&even)[2][4], const float (&odd)[2][4], int first,
                         float by) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 2; i++) total[half][first + i] += (even[half][first + i] + odd[half][first + i]) * by;
}

// The chosen experts' down products in ascending id, this warp's part of them.
DEVICE void multiply_down(Tape &tape, float (&total)[2][4], Self &self) {
    enum { AHEAD = HIGH ? 2 : 4 };
    const Routing &r = self.s.routing;
    const int num_slots = r.num_slots;
    Chosen low[AHEAD], high[HIGH ? AHEAD : 1];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        low[i].load(i, self.g, self.has_low, self);
        if (HIGH) high[HIGH * i].load(i, self.g + 8, self.has_high, self);
    }
#pragma unroll 1
    for (int first = 0; first < num_slots; first += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int slot = first + i;
            if (slot >= num_slots) break;
            uint4 a[F / 256], a8[F / 256];
            const bool takes = low[i].takes, takes8 = HIGH && high[HIGH * i].takes;
            low[i].raw.settle(a, low[i].from, takes, self);
            if (HIGH) high[HIGH * i].raw.settle(a8, high[HIGH * i].from, takes8, self);
            low[i].load(slot + AHEAD, self.g, self.has_low, self);
            if (HIGH) high[HIGH * i].load(slot + AHEAD, self.g + 8, self.has_high, self);
            float even[2][4] = {}, odd[2][4] = {};
            multiply_pair(tape, even, odd, a, a8, self);
            if (takes) add_weighted(total, even, odd, 0, r.slot_weights[slot][self.g]);
            if (takes8) add_weighted(total, even, odd, 2, r.slot_weights[slot][(self.g + 8) % COLS]);
        }
    }
}

// hidden += the weighted sum of the chosen experts, scaled, plus the shared expert.
DEVICE void add_experts(Tape &tape, const Layer &at, Self &self) {
    const int token = self.thread / 16;
    // The sums of the products before are read.
    __syncthreads();
#pragma unroll 1
    for (int pair = self.block; pair < D / 16; pair += self.grid) {
        const u32 *from = self.mail + SHARED_ACT_AT + self.g * FS + self.warp * (FS / WARPS) + 8 * self.t;
        Raw<FS / 256> raw, raw8;
        raw.load(from, self.has_low);
        if (HIGH) raw8.load(from + 8 * FS, self.has_high);
        float total[2][4] = {}, even[2][4] = {}, odd[2][4] = {}, none[4] = {0, 0, 0, 0};
        multiply_down(tape, total, self);
        uint4 a[FS / 256], a8[FS / 256];
        raw.settle(a, from, self.has_low, self);
        if (HIGH) raw8.settle(a8, from + 8 * FS, self.has_high, self);
        multiply_pair(tape, even, odd, a, a8, self);
        float *routed = self.s.sums[0], *shared = self.s.sums[1];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int place = self.warp * COLS * 16 + half * 8;
            leave_sums(routed + place, total[half], none, self.g, self.t, 16);
            leave_sums(shared + place, even[half], odd[half], self.g, self.t, 16);
        }
        __syncthreads();
        if (token < self.live) {
            const float y = rounded(rounded(added(routed + self.thread, COLS * 16)) * at.scaling);
            const float z = rounded(added(shared + self.thread, COLS * 16));
            add_and_send(HIDDEN_AT, pair, rounded(y + z), self);
            if (at.tap)
                at.tap[(size_t)token * at.tap_stride + pair * 16 + self.thread % 16] =
                    to_bf16(residual_of(self, pair));
        }
        __syncthreads();
    }
}
#endif
