// Attention of a step over the paged cache: tasks of one split of a (request, KV head) for 16 queries, then each
// (row, head) adds its splits in their order and applies the gate.
//
// The context is cut at absolute positions whatever the number of rows or requests, and a row takes the same steps
// over the same keys alone or beside others, so its bits are its own. Old keys of a block's first task are staged
// while the layer's first product still runs.
#pragma once
#include "mail.cuh"

struct Task {
    int request, head, tile, split, start, count, first, last;
    int from, to;                     // keys of the split
};

// Row (from the request's first) and head (from the group's first) of a request's query.
DEVICE int row_of(const Layer &at, int query) { return (query * at.inverse) >> 16; }
DEVICE int head_of(const Layer &at, int query) { return query - row_of(at, query) * (at.heads / J); }

DEVICE int split_of(const Layer &at, int key) {
    const int near = NEAR << at.near_log;
    return key < near ? key >> at.near_log : NEAR + ((key - near) >> at.far_log);
}
DEVICE int start_of(const Layer &at, int split) {
    return split < NEAR ? split << at.near_log : (NEAR << at.near_log) + ((split - NEAR) << at.far_log);
}

// The task at place `index` of all requests' tasks in a row; false past the end.
DEVICE bool find_task(Task &task, int index, const Layer &at, const Rows &rows) {
    const int group = at.heads / J;
#pragma unroll 1
    for (int r = 0; r < rows.requests; r++) {
        const int count = rows.count[r], first = rows.first[r], last = first + count - 1;
        if (count == 0) continue;
        const int low_split = split_of(at, at.window > 0 ? max(first - at.window + 1, 0) : 0);
        const int tiles = (count * group + 15) / 16;
        const int num_tasks = (split_of(at, last) - low_split + 1) * J * tiles;
        if (index < num_tasks) {
            task.request = r, task.start = rows.start[r], task.count = count, task.first = first, task.last = last;
            task.head = index % J, task.tile = index / J % tiles, task.split = low_split + index / (J * tiles);
            task.from = start_of(at, task.split), task.to = min(start_of(at, task.split + 1), last + 1);
            return true;
        }
        index -= num_tasks;
    }
    return false;
}

// A chunk's old keys, through registers or (first chunk) with copies that belong to the tape's next group; zeros for
// keys that no row sees, and nothing where `stage_heads` writes.
struct Staged {
    enum { PIECES = CHUNK * (P / 8) / THREADS, ROWS = THREADS / (P / 8) };
    uint4 keys[PIECES], values[PIECES];
    u32 slots[PIECES];                // in the cache, ~0 for a key that is not there
    METHOD void find(const Task &task, const Layer &at, int from, bool is_wanted, Self &self) {
        const int low = at.window > 0 ? max(task.first - at.window + 1, 0) : 0;
        const int *table = at.table + (size_t)task.request * at.table_stride;
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            const int key = from + self.thread / (P / 8) + n * ROWS;
            const bool is_old = is_wanted && key >= low && key < task.first;
            slots[n] = is_old ? (u32)table[key / KV_BLOCK] * KV_BLOCK + key % KV_BLOCK : ~0u;
        }
    }
    METHOD void copy(const Task &task, const Layer &at, Self &self) {
        const int k = self.thread / (P / 8), d = self.thread % (P / 8) * 8;
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            const int key = task.from + k + n * ROWS, to = (k + n * ROWS) * STRIDE + d;
            if (key >= task.first && key < task.to) continue;
            const size_t place = (size_t)(slots[n] == ~0u ? 0 : slots[n]) * (J * P) + task.head * P + d;
            copy_async(self.s.keys + to, at.k_cache + place, slots[n] != ~0u);
            copy_async(self.s.values + to, at.v_cache + place, slots[n] != ~0u);
        }
    }
    METHOD void load(const Task &task, const Layer &at, int from, bool is_wanted, Self &self) {
        find(task, at, from, is_wanted, self);
        const int d = self.thread % (P / 8) * 8;
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            const size_t place = (size_t)slots[n] * (J * P) + task.head * P + d;
            keys[n] = values[n] = make_uint4(0, 0, 0, 0);
            if (slots[n] == ~0u) continue;
            keys[n] = *(const uint4 *)(at.k_cache + place);
            values[n] = *(const uint4 *)(at.v_cache + place);
        }
    }
    METHOD void store(const Task &task, int from, Self &self) {
        const int k = self.thread / (P / 8), d = self.thread % (P / 8) * 8;
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            const int key = from + k + n * ROWS, to = (k + n * ROWS) * STRIDE + d;
            if (key >= task.first && key < task.to) continue;
            *(uint4 *)(self.s.keys + to) = keys[n];
            *(uint4 *)(self.s.values + to) = values[n];
        }
    }
};

