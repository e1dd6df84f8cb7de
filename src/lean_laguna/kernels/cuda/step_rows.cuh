// The products of normalised rows: q, k, v and gate; a dense layer's gate and up; router, shared and chosen experts.
#pragma once
#include "step_experts.cuh"

// Send a unit's results: of token and row n, or gate n and up n, of its 8 rows.
DEVICE void send_unit(const float *sums, int unit, const Layer &at, bool is_second, Self &self) {
    const bool is_gated = is_second && !(at.sparse && unit < E / 8);
    const int token = is_gated ? self.thread / 4 : self.thread / 8, n = self.thread % (is_gated ? 4 : 8);
    if (token >= self.live) return;
    u32 *to = self.mail + QKV_AT + (size_t)token * at.width + unit * 8;
    if (is_second && !at.sparse) to = self.mail + ACT_AT + (size_t)token * at.dense + unit * 4;
#if E
    if (is_second && at.sparse) {
        const int routed = unit - KNOWN;
        if (unit < E / 8)
            to = self.mail + SCORES_AT + token * E + unit * 8;
        else if (unit < KNOWN)
            to = self.mail + SHARED_ACT_AT + token * FS + (unit - E / 8) * 4;
        else {
            const int rank = self.s.routing.rank[routed / (F / 4)][token];
            if (rank == NOT_CHOSEN) return;
            to = self.mail + ACT_AT + (token * A + rank) * F + routed % (F / 4) * 4;
        }
    }
#endif
    const float y = added(sums + token * 8 + n, COLS * 8);
    store_mail1(to + n, is_gated ? tagged16(gated(y, added(sums + token * 8 + n + 4, COLS * 8)), self.tag)
                                 : tagged(y, self.tag));
}

// Multiply the block's units of a half layer by the tokens.
DEVICE void project(Tape &tape, const Tokens &x, const Layer &at, bool is_second, u64 *stamps, Self &self) {
    const bool is_sparse = is_second && at.sparse;
    int count = is_sparse ? KNOWN : is_second ? at.dense / 4 : at.width / 8;
    bool is_known = !is_sparse;
#pragma unroll 1
    for (int unit = self.block; ; unit += self.grid) {
#if E
        if (!is_known && unit >= count) {
            enter(self, stamps, ROUTE);
#ifdef AHEAD_QKV
            if (self.thread < AHEAD_QKV && self.layer + 1 < LAYERS) {
                const Layer &next = self.s.layers[self.layer + 1];
                const int ahead = self.block + self.thread * self.grid;
                if (ahead < next.width / 8) prefetch_bytes(next.qkv + (size_t)ahead * 8 * D, 8 * D * 2);
            }
#endif
            route(at, self);
            tape.catch_up(self);
            count = KNOWN + self.s.routing.num_slots * (F / 4);
            is_known = true;
        }
#endif
        if (unit >= count) break;
        send_unit(multiply_rows(tape, x, self), unit, at, is_second, self);
    }
}
