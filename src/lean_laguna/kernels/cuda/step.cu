// All layers of a step in one launch, from token ids to the final norm; one block a multiprocessor, all of them
// running at once. See tape.cuh for the weights and mail.cuh for how blocks meet.
#include "step_attention.cuh"
#include "step_rows.cuh"

// Copy what the step reads again and again into shared memory.
DEVICE void read_setting(const u8 *layers, const int *num_rows, const int *num_requests, const int *row_start,
                         const int *row_count, const int *positions, Shared &s) {
    for (int i = threadIdx.x; i < (int)(sizeof(Layer) * LAYERS / 16); i += THREADS)
        ((uint4 *)s.layers)[i] = ((const uint4 *)layers)[i];
    if (threadIdx.x < 16) {
        const int r = threadIdx.x, start = row_start[r];
        s.rows.start[r] = start, s.rows.count[r] = row_count[r];
        s.rows.first[r] = positions[min(max(start, 0), 15)];
    }
    if (threadIdx.x == 16) s.rows.live = min(num_rows[0], COLS), s.rows.requests = min(num_requests[0], 16);
    __syncthreads();
}

// Tags are 16 bits: before they run out, all mail is cleared and they start anew.
DEVICE void restart_tags(int mail_words, Self &self) {
    for (int i = self.block * THREADS + self.thread; i < mail_words; i += self.grid * THREADS)
        store_mail1(self.mail + i, 0);
    __threadfence();
    __syncthreads();
    if (self.thread == 0) {
        u32 *restarts = (u32 *)(self.state + RESTARTS);
        const u32 before = load_mail1(restarts);
        if (add_released(self.state + ARRIVED, 1) == self.grid - 1) {
            self.state[ARRIVED] = 0;
            __threadfence();
            store_mail1(restarts, before + 1);
        } else
            while (load_mail1(restarts) == before && may_poll(self)) {
            }
        __threadfence();
    }
    __syncthreads();
}

// The final norm of a row, by one block.
DEVICE void finish_row(int row, const u16 *norm, u16 *normed, float eps, Self &self) {
    const int lane = self.lane;
    uint4 v[(D + THREADS * 8 - 1) / (THREADS * 8)];
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < (int)(sizeof(v) / 16); n++) {
        const int column = (n * THREADS + self.thread) * 8;
        v[n] = make_uint4(0, 0, 0, 0);
        if (column < D) {
            const u32 *from = self.mail + HIDDEN_AT + row * D + column;
            const uint2 a = receive4(from, self), b = receive4(from + 4, self);
            v[n] = make_uint4(a.x, a.y, b.x, b.y);
        }
        squares += squares_of(v[n]);
    }
    __syncwarp();
    squares = sum_over_warp(squares);
    if (lane == 0) self.s.squares[self.warp] = squares;
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < WARPS; w++) total += self.s.squares[w];
    const float inverse = rsqrtf(total / D + eps);
#pragma unroll
    for (int n = 0; n < (int)(sizeof(v) / 16); n++) {
        const int column = (n * THREADS + self.thread) * 8;
        if (column < D) *(uint4 *)(normed + row * D + column) = scaled(v[n], inverse, *(const uint4 *)(norm + column));
    }
}

// Ask for the next layer's norms and router bias into L2, a line a block: they are too small to be on the tape, and the
// path from block to block would wait for memory at each of them.
DEVICE void prefetch_small(const Layer &next, Self &self) {
    const int norm = D / 64, head = P / 64;
#pragma unroll 1
    for (int line = self.block; line < 2 * norm + 2 * head + E / 32; line += self.grid) {
        int i = line;
        const u16 *from = next.input_norm;
        if (i >= norm) i -= norm, from = next.norm;
        if (i >= norm) i -= norm, from = next.q_norm;
        if (i >= head && from == next.q_norm) i -= head, from = next.k_norm;
        if (i >= head && from == next.k_norm) i -= head, from = (const u16 *)next.bias;
        if (from) prefetch_line(from + i * 64);
    }
}

