// The experts of a chunk of a prompt: gate and up with SiLU, or down times the weight of each token.
//
// Two programs, of a cluster, take up to 256 rows of one expert and 256 columns of its weights, 64 of k at a time. Each asks
// for half of the weights, for both; rows, which lie anywhere, each copies itself: of every 64, the first and the third are
// the first program's. In each two warpgroups multiply 64 rows. Programs stay, and what the next rows need is on its way
// while sums are rounded and written. A row's sums run over k in one order, whichever rows are beside it.
#include "common.cuh"
#include "warpgroups.cuh"

#define SHARE 64                 // rows of a warpgroup
#define COLUMNS 256
#define DEPTH 64                 // of k at a time
#define PANEL (SHARE * DEPTH)    // values of a warpgroup's rows
#define STAGE (2 * PANEL + COLUMNS * DEPTH)
#define STEPS (K / DEPTH)
#define THREADS 384

enum { STAGES = 4, AHEAD = 8, PROGRAMS = CLUSTER, CONSUMER_WARPS = 8, PRODUCERS = 128 };

struct Ring {
    u64 filled[STAGES], left[STAGES];
};

struct Task {
    int expert, first, end, part;
};

DEVICE Task task_at(int index, const int *tiles) {
    const int tile = index / PER_TILE;
    return {tiles[tile], tiles[MAX_TILES + tile], tiles[2 * MAX_TILES + tile], index % PER_TILE};
}

// The first row of a share: those of a tile go to the programs by turns.
DEVICE int share_at(const Task &task, int rank, int group) { return task.first + SHARE * (rank + PROGRAMS * group); }

// Where a place among the sorted rows has what is multiplied.
DEVICE int source_row(int place, const int *pairs) {
#if UP
    return pairs[place] / A;
#else
    return place;
#endif
}

// Where the weights' rows of half of a task's columns begin.
DEVICE int weights_row(const Task &task, int half, int left) {
#if UP
    return task.expert * 2 * F + half * F + task.part * (COLUMNS / 2);
#else
    return task.expert * N + left + task.part * COLUMNS + half * (COLUMNS / 2);
#endif
}

DEVICE void produce(Ring *ring, u16 *stages, const u16 *x, const Map &map, const int *pairs, const int *tiles, int num_tasks,
                    int rank, int left) {
    const int thread = threadIdx.x, piece = thread % 8, row = thread / 8;
    int count = 0;
    for (int index = blockIdx.x / PROGRAMS; index < num_tasks; index += gridDim.x / PROGRAMS) {
        const Task task = task_at(index, tiles);
        const u16 *from[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int own = min(share_at(task, rank, i / 4) + row + 16 * (i % 4), task.end - 1);
            from[i] = x + (size_t)source_row(own, pairs) * K + 8 * piece;
        }
        const int next_row = weights_row(task_at(min(index + (int)gridDim.x / PROGRAMS, num_tasks - 1), tiles), rank, left);
        const bool has[2] = {share_at(task, rank, 0) < task.end, share_at(task, rank, 1) < task.end};
        for (int step = 0; step < STEPS; step++, count++) {
            const int stage = count % STAGES;
            u16 *to = stages + stage * STAGE;
            if (count >= STAGES) wait_for_turns(&ring->left[stage], (count / STAGES - 1) & 1);
            if (thread == 0) {
                if (step + AHEAD < STEPS) prefetch_rows(map, (step + AHEAD) * DEPTH, weights_row(task, rank, left));
                else if (index + gridDim.x / PROGRAMS < num_tasks)
                    prefetch_rows(map, (step + AHEAD - STEPS) * DEPTH, next_row);
                fill_by_maps(&ring->filled[stage], COLUMNS * DEPTH * 2);
                copy_rows(to + 2 * PANEL + rank * (COLUMNS / 2) * DEPTH, map, step * DEPTH, weights_row(task, rank, left),
                          &ring->filled[stage], 3);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int at = row + 16 * (i % 4);
                if (has[i / 4]) copy_async(to + i / 4 * PANEL + at * DEPTH + 8 * (piece ^ at % 8), from[i] + step * DEPTH, true);
            }
            fill_by_copies(&ring->filled[stage]);
        }
    }
}

