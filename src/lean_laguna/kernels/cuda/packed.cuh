// How 16 bytes of packed weights become what the matrix instruction takes: eight bfloat16 of one row at a time.
//
// A lane's 16 bytes are four words. A word holds four codes of 8 bits or eight of 4, their bits where `lane_order.py`
// puts them: a shift and a mask leave elements 2i and 2i + 1 in the halves of a word, floats with sign, exponent and
// mantissa where bfloat16 has them. What that leaves out is a power of two, which is in the scale. FP8 and integers are
// `code * scale` rounded once, as a weight decoded at load is. NVFP4's `code * scale` is exact; its divisor multiplies
// the sums (`FP4_UNIT` with it).
#pragma once
#include "common.cuh"

enum { PLAIN, FP8, INT8, FP4, INT4 };

DEVICE constexpr int bits_of(int format) { return format == PLAIN ? 16 : format == FP8 || format == INT8 ? 8 : 4; }
// Groups of eight columns in 16 bytes of a row.
DEVICE constexpr int chunks_of(int format) { return 16 / bits_of(format); }

#ifdef EMULATED
#define DEVICE_METHOD
DEVICE u32 times2(u32 a, u32 b) { return pack(low(a) * low(b), high(a) * high(b)); }
DEVICE u32 plus2(u32 a, u32 b) { return pack(low(a) + low(b), high(a) + high(b)); }
DEVICE u32 bytes_of(u32 word, u32 which) {
    u32 v = 0;
    for (int i = 0; i < 4; i++) {
        const u32 at = which >> (4 * i) & 7;
        v |= (at < 4 ? word >> (8 * at) & 0xffu : 0) << (8 * i);
    }
    return v;
}
#else
#define DEVICE_METHOD __device__ __forceinline__
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
// Four bytes of a word, by hexadecimal digits from the last: 4 is a zero.
DEVICE u32 bytes_of(u32 word, u32 which) { return __byte_perm(word, 0, which); }
#endif

// Elements 2i and 2i + 1 of a word, before their scale.
template <int KIND> DEVICE u32 two_codes(u32 word, int i) {
    if (KIND == FP8)
        return i == 0 ? word & 0x87f087f0u : ((word << 4) & 0x80f080f0u) | ((word >> 4) & 0x07000700u);
    if (KIND == FP4) {
        if (i == 0) return (word & 0x81808180u) | ((word >> 8) & 0x00400040u);
        return (i == 1 ? word << 2 : i == 2 ? word << 6 : word << 12 | word >> 20) & 0x81c081c0u;
    }
    if (KIND == INT8) {
        const u32 v = i ? word >> 8 : word;
        return plus2((v & 0x007f007fu) | 0x43004300u, (v & 0x00800080u) ^ 0xc380c380u);
    }
    return plus2(((word >> (4 * i)) & 0x000f000fu) | 0x43004300u, 0xc308c308u);
}
template <int KIND> DEVICE u32 two_of(u32 word, int i, u32 scale) { return times2(two_codes<KIND>(word, i), scale); }

// A chunk's scale in both halves, of the item's word of scales: four bytes of NVFP4, exponent 5 bits and mantissa 3;
// else two bfloat16, of the first and of the last half of the item.
template <int KIND> DEVICE u32 scale_of(u32 scales, int chunk) {
    if (KIND == FP4) return bytes_of(scales, 0x4040u + 0x0101u * chunk) * 16 + 0x6d806d80u;
    if (KIND == INT4) return bytes_of(scales, chunk < 2 ? 0x1010u : 0x3232u);
    return scales;
}

// Eight weights of a row: a chunk of a lane's 16 bytes.
template <int KIND> DEVICE uint4 decoded(uint4 slot, u32 scales, int chunk) {
    if (KIND == PLAIN) return slot;
    const u32 by = scale_of<KIND>(scales, chunk);
    if (bits_of(KIND) == 8) {
        const u32 a = chunk ? slot.z : slot.x, b = chunk ? slot.w : slot.y;
        return make_uint4(two_of<KIND>(a, 0, by), two_of<KIND>(a, 1, by), two_of<KIND>(b, 0, by),
                          two_of<KIND>(b, 1, by));
    }
    const u32 word = chunk == 0 ? slot.x : chunk == 1 ? slot.y : chunk == 2 ? slot.z : slot.w;
    return make_uint4(two_of<KIND>(word, 0, by), two_of<KIND>(word, 1, by), two_of<KIND>(word, 2, by),
                      two_of<KIND>(word, 3, by));
}

