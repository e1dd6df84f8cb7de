// Attention of a whole block of a prompt: from raw queries to gated heads.
//
// Programs stay and take tiles of 128 queries of one head. One warp asks for keys and values, 128 at a time, the latest
// first, as images laid out before (prefill_images): programs of a cluster, whose heads share them, each for a part of what
// all of them read. Two warpgroups multiply 64 queries each, and by turns: while one has
// its scores, the other one's products are under way. Queries are normalised and rotated in registers. What a row sums up,
// and in which order, follows from its position alone.
#include "common.cuh"
#include "warpgroups.cuh"

#define TILE 128
#define PIECES (P / 32)
#define IMAGE (TILE * P)
#define GROUP (H / J)
#define WIDTH ((H + 2 * J) * P + (GATE ? H : 0))
#define HALF (ROTARY / 2)
#define THREADS 384

enum { STAGES = 2, KEYS = 0, VALUES = 1, CONSUMER_WARPS = 8, SHARE = IMAGE / CLUSTER };

struct Ring {
    u64 came[2][STAGES], left[2][STAGES];
};

struct Task {
    int row, head, last, lowest;
    bool is_cut;  // the lowest keys lie at the window's edge
};

// The longest first; heads that share keys side by side.
DEVICE Task task_at(int index, int num_tiles, int first) {
    const int tile = num_tiles - 1 - index / H, begin = first + tile * TILE;
    const int base = WINDOW && first > WINDOW ? first - WINDOW : 0, low = WINDOW && begin > WINDOW ? begin - WINDOW : 0;
    return {tile * TILE, index % H, (begin - base) / TILE, (low - base) / TILE, WINDOW && begin >= WINDOW};
}

DEVICE void ask_for(Ring *ring, int kind, int count, u8 *stages, const u16 *images, int block, int head) {
    const int stage = count % STAGES;
    const int own = blockIdx.x % CLUSTER * SHARE;
    if (count >= STAGES) wait_for_turns(&ring->left[kind][stage], (count / STAGES - 1) & 1);
    expect_parts(&ring->came[kind][stage], IMAGE * 2);
    copy_shared(stages + ((kind * STAGES + stage) * IMAGE + own) * 2, images + (size_t)(block * J + head) * IMAGE + own, SHARE * 2,
                &ring->came[kind][stage], (1 << CLUSTER) - 1);
}

DEVICE void ask_for_all(Ring *ring, u8 *stages, const u16 *keys, const u16 *values, int num_tasks, int num_tiles, int first) {
    int count = 0;
    for (int index = blockIdx.x; index < num_tasks; index += gridDim.x) {
        const Task task = task_at(index, num_tiles, first);
        const int head = task.head / GROUP;
        ask_for(ring, KEYS, count, stages, keys, task.last, head);
        for (int block = task.last; block >= task.lowest; block--, count++) {
            if (block > task.lowest) ask_for(ring, KEYS, count + 1, stages, keys, block - 1, head);
            ask_for(ring, VALUES, count, stages, values, block, head);
        }
    }
}

// A thread's first row of a tile, and its place among the four that share it: read anew where wanted, to hold no registers.
DEVICE int own_row() {
    const int thread = thread_index();
    return thread / 32 * 16 - 64 + (thread & 31) / 4;
}
DEVICE int own_place() { return thread_index() & 3; }

// Of two rows, eight values every 32, as they are multiplied: words 2i and 2i + 1 of a piece are values 2i and 2i + 1 of each.
// What they are rotated by is asked for long before, too.
struct Queries {
    u32 q[8 * PIECES], gates;
    uint4 cos[2][HALF / 32], sin[2][HALF / 32];
};

DEVICE void load_queries(Queries &own, const u16 *qkv, const Task &task, int row, int t, int num_tokens) {
    own.gates = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const u16 *from = qkv + (size_t)min(task.row + row + 8 * r, num_tokens - 1) * WIDTH;
#pragma unroll
        for (int c = 0; c < PIECES; c++) {
            const uint4 v = load_fresh(from + task.head * P + 32 * c + 8 * t);
            own.q[8 * c + r] = v.x, own.q[8 * c + 2 + r] = v.y, own.q[8 * c + 4 + r] = v.z, own.q[8 * c + 6 + r] = v.w;
        }
        if (GATE) own.gates |= (u32)load_fresh16(from + (H + 2 * J) * P + task.head) << (16 * r);
    }
}

DEVICE void load_angles(Queries &own, const u16 *cos_table, const u16 *sin_table, int position, int last, int t) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int c = 0; c < HALF / 32; c++) {
            const size_t at = (size_t)min(position + 8 * r, last) * HALF + 32 * c + 8 * t;
            own.cos[r][c] = load_fresh(cos_table + at), own.sin[r][c] = load_fresh(sin_table + at);
        }
}

DEVICE u32 word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