// Four elements of a position's row of the rotary tables, for the four that a lane turns.
DEVICE uint2 angles(const u16 *table, const Layer &at, int position, int lane) {
    const int d = lane * 4, half = at.rotary / 2;
    return d < at.rotary ? *(const uint2 *)(table + (size_t)position * half + (d < half ? d : d - half))
                         : make_uint2(0, 0);
}

// One head, four elements a lane, normalised and turned as Hugging Face rounds.
DEVICE uint2 turned(uint2 raw, uint2 by, uint2 cosines, uint2 sines, const Layer &at, float eps, int lane) {
    float v[4] = {low(raw.x), high(raw.x), low(raw.y), high(raw.y)};
    const float c[4] = {low(cosines.x), high(cosines.x), low(cosines.y), high(cosines.y)};
    const float s[4] = {low(sines.x), high(sines.x), low(sines.y), high(sines.y)};
    const int half = at.rotary / 2;
    if (at.qk_norm) {
        const float w[4] = {low(by.x), high(by.x), low(by.y), high(by.y)};
        const float inverse =
            rsqrtf(sum_over_warp(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]) / P + eps);
        for (int i = 0; i < 4; i++) v[i] = rounded(rounded(v[i] * inverse) * w[i]);
    }
    for (int i = 0; i < 4; i++) {
        const float other = exchange(v[i], half / 4);
        const int d = lane * 4 + i;
        if (d < at.rotary) v[i] = rounded(rounded(v[i] * c[i]) + rounded((d < half ? -other : other) * s[i]));
    }
    return make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
}

// One of the heads that a task turns: a query of its 16, or a key of this step's rows that falls into the chunk.
struct Head {
    bool is_query;
    int place;                        // row of the staged queries or keys
    u32 slot;                         // in the cache, of a key
    const u32 *from;
    uint4 raw, value;
    uint2 cosines, sines, by;
    METHOD void load(int i, int num_queries, const Task &task, const Layer &at, int from_key, Self &self) {
        is_query = i < num_queries;
        const int first = max(task.first, from_key), query = task.tile * 16 + i;
        const int position = is_query ? task.first + row_of(at, query) : first + i - num_queries;
        place = is_query ? i : position - from_key;
        const int head = is_query ? task.head * (at.heads / J) + head_of(at, query) : at.heads + task.head;
        from = self.mail + QKV_AT + (size_t)(task.start + position - task.first) * at.width + head * P + self.lane * 4;
        raw = load_mail(from);
        value = make_uint4(0, 0, 0, 0), slot = 0;
        if (!is_query) {
            value = load_mail(from + J * P);
            slot = (u32)at.table[(size_t)task.request * at.table_stride + position / KV_BLOCK] * KV_BLOCK +
                   position % KV_BLOCK;
        }
        by = *(const uint2 *)((is_query ? at.q_norm : at.k_norm) + self.lane * 4);
        cosines = angles(at.cosines, at, position, self.lane), sines = angles(at.sines, at, position, self.lane);
    }
};

// Turn the task's queries and the chunk's new keys, a head a warp at a time; each is loaded while the one before it
// is turned. A split's first tile also writes keys and values to the cache.
DEVICE void stage_heads(const Task &task, const Layer &at, int from, float eps, Self &self) {
    const int lane = self.lane, left = task.count * (at.heads / J) - task.tile * 16;
    const int num_queries = from == task.from ? min(left, 16) : 0;
    const int total = num_queries + max(min(task.to, from + CHUNK) - max(task.first, from), 0);
    Head next = {};
    if (self.warp < total) next.load(self.warp, num_queries, task, at, from, self);
#pragma unroll 1
    for (int i = self.warp; i < total; i += WARPS) {
        const Head head = next;
        if (i + WARPS < total) next.load(i + WARPS, num_queries, task, at, from, self);
        const uint2 raw = settled4(head.raw, head.from, self);
        __syncwarp();
        const uint2 x = turned(raw, head.by, head.cosines, head.sines, at, eps, lane);
        u16 *to = (head.is_query ? self.s.queries : self.s.keys) + head.place * STRIDE + lane * 4;
        *(uint2 *)to = x;
        if (head.is_query) continue;
        const uint2 v = settled4(head.value, head.from + J * P, self);
        *(uint2 *)(self.s.values + head.place * STRIDE + lane * 4) = v;
        if (task.tile > 0) continue;
        const size_t place = (size_t)head.slot * (J * P) + task.head * P + lane * 4;
        *(uint2 *)(at.k_cache + place) = x;
        *(uint2 *)(at.v_cache + place) = v;
    }
}

