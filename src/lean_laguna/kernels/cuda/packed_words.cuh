// What hardware does with the two numbers in a word, for packed weights and the tokens they meet; twins for the emulator.
#pragma once
#include "common.cuh"

#ifdef EMULATED
#define CAPPED_KERNEL(REGISTERS) extern "C" void
DEVICE u32 times2(u32 a, u32 b) { return pack(low(a) * low(b), high(a) * high(b)); }
DEVICE u32 plus2(u32 a, u32 b) { return pack(low(a) + low(b), high(a) + high(b)); }
template <bool UPPER> DEVICE u32 times_half(u32 a, u32 b) {
    const float by = UPPER ? high(b) : low(b);
    return pack(low(a) * by, high(a) * by);
}
// Halves are bfloat16 here: numbers of eight bits, and codes, are the same.
DEVICE u32 two_bytes(u32 word, bool upper) {
    float v[2];
    for (int i = 0; i < 2; i++) {
        const u32 code = word >> (16 * upper + 8 * i) & 0xffu, size = code & 0x7fu;
        v[i] = from_bf16((u16)((code & 0x80u) << 8 | size << 4)) * 0x1p120f;
    }
    return pack(v[0], v[1]);
}
DEVICE u32 to_halves(u32 v) { return v; }
DEVICE void multiply_halves(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiply(d, a0, a1, a2, a3, b0, b1);
}
DEVICE int unknown(int v) { return v; }
template <int COUNT> DEVICE void leave_open(uint4 (&v)[COUNT]) { memset(v, 0, sizeof v); }
DEVICE void load_if(uint4 &v, const u16 *p, bool wanted) {
    if (wanted) v = *(const uint4 *)p;
}
static emulator::Meeting teams[16];
DEVICE void sync_team(int team, int threads) { emulator::meet(teams[team], threads); }
#else
// So few registers a thread that the kernels before and after fit beside it: 128 for two of them, with 512 threads each.
#define CAPPED_KERNEL(REGISTERS) extern "C" __global__ void __maxnreg__(REGISTERS)
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
// The same by one half of `b`.
template <bool UPPER> DEVICE u32 times_half(u32 a, u32 b) {
    u32 v;
    if (UPPER)
        asm("{.reg .b16 l, h; .reg .b32 both; mov.b32 {l, h}, %2; mov.b32 both, {h, h}; fma.rn.bf16x2 %0, %1, both, %3;}"
            : "=r"(v) : "r"(a), "r"(b), "r"(0x80008000u));
    else
        asm("{.reg .b16 l, h; .reg .b32 both; mov.b32 {l, h}, %2; mov.b32 both, {l, l}; fma.rn.bf16x2 %0, %1, both, %3;}"
            : "=r"(v) : "r"(a), "r"(b), "r"(0x80008000u));
    return v;
}
// Two FP8 codes as float16.
DEVICE u32 two_bytes(u32 word, bool upper) {
    u32 v;
    if (upper)
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(v) : "r"(word));
    else
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(v) : "r"(word));
    return v;
}
// Two bfloat16 as float16: exact from 2^-17 on. A row after its norm is far below the largest.
DEVICE u32 to_halves(u32 v) {
    const float most = 65504.0f, a = fminf(fmaxf(low(v), -most), most), b = fminf(fmaxf(high(v), -most), most);
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
    return y;
}
// As `multiply`, of float16.
DEVICE void multiply_halves(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// A number of which the compiler knows nothing, so that it prepares nothing for it in registers.
DEVICE int unknown(int v) {
    asm volatile("" : "+r"(v));
    return v;
}
// Anything, for which no instruction is spent.
template <int COUNT> DEVICE void leave_open(uint4 (&v)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w));
}
// 16 bytes of shared memory, or what was there: lanes that want none cost no turn of its banks.
DEVICE void load_if(uint4 &v, const u16 *p, bool wanted) {
    asm volatile("{.reg .pred wanted; setp.ne.s32 wanted, %5, 0; @wanted ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
                 : "r"((u32)__cvta_generic_to_shared(p)), "r"((int)wanted) : "memory");
}
// A barrier of the warps of one team.
DEVICE void sync_team(int team, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory"); }
#endif
