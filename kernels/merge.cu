// Partial results over disjoint slot lists -> out and lse (merge_states); the sink is applied once, here.
//
// Grid: x = token, y = head. Block: 128 threads over the dimensions. Parts are added in their order, in fp32:
//   w_i = exp(lse_i - max lse), out = sum_i w_i out_i / sum_i w_i / (1 + exp(sink - lse)), lse = max + log(sum_i w_i)
// A part whose lse is -inf is empty: its rows are not read. Constants: DTYPE (1 bf16, 2 fp16, 3 fp32), MAX_PARTS.
#include "mma.cuh"

struct Part {
    const void* out;                                 // (num_tokens, num_heads, head_dim)
    const float* lse;                                // (num_tokens, num_heads)
    long long out_token, out_head, lse_token, lse_head;   // strides, elements
};

struct MergeParams {
    void* out;                                       // (num_tokens, num_heads, head_dim), contiguous
    float* lse;                                      // (num_tokens, num_heads), contiguous
    const float* sink;                               // (num_heads,) or null
    int num_parts, num_heads, head_dim, pad;
    Part parts[MAX_PARTS];
};

DEVICE float load(const void* p, long long i) {
    if (DTYPE == 1) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
    if (DTYPE == 2) return __half2float(static_cast<const __half*>(p)[i]);
    return static_cast<const float*>(p)[i];
}

extern "C" __global__ void __launch_bounds__(128) merge(const __grid_constant__ MergeParams p) {
    const long long token = blockIdx.x;
    const int head = blockIdx.y;
    const long long row = token * p.num_heads + head;
    __shared__ float weights[MAX_PARTS];
    float most = neg_inf();
    for (int i = 0; i < p.num_parts; ++i) {
        const Part& part = p.parts[i];
        most = fmaxf(most, part.lse[token * part.lse_token + head * part.lse_head]);
    }
    float sum = 0.f;
    for (int i = 0; i < p.num_parts; ++i) {
        const Part& part = p.parts[i];
        const float lse = part.lse[token * part.lse_token + head * part.lse_head];
        const float weight = lse == neg_inf() ? 0.f : expf(lse - most);
        sum += weight;
        if (threadIdx.x == 0) weights[i] = weight;
    }
    __syncthreads();
    const bool empty = most == neg_inf() && sum == 0.f;
    const float lse = empty ? neg_inf() : most + logf(sum);
    float factor = empty ? 0.f : 1.f / sum;
    if (p.sink && !empty) factor *= 1.f / (1.f + expf(p.sink[head] - lse));
    const float half = 0.5f * factor;
    if (threadIdx.x == 0) p.lse[row] = lse;
    for (int d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
        float acc = 0.f;
        for (int i = 0; i < p.num_parts; ++i) {
            const Part& part = p.parts[i];
            if (weights[i] != 0.f) acc += weights[i] * half * load(part.out, token * part.out_token + head * part.out_head + d);
        }
        // Sums of weights may exceed 1 by a rounding: what is finite stays finite.
        acc = fabsf(acc) <= LARGEST_FLOAT ? clamped(2.f * acc, DTYPE == 3 ? LARGEST_FLOAT : LARGEST<DTYPE == 1>) : acc;
        const long long at = row * p.head_dim + d;
        if (DTYPE == 1) static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16_rn(acc);
        else if (DTYPE == 2) static_cast<__half*>(p.out)[at] = __float2half_rn(acc);
        else static_cast<float*>(p.out)[at] = acc;
    }
}
