// Warpgroup matrix instructions (sm_90a) on fp16 operands with fp32 accumulators, and their shared-memory descriptors.
//
// Operand tiles in shared memory are made of blocks of 64 dimensions: R rows (heads or slots) of 128 bytes, so R * 128
// bytes a block, blocks one after the other. Within a row, the 16-byte chunk c stands at c ^ (row & 7) (the hardware's
// 128-byte swizzle; every block begins at a multiple of 1024 bytes). The same tile is read two ways:
//   K-major (QK: the sum runs over dimensions): 16 dimensions are a step of 32 bytes, rows 8 apart are 1024 bytes apart;
//   transposed (PV: the sum runs over slots): 16 slots are a step of 2048 bytes, 64 dimensions apart is the next block.
// Accumulator of a thread, g = lane / 4, t = lane % 4, in warp w of the warpgroup: d[4 j .. 4 j + 3] = (row 16 w + g;
// columns 8 j + 2 t, + 1), (row 16 w + g + 8; the same columns). A in registers has the layout of packed accumulators:
// a0, a1 = rows g, g + 8 at columns 2 t, + 1; a2, a3 the same rows at columns 2 t + 8, + 9 of a 16-column step.
#pragma once
#include "mma.cuh"

using Descriptor = unsigned long long;

// Bits 0-13: address / 16; 16-29 and 32-45: leading and stride byte offset / 16; 62: 128-byte swizzle.
template <unsigned LEADING, unsigned STRIDE> constexpr Descriptor LAYOUT = 1ull << 62 | (Descriptor)(LEADING >> 4) << 16 | (Descriptor)(STRIDE >> 4) << 32;
DEVICE Descriptor k_major(unsigned at) { return LAYOUT<16, 1024> | (at & 0x3ffff) >> 4; }
template <int ROWS> DEVICE Descriptor transposed(unsigned at) { return LAYOUT<128 * ROWS, 1024> | (at & 0x3ffff) >> 4; }
// `bytes` further on; the low word alone changes.
DEVICE Descriptor further(Descriptor d, int bytes) { return (d & 0xffffffff00000000ull) | ((unsigned)d + (bytes >> 4)); }

// Before the first wgmma: registers written by this thread are complete.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory"); }
// The compiler must neither move uses of these registers across this point nor keep copies of them: wgmma changes them
// behind its back between issue and wait.
template <int N> DEVICE void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> DEVICE void pin(unsigned (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// d (64 x 64) = a (64 x 16) b (16 x 64) [+ d], both from shared memory, K-major.
DEVICE void wgmma_64x64(float (&d)[32], Descriptor a, Descriptor b, bool add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"((int)add));
}

// d (64 x 128) += a (64 x 16) b (16 x 128), a from registers, b transposed from shared memory; d is FIRST ... of an array.
template <int FIRST> DEVICE void wgmma_64x128(float (&d)[128], unsigned a0, unsigned a1, unsigned a2, unsigned a3, Descriptor b) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 1;}"
        : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]), "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]),
          "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]), "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]), "+f"(d[FIRST + 15]),
          "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]), "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]),
          "+f"(d[FIRST + 24]), "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]), "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]),
          "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]), "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
          "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]), "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]),
          "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]), "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]), "+f"(d[FIRST + 55]),
          "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]), "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
