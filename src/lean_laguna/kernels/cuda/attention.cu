// Attention of decode and verify rows over the paged cache: norm, rotation and KV append on the way in.
//
// -D: as in attention.cuh.
#include "attention.cuh"

CLUSTER_KERNEL(128, CLUSTER)
attention(const u16 *qkv, u16 *out, const u16 *q_norm, const u16 *k_norm, const u16 *cos_table, const u16 *sin_table,
          u16 *k_cache, u16 *v_cache, const int *table, const int *positions, const int *row_start,
          const int *row_count, const int *num_requests_at, float eps, float scale, int table_stride) {
    EXTERN_SHARED(u16, tiles);
    u16 *queries = tiles + WARPS * TILE, *fresh = queries + QUERIES * STRIDE;
    float2 *stats = (float2 *)(fresh + OWN_ROWS * 2 * STRIDE), *inbox_stats = stats + WARPS * QUERIES;
    float *inbox = (float *)(inbox_stats + KEY_PARTS * QUERIES);
    Rows &rows = *(Rows *)(inbox + KEY_PARTS * QUERIES * OWN);
    Task &task = *(Task *)(&rows + 1);
    u64 *arrival = (u64 *)((int *)&task + 10);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int rank = blockIdx.x % CLUSTER;
    u16 *keys = tiles + warp * TILE, *values = keys + KEYS * STRIDE;
    const Place queries_at = place_in_shared(queries + (lane & (QUERIES - 1)) * STRIDE + (lane >> 4) * 8);
    const Place keys_at = place_in_shared(keys + ((lane >> 4) * 8 + (lane & 7)) * STRIDE + (lane & 8));
    const Place values_at = place_in_shared(values + (lane & 15) * STRIDE + (lane >> 4) * 8);
    const Place keys_to = place_in_shared(keys + lane / 16 * STRIDE + lane % 16 * 8);
    stamp(STARTED);

    // Where rows stand changes only at the end of a step, so all this may be read before the wait.
    const int num_requests = load_fresh32(num_requests_at);
    if (thread < MOST) {
        rows.count[thread] = load_fresh32(row_count + thread), rows.start[thread] = load_fresh32(row_start + thread);
        rows.position[thread] = load_fresh32(positions + thread);
    }
    __syncthreads();
    int index = blockIdx.x / CLUSTER;
    const int before = tasks_before(rows, num_requests, thread);
    if (find_task(task, index, rows, num_requests, before, thread) && rank < OWNERS) {
        init_arrival(arrival);
        show_arrivals();
        expect_bytes(arrival, expected_bytes(task));
    }
    __syncthreads();
    if (task.num_queries == 0) {
        // Nothing to do for any of the cluster: leave room. A grid must not end before the one ahead of it has.
        if (blockIdx.x < CLUSTER) {
            let_next_start();
            wait_for_inputs();
        }
        return;
    }
    show_cluster();  // parts may be handed over
    int parity = 0;
    bool waited = false;
    for (bool goes_on = true; goes_on;) {
        const int *own_table = table + (size_t)task.request * table_stride;
        const int end_split = task.low_split + task.num_splits;
        const int d = lane % 16 * 8;
        u16 gate = 0;
        bool may_hand_over = false;
#pragma unroll 1
        for (int part = rank; part < KEY_PARTS; part += CLUSTER) {
            int split = task.low_split + place_of(task, part), next_page = 0;
            const bool is_there = split < end_split;
            if (part != rank && is_there) __syncthreads();  // the warps' sums have been read
            if (is_there) {
                const int page = page_of(task, split, own_table, warp, lane);
                next_page = page_of(task, split + KEY_PARTS, own_table, warp, lane);
                copy_keys(keys_to, k_cache, task, split, page, warp, lane);
                end_stream_group();
                copy_keys(keys_to + KEYS * STRIDE * 2, v_cache, task, split, page, warp, lane);
                end_stream_group();
            }
            if (part == rank) {
                Items items;
                begin_items(items, task, q_norm, k_norm, cos_table, sin_table, own_table, thread);
                if (!waited) {
                    let_next_start();
                    stamp(ASKED);
                    wait_for_inputs();
                    stamp(WAITED);
                    waited = true;
                }
                gate = gate_of(task, thread / (OWN / 2), qkv);
                finish_items(items, task, qkv, queries, fresh, k_cache, v_cache, eps, thread);
                __syncthreads();
                stamp(PREPARED);
            }
            if (!is_there) continue;
            if (CLUSTER < KEY_PARTS && part + CLUSTER < KEY_PARTS) {
                const int next = task.low_split + place_of(task, part + CLUSTER);
                if (next < end_split) prefetch_keys(k_cache, v_cache, task, next, own_table, warp, lane);
            }
            Sums sums = {};
#pragma unroll
            for (int half = 0; half < HALVES; half++) sums.peak[half] = -INF;
#pragma unroll 1
            for (; split < end_split; split += KEY_PARTS) {
                const int from = split * SPLIT + warp * KEYS;
                const bool stays = split + KEY_PARTS < end_split;
                const int later = page_of(task, split + 2 * KEY_PARTS, own_table, warp, lane);
                wait_for_stream<1>();
                if (task.last >= from && task.first < from + KEYS) {
                    // Rows of this step go between keys and values that must have come.
                    wait_for_stream<0>();
                    __syncwarp();
                    const int end = min(task.last, from + KEYS - 1);
                    for (int key = max(task.first, from); key <= end; key++)
                        *(uint4 *)((lane < 16 ? keys : values) + (key - from) * STRIDE + d) =
                            *(const uint4 *)(fresh + ((key - task.first) * 2 + lane / 16) * STRIDE + d);
                }
                __syncwarp();
                float scores[2][4] = {};
                add_scores<0>(scores, queries_at, keys_at);
                __syncwarp();
                if (stays) copy_keys(keys_to, k_cache, task, split + KEY_PARTS, next_page, warp, lane);
                end_stream_group();
                u32 shares[2][2] = {};
                take_scores(sums, scores, shares, task, from, scale, lane);
                wait_for_stream<1>();
                __syncwarp();
                add_values<0>(sums.values, shares, values_at);
                multiply(sums.totals, shares[0][0], shares[0][1], shares[1][0], shares[1][1], ONES, ONES);
                __syncwarp();
                if (stays) copy_keys(keys_to + KEYS * STRIDE * 2, v_cache, task, split + KEY_PARTS, next_page, warp, lane);
                end_stream_group();
                next_page = later;
            }
            stamp(ROUTED);
            leave_sums(sums, (float *)keys, stats + warp * QUERIES, lane);
            __syncthreads();
            if (!may_hand_over) wait_for_cluster();
            may_hand_over = true;
            hand_over(task, part, (const float *)tiles, TILE / 2, stats, inbox, inbox_stats, arrival, warp, lane);
        }
        if (!may_hand_over) wait_for_cluster();
        stamp(FIRST_DONE);
        if (rank < OWNERS) {
            wait_for_bytes(arrival, parity);
            parity ^= 1;
            for (int i = thread; i < task.num_queries * (OWN / 2); i += WARPS * 32) {
                const int query = i / (OWN / 2), d = rank * OWN + i % (OWN / 2) * 2;
                add_parts(task, query, d, i == thread ? gate : gate_of(task, query, qkv), inbox, inbox_stats, out);
            }
        }
        if (COLS == 1) break;
        index += gridDim.x / CLUSTER;
        __syncthreads();
        if (find_task(task, index, rows, num_requests, before, thread) && rank < OWNERS)
            expect_bytes(arrival, expected_bytes(task));
        __syncthreads();
        goes_on = task.num_queries > 0;
        if (goes_on) arrive_at_cluster();  // the next task's parts may be handed over
    }
    stamp(ENDED);
}