// Half a layer: attention, or the part after it.
DEVICE void run_half(const Layer &at, bool is_second, const u16 *embed, const int *ids, Tape &tape, u32 *parts,
                     u32 serial, float eps, float scale, Self &self) {
    enter(self, is_second ? UP : QKV);
    const int before = tape.taken;
    if (!is_second && self.layer + 1 < LAYERS && self.thread == THREADS - 1)
        prefetch_small(self.s.layers[self.layer + 1], self);
    // The old keys of the block's first task: looked up while the rows come, copied while the weights do.
    Task task;
    Staged staged;
    const bool stages = !is_second && find_task(task, self.block, at, self.s.rows);
    if (!stages) task.first = task.from = task.to = task.request = task.head = 0;
    staged.find(task, at, task.from, stages, self);
#if E
    if (is_second && at.sparse) clear_routing(self);
#endif
    {
        Tokens x;
        receive_normed(x, self.mail + (is_second ? MIDDLE_AT : HIDDEN_AT), embed, ids,
                       is_second ? at.norm : at.input_norm, eps, self);
        mark(self, TOKENS_HERE);
        self.tag += !is_second;
        if (stages) staged.copy(task, at, self);
        project(tape, x, at, is_second, self);
    }
    if (!is_second) {
        enter(self, ATTEND);
        // The keys staged ahead belong to the group issued next after them.
        if (tape.taken - before >= GROUPS)
            wait_for_stream<GROUPS - 1>();
        else
            wait_for_copies();
        attend(at, parts, serial, eps, scale, self);
        enter(self, COMBINE);
        combine_all(at, parts, serial, self);
    }
    enter(self, is_second ? DOWN : OUT);
#if E
    if (is_second && at.sparse) {
        add_experts(tape, at, self);
        return;
    }
#endif
    project_add(tape, self.mail + (is_second ? ACT_AT : HEADS_AT), is_second ? at.dense : at.heads * P,
                is_second ? HIDDEN_AT : MIDDLE_AT, is_second ? &at : 0, self);
}

KERNEL(THREADS, 1)
step(const u8 *layers, u32 *mail, int mail_words, u32 *parts, int *state, u64 *stamps, const u16 *embed, const int *ids,
     const u16 *final_norm, u16 *normed, const int *num_rows, const int *num_requests, const int *row_start,
     const int *row_count, const int *positions, float eps, float scale) {
    EXTERN_SHARED(Shared, shared);
    Shared &s = *shared;
    read_setting(layers, num_rows, num_requests, row_start, row_count, positions, s);
    const int thread = threadIdx.x, lane = thread & 31, live = s.rows.live;
    if (live == 0) return;
    Self self = {s, thread, thread >> 5, lane, lane >> 2, lane & 3, (int)blockIdx.x, (int)gridDim.x, live,
                 (lane >> 2) < live, HIGH && (lane >> 2) + 8 < live, mail, state, 0, 0, 0, PATIENCE, 0, 0, stamps};
    Tape tape = {s, s.ring + thread * 8};
    if (thread == 0) s.routed = -1;
    if (thread < BUFFERS) s.filled[thread] = s.freed[thread] = 0;
    __syncthreads();
    tape.start(self);
    const u32 serial = (u32)state[SERIAL];
    u32 tags_used = (u32)state[TAGS_USED];
    const bool restarts = tags_used + LAYERS > 0xffff;
    for (int pair = self.block; pair < D / 16; pair += self.grid) {
        const int token = thread / 16;
        if (token < live)
            s.residual[(pair / self.grid) * (COLS * 16) + thread] =
                from_bf16(embed[(size_t)ids[token] * D + pair * 16 + thread % 16]);
    }
    if (restarts) {
        tags_used = 0;
        restart_tags(mail_words, self);
    }
    self.tag = tags_used;
#pragma unroll 1
    for (int half = 0; half < 2 * LAYERS; half++) {
        self.layer = half / 2;
        run_half(s.layers[half / 2], half % 2, half == 0 ? embed : 0, ids, tape, parts, serial + 1 + half / 2,
                 eps, scale, self);
    }
    enter(self, NORM);
    for (int row = self.block; row < live; row += self.grid) {
        __syncthreads();
        finish_row(row, final_norm, normed, eps, self);
    }
    // All blocks have read these: the last layer could not have ended without them.
    if (self.block == 0 && thread == 0)
        state[TAGS_USED] = (int)(tags_used + LAYERS), state[SERIAL] = (int)(serial + LAYERS);
    wait_for_copies();
}
