// Rows of numbers to e4m3fn codes with group scales, and back: the arithmetic of cupy_paged/fp8.py, bit for bit.
//
// Everything is IEEE arithmetic with subnormals, spelled in PTX where the compiler's -ftz=true would change it.
// Constants: HEAD_DIM, GROUP_SIZE, ROW_DTYPE (1 bf16, 2 fp16, 3 fp32: the rows that come in), POW2_SCALES (0, 1),
// ALIGNED (1: every row begins on 16 bytes), ROPE (0 none, 1 interleaved pairs, 2 halves), ROPE_DIM.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int VEC = 8;                          // elements a lane takes at once
[[maybe_unused]] constexpr int VECS_PER_ROW = HEAD_DIM / VEC;
[[maybe_unused]] constexpr int VECS_PER_GROUP = GROUP_SIZE / VEC;  // lanes that share a scale: a power of two
constexpr unsigned NAN_CODE = 0x7f;
constexpr float E4M3_MAX = 448.f;
constexpr float SCALE_MIN = 0x1p-80f;           // of an all-zero group; products and quotients by it stay normal

__device__ __forceinline__ float mul_ieee(float a, float b) { float r; asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
__device__ __forceinline__ float add_ieee(float a, float b) { float r; asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
__device__ __forceinline__ float sub_ieee(float a, float b) { float r; asm("sub.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }

// ---- rows in -------------------------------------------------------------------------------------------------

constexpr int ROW_ITEMSIZE = ROW_DTYPE == 3 ? 4 : 2;

// VEC elements of a row as they lie in memory.
struct RawVec { uint4 word[ROW_ITEMSIZE / 2]; };

__device__ __forceinline__ RawVec load_raw(const void* row, int elem) {
    const char* from = static_cast<const char*>(row) + (long long)elem * ROW_ITEMSIZE;
    RawVec raw;
#pragma unroll
    for (int i = 0; i < ROW_ITEMSIZE / 2; ++i) {
        if (ALIGNED) {
            raw.word[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
        } else if (ROW_ITEMSIZE == 4) {
            const unsigned* e = reinterpret_cast<const unsigned*>(from) + 4 * i;
            raw.word[i] = make_uint4(__ldg(e), __ldg(e + 1), __ldg(e + 2), __ldg(e + 3));
        } else {
            const unsigned short* e = reinterpret_cast<const unsigned short*>(from) + 8 * i;
            unsigned pair[4];
            for (int j = 0; j < 4; ++j) pair[j] = __ldg(e + 2 * j) | (unsigned)__ldg(e + 2 * j + 1) << 16;
            raw.word[i] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        }
    }
    return raw;
}

__device__ __forceinline__ void to_float(const RawVec& raw, float (&v)[VEC]) {
    const unsigned* word = reinterpret_cast<const unsigned*>(raw.word);
#pragma unroll
    for (int i = 0; i < VEC / 2; ++i) {
        if (ROW_DTYPE == 1) {
            v[2 * i] = __uint_as_float(word[i] << 16);
            v[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
        } else if (ROW_DTYPE == 2) {
            const float2 f = __half22float2(*reinterpret_cast<const __half2*>(word + i));
            v[2 * i] = f.x;
            v[2 * i + 1] = f.y;
        } else {
            v[2 * i] = __uint_as_float(word[2 * i]);
            v[2 * i + 1] = __uint_as_float(word[2 * i + 1]);
        }
    }
}

// ---- rotary position embedding of the last ROPE_DIM elements ---------------------------------------------------

struct Rope {
    const void* positions;     // one a row, int32 or int64
    const float* cos;          // (num_positions, ROPE_DIM / 2) each
    const float* sin;
    long long position_stride, cos_stride, sin_stride;  // elements
    long long num_positions;
    int position_bytes;        // 4 or 8
    float sign;                // 1 forward, -1 inverse
};

// A negative position (padding) leaves a row as it is; one beyond the tables gives NaN.
__device__ __forceinline__ long long rope_position(const Rope& rope, long long row) {
    const long long at = row * rope.position_stride;
    return rope.position_bytes == 8 ? __ldg(static_cast<const long long*>(rope.positions) + at)
                                    : __ldg(static_cast<const int*>(rope.positions) + at);
}

// Rotate v, the row's elements [elem, elem + VEC), which lie within its last ROPE_DIM.
__device__ __forceinline__ void rotate(const Rope& rope, long long position, const void* row, int elem, float (&v)[VEC]) {
    constexpr int HALF = ROPE_DIM / 2;
    if (position < 0) return;
    const bool known = position < rope.num_positions;
    const float* cos = rope.cos + (known ? position * rope.cos_stride : 0);
    const float* sin = rope.sin + (known ? position * rope.sin_stride : 0);
    const int at = elem - (HEAD_DIM - ROPE_DIM);
    if (ROPE == 1) {
#pragma unroll
        for (int i = 0; i < VEC / 2; ++i) {
            const float c = __ldg(cos + at / 2 + i), s = mul_ieee(rope.sign, __ldg(sin + at / 2 + i));
            const float x = v[2 * i], y = v[2 * i + 1];
            v[2 * i] = sub_ieee(mul_ieee(x, c), mul_ieee(y, s));
            v[2 * i + 1] = add_ieee(mul_ieee(y, c), mul_ieee(x, s));
        }
    } else if (ROPE == 2) {
        const bool first = at < HALF;
        float partner[VEC];
        to_float(load_raw(row, first ? elem + HALF : elem - HALF), partner);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const int table = (first ? at : at - HALF) + i;
            const float c = __ldg(cos + table), s = mul_ieee(rope.sign, __ldg(sin + table));
            const float own = mul_ieee(v[i], c), other = mul_ieee(partner[i], s);
            v[i] = first ? sub_ieee(own, other) : add_ieee(own, other);
        }
    }
    if (!known) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] = __int_as_float(0x7fffffff);
    }
}

// ---- codes and scales ------------------------------------------------------------------------------------------

// The largest |v| as bits; of the finite elements alone where only_finite. Bits of non-negative floats sort alike.
__device__ __forceinline__ unsigned amax_bits(const float (&v)[VEC], bool only_finite) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        const unsigned bits = __float_as_uint(v[i]) & 0x7fffffffu;
        most = max(most, only_finite && bits >= 0x7f800000u ? 0u : bits);
    }
    return most;
}

template <int LANES, int STEP = 1>
__device__ __forceinline__ unsigned max_over_lanes(unsigned bits) {
#pragma unroll
    for (int offset = STEP; offset < LANES * STEP; offset *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, offset));
    return bits;
}

