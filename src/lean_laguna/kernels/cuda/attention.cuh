// What attention.cu and wide_attention.cu share: tasks, keys and values on their way, a warp's scores and sums, and how
// sums of parts are handed over and added up.
//
// -D: H query heads, J KV heads, P head size (128); ROTARY dimensions turned; WINDOW (0: all keys); CAUSAL;
// QK_NORM; GATE; KV_BLOCK keys a page; KEY_PARTS in which a row's keys are added up; CLUSTER programs that share them, a
// divisor of KEY_PARTS, or LEAST of them each, where CROWD programs would not do for all tasks; COLS rows at most, 16 of a
// request; MOST requests, of which any may have no rows.
// The context is cut at absolute multiples of 128 keys. Split s belongs to part s % KEY_PARTS, and sixteen of its keys to
// each warp of the program that has the part: there each warp is on its own, with a running softmax. Then the warps' sums
// are added, and handed over to programs of the crew, each of which adds up its own dimensions over the parts,
// always in the same order. A split or part that a row does not see changes nothing of the row. So a row's bits are
// its own, alone or beside others, and do not follow the size of the crew.
// No program leaves before it has all that is handed over to it.
#pragma once
#include "common.cuh"

#define WARPS 8
#define KEYS 16
#define SPLIT (WARPS * KEYS)
#define GROUP (H / J)
// Queries that matter of the 16 of a matrix instruction: of a lone row often half.
#define HALVES (COLS == 1 && GROUP <= 8 ? 1 : 2)
#define QUERIES (8 * HALVES)
#define STRIDE (P + 8)
#define TILE (2 * KEYS * STRIDE)
#define SUM_STRIDE (P + 8)
static_assert(KEY_PARTS % CLUSTER == 0 && CLUSTER % LEAST == 0 && CLUSTER <= 8, "parts are shared out evenly");
static_assert(CLUSTER <= 2 * LEAST, "a cluster is one crew or two");
#define SLICES (P / 8)
#define WIDTH ((H + 2 * J) * P + (GATE ? H : 0))
#define HALF (ROTARY / 2)
// Rows of a request at most.
#define OWN_ROWS (COLS < 16 ? COLS : 16)
// Queries and rows of this step that half a warp normalises and turns.
#define ROUNDS ((QUERIES + OWN_ROWS + 15) / 16)
// A page holds a whole number of a warp's keys, or they of it.
#define PAGES (KV_BLOCK < KEYS ? KEYS / KV_BLOCK : 1)
static_assert(KV_BLOCK % KEYS == 0 || KEYS % KV_BLOCK == 0, "a warp's keys are whole pages, or all in one");
#define ONES 0x3f803f80u
#define INF __int_as_float(0x7f800000)

// Up to QUERIES queries of one KV head of a request; a query is one head of one row.
struct Task {
    int request, head, first_query, num_queries, start, first, last, low_split, num_splits;
};

// Where the requests' rows stand, read once by each program.
struct Rows {
    int count[MOST], start[MOST], position[MOST];
};

DEVICE int tasks_of(int count) { return J * ((count * GROUP + QUERIES - 1) / QUERIES); }

// The programs of a cluster that share a task, a power of two: how many, the first one's rank in the cluster, the
// program's own among them, and of how many dimensions (2^own_bits) each adds up the parts.
struct Crew {
    int size, first, rank, own_bits;

    METHOD int own() const { return 1 << own_bits; }
    // The first of its tasks, and from one to the next: whole clusters have their first crews at work before any second.
    METHOD int first_task() const { return blockIdx.x / CLUSTER + (first ? gridDim.x / CLUSTER : 0); }
    METHOD int stride() const { return gridDim.x / CLUSTER * (size < CLUSTER ? CLUSTER / LEAST : 1); }
};
DEVICE Crew crew_of(const Rows &rows, int num_requests) {
    int size = CLUSTER;
    if (LEAST < CLUSTER) {
        int tasks = 0;
        for (int r = 0; r < num_requests; r++) tasks += tasks_of(rows.count[r]);
        if (tasks * CLUSTER > CROWD) size = LEAST;
    }
    const int rank = blockIdx.x % CLUSTER, bits = size >= 8 ? 3 : size >= 4 ? 2 : size >= 2 ? 1 : 0;
    return {size, rank & -size, rank & (size - 1), 7 - bits};
}