#if UP
// SiLU of two, each step rounded.
DEVICE u32 opened(float a, float b) {
    a = rounded(a), b = rounded(b);
    return pair_of(quotient(a, 1.0f + __expf(-a)), quotient(b, 1.0f + __expf(-b)));
}
#endif

// A thread has, of two rows, eight columns of every 32.
DEVICE void store(const float (&d)[128], u16 *out, const float *weights, const int *pairs, const Task &task, int row, int t) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int place = row + 8 * r;
        if (place >= task.end) continue;
#if UP
        u16 *to = out + (size_t)place * F + task.part * (COLUMNS / 2) + 8 * t;
#else
        const int pair = pairs[place];
        const float weight = weights[pair];
        u16 *to = out + (size_t)pair * (PER_TILE * COLUMNS) + task.part * COLUMNS + 8 * t;
#endif
#pragma unroll
        for (int c = 0; c < (UP ? 4 : 8); c++) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = 16 * c + 4 * i + 2 * r;
#if UP
                v[i] = products(opened(d[at], d[at + 1]), pair_of(d[64 + at], d[64 + at + 1]));
#else
                v[i] = pair_of(d[at] * weight, d[at + 1] * weight);
#endif
            }
            *(uint4 *)(to + 32 * c) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

DEVICE void consume(Ring *ring, const u16 *stages, u16 *out, const float *weights, const int *pairs, const int *tiles,
                    int num_tasks, int rank) {
    const int group = threadIdx.x / 128 - 1, lane = threadIdx.x & 31;
    const int own_row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    float d[128];
    int count = 0;
    for (int index = blockIdx.x / PROGRAMS; index < num_tasks; index += gridDim.x / PROGRAMS) {
        const Task task = task_at(index, tiles);
        const int first = share_at(task, rank, group);
        if (first >= task.end) {  // others' rows alone
            for (int step = 0; step < STEPS; step++, count++) {
                wait_until_filled(&ring->filled[count % STAGES], count / STAGES & 1);
                if (lane < PROGRAMS) end_turn_at(&ring->left[count % STAGES], lane);
            }
            continue;
        }
        for (int step = 0; step < STEPS; step++, count++) {
            const int stage = count % STAGES;
            wait_until_filled(&ring->filled[stage], count / STAGES & 1);
            const Panel rows = panel_at(stages + stage * STAGE + group * PANEL), columns = panel_at(stages + stage * STAGE + 2 * PANEL);
            begin_products();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) multiply_panels(d, further(rows, k), further(columns, k), step > 0 || k > 0);
            end_products();
            // The step before is over: its stage may be filled anew.
            wait_for_products<1>();
            if (step > 0 && lane < PROGRAMS) end_turn_at(&ring->left[(count - 1) % STAGES], lane);
        }
        wait_for_products<0>();
        show_sums(d);
        if (lane < PROGRAMS) end_turn_at(&ring->left[(count - 1) % STAGES], lane);
        store(d, out, weights, pairs, task, first + own_row, lane % 4);
    }
}

extern "C" CLUSTERED(THREADS, PROGRAMS)
prompt_experts(const u16 *x, MAP_PARAMETER map, u16 *out, const float *weights, const int *pairs, const int *tiles,
               const int *num_tiles_at, int left) {
    EXTERN_SHARED(u8, bytes);
    u16 *stages = (u16 *)(((u64)bytes + 1023) / 1024 * 1024);
    Ring *ring = (Ring *)(stages + STAGES * STAGE);
    const int rank = blockIdx.x % PROGRAMS, num_tasks = *num_tiles_at * PER_TILE;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++)
            init_filled(&ring->filled[stage], PRODUCERS + 1), init_turns(&ring->left[stage], PROGRAMS * CONSUMER_WARPS);
        show_arrivals();
    }
    __syncthreads();
    sync_cluster();
    if (threadIdx.x < PRODUCERS) {
        leave_registers<88>();
        produce(ring, stages, x, map, pairs, tiles, num_tasks, rank, left);
    } else {
        take_registers<208>();
        consume(ring, stages, out, weights, pairs, tiles, num_tasks, rank);
    }
    sync_cluster();
}
