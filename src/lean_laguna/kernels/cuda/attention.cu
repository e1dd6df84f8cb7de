// Attention of decode and verify rows over the paged cache: norm, rotation and KV append on the way in.
//
// -D: H query heads, J KV heads, P head size (128); ROTARY dimensions turned; WINDOW (0: all keys); CAUSAL;
// QK_NORM; GATE; SPLIT keys taken at a time (128); KV_BLOCK keys a page; CLUSTER programs that share a KV head's keys;
// TILES of 16 queries that a cluster takes; LONE: there is one row, and a cluster for each KV head; INBOX, where not 0:
// parts that a lone row's program has room for, so that they are handed over instead of fetched.
// The context is cut at absolute multiples of SPLIT. Split s goes to program s % CLUSTER of a cluster, which adds its
// splits in their order; at the end the cluster's programs share out the queries and add what each other has of them,
// always in the programs' order. A split that a row does not see changes nothing of the row. So a row's bits are its
// own, alone or beside others.
#include "common.cuh"

#define WARPS 8
#define GROUP (H / J)
// Queries that matter of a tile's 16: of a lone row often half.
#define HALVES (LONE && GROUP <= 8 ? 1 : 2)
#define QUERIES (TILES * 8 * HALVES)
#define STRIDE (P + 8)
#define PSTRIDE (SPLIT + 8)
#define SUMS (P + 4)
#define KEYS (SPLIT / WARPS)
#define WIDTH ((H + 2 * J) * P + (GATE ? H : 0))
#define HALF (ROTARY / 2)
#define SLICE (P / WARPS)
#define SLICES (SLICE / 8)
#define TAKE 8
#define COPIED_KEYS (WARPS * 32 / (P / 8))
#define COPIES (SPLIT / COPIED_KEYS)
// A page holds a whole number of COPIED_KEYS, or they of it.
#define PAGES (KV_BLOCK < SPLIT ? SPLIT / KV_BLOCK : 1)
#define AT_ONCE (LONE ? 1 : 2)
#define ONES 0x3f803f80u
#define LOG2_E 1.4426950408889634f
#define INF __int_as_float(0x7f800000)

// Up to QUERIES queries of one KV head of a request; a query is one head of one row.
struct Task {
    int request, head, first_query, num_queries, start, first, last, low_split, num_splits;
};

// Where the requests' rows stand, read once by each program.
struct Rows {
    int count[16], start[16], first[16];
};

// The task at place `index` of all requests' tasks in a row; false past the end.
DEVICE bool find_task(Task &task, int index, const Rows &rows, int num_requests) {
    for (int r = 0; r < num_requests; r++) {
        const int count = rows.count[r], first = rows.first[r];
        const int tasks = J * ((count * GROUP + QUERIES - 1) / QUERIES);
        if (index < tasks) {
            const int last = first + count - 1, low_key = WINDOW > 0 ? max(first - WINDOW + 1, 0) : 0;
            task.request = r, task.head = index % J, task.first_query = index / J * QUERIES;
            task.num_queries = min(count * GROUP - task.first_query, QUERIES);
            task.start = rows.start[r], task.first = first, task.last = last;
            task.low_split = low_key / SPLIT, task.num_splits = last / SPLIT - task.low_split + 1;
            return true;
        }
        index -= tasks;
    }
    return false;
}

// A program's place among those of its cluster that have splits of the task, and beyond them.
DEVICE int place_of(const Task &task, int rank) { return (rank + CLUSTER - task.low_split % CLUSTER) % CLUSTER; }

// Page n of a split, if it holds keys that earlier steps left.
DEVICE int page_of(int first, int split, const int *own_table, int n) {
    const int key = split * SPLIT + n * KV_BLOCK;
    return key < first ? load_fresh32(own_table + (u32)key / KV_BLOCK) : 0;
}

// Start copies of a split's keys, or values, that earlier steps left; zeros elsewhere. A thread copies pieces of keys
// COPIED_KEYS apart.
DEVICE void copy_pages(u16 *to, const u16 *cache, const int *pages, int first, int split, int head, int thread) {
    const u32 k = (u32)thread / (P / 8), d = (u32)thread % (P / 8) * 8;
    const int left = first - split * SPLIT - (int)k;
    const u16 *from = cache + (k % KV_BLOCK * J + head) * P + d;
    const int *own_pages = pages + k / KV_BLOCK;
    to += k * STRIDE + d;
    int page[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++) page[i] = own_pages[i * COPIED_KEYS / KV_BLOCK];
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const int on = i * COPIED_KEYS;
        copy_async(to + on * STRIDE, from + (size_t)(u32)page[i] * (KV_BLOCK * J * P) + on % KV_BLOCK * J * P,
                   on < left && (WINDOW == 0 || on > left - WINDOW));
    }
}