// Task `index` of a request.
DEVICE void write_task(Task &task, int request, int index, const Rows &rows) {
    const int count = rows.count[request], start = rows.start[request];
    const int first = rows.position[start], last = first + count - 1;
    const int low_key = WINDOW > 0 ? max(first - WINDOW + 1, 0) : 0;
    task.request = request, task.head = index % J, task.first_query = index / J * QUERIES;
    task.num_queries = min(count * GROUP - task.first_query, QUERIES);
    task.start = start, task.first = first, task.last = last;
    task.low_split = low_key / SPLIT, task.num_splits = last / SPLIT - task.low_split + 1;
}

// The tasks of the requests before a thread's own. Of few requests one thread looks through all instead.
DEVICE int tasks_before(const Rows &rows, int num_requests, int thread) {
    int before = 0;
    if (COLS > 16 && thread <= MOST)
        for (int r = 0; r < min(thread, num_requests); r++) before += tasks_of(rows.count[r]);
    return before;
}

// Write down the task at place `index` of all requests' tasks in a row, or that there is none; true for the thread which
// found one.
DEVICE bool find_task(Task &task, int index, const Rows &rows, int num_requests, int before, int thread) {
    if (COLS > 16) {
        const bool is_own = thread < num_requests && index >= before && index < before + tasks_of(rows.count[thread]);
        if (is_own) write_task(task, thread, index - before, rows);
        if (thread == MOST && index >= before) task.num_queries = 0;
        return is_own;
    }
    if (thread != 0) return false;
    for (int r = 0; r < num_requests; r++) {
        const int tasks = tasks_of(rows.count[r]);
        if (index < tasks) {
            write_task(task, r, index, rows);
            return true;
        }
        index -= tasks;
    }
    task.num_queries = 0;
    return false;
}

// What is handed over to each program.
DEVICE u32 expected_bytes(const Task &task, const Crew &crew) {
    return min(task.num_splits, KEY_PARTS) * task.num_queries * (crew.own() * (int)sizeof(float) + (int)sizeof(float2));
}

// A program's shared memory behind its warps' keys and values.
struct Shared {
    u16 *queries, *fresh;
    float2 *stats, *inbox_stats;
    float *inbox;
    Rows &rows;
    Task &task;
    u64 *arrival;
};
DEVICE Shared laid_out(u16 *queries) {
    u16 *fresh = queries + QUERIES * STRIDE;
    float2 *stats = (float2 *)(fresh + OWN_ROWS * 2 * STRIDE), *inbox_stats = stats + WARPS * QUERIES;
    float *inbox = (float *)(inbox_stats + KEY_PARTS * QUERIES);
    Rows &rows = *(Rows *)(inbox + KEY_PARTS * QUERIES * (P / LEAST));
    Task &task = *(Task *)(&rows + 1);
    return {queries, fresh, stats, inbox_stats, inbox, rows, task, (u64 *)((int *)&task + 10)};
}

// Where a warp's keys and values lie, and what a lane takes of them and of the queries.
struct Places {
    u16 *keys, *values;
    Place queries_at, keys_at, values_at, keys_to;
};
DEVICE Places places_of(u16 *tiles, const u16 *queries, int warp, int lane) {
    u16 *keys = tiles + warp * TILE, *values = keys + KEYS * STRIDE;
    return {keys,
            values,
            place_in_shared(queries + (lane & (QUERIES - 1)) * STRIDE + (lane >> 4) * 8),
            place_in_shared(keys + ((lane >> 4) * 8 + (lane & 7)) * STRIDE + (lane & 8)),
            place_in_shared(values + (lane & 15) * STRIDE + (lane >> 4) * 8),
            place_in_shared(keys + lane / 16 * STRIDE + lane % 16 * 8)};
}

