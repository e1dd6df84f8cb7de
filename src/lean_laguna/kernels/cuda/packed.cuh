// How 16 bytes of packed weights become what the matrix instruction takes: eight bfloat16 of one row at a time.
//
// A lane's 16 bytes are four words. A word holds four codes of 8 bits or eight of 4, their bits where `lane_order.py`
// puts them: a shift and a mask leave elements 2i and 2i + 1 in the halves of a word, floats with sign, exponent and
// mantissa where bfloat16 has them. What that leaves out is a power of two, which is in the scale. Integers, and FP8 where a
// product adds to the residual, are `code * scale` rounded once, as a weight decoded at load is; elsewhere FP8's scales
// multiply sums. NVFP4's `code * scale` is exact; its divisor multiplies the sums.
#pragma once
#include "packed_words.cuh"

enum { PLAIN, FP8, INT8, FP4, INT4 };

DEVICE constexpr int bits_of(int format) { return format == PLAIN ? 16 : format == FP8 || format == INT8 ? 8 : 4; }
// Groups of eight columns in 16 bytes of a row.
DEVICE constexpr int chunks_of(int format) { return 16 / bits_of(format); }

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

// Scales of a lane's item: NVFP4's four chunks have one each; else two bfloat16, of the first and of the last half.
template <int KIND> struct Scales {
    enum { WORDS = KIND == FP4 ? 2 : 1 };
    u32 word[WORDS];
    METHOD void load(const u32 *from) {
        if (KIND == FP4) {
            const uint2 both = *(const uint2 *)from;
            word[0] = both.x, word[WORDS - 1] = both.y;
        } else
            word[0] = *from;
    }
    METHOD u32 times(u32 codes, int chunk) const {
        const u32 own = word[KIND == FP4 ? chunk >> 1 : 0];
        if (KIND == FP8 || KIND == INT8) return times2(codes, own);
        return (KIND == FP4 ? chunk & 1 : chunk >> 1) ? times_half<true>(codes, own) : times_half<false>(codes, own);
    }
};

// Eight weights of a row: a chunk of a lane's 16 bytes.
template <int KIND> DEVICE uint4 decoded(uint4 slot, const Scales<KIND> &by, int chunk) {
    if (bits_of(KIND) == 8) {
        const u32 a = chunk ? slot.z : slot.x, b = chunk ? slot.w : slot.y;
        return make_uint4(by.times(two_codes<KIND>(a, 0), chunk), by.times(two_codes<KIND>(a, 1), chunk),
                          by.times(two_codes<KIND>(b, 0), chunk), by.times(two_codes<KIND>(b, 1), chunk));
    }
    const u32 word = chunk == 0 ? slot.x : chunk == 1 ? slot.y : chunk == 2 ? slot.z : slot.w;
    return make_uint4(by.times(two_codes<KIND>(word, 0), chunk), by.times(two_codes<KIND>(word, 1), chunk),
                      by.times(two_codes<KIND>(word, 2), chunk), by.times(two_codes<KIND>(word, 3), chunk));
}

// Registers of down, and of the kernels before and after it: 128 together.
#define DOWN_REGISTERS (bits_of(FORMAT) == 4 ? 48 : 64)
#define OTHER_REGISTERS (128 - DOWN_REGISTERS)
// Of the product before attention, whose 256 threads take 128 each.
#define BESIDE_ATTENTION 64
// What a kernel knows of its weights: FORMAT of the enumeration, TALL is log2 of the rows that share FP8's scales.
#ifndef TALL
#define TALL 0
#endif
DEVICE constexpr bool is_tall(int format) { return format == FP8 && TALL > 0; }

// FP8 before a product that does not add to the residual: codes go to the tensor cores as they are, in float16, and so do
// tokens; scales multiply the sums of each 128 columns.
DEVICE constexpr bool is_whole(int format) { return format == FP8; }
DEVICE uint4 whole_codes(uint4 slot, int chunk) {
    const u32 a = chunk ? slot.z : slot.x, b = chunk ? slot.w : slot.y;
    return make_uint4(two_bytes(a, false), two_bytes(a, true), two_bytes(b, false), two_bytes(b, true));
}
// Eight elements of a token as the product takes them.
template <int KIND> DEVICE void prepare(u16 *p) {
    if (!is_whole(KIND)) return;
    const uint4 v = *(const uint4 *)p;
    *(uint4 *)p = make_uint4(to_halves(v.x), to_halves(v.y), to_halves(v.z), to_halves(v.w));
}

