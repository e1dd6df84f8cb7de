// The matrix instructions of warpgroups, done at once when all their threads have met; see warpgroups.cuh for what lies where.
#pragma once

typedef const u8 *Panel;
namespace emulator {
static std::vector<Meeting> warpgroups;
static std::map<int, Meeting> named;  // by block and number
static std::vector<const u32 *> left;
static inline Meeting &barrier(int number) { return named[current / num_threads * 16 + number]; }
static inline void meet_warpgroup() {
    warpgroups.resize(fibers.size() / 128 + 1), left.resize(fibers.size());
    meet(warpgroups[current / 128], 128);
}
static inline float column_at(Panel panel, int n, int k) {
    const uintptr_t at = (uintptr_t)panel + n * 128 + k * 2;
    return from_bf16(*(const u16 *)(at ^ (at >> 7 & 7) << 4));
}
static inline float half_of(u32 word, int i) { return from_bf16((u16)(i & 1 ? word >> 16 : word)); }
}  // namespace emulator

DEVICE Panel panel_at(const void *p) {
    if ((uintptr_t)p % 1024) emulator::failure = "a panel that does not start at a multiple of 1,024 bytes";
    return (Panel)p;
}
DEVICE Panel further(Panel panel, int steps) { return panel + 32 * steps; }
DEVICE void begin_products() {}
DEVICE void end_products() {}
template <int NUM> DEVICE void show_sums(float (&)[NUM]) {}
template <int PENDING> DEVICE void wait_for_products() {}
DEVICE void multiply_panel(float (&d)[64], const u32 *a, Panel b, bool adds) {
    using namespace emulator;
    meet_warpgroup();
    left[current] = a;
    meet_warpgroup();
    const int quad = current / 4 * 4, t = current % 4;
    for (int i = 0; i < 64; i++) {
        float sum = adds ? d[i] : 0.0f;
        for (int k = 0; k < 16; k++)
            sum += half_of(left[quad + k % 8 / 2][(i / 2 & 1) + 2 * (k / 8)], k) * column_at(b, i / 4 * 8 + 2 * t + (i & 1), k);
        d[i] = sum;
    }
    meet_warpgroup();
}
#define CLUSTERED(THREADS, SIZE) void
// Parts of others may come before they are expected: then fewer than no bytes are missing.
namespace emulator {
struct Filled { bool is_expected; long bytes; u32 phase; };
static std::map<const u64 *, Filled> filled;
static inline void look_at(Filled &own) {
    if (own.is_expected && own.bytes == 0) own.is_expected = false, own.phase++;
}
}  // namespace emulator
DEVICE void init_filled(u64 *p) { emulator::filled[p] = {false, 0, 0}; }
DEVICE void expect_parts(u64 *p, u32 bytes) {
    emulator::Filled &own = emulator::filled.at(p);
    own.bytes += bytes, own.is_expected = true;
    emulator::look_at(own);
}
DEVICE void wait_until_filled(u64 *p, u32 parity) {
    while ((emulator::filled.at(p).phase & 1) == parity) emulator::pause();
}
DEVICE void end_turn_at(u64 *turns, int rank) { end_turn((u64 *)present(turns, rank)); }
static inline void sync_cluster() { arrive_at_cluster(), wait_for_cluster(); }
template <int COUNT> DEVICE void take_registers() {}
template <int COUNT> DEVICE void leave_registers() {}
static inline int thread_index() { return threadIdx.x; }
DEVICE void wait_at(int number, int threads) { emulator::meet(emulator::barrier(number), threads); }
DEVICE void count_at(int number, int threads) {
    emulator::Meeting &m = emulator::barrier(number);
    if (++m.waiting == threads) m.waiting = 0, m.round++;
}
DEVICE u32 pair_of(float a, float b) { return (u32)to_bf16(a) | (u32)to_bf16(b) << 16; }
DEVICE u32 products(u32 a, u32 b) {
    using emulator::half_of;
    return pair_of(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1));
}
DEVICE u32 sums(u32 a, u32 b) {
    using emulator::half_of;
    return pair_of(half_of(a, 0) + half_of(b, 0), half_of(a, 1) + half_of(b, 1));
}
DEVICE void copy_shared(void *to, const void *from, u32 bytes, u64 *p, u32 mask) {
    for (int rank = 0; mask >> rank; rank++) {
        if (!(mask >> rank & 1)) continue;
        memcpy(present(to, rank), from, bytes);
        emulator::Filled &count = emulator::filled.at((const u64 *)present(p, rank));
        count.bytes -= bytes;
        emulator::look_at(count);
    }
}