// Read where rows stand. That changes only at the end of a step, so it may be read before the wait.
DEVICE void read_rows(Rows &rows, const int *count, const int *start, const int *positions, int thread) {
    if (thread < MOST) {
        rows.count[thread] = load_fresh32(count + thread), rows.start[thread] = load_fresh32(start + thread);
        rows.position[thread] = load_fresh32(positions + thread);
    }
    __syncthreads();
}

// Find a program's first task, and make the arrival of what is handed over to it.
DEVICE void find_first(const Shared &shared, const Crew &crew, int index, int num_requests, int before, int thread) {
    if (find_task(shared.task, index, shared.rows, num_requests, before, thread)) {
        init_arrival(shared.arrival);
        show_arrivals();
        expect_bytes(shared.arrival, expected_bytes(shared.task, crew));
    }
    __syncthreads();
}
// Find its next one, whose parts may then be handed over; false where there is none.
DEVICE bool find_next(const Shared &shared, const Crew &crew, int index, int num_requests, int before, int thread) {
    __syncthreads();
    if (find_task(shared.task, index, shared.rows, num_requests, before, thread))
        expect_bytes(shared.arrival, expected_bytes(shared.task, crew));
    __syncthreads();
    const bool is_there = shared.task.num_queries > 0;
    if (is_there) arrive_at_cluster();
    return is_there;
}
// Nothing to do for the crew: leave room. A grid must not end before the one ahead of it has.
DEVICE void leave_room() {
    if (blockIdx.x < CLUSTER) {
        let_next_start();
        wait_for_inputs();
    }
}

// A part's place among those that have splits of the task, and beyond them.
DEVICE int place_of(const Task &task, int part) { return (part + KEY_PARTS - task.low_split % KEY_PARTS) % KEY_PARTS; }

// The page of a warp's keys in a split, lane n's the nth where they are several, as far as earlier steps left keys there.
DEVICE int page_of(const Task &task, int split, const int *own_table, int warp, int lane) {
    const int key = split * SPLIT + warp * KEYS + (PAGES > 1 ? lane % PAGES * KV_BLOCK : 0);
    return key < task.first ? load_fresh32(own_table + (u32)key / KV_BLOCK) : 0;
}

// Start copies of a warp's keys of a split, or of their values, that earlier steps left; zeros elsewhere. A lane copies
// pieces of keys I, I + 2, and so on, `left` of which there are.
template <int I> DEVICE void copy_pieces(Place to, const u16 *from, int left, int page) {
    const u16 *own = PAGES == 1 ? from : from + (size_t)(u32)from_lane(page, I / KV_BLOCK) * (KV_BLOCK * J * P);
    copy_async<I * STRIDE * 2, (PAGES == 1 ? I : I % KV_BLOCK) * J * P * 2>(
        to, own, (u32)(left - 1 - I) < (WINDOW > 0 ? WINDOW - 1 : 0x7fffffff));
    if constexpr (I + 2 < KEYS) copy_pieces<I + 2>(to, from, left, page);
}
DEVICE void copy_keys(Place to, const u16 *cache, const Task &task, int split, int page, int warp, int lane) {
    const int key = split * SPLIT + warp * KEYS + lane / 16;
    const u16 *from = cache + ((u32)key % KV_BLOCK * J + task.head) * P + lane % 16 * 8;
    if (PAGES == 1) from += (size_t)(u32)page * (KV_BLOCK * J * P);
    copy_pieces<0>(to, from, task.first - key, page);
}

