// What every kernel here is made of: streamed weights, one matrix instruction, early launch.
//
// A lane copies the fragments it multiplies into its own slots of a ring in shared memory, and reads them back
// itself: many bytes in flight, no registers held and no barrier.
// Tokens are the 16 rows of mma.m16n8k16 and 8 weight rows its columns, so a token's sums never meet another
// token's. The order of k inside a block of 32 is permuted alike for both operands: lane (g, t) holds eight
// consecutive elements of row g, and a 16-byte load is a fragment.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef EMULATED
#include "emulator.h"
#else
#define DEVICE __device__ __forceinline__
#define METHOD DEVICE
#define EXTERN_SHARED(T, NAME) extern __shared__ __align__(16) u8 shared_bytes[]; T *NAME = (T *)shared_bytes
#define KERNEL(THREADS, BLOCKS) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
#define CLUSTER_KERNEL(REGISTERS, SIZE) extern "C" __global__ void __cluster_dims__(SIZE, 1, 1) __maxnreg__(REGISTERS)

// How weights pass through L2, where small things then stay.
#define FIRST_TO_LEAVE 0x12f0000000000000ull

// 16 bytes of weights on their way into shared memory, or nothing; a group of its own either way.
DEVICE void stream(u16 *to, const u16 *from, bool wanted) {
    u32 at = (u32)__cvta_generic_to_shared(to);
    if (wanted)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
                     "l"(FIRST_TO_LEAVE) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Wait until at most `PENDING` of this thread's groups are on their way.
template <int PENDING> DEVICE void wait_for_stream() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Ask for a line of 128 bytes into L2: a hint, results never depend on it.
DEVICE void prefetch_line(const u16 *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// What other kernels of the step wrote: through L2 only, since L1 may hold what was there before.
DEVICE uint4 load_fresh(const void *p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE u32 load_fresh_pair(const u16 *p) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
DEVICE u16 load_fresh16(const u16 *p) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
DEVICE int load_fresh32(const int *p) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
// d += a (16 tokens x 16 k) * b (16 k x 8 weight rows), float32 sums.
DEVICE void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Four 8x8 tiles of two-byte elements, transposed: lane l gives the address of row l of 32. A constant offset, bytes, takes no
// register.
typedef u32 Place;
DEVICE Place place_in_shared(const void *p) { return (u32)__cvta_generic_to_shared(p); }
template <int OFFSET> DEVICE uint4 load_transposed(Place at) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4 + %5];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at), "n"(OFFSET) : "memory");
    return v;
}
// The same as they lie.
template <int OFFSET> DEVICE uint4 load_matrices(Place at) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4 + %5];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at), "n"(OFFSET) : "memory");
    return v;
}
template <int TO, int FROM> DEVICE void copy_async(Place to, const u16 *from, bool wanted) {
    int size = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16, %2;"
                 ::"r"(to), "l"(from), "r"(size), "n"(TO), "n"(FROM) : "memory");
}
#if __CUDA_ARCH__ >= 900
// Blocks of a cluster read each other's shared memory: the same place in block `rank`'s.
DEVICE u32 remote_address(const void *p, int rank) {
    u32 at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
    return at;
}
// Hand over to the same place in block `rank`'s shared memory; its arrival, expected so, counts the bytes.
DEVICE void send2(float2 *p, int rank, float2 v, u64 *arrival) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];"
                 ::"r"(remote_address(p, rank)), "f"(v.x), "f"(v.y), "r"(remote_address(arrival, rank)) : "memory");
}
DEVICE void send4(float4 *p, int rank, float4 v, u64 *arrival) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];"
                 ::"r"(remote_address(p, rank)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w),
                   "r"(remote_address(arrival, rank)) : "memory");
}
// Say that a block of the cluster has begun; nothing written before need be seen.
DEVICE void show_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
// A barrier of all threads of the cluster that have not left, in two halves or as one.
DEVICE void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void sync_cluster() { arrive_at_cluster(), wait_for_cluster(); }
#endif
// 16 bytes from memory to shared memory, or zeros where not `wanted`.
DEVICE void copy_async(u16 *to, const u16 *from, bool wanted) {
    u32 at = (u32)__cvta_generic_to_shared(to);
    int size = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(size) : "memory");
}
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Copies without a group of their own, and the end of a group, even an empty one.
DEVICE void end_stream_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
#if __CUDA_ARCH__ >= 900
// Whole rows into shared memory by the copy engine: one thread asks, and the queue of the multiprocessor's own loads stays
// free for the small ones that others wait for. An arrival counts the bytes of its current phase; it has been made and
// a barrier passed before anybody waits. What was read before a barrier may be written over after it.
DEVICE void init_arrival(u64 *arrival) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"((u32)__cvta_generic_to_shared(arrival)) : "memory");
}
// After all are made, by the thread that made them, before it asks for anything.
DEVICE void show_arrivals() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The phase is over when so many bytes have come.
DEVICE void expect_bytes(u64 *arrival, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"((u32)__cvta_generic_to_shared(arrival)), "r"(bytes) : "memory");
}
// A multiple of 16 bytes, both ends on 16; expected before.
DEVICE void copy_bulk(void *to, const void *from, u32 bytes, u64 *arrival) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes),
                   "r"((u32)__cvta_generic_to_shared(arrival)), "l"(FIRST_TO_LEAVE) : "memory");
}
// Turns at a place, which is over when `count` warps have ended theirs: by init_turns in place of init_arrival, and shown alike.
DEVICE void init_turns(u64 *turns, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(turns)), "r"(count) : "memory");
}
DEVICE void end_turn(u64 *turns) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"((u32)__cvta_generic_to_shared(turns)) : "memory");
}
// Wait until the phase of this parity is over: 0 for the first, 1 for the second, and so on.
DEVICE void wait_for_bytes(u64 *arrival, u32 parity) {
    asm volatile("{\n.reg .pred over;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
                 "@!over bra again;\n}" ::"r"((u32)__cvta_generic_to_shared(arrival)), "r"(parity) : "memory");
}
DEVICE void wait_for_turns(u64 *turns, u32 parity) { wait_for_bytes(turns, parity); }
#endif
// A barrier of a block's first threads, a whole number of warps.
DEVICE void sync_first(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }
DEVICE float quotient(float a, float b) { return __fdividef(a, b); }
// 2^x and its inverse by the hardware's tables; what is below 2^-126 is 0.
DEVICE float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float logarithm2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE u16 to_bf16(float x) {
    u16 v;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(x));
    return v;
}
DEVICE float from_bf16(u16 v) { return __uint_as_float((u32)v << 16); }
// Counters in shared memory. A warp's accesses to shared memory happen in their order, so whoever sees the sum sees
// what the adding warp wrote before.
DEVICE int max_over_warp(int v) { return __reduce_max_sync(0xffffffffu, v); }
DEVICE int min_over_warp(int v) { return __reduce_min_sync(0xffffffffu, v); }
DEVICE u32 votes(bool v) { return __ballot_sync(0xffffffffu, v); }
DEVICE float exchange(float v, int lanes) { return __shfl_xor_sync(0xffffffffu, v, lanes); }
DEVICE float from_lane(float v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
DEVICE int from_lane(int v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
#if __CUDA_ARCH__ >= 900
// Everything the kernel before wrote is there after this; nothing is written before it.
DEVICE void wait_for_inputs() {
#ifndef NO_WAITS  // a benchmark of what is left without
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void wait_for_inputs() {}
DEVICE void let_next_start() {}
#endif
#endif

// Where time goes, for benchmarks: each block's first thread notes when it was where, in nanoseconds.
enum { STARTED, ASKED, WAITED, PREPARED, ROUTED, FIRST_DONE, ENDED, PLACE, NUM_STAMPS };
#ifdef STAMPS
__device__ u64 stamps[STAMPS][NUM_STAMPS];
DEVICE void stamp(int place) {
    if (threadIdx.x != 0 || blockIdx.x >= STAMPS) return;
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    stamps[blockIdx.x][place] = now;
    if (place != STARTED) return;
    u32 multiprocessor;
    asm volatile("mov.u32 %0, %smid;" : "=r"(multiprocessor));
    stamps[blockIdx.x][PLACE] = multiprocessor;
}
#else
DEVICE void stamp(int) {}
#endif

DEVICE float low(u32 v) { return from_bf16((u16)(v & 0xffffu)); }
DEVICE float high(u32 v) { return from_bf16((u16)(v >> 16)); }
DEVICE float rounded(float x) { return from_bf16(to_bf16(x)); }
DEVICE u32 pack(float a, float b) { return (u32)to_bf16(a) | ((u32)to_bf16(b) << 16); }

DEVICE float sum_over_warp(float v) {
    for (int lanes = 16; lanes; lanes >>= 1) v += exchange(v, lanes);
    return v;
}
DEVICE float squares_of(uint4 v) {
    return low(v.x) * low(v.x) + high(v.x) * high(v.x) + low(v.y) * low(v.y) + high(v.y) * high(v.y) +
           low(v.z) * low(v.z) + high(v.z) * high(v.z) + low(v.w) * low(v.w) + high(v.w) * high(v.w);
}
DEVICE u32 scaled_pair(u32 v, float inverse, u32 by) {
    return pack(rounded(low(v) * inverse) * low(by), rounded(high(v) * inverse) * high(by));
}
// RMSNorm of eight elements, rounded before the weight and after it.
DEVICE uint4 scaled(uint4 v, float inverse, uint4 by) {
    return make_uint4(scaled_pair(v.x, inverse, by.x), scaled_pair(v.y, inverse, by.y),
                      scaled_pair(v.z, inverse, by.z), scaled_pair(v.w, inverse, by.w));
}
// Pieces of eight elements of a row of K that a lane holds, where each warp has a part of K.
#define OWN_PIECES(LENGTH, PARTS) (((LENGTH) / (PARTS) / 8 + 31) / 32)
// RMSNorm of one row by a whole block, into `to`: each warp its own part of K, for which it needs no barrier after this.
// `squares` has room for a float a piece. The sums are those of a warp that has the whole row.
template <int LENGTH, int PARTS>
DEVICE void normalise_row(const u16 *x, const uint4 (&by)[OWN_PIECES(LENGTH, PARTS)], u16 *to, float *squares, float eps) {
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * (LENGTH / PARTS / 8), count = LENGTH / PARTS / 8;
    uint4 pieces[OWN_PIECES(LENGTH, PARTS)];
#pragma unroll
    for (int i = 0; i < OWN_PIECES(LENGTH, PARTS); i++)
        if (i * 32 + lane < count) pieces[i] = load_fresh(x + (size_t)(first + i * 32 + lane) * 8);
#pragma unroll
    for (int i = 0; i < OWN_PIECES(LENGTH, PARTS); i++)
        if (i * 32 + lane < count) squares[first + i * 32 + lane] = squares_of(pieces[i]);
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < LENGTH / 256; i++) total += squares[i * 32 + lane];
    const float inverse = rsqrtf(sum_over_warp(total) / LENGTH + eps);
#pragma unroll
    for (int i = 0; i < OWN_PIECES(LENGTH, PARTS); i++)
        if (i * 32 + lane < count)
            *(uint4 *)(to + (first + i * 32 + lane) * 8) = scaled(pieces[i], inverse, by[i]);
    __syncwarp();
}
// Sixteen bytes of every 64 of rows that lie in shared memory at multiples of 128 bytes, in pairs: lanes of odd rows take
// the halves of 128 bytes in the other order, so that the eight lanes which are served at once use different banks.
DEVICE void load_pair(const u16 *row, bool is_odd, uint4 &w0, uint4 &w1) {
    const uint4 a = *(const uint4 *)(row + (is_odd ? 32 : 0)), b = *(const uint4 *)(row + (is_odd ? 0 : 32));
    w0 = is_odd ? b : a, w1 = is_odd ? a : b;
}
// A lane's pieces of eight weight rows of LENGTH that lie one after another in shared memory, of its warp's COUNT blocks of
// 32 columns: `take(j, piece)` of each.
template <int LENGTH, int COUNT, class Take> DEVICE void take_pieces(const u16 *rows, Take take) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u16 *own = rows + g * LENGTH + (threadIdx.x >> 5) * (COUNT * 32) + 8 * t;
#pragma unroll
    for (int j = 0; j < COUNT; j += 2) {
        uint4 w0, w1;
        if (j + 1 < COUNT)
            load_pair(own + j * 32, g & 1, w0, w1);
        else
            w0 = *(const uint4 *)(own + j * 32);
        take(j, w0);
        if (j + 1 < COUNT) take(j + 1, w1);
    }
}
// Two steps of k over a block of 32: two sums, so that they do not wait for each other.
DEVICE void multiply_block(float (&even)[4], float (&odd)[4], uint4 a, uint4 a8, uint4 w) {
    multiply(even, a.x, a8.x, a.y, a8.y, w.x, w.y);
    multiply(odd, a.z, a8.z, a.w, a8.w, w.z, w.w);
}
// log(1 + exp(x)): above 20 as PyTorch has it, x; where it is hardly more than exp(x), by its series.
#define LOG2_E 1.4426950408889634f
DEVICE float softplus(float x) {
    const float e = power2(x * LOG2_E);
    return x > 20.0f ? x : e < 0.01f ? e * (1.0f - e * (0.5f - e * (1.0f / 3.0f))) : logarithm2(1.0f + e) * (1.0f / LOG2_E);
}
// silu(gate) * up, rounded where Hugging Face rounds.
DEVICE u16 gated(float gate, float up) {
    gate = rounded(gate);
    float opened = rounded(quotient(gate, 1.0f + __expf(-gate)));
    return to_bf16(opened * rounded(up));
}
