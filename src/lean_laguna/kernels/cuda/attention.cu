// Attention of decode and verify rows over the paged cache: norm, rotation and KV append on the way in; the last
// program of a (request, KV head) adds the parts in their order and applies the gate.
//
// -D: H query heads, J KV heads, P head size (128); ROTARY dimensions turned; WINDOW (0: all keys); CAUSAL;
// QK_NORM; GATE; SPLIT keys a program takes; KV_BLOCK keys a page; MAX_SPLITS parts a row can leave.
// The context is cut at absolute multiples of SPLIT whatever the number of rows or requests, and a row takes the
// same steps over the same keys alone or beside others, so its bits are its own.
#include "common.cuh"

#define WARPS 8
#define GROUP (H / J)
#define STRIDE (P + 8)
#define PSTRIDE (SPLIT + 8)
#define KEYS (SPLIT / WARPS)
#define WIDTH ((H + 2 * J) * P + (GATE ? H : 0))
#define HALF (ROTARY / 2)
#define SLICE (P / WARPS)
#define TAKE 8
#define COPIED_KEYS (WARPS * 32 / (P / 8))
#define COPIES (SPLIT / COPIED_KEYS)
#define MAX_TILES GROUP
#define INF __int_as_float(0x7f800000)

struct Task {
    int request, head, tile, split, start, count, first, last, low_split, num_splits;
};

// Where the requests' rows stand, read once by each program.
struct Rows {
    int count[16], start[16], first[16];
};

// The task at place `index` of all requests' tasks in a row; false past the end. A task is one split of one KV
// head for 16 of the request's queries.
DEVICE bool find_task(Task &task, int index, const Rows &rows, int num_requests) {
    for (int r = 0; r < num_requests; r++) {
        const int count = rows.count[r], first = rows.first[r];
        if (count == 0) continue;
        const int last = first + count - 1, low_key = WINDOW > 0 ? max(first - WINDOW + 1, 0) : 0;
        const int low_split = low_key / SPLIT, num_splits = last / SPLIT - low_split + 1;
        const int tiles = (count * GROUP + 15) / 16;
        if (index < num_splits * J * tiles) {
            task.request = r, task.head = index % J, task.tile = index / J % tiles;
            task.split = low_split + index / (J * tiles), task.start = rows.start[r];
            task.count = count, task.first = first, task.last = last, task.low_split = low_split;
            task.num_splits = num_splits;
            return true;
        }
        index -= num_splits * J * tiles;
    }
    return false;
}

// Start copies of a split's keys, or values, that earlier steps left; zeros elsewhere. The pages are looked up all
// at once: a copy would have to wait for its page before the next page could be asked for.
DEVICE void copy_pages(u16 *to, const u16 *cache, const Task &task, const int *own_table, int thread) {
    const int first_key = thread / (P / 8), d = thread % (P / 8) * 8;
    int blocks[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const int key = task.split * SPLIT + first_key + i * COPIED_KEYS;
        const bool old = key < task.first && (WINDOW == 0 || task.first - key < WINDOW);
        blocks[i] = old ? load_fresh32(own_table + key / KV_BLOCK) : -1;
    }
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const int k = first_key + i * COPIED_KEYS, slot = (task.split * SPLIT + k) % KV_BLOCK;
        const size_t at = (((size_t)max(blocks[i], 0) * KV_BLOCK + slot) * J + task.head) * P + d;
        copy_async(to + k * STRIDE + d, cache + at, blocks[i] >= 0);
    }
}

DEVICE uint2 load_fresh4(const u16 *p) {
    // Rows of qkv start at any even element: two loads of two.
    return make_uint2(load_fresh_pair(p), load_fresh_pair(p + 2));
}

// One head, four elements a lane, normalised and turned as Hugging Face rounds.
DEVICE uint2 turned(uint2 raw, uint2 by, uint2 cosines, uint2 sines, float eps, int lane) {
    float v[4] = {low(raw.x), high(raw.x), low(raw.y), high(raw.y)};
    const float c[4] = {low(cosines.x), high(cosines.x), low(cosines.y), high(cosines.y)};
    const float s[4] = {low(sines.x), high(sines.x), low(sines.y), high(sines.y)};
    if (QK_NORM) {
        const float w[4] = {low(by.x), high(by.x), low(by.y), high(by.y)};
        const float inverse =
            rsqrtf(sum_over_warp(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]) / P + eps);
        for (int i = 0; i < 4; i++) v[i] = rounded(rounded(v[i] * inverse) * w[i]);
    }
    for (int i = 0; i < 4; i++) {
        const float other = exchange(v[i], HALF / 4);
        const int d = lane * 4 + i;
        if (d < ROTARY) v[i] = rounded(rounded(v[i] * c[i]) + rounded((d < HALF ? -other : other) * s[i]));
    }
    return make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
}