// What a kernel knows of its weights: FORMAT of the enumeration, TALL is log2 of the rows that share FP8's scales.
#ifndef TALL
#define TALL 0
#endif

#ifdef EMULATED
DEVICE void stream_word(u32 *to, const u32 *from) { *to = *from; }
#else
// Four bytes on their way into shared memory, in the group that is committed next.
DEVICE void stream_word(u32 *to, const u32 *from) {
    const u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
}
#endif
// An item: 16 bytes of codes and, where packed, a word of scales; a group of its own.
template <int KIND>
DEVICE void stream_packed(u16 *to, u32 *word_to, const u16 *from, const u32 *word, bool wanted) {
    if (KIND != PLAIN && wanted) stream_word(word_to, word);
    stream(to, from, wanted);
}
// The same without a group of its own.
template <int KIND> DEVICE void copy_packed(u16 *to, u32 *word_to, const u16 *from, const u32 *word) {
    if (KIND != PLAIN) stream_word(word_to, word);
    copy_async(to, from, true);
}

// Where a lane's words of scales of a row of K columns start, in a warp's part; and from item to item.
template <int KIND, int LENGTH, int PARTS> DEVICE const u32 *words_of_row(const u32 *scales, size_t row, int warp, int t) {
    if (KIND == PLAIN) return scales;
    if (KIND == INT4) return scales + row * (LENGTH / 128) + warp * (LENGTH / PARTS / 128);
    if (KIND == FP4) return scales + row * (LENGTH / 64) + warp * (LENGTH / PARTS / 64) + (t >> 1);
    return scales + (KIND == FP8 ? row >> TALL : row) * (LENGTH / 64) + warp * (LENGTH / PARTS / 64);
}
DEVICE constexpr int words_an_item(int format) { return format == FP4 ? 2 : 1; }

// 16 rows of K columns as products that add to the residual take them: STEPS of COLUMNS chunks, of ITEMS each.
template <int KIND, int LENGTH, int PARTS> struct Pair {
    enum {
        BITS = bits_of(KIND),
        ITEMS = BITS == 4 ? 1 : 2,
        COLUMNS = BITS == 16 ? 1 : 2,
        STEPS = LENGTH / PARTS / 32 / COLUMNS,
        STEP = BITS == 4 ? 256 : 32,
        WORDS = KIND == FP4 ? 16 : KIND == INT4 ? 8 : 1
    };
    const u16 *from;
    const u32 *words;
    // `pair` counts through a bank.
    DEVICE_METHOD Pair(const u16 *weight, const u32 *scales, size_t pair, int warp, int g, int t) {
        if (BITS == 4) {
            from = weight + pair * (4 * LENGTH) + warp * (LENGTH / 2) + (g * 4 + t) * 8;
            words = scales + (pair * PARTS + warp) * (LENGTH / 512) * WORDS + (KIND == FP4 ? g * 2 + (t >> 1) : g);
        } else {
            from = weight + (pair * 16 + g) * (LENGTH * BITS / 16) + warp * (LENGTH / PARTS * BITS / 16) + 8 * t;
            words = words_of_row<KIND, LENGTH, PARTS>(scales, pair * 16 + g, warp, t);
        }
    }
    // Item `half` of a step: rows g or g + 8, or both.
    DEVICE_METHOD const u16 *codes(int step, int half) const { return from + step * STEP + half * (8 * LENGTH * BITS / 16); }
    DEVICE_METHOD const u32 *scales(int step, int half) const {
        const int below = KIND == FP8 && TALL ? 0 : 8 * (LENGTH / 64);
        return words + step * WORDS + half * below;
    }
};
// Multiply chunk c of a step's columns: 8 rows and the 8 below.
template <int KIND>
DEVICE void multiply_chunk(float (&even)[2][4], float (&odd)[2][4], uint4 a, uint4 a8, const uint4 (&w)[2],
                           const u32 (&by)[2], int c) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool is_one = bits_of(KIND) == 4;
        multiply_block(even[half], odd[half], a, a8,
                       decoded<KIND>(w[is_one ? 0 : half], by[is_one ? 0 : half], is_one ? 2 * half + c : c));
    }
}
