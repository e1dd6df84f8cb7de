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
    mark(self, SCORES_HERE);
#pragma unroll
    for (int i = 0; i < E / 32; i++) {
        float logit = sigmoid[i];
        if (SOFTCAP) logit = softcap * (1.0f - 2.0f / (__expf(2.0f * logit / softcap) + 1.0f));
        sigmoid[i] = quotient(1.0f, 1.0f + __expf(-logit));
        keys[i] = ordered(sigmoid[i] + bias[i]);
    }
    // The warp's best, one after another; the lower id among equals.
#pragma unroll 1
    for (int a = 0; a < A; a++) {
        int tree[E / 32];
#pragma unroll
        for (int i = 0; i < E / 32; i++) tree[i] = keys[i];
#pragma unroll
        for (int width = 1; width < E / 32; width *= 2)
#pragma unroll
            for (int i = 0; i + width < E / 32; i += 2 * width) tree[i] = max(tree[i], tree[i + width]);
        const int highest = max_over_warp(tree[0]);
        const u32 equals = lanes_where(tree[0] == highest);
        // This lane's first expert of that key.
        int own = E / 32 - 1;
#pragma unroll
        for (int i = E / 32 - 2; i >= 0; i--) own = keys[i] == highest ? i : own;
        int winner = first_bit(equals);
        if (equals & (equals - 1)) winner = min_over_warp(tree[0] == highest ? own * 32 + lane : E) & 31;
        if (winner != lane) continue;
        const int id = own * 32 + lane;
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < E / 32; i++)
            if (i == own) value = sigmoid[i], keys[i] = lowest;
        r.chosen[token][a] = (u8)id, r.weights[token][a] = value;
        atomicOr(&r.live[id >> 5], 1u << (id & 31));
    }
    __syncwarp();
    float total = 0.0f;
#pragma unroll
    for (int a = 0; a < A; a++) total += r.weights[token][a];
    const float own = r.weights[token][lane < A ? lane : 0];
    __syncwarp();
    if (lane < A) r.weights[token][lane] = rounded(NORM_TOPK ? own / total : own);
}

// Empty the routing tables; a barrier must follow before `route`.
DEVICE void clear_routing(Self &self) {
    Routing &r = self.s.routing;
#pragma unroll 1
    for (int i = self.thread; i < SLOTS * COLS; i += THREADS) {
        (&r.rank[0][0])[i] = NOT_CHOSEN;
        (&r.slot_weights[0][0])[i] = 0.0f;
    }
    if (self.thread < 8) r.live[self.thread] = 0;
}

// Fill the routing tables; called by all threads, ends with a barrier.
DEVICE void route(const Layer &at, Self &self) {
    Routing &r = self.s.routing;
    const int thread = self.thread;
    float bias[E / 32];
#pragma unroll
    for (int i = 0; i < E / 32; i++) bias[i] = at.bias[i * 32 + self.lane];
#pragma unroll 1
    for (int token = self.warp; token < self.live; token += WARPS) choose_experts(r, token, bias, at.softcap, self);
    __syncthreads();
    u32 words[8];
#pragma unroll
    for (int i = 0; i < 8; i++) words[i] = r.live[i];
#pragma unroll 1
    for (int i = thread; i < self.live * A; i += THREADS) {
        const int token = i / A, id = r.chosen[token][i % A];
        int slot = 0, rank = 0;
#pragma unroll
        for (int w = 0; w < 8; w++)
            slot += bits_set(w * 32 + 32 <= id ? words[w] : w * 32 > id ? 0 : words[w] & ((1u << (id & 31)) - 1u));
        for (int a = 0; a < A; a++) rank += r.chosen[token][a] < id;
        r.experts[slot] = (u8)id;
        r.rank[slot][token] = (u8)rank;
        r.slot_weights[slot][token] = r.weights[token][i % A];
    }
    if (thread == 0) {
        int all = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) all += bits_set(words[w]);
        r.num_slots = all, self.s.routed = self.layer;
    }
    __syncthreads();
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
DEVICE void multiply_down(Tape &tape, float (&total)[2][4], const u16 *acts, Self &self) {
    const Routing &r = self.s.routing;
    const int num_slots = r.num_slots, g = self.g, g8 = (g + 8) % COLS;
    const u16 *low = acts + g * (A + 1) * (F / WARPS) + 8 * self.t;
    const u16 *high = acts + g8 * (A + 1) * (F / WARPS) + 8 * self.t;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    int rank = self.has_low ? r.rank[0][g] : NOT_CHOSEN, rank8 = self.has_high ? r.rank[0][g8] : NOT_CHOSEN;
#pragma unroll 1
    for (int slot = 0; slot < num_slots; slot++) {
        uint4 a[F / 256], a8[HIGH ? F / 256 : 1];
        const bool takes = rank != NOT_CHOSEN, takes8 = HIGH && rank8 != NOT_CHOSEN;
#pragma unroll
        for (int i = 0; i < F / 256; i++) {
            a[i] = takes ? *(const uint4 *)(low + rank * (F / WARPS) + 32 * i) : zero;
            if (HIGH) a8[HIGH * i] = takes8 ? *(const uint4 *)(high + rank8 * (F / WARPS) + 32 * i) : zero;
        }
        const float by = r.slot_weights[slot][g], by8 = HIGH ? r.slot_weights[slot][g8] : 0.0f;
        const int next = min(slot + 1, num_slots - 1);
        if (self.has_low) rank = r.rank[next][g];
        if (self.has_high) rank8 = r.rank[next][g8];
        float even[2][4] = {}, odd[2][4] = {};
        multiply_pair(tape, even, odd, a, a8, self);
        if (takes) add_weighted(total, even, odd, 0, by);
        if (takes8) add_weighted(total, even, odd, 2, by8);
    }
}

// hidden += the weighted sum of the chosen experts, scaled, plus the shared expert.
DEVICE void add_experts(Tape &tape, const Layer &at, Self &self) {
    const int token = self.thread / 16;
    u16 *acts = self.s.received + self.warp * AREA;
    const u32 *from = self.mail + ACT_AT + self.warp * (F / WARPS);
    if (self.block < D / 16)
        receive_rows(acts, F / WARPS, from, F, self.live * (A + 1), F / WARPS, self);
    // The sums of units are read.
    __syncthreads();
    mark(self, ACTS_HERE);
#pragma unroll 1
    for (int pair = self.block; pair < D / 16; pair += self.grid) {
        float total[2][4] = {}, even[2][4] = {}, odd[2][4] = {}, none[4] = {0, 0, 0, 0};
        multiply_down(tape, total, acts, self);
        uint4 a[FS / 256], a8[HIGH ? FS / 256 : 1];
        const u16 *low = acts + (self.g * (A + 1) + A) * (F / WARPS) + 8 * self.t;
#pragma unroll
        for (int i = 0; i < FS / 256; i++) {
            a[i] = self.has_low ? *(const uint4 *)(low + 32 * i) : make_uint4(0, 0, 0, 0);
            if (HIGH)
                a8[HIGH * i] = self.has_high ? *(const uint4 *)(low + (A + 1) * F + 32 * i) : make_uint4(0, 0, 0, 0);
        }
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
