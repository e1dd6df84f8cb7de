// Top-k routing from router logits, by every program of experts_up: less than a round trip through memory.
//
// -D: E experts (at most 256, a multiple of 32, and at most a block's threads); A experts a token; COLS tokens; SOFTCAP,
// NORM_TOPK.
// Sigmoid, bias for the choice only, weights divided by their sum and rounded; ties go to the lower id.
#pragma once
#include "common.cuh"

#define SLOTS (COLS * A < E ? COLS * A : E)
#define NOT_CHOSEN 255

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

DEVICE int ordered(float x) {
    int bits = __float_as_int(x);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

DEVICE float gate_of(float logit, float softcap) {
    if (SOFTCAP) logit = softcap * (1.0f - 2.0f / (expf(2.0f * logit / softcap) + 1.0f));
    return 1.0f / (1.0f + expf(-logit));
}

// Whether a key beats another that stands at a place `below` or above its own.
DEVICE bool beats(int other, int own, bool below) { return other > own || (below && other == own); }

struct alignas(16) Contest {
    int keys[E];
    int winners[E / 32 * A];
    u8 ids[E / 32 * A];
    float gates[E];
};

// Fill `r` for one token (A at most 32): an expert a thread, whose place among its warp's 32 and then among all warps'
// best is counted. Called by all threads; a warp may use `r` after it without a barrier, since every warp writes the
// same. Loops are left as loops: what has to be fetched first is what this takes long for.
DEVICE void route_one(Routing &r, Contest &c, const u16 *scores, float bias, bool is_live, float softcap) {
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    if (thread < E) {
        const float gate = gate_of(from_bf16(load_fresh16(scores + thread)), softcap);
        const int key = ordered(gate + bias);
        c.keys[thread] = key;
        __syncwarp();
        int place = 0;
#pragma unroll 1
        for (int i = 0; i < 32; i += 4) {
            const uint4 other = *(const uint4 *)(c.keys + warp * 32 + i);
            place += beats((int)other.x, key, i < lane) + beats((int)other.y, key, i + 1 < lane) +
                     beats((int)other.z, key, i + 2 < lane) + beats((int)other.w, key, i + 3 < lane);
        }
        if (place < A) {
            c.winners[warp * A + place] = key;
            c.ids[warp * A + place] = (u8)thread;
            c.gates[thread] = gate;
        }
    }
    __syncthreads();
    if (thread < E / 32 * A) {
        const int key = c.winners[thread];
        int place = 0;
#pragma unroll 4
        for (int i = 0; i < E / 32 * A; i++) place += beats(c.winners[i], key, i < thread);
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

// Fill `r` for `live` tokens; called by all threads, ends with a barrier.
// `bias` is this lane's: of experts lane, lane + 32 and so on.
DEVICE void route(Routing &r, const u16 *scores, const float (&bias)[E / 32], int live, float softcap) {
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, warps = blockDim.x >> 5;
    const int lowest = (int)0x80000000;
    for (int i = thread; i < SLOTS * COLS; i += blockDim.x) {
        (&r.rank[0][0])[i] = NOT_CHOSEN;
        (&r.slot_weights[0][0])[i] = 0.0f;
    }
    if (thread < 8) r.live[thread] = 0;
    for (int token = warp; token < live && token < COLS; token += warps) {
        float sigmoid[E / 32];
        int keys[E / 32];
#pragma unroll
        for (int i = 0; i < E / 32; i++) sigmoid[i] = from_bf16(load_fresh16(scores + token * E + i * 32 + lane));
#pragma unroll
        for (int i = 0; i < E / 32; i++) {
            sigmoid[i] = gate_of(sigmoid[i], softcap);
            keys[i] = ordered(sigmoid[i] + bias[i]);
        }
        // Each lane's best, the lowest id among equals; only the lane that wins looks again.
        int best = keys[0], best_at = 0;
        float best_value = sigmoid[0];
#pragma unroll
        for (int i = 1; i < E / 32; i++)
            if (keys[i] > best) best = keys[i], best_at = i, best_value = sigmoid[i];
#pragma unroll 1
        for (int a = 0; a < A; a++) {
            const int highest = max_over_warp(best);
            const u32 equals = votes(best == highest);
            int winner = __ffs(equals) - 1;
            if (equals & (equals - 1)) winner = min_over_warp(best == highest ? best_at * 32 + lane : E) & 31;
            if (lane == winner) {
                r.chosen[token][a] = (u8)(best_at * 32 + lane);
                r.weights[token][a] = best_value;
#pragma unroll
                for (int i = 0; i < E / 32; i++)
                    if (i == best_at) keys[i] = lowest;
                best = keys[0], best_at = 0, best_value = sigmoid[0];
#pragma unroll
                for (int i = 1; i < E / 32; i++)
                    if (keys[i] > best) best = keys[i], best_at = i, best_value = sigmoid[i];
            }
        }
        __syncwarp();
        float total = 0.0f;
#pragma unroll
        for (int a = 0; a < A; a++) total += r.weights[token][a];
        __syncwarp();
        for (int a = lane; a < A; a += 32)
            r.weights[token][a] = rounded(NORM_TOPK ? r.weights[token][a] / total : r.weights[token][a]);
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
