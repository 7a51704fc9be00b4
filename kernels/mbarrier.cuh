// Hand-over between warps (sm_90): mbarriers, named barriers, proxy fences, registers.
//
// An mbarrier counts arrivals; when the expected number has come, its phase flips and the count starts anew. A waiter
// names the parity of the phase it waits for: phase n (n = 0, 1, ...) has ended when wait(n & 1) returns. On a fresh
// barrier wait(1) returns at once, which is how a producer finds its buffers empty in the first round.
#pragma once
#include "mma.cuh"

DEVICE void barrier_init(unsigned bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEVICE void barrier_arrive(unsigned bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void barrier_wait(unsigned bar, unsigned parity) {
    asm volatile(
        "{.reg .pred p;\n"
        "WAIT_%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra WAIT_%=;}" ::"r"(bar), "r"(parity) : "memory");
}
// Named barriers 1 to 15; all warps that take part name the same number of threads.
DEVICE void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// What this thread wrote to shared memory becomes visible to wgmma, which reads by another path.
DEVICE void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int REGISTERS> DEVICE void registers_more() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS> DEVICE void registers_fewer() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// ---- shared memory accesses beside those of mma.cuh ----
DEVICE void store_matrices(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void sts1u(unsigned at, unsigned x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
DEVICE void sts4u(unsigned at, unsigned x, unsigned y, unsigned z, unsigned w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
DEVICE int4 lds4i(unsigned at) { int4 v; asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at)); return v; }
// threadIdx.x read anew, so that nothing derived from it is kept in registers across a loop.
DEVICE int thread_index() { int r; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r)); return r; }
// 16 bytes of global memory that is read once, or zeros without an access.
DEVICE void load_or_zero(uint4& v, const void* from, unsigned take) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %5, 0;\n"
        "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
        "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(from), "r"(take));
}
// An fp32 as two fp16, the nearest and what it leaves: together 22 bits.
DEVICE unsigned split_half(float x) {
    const float high = __half2float(__float2half_rn(x));
    return pack_half(high, x - high);
}
DEVICE unsigned fma_half2(unsigned a, unsigned b, unsigned c) {
    unsigned r; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r;
}
