// Attention of decode and verify rows over the paged cache: norm, rotation and KV append on the way in.
//
// -D: as in attention.cuh.
#include "attention.cuh"

CLUSTER_KERNEL(128, CLUSTER)
attention(const u16 *qkv, u16 *out, const u16 *q_norm, const u16 *k_norm, const u16 *cos_table, const u16 *sin_table,
          u16 *k_cache, u16 *v_cache, const int *table, const int *positions, const int *row_start,
          const int *row_count, const int *num_requests_at, float eps, float scale, int table_stride) {
    EXTERN_SHARED(u16, tiles);
    const Shared shared = laid_out(tiles + WARPS * TILE);
    const Task &task = shared.task;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const Places places = places_of(tiles, shared.queries, warp, lane);
    stamp(STARTED);
    const int num_requests = load_fresh32(num_requests_at);
    read_rows(shared.rows, row_count, row_start, positions, thread);
    const Crew crew = crew_of(shared.rows, num_requests);
    int index = crew.first_task();
    const int before = tasks_before(shared.rows, num_requests, thread);
    find_first(shared, crew, index, num_requests, before, thread);
    if (task.num_queries == 0) {
        leave_room();
        return;
    }
    show_cluster();  // parts may be handed over
    int parity = 0;
    bool waited = false;
    for (bool goes_on = true; goes_on;) {
        const int *own_table = table + (size_t)task.request * table_stride;
        const int end_split = task.low_split + task.num_splits;
        u16 gate = 0;
        bool may_hand_over = false;
#pragma unroll 1
        for (int part = crew.rank; part < KEY_PARTS; part += crew.size) {
            int split = task.low_split + place_of(task, part), next_page = 0;
            const bool is_there = split < end_split;
            if (part != crew.rank && is_there) __syncthreads();  // the warps' sums have been read
            if (is_there) {
                const int page = page_of(task, split, own_table, warp, lane);
                next_page = page_of(task, split + KEY_PARTS, own_table, warp, lane);
                copy_keys(places.keys_to, k_cache, task, split, page, warp, lane);
                end_stream_group();
                copy_keys(places.keys_to + KEYS * STRIDE * 2, v_cache, task, split, page, warp, lane);
                end_stream_group();
            }
            if (part == crew.rank) {
                Items items;
                begin_items(items, task, crew, q_norm, k_norm, cos_table, sin_table, own_table, thread);
                if (!waited) {
                    let_next_start();
                    stamp(ASKED);
                    wait_for_inputs();
                    stamp(WAITED);
                    waited = true;
                }
                gate = gate_of(task, thread >> (crew.own_bits - 1), qkv);
                finish_items(items, task, qkv, shared.queries, shared.fresh, k_cache, v_cache, eps, thread);
                __syncthreads();
                stamp(PREPARED);
            }
            if (!is_there) continue;
            if (LEAST < KEY_PARTS && part + crew.size < KEY_PARTS) {
                const int next = task.low_split + place_of(task, part + crew.size);
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
                insert_rows(task, from, places, shared.fresh, lane);
                float scores[2][4] = {};
                add_scores<0>(scores, places.queries_at, places.keys_at);
                __syncwarp();
                if (stays) copy_keys(places.keys_to, k_cache, task, split + KEY_PARTS, next_page, warp, lane);
                end_stream_group();
                u32 shares[2][2] = {};
                take_scores(sums, scores, shares, task, from, scale, lane);
                wait_for_stream<1>();
                __syncwarp();
                add_values<0>(sums.values, shares, places.values_at);
                multiply(sums.totals, shares[0][0], shares[0][1], shares[1][0], shares[1][1], ONES, ONES);
                __syncwarp();
                if (stays) copy_keys(places.keys_to + KEYS * STRIDE * 2, v_cache, task, split + KEY_PARTS, next_page, warp, lane);
                end_stream_group();
                next_page = later;
            }
            stamp(ROUTED);
            leave_sums(sums, (float *)places.keys, shared.stats + warp * QUERIES, lane);
            __syncthreads();
            if (!may_hand_over) wait_for_cluster();
            may_hand_over = true;
            hand_over(task, crew, part, (const float *)tiles, TILE / 2, shared.stats, shared.inbox, shared.inbox_stats, shared.arrival, warp, lane);
        }
        if (!may_hand_over) wait_for_cluster();
        stamp(FIRST_DONE);
        wait_for_bytes(shared.arrival, parity);
        parity ^= 1;
        add_all_parts(shared, crew, gate, qkv, out, thread);
        if (COLS == 1) break;
        index += crew.stride();
        goes_on = find_next(shared, crew, index, num_requests, before, thread);
    }
    stamp(ENDED);
}