// Four elements of a position's row of the rotary tables, for the four that a lane turns.
DEVICE uint2 angles(const u16 *table, int position, int lane) {
    const int d = lane * 4;
    return d < ROTARY ? *(const uint2 *)(table + (size_t)position * HALF + d % HALF) : make_uint2(0, 0);
}

DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Add the parts of a task's 16 queries in their order; each warp its own queries.
DEVICE void combine(const Task &task, const u16 *qkv, u16 *out, const float *parts, const float *stats, int warp,
                    int lane) {
    for (int i = warp; i < 16; i += WARPS) {
        const int c = task.tile * 16 + i;
        if (c >= task.count * GROUP) break;
        const int row = task.start + c / GROUP, head = task.head * GROUP + c % GROUP;
        const int position = task.first + c / GROUP;
        const int begin = WINDOW > 0 ? max(position - WINDOW + 1, 0) / SPLIT : 0;
        int last = CAUSAL ? position : task.last;
        if (!CAUSAL && WINDOW > 0) last = min(last, position + WINDOW - 1);
        const int end = last / SPLIT + 1;
        const size_t base = (size_t)(row * H + head) * MAX_SPLITS;
        float gate = 0.0f;
        if (GATE) gate = from_bf16(load_fresh16(qkv + (size_t)row * WIDTH + (H + 2 * J) * P + head));
        float peak = -INF, total = 0.0f;
        float4 acc = make_float4(0, 0, 0, 0);
        for (int s = begin; s < end; s += TAKE) {
            float4 part[TAKE];
            float own_peak[TAKE], own_total[TAKE];
#pragma unroll
            for (int j = 0; j < TAKE; j++) {
                const size_t at = base + (s + j) % MAX_SPLITS;
                const bool here = s + j < end;
                own_peak[j] = here ? __int_as_float(load_fresh32((const int *)stats + at * 2)) : -INF;
                own_total[j] = here ? __int_as_float(load_fresh32((const int *)stats + at * 2 + 1)) : 0.0f;
                part[j] = here ? load_fresh_floats(parts + at * P + lane * 4) : make_float4(0, 0, 0, 0);
            }
            float highest = peak;
#pragma unroll
            for (int j = 0; j < TAKE; j++) highest = fmaxf(highest, own_peak[j]);
            const float fade = exp2f(peak - highest);
            total *= fade, acc.x *= fade, acc.y *= fade, acc.z *= fade, acc.w *= fade;
            peak = highest;
#pragma unroll
            for (int j = 0; j < TAKE; j++) {
                if (s + j >= end) continue;
                const float by = exp2f(own_peak[j] - peak);
                total += own_total[j] * by;
                acc.x += part[j].x * by, acc.y += part[j].y * by, acc.z += part[j].z * by, acc.w += part[j].w * by;
            }
        }
        float y[4] = {rounded(acc.x / total), rounded(acc.y / total), rounded(acc.z / total),
                      rounded(acc.w / total)};
        if (GATE) {
            gate = rounded(softplus(gate));
            for (int j = 0; j < 4; j++) y[j] *= gate;
        }
        *(uint2 *)(out + (size_t)row * (H * P) + head * P + lane * 4) = make_uint2(pack(y[0], y[1]), pack(y[2], y[3]));
    }
}

