// What one launch of step.cu is made of: constants, a layer as the host describes it, shared memory.
//
// -D: D hidden size; J KV heads; KV_BLOCK keys a page; COLS tokens (8 or 16); LAYERS; RING 16-byte loads in flight
// a lane; GROUP of them issued together; CHUNK keys staged at a time; PAIRS of 8 weight rows a block owns of the
// hidden size; A experts a token, E of them (a multiple of 32, at most 256; 0: every layer is dense), F and FS width
// of a routed and of the shared expert, SOFTCAP, NORM_TOPK; WIDTH, HEADS and ACT: the widest qkv row, row of heads
// and row of activations; SHARED_BYTES.
#pragma once
#include "common.cuh"

#define WARPS 8
#define THREADS (WARPS * 32)
#define P 128
#define ITEM (THREADS * 8)
#define GROUPS (RING / GROUP)
#define PART (D / WARPS)
#define LOADS (D / 256)
#define HIGH (COLS > 8)
// Units whose sums can wait, and how many units later they are added.
#define BUFFERS (COLS > 8 ? 4 : 8)
#define LATER (COLS > 8 ? 2 : 4)
#define KEYS (CHUNK / WARPS)
#define SLICE (P / WARPS)
#define STRIDE (P + 8)
#define SHARE_STRIDE (CHUNK + 8)
#define NEAR 16
#define INF __int_as_float(0x7f800000)

// Where elements meet their readers: a bfloat16 in the high half of a word, the layer's tag in the low half.
#define HIDDEN_AT 0
#define MIDDLE_AT (HIDDEN_AT + COLS * D)
#define QKV_AT (MIDDLE_AT + COLS * D)
#define HEADS_AT (QKV_AT + COLS * WIDTH)
#define SCORES_AT (HEADS_AT + COLS * HEADS)
#define ACT_AT (SCORES_AT + COLS * E)

struct alignas(16) Layer {
    const u16 *input_norm, *qkv, *q_norm, *k_norm, *cosines, *sines;
    u16 *k_cache, *v_cache;
    const int *table;
    const u16 *out, *norm, *router, *gate_up, *down, *shared_down;
    const float *bias;
    u16 *tap;
    // Splits hold 1 << near_log keys, the first NEAR of them, then 1 << far_log.
    int width, heads, rotary, window, table_stride, tap_stride, dense, near_log, far_log, max_splits;
    u8 causal, qk_norm, gate, sparse;
    float softcap, scaling;
    u32 inverse;                      // 65536 / (query heads of a KV head) + 1
};

struct Rows {
    int live, requests;
    int start[16], count[16], first[16];
};

#if E
#define SLOTS (COLS * A < E ? COLS * A : E)
#define NOT_CHOSEN 255
struct alignas(16) Routing {
    u32 live[8];                 // one bit an expert
    int num_slots;
    u8 experts[SLOTS];           // of each slot, ascending
    u8 rank[SLOTS][COLS];        // the expert's place among the token's own, ascending by id; NOT_CHOSEN
    u8 chosen[COLS][A];          // best first
    float weights[COLS][A];      // best first
    float slot_weights[SLOTS][COLS];
};
#endif

// Where on the tape a warp's next batch of runs starts, and the batch before it: see tape.cuh.
struct alignas(16) Place {
    int layer, kind, unit, slot;
    u32 count, k, half, is_pair;
};

struct alignas(16) Shared {
    u16 ring[RING * ITEM];
    union {
        struct { u16 keys[CHUNK * STRIDE], values[CHUNK * STRIDE], queries[16 * STRIDE], shares[16 * SHARE_STRIDE]; };
#if E
        u16 acts[COLS * (A + 1) * F];
#endif
        u16 received[1];              // rows that are multiplied next, each warp its own part
    };
    float peaks[WARPS * 16], totals[WARPS * 16];
    union {
        float sums[2][WARPS * COLS * 16];
        float unit_sums[BUFFERS][WARPS * COLS * 8];
    };
    int filled[BUFFERS], freed[BUFFERS];  // warps that left their sums, and units added, so far
    float squares[WARPS * 16];
    float residual[PAIRS * COLS * 16];
    Layer layers[LAYERS];
    Place places[WARPS];
    const u16 *starts[WARPS][32];     // of the batch's runs
    int routed;                       // the last layer whose experts are known
    Rows rows;
#if E
    Routing routing;
#endif
};
// Two-byte elements that a warp can receive at a time.
#if E
#define ACTS (COLS * (A + 1) * F)
#define AREA ((2 * CHUNK * STRIDE > ACTS ? 2 * CHUNK * STRIDE : ACTS) / WARPS)
#else
#define AREA (2 * CHUNK * STRIDE / WARPS)
#endif
static_assert(sizeof(Layer) == 192, "as the host packs it");
static_assert(sizeof(Shared) <= SHARED_BYTES, "as the host counts it");

// What a thread carries through the step.
struct Self {
    Shared &s;
    int thread, warp, lane, g, t, block, grid;
    int live;
    bool has_low, has_high;   // whether tokens g and g + 8 are live
    u32 *mail;
    int *state;
    int layer, phase;
    u32 tag;                  // of the layer's elements
    int patience;             // polls left before something must be wrong
    int buffer;               // of `sums`
    int units;                // of 8 rows so far
    u64 *stamps;
};

enum { TAGS_USED, SERIAL, RESTARTS, ARRIVED, STUCK, STUCK_BLOCK, STUCK_LAYER, STUCK_PHASE, STUCK_THREAD };
enum { QKV, ATTEND, COMBINE, OUT, UP, ROUTE, DOWN, NORM, TOKENS_HERE, HEADS_HERE, CHUNK_DONE, PARTS_HERE, ROWS_HERE,
       SCORES_HERE, TABLES_DONE, ACTS_HERE, STAMPS };
enum { ROWS_QKV, PAIRS_OUT, ROWS_ROUTER, ROWS_SHARED, ROWS_UP, PAIRS_DOWN, PAIRS_SHARED, KINDS };
