// experts_down.cu for one row: down of the chosen experts, their weighted sum, the shared expert's down and the residual.
//
// -D: as in experts_down.cu; REHEARSE as in project.cu. A program owns 8 output columns, whose weights of all chosen
// experts have room in shared memory: they come by the copy engine, a copy an expert, while the kernel before makes the
// activations. Sums have the order of experts_down.cu, and so the same bits.
#include "common.cuh"
#include "routing.cuh"

#define PART (F / WARPS)
#define SHARED_PART (FS / WARPS)

KERNEL(WARPS * 32, PROGRAMS)
lone_down(const u16 *act, const u16 *shared_act, const u16 *scores, const float *bias, const u16 *weight,
          const u16 *shared_weight, u16 *hidden, u16 *tap, const int *num_rows, float scaling, float softcap) {
    EXTERN_SHARED(u16, rows);
    u16 *tokens = rows + A * 8 * F;
    Routing &routing = *(Routing *)(tokens + A * F + FS);
    Contest &contest = *(Contest *)(&routing + 1);
    float *sums = (float *)(&contest + 1);
    u64 *arrival = (u64 *)(sums + WARPS * 16);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;

    stamp(STARTED);
    if (thread == WARPS * 32 - 1) {
        init_arrival(arrival);
        show_arrivals();
    }
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const int live = min(load_fresh32(num_rows), 1);
    route_one(routing, contest, scores, thread < E ? bias[thread] : 0.0f, live > 0, softcap);
    stamp(ROUTED);
    if (thread == WARPS * 32 - 1 && live) {
        expect_bytes(arrival, A * 8 * F * 2);
#pragma unroll 1
        for (int i = 0; i < A; i++)
            copy_bulk(rows + i * 8 * F, weight + ((size_t)routing.experts[i] * N + blockIdx.x * 8) * F, 8 * F * 2,
                      arrival);
    }
    uint4 shared_rows[SHARED_PART / 32];
#pragma unroll
    for (int k = 0; k < SHARED_PART / 32; k++)
        shared_rows[k] =
            *(const uint4 *)(shared_weight + (size_t)(blockIdx.x * 8 + g) * FS + warp * SHARED_PART + k * 32 + 8 * t);
    let_next_start();
    stamp(ASKED);
    // A warp's own part of each expert's activations, and of the shared one's.
    u16 *own = tokens + warp * (A * PART + SHARED_PART), *shared_own = own + A * PART;
    u16 *out = hidden + blockIdx.x * 8 + thread % 8;
    float old = 0.0f;
    // The first turn is a rehearsal, as in project.cu.
#pragma unroll 1
    for (int turn = unknown(REHEARSE ? 0 : 1); turn < 2; turn++) {
        const bool is_real = turn == 1;
        if (is_real) {
            wait_for_inputs();
            stamp(WAITED);
        }
        for (int i = lane; i < A * (PART / 8); i += 32)
            *(uint4 *)(own + i * 8) = load_fresh(act + i / (PART / 8) * F + warp * PART + i % (PART / 8) * 8);
        for (int i = lane; i < SHARED_PART / 8; i += 32)
            *(uint4 *)(shared_own + i * 8) = load_fresh(shared_act + warp * SHARED_PART + i * 8);
        if (thread < 8) old = from_bf16(load_fresh16(out));
        __syncwarp();
        if (is_real) {
            stamp(PREPARED);
            if (live) wait_for_bytes(arrival, 0);
        }
        float total[2] = {};
#pragma unroll 1
        for (int i = 0; i < routing.num_slots; i++) {
            const u16 *w = rows + (i * 8 + g) * F + warp * PART + 8 * t, *token = own + i * PART + 8 * t;
            float even[4] = {}, odd[4] = {};
#pragma unroll
            for (int k = 0; k < PART; k += 64) {
                uint4 w0, w1;
                if (k + 32 < PART)
                    load_pair(w + k, g & 1, w0, w1);
                else
                    w0 = *(const uint4 *)(w + k);
                multiply_block(even, odd, g == 0 ? *(const uint4 *)(token + k) : zero, zero, w0);
                if (k + 32 < PART) multiply_block(even, odd, g == 0 ? *(const uint4 *)(token + k + 32) : zero, zero, w1);
            }
            const float by = routing.slot_weights[i][0];
            total[0] += (even[0] + odd[0]) * by, total[1] += (even[1] + odd[1]) * by;
        }
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (int k = 0; k < SHARED_PART / 32; k++)
            multiply_block(even, odd, g == 0 ? *(const uint4 *)(shared_own + k * 32 + 8 * t) : zero, zero, shared_rows[k]);
        if (g == 0) {
            *(float2 *)(sums + warp * 16 + 2 * t) = make_float2(total[0], total[1]);
            *(float2 *)(sums + warp * 16 + 8 + 2 * t) = make_float2(even[0] + odd[0], even[1] + odd[1]);
        }
        if (is_real) stamp(FIRST_DONE);
        __syncthreads();
        if (thread < 8) {
            float routed = 0.0f, common = 0.0f;
            for (int w = 0; w < WARPS; w++) routed += sums[w * 16 + thread], common += sums[w * 16 + 8 + thread];
            const u16 result = to_bf16(old + rounded(rounded(rounded(routed) * scaling) + rounded(common)));
            if (is_real && live) {
                *out = result;
                if (tap) tap[blockIdx.x * 8 + thread] = result;
            }
        }
        __syncthreads();
    }
    stamp(ENDED);
}