DEVICE void normalise(Queries &own, const u16 *norm, int t, float eps) {
    float inverse[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 8 * PIECES; i++) inverse[i & 1] += low(own.q[i]) * low(own.q[i]) + high(own.q[i]) * high(own.q[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) inverse[r] += exchange(inverse[r], 1);
#pragma unroll
    for (int r = 0; r < 2; r++) inverse[r] = rsqrtf((inverse[r] + exchange(inverse[r], 2)) / P + eps);
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
        const uint4 by = *(const uint4 *)(norm + 32 * c + 8 * t);
#pragma unroll
        for (int i = 8 * c; i < 8 * c + 8; i++) {
            const u32 scaled = pair_of(low(own.q[i]) * inverse[i & 1], high(own.q[i]) * inverse[i & 1]);
            own.q[i] = products(scaled, word_of(by, i % 8 / 2));
        }
    }
}

DEVICE void rotate(Queries &own) {
#pragma unroll
    for (int i = 0; i < HALF / 4; i++) {
        const u32 cos = word_of(own.cos[i & 1][i / 8], i % 8 / 2), sin = word_of(own.sin[i & 1][i / 8], i % 8 / 2);
        const u32 x = own.q[i], y = own.q[i + HALF / 4];
        own.q[i] = sums(products(x, cos), products(y ^ 0x80008000u, sin));
        own.q[i + HALF / 4] = sums(products(y, cos), products(x, sin));
    }
}

// The running softmax of two rows.
struct Sums {
    float peak[2], total[2];
};

enum { ALL, UP_TO, AFTER };  // keys of a block that a row sees: all, up to its own place, or those after it

template <int SIGHT> DEVICE void mask(float (&s)[64]) {
    if (SIGHT == ALL) return;
    const int row = own_row(), t = own_place();
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const int column = i / 4 * 8 + 2 * t + (i & 1), own = row + (i & 2 ? 8 : 0);
        s[i] = (SIGHT == UP_TO ? column <= own : column > own) ? s[i] : -__int_as_float(0x7f800000);
    }
}

// Scores to weights; what was summed up before is to be multiplied by `fade`.
DEVICE void weigh(float (&s)[64], Sums &sums, float (&fade)[2], float scale) {
    float peak[2] = {max(s[0], s[1]), max(s[2], s[3])};
#pragma unroll
    for (int i = 4; i < 64; i += 2) peak[i / 2 & 1] = max(peak[i / 2 & 1], max(s[i], s[i + 1]));
#pragma unroll
    for (int r = 0; r < 2; r++) peak[r] = max(peak[r], exchange(peak[r], 1));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        peak[r] = max(sums.peak[r], max(peak[r], exchange(peak[r], 2)) * scale);
        fade[r] = power2(sums.peak[r] - peak[r]);
        sums.peak[r] = peak[r], sums.total[r] *= fade[r];
    }
#pragma unroll
    for (int i = 0; i < 64; i++) {
        s[i] = power2(fmaf(s[i], scale, -peak[i / 2 & 1]));
        sums.total[i / 2 & 1] += s[i];
    }
}

DEVICE void keep_weights(u32 (&p)[32], const float (&s)[64]) {
#pragma unroll
    for (int i = 0; i < 32; i++) p[i] = pair_of(s[2 * i], s[2 * i + 1]);
}

// 64 rows by 128 columns, over 128 of k: an image of two panels.
DEVICE void multiply_image(float (&d)[64], const u32 *a, const u8 *image, bool adds) {
    const Panel panel = panel_at(image), second = panel_at(image + IMAGE);
    begin_products();
#pragma unroll
    for (int k = 0; k < 8; k++) multiply_panel(d, a + 4 * k, further(k < 4 ? panel : second, k % 4), adds || k > 0);
    end_products();
}

// One warpgroup's view of the ring: as many keys taken before, and as many values.
struct Consumer {
    Ring *ring;
    u8 *stages;
    int group, keys, values;

    METHOD const u8 *wait(int kind) {
        const int count = kind == KEYS ? keys : values, stage = count % STAGES;
        wait_until_filled(&ring->came[kind][stage], count / STAGES & 1);
        return stages + (kind * STAGES + stage) * IMAGE * 2;
    }
    METHOD void leave(int kind) {
        int &count = kind == KEYS ? keys : values;
        if ((threadIdx.x & 31) < CLUSTER) end_turn_at(&ring->left[kind][count % STAGES], threadIdx.x & 31);
        count++;
    }
    METHOD void begin_turn() { wait_at(2 + group, 256); }
    METHOD void end_turn_of_group() { count_at(3 - group, 256); }
};

template <int SIGHT>
DEVICE void take_block(Consumer &own, const Queries &queries, float (&s)[64], float (&o)[64], u32 (&p)[32], Sums &sums,
                       bool adds, float scale) {
    const u8 *keys = own.wait(KEYS);
    own.begin_turn();
    multiply_image(s, queries.q, keys, false);
    multiply_image(o, p, own.wait(VALUES), adds);
    own.end_turn_of_group();
    wait_for_products<1>();
    show_sums(s);
    own.leave(KEYS);
    mask<SIGHT>(s);
    float fade[2];
    weigh(s, sums, fade, scale);
    show_sums(s);  // while values are multiplied
    wait_for_products<0>();
    show_sums(o);
    own.leave(VALUES);
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] *= fade[i / 2 & 1];
    keep_weights(p, s);
}

