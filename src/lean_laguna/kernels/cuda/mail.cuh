// Blocks hand each other results through tagged words, without barriers between them: whoever needs an element polls
// it until it has the tag of this layer. A word arrives whole, so an element that has the tag is there.
#pragma once
#include "step_types.cuh"

DEVICE u32 tagged(float x, u32 tag) { return ((u32)to_bf16(x) << 16) | tag; }
DEVICE u32 tagged16(u16 x, u32 tag) { return ((u32)x << 16) | tag; }
DEVICE float untagged(u32 v) { return __uint_as_float(v & 0xffff0000u); }
DEVICE u32 differing(uint4 v, u32 tag) { return ((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & 0xffffu; }
// Eight elements without their tags.
DEVICE uint4 joined(uint4 a, uint4 b) {
    return make_uint4(high_halves(a.x, a.y), high_halves(a.z, a.w), high_halves(b.x, b.y), high_halves(b.z, b.w));
}
DEVICE uint2 joined(uint4 a) { return make_uint2(high_halves(a.x, a.y), high_halves(a.z, a.w)); }

// One more poll. False when patience is over: then something is broken, the state says where, and the step ends.
DEVICE bool may_poll(Self &self) {
    relax();
    if (--self.patience > 0) return true;
    if (self.patience == 0 && exchange_int(self.state + STUCK, 1) == 0) {
        self.state[STUCK_BLOCK] = self.block, self.state[STUCK_LAYER] = self.layer;
        self.state[STUCK_PHASE] = self.phase, self.state[STUCK_THREAD] = self.thread;
    }
    self.patience = 0;
    return false;
}

// Four elements, loaded once already, polled.
DEVICE uint2 settled4(uint4 v, const u32 *from, Self &self) {
    while (differing(v, self.tag) && may_poll(self)) v = load_mail(from);
    return joined(v);
}
DEVICE uint2 receive4(const u32 *from, Self &self) { return settled4(load_mail(from), from, self); }
// Receive rows of a warp's columns into shared memory: element (row, column) at row * stride + column. One copy of it
// for all who receive: what a layer runs must fit the instruction cache. Returns what is left of the patience.
template <int BATCHED>
NOT_INLINED int receive_part(u16 *to, int stride, const u32 *from, int row_words, int rows, int columns, u32 tag,
                             int patience) {
    // Pieces of eight columns, row by row; the division is exact for so few.
    const int across = columns / 8, count = rows * across;
    const u32 inverse = (1u << 20) / across + 1;
#pragma unroll 1
    for (int first = threadIdx.x & 31; first - (int)(threadIdx.x & 31) < count; first += 32 * BATCHED) {
        uint4 v[2 * BATCHED];
        u32 differs;
        do {
            differs = 0;
#pragma unroll
            for (int i = 0; i < BATCHED; i++) {
                const int piece = first + i * 32, row = (piece * inverse) >> 20;
                v[2 * i] = v[2 * i + 1] = make_uint4(tag, tag, tag, tag);
                if (piece >= count) continue;
                const u32 *at = from + row * row_words + (piece - row * across) * 8;
                v[2 * i] = load_mail(at), v[2 * i + 1] = load_mail(at + 4);
            }
#pragma unroll
            for (int i = 0; i < 2 * BATCHED; i++) differs |= differing(v[i], tag);
            relax();
        } while (differs && --patience > 0);
#pragma unroll
        for (int i = 0; i < BATCHED; i++) {
            const int piece = first + i * 32, row = (piece * inverse) >> 20;
            if (piece < count)
                *(uint4 *)(to + row * stride + (piece - row * across) * 8) = joined(v[2 * i], v[2 * i + 1]);
        }
    }
    __syncwarp();
    return patience;
}
DEVICE void receive_rows(u16 *to, int stride, const u32 *from, int row_words, int rows, int columns, Self &self) {
    // Few pieces: few instructions, which is what counts then; many: many loads on their way.
    const int left = rows * columns <= 2048
                         ? receive_part<2>(to, stride, from, row_words, rows, columns, self.tag, self.patience)
                         : receive_part<8>(to, stride, from, row_words, rows, columns, self.tag, self.patience);
    if (left <= 0) self.patience = 1, may_poll(self);
    else self.patience = left;
}

// Remember when this was, where a step is timed.
DEVICE void mark(Self &self, int what) {
#ifdef TIMED
    if (self.thread == 0) self.stamps[((size_t)self.block * LAYERS + self.layer) * STAMPS + what] = clock64();
#endif
}
// A phase begins.
DEVICE void enter(Self &self, int phase) {
    self.phase = phase;
    forget(self.thread), forget(self.mail);
    self.warp = self.thread >> 5, self.lane = self.thread & 31, self.g = self.lane >> 2, self.t = self.lane & 3;
    mark(self, phase);
}