// Ask for a warp's keys and values of a split into L2.
DEVICE void prefetch_keys(const u16 *k_cache, const u16 *v_cache, const Task &task, int split, const int *own_table,
                          int warp, int lane) {
    const int key = split * SPLIT + warp * KEYS + lane / 2;
    if (key >= task.first) return;
    const size_t page = load_fresh32(own_table + (u32)key / KV_BLOCK);
    const size_t at = (page * KV_BLOCK + key % KV_BLOCK) * (J * P) + task.head * P + lane % 2 * (P / 2);
    prefetch_line(k_cache + at), prefetch_line(v_cache + at);
}

// Scores of a warp's 16 keys, from dimension D on.
template <int D> DEVICE void add_scores(float (&scores)[2][4], Place queries, Place keys) {
    const uint4 a = load_matrices<D * 2>(queries), b = load_matrices<D * 2>(keys);
    multiply(scores[0], a.x, a.y, a.z, a.w, b.x, b.y);
    multiply(scores[1], a.x, a.y, a.z, a.w, b.z, b.w);
    if constexpr (D + 16 < P) add_scores<D + 16>(scores, queries, keys);
}

// Their values by the queries' shares of them, from slice N of eight dimensions on.
template <int N> DEVICE void add_values(float (&acc)[SLICES][2 * HALVES], const u32 (&shares)[2][2], Place values) {
    const uint4 b = load_transposed<N * 16>(values);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float sum[4] = {};
#pragma unroll
        for (int e = 0; e < 2 * HALVES; e++) sum[e] = acc[N + i][e];
        multiply(sum, shares[0][0], shares[0][1], shares[1][0], shares[1][1], i ? b.z : b.x, i ? b.w : b.y);
#pragma unroll
        for (int e = 0; e < 2 * HALVES; e++) acc[N + i][e] = sum[e];
    }
    if constexpr (N + 2 < SLICES) add_values<N + 2>(acc, shares, values);
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

DEVICE u16 gate_of(const Task &task, int query, const u16 *qkv) {
    if (!GATE || query >= task.num_queries) return 0;
    const int c = task.first_query + query, row = task.start + c / GROUP, head = task.head * GROUP + c % GROUP;
    return load_fresh16(qkv + (size_t)row * WIDTH + (H + 2 * J) * P + head);
}

// The weight of what was summed up below a peak, where sums below another, the highest, are added to it.
DEVICE float weight_of(float peak, float highest) { return power2(peak - (highest == -INF ? 0.0f : highest)); }

// What half a warp normalises and turns: queries, and rows of this step whose keys fall into the program's splits.
struct Items {
    uint4 by[ROUNDS], cosines[ROUNDS], sines[ROUNDS];
    int block[ROUNDS], position[ROUNDS];
    bool wanted[ROUNDS];
};

// The constant part, which needs no waiting.
DEVICE void begin_items(Items &items, const Task &task, const Crew &crew, const u16 *q_norm, const u16 *k_norm,
                        const u16 *cos_table, const u16 *sin_table, const int *own_table, int thread) {
    const int lane = thread & 31;
#pragma unroll
    for (int j = 0; j < ROUNDS; j++) {
        const int i = thread / 16 + 16 * j, row = i - QUERIES;
        const int position = task.first + (row < 0 ? (task.first_query + i) / GROUP : row);
        const bool is_own = position <= task.last && (position / SPLIT % KEY_PARTS & (crew.size - 1)) == crew.rank;
        items.position[j] = position, items.wanted[j] = row < 0 ? i < task.num_queries : is_own;
        items.by[j] = *(const uint4 *)((row < 0 ? q_norm : k_norm) + lane % 16 * 8);
        items.cosines[j] = items.sines[j] = make_uint4(0, 0, 0, 0), items.block[j] = 0;
        if (!items.wanted[j]) continue;
        items.cosines[j] = angles(cos_table, position, lane), items.sines[j] = angles(sin_table, position, lane);
        if (row >= 0) items.block[j] = load_fresh32(own_table + position / KV_BLOCK);
    }
}

