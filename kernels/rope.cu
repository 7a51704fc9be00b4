// Rotate the last ROPE_DIM elements of every row in place by the row's position: q on the way in, out on the way out.
//
// Grid: a thread takes 16 elements, eight pairs, of one head of one token.
//   x         (num_tokens, num_heads, HEAD_DIM), ROW_DTYPE, strides in bytes
//   rope      quantize.cuh; sign -1 is the inverse rotation
// Constants: HEAD_DIM, ROW_DTYPE (1 bf16, 2 fp16, 3 fp32), ROPE (1 interleaved pairs, 2 halves), ROPE_DIM, ALIGNED.
// Numerics: products and sums rounded in fp32, then once to the row's dtype.
#define GROUP_SIZE 64
#define POW2_SCALES 0
#include "quantize.cuh"

struct RopeParams {
    char* x;
    Rope rope;
    long long token_stride, head_stride;  // bytes
    int num_tokens, num_heads;
};

__device__ __forceinline__ void store_vec(char* to, const float (&v)[VEC]) {
    alignas(16) unsigned short half[VEC];
    if (ROW_DTYPE == 3) {
        for (int i = 0; i < VEC; ++i) reinterpret_cast<float*>(to)[i] = v[i];
        return;
    }
#pragma unroll
    for (int i = 0; i < VEC; ++i)
        half[i] = ROW_DTYPE == 1 ? __bfloat16_as_ushort(__float2bfloat16_rn(v[i])) : __half_as_ushort(__float2half_rn(v[i]));
    if (ALIGNED) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(half);
    } else {
        for (int i = 0; i < VEC; ++i) reinterpret_cast<unsigned short*>(to)[i] = half[i];
    }
}

extern "C" __global__ void __launch_bounds__(256) rope_rows(const __grid_constant__ RopeParams p) {
    constexpr int PARTS = ROPE_DIM / (2 * VEC);
    const long long id = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const int part = id % PARTS;
    const long long row = id / PARTS, token = row / p.num_heads;
    if (token >= p.num_tokens) return;
    const long long position = rope_position(p.rope, token);
    if (position < 0) return;
    const bool known = position < p.rope.num_positions;

    char* base = p.x + token * p.token_stride + row % p.num_heads * p.head_stride + (HEAD_DIM - ROPE_DIM) * ROW_ITEMSIZE;
    const int first = ROPE == 1 ? part * 2 * VEC : part * VEC;                   // elements within the rotated part
    const int second = ROPE == 1 ? first + VEC : first + ROPE_DIM / 2;
    const float* cos = p.rope.cos + (known ? position * p.rope.cos_stride : 0) + part * VEC;
    const float* sin = p.rope.sin + (known ? position * p.rope.sin_stride : 0) + part * VEC;
    float a[VEC], b[VEC];
    to_float(load_raw(base, first), a);
    to_float(load_raw(base, second), b);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        // Pair i: interleaved, elements 2i and 2i + 1 of (a, b) laid end to end; halves, a[i] and b[i].
        float& x = ROPE == 1 ? (i < VEC / 2 ? a[2 * i % VEC] : b[2 * i % VEC]) : a[i];
        float& y = ROPE == 1 ? (i < VEC / 2 ? a[2 * i % VEC + 1] : b[2 * i % VEC + 1]) : b[i];
        const float c = __ldg(cos + i), s = mul_ieee(p.rope.sign, __ldg(sin + i)), u = x, w = y;
        x = known ? sub_ieee(mul_ieee(u, c), mul_ieee(w, s)) : __int_as_float(0x7fffffff);
        y = known ? add_ieee(mul_ieee(w, c), mul_ieee(u, s)) : __int_as_float(0x7fffffff);
    }
    store_vec(base + first * ROW_ITEMSIZE, a);
    store_vec(base + second * ROW_ITEMSIZE, b);
}