// The largest |element| of the lane's group, as a float's bits, NaN and infinity included; v are raw's numbers.
__device__ __forceinline__ unsigned group_amax_bits(const RawVec& raw, const float (&v)[VEC]) {
#if __CUDA_ARCH__ >= 900 && ROW_DTYPE != 3 && !ROPE
    // Two 16-bit elements at a time, which sort as integers do.
    auto max_pair = [](unsigned a, unsigned b) { unsigned r; asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; };
    const uint4 w = raw.word[0];
    constexpr unsigned SIZE = 0x7fff7fffu;
    unsigned pair = max_pair(max_pair(w.x & SIZE, w.y & SIZE), max_pair(w.z & SIZE, w.w & SIZE));
#pragma unroll
    for (int offset = 1; offset < VECS_PER_GROUP; offset *= 2) pair = max_pair(pair, __shfl_xor_sync(~0u, pair, offset));
    const unsigned short most = max(pair & 0xffffu, pair >> 16);
    return ROW_DTYPE == 1 ? (unsigned)most << 16 : __float_as_uint(__half2float(__ushort_as_half(most)));
#else
    return max_over_lanes<VECS_PER_GROUP>(amax_bits(v, false));
#endif
}

// RN(x / scale) for 2^-80 <= scale <= 2^120, given inverse = RN(1 / scale): the product is off by under two units in the
// last place, a correction makes it faithful, another exact (Markstein). One is enough where x has at most 11
// significant bits and scale is RN(amax / 448) of such an amax: all cases were compared. The signs are such that a zero
// keeps its own. Quotients so small that a remainder would be subnormal are far below the least code.
template <int CORRECTIONS = 2>
__device__ __forceinline__ float divide(float x, float scale, float inverse) {
    float q = x * inverse;
#pragma unroll
    for (int i = 0; i < CORRECTIONS; ++i) q = __fmaf_rn(-__fmaf_rn(q, scale, -x), inverse, q);
    return q;
}

