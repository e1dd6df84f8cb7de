// Matrix instructions of a warpgroup, four warps, on Hopper: results follow later, while its threads go on.
//
// The right operand, 128 columns by 16 of k, lies in shared memory as a panel: a column after the other, 64 values of k
// each, 128 bytes, whose pieces of 16 bytes are exchanged by column: piece c of column n is at c ^ (n % 8). A panel starts at
// a multiple of 1,024 bytes. The left operand, 64 rows, comes in registers: thread (g, t) of a warp holds of rows g and
// g + 8 of its 16 the values of k at 2t, 2t + 1, 2t + 8 and 2t + 9. Of the sums it holds columns 8i + 2t and 8i + 2t + 1,
// d[4i] and d[4i + 1] of row g, d[4i + 2] and d[4i + 3] of row g + 8.
#pragma once

#ifdef EMULATED
#include "warpgroups.h"
#else
#define CLUSTERED(THREADS, SIZE) __global__ void __cluster_dims__(SIZE, 1, 1) __launch_bounds__(THREADS, 1)
typedef u64 Panel;
// Rows of 128 bytes, eight of them 1,024 bytes from the next eight, pieces exchanged over 128 bytes.
DEVICE Panel panel_at(const void *p) {
    return (u64)(((u32)__cvta_generic_to_shared(p) & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// The same panel from 16 * `steps` of k on.
DEVICE Panel further(Panel panel, int steps) { return panel + 2 * steps; }
// What is multiplied has been written; what is added to, too.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Sums may be read from here on.
template <int NUM> DEVICE void show_sums(float (&d)[NUM]) {
#pragma unroll
    for (int i = 0; i < NUM; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Wait until at most `PENDING` groups of products are under way.
template <int PENDING> DEVICE void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// d = a * b, or d += a * b where `adds`.
DEVICE void multiply_panel(float (&d)[64], const u32 *a, Panel b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, adds, 1, 1, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                   "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                   "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                   "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}
// Registers of each thread of a warpgroup, of those that were given to the block.
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void leave_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
// A thread's number in its block, read anew.
DEVICE int thread_index() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
// A barrier of so many threads, numbered from 2 on: to wait at, or to be counted at and go on.
DEVICE void wait_at(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
DEVICE void count_at(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
// What fills a stage, of which every program of a cluster brings a part: over when as many bytes have come as were expected.
DEVICE void init_filled(u64 *filled) { init_turns(filled, 1); }
DEVICE void expect_parts(u64 *filled, u32 bytes) { expect_bytes(filled, bytes); }
DEVICE void wait_until_filled(u64 *filled, u32 parity) { wait_for_bytes(filled, parity); }
// As end_turn, at block `rank`'s: nothing was written, what was read had been waited for.
DEVICE void end_turn_at(u64 *turns, int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_address(turns, rank)) : "memory");
}
// Two values at a time, of which the first is low: rounded, and products and sums rounded likewise.
DEVICE u32 pair_of(float a, float b) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(v) : "f"(a), "f"(b));
    return v;
}
DEVICE u32 products(u32 a, u32 b) {
    u32 v;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
DEVICE u32 sums(u32 a, u32 b) {
    u32 v;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
// As copy_bulk, of what others will want too: into the same place of every block of the cluster that the mask names.
DEVICE void copy_shared(void *to, const void *from, u32 bytes, u64 *arrival, u32 mask) {
    const u32 at = (u32)__cvta_generic_to_shared(to), count = (u32)__cvta_generic_to_shared(arrival);
    if (mask == 1)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(at), "l"(from), "r"(bytes), "r"(count) : "memory");
    else
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                     ::"r"(at), "l"(from), "r"(bytes), "r"(count), "h"((u16)mask) : "memory");
}
#endif