// Where elements d and on of a key lie in the cache.
DEVICE size_t place_in_cache(int page, int key, int head, int d) {
    return ((size_t)page * (KV_BLOCK * J) + (key % KV_BLOCK * J + head)) * P + d;
}

// Ask for a split into L2, while there is nothing else to do.
DEVICE void prefetch_split(const u16 *k_cache, const u16 *v_cache, const Task &task, int split, const int *own_table,
                           int thread) {
    const int k = thread / 2;  // two lines a key, SPLIT keys, two threads for each
    if (split * SPLIT + k < task.first) {
        const int page = load_fresh32(own_table + (split * SPLIT + k) / KV_BLOCK);
        const size_t at = place_in_cache(page, split * SPLIT + k, task.head, thread % 2 * (P / 2));
        prefetch_line(k_cache + at), prefetch_line(v_cache + at);
    }
}

DEVICE uint4 load_fresh8(const u16 *p) {
    // Some rows of qkv start at any even element: four loads of two.
    if (WIDTH % 8 == 0) return load_fresh(p);
    return make_uint4(load_fresh_pair(p), load_fresh_pair(p + 2), load_fresh_pair(p + 4), load_fresh_pair(p + 6));
}

// One head, eight elements a lane of half a warp, normalised and turned as Hugging Face rounds.
DEVICE uint4 turned(uint4 raw, uint4 by, uint4 cosines, uint4 sines, float eps, int lane) {
    u32 x[4] = {raw.x, raw.y, raw.z, raw.w};
    const u32 w[4] = {by.x, by.y, by.z, by.w}, c[4] = {cosines.x, cosines.y, cosines.z, cosines.w};
    const u32 s[4] = {sines.x, sines.y, sines.z, sines.w};
    if (QK_NORM) {
        float squares = squares_of(raw);
#pragma unroll
        for (int lanes = 8; lanes; lanes >>= 1) squares += exchange(squares, lanes);
        const float inverse = rsqrtf(squares / P + eps);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = scaled_pair(x[i], inverse, w[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 other = __float_as_uint(exchange(__uint_as_float(x[i]), HALF / 8));
        const float sign = lane % 16 * 8 < HALF ? -1.0f : 1.0f;
        const float low_part = rounded(low(x[i]) * low(c[i])) + rounded(sign * low(other) * low(s[i]));
        const float high_part = rounded(high(x[i]) * high(c[i])) + rounded(sign * high(other) * high(s[i]));
        if (lane % 16 * 8 < ROTARY) x[i] = pack(low_part, high_part);
    }
    return make_uint4(x[0], x[1], x[2], x[3]);
}

// Eight elements of a position's row of the rotary tables, for the eight that a lane turns.
DEVICE uint4 angles(const u16 *table, int position, int lane) {
    const int d = lane % 16 * 8;
    return d < ROTARY ? *(const uint4 *)(table + (size_t)position * HALF + d % HALF) : make_uint4(0, 0, 0, 0);
}

// log(1 + exp(x)); where that is hardly more than exp(x), by its series.
DEVICE float softplus(float x) {
    const float e = power2(x * LOG2_E);
    return x > 20.0f ? x : e < 0.01f ? e * (1.0f - e * (0.5f - e * (1.0f / 3.0f))) : logarithm2(1.0f + e) * (1.0f / LOG2_E);
}

// Where the part of a query that the program at a place has lies in the inbox of the program that adds them.
DEVICE int slot_of(const Task &task, int place, int query) {
    const int live = min(task.num_splits, CLUSTER);
    return place * ((task.num_queries + live - 1) / live) + query / live;
}

DEVICE u16 gate_of(const Task &task, int query, const u16 *qkv) {
    if (!GATE || query >= task.num_queries) return 0;
    const int c = task.first_query + query, row = task.start + c / GROUP, head = task.head * GROUP + c % GROUP;
    return load_fresh16(qkv + (size_t)row * WIDTH + (H + 2 * J) * P + head);
}

// Add a query's sums of all programs of the cluster, a warp a query.
DEVICE void add_parts(const Task &task, int query, float opened, const float *sums, const float *stats, u16 *out,
                      int lane) {
    const int c = task.first_query + query, row = task.start + c / GROUP, head = task.head * GROUP + c % GROUP;
    float peak = -INF, total = 0.0f;
    float4 acc = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int from = 0; from < CLUSTER; from += TAKE) {
        float4 part[TAKE];
        float2 stat[TAKE];
        float highest = peak;
#pragma unroll
        for (int j = 0; j < TAKE; j++) {
            const int place = place_of(task, from + j), slot = INBOX ? slot_of(task, place, query) : query;
            const bool here = from + j < CLUSTER && place < task.num_splits;
            const float *own_stat = stats + slot * 2, *own = sums + slot * SUMS + lane * 4;
            stat[j] = make_float2(-INF, 0), part[j] = make_float4(0, 0, 0, 0);
            if (here) stat[j] = INBOX ? *(const float2 *)own_stat : load_remote2(own_stat, from + j);
            if (here) part[j] = INBOX ? *(const float4 *)own : load_remote4(own, from + j);
            highest = fmaxf(highest, stat[j].x);
        }
        const float safe = highest == -INF ? 0.0f : highest, fade = power2(peak - safe);
        total *= fade, acc.x *= fade, acc.y *= fade, acc.z *= fade, acc.w *= fade;
        peak = highest;
#pragma unroll
        for (int j = 0; j < TAKE; j++) {
            const float by = power2(stat[j].x - safe);
            total += stat[j].y * by;
            acc.x += part[j].x * by, acc.y += part[j].y * by, acc.z += part[j].z * by, acc.w += part[j].w * by;
        }
    }
    const float by = quotient(1.0f, total);
    const float y[4] = {rounded(acc.x * by) * opened, rounded(acc.y * by) * opened, rounded(acc.z * by) * opened,
                        rounded(acc.w * by) * opened};
    *(uint2 *)(out + (size_t)row * (H * P) + head * P + lane * 4) = make_uint2(pack(y[0], y[1]), pack(y[2], y[3]));
}

CLUSTER_KERNEL(LONE ? 88 : 128, CLUSTER)
attention(const u16 *qkv, u16 *out, const u16 *q_norm, const u16 *k_norm, const u16 *cos_table, const u16 *sin_table,
          u16 *k_cache, u16 *v_cache, const int *table, const int *positions, const int *row_start,
          const int *row_count, const int *num_requests_at, float eps, float scale, int table_stride) {
    EXTERN_SHARED(u16, keys);
    u16 *values = keys + SPLIT * STRIDE;
    u16 *queries = values + SPLIT * STRIDE;
    u16 *shares = queries + QUERIES * STRIDE;
    float *peaks = (float *)(shares + QUERIES * PSTRIDE);
    // When all is multiplied, the sums take the place of queries and shares; what is handed over has its own.
    float *sums = INBOX ? peaks + QUERIES * WARPS : (float *)queries, *stats = sums + (INBOX ? INBOX : QUERIES) * SUMS;
    Rows &rows = *(Rows *)(INBOX ? stats + INBOX * 2 : peaks + QUERIES * WARPS);
    int *pages = (int *)(&rows + 1);  // of the split at hand, or of the next but one, and of the next
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int rank = blockIdx.x % CLUSTER;
    stamp(STARTED);

    // Where rows stand changes only at the end of a step, so all this may be read before the wait.
    const int num_requests = load_fresh32(num_requests_at);
    const uint4 q_by = *(const uint4 *)(q_norm + lane % 16 * 8), k_by = *(const uint4 *)(k_norm + lane % 16 * 8);
    if (thread < num_requests) {
        const int count = load_fresh32(row_count + thread), start = load_fresh32(row_start + thread);
        rows.count[thread] = count, rows.start[thread] = start;
        rows.first[thread] = count > 0 ? load_fresh32(positions + start) : 0;
    }
    __syncthreads();
    Task task = {}, next = {};
    int index = blockIdx.x / CLUSTER, turn = 0;
    bool goes_on = find_task(task, index, rows, num_requests);
    index += gridDim.x / CLUSTER;
    bool has_next = !LONE && find_task(next, index, rows, num_requests);
    int place = place_of(task, rank), split = task.low_split + place;
    if (!goes_on || (place >= task.num_splits && !has_next)) {
        // Nothing to do: leave room. A grid must not end before the one ahead of it has.
        if (blockIdx.x == 0) {
            let_next_start();
            wait_for_inputs();
        }
        return;
    }
    bool waited = false, copies = false;
    // While a split is worked on, the next one's keys arrive where its own were, and then the values. At any
    // time two groups of copies are under way, the older of which is waited for.
    while (goes_on) {
        const int *own_table = table + (size_t)task.request * table_stride;
        const int end_split = task.low_split + task.num_splits, live = min(task.num_splits, CLUSTER);
        const int next_place = place_of(next, rank), num_tiles = TILES == 1 ? 1 : (task.num_queries + 15) / 16;
        const bool has_part = place < task.num_splits;
        if (has_part && split + CLUSTER < end_split && thread < PAGES)
            pages[(turn ^ 1) * PAGES + thread] = page_of(task.first, split + CLUSTER, own_table, thread);
        if (has_part && !copies) {
            if (thread < PAGES) pages[turn * PAGES + thread] = page_of(task.first, split, own_table, thread);
            __syncthreads();
            copy_pages(keys, k_cache, pages + turn * PAGES, task.first, split, task.head, thread);
            end_stream_group();
            copy_pages(values, v_cache, pages + turn * PAGES, task.first, split, task.head, thread);
            end_stream_group();
        }
        copies = false;
        if (!waited) {
            let_next_start();
            // What is asked for after the wait: the rotary rows, and the second split.
            const size_t turn = (size_t)(task.first + (task.first_query + warp) / GROUP) * HALF + lane * 64;
            if (lane * 64 < HALF) prefetch_line(cos_table + turn), prefetch_line(sin_table + turn);
            if (LONE && has_part && split + CLUSTER < end_split)
                prefetch_split(k_cache, v_cache, task, split + CLUSTER, own_table, thread);
            stamp(ASKED);
            wait_for_inputs();
            stamp(WAITED);
            waited = true;
        }
        if (INBOX) arrive_at_cluster();
        float acc[TILES][SLICES + 1][4] = {}, peak[TILES][2];
        u16 gate = 0;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) peak[tile][0] = peak[tile][1] = -INF;
        for (bool is_first = true; split < end_split; split += CLUSTER, is_first = false) {
            const int from = split * SPLIT, begin = max(task.first, from), end = min(task.last, from + SPLIT - 1);
            const bool stays = split + CLUSTER < end_split;
            copies = stays || (has_next && next_place < next.num_splits);
            const int then = stays ? split + CLUSTER : next.low_split + next_place;
            const int then_head = stays ? task.head : next.head, then_first = stays ? task.first : next.first;
            const int *then_pages = pages + (turn ^ 1) * PAGES;
            // Pages are looked up one split ahead of their copies, which then need not wait for them.
            const bool looks = thread < PAGES && split + 2 * CLUSTER < end_split;
            const int page = looks ? page_of(task.first, split + 2 * CLUSTER, own_table, thread) : 0;
            if (copies && !stays && thread < PAGES)
                pages[(turn ^ 1) * PAGES + thread] =
                    page_of(next.first, then, table + (size_t)next.request * table_stride, thread);
            if (begin <= end) {
                wait_for_stream<0>();  // rows of this step go between keys and values that must have come
                __syncthreads();
            }
            // The queries, and the rows of this step whose own keys fall into this split. All clusters of a
            // (request, KV head) compute those; the first one's program writes them.
            const int fresh = is_first ? task.num_queries : 0, items = fresh + max(end - begin + 1, 0);
            if (is_first) gate = gate_of(task, place + live * warp, qkv);
            for (int base = 2 * warp; base < items; base += 2 * AT_ONCE * WARPS) {
                // Two heads a warp at a time; loads first, then the arithmetic.
                uint4 raw[AT_ONCE], v[AT_ONCE], cosines[AT_ONCE], sines[AT_ONCE];
                int block[AT_ONCE];
                const int d = lane % 16 * 8;
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) {
                    const int i = base + lane / 16 + 2 * j * WARPS, c = task.first_query + i;
                    const bool is_query = i < fresh;
                    const int position = is_query ? task.first + c / GROUP : begin + i - fresh;
                    raw[j] = v[j] = cosines[j] = sines[j] = make_uint4(0, 0, 0, 0), block[j] = 0;
                    if (i >= items) continue;
                    const u16 *row = qkv + (size_t)(task.start + position - task.first) * WIDTH;
                    const int head = is_query ? task.head * GROUP + c % GROUP : H + task.head;
                    raw[j] = load_fresh8(row + head * P + d);
                    cosines[j] = angles(cos_table, position, lane);
                    sines[j] = angles(sin_table, position, lane);
                    if (is_query) continue;
                    v[j] = load_fresh8(row + (head + J) * P + d);
                    block[j] = load_fresh32(own_table + position / KV_BLOCK);
                }
#pragma unroll 1
                for (int i = base + lane / 16, on = base; on < min(items, base + 2 * AT_ONCE * WARPS); on += 2 * WARPS) {
                    const int position = begin + i - fresh;
                    const uint4 x = turned(raw[0], i < fresh ? q_by : k_by, cosines[0], sines[0], eps, lane);
                    if (i < fresh) *(uint4 *)(queries + i * STRIDE + d) = x;
                    if (i >= fresh && i < items) {
                        *(uint4 *)(keys + (position - from) * STRIDE + d) = x;
                        *(uint4 *)(values + (position - from) * STRIDE + d) = v[0];
                        if (task.first_query == 0) {
                            const size_t at = place_in_cache(block[0], position, task.head, d);
                            *(uint4 *)(k_cache + at) = x;
                            *(uint4 *)(v_cache + at) = v[0];
                        }
                    }
                    i += 2 * WARPS;
#pragma unroll
                    for (int j = 1; j < AT_ONCE; j++) {
                        raw[j - 1] = raw[j], v[j - 1] = v[j], block[j - 1] = block[j];
                        cosines[j - 1] = cosines[j], sines[j - 1] = sines[j];
                    }
                }
            }
            wait_for_stream<1>();
            __syncthreads();
            if (is_first) stamp(PREPARED);
            // Scores of the queries and this warp's 16 keys.
            float scores[TILES][2][4] = {};
#pragma unroll
            for (int d = 0; d < P; d += 16) {
                const uint4 b = load_matrices(keys + (warp * KEYS + (lane >> 4) * 8 + (lane & 7)) * STRIDE + d + (lane & 8));
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    if (tile >= num_tiles) break;
                    const uint4 a = load_matrices(queries + (tile * 16 + (lane & (8 * HALVES - 1))) * STRIDE + d + (lane >> 4) * 8);
                    multiply(scores[tile][0], a.x, a.y, a.z, a.w, b.x, b.y);
                    multiply(scores[tile][1], a.x, a.y, a.z, a.w, b.z, b.w);
                }
            }
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                if (tile >= num_tiles) break;
#pragma unroll
                for (int half = 0; half < HALVES; half++) {
                    const int p = task.first + (task.first_query + tile * 16 + g + 8 * half) / GROUP;
                    float own_peak = -INF;
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int key = from + warp * KEYS + (i >> 1) * 8 + 2 * t + (i & 1);
                        bool seen = key <= (CAUSAL ? p : task.last);
                        if (WINDOW > 0) seen = seen && p - key < WINDOW && (CAUSAL || key - p < WINDOW);
                        float &score = scores[tile][i >> 1][2 * half + (i & 1)];
                        score = seen ? score * scale : -INF;
                        own_peak = fmaxf(own_peak, score);
                    }
                    own_peak = fmaxf(own_peak, exchange(own_peak, 1)), own_peak = fmaxf(own_peak, exchange(own_peak, 2));
                    if (t == 0) peaks[(tile * 16 + g + 8 * half) * WARPS + warp] = own_peak;
                }
            }
            __syncthreads();
            if (is_first) stamp(ROUTED);
            if (copies) copy_pages(keys, k_cache, then_pages, then_first, then, then_head, thread);
            end_stream_group();
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                if (tile >= num_tiles) break;
#pragma unroll
                for (int half = 0; half < HALVES; half++) {
                    const int query = tile * 16 + g + 8 * half;
                    const float4 p = *(const float4 *)(peaks + query * WARPS), q = *(const float4 *)(peaks + query * WARPS + 4);
                    const float highest = fmaxf(fmaxf(fmaxf(p.x, p.y), fmaxf(p.z, p.w)), fmaxf(fmaxf(q.x, q.y), fmaxf(q.z, q.w)));
                    const float now = fmaxf(peak[tile][half], highest), safe = now == -INF ? 0.0f : now;
                    const float fade = power2(peak[tile][half] - safe);
                    peak[tile][half] = now;
#pragma unroll
                    for (int n = 0; n <= SLICES; n++) acc[tile][n][2 * half] *= fade, acc[tile][n][2 * half + 1] *= fade;
#pragma unroll
                    for (int n = 0; n < 2; n++)
                        *(u32 *)(shares + query * PSTRIDE + warp * KEYS + n * 8 + 2 * t) =
                            pack(power2(scores[tile][n][2 * half] - safe), power2(scores[tile][n][2 * half + 1] - safe));
                }
            }
            if (looks) pages[turn * PAGES + thread] = page;
            wait_for_stream<1>();
            __syncthreads();
            // Each warp its own slice of the head, over all keys of the split; and a column of ones, for the totals.
