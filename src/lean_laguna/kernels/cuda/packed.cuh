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
DEVICE constexpr bool is_tall(int format) { return format == FP8 && TALL > 0; }

// Weights lie by 8 rows, and there by the parts of K that warps take and by items: what a warp's lanes multiply at once,
// 16 bytes each (`lane_order.py`). Words of scales lie alike.
template <int KIND, int LENGTH, int PARTS> struct Rows8 {
    enum {
        CHUNKS = chunks_of(KIND),
        ITEMS = LENGTH / PARTS / 32 / CHUNKS,
        CODES = LENGTH * bits_of(KIND),  // bytes of 8 rows
        WORDS = is_tall(KIND) ? LENGTH / 16 : KIND == INT4 ? LENGTH / 4 : LENGTH / 2
    };
    // Bytes from the start of the scales to those of block `i` of 8 rows.
    static DEVICE_METHOD size_t scales_at(size_t i) { return (is_tall(KIND) ? i >> (TALL > 3 ? TALL - 3 : 0) : i) * WORDS; }
    // A lane's word of an item counted through all warps.
    static DEVICE_METHOD int word_at(int item, int g, int t) {
        return KIND == FP4 ? (item * 8 + g) * 2 + (t >> 1) : is_tall(KIND) ? item : item * 8 + g;
    }
};

// Two blocks of 8 rows, the 16 rows of the matrix instruction, in a slot of shared memory that the copy engine fills.
template <int KIND, int LENGTH, int PARTS> struct Unit {
    using Own = Rows8<KIND, LENGTH, PARTS>;
    enum { BYTES = 2 * (Own::CODES + Own::WORDS) };
    // By one thread; NEXT: the second block follows the first.
    template <bool NEXT>
    static DEVICE_METHOD void ask(u8 *slot, const u8 *codes, const u8 *scales, size_t first, size_t second, u64 *arrival) {
        expect_bytes(arrival, BYTES);
        copy_bulk(slot, codes + first * Own::CODES, NEXT ? 2 * Own::CODES : Own::CODES, arrival);
        if (!NEXT) copy_bulk(slot + Own::CODES, codes + second * Own::CODES, Own::CODES, arrival);
        slot += 2 * Own::CODES;
        const bool is_one = NEXT && !is_tall(KIND);
        copy_bulk(slot, scales + Own::scales_at(first), is_one ? 2 * Own::WORDS : Own::WORDS, arrival);
        if (!is_one) copy_bulk(slot + Own::WORDS, scales + Own::scales_at(second), Own::WORDS, arrival);
    }
    // Multiply this warp's part. `tokens` is this lane's place in the row of its token, `stride` from a row to the next.
    template <int HALVES>
    static DEVICE_METHOD void multiply(float (&even)[HALVES][4], float (&odd)[HALVES][4], const u8 *slot,
                                       const u16 *tokens, int stride, int live) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < Own::ITEMS; i++) {
            const int item = warp * Own::ITEMS + i;
            const uint4 w = *(const uint4 *)(slot + item * 512 + lane * 16);
            const uint4 w8 = *(const uint4 *)(slot + Own::CODES + item * 512 + lane * 16);
            const u32 *words = (const u32 *)(slot + 2 * Own::CODES) + Own::word_at(item, g, t);
            const u32 by = words[0], by8 = words[Own::WORDS / 4];
#pragma unroll
            for (int c = 0; c < Own::CHUNKS; c++) {
                const uint4 a = decoded<KIND>(w, by, c), a8 = decoded<KIND>(w8, by8, c);
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    const uint4 b = g + 8 * h < live ? *(const uint4 *)(tokens + 8 * h * stride + (i * Own::CHUNKS + c) * 32)
                                                     : zero;
                    multiply_block(even[h], odd[h], a, a8, b);
                }
            }
        }
    }
};

