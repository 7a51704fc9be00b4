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

    // The block's weights, AT_ONCE partials at a time: first the largest lse2 of all, then exp2(lse2 - most).
    constexpr int AT_ONCE = 512 / HEADS_PER_CTA;
    constexpr int HEAD_THREADS = THREADS / HEADS_PER_CTA;
    __shared__ float weights[HEADS_PER_CTA][AT_ONCE];
    const int own = threadIdx.x / HEAD_THREADS, thread = threadIdx.x % HEAD_THREADS;
    float most = neg_inf();
    for (int k = thread; active && k < partials.count; k += HEAD_THREADS) {
        const long long at = partials.at(p, k);
        if (at >= 0) most = fmaxf(most, p.partial_lse2[at * p.num_heads + head]);
    }
    weights[own][thread] = most;
    __syncthreads();
    for (int i = 0; i < HEAD_THREADS; ++i) most = fmaxf(most, weights[own][i]);

    float sum = 0.f;
    float4 o[VECS];
#pragma unroll
    for (int v = 0; v < VECS; ++v) o[v] = make_float4(0.f, 0.f, 0.f, 0.f);
    constexpr int AHEAD = VECS >= 4 ? 1 : 4;
    for (int k1 = 0; k1 < partials.count; k1 += AT_ONCE) {
        const int end = min(partials.count - k1, AT_ONCE);
        __syncthreads();
        for (int k = thread; active && k < end; k += HEAD_THREADS) {
            const long long at = partials.at(p, k1 + k);
            const float lse2 = at < 0 ? neg_inf() : p.partial_lse2[at * p.num_heads + head];
            weights[own][k] = lse2 == neg_inf() ? 0.f : exp2_approx(lse2 - most);
        }
        __syncthreads();
        if (!active) continue;
        for (int k0 = lane; k0 < end; k0 += LANES * AHEAD) {
            float weight[AHEAD];
            float4 part[AHEAD][VECS];
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                const int k = k0 + a * LANES;
                weight[a] = k < end ? weights[own][k] : 0.f;
                const float4* from = reinterpret_cast<const float4*>(p.partial_out + (partials.at(p, k1 + k) * p.num_heads + head) * HEAD_DIM + dim0);
#pragma unroll
                for (int v = 0; v < VECS; ++v) part[a][v] = weight[a] != 0.f ? from[v * THREADS_PER_HEAD] : make_float4(0.f, 0.f, 0.f, 0.f);
            }
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                sum += weight[a];
#pragma unroll
                for (int v = 0; v < VECS; ++v) {
                    o[v].x += weight[a] * part[a][v].x;
                    o[v].y += weight[a] * part[a][v].y;
                    o[v].z += weight[a] * part[a][v].z;
                    o[v].w += weight[a] * part[a][v].w;
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
    const float lse2 = sum == 0.f ? neg_inf() : most + log2f(sum);
    float factor = sum == 0.f ? 0.f : 1.f / sum;
    if (p.sink) factor *= sink_factor(lse2, __ldg(p.sink + head));
    if (p.lse && x == 0 && blockIdx.z == 0) p.lse[(long long)row * p.num_heads + head] = lse2 * LN_2;
    char* out = static_cast<char*>(p.out) + 2 * (row * p.out_stride_token + head * p.out_stride_head + dim0);
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
        const uint2 packed = make_uint2(pack_pair<Q_DTYPE == 1>(o[v].x * factor, o[v].y * factor), pack_pair<Q_DTYPE == 1>(o[v].z * factor, o[v].w * factor));
        *reinterpret_cast<uint2*>(out + 2 * v * 4 * THREADS_PER_HEAD) = packed;
    }
}