#pragma unroll 1
            for (int k = 0; k < SPLIT; k += 32) {
                uint4 b[SLICES];
#pragma unroll
                for (int n = 0; n < SLICES; n++)
                    b[n] = load_transposed(values + (k + lane) * STRIDE + warp * SLICE + n * 8);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    if (tile >= num_tiles) break;
                    const u16 *at = shares + (tile * 16 + (lane & (8 * HALVES - 1))) * PSTRIDE + k + (lane >> 4) * 8;
                    const uint4 a = load_matrices(at), more = load_matrices(at + 16);
#pragma unroll
                    for (int n = 0; n <= SLICES; n++) {
                        const uint4 w = n < SLICES ? b[n] : make_uint4(ONES, ONES, ONES, ONES);
                        multiply(acc[tile][n], a.x, a.y, a.z, a.w, w.x, w.y);
                        multiply(acc[tile][n], more.x, more.y, more.z, more.w, w.z, w.w);
                    }
                }
            }
            __syncthreads();
            if (copies) copy_pages(values, v_cache, then_pages, then_first, then, then_head, thread);
            end_stream_group();
            turn ^= 1;
        }
        if (INBOX) wait_for_cluster();  // all have begun: what is handed over finds its place
        const int per = (task.num_queries + live - 1) / live;
        if (has_part) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
                for (int half = 0; half < HALVES; half++) {
                    const int query = tile * 16 + g + 8 * half, to = (task.low_split + query % live) % CLUSTER;
                    const int slot = INBOX ? place * per + query / live : query;
                    if (INBOX && query >= task.num_queries) continue;
                    float *own = sums + slot * SUMS + warp * SLICE + 2 * t, *own_stat = stats + slot * 2;
                    const float2 stat = make_float2(peak[tile][half], acc[tile][SLICES][2 * half]);
#pragma unroll
                    for (int n = 0; n < SLICES; n++) {
                        const float2 pair = make_float2(acc[tile][n][2 * half], acc[tile][n][2 * half + 1]);
                        if (INBOX)
                            store_remote2(own + n * 8, to, pair);
                        else
                            *(float2 *)(own + n * 8) = pair;
                    }
                    if (warp > 0 || t > 0) continue;
                    if (INBOX)
                        store_remote2(own_stat, to, stat);
                    else
                        *(float2 *)own_stat = stat;
                }
            }
        }
        stamp(FIRST_DONE);
        float opened = GATE ? rounded(softplus(from_bf16(gate))) : 1.0f;
        stamp(FIRST_DONE);
        sync_cluster();
        for (int query = place + live * warp; has_part && query < task.num_queries; query += live * WARPS) {
            gate = gate_of(task, query + live * WARPS, qkv);
            add_parts(task, query, opened, sums, stats, out, lane);
            if (GATE) opened = rounded(softplus(from_bf16(gate)));
        }
        if (!INBOX) sync_cluster();  // what others read stays until they have
        goes_on = has_next, task = next, place = next_place, split = task.low_split + place;
        index += gridDim.x / CLUSTER;
        has_next = !LONE && find_task(next, index, rows, num_requests);
    }
    stamp(ENDED);
}
