// Runs a CUDA kernel of this project on a CPU, one block after another: a fiber a thread, barriers and warp
// operations as meeting points. For checking logic, not timing; only what the kernels use is here, and what does not
// follow a kernel in runtime.cpp, which is compiled once.
#pragma once
#include "standard.h"

using std::max;
using std::min;

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {
struct Fiber {
    ucontext_t context;  // for the first entry; from then on jumps, which leave the signal mask alone
    jmp_buf at;
    std::vector<char> stack;
    bool is_started, is_done;
    const int *watched;  // while it holds what was seen, there is no need to look in
    int seen;
};
struct Meeting { int waiting = 0, round = 0; };
struct Dim { int x; };
extern std::vector<Fiber> fibers;
extern std::vector<Meeting> warps, blocks, firsts;
extern Meeting cluster;
extern jmp_buf scheduler;
// Blocks of a cluster run side by side; `shared_pitch` bytes from one's shared memory to the next one's.
extern int current, num_threads, block_index, num_blocks, num_alive, shared_pitch;
extern std::vector<u8> shared;
struct Lane { u32 a[4], b[2]; float f; int i; const u16 *p; };
extern std::vector<Lane> lanes;
extern const char *failure;  // what would end a kernel on a card, or might
void run(int grid, int block_threads, int shared_size, int cluster_size, void (*kernel)(void **), void **args);

static inline void pause() {
    if (_setjmp(fibers[current].at) == 0) _longjmp(scheduler, 1);
}
static inline void meet(Meeting &m, int size) {
    const int round = m.round;
    if (++m.waiting == size) {
        m.waiting = 0;
        m.round++;
    } else {
        Fiber &own = fibers[current];
        own.watched = &m.round, own.seen = round;
        pause();
        own.watched = nullptr;
    }
}
static inline void meet_warp() { meet(warps[current / 32], 32); }
void arrive_at_cluster();
void wait_for_cluster();
template <class... Types, size_t... I>
static void call(void (*kernel)(Types...), void **args, std::index_sequence<I...>) { kernel(*(Types *)args[I]...); }
template <class... Types> static void call(void (*kernel)(Types...), void **args) {
    call(kernel, args, std::index_sequence_for<Types...>{});
}
template <class T> static T gathered(T Lane::*field, T own, int from) {
    lanes[current].*field = own;
    meet_warp();
    T v = lanes[current / 32 * 32 + from].*field;
    meet_warp();
    return v;
}
}  // namespace emulator

#define DEVICE static inline
#define METHOD inline
#define KERNEL(THREADS, BLOCKS) extern "C" void
#define CLUSTER_KERNEL(REGISTERS, SIZE) extern "C" void
#ifndef CLUSTER
#define CLUSTER 1
#endif
#define EXTERN_SHARED(T, NAME)                                                      \
    T *NAME = (T *)(((uintptr_t)emulator::shared.data() + 15) / 16 * 16 +           \
                    emulator::current / emulator::num_threads * emulator::shared_pitch)
#define SEEN __attribute__((visibility("default")))
#define EMULATE(NAME)                                                                          \
    extern "C" SEEN const char *emulate(int grid, int threads, int shared_size, void **args) { \
        auto kernel = [](void **args) { emulator::call(NAME, args); };                         \
        emulator::run(grid, threads, shared_size, CLUSTER, kernel, args);                      \
        return emulator::failure;                                                              \
    }
#define threadIdx (emulator::Dim{emulator::current % emulator::num_threads})
#define blockIdx (emulator::Dim{emulator::block_index + emulator::current / emulator::num_threads})
#define blockDim (emulator::Dim{emulator::num_threads})
#define gridDim (emulator::Dim{emulator::num_blocks})