// RN(1 / scale): Newton's steps end there for every significand but the all-ones one, whose inverse is a power of two
// and one unit.
__device__ __forceinline__ float invert(float scale) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(scale));
    y = __fmaf_rn(__fmaf_rn(-scale, y, 1.f), y, y);
    y = __fmaf_rn(__fmaf_rn(-scale, y, 1.f), y, y);
    const bool all_ones = (__float_as_uint(scale) & 0x7fffffu) == 0x7fffffu;
    return __uint_as_float(__float_as_uint(y) | (unsigned)all_ones);
}

// amax / 448, at least SCALE_MIN; POW2_SCALES: the least power of two that is no less.
__device__ __forceinline__ float scale_of_amax(float amax) {
    const float scale = fmaxf(divide(amax, E4M3_MAX, 1.f / E4M3_MAX), SCALE_MIN);
    if (!POW2_SCALES) return scale;
    return __uint_as_float((__float_as_uint(scale) + 0x007fffffu) & 0x7f800000u);
}

// Two quotients to codes: nearest even, saturating at +-448.
__device__ __forceinline__ unsigned encode_one(float x) {
    const unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    if (magnitude >= 0x43e00000u) return sign | (magnitude > 0x7f800000u ? NAN_CODE : 0x7eu);  // 448 and above
    if (magnitude < 0x3c800000u) return sign | (unsigned)__float2int_rn(fabsf(x) * 512.f);     // below 2^-6: subnormal
    return sign | ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
}

__device__ __forceinline__ unsigned encode_two(float low, float high) {
#if __CUDA_ARCH__ >= 890 && !defined(SOFTWARE_E4M3)
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    return encode_one(low) | encode_one(high) << 8;
#endif
}

// VEC elements as codes of the given positive scale. any_special: the group holds NaN or Inf, which become NaN codes.
template <int CORRECTIONS>
__device__ __forceinline__ uint2 encode(const float (&v)[VEC], float scale, bool any_special) {
    const float inverse = invert(scale);
    unsigned pair[VEC / 2];
#pragma unroll
    for (int i = 0; i < VEC / 2; ++i)
        pair[i] = encode_two(divide<CORRECTIONS>(v[2 * i], scale, inverse), divide<CORRECTIONS>(v[2 * i + 1], scale, inverse));
    uint2 codes = make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
    if (any_special) {
#pragma unroll
        for (int i = 0; i < VEC; ++i)
            if ((__float_as_uint(v[i]) & 0x7fffffffu) >= 0x7f800000u)
                (i < 4 ? codes.x : codes.y) = ((i < 4 ? codes.x : codes.y) & ~(0xffu << 8 * (i & 3))) | NAN_CODE << 8 * (i & 3);
    }
    return codes;
}

// The exact value of a code.
__device__ __forceinline__ float decode_code(unsigned code) {
    const unsigned magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
    if (magnitude == NAN_CODE) return __int_as_float(0x7fffffff);
    // As the top of a half-width float: exponent and mantissa in place, off by 2^120, which the product restores.
    return mul_ieee(__uint_as_float(sign | magnitude << 20), 0x1p120f);
}
