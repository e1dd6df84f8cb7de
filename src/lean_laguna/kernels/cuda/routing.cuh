// Top-k routing from router logits, by every program of experts_up: less than a round trip through memory.
//
// -D: E experts (at most 256, a multiple of 32, and at most a block's threads); A experts a token; COLS tokens; SOFTCAP,
// NORM_TOPK.
// Sigmoid, bias for the choice only, weights divided by their sum and rounded; ties go to the lower id.
#pragma once
#include "common.cuh"

#define SLOTS (COLS * A < E ? COLS * A : E)
#define NOT_CHOSEN 255
#define LOWEST ((int)0x80000000)

struct alignas(16) Routing {
    u32 live[8];                 // one bit an expert
    u8 before[8];                // live experts below each word of `live`
    int num_slots;
    u8 experts[SLOTS];           // of each slot, ascending
    u8 rank[SLOTS][COLS];        // the expert's place among the token's own, ascending by id; NOT_CHOSEN
    u8 chosen[COLS][A];          // best first
    float weights[COLS][A];      // best first
    float slot_weights[SLOTS][COLS];
};

// COUNT scores from `first` on, 32 apart.
template <int COUNT> DEVICE void load_scores(const u16 *scores, int first, float (&to)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) to[i] = from_bf16(load_fresh16(scores + first + i * 32));
}
DEVICE int ordered(float x) {
    int bits = __float_as_int(x);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

DEVICE float gate_of(float logit, float softcap) {
    if (SOFTCAP) logit = softcap * (1.0f - 2.0f / (expf(2.0f * logit / softcap) + 1.0f));
    return 1.0f / (1.0f + expf(-logit));
}

// How many of four keys in a row come before another; of equal ones those that stand before `place`, counted from the first.
DEVICE int beaten_by(uint4 keys, int own, int place) {
    const int a = (int)keys.x, b = (int)keys.y, c = (int)keys.z, d = (int)keys.w;
    return (a > own || (a == own && 0 < place)) + (b > own || (b == own && 1 < place)) +
           (c > own || (c == own && 2 < place)) + (d > own || (d == own && 3 < place));
}

struct alignas(16) Contest {
    int keys[E];
    int winners[(E / 32 * A + 3) / 4 * 4];
    u8 ids[E / 32 * A];
    float gates[E];
};

// Fill `r` for one token (A at most 32): an expert a thread, whose place among its warp's 32 and then among all warps'
// best is counted. Called by all threads; a warp may use `r` after it without a barrier, since every warp writes the
// same. `meanwhile` asks for what need not come first.
template <class Meanwhile>
DEVICE void route_one(Routing &r, Contest &c, const u16 *scores, float bias, bool is_live, float softcap, Meanwhile meanwhile) {
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, winners = E / 32 * A;
    float score[1] = {0.0f};
    if (thread < E && is_live) load_scores(scores, thread, score);
    meanwhile();
    if (thread < E) {
        const float gate = gate_of(score[0], softcap);
        const int key = ordered(gate + bias);
        c.keys[thread] = key;
        __syncwarp();
        int place = 0;
#pragma unroll 4
        for (int i = 0; i < 32; i += 4) place += beaten_by(*(const uint4 *)(c.keys + warp * 32 + i), key, lane - i);
        if (place < A) {
            c.winners[warp * A + place] = key;
            c.ids[warp * A + place] = (u8)thread;
            c.gates[thread] = gate;
        }
        if (thread < (4 - winners % 4) % 4) c.winners[winners + thread] = LOWEST;
    }
    __syncthreads();
    if (thread < winners) {
        const int key = c.winners[thread];
        int place = 0;
#pragma unroll 4
        for (int i = 0; i < winners; i += 4) place += beaten_by(*(const uint4 *)(c.winners + i), key, thread - i);
        if (place < A) r.chosen[0][place] = c.ids[thread];
    }
    __syncthreads();
    const int id = r.chosen[0][lane < A ? lane : 0];
    const float gate = c.gates[id];
    float total = 0.0f;
    int slot = 0;
#pragma unroll
    for (int a = 0; a < A; a++) {
        total += from_lane(gate, a);
        slot += from_lane(id, a) < id;
    }
    if (lane < A) {
        r.experts[slot] = (u8)id;
        r.rank[slot][0] = (u8)slot;
        r.slot_weights[slot][0] = rounded(NORM_TOPK ? gate / total : gate);
    }
    r.num_slots = is_live ? A : 0;
    __syncwarp();
}

// A lane's best key, where it is among the lane's, and its gate; the first of equals.
struct Best {
    int key, at;
    float gate;
};
template <int COUNT> DEVICE Best best_of(const int (&keys)[COUNT], const float (&gates)[COUNT]) {
    Best found[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) found[i] = {keys[i], i, gates[i]};
#pragma unroll
    for (int apart = 1; apart < COUNT; apart *= 2)
#pragma unroll
        for (int i = 0; i + apart < COUNT; i += 2 * apart) {
            const bool later = found[i + apart].key > found[i].key;
            found[i].key = later ? found[i + apart].key : found[i].key;
            found[i].at = later ? found[i + apart].at : found[i].at;
            found[i].gate = later ? found[i + apart].gate : found[i].gate;
        }
    return found[0];
}

// A warp's choice for one token, best first, and its weights; `gates` come as scores: of experts lane, lane + 32 and so on,
// and `bias` is theirs.
DEVICE void choose(u8 *chosen, float *weights, float (&gates)[E / 32], const float (&bias)[E / 32], float softcap) {
    const int lane = threadIdx.x & 31;
    int keys[E / 32];
#pragma unroll
    for (int i = 0; i < E / 32; i++) {
        gates[i] = gate_of(gates[i], softcap);
        keys[i] = ordered(gates[i] + bias[i]);
    }
    Best best = best_of(keys, gates);
#pragma unroll 1
    for (int a = 0; a < A; a++) {
        const int highest = max_over_warp(best.key);
        const u32 equals = votes(best.key == highest);
        int winner = __ffs(equals) - 1;
        if (equals & (equals - 1)) winner = min_over_warp(best.key == highest ? best.at * 32 + lane : E) & 31;
        const bool wins = lane == winner;
        if (wins) {
            chosen[a] = (u8)(best.at * 32 + lane);
            weights[a] = best.gate;
        }
#pragma unroll
        for (int i = 0; i < E / 32; i++) keys[i] = wins && i == best.at ? LOWEST : keys[i];
        best = best_of(keys, gates);
    }
    __syncwarp();
    float total = 0.0f;
#pragma unroll
    for (int a = 0; a < A; a++) total += weights[a];
    __syncwarp();
    for (int a = lane; a < A; a += 32) weights[a] = rounded(NORM_TOPK ? weights[a] / total : weights[a]);
}

// Fill `r` for `live` tokens; called by all threads, ends with a barrier.
// `bias` is this lane's: of experts lane, lane + 32 and so on. `meanwhile` asks for what need not come first.
template <class Meanwhile>
DEVICE void route(Routing &r, const u16 *scores, const float (&bias)[E / 32], int live, float softcap, Meanwhile meanwhile) {
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, warps = blockDim.x >> 5;
    float gates[E / 32];
    if (warp < live) load_scores(scores, warp * E + lane, gates);
    meanwhile();
    for (int i = thread; i < SLOTS * COLS; i += blockDim.x) {
        (&r.rank[0][0])[i] = NOT_CHOSEN;
        (&r.slot_weights[0][0])[i] = 0.0f;
    }
    if (thread < 8) r.live[thread] = 0;
    for (int token = warp; token < live && token < COLS; token += warps) {
        if (token != warp) load_scores(scores, token * E + lane, gates);
        choose(r.chosen[token], r.weights[token], gates, bias, softcap);
    }
    __syncthreads();
    const int pairs = min(live, COLS) * A;
    for (int i = thread; i < pairs; i += blockDim.x) {
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
    for (int i = thread; i < pairs; i += blockDim.x) {
        const int token = i / A, id = r.chosen[token][i % A];
        const int slot = r.before[id >> 5] + __popc(r.live[id >> 5] & ((1u << (id & 31)) - 1u));
        int rank = 0;
        for (int a = 0; a < A; a++) rank += r.chosen[token][a] < id;
        r.experts[slot] = (u8)id;
        r.rank[slot][token] = (u8)rank;
        r.slot_weights[slot][token] = r.weights[token][i % A];
    }
    __syncthreads();
}

// Where nothing else is to be asked for.
DEVICE void route_one(Routing &r, Contest &c, const u16 *scores, float bias, bool is_live, float softcap) {
    route_one(r, c, scores, bias, is_live, softcap, [] {});
}
DEVICE void route(Routing &r, const u16 *scores, const float (&bias)[E / 32], int live, float softcap) {
    route(r, scores, bias, live, softcap, [] {});
}