// All clusters of a (request, KV head) compute its rows' keys; the first one's program writes them to the cache.
DEVICE void finish_items(const Items &items, const Task &task, const u16 *qkv, u16 *queries, u16 *fresh, u16 *k_cache,
                         u16 *v_cache, float eps, int thread) {
    const int lane = thread & 31, d = lane % 16 * 8;
    uint4 raw[ROUNDS], v[ROUNDS];
#pragma unroll
    for (int j = 0; j < ROUNDS; j++) {
        const int i = thread / 16 + 16 * j;
        raw[j] = v[j] = make_uint4(0, 0, 0, 0);
        if (!items.wanted[j]) continue;
        const u16 *from = qkv + (size_t)(task.start + items.position[j] - task.first) * WIDTH + d;
        raw[j] = load_fresh8(from + (i < QUERIES ? task.head * GROUP + (task.first_query + i) % GROUP : H + task.head) * P);
        if (i >= QUERIES) v[j] = load_fresh8(from + (H + J + task.head) * P);
    }
#pragma unroll
    for (int j = 0; j < ROUNDS; j++) {
        const int i = thread / 16 + 16 * j, row = i - QUERIES;
        const uint4 x = turned(raw[j], items.by[j], items.cosines[j], items.sines[j], eps, lane);
        if (row < 0) *(uint4 *)(queries + i * STRIDE + d) = x;  // zeros for those that there are not
        if (row < 0 || !items.wanted[j]) continue;
        *(uint4 *)(fresh + row * 2 * STRIDE + d) = x;
        *(uint4 *)(fresh + (row * 2 + 1) * STRIDE + d) = v[j];
        if (task.first_query > 0) continue;
        const size_t slot = (size_t)items.block[j] * KV_BLOCK + items.position[j] % KV_BLOCK;
        *(uint4 *)(k_cache + slot * (J * P) + task.head * P + d) = x;
        *(uint4 *)(v_cache + slot * (J * P) + task.head * P + d) = v[j];
    }
}

// What a warp has summed up of its keys of a part: for each of a lane's queries the peak of the scores, and the totals
// and sums of values below it.
struct Sums {
    float values[SLICES][2 * HALVES], totals[4], peak[HALVES];
};

// Turn the scores of a warp's keys from `from` on into shares, and let what was summed up before fade.
DEVICE void take_scores(Sums &sums, float (&scores)[2][4], u32 (&shares)[2][2], const Task &task, int from, float scale,
                        int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        const int p = task.first + (task.first_query + g + 8 * half) / GROUP;
        float now = sums.peak[half];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int key = from + (i >> 1) * 8 + 2 * t + (i & 1);
            bool seen = key <= (CAUSAL ? p : task.last);
            if (WINDOW > 0) seen = seen && p - key < WINDOW && (CAUSAL || key - p < WINDOW);
            float &score = scores[i >> 1][2 * half + (i & 1)];
            score = seen ? score * scale : -INF;
            now = fmaxf(now, score);
        }
        now = fmaxf(now, exchange(now, 1)), now = fmaxf(now, exchange(now, 2));
        const float fade = weight_of(sums.peak[half], now);
        sums.peak[half] = now;
        sums.totals[2 * half] *= fade;
#pragma unroll
        for (int n = 0; n < SLICES; n++) sums.values[n][2 * half] *= fade, sums.values[n][2 * half + 1] *= fade;
#pragma unroll
        for (int n = 0; n < 2; n++)
            shares[n][half] = pack(weight_of(scores[n][2 * half], now), weight_of(scores[n][2 * half + 1], now));
    }
}

// Rows of this step go between a warp's keys and values from `from` on, which must have come.
DEVICE void insert_rows(const Task &task, int from, const Places &places, const u16 *fresh, int lane) {
    if (task.last >= from && task.first < from + KEYS) {
        wait_for_stream<0>();
        __syncwarp();
        const int end = min(task.last, from + KEYS - 1);
        for (int key = max(task.first, from); key <= end; key++)
            *(uint4 *)((lane < 16 ? places.keys : places.values) + (key - from) * STRIDE + lane % 16 * 8) =
                *(const uint4 *)(fresh + ((key - task.first) * 2 + lane / 16) * STRIDE + lane % 16 * 8);
    }
    __syncwarp();
}

