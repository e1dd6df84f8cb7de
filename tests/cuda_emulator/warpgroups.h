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
template <int COUNT> DEVICE void take_registers() {}
template <int COUNT> DEVICE void leave_registers() {}
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
DEVICE void copy_shared(void *to, const void *from, u32 bytes, u64 *arrival) { copy_bulk(to, from, bytes, arrival); }
