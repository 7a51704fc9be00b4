// Slots of a pool as rows of numbers: code * scale, rounded once; a 16-bit pool's elements converted.
//
// Grid: blocks of 8 warps, a warp takes one row. With INDEX_BYTES 0 row r is slot r, else slots[r]; a slot outside
// the pool gives a row of NaN.
// Constants: HEAD_DIM, GROUP_SIZE, KV_DTYPE (0 e4m3fn, 1 bf16, 2 fp16), OUT_DTYPE (1 bf16, 2 fp16, 3 fp32), PAGE_SIZE,
// INDEX_BYTES, ALIGNED (1: every row of pool and out begins on 16 bytes).
// Numerics: the product of a code (4 significant bits) and a scale (24) is formed exactly, then rounded to nearest
// even in the output's format, with subnormals.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int VEC = 8;                 // elements a lane takes at once
constexpr int VECS_PER_ROW = HEAD_DIM / VEC;
constexpr unsigned QUIET_NAN = 0x7fffffffu;

struct DequantizeParams {
    const void* pool;          // addressed as in params.cuh
    const float* scales;       // null unless the pool is e4m3fn
    const void* slots;         // (num_rows,) int32 or int64
    void* out;                 // (num_rows, HEAD_DIM), contiguous
    long long page_stride, slot_stride;  // bytes
    long long scale_stride, index_stride;  // elements
    long long num_slots, num_rows;
};

__device__ __forceinline__ float code_value(unsigned code) {
    const unsigned magnitude = code & 0x7fu;
    if (magnitude == 0x7fu) return __uint_as_float(QUIET_NAN);
    // Exponent and mantissa in place as a float, off by 2^120, which the product restores (also for subnormal codes).
    float value;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(value) : "f"(__uint_as_float((code & 0x80u) << 24 | magnitude << 20)), "f"(0x1p120f));
    return value;
}

// A float from which a rounding to 16 bits gives what a rounding of the exact code * scale would: rounded toward zero,
// with the last bit set where something was cut off (or the product itself, rounded, for fp32 output).
__device__ __forceinline__ float product(float code, float scale) {
    float p;
    if (OUT_DTYPE == 3) {
        asm("mul.rn.f32 %0, %1, %2;" : "=f"(p) : "f"(code), "f"(scale));
        return p;
    }
    bool inexact;
    if (__float_as_uint(scale) << 1 < 0x12800000u << 1) {  // below 2^-90 the remainder might vanish: use fp64
        double wide, back;
        asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(scale));
        const double exact = code * wide;
        asm("cvt.rz.f32.f64 %0, %1;" : "=f"(p) : "d"(exact));
        asm("cvt.f64.f32 %0, %1;" : "=d"(back) : "f"(p));
        inexact = back != exact;
    } else {
        float rest;
        asm("mul.rz.f32 %0, %1, %2;" : "=f"(p) : "f"(code), "f"(scale));
        asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(rest) : "f"(code), "f"(scale), "f"(-p));
        inexact = rest != 0.f && (__float_as_uint(p) & QUIET_NAN) < 0x7f800000u;
    }
    return __uint_as_float(__float_as_uint(p) | (unsigned)inexact);
}

__device__ __forceinline__ unsigned pack(float low, float high) {
    if (OUT_DTYPE == 1) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const unsigned*>(&two);
    }
    const __half2 two = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&two);
}

extern "C" __global__ void __launch_bounds__(256) dequantize_rows(const __grid_constant__ DequantizeParams p) {
    const long long row = (long long)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= p.num_rows) return;
    long long slot = row;
    if (INDEX_BYTES == 8) slot = __ldg(static_cast<const long long*>(p.slots) + row * p.index_stride);
    if (INDEX_BYTES == 4) slot = __ldg(static_cast<const int*>(p.slots) + row * p.index_stride);
    const bool known = slot >= 0 && slot < p.num_slots;
    const long long page = known ? slot / PAGE_SIZE : 0;
    const char* from = static_cast<const char*>(p.pool) + page * p.page_stride + (known ? slot % PAGE_SIZE : 0) * p.slot_stride;

    for (int vec = threadIdx.x % 32; vec < VECS_PER_ROW; vec += 32) {
        constexpr int WORDS = KV_DTYPE == 0 ? 2 : 4;
        unsigned word[WORDS];
        const char* at = from + vec * (4 * WORDS);
        if (!known) {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) word[i] = ~0u;  // NaN in all three formats
        } else if (ALIGNED) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 2) {
                const uint2 two = __ldg(reinterpret_cast<const uint2*>(at) + i / 2);
                word[i] = two.x;
                word[i + 1] = two.y;
            }
        } else {
            for (int i = 0; i < WORDS; ++i) word[i] = 0;
            for (int i = 0; i < 4 * WORDS; ++i) word[i / 4] |= (unsigned)(unsigned char)at[i] << 8 * (i % 4);
        }
        float v[VEC];
        if (KV_DTYPE == 0) {
            const float scale = known ? __ldg(p.scales + page * p.scale_stride + vec * VEC / GROUP_SIZE) : 1.f;
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[i] = product(code_value(word[i / 4] >> 8 * (i % 4) & 0xffu), scale);
        } else {
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const unsigned half = word[i / 2 % WORDS] >> 16 * (i % 2) & 0xffffu;
                v[i] = KV_DTYPE == 1 ? __uint_as_float(half << 16) : __half2float(__ushort_as_half((unsigned short)half));
            }
        }
        char* to = static_cast<char*>(p.out) + (row * HEAD_DIM + vec * VEC) * (OUT_DTYPE == 3 ? 4 : 2);
        if (OUT_DTYPE == 3) {
            reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
            reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
        } else {
            *reinterpret_cast<uint4*>(to) = make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
        }
    }
}
