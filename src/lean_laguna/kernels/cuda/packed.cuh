// How 16 bytes of packed weights become what the matrix instruction takes: eight bfloat16 of one row at a time.
//
// A lane's 16 bytes are four words. A word holds four codes of 8 bits or eight of 4, n of them; element e lies at place
// e / 2 + (e % 2) * n / 2, so that one shift and two masks leave elements 2i and 2i + 1 in the halves of a word. Codes
// become bfloat16 by moving bits: what that leaves out is a power of two, which is in the scale. FP8 and integers are
// `code * scale` rounded once, as a weight decoded at load is. NVFP4's `code * scale` is exact; its divisor multiplies
// the sums (`FP4_UNIT` with it).
#pragma once
#include "common.cuh"

enum { PLAIN, FP8, INT8, FP4, INT4 };

DEVICE constexpr int bits_of(int format) { return format == PLAIN ? 16 : format == FP8 || format == INT8 ? 8 : 4; }
// Groups of eight columns in 16 bytes of a row.
DEVICE constexpr int chunks_of(int format) { return 16 / bits_of(format); }

#ifdef EMULATED
DEVICE u32 times2(u32 a, u32 b) { return pack(low(a) * low(b), high(a) * high(b)); }
DEVICE u32 plus2(u32 a, u32 b) { return pack(low(a) + low(b), high(a) + high(b)); }
#else
// Two bfloat16 at once, rounded once; numbers below 2^-126 are kept.
DEVICE u32 times2(u32 a, u32 b) {
    u32 v;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(0x80008000u));
    return v;
}
DEVICE u32 plus2(u32 a, u32 b) {
    u32 v;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return v;
}
#endif

// Elements 2i and 2i + 1 of a word.
template <int FORMAT> DEVICE u32 two_of(u32 word, int i, u32 scale) {
    if (FORMAT == FP8) {
        const u32 v = i ? word : word << 8;
        return times2((v & 0x80008000u) | ((v >> 4) & 0x07f007f0u), scale);
    }
    if (FORMAT == INT8) {
        const u32 v = i ? word >> 8 : word;
        return times2(plus2((v & 0x007f007fu) | 0x43004300u, (v & 0x00800080u) ^ 0xc380c380u), scale);
    }
    if (FORMAT == FP4) {
        const u32 v = word << (12 - 4 * i);
        return times2((v & 0x80008000u) | ((v >> 6) & 0x01c001c0u), scale);
    }
    return times2(plus2(((word >> (4 * i)) & 0x000f000fu) | 0x43004300u, 0xc308c308u), scale);
}

// A chunk's scale in both halves, of the item's word of scales: four bytes of NVFP4, exponent 5 bits and mantissa 3;
// else two bfloat16, of the first and of the last half of the item.
template <int FORMAT> DEVICE u32 scale_of(u32 scales, int chunk) {
    if (FORMAT == FP4) {
        const u32 byte = (scales >> (8 * chunk)) & 0xffu;
        return (byte | byte << 16) * 16 + 0x6d806d80u;
    }
    if (FORMAT == INT4) return chunk < 2 ? (scales & 0xffffu) | scales << 16 : scales >> 16 | (scales & 0xffff0000u);
    return scales;
}

// Eight weights of a row: a chunk of a lane's 16 bytes.
template <int FORMAT> DEVICE uint4 decoded(uint4 slot, u32 scales, int chunk) {
    if (FORMAT == PLAIN) return slot;
    const u32 by = scale_of<FORMAT>(scales, chunk);
    if (bits_of(FORMAT) == 8) {
        const u32 a = chunk ? slot.z : slot.x, b = chunk ? slot.w : slot.y;
        return make_uint4(two_of<FORMAT>(a, 0, by), two_of<FORMAT>(a, 1, by), two_of<FORMAT>(b, 0, by),
                          two_of<FORMAT>(b, 1, by));
    }
    const u32 word = chunk == 0 ? slot.x : chunk == 1 ? slot.y : chunk == 2 ? slot.z : slot.w;
    return make_uint4(two_of<FORMAT>(word, 0, by), two_of<FORMAT>(word, 1, by), two_of<FORMAT>(word, 2, by),
                      two_of<FORMAT>(word, 3, by));
}