// 16 rows as products that add to the residual take them: 4 bits by 16 rows, 8 bits by 8; a step is 64 columns of each.
// A slot holds one warp's part of K, or ALL warps'.
template <int KIND, int LENGTH, int PARTS, bool ALL> struct Pair16 {
    enum {
        IS_SMALL = bits_of(KIND) == 4,
        ITEMS = IS_SMALL ? 1 : 2,
        STEPS = LENGTH / PARTS / 64,
        STEP_WORDS = KIND == FP4 ? 64 : 32,  // bytes an item
        WARPS_HERE = ALL ? PARTS : 1,
        CODES = ITEMS * STEPS * 512 * WARPS_HERE,
        WORDS = is_tall(KIND) ? LENGTH / 16 : ITEMS * STEPS * STEP_WORDS * WARPS_HERE,
        BYTES = CODES + WORDS
    };
    // By one thread: rows of a pair of blocks, counted through a bank. Many small copies are slow to ask for.
    static DEVICE_METHOD void ask(u8 *slot, const u8 *codes, const u8 *scales, size_t pair, int warp, u64 *arrival) {
        expect_bytes(arrival, BYTES);
#pragma unroll
        for (int half = 0; half < (ALL ? 1 : ITEMS); half++) {
            const int here = ALL ? CODES : CODES / ITEMS, words_here = ALL ? WORDS : WORDS / ITEMS;
            const size_t at = ALL ? pair * ITEMS * PARTS * STEPS : ((pair * ITEMS + half) * PARTS + warp) * STEPS;
            copy_bulk(slot + half * here, codes + at * 512, here, arrival);
            if (!is_tall(KIND)) copy_bulk(slot + CODES + half * words_here, scales + at * STEP_WORDS, words_here, arrival);
        }
        if (is_tall(KIND)) copy_bulk(slot + CODES, scales + (pair >> (TALL > 4 ? TALL - 4 : 0)) * WORDS, WORDS, arrival);
    }
    // Items of a step, and their words of scales.
    static DEVICE_METHOD void take(uint4 (&w)[2], u32 (&by)[2], const u8 *slot, int step, int warp, int lane) {
        const int g = lane >> 2, t = lane & 3;
        const u32 *words = (const u32 *)(slot + CODES);
#pragma unroll
        for (int half = 0; half < ITEMS; half++) {
            const int at = (ALL ? half * PARTS + warp : half) * STEPS + step;
            w[half] = *(const uint4 *)(slot + at * 512 + lane * 16);
            by[half] = is_tall(KIND) ? words[warp * STEPS + step]
                                     : words[at * (STEP_WORDS / 4) + (KIND == FP4 ? g * 2 + (t >> 1) : g)];
        }
    }
    // Chunk c of a step's columns: the first 8 rows, or the 8 below.
    static DEVICE_METHOD uint4 chunk(const uint4 (&w)[2], const u32 (&by)[2], int half, int c) {
        return IS_SMALL ? decoded<KIND>(w[0], by[0], 2 * half + c) : decoded<KIND>(w[half], by[half], c);
    }
};

template <int HALVES> DEVICE void clear(float (&sums)[HALVES][4]) {
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[h][i] = 0.0f;
}
// A warp's sums of 16 weight rows and COLS tokens; tokens apart, so that lanes write to several banks.
#define SUM_STRIDE 18
template <int TOKENS, int HALVES>
DEVICE void leave_sums(float *to, const float (&even)[HALVES][4], const float (&odd)[HALVES][4]) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = 8 * h + 2 * t + (i & 1);
            if (token < TOKENS) to[token * SUM_STRIDE + g + (i < 2 ? 0 : 8)] = even[h][i] + odd[h][i];
        }
}
// RMSNorm of several rows, each by one warp, where they stay.
template <int LENGTH, int PARTS>
DEVICE void normalise_rows(const u16 *x, const u16 *scale, u16 *tokens, int live, float eps, int x_stride) {
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    for (int i = thread; i < live * (LENGTH / 8); i += PARTS * 32)
        copy_async(tokens + i / (LENGTH / 8) * (LENGTH + 8) + i % (LENGTH / 8) * 8,
                   x + (size_t)(i / (LENGTH / 8)) * x_stride + i % (LENGTH / 8) * 8, true);
    wait_for_copies();
    __syncthreads();
    for (int row = warp; row < live; row += PARTS) {
        u16 *own = tokens + row * (LENGTH + 8);
        float squares = 0.0f;
        for (int k = lane * 8; k < LENGTH; k += 256) squares += squares_of(*(const uint4 *)(own + k));
        const float inverse = rsqrtf(sum_over_warp(squares) / LENGTH + eps);
        for (int k = lane * 8; k < LENGTH; k += 256)
            *(uint4 *)(own + k) = scaled(*(const uint4 *)(own + k), inverse, *(const uint4 *)(scale + k));
    }
    __syncthreads();
}

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