KERNEL(WARPS * 32, 1)
attention(const u16 *qkv, u16 *out, const u16 *q_norm, const u16 *k_norm, const u16 *cos_table, const u16 *sin_table,
          u16 *k_cache, u16 *v_cache, const int *table, const int *positions, const int *row_start,
          const int *row_count, const int *num_requests_at, float *parts, float *stats, int *arrived, float eps,
          float scale, int table_stride) {
    EXTERN_SHARED(u16, keys);
    u16 *values = keys + SPLIT * STRIDE;
    u16 *queries = values + SPLIT * STRIDE;
    u16 *shares = queries + 16 * STRIDE;
    float *peaks = (float *)(shares + 16 * PSTRIDE);
    float *totals = peaks + WARPS * 16;
    Rows &rows = *(Rows *)(totals + WARPS * 16);
    int *is_last = (int *)(&rows + 1);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;

    // Where rows stand changes only at the end of a step, so all this may be read before the wait.
    const int num_requests = load_fresh32(num_requests_at);
    const uint2 q_by = *(const uint2 *)(q_norm + lane * 4), k_by = *(const uint2 *)(k_norm + lane * 4);
    if (thread < num_requests) {
        const int count = load_fresh32(row_count + thread), start = load_fresh32(row_start + thread);
        rows.count[thread] = count, rows.start[thread] = start;
        rows.first[thread] = count > 0 ? load_fresh32(positions + start) : 0;
    }
    __syncthreads();
    Task task = {}, next = {};
    bool waited = false, keeps_queries = false;
    int index = blockIdx.x;
    bool is_there = find_task(task, index, rows, num_requests);
    if (is_there) {
        const int *own_table = table + (size_t)task.request * table_stride;
        copy_pages(keys, k_cache, task, own_table, thread);
        end_stream_group();
        copy_pages(values, v_cache, task, own_table, thread);
        end_stream_group();
    }
    // While a split is worked on, the next one's keys arrive where its own were, and then the values. At any
    // time two groups of copies are under way, the older of which is waited for.
    while (is_there) {
        const int from = task.split * SPLIT, *own_table = table + (size_t)task.request * table_stride;
        index += gridDim.x;
        const bool goes_on = find_task(next, index, rows, num_requests);
        const int *next_table = table + (size_t)next.request * table_stride;
        if (!waited) {
            // The rotary rows of the queries, on their way before they are needed.
            const int position = task.first + (task.tile * 16 + warp) / GROUP;
            if (lane < 4 && lane * 64 < HALF) {
                prefetch_line(cos_table + (size_t)position * HALF + lane * 64);
                prefetch_line(sin_table + (size_t)position * HALF + lane * 64);
            }
            let_next_start();
            wait_for_inputs();
            waited = true;
        }
        const int num_queries = task.count * GROUP, tile = task.tile * 16;
        const int begin = max(task.first, from), end = min(task.last, from + SPLIT - 1);
        if (begin <= end)
            wait_for_stream<0>();  // rows of this step go between values that must have come
        else
            wait_for_stream<1>();
        __syncthreads();
        // The task's queries, and the rows of this step whose own keys fall into this split. All programs of a
        // (request, KV head) that share the split compute those; the first query tile's writes them.
        for (int offset = 0; !keeps_queries && (offset < 16 || begin + offset - 16 <= end); offset += 3 * WARPS) {
            // Three heads a warp, two queries and a key the first time: loads first, then the arithmetic.
            uint2 raw[3], v[3], cosines[3], sines[3];
#pragma unroll
            for (int j = 0; j < 3; j++) {
                const int i = offset + j * WARPS + warp, c = tile + i;
                const bool is_query = i < 16;
                const int position = is_query ? task.first + c / GROUP : begin + i - 16;
                raw[j] = v[j] = cosines[j] = sines[j] = make_uint2(0, 0);
                if (is_query ? c >= num_queries : position > end) continue;
                const u16 *row = qkv + (size_t)(task.start + position - task.first) * WIDTH;
                const int head = is_query ? task.head * GROUP + c % GROUP : H + task.head;
                raw[j] = load_fresh4(row + head * P + lane * 4);
                if (!is_query) v[j] = load_fresh4(row + (head + J) * P + lane * 4);
                cosines[j] = angles(cos_table, position, lane);
                sines[j] = angles(sin_table, position, lane);
            }
#pragma unroll
            for (int j = 0; j < 3; j++) {
                const int i = offset + j * WARPS + warp;
                const bool is_query = i < 16;
                const int position = begin + i - 16;
                const uint2 x = turned(raw[j], is_query ? q_by : k_by, cosines[j], sines[j], eps, lane);
                if (is_query)
                    *(uint2 *)(queries + i * STRIDE + lane * 4) = x;
                else if (position <= end) {
                    *(uint2 *)(keys + (position - from) * STRIDE + lane * 4) = x;
                    *(uint2 *)(values + (position - from) * STRIDE + lane * 4) = v[j];
                    if (task.tile == 0) {
                        const int block = load_fresh32(own_table + position / KV_BLOCK);
                        const size_t at =
                            (((size_t)block * KV_BLOCK + position % KV_BLOCK) * J + task.head) * P + lane * 4;
                        *(uint2 *)(k_cache + at) = x;
                        *(uint2 *)(v_cache + at) = v[j];
                    }
                }
            }
        }
        __syncthreads();
        {
            // Scores of 16 queries and this warp's keys.
            float scores[KEYS / 8][4] = {};
#pragma unroll
            for (int d = 0; d < P; d += 32) {
                const uint4 a = *(const uint4 *)(queries + g * STRIDE + d + 8 * t);
                const uint4 a8 = *(const uint4 *)(queries + (g + 8) * STRIDE + d + 8 * t);
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
                    const uint4 b = *(const uint4 *)(keys + (warp * KEYS + n * 8 + g) * STRIDE + d + 8 * t);
                    multiply_block(scores[n], scores[n], a, a8, b);
                }
            }
            const int position = task.first + (tile + g) / GROUP, position8 = task.first + (tile + g + 8) / GROUP;
            float peak = -INF, peak8 = -INF;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int key = from + warp * KEYS + n * 8 + 2 * t + (i & 1), p = i < 2 ? position : position8;
                    bool seen = key <= (CAUSAL ? p : task.last);
                    if (WINDOW > 0) seen = seen && p - key < WINDOW && (CAUSAL || key - p < WINDOW);
                    scores[n][i] = seen ? scores[n][i] * scale : -INF;
                    if (i < 2)
                        peak = fmaxf(peak, scores[n][i]);
                    else
                        peak8 = fmaxf(peak8, scores[n][i]);
                }
            peak = fmaxf(peak, exchange(peak, 1)), peak = fmaxf(peak, exchange(peak, 2));
            peak8 = fmaxf(peak8, exchange(peak8, 1)), peak8 = fmaxf(peak8, exchange(peak8, 2));
            if (t == 0) peaks[warp * 16 + g] = peak, peaks[warp * 16 + g + 8] = peak8;
            __syncthreads();
            if (goes_on) copy_pages(keys, k_cache, next, next_table, thread);
            end_stream_group();
            peak = peak8 = -INF;
            for (int w = 0; w < WARPS; w++)
                peak = fmaxf(peak, peaks[w * 16 + g]), peak8 = fmaxf(peak8, peaks[w * 16 + g + 8]);
            const float safe = peak == -INF ? 0.0f : peak, safe8 = peak8 == -INF ? 0.0f : peak8;
            float total = 0.0f, total8 = 0.0f;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                const float p0 = exp2f(scores[n][0] - safe), p1 = exp2f(scores[n][1] - safe);
                const float p2 = exp2f(scores[n][2] - safe8), p3 = exp2f(scores[n][3] - safe8);
                total += p0 + p1, total8 += p2 + p3;
                const int at = warp * KEYS + n * 8 + 2 * t;
                *(u32 *)(shares + g * PSTRIDE + at) = pack(p0, p1);
                *(u32 *)(shares + (g + 8) * PSTRIDE + at) = pack(p2, p3);
            }
            total += exchange(total, 1), total += exchange(total, 2);
            total8 += exchange(total8, 1), total8 += exchange(total8, 2);
            if (t == 0) totals[warp * 16 + g] = total, totals[warp * 16 + g + 8] = total8;
            wait_for_stream<1>();
            __syncthreads();
            // Each warp its own slice of the head, over all keys of the split.
            float acc[SLICE / 8][4] = {};
