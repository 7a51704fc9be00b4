// Instruction wrappers and number formats of the portable kernel: cp.async, ldmatrix, mma.sync, e4m3fn to fp16.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define DEVICE __device__ __forceinline__

constexpr float LN_2 = 0.6931471805599453f;

DEVICE float neg_inf() { return __int_as_float(0xff800000); }
DEVICE float exp2_approx(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEVICE float log2_approx(float x) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
// CuPy compiles with -ftz=true; these keep subnormal numbers, at the same cost.
DEVICE float mul_kept(float a, float b) { float r; asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float add_kept(float a, float b) { float r; asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float fma_kept(float a, float b, float c) {
    float r; asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c)); return r;
}
// 2^e, e from -149 to 127
DEVICE float power(int e) { return __int_as_float(e < -126 ? 1 << (149 + e) : (127 + e) << 23); }
// max and min that keep NaN
DEVICE float clamped(float x, float limit) {
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(limit));
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-limit));
    return x;
}
DEVICE unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// base + row * stride in one instruction
DEVICE const char* at_row(const char* base, int row, int stride) {
    const char* r;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(r) : "r"(row), "r"(stride), "l"(base));
    return r;
}

DEVICE void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Asynchronous copy of BYTES to shared memory; zeros, and no access to source memory, where !take.
template <int BYTES>
DEVICE void copy_async(unsigned to, const void* from, bool take) {
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(take ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(take ? BYTES : 0) : "memory");
}
template <int BYTES>
DEVICE void copy_async(unsigned to, const void* from) {
    if (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

DEVICE void load_matrices(unsigned at, unsigned (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
DEVICE void load_matrices_transposed(unsigned at, unsigned (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

// d (16 x 8, fp32) += a (16 x 16) b (16 x 8), operands bf16 or fp16.
template <bool BF16>
DEVICE void mma(float4& d, const unsigned* a, unsigned b0, unsigned b1) {
    if (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with d = 0 before.
template <bool BF16>
DEVICE void mma_from_zero(float4& d, const unsigned* a, unsigned b0, unsigned b1) {
    if (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
            : "=f"(d.x), "=f"(d.y), "=f"(d.z), "=f"(d.w) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
            : "=f"(d.x), "=f"(d.y), "=f"(d.z), "=f"(d.w) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

DEVICE unsigned pack_half(float low, float high) {
    unsigned r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r;
}
DEVICE unsigned pack_bf16(float low, float high) {
    unsigned r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r;
}
template <bool BF16> DEVICE unsigned pack_pair(float low, float high) { return BF16 ? pack_bf16(low, high) : pack_half(low, high); }
constexpr float LARGEST_FLOAT = 3.402823466e38f;
template <bool BF16> constexpr float LARGEST = BF16 ? 3.38953139e38f : 65504.f;
template <bool BF16> DEVICE float2 unpack_pair(unsigned x) {
    if (BF16) return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
DEVICE unsigned mul_half2(unsigned a, unsigned b) {
    unsigned r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;
}

// Four e4m3fn codes to fp16, exactly, NaN kept: the pairs of the low and the high half of the word.
DEVICE void widen(unsigned word, unsigned& low, unsigned& high) {
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(low), "=r"(high) : "r"(word));
#else
    // A code moved to the top of a half has its exponent off by 8, which a product by 256 restores, subnormals included.
    const unsigned pair[2] = {__byte_perm(word, 0, 0x1404), __byte_perm(word, 0, 0x3424)};
    unsigned out[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned magnitude = pair[i] & 0x7f007f00u;
        const unsigned nan = ((magnitude + 0x01000100u) & 0x80008000u) >> 15;  // 1 where the code is 0x7f or 0xff
        out[i] = mul_half2((pair[i] & 0x80008000u) | magnitude >> 1, 0x5c005c00u) | nan * 0x7e00u;
    }
    low = out[0];
    high = out[1];
#endif
}

DEVICE float lds(unsigned at) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at)); return v; }
DEVICE float2 lds2(unsigned at) { float2 v; asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at)); return v; }
DEVICE float4 lds4(unsigned at) { float4 v; asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at)); return v; }
DEVICE uint2 lds2u(unsigned at) { uint2 v; asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at)); return v; }
DEVICE unsigned ldsu(unsigned at) { unsigned v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at)); return v; }
DEVICE void sts(unsigned at, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory"); }
DEVICE void stsu(unsigned at, unsigned v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
DEVICE uint4 lds4u(unsigned at) { uint4 v; asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at)); return v; }
DEVICE void sts4u(unsigned at, uint4 v) { asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
DEVICE void sts4(unsigned at, float4 v) { asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory"); }
DEVICE void sts2u(unsigned at, unsigned x, unsigned y) { asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory"); }
DEVICE void sts16(unsigned at, unsigned short v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(v) : "memory"); }

DEVICE void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
