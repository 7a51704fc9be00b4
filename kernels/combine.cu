// Partials of a row -> out and lse: out = sum_k w_k partial_k / sum_k w_k * sink_factor, w_k = exp2(lse2_k - max).
//
// Grid: x = token, y = blocks of HEADS_PER_CTA heads, z = pieces of PIECE_DIMS dimensions.
// Block: HEADS_PER_CTA heads x (PIECE_DIMS / (4 * VECS)) threads x LANES partial lanes. A thread adds VECS float4 of
// every LANES-th partial, in the order of the slots; lanes are added in order at the end. The order of addition
// depends on the row's partials alone, so equal partials give equal bits. Rows that were not split leave at once.
// Launched with programmatic dependent launch: it may start while decode runs, and waits for it before reading.
#include "params.cuh"
#include "schedule.cuh"
#include "mma.cuh"

constexpr int THREADS_PER_HEAD = PIECE_DIMS / (4 * VECS);
constexpr int THREADS = HEADS_PER_CTA * THREADS_PER_HEAD * LANES;
static_assert(LANES == 1 || HEADS_PER_CTA == 1, "lanes are added across the whole block");

extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ DecodeParams p) {
    const int row = blockIdx.x;
    const RowPartials partials(p, row);
    wait_for_previous_kernel();
    if (partials.count < 2) return;

    const int x = threadIdx.x % THREADS_PER_HEAD, lane = threadIdx.x / THREADS_PER_HEAD % LANES;
    const int head = blockIdx.y * HEADS_PER_CTA + threadIdx.x / (THREADS_PER_HEAD * LANES);
    const bool active = head < p.num_heads;
    const int dim0 = blockIdx.z * PIECE_DIMS + 4 * x;

    // Partials this thread adds: lane, lane + LANES, ... The first BATCH are on their way while the weights are made.
    constexpr int BATCH = VECS >= 4 ? 2 : VECS >= 2 ? 4 : 8;
    float4 part[BATCH][VECS];
    auto fetch = [&](int k0) {
#pragma unroll
        for (int a = 0; a < BATCH; ++a) {
            const int k = k0 + a * LANES;
            const long long at = active && k < partials.count ? partials.at(p, k) : -1;
            const float4* from = reinterpret_cast<const float4*>(p.partial_out + (at * p.num_heads + head) * HEAD_DIM + dim0);
#pragma unroll
            for (int v = 0; v < VECS; ++v) part[a][v] = at >= 0 ? from[v * THREADS_PER_HEAD] : make_float4(0.f, 0.f, 0.f, 0.f);
        }
    };
    fetch(lane);

    // Weights exp2(lse2 - most), HEAD_THREADS at a time: a thread keeps the lse2 it reads first, which is all of them as a rule.
    constexpr int HEAD_THREADS = THREADS / HEADS_PER_CTA;
    __shared__ float maxima[HEADS_PER_CTA][HEAD_THREADS], weights[HEADS_PER_CTA][HEAD_THREADS];
    const int own = threadIdx.x / HEAD_THREADS, thread = threadIdx.x % HEAD_THREADS;
    auto lse2_of = [&](int k) {
        const long long at = active && k < partials.count ? partials.at(p, k) : -1;
        return at >= 0 ? p.partial_lse2[at * p.num_heads + head] : neg_inf();
    };
    float mine = lse2_of(thread), most = mine;
    for (int k = thread + HEAD_THREADS; k < partials.count; k += HEAD_THREADS) most = fmaxf(most, lse2_of(k));
    constexpr int WIDTH = HEAD_THREADS % 32 ? 1 : 32;   // lanes that can be reduced by shuffles
#pragma unroll
    for (int x = 1; x < WIDTH; x *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, x));
    maxima[own][thread / WIDTH] = most;
    __syncthreads();
    const int given = min(partials.count, HEAD_THREADS / WIDTH);
#pragma unroll 8
    for (int i = 0; i < given; ++i) most = fmaxf(most, maxima[own][i]);
    // All weights together are below 1, by a power of two that costs no bits: sums of the largest partials stay finite.
    const float low = (float)(33 - __clz(partials.count - 1));

    float sum = 0.f;
    float4 o[VECS];
#pragma unroll
    for (int v = 0; v < VECS; ++v) o[v] = make_float4(0.f, 0.f, 0.f, 0.f);
    // HEAD_THREADS is a multiple of LANES, so a thread's partials go on from one round of weights to the next.
    for (int k1 = 0; k1 < partials.count; k1 += HEAD_THREADS) {
        const int end = min(partials.count, k1 + HEAD_THREADS);
        if (k1) {
            __syncthreads();
            mine = lse2_of(k1 + thread);
        }
        weights[own][thread] = mine == neg_inf() ? 0.f : exp2_approx(mine - most - low);
        __syncthreads();
        for (int k0 = k1 + lane; k0 < end; k0 += LANES * BATCH) {
            if (k0 != lane) fetch(k0);
#pragma unroll
            for (int a = 0; a < BATCH; ++a) {
                const int k = k0 + a * LANES;
                const float weight = k < end ? weights[own][k - k1] : 0.f;
                if (weight != 0.f) {   // what an idle worker left in its place is not added
                    sum += weight;
#pragma unroll
                    for (int v = 0; v < VECS; ++v) {
                        o[v].x += weight * part[a][v].x;
                        o[v].y += weight * part[a][v].y;
                        o[v].z += weight * part[a][v].z;
                        o[v].w += weight * part[a][v].w;
                    }
                }
            }
        }
    }
    if (LANES > 1) {
        __shared__ float4 others[VECS][LANES][THREADS_PER_HEAD];
        __shared__ float sums[LANES];
#pragma unroll
        for (int v = 0; v < VECS; ++v) others[v][lane][x] = o[v];
        if (x == 0) sums[lane] = sum;
        __syncthreads();
        if (lane) return;
        for (int l = 1; l < LANES; ++l) {
            sum += sums[l];
#pragma unroll
            for (int v = 0; v < VECS; ++v) {
                const float4 e = others[v][l][x];
                o[v].x += e.x; o[v].y += e.y; o[v].z += e.z; o[v].w += e.w;
            }
        }
    }
    if (!active) return;
    const float lse2 = sum == 0.f ? neg_inf() : most + (log2f(sum) + low);
    float factor = sum == 0.f ? 0.f : 1.f / sum;
    if (p.sink) factor *= sink_factor(lse2, __ldg(p.sink + head));
    if (p.lse && x == 0 && blockIdx.z == 0) p.lse[(long long)row * p.num_heads + head] = lse2 * LN_2;
    char* out = static_cast<char*>(p.out) + 2 * (row * p.out_stride_token + head * p.out_stride_head + dim0);
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
        float x[4] = {o[v].x, o[v].y, o[v].z, o[v].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {   // the product may overflow by a rounding, or in fp16
            const float y = x[i] * factor;
            x[i] = fabsf(x[i]) <= LARGEST_FLOAT ? clamped(y, LARGEST<Q_DTYPE == 1>) : y;
        }
        const uint2 packed = make_uint2(pack_pair<Q_DTYPE == 1>(x[0], x[1]), pack_pair<Q_DTYPE == 1>(x[2], x[3]));
        *reinterpret_cast<uint2*>(out + 2 * v * 4 * THREADS_PER_HEAD) = packed;
    }
}