// Weights lie by 8 rows, and there by items in the order of K: what a warp's lanes multiply at once, 16 bytes each
// (`lane_order.py`). Words of scales lie alike. Warps take parts of K.
template <int KIND, int LENGTH, int PARTS> struct Rows8 {
    enum {
        CHUNKS = chunks_of(KIND),
        ITEMS = LENGTH / PARTS / 32 / CHUNKS,
        CODES = LENGTH * bits_of(KIND),  // bytes of 8 rows
        WORDS = is_whole(KIND) ? (LENGTH + 127) / 128 * 16 : KIND == FP4 ? LENGTH : KIND == INT4 ? LENGTH / 4 : LENGTH / 2,
        BYTES = CODES + WORDS
    };
    // By one thread: block `i` of 8 rows, counted through a bank.
    static METHOD void ask(u8 *slot, const u8 *codes, const u8 *scales, size_t i, u64 *arrival) {
        expect_bytes(arrival, BYTES);
        copy_bulk(slot, codes + i * CODES, CODES, arrival);
        copy_bulk(slot + CODES, scales + i * WORDS, WORDS, arrival);
    }
    // A lane's word of an item counted through all warps.
    static METHOD int word_at(int item, int g, int t) {
        return KIND == FP4 ? ((item * 8 + g) * 2 + (t >> 1)) * 2 : item * 8 + g;
    }
    // Multiply this warp's part of two blocks, the 16 rows of the matrix instruction. `tokens` is this lane's place in the
    // row of its token, `stride` from a row to the next; of a token that there is not, anything: columns keep apart.
    template <int HALVES, bool ROLLED>
    static METHOD void multiply(float (&even)[HALVES][4], float (&odd)[HALVES][4], const u8 *first, const u8 *second,
                                const u16 *tokens, int stride, int warp) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        if constexpr (is_whole(KIND)) return multiply_whole<HALVES, ROLLED>(even, first, second, tokens, stride, warp);
#pragma unroll 4
        for (int i = 0; i < ITEMS; i++) {
            const int item = warp * ITEMS + i, word = word_at(item, g, t);
            const uint4 w = *(const uint4 *)(first + item * 512 + lane * 16);
            const uint4 w8 = *(const uint4 *)(second + item * 512 + lane * 16);
            Scales<KIND> by, by8;
            by.load((const u32 *)(first + CODES) + word);
            by8.load((const u32 *)(second + CODES) + word);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const uint4 a = decoded<KIND>(w, by, c), a8 = decoded<KIND>(w8, by8, c);
#pragma unroll
                for (int h = 0; h < HALVES; h++)
                    multiply_block(even[h], odd[h], a, a8, *(const uint4 *)(tokens + 8 * h * stride + (i * CHUNKS + c) * 32));
            }
        }
    }
    // ROLLED: with fewer registers.
    template <int HALVES, bool ROLLED>
    static METHOD void multiply_whole(float (&total)[HALVES][4], const u8 *first, const u8 *second, const u16 *tokens,
                                      int stride, int warp) {
        enum { GROUP = ITEMS > 1 ? 2 : 1 };  // items that share scales
        const int lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll
        for (int from = 0; from < ITEMS; from += GROUP) {
            float even[HALVES][4] = {}, odd[HALVES][4] = {};
            const int share = (warp * ITEMS + from) / 2 * 8 + g, last = from + (ROLLED ? unknown(GROUP) : GROUP);
            const float by = from_bf16(((const u16 *)(first + CODES))[share]);
            const float by8 = from_bf16(((const u16 *)(second + CODES))[share]);
#pragma unroll(ROLLED ? 1 : GROUP)
            for (int i = from; i < last; i++) {
                const int at = (warp * ITEMS + i) * 512 + lane * 16;
                const uint4 w = *(const uint4 *)(first + at), w8 = *(const uint4 *)(second + at);
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) {
                    const uint4 a = whole_codes(w, c), a8 = whole_codes(w8, c);
#pragma unroll
                    for (int h = 0; h < HALVES; h++) {
                        const uint4 b = *(const uint4 *)(tokens + 8 * h * stride + (i * CHUNKS + c) * 32);
                        multiply_halves(even[h], a.x, a8.x, a.y, a8.y, b.x, b.y);
                        multiply_halves(odd[h], a.z, a8.z, a.w, a8.w, b.z, b.w);
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < HALVES; h++)
#pragma unroll
                for (int j = 0; j < 4; j++) total[h][j] = fmaf(even[h][j] + odd[h][j], j < 2 ? by : by8, total[h][j]);
        }
    }
    // FP8 of a lone row: this warp's part of one block or of two, whose sums of rows lanes of t = 0 get. The last items are
    // read into registers, and `release` gives their place away before they are multiplied. Columns of tokens that there are
    // not, and a second block's rows where there is one, are anything: only the lanes of the first column load the token, as
    // shared memory has turns for all others.
    template <int MANY, class Release>
    static METHOD void multiply_lone(float (&total)[2], const u8 *first, const u8 *second, const u16 *tokens, int warp,
                                     Release release) {
        enum { GROUP = ITEMS > 1 ? 2 : 1, HELD = ITEMS < 4 / MANY ? ITEMS : 4 / MANY };
        const int lane = threadIdx.x & 31, g = lane >> 2;
        float even[4] = {}, odd[4] = {};
        uint4 x[2], open[1];
        leave_open(x), leave_open(open);
        auto codes_of = [&](uint4 (&w)[MANY], int i) {
#pragma unroll
            for (int b = 0; b < MANY; b++)
                w[b] = *(const uint4 *)((b ? second : first) + (warp * ITEMS + i) * 512 + lane * 16);
        };
        auto scales_of = [&](u16 (&by)[MANY], int i) {
#pragma unroll
            for (int b = 0; b < MANY; b++)
                by[b] = ((const u16 *)((b ? second : first) + CODES))[(warp * ITEMS + i) / 2 * 8 + g];
        };
        auto multiply_item = [&](const uint4 (&w)[MANY], int i) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const uint4 a = whole_codes(w[0], c), a8 = MANY > 1 ? whole_codes(w[MANY - 1], c) : open[0];
                load_if(x[c], tokens + (i * CHUNKS + c) * 32, lane < 4);
                multiply_halves(even, a.x, a8.x, a.y, a8.y, x[c].x, x[c].y);
                multiply_halves(odd, a.z, a8.z, a.w, a8.w, x[c].z, x[c].w);
            }
        };
        auto end_group = [&](const u16 (&by)[MANY]) {
#pragma unroll
            for (int b = 0; b < MANY; b++) total[b] = fmaf(even[2 * b] + odd[2 * b], from_bf16(by[b]), total[b]);
#pragma unroll
            for (int j = 0; j < 4; j++) even[j] = odd[j] = 0.0f;
        };