static inline void __syncthreads() {
    emulator::meet(emulator::blocks[emulator::current / emulator::num_threads], emulator::num_threads);
}
using emulator::arrive_at_cluster;
using emulator::wait_for_cluster;
static inline void __syncwarp() { emulator::meet_warp(); }
static inline void __threadfence() {}
static inline u32 atomicOr(u32 *p, u32 v) { u32 old = *p; *p |= v; return old; }
static inline int atomicAdd(int *p, int v) { int old = *p; *p += v; return old; }
static inline int __popc(u32 v) { return __builtin_popcount(v); }
static inline int __float_as_int(float f) { int i; memcpy(&i, &f, 4); return i; }
static inline float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
static inline u32 __float_as_uint(float f) { return (u32)__float_as_int(f); }
static inline float __uint_as_float(u32 u) { return __int_as_float((int)u); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// Copies read their source at once, and some of them write only when a thread waits for them, as late as a card might.
void copy_16(void *to, const void *from);  // zeros from nowhere
void end_stream_group();
void wait_for_groups(int pending);
DEVICE void stream(u16 *to, const u16 *from, bool wanted) {
    if (wanted) copy_16(to, from);
    end_stream_group();
}
template <int PENDING> DEVICE void wait_for_stream() { wait_for_groups(PENDING); }
DEVICE void prefetch_line(const u16 *) {}
DEVICE uint4 load_fresh(const void *p) { return *(const uint4 *)p; }
DEVICE u32 load_fresh_pair(const u16 *p) { return *(const u32 *)p; }
DEVICE u16 load_fresh16(const u16 *p) { return *p; }
DEVICE int load_fresh32(const int *p) { return *p; }
DEVICE float from_bf16(u16 v) { return __int_as_float((int)((u32)v << 16)); }
DEVICE u16 to_bf16(float x) {
    u32 bits = (u32)__float_as_int(x);
    if (x != x) return 0x7fff;
    return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
DEVICE void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    using namespace emulator;
    Lane &own = lanes[current];
    own.a[0] = a0, own.a[1] = a1, own.a[2] = a2, own.a[3] = a3, own.b[0] = b0, own.b[1] = b1;
    meet_warp();
    const int base = current / 32 * 32, lane = current % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        const int row = g + (i < 2 ? 0 : 8), col = 2 * t + (i & 1);
        float sum = 0.0f;
        for (int k = 0; k < 16; k++) {
            const u32 a = lanes[base + (row % 8) * 4 + k % 8 / 2].a[(row >= 8) + (k >= 8) * 2];
            const u32 b = lanes[base + col * 4 + k % 8 / 2].b[k >= 8];
            sum += from_bf16((u16)(k & 1 ? a >> 16 : a)) * from_bf16((u16)(k & 1 ? b >> 16 : b));
        }
        d[i] += sum;
    }
    meet_warp();
}
DEVICE uint4 load_transposed(const u16 *p) {
    using namespace emulator;
    lanes[current].p = p;
    meet_warp();
    const int base = current / 32 * 32, lane = current % 32, g = lane / 4, t = lane % 4;
    u32 v[4];
    for (int m = 0; m < 4; m++)
        v[m] = (u32)lanes[base + 8 * m + 2 * t].p[g] | ((u32)lanes[base + 8 * m + 2 * t + 1].p[g] << 16);
    meet_warp();
    return make_uint4(v[0], v[1], v[2], v[3]);
}
DEVICE uint4 load_matrices(const u16 *p) {
    using namespace emulator;
    lanes[current].p = p;
    meet_warp();
    const int base = current / 32 * 32, lane = current % 32, g = lane / 4, t = lane % 4;
    u32 v[4];
    for (int m = 0; m < 4; m++) v[m] = *(const u32 *)(lanes[base + 8 * m + g].p + 2 * t);
    meet_warp();
    return make_uint4(v[0], v[1], v[2], v[3]);
}
typedef u8 *Place;
DEVICE Place place_in_shared(const void *p) { return (u8 *)p; }
template <int OFFSET> DEVICE uint4 load_transposed(Place at) { return load_transposed((const u16 *)(at + OFFSET)); }
template <int OFFSET> DEVICE uint4 load_matrices(Place at) { return load_matrices((const u16 *)(at + OFFSET)); }
template <int TO, int FROM> DEVICE void copy_async(Place to, const u16 *from, bool wanted) {
    copy_16(to + TO, wanted ? (const u8 *)from + FROM : nullptr);
}
static inline u8 *remote(const void *p, int rank) {
    return (u8 *)p + (ptrdiff_t)(rank - emulator::current / emulator::num_threads) * emulator::shared_pitch;
}
DEVICE void copy_async(u16 *to, const u16 *from, bool wanted) {
    copy_16(to, wanted ? from : nullptr);
}
void wait_for_copies();
DEVICE float exchange(float v, int by) { return emulator::gathered(&emulator::Lane::f, v, emulator::current % 32 ^ by); }
DEVICE float from_lane(float v, int lane) { return emulator::gathered(&emulator::Lane::f, v, lane); }
DEVICE int from_lane(int v, int lane) { return emulator::gathered(&emulator::Lane::i, v, lane); }
DEVICE int max_over_warp(int v) {
    int best = v;
    for (int i = 0; i < 32; i++) best = max(best, emulator::gathered(&emulator::Lane::i, v, i));
    return best;
}
DEVICE u32 votes(bool v) {
    u32 all = 0;
    for (int i = 0; i < 32; i++) all |= (u32)emulator::gathered(&emulator::Lane::i, (int)v, i) << i;
    return all;
}
static inline int __ffs(u32 v) { return __builtin_ffs((int)v); }
DEVICE int min_over_warp(int v) {
    int best = v;
    for (int i = 0; i < 32; i++) best = min(best, emulator::gathered(&emulator::Lane::i, v, i));
    return best;
}
// An arrival: phases over in the upper half, bytes still to come of this one in the lower. Some copies happen only when
// somebody waits for them.
// On a card, waiting for one that was not made yet ends in "unspecified launch failure".
void init_arrival(u64 *arrival);
DEVICE void show_arrivals() {}
DEVICE void expect_bytes(u64 *arrival, u32 bytes) { *arrival += bytes; }
void copy_bulk(void *to, const void *from, u32 bytes, u64 *arrival);
void wait_for_bytes(u64 *arrival, u32 parity);
static inline void count_bytes(u64 *arrival, u32 bytes) {
    *arrival -= bytes;
    if ((u32)*arrival == 0) *arrival += 1ull << 32;
}
// Whoever is written to must be there.
static inline u8 *present(const void *p, int rank) {
    const int first = rank * emulator::num_threads;
    for (int i = 0; i < emulator::num_threads; i++)
        if (!emulator::fibers[first + i].is_done) return remote(p, rank);
    emulator::failure = "a write into the shared memory of a block that has left";
    return (u8 *)p;
}
DEVICE void send2(float2 *p, int rank, float2 v, u64 *arrival) {
    *(float2 *)present(p, rank) = v;
    count_bytes((u64 *)present(arrival, rank), 8);
}
DEVICE void send4(float4 *p, int rank, float4 v, u64 *arrival) {
    *(float4 *)present(p, rank) = v;
    count_bytes((u64 *)present(arrival, rank), 16);
}
static inline void show_cluster() { arrive_at_cluster(); }
void init_turns(u64 *turns, int count);
void end_turn(u64 *turns);
void wait_for_turns(u64 *turns, u32 parity);
DEVICE void sync_first(int threads) {
    emulator::meet(emulator::firsts[emulator::current / emulator::num_threads], threads);
}
DEVICE float quotient(float a, float b) { return a / b; }
DEVICE float power2(float x) { return exp2f(x); }
DEVICE float logarithm2(float x) { return log2f(x); }
#define __expf expf
void wait_for_inputs();
DEVICE void let_next_start() {}