#pragma unroll 4
            for (int k = 0; k < SPLIT; k += 32) {
                const u16 *p = shares + g * PSTRIDE + k + 2 * t, *p8 = p + 8 * PSTRIDE;
                const u32 a[8] = {*(const u32 *)p,         *(const u32 *)p8,        *(const u32 *)(p + 8),
                                  *(const u32 *)(p8 + 8),  *(const u32 *)(p + 16),  *(const u32 *)(p8 + 16),
                                  *(const u32 *)(p + 24),  *(const u32 *)(p8 + 24)};
#pragma unroll
                for (int n = 0; n < SLICE / 8; n++) {
                    const uint4 b = load_transposed(values + (k + lane) * STRIDE + warp * SLICE + n * 8);
                    multiply(acc[n], a[0], a[1], a[2], a[3], b.x, b.y);
                    multiply(acc[n], a[4], a[5], a[6], a[7], b.z, b.w);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int c = tile + g + 8 * half;
                if (c >= num_queries || (half ? peak8 : peak) == -INF) continue;
                const int row = task.start + c / GROUP, head = task.head * GROUP + c % GROUP;
                const size_t at = (size_t)(row * H + head) * MAX_SPLITS + task.split % MAX_SPLITS;
#pragma unroll
                for (int n = 0; n < SLICE / 8; n++)
                    *(float2 *)(parts + at * P + warp * SLICE + n * 8 + 2 * t) =
                        make_float2(acc[n][2 * half], acc[n][2 * half + 1]);
                if (warp == 0 && t == 0) {
                    float sum = 0.0f;
                    for (int w = 0; w < WARPS; w++) sum += totals[w * 16 + g + 8 * half];
                    stats[at * 2] = half ? peak8 : peak;
                    stats[at * 2 + 1] = sum;
                }
            }
        }
        __syncthreads();
        if (goes_on) copy_pages(values, v_cache, next, next_table, thread);
        end_stream_group();
        if (thread == 0) {
            int *counter = arrived + (task.request * J + task.head) * MAX_TILES + task.tile;
            *is_last = add_released(counter, 1) == task.num_splits - 1;
            if (*is_last) *counter = 0;
        }
        __syncthreads();
        if (*is_last) combine(task, qkv, out, parts, stats, warp, lane);
        __syncthreads();
        // Queries stay where they are if the next split is another of theirs, without rows of this step.
        keeps_queries = goes_on && next.request == task.request && next.head == task.head &&
                        next.tile == task.tile && next.split * SPLIT + SPLIT <= next.first;
        task = next;
        is_there = goes_on;
    }
    if (!waited) {
        let_next_start();
        wait_for_inputs();
    }
}