#pragma unroll
        for (int from = 0; from < ITEMS - HELD; from += GROUP) {
            u16 by[MANY];
            scales_of(by, from);
#pragma unroll 1
            for (int i = from; i < from + unknown(GROUP); i++) {
                uint4 w[MANY];
                codes_of(w, i);
                multiply_item(w, i);
            }
            end_group(by);
        }
        uint4 w[HELD][MANY];
        u16 by[HELD / GROUP][MANY];
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            codes_of(w[i], ITEMS - HELD + i);
            if (i % GROUP == 0) scales_of(by[i / GROUP], ITEMS - HELD + i);
        }
        release();
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            multiply_item(w[i], ITEMS - HELD + i);
            if (i % GROUP == GROUP - 1) end_group(by[i / GROUP]);
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
        STEP_WORDS = KIND == FP4 ? 128 : 32,  // bytes an item
        OWN_ONLY = !ALL && STEPS % 4 == 0,  // of scales that many rows share
        WARPS_HERE = ALL ? PARTS : 1,
        CODES = ITEMS * STEPS * 512 * WARPS_HERE,
        WORDS = is_tall(KIND) ? (OWN_ONLY ? STEPS * 4 : LENGTH / 16) : ITEMS * STEPS * STEP_WORDS * WARPS_HERE,
        BYTES = CODES + WORDS
    };
    // By one thread: rows of a pair of blocks, counted through a bank. Many small copies are slow to ask for.
    static METHOD void ask(u8 *slot, const u8 *codes, const u8 *scales, size_t pair, int warp, u64 *arrival) {
        expect_bytes(arrival, BYTES);
#pragma unroll
        for (int half = 0; half < (ALL ? 1 : ITEMS); half++) {
            const int here = ALL ? CODES : CODES / ITEMS, words_here = ALL ? WORDS : WORDS / ITEMS;
            const size_t at = ALL ? pair * ITEMS * PARTS * STEPS : ((pair * ITEMS + half) * PARTS + warp) * STEPS;
            copy_bulk(slot + half * here, codes + at * 512, here, arrival);
            if (!is_tall(KIND)) copy_bulk(slot + CODES + half * words_here, scales + at * STEP_WORDS, words_here, arrival);
        }
        const size_t row = pair >> (TALL > 4 ? TALL - 4 : 0);
        if (is_tall(KIND))
            copy_bulk(slot + CODES, scales + row * (LENGTH / 16) + (OWN_ONLY ? warp * WORDS : 0), WORDS, arrival);
    }
    // Items of a step, and their words of scales.
    static METHOD void take(uint4 (&w)[2], Scales<KIND> (&by)[2], const u8 *slot, int step, int warp, int lane) {
        const int g = lane >> 2, t = lane & 3;
        const u32 *words = (const u32 *)(slot + CODES);
#pragma unroll
        for (int half = 0; half < ITEMS; half++) {
            const int at = (ALL ? half * PARTS + warp : half) * STEPS + step;
            w[half] = *(const uint4 *)(slot + at * 512 + lane * 16);
            by[half].load(is_tall(KIND) ? words + (OWN_ONLY ? step : warp * STEPS + step)
                                        : words + at * (STEP_WORDS / 4) + (KIND == FP4 ? (g * 2 + (t >> 1)) * 2 : g));
        }
    }
    // Chunk c of a step's columns: the first 8 rows, or the 8 below.
    static METHOD uint4 chunk(const uint4 (&w)[2], const Scales<KIND> (&by)[2], int half, int c) {
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
            *(uint4 *)(own + k) = scaled(*(const uint4 *)(own + k), inverse, *(const uint4 *)(scale + k)), prepare<FORMAT>(own + k);
    }
    __syncthreads();
}