// Leave a warp's sums where its keys and values were.
DEVICE void leave_sums(const Sums &sums, float *own, float2 *stats, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        const int query = g + 8 * half;
#pragma unroll
        for (int n = 0; n < SLICES; n++)
            *(float2 *)(own + query * SUM_STRIDE + n * 8 + 2 * t) = make_float2(sums.values[n][2 * half], sums.values[n][2 * half + 1]);
        if (t == 0) stats[query] = make_float2(sums.peak[half], sums.totals[2 * half]);
    }
}

// Add the warps' sums of a part, `pitch` floats from one's to the next one's, and hand each program of the crew its dimensions, a warp a query.
DEVICE void hand_over(const Task &task, const Crew &crew, int part, const float *sums, int pitch, const float2 *stats, float *inbox,
                      float2 *inbox_stats, u64 *arrival, int warp, int lane) {
#pragma unroll 1
    for (int query = warp; query < task.num_queries; query += WARPS) {
        float highest = -INF, total = 0.0f;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, stats[w * QUERIES + query].x);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float2 stat = stats[w * QUERIES + query];
            const float4 own = *(const float4 *)(sums + w * pitch + query * SUM_STRIDE + lane * 4);
            const float by = weight_of(stat.x, highest);
            total += stat.y * by;
            sum.x += own.x * by, sum.y += own.y * by, sum.z += own.z * by, sum.w += own.w * by;
        }
        const int slot = part * QUERIES + query;
        float4 *to = (float4 *)(inbox + (slot << crew.own_bits) + (lane * 4 & (crew.own() - 1)));
        send4(to, crew.first + (lane * 4 >> crew.own_bits), sum, arrival);
        if (lane < crew.size) send2(inbox_stats + slot, crew.first + lane, make_float2(highest, total), arrival);
    }
}

// Two dimensions of a query, added up over the parts.
DEVICE void add_parts(const Task &task, const Crew &crew, int query, int d, u16 gate, const float *inbox,
                      const float2 *inbox_stats, u16 *out) {
    float highest = -INF, total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll 4
    for (int part = 0; part < KEY_PARTS; part++)
        if (place_of(task, part) < task.num_splits) highest = fmaxf(highest, inbox_stats[part * QUERIES + query].x);
#pragma unroll 4
    for (int part = 0; part < KEY_PARTS; part++) {
        if (place_of(task, part) >= task.num_splits) continue;
        const float2 stat = inbox_stats[part * QUERIES + query];
        const int slot = part * QUERIES + query;
        const float2 own = *(const float2 *)(inbox + (slot << crew.own_bits) + (d & (crew.own() - 1)));
        const float by = weight_of(stat.x, highest);
        total += stat.y * by, x += own.x * by, y += own.y * by;
    }
    const float by = quotient(1.0f, total), opened = GATE ? rounded(softplus(from_bf16(gate))) : 1.0f;
    const int c = task.first_query + query, row = task.start + c / GROUP, head = task.head * GROUP + c % GROUP;
    *(u32 *)(out + (size_t)row * (H * P) + head * P + d) = pack(rounded(x * by) * opened, rounded(y * by) * opened);
}
// The program's own dimensions of all of a task's queries; a thread has the gate of its first one.
DEVICE void add_all_parts(const Shared &shared, const Crew &crew, u16 gate, const u16 *qkv, u16 *out, int thread) {
    const int pairs = crew.own() / 2;
    for (int i = thread; i < shared.task.num_queries * pairs; i += WARPS * 32) {
        const int query = i >> (crew.own_bits - 1), d = (crew.rank << crew.own_bits) + (i & (pairs - 1)) * 2;
        add_parts(shared.task, crew, query, d, i == thread ? gate : gate_of(shared.task, query, qkv), shared.inbox,
                  shared.inbox_stats, out);
    }
}