DEVICE void store_heads(u16 *out, const float (&o)[64], const Sums &sums, u32 gates, const Task &task, int row, int t,
                        int num_tokens) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = sums.total[r];
        total += exchange(total, 1);
        const float by = quotient(1.0f, total + exchange(total, 2));
        const float opened = GATE ? softplus(r ? high(gates) : low(gates)) : 1.0f;
        const int at = task.row + row + 8 * r;
        if (at >= num_tokens) continue;
        u16 *to = out + (size_t)at * (H * P) + task.head * P + 8 * t;
#pragma unroll
        for (int c = 0; c < PIECES; c++) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int k = 16 * c + 4 * i + 2 * r;
                v[i] = products(pair_of(o[k] * by, o[k + 1] * by), pair_of(opened, opened));
            }
            *(uint4 *)(to + 32 * c) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

DEVICE void consume(Ring *ring, u8 *stages, const u16 *qkv, u16 *out, const u16 *norm, const u16 *cos_table, const u16 *sin_table,
                    int num_tasks, int num_tiles, int first, int num_tokens, float eps, float scale) {
    const int group = threadIdx.x / 128 - 1;
    Consumer own = {ring, stages, group, 0, 0};
    if (group == 1) own.end_turn_of_group();
    Queries queries;
    float s[64], o[64];
    u32 p[32];
    const auto angles = [&](const Task &task) {
        load_angles(queries, cos_table, sin_table, first + task.row + own_row(), first + num_tokens - 1, own_place());
    };
    Task task = task_at(blockIdx.x, num_tiles, first);
    if (blockIdx.x < num_tasks) load_queries(queries, qkv, task, own_row(), own_place(), num_tokens), angles(task);
    for (int index = blockIdx.x; index < num_tasks; index += gridDim.x) {
        const u32 gates = queries.gates;
        if (QK_NORM) normalise(queries, norm, own_place(), eps);
        rotate(queries);
        Sums sums = {{-__int_as_float(0x7f800000), -__int_as_float(0x7f800000)}, {0.0f, 0.0f}};
        float fade[2];
        multiply_image(s, queries.q, own.wait(KEYS), false);
        wait_for_products<0>();
        show_sums(s);
        own.leave(KEYS);
        mask<UP_TO>(s);
        weigh(s, sums, fade, scale);
        keep_weights(p, s);
        int block = task.last - 1;
        for (; block >= task.lowest + task.is_cut; block--)
            take_block<ALL>(own, queries, s, o, p, sums, block != task.last - 1, scale);
        if (task.is_cut) take_block<AFTER>(own, queries, s, o, p, sums, block != task.last - 1, scale);
        multiply_image(o, p, own.wait(VALUES), task.last > task.lowest);
        const bool goes_on = index + gridDim.x < num_tasks;
        const Task next = task_at(goes_on ? index + gridDim.x : index, num_tiles, first);
        load_queries(queries, qkv, next, own_row(), own_place(), num_tokens);
        wait_for_products<0>();
        show_sums(o);
        own.leave(VALUES);
        angles(next);
        store_heads(out, o, sums, gates, task_at(index, num_tiles, first), own_row(), own_place(), num_tokens);
        task = next;
    }
    if (group == 0) own.begin_turn();  // as many as were ended
}

extern "C" CLUSTERED(THREADS, CLUSTER)
prompt_attention(const u16 *qkv, u16 *out, const u16 *norm, const u16 *cos_table, const u16 *sin_table, const u16 *keys,
                 const u16 *values, const int *first_at, const int *num_tokens_at, float eps, float scale) {
    EXTERN_SHARED(u8, bytes);
    u8 *stages = (u8 *)(((u64)bytes + 1023) / 1024 * 1024);
    Ring *ring = (Ring *)(stages + 2 * STAGES * IMAGE * 2);
    if (threadIdx.x == 0) {
        for (int kind = 0; kind < 2; kind++)
            for (int stage = 0; stage < STAGES; stage++)
                init_filled(&ring->came[kind][stage]), init_turns(&ring->left[kind][stage], CLUSTER * CONSUMER_WARPS);
        show_arrivals();
    }
    sync_cluster();
    const int first = *first_at, num_tokens = *num_tokens_at, num_tiles = (num_tokens + TILE - 1) / TILE, num_tasks = num_tiles * H;
    if (threadIdx.x < 128) {
        leave_registers<40>();
        if (threadIdx.x == 0) ask_for_all(ring, stages, keys, values, num_tasks, num_tiles, first);
    } else {
        take_registers<232>();
        consume(ring, stages, qkv, out, norm, cos_table, sin_table, num_tasks, num_tiles, first, num_tokens, eps, scale);
    }
    sync_cluster();
}
