// Attention in steps of more than 16 rows: what attention.cu does, where there are many tasks.
//
// -D: as in attention.cuh.
// A program has a multiprocessor to itself, and several splits and parts, one after the other. So the warps' sums have room
// of their own, and a warp's next keys and values come while it has to do with those before, of whichever part they are.
#include "attention.cuh"
static_assert(LEAST == CLUSTER, "a crew is the cluster");

// The splits of a program in the order in which it takes them: part by part.
struct Walk {
    int part, split;

    METHOD bool is_over() const { return part >= KEY_PARTS; }
    METHOD void next(const Task &task) {
        split += KEY_PARTS;
        while (!is_over() && split >= task.low_split + task.num_splits) {
            part += CLUSTER;
            split = task.low_split + place_of(task, part);
        }
    }
};

CLUSTER_KERNEL(224, CLUSTER)
wide_attention(const u16 *qkv, u16 *out, const u16 *q_norm, const u16 *k_norm, const u16 *cos_table, const u16 *sin_table,
               u16 *k_cache, u16 *v_cache, const int *table, const int *positions, const int *row_start,
               const int *row_count, const int *num_requests_at, float eps, float scale, int table_stride) {
    EXTERN_SHARED(u16, tiles);
    float *all_sums = (float *)(tiles + WARPS * TILE);
    const Shared shared = laid_out((u16 *)(all_sums + WARPS * QUERIES * SUM_STRIDE));
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
        Walk now = {crew.rank, task.low_split + place_of(task, crew.rank) - KEY_PARTS};
        now.next(task);
        Walk then = now;
        then.next(task);
        const int page = page_of(task, now.split, own_table, warp, lane);
        int next_page = page_of(task, then.split, own_table, warp, lane);
        if (!now.is_over()) {
            copy_keys(places.keys_to, k_cache, task, now.split, page, warp, lane);
            end_stream_group();
            copy_keys(places.keys_to + KEYS * STRIDE * 2, v_cache, task, now.split, page, warp, lane);
            end_stream_group();
        }
        Items items;
        begin_items(items, task, crew, q_norm, k_norm, cos_table, sin_table, own_table, thread);
        if (!waited) {
            let_next_start();
            stamp(ASKED);
            wait_for_inputs();
            stamp(WAITED);
            waited = true;
        }
        const u16 gate = gate_of(task, thread >> (crew.own_bits - 1), qkv);
        finish_items(items, task, qkv, shared.queries, shared.fresh, k_cache, v_cache, eps, thread);
        __syncthreads();
        stamp(PREPARED);
        bool may_hand_over = false;
#pragma unroll 1
        while (!now.is_over()) {
            const int part = now.part;
            Sums sums = {};
#pragma unroll
            for (int half = 0; half < HALVES; half++) sums.peak[half] = -INF;
#pragma unroll 1
            do {
                const int from = now.split * SPLIT + warp * KEYS;
                Walk later = then;
                if (!then.is_over()) later.next(task);
                const int later_page = page_of(task, later.split, own_table, warp, lane);
                wait_for_stream<1>();
                insert_rows(task, from, places, shared.fresh, lane);
                float scores[2][4] = {};
                add_scores<0>(scores, places.queries_at, places.keys_at);
                __syncwarp();
                if (!then.is_over()) copy_keys(places.keys_to, k_cache, task, then.split, next_page, warp, lane);
                end_stream_group();
                u32 shares[2][2] = {};
                take_scores(sums, scores, shares, task, from, scale, lane);
                wait_for_stream<1>();
                __syncwarp();
                add_values<0>(sums.values, shares, places.values_at);
                multiply(sums.totals, shares[0][0], shares[0][1], shares[1][0], shares[1][1], ONES, ONES);
                __syncwarp();
                if (!then.is_over())
                    copy_keys(places.keys_to + KEYS * STRIDE * 2, v_cache, task, then.split, next_page, warp, lane);
                end_stream_group();
                now = then, then = later, next_page = later_page;
            } while (now.part == part);
            if (may_hand_over) __syncthreads();  // the warps' sums have been read
            leave_sums(sums, all_sums + warp * QUERIES * SUM_STRIDE, shared.stats + warp * QUERIES, lane);
            __syncthreads();
            if (!may_hand_over) wait_for_cluster();
            may_hand_over = true;
            hand_over(task, crew, part, all_sums, QUERIES * SUM_STRIDE, shared.stats, shared.inbox, shared.inbox_stats, shared.arrival, warp, lane);
        }
        if (!may_hand_over) wait_for_cluster();
        stamp(FIRST_DONE);
        wait_for_bytes(shared.arrival, parity);
        parity ^= 1;
        add_all_parts(shared, crew, gate, qkv, out, thread);
        index += crew.stride();
        goes_on = find_next(shared, crew, index, num_requests, before, thread);
    }
    stamp(ENDED);
}