// Softmax so far of queries g and g + 8: their peaks, this warp's sums, the warp's slice of the head.
struct Running {
    float peak, peak8, total, total8, acc[SLICE / 8][4];
};

// Scores of 16 queries and this warp's keys of the chunk.
DEVICE void score(float (&scores)[KEYS / 8][4], const Task &task, const Layer &at, int from, float scale,
                  Self &self) {
    const int g = self.g, t = self.t;
#pragma unroll
    for (int d = 0; d < P; d += 32) {
        const uint4 a = *(const uint4 *)(self.s.queries + g * STRIDE + d + 8 * t);
        const uint4 a8 = *(const uint4 *)(self.s.queries + (g + 8) * STRIDE + d + 8 * t);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            const uint4 b = *(const uint4 *)(self.s.keys + (self.warp * KEYS + n * 8 + g) * STRIDE + d + 8 * t);
            multiply_block(scores[n], scores[n], a, a8, b);
        }
    }
    const int position = task.first + row_of(at, task.tile * 16 + g);
    const int position8 = task.first + row_of(at, task.tile * 16 + g + 8);
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int key = from + self.warp * KEYS + n * 8 + 2 * t + (i & 1), p = i < 2 ? position : position8;
            bool seen = key <= (at.causal ? p : task.last);
            if (at.window > 0) seen = seen && p - key < at.window && (at.causal || key - p < at.window);
            scores[n][i] = seen ? scores[n][i] * scale : -INF;
        }
}

DEVICE float over_four(float v, bool is_sum) {
    float other = exchange(v, 1);
    v = is_sum ? v + other : fmaxf(v, other);
    other = exchange(v, 2);
    return is_sum ? v + other : fmaxf(v, other);
}

// One chunk of keys: scores, peaks over all warps, shares, then each warp its own slice of the head over all keys.
DEVICE void attend_chunk(Running &run, const Task &task, const Layer &at, int from, float scale, Self &self) {
    const int g = self.g, t = self.t, warp = self.warp;
    float scores[KEYS / 8][4] = {};
    score(scores, task, at, from, scale, self);
    float peak = -INF, peak8 = -INF;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
        peak = fmaxf(peak, fmaxf(scores[n][0], scores[n][1]));
        peak8 = fmaxf(peak8, fmaxf(scores[n][2], scores[n][3]));
    }
    peak = over_four(peak, false), peak8 = over_four(peak8, false);
    float *peaks = self.s.peaks, *totals = self.s.totals;
    if (t == 0) peaks[warp * 16 + g] = peak, peaks[warp * 16 + g + 8] = peak8;
    __syncthreads();
    peak = run.peak, peak8 = run.peak8;
    for (int w = 0; w < WARPS; w++)
        peak = fmaxf(peak, peaks[w * 16 + g]), peak8 = fmaxf(peak8, peaks[w * 16 + g + 8]);
    const float safe = peak == -INF ? 0.0f : peak, safe8 = peak8 == -INF ? 0.0f : peak8;
    const float fade = exp2f(run.peak - safe), fade8 = exp2f(run.peak8 - safe8);
    run.peak = peak, run.peak8 = peak8;
    float total = 0.0f, total8 = 0.0f;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
        const float p0 = exp2f(scores[n][0] - safe), p1 = exp2f(scores[n][1] - safe);
        const float p2 = exp2f(scores[n][2] - safe8), p3 = exp2f(scores[n][3] - safe8);
        total += p0 + p1, total8 += p2 + p3;
        const int place = warp * KEYS + n * 8 + 2 * t;
        *(u32 *)(self.s.shares + g * SHARE_STRIDE + place) = pack(p0, p1);
        *(u32 *)(self.s.shares + (g + 8) * SHARE_STRIDE + place) = pack(p2, p3);
    }
    run.total = run.total * fade + over_four(total, true), run.total8 = run.total8 * fade8 + over_four(total8, true);
    if (t == 0) totals[warp * 16 + g] = run.total, totals[warp * 16 + g + 8] = run.total8;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < SLICE / 8; n++)
        run.acc[n][0] *= fade, run.acc[n][1] *= fade, run.acc[n][2] *= fade8, run.acc[n][3] *= fade8;
