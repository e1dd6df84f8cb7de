// The products of normalised rows: q, k, v and gate; a dense layer's gate and up; router, shared and chosen experts.
#pragma once
#include "step_experts.cuh"

// Where a token's results of a unit go, and whether it has any.
DEVICE u32 *place_of_unit(int unit, int token, const Layer &at, bool is_second, Self &self) {
    if (!is_second) return self.mail + QKV_AT + (size_t)token * at.width + unit * 8;
    if (!at.sparse) return self.mail + ACT_AT + (size_t)token * at.dense + unit * 4;
#if E
    const int routed = unit - KNOWN;
    if (unit < E / 8) return self.mail + SCORES_AT + token * E + unit * 8;
    if (unit < KNOWN) return self.mail + ACT_AT + (token * (A + 1) + A) * F + (unit - E / 8) * 4;
    const int rank = self.s.routing.rank[routed / (F / 4)][token];
    return rank == NOT_CHOSEN ? 0 : self.mail + ACT_AT + (token * (A + 1) + rank) * F + routed % (F / 4) * 4;
#else
    return 0;
#endif
}

// Add a unit's sums and send them: of token and row n, or gate n and up n, of its 8 rows; a warp's work.
DEVICE void send_unit(int number, int unit, const Layer &at, bool is_second, Self &self) {
    const float *sums = wait_for_sums(number, self);
    const bool is_gated = is_second && !(at.sparse && unit < E / 8);
    const int columns = is_gated ? 4 : 8, n = self.lane % columns;
#pragma unroll 1
    for (int token = self.lane / columns; token < self.live; token += 32 / columns) {
        u32 *to = place_of_unit(unit, token, at, is_second, self);
        if (!to) continue;
        const float y = added(sums + token * 8 + n, COLS * 8);
        store_mail1(to + n, is_gated ? tagged16(gated(y, added(sums + token * 8 + n + 4, COLS * 8)), self.tag)
                                     : tagged(y, self.tag));
    }
    free_sums(number, self);
}

// Multiply the block's units of a half layer by the tokens.
DEVICE void project(Tape &tape, const Tokens &x, const Layer &at, bool is_second, Self &self) {
    const bool is_sparse = is_second && at.sparse;
    int count = is_sparse ? KNOWN : is_second ? at.dense / 4 : at.width / 8;
    bool is_known = !is_sparse;
    // The unit whose sums this warp adds next, and the number it had.
    int pending = -1, number = 0;
#pragma unroll 1
    for (int unit = self.block; ; unit += self.grid) {
#if E
        if (!is_known && unit >= count) {
            enter(self, ROUTE);
            route(at, self);
            mark(self, TABLES_DONE);
            tape.catch_up(self);
            count = KNOWN + self.s.routing.num_slots * (F / 4);
            is_known = true;
        }
#endif
        const bool is_over = unit >= count;
        if (!is_over) {
            multiply_rows(tape, x, self);
            if ((self.units - 1) % WARPS == self.warp) pending = unit, number = self.units - 1;
        }
        // All blocks wait for the router's units.
        if (pending >= 0 && (is_over || self.units - 1 - number >= LATER || (is_sparse && pending < KNOWN))) {
            send_unit(number, pending, at, is_second, self);
            pending = -1;
        }
        if (is_over) break;
    }
}
