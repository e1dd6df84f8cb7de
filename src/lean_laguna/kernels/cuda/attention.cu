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
#define INF __int_as_float(0x7f800000)

struct Task {
    int request, head, split, start, count, first, last, low_split, num_splits;
};

// The task at place `index` of all requests' tasks in a row; false past the end.
DEVICE bool find_task(Task &task, int index, const int *row_start, const int *row_count, const int *positions,
                      int num_requests) {
    for (int r = 0; r < num_requests; r++) {
        const int count = load_fresh32(row_count + r);
        if (count == 0) continue;
        const int start = load_fresh32(row_start + r), first = load_fresh32(positions + start);
        const int last = first + count - 1, low_key = WINDOW > 0 ? max(first - WINDOW + 1, 0) : 0;
        const int low_split = low_key / SPLIT, num_splits = last / SPLIT - low_split + 1;
        if (index < num_splits * J) {
            task.request = r, task.head = index % J, task.split = low_split + index / J, task.start = start;
            task.count = count, task.first = first, task.last = last, task.low_split = low_split;
            task.num_splits = num_splits;
            return true;
        }
        index -= num_splits * J;
    }
    return false;
}

// One head, four elements a lane, normalised and turned as Hugging Face rounds; `at` may be no row at all.
DEVICE uint2 turned(const u16 *at, const u16 *weight, const u16 *cos_row, const u16 *sin_row, float eps, int lane) {
    u32 raw[2] = {0, 0};
    raw[0] = (u32)load_fresh16(at + lane * 4) | ((u32)load_fresh16(at + lane * 4 + 1) << 16);
    raw[1] = (u32)load_fresh16(at + lane * 4 + 2) | ((u32)load_fresh16(at + lane * 4 + 3) << 16);
    float v[4] = {low(raw[0]), high(raw[0]), low(raw[1]), high(raw[1])};
    if (QK_NORM) {
        const float inverse =
            rsqrtf(sum_over_warp(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]) / P + eps);
        for (int i = 0; i < 4; i++) v[i] = rounded(rounded(v[i] * inverse) * from_bf16(weight[lane * 4 + i]));
    }
    for (int i = 0; i < 4; i++) {
        const float other = exchange(v[i], HALF / 4);
        const int d = lane * 4 + i;
        if (d < ROTARY) {
            const float signed_other = d < HALF ? -other : other;
            const float c = from_bf16(cos_row[d % HALF]), s = from_bf16(sin_row[d % HALF]);
            v[i] = rounded(rounded(v[i] * c) + rounded(signed_other * s));
        }
    }
    return make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
}

DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Add the parts of every row of (request, head) in their order; all warps, each its own (row, query head).
DEVICE void combine(const Task &task, const u16 *qkv, u16 *out, const float *parts, const float *stats, int warp,
                    int lane) {
    for (int i = warp; i < task.count * GROUP; i += WARPS) {
        const int row = task.start + i / GROUP, head = task.head * GROUP + i % GROUP;
        const int position = task.first + i / GROUP;
        const int low = WINDOW > 0 ? max(position - WINDOW + 1, 0) / SPLIT : 0;
        int last = CAUSAL ? position : task.last;
        if (!CAUSAL && WINDOW > 0) last = min(last, position + WINDOW - 1);
        const int end = last / SPLIT + 1;
        const size_t base = (size_t)(row * H + head) * MAX_SPLITS;
        float peak = -INF;
        for (int s = low + lane; s < end; s += 32)
            peak = fmaxf(peak, __int_as_float(load_fresh32((const int *)stats + (base + s % MAX_SPLITS) * 2)));
        for (int lanes = 16; lanes; lanes >>= 1) peak = fmaxf(peak, exchange(peak, lanes));
        float total = 0.0f;
        float4 acc = make_float4(0, 0, 0, 0);
        for (int s = low; s < end; s += 4) {
            float4 part[4];
            float own_peak[4], own_total[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const size_t at = base + (s + j) % MAX_SPLITS;
                const bool here = s + j < end;
                part[j] = here ? load_fresh_floats(parts + at * P + lane * 4) : make_float4(0, 0, 0, 0);
                own_peak[j] = here ? __int_as_float(load_fresh32((const int *)stats + at * 2)) : -INF;
                own_total[j] = here ? __int_as_float(load_fresh32((const int *)stats + at * 2 + 1)) : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (s + j >= end) continue;
                const float by = exp2f(own_peak[j] - peak);
                total += own_total[j] * by;
                acc.x += part[j].x * by, acc.y += part[j].y * by, acc.z += part[j].z * by, acc.w += part[j].w * by;
            }
        }
        float y[4] = {rounded(acc.x / total), rounded(acc.y / total), rounded(acc.z / total),
                      rounded(acc.w / total)};
        if (GATE) {
            const float gate =
                rounded(softplus(from_bf16(load_fresh16(qkv + (size_t)row * WIDTH + (H + 2 * J) * P + head))));
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
    int *is_last = (int *)(totals + WARPS * 16);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;

    // Where rows stand changes only at the end of a step, so all this may be read before the wait.
    const int num_requests = load_fresh32(num_requests_at);
    Task task;
    bool waited = false;
    for (int index = blockIdx.x; find_task(task, index, row_start, row_count, positions, num_requests);
         index += gridDim.x) {
        const int from = task.split * SPLIT, *own_table = table + (size_t)task.request * table_stride;
        for (int i = thread; i < SPLIT * (P / 8); i += WARPS * 32) {
            const int k = i / (P / 8), key = from + k, d = i % (P / 8) * 8;
            const bool old = key < task.first && (WINDOW == 0 || task.first - key < WINDOW);
            const int block = old ? load_fresh32(own_table + key / KV_BLOCK) : 0;
            const size_t at = (((size_t)block * KV_BLOCK + key % KV_BLOCK) * J + task.head) * P + d;
            copy_async(keys + k * STRIDE + d, k_cache + at, old);
            copy_async(values + k * STRIDE + d, v_cache + at, old);
        }
        if (!waited) {
            let_next_start();
            wait_for_inputs();
            waited = true;
        }
        wait_for_copies();
        __syncthreads();
        // Rows of this step whose own keys fall into this split.
        const int begin = max(task.first, from), end = min(task.last, from + SPLIT - 1);
        for (int position = begin + warp; position <= end; position += WARPS) {
            const int row = task.start + position - task.first;
            const u16 *k_row = qkv + (size_t)row * WIDTH + (H + task.head) * P, *v_row = k_row + J * P;
            const uint2 k = turned(k_row, k_norm, cos_table + (size_t)position * HALF,
                                   sin_table + (size_t)position * HALF, eps, lane);
            const uint2 v = make_uint2((u32)load_fresh16(v_row + lane * 4) |
                                           ((u32)load_fresh16(v_row + lane * 4 + 1) << 16),
                                       (u32)load_fresh16(v_row + lane * 4 + 2) |
                                           ((u32)load_fresh16(v_row + lane * 4 + 3) << 16));
            const int block = load_fresh32(own_table + position / KV_BLOCK);
            const size_t at =
                (((size_t)block * KV_BLOCK + position % KV_BLOCK) * J + task.head) * P + lane * 4;
            *(uint2 *)(keys + (position - from) * STRIDE + lane * 4) = k;
            *(uint2 *)(values + (position - from) * STRIDE + lane * 4) = v;
            *(uint2 *)(k_cache + at) = k;
            *(uint2 *)(v_cache + at) = v;
        }
        const int num_queries = task.count * GROUP;
        for (int tile = 0; tile < num_queries; tile += 16) {
            __syncthreads();
            for (int i = warp; i < 16; i += WARPS) {
                const int c = tile + i, row = task.start + c / GROUP, position = task.first + c / GROUP;
                uint2 q = make_uint2(0, 0);
                if (c < num_queries)
                    q = turned(qkv + (size_t)row * WIDTH + (task.head * GROUP + c % GROUP) * P, q_norm,
                               cos_table + (size_t)position * HALF, sin_table + (size_t)position * HALF, eps, lane);
                *(uint2 *)(queries + i * STRIDE + lane * 4) = q;
            }
            __syncthreads();
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
        __threadfence();
        __syncthreads();
        if (thread == 0) {
            int *counter = arrived + task.request * J + task.head;
            *is_last = atomicAdd(counter, 1) == task.num_splits - 1;
            if (*is_last) *counter = 0;
        }
        __syncthreads();
        if (*is_last) {
            __threadfence();
            combine(task, qkv, out, parts, stats, warp, lane);
        }
        __syncthreads();
    }
    if (!waited) {
        let_next_start();
        wait_for_inputs();
    }
}