#pragma unroll
    for (int k = 0; k < CHUNK; k += 32) {
        const u16 *p = self.s.shares + g * SHARE_STRIDE + k + 2 * t, *p8 = p + 8 * SHARE_STRIDE;
        const u32 a[8] = {*(const u32 *)p,        *(const u32 *)p8,        *(const u32 *)(p + 8),
                          *(const u32 *)(p8 + 8), *(const u32 *)(p + 16),  *(const u32 *)(p8 + 16),
                          *(const u32 *)(p + 24), *(const u32 *)(p8 + 24)};
#pragma unroll
        for (int n = 0; n < SLICE / 8; n++) {
            const uint4 b = load_transposed(self.s.values + (k + self.lane) * STRIDE + warp * SLICE + n * 8);
            multiply(run.acc[n], a[0], a[1], a[2], a[3], b.x, b.y);
            multiply(run.acc[n], a[4], a[5], a[6], a[7], b.z, b.w);
        }
    }
}

// Splits of which a row at this position sees a key.
struct Span {
    int begin, end;
};
DEVICE Span span_of(const Layer &at, int position, int last_key) {
    int last = at.causal ? position : last_key;
    if (!at.causal && at.window > 0) last = min(last, position + at.window - 1);
    return {split_of(at, at.window > 0 ? max(position - at.window + 1, 0) : 0), split_of(at, last) + 1};
}

// Where a row's part of a split is: P sums, then its peak and its total, each beside its tag.
DEVICE u32 *parts_of(u32 *parts, const Layer &at, int row, int head) {
    return parts + (size_t)(row * at.heads + head) * at.max_splits * ((P + 2) * 2);
}
DEVICE u32 *part_at(u32 *own, const Layer &at, int index) {
    return own + (index < at.max_splits ? index : index - at.max_splits) * ((P + 2) * 2);
}

DEVICE void send_parts(const Running &run, const Task &task, const Layer &at, u32 *parts, u32 serial, Self &self) {
    const int group = at.heads / J;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int c = task.tile * 16 + self.g + 8 * half;
        const float peak = half ? run.peak8 : run.peak;
        const Span span = span_of(at, task.first + row_of(at, c), task.last);
        // Whether it is waited for follows from places alone, never from values.
        if (c >= task.count * group || task.split < span.begin || task.split >= span.end) continue;
        u32 *to = part_at(parts_of(parts, at, task.start + row_of(at, c), task.head * group + head_of(at, c)), at,
                          task.split % at.max_splits);
#pragma unroll
        for (int n = 0; n < SLICE / 8; n++)
            store_mail_pairs(to + (self.warp * SLICE + n * 8 + 2 * self.t) * 2,
                             make_uint4(__float_as_uint(run.acc[n][2 * half]), serial,
                                        __float_as_uint(run.acc[n][2 * half + 1]), serial));
        if (self.warp == 0 && self.t == 0) {
            float sum = 0.0f;
            for (int w = 0; w < WARPS; w++) sum += self.s.totals[w * 16 + self.g + 8 * half];
            store_mail_pairs(to + P * 2, make_uint4(__float_as_uint(peak), serial, __float_as_uint(sum), serial));
        }
    }
}

DEVICE Running nothing_seen() {
    Running run;
    run.peak = run.peak8 = -INF, run.total = run.total8 = 0.0f;
    for (int n = 0; n < SLICE / 8; n++)
        for (int i = 0; i < 4; i++) run.acc[n][i] = 0.0f;
    return run;
}

// The block's tasks of a layer, chunk by chunk; the first chunk is staged already, and each following one is loaded
// while the one before it is worked on.
DEVICE void attend(const Layer &at, u32 *parts, u32 serial, float eps, float scale, Self &self) {
    Task task, next;
    int index = self.block;
    if (!find_task(task, index, at, self.s.rows)) return;
    Running run = nothing_seen();
    int from = task.from;
#pragma unroll 1
    while (true) {
        const bool is_last = from + CHUNK >= task.to;
        bool is_more = true;
        int next_from = from + CHUNK;
        next = task;
        if (is_last) {
            index += self.grid;
            is_more = find_task(next, index, at, self.s.rows);
            next_from = next.from;
        }
        Staged staged;
        staged.load(next, at, next_from, is_more, self);
        stage_heads(task, at, from, eps, self);
        __syncthreads();
        mark(self, HEADS_HERE);
        attend_chunk(run, task, at, from, scale, self);
        if (is_last) {
            send_parts(run, task, at, parts, serial, self);
            run = nothing_seen();
            mark(self, CHUNK_DONE);
        }
        // The keys' place is free: for the next chunk, or for other rows.
        __syncthreads();
        if (!is_more) break;
        staged.store(next, next_from, self);
        task = next, from = next_from;
    }
}

DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// One part of a row's head, four elements a lane.
struct PartOfHead {
    uint4 v[3];
    METHOD void load(const u32 *from, int lane) {
        v[0] = load_mail_pairs(from + lane * 8);
        v[1] = load_mail_pairs(from + lane * 8 + 4);
        v[2] = load_mail_pairs(from + P * 2);
    }
    METHOD bool is_here(u32 serial) const {
        u32 differs = 0;
        for (int i = 0; i < 3; i++) differs |= (v[i].y ^ serial) | (v[i].w ^ serial);
        return differs == 0;
    }
};

// Add a (row, head)'s splits in their order and apply its gate; a warp's work.
DEVICE void combine(int row, int head, int position, int last_key, const Layer &at, u32 *parts, u32 serial,
                    Self &self) {
    enum { TAKE = 5 };
    const Span span = span_of(at, position, last_key);
    const int begin = span.begin, end = span.end;
    u32 *own = parts_of(parts, at, row, head);
    const int turn = begin % at.max_splits - begin;
    const u32 *gate_at = self.mail + QKV_AT + (size_t)row * at.width + (at.heads + 2 * J) * P + head;
    u32 gate = at.gate ? load_mail1(gate_at) : 0;
    float peak = -INF, total = 0.0f, acc[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int s = begin; s < end; s += TAKE) {
        PartOfHead part[TAKE];
        bool is_here;
        do {
            is_here = true;
#pragma unroll
            for (int j = 0; j < TAKE; j++) part[j].load(part_at(own, at, min(s + j, end - 1) + turn), self.lane);
#pragma unroll
            for (int j = 0; j < TAKE; j++) is_here = is_here && part[j].is_here(serial);
        } while (!is_here && may_poll(self));
        mark(self, PARTS_HERE);
#pragma unroll
        for (int j = 0; j < TAKE; j++) {
            if (s + j >= end) break;
            const float own_peak = __uint_as_float(part[j].v[2].x), own_total = __uint_as_float(part[j].v[2].z);
            const float highest = fmaxf(peak, own_peak), fade = exp2f(peak - highest), by = exp2f(own_peak - highest);
            peak = highest, total = total * fade + own_total * by;
            acc[0] = acc[0] * fade + __uint_as_float(part[j].v[0].x) * by;
            acc[1] = acc[1] * fade + __uint_as_float(part[j].v[0].z) * by;
            acc[2] = acc[2] * fade + __uint_as_float(part[j].v[1].x) * by;
            acc[3] = acc[3] * fade + __uint_as_float(part[j].v[1].z) * by;
        }
    }
    const float inverse = quotient(1.0f, total);
    float y[4];
    for (int i = 0; i < 4; i++) y[i] = rounded(acc[i] * inverse);
    if (at.gate) {
                while (((gate ^ self.tag) & 0xffffu) && may_poll(self)) gate = load_mail1(gate_at);
        const float opened = rounded(softplus(untagged(gate)));
        for (int i = 0; i < 4; i++) y[i] *= opened;
    }
    store_mail(self.mail + HEADS_AT + (size_t)(row * at.heads + head) * P + self.lane * 4,
               make_uint4(tagged(y[0], self.tag), tagged(y[1], self.tag), tagged(y[2], self.tag),
                          tagged(y[3], self.tag)));
    __syncwarp();
}

// The block's share of all (row, head): the last blocks first, which have the fewest tasks.
DEVICE void combine_all(const Layer &at, u32 *parts, u32 serial, Self &self) {
    const Rows &rows = self.s.rows;
    const int count = self.live * at.heads, step = self.grid * WARPS;
#pragma unroll 1
    for (int i = self.warp * self.grid + self.grid - 1 - self.block; i < count; i += step) {
        const int row = i / at.heads;
        int request = 0;
        for (int r = 0; r < rows.requests; r++)
            if (row >= rows.start[r] && row < rows.start[r] + rows.count[r]) request = r;
        const int first = rows.first[request];
        combine(row, i % at.heads, first + row - rows.start[request], first + rows.count[request] - 1, at, parts,
                serial, self);
    }
}
