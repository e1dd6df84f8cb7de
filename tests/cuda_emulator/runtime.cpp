// What runs kernels in the emulator: one object, linked with each of them.
#include "standard.h"
#include "common.cuh"

namespace emulator {
std::vector<Fiber> fibers;
std::vector<Meeting> warps, blocks, firsts;
Meeting cluster;
jmp_buf scheduler;
int current, num_threads, block_index, num_blocks, num_alive, shared_pitch;
std::vector<u8> shared;
std::vector<Lane> lanes;
const char *failure;
// Of an arrival: who made it, at which meetings, and how many of its phases somebody has waited for.
struct Made { int thread, block_round, warp_round, cluster_round, num_waited; };
static std::map<const u64 *, Made> arrivals;
struct Turns { int count; Made made; };
static std::map<const u64 *, Turns> turns;
static Made made_here() {
    return {current, blocks[current / num_threads].round, warps[current / 32].round, cluster.round, 0};
}
// Whether a barrier has passed, so that others know of it.
static bool is_shown(const Made &made) {
    const bool same_warp = made.thread / 32 == current / 32 && warps[current / 32].round > made.warp_round;
    return made.thread == current || same_warp || blocks[current / num_threads].round != made.block_round ||
           cluster.round != made.cluster_round;
}
// A copy under way: what was read, and where it goes. Of a thread, the group it will belong to or belongs to.
struct Copy { u8 *to; std::vector<u8> bytes; int group; };
static std::vector<std::vector<Copy>> copies;
static std::vector<int> num_groups;
static std::map<const u64 *, std::vector<Copy>> bulk_copies;
static u32 draw;
// Half of all; which ones differs from launch to launch of a kernel.
static bool is_late() { return (draw = draw * 1664525u + 1013904223u) >> 31; }
static Copy copy_of(void *to, const void *from, size_t bytes, int group = 0) {
    const u8 *first = (const u8 *)from;
    return {(u8 *)to, from ? std::vector<u8>(first, first + bytes) : std::vector<u8>(bytes), group};
}
static void land(const Copy &copy) { memcpy(copy.to, copy.bytes.data(), copy.bytes.size()); }
static void (*body)(void **);
static void **body_args;

static std::vector<int> arrived_in;
void arrive_at_cluster() {
    arrived_in[current] = cluster.round;
    cluster.waiting++;
}
void wait_for_cluster() {
    while (cluster.round == arrived_in[current]) {
        if (cluster.waiting < num_alive)
            pause();
        else
            cluster.waiting = 0, cluster.round++;
    }
}
static void enter() {
    body(body_args);
    fibers[current].is_done = true;
    num_alive--;
    pause();
}
void run(int grid, int block_threads, int shared_size, int cluster_size, void (*kernel)(void **), void **args) {
    body = kernel, body_args = args, failure = nullptr, num_threads = block_threads, num_blocks = grid;
    shared_pitch = (shared_size + 79) / 16 * 16;
    const int threads = block_threads * cluster_size;
    fibers.resize(threads), lanes.resize(threads), warps.assign(threads / 32, {});
    for (block_index = 0; block_index < grid; block_index += cluster_size) {
        // Poisoned, so that reading what nobody wrote shows: bf16 NaNs.
        shared.assign(shared_pitch * cluster_size + 16, 0xff);
        blocks.assign(cluster_size, {});
        firsts.assign(cluster_size, {});
        turns.clear();
        cluster = {}, num_alive = threads;
        arrived_in.assign(threads, 0);
        arrivals.clear();
        copies.assign(threads, {}), num_groups.assign(threads, 0), bulk_copies.clear();
        for (auto &m : warps) m = {};
        for (auto &f : fibers) {
            f.stack.resize(1 << 16), f.is_started = f.is_done = false, f.watched = nullptr;
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
            f.context.uc_link = nullptr;
            makecontext(&f.context, enter, 0);
        }
        for (bool busy = true; busy;) {
            busy = false;
            for (current = 0; current < threads; current++) {
                Fiber &f = fibers[current];
                if (f.is_done) continue;
                busy = true;
                if (f.watched && *f.watched == f.seen) continue;
                if (_setjmp(scheduler)) continue;
                if (f.is_started) _longjmp(f.at, 1);
                f.is_started = true;
                setcontext(&f.context);
            }
        }
        for (auto &[arrival, made] : arrivals)
            if ((int)(*arrival >> 32) != made.num_waited || (u32)*arrival)
                failure = "a block left while bytes that nobody waited for may be under way";
    }
}
}  // namespace emulator

void copy_16(void *to, const void *from) {
    using namespace emulator;
    const Copy copy = copy_of(to, from, 16, num_groups[current]);
    if (is_late())
        copies[current].push_back(copy);
    else
        land(copy);
}
void end_stream_group() { emulator::num_groups[emulator::current]++; }
void wait_for_groups(int pending) {
    using namespace emulator;
    std::vector<Copy> rest;
    for (const Copy &copy : copies[current]) {
        if (copy.group < num_groups[current] - pending)
            land(copy);
        else
            rest.push_back(copy);
    }
    copies[current].swap(rest);
}
void wait_for_copies() {
    end_stream_group();
    wait_for_groups(0);
}
void copy_bulk(void *to, const void *from, u32 bytes, u64 *arrival) {
    using namespace emulator;
    const Copy copy = copy_of(to, from, bytes);
    if (is_late()) {
        bulk_copies[arrival].push_back(copy);
    } else {
        land(copy);
        count_bytes(arrival, bytes);
    }
}
void init_arrival(u64 *arrival) {
    using namespace emulator;
    *arrival = 0;
    arrivals[arrival] = made_here();
}
void wait_for_bytes(u64 *arrival, u32 parity) {
    using namespace emulator;
    const auto found = arrivals.find(arrival);
    if (found == arrivals.end()) {
        failure = "a wait for an arrival that was not made";
        return;
    }
    Made &made = found->second;
    if (!is_shown(made))
        failure = "a wait for an arrival that no barrier has shown";
    while ((*arrival >> 32 & 1) == parity) {
        std::vector<Copy> landed;
        landed.swap(bulk_copies[arrival]);
        for (const Copy &copy : landed) {
            land(copy);
            count_bytes(arrival, copy.bytes.size());
        }
        if (landed.empty()) pause();
    }
    made.num_waited = (int)(*arrival >> 32);
}
void init_turns(u64 *turns, int count) {
    *turns = (u32)count;
    emulator::turns[turns] = {count, emulator::made_here()};
}
void end_turn(u64 *turns) {
    if ((u32)(--*turns) == 0) *turns += (1ull << 32) + emulator::turns[turns].count;
}
void wait_for_turns(u64 *turns, u32 parity) {
    const auto found = emulator::turns.find(turns);
    if (found == emulator::turns.end() || !emulator::is_shown(found->second.made)) {
        emulator::failure = "a wait for turns that were not made, or that no barrier has shown";
        if (found == emulator::turns.end()) return;
    }
    while ((*turns >> 32 & 1) == parity) emulator::pause();
}
// What the kernel before leaves, there once somebody waits for it.
namespace emulator {
static struct { void *to; const void *from; size_t bytes; } inputs;
}
extern "C" SEEN void leave_inputs(void *to, const void *from, size_t bytes) { emulator::inputs = {to, from, bytes}; }
void wait_for_inputs() {
    if (emulator::inputs.bytes) memcpy(emulator::inputs.to, emulator::inputs.from, emulator::inputs.bytes);
    emulator::inputs.bytes = 0;
}
