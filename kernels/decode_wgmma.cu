// Paged sparse decode on Hopper's warpgroup tensor cores (sm_90a): FP8 pools, D = 512, groups of 64, 64 heads a CTA.
//
// Grid (num_ctas, blocks of 64 heads), one CTA of 512 threads a multiprocessor. Warpgroups 0 and 1 compute, 2 and 3
// produce (wgmma_producer.cuh: gather rows, widen them to fp16, fill the two tiles in shared memory in turn).
// Tile n has 64 slots. Warpgroup n % 2 scores it, both multiply it by their half of D:
//   QK    S (64 heads, 64 slots) = q (64, 512) k^T (512, 64)            wgmma from shared memory, warpgroup n % 2
//   soft  online softmax in registers; P in fp16 and what it is relative to go to shared memory as well
//   PV    O (64, 256 w ...) += P (64, 64) v (64, 256 w ...)             wgmma, v = the same tile read transposed;
//         warpgroup n % 2 takes P from its registers, its partner from shared memory
// so that one warpgroup's softmax runs beside the other's QK. A warp of one warpgroup has the same 16 heads as the warp
// of the same number of the other, and they alone hand P over to each other.
//
// Numerics. The largest scale of a slot is taken out as a power of two, 2^e: operand = fp16(code * scale * 2^-e), the
// ratio scale * 2^-e, in [1, 2) for the largest group, being the sum of two fp16. Scores are S * 2^e * (q's own power of
// two) in fp32; P' = exp2(s + e - ref) carries 2^e back into PV, and l sums P' * 2^-e in fp32. q is taken to fp16 after a
// power of two per head that puts its largest element into [2^14, 2^15). ref is lazy: it moves when the maximum has
// grown by 2^8, so P' <= 2^14 in fp16; it goes from tile to tile, and so from warpgroup to warpgroup, with P. e is at
// least -88 so that l stays in range. Slots outside the pool or past the segment's end have codes 0 and e = -inf:
// probability 0, nothing read. An empty row gives 0 and -inf. Finite q, rows and scales give finite results; rows whose
// largest scale is below 2^-88 lose bits.
//
// The operand's rounding makes an error of scores of about 2e-4 of their spread. Simulated on a CPU, 400 slots: output
// error 1.8e-3 in bf16 where scores spread by 3 (natural logarithm), up to 2.9e-3 where by 27.
//
// Descriptors of wgmma must be known to be equal in all lanes (made from a shuffled warp index and loop counters): from
// anything else the compiler moves each into uniform registers by a loop, about 120 cycles an instruction. Tried and
// slower: a warpgroup for QK alone beside two for PV; a cluster of two CTAs that share a tile's rows or halves of D.
//
// Rows are stored by ordinary stores and read by wgmma, so a proxy fence stands between. It waits for all memory accesses of
// its thread, and producers have the next rows' loads under way: the readers fence, after the barrier that says FULL.
//
// Shared memory (bytes): q 64 K, two tiles 128 K, P 16 K; wgmma_layout.cuh has the map.
#include "wgmma_layout.cuh"
#include "wgmma_producer.cuh"

// q (8 heads of each of 8 warps) to shared memory as fp16, each head times a power of two, and the factors that take
// S * 2^(e - GUARD) to log2 units.
DEVICE void load_queries(const DecodeParams& p, unsigned base, int row) {
    constexpr int WARP_HEADS = 8;
    const int warp = thread_index() >> 5, lane = thread_index() & 31;
    const char* q = static_cast<const char*>(p.q) + 2 * (row * p.q_stride_token) + lane * 16;
    uint4 x[WARP_HEADS][2];              // dimensions 8 lane ..., 256 + 8 lane ...
#pragma unroll
    for (int i = 0; i < WARP_HEADS; ++i) {
        const int head = blockIdx.y * HEADS + warp * WARP_HEADS + i;
        const uint4* from = reinterpret_cast<const uint4*>(q + 2 * (head * p.q_stride_head));
        const bool exists = head < p.num_heads;
        x[i][0] = exists ? __ldg(from) : make_uint4(0, 0, 0, 0);
        x[i][1] = exists ? __ldg(from + 32) : make_uint4(0, 0, 0, 0);
    }
    const int block = lane >> 3, chunk = (lane & 7) ^ (block & 1);   // block + 4 is odd where block is
#pragma unroll
    for (int i = 0; i < WARP_HEADS; ++i) {
        unsigned w[8] = {x[i][0].x, x[i][0].y, x[i][0].z, x[i][0].w, x[i][1].x, x[i][1].y, x[i][1].z, x[i][1].w};
        float most = 0.f;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float2 a = unpack_pair<Q_BF16>(w[k]);
            most = fmaxf(most, fmaxf(fabsf(a.x), fabsf(a.y)));
        }
#pragma unroll
        for (int m = 1; m < 32; m *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
        // A zero, infinite or NaN head keeps the exponent in range.
        const int e = min(max(14 - ((int)(__float_as_uint(most) >> 23) - 127), -113), 120);
        const float up = __int_as_float((127 + e) << 23);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float2 a = unpack_pair<Q_BF16>(w[k]);
            w[k] = pack_half(mul_kept(a.x, up), mul_kept(a.y, up));
        }
        const int head = warp * WARP_HEADS + i;
        const unsigned at = base + Q_AT + block * BLOCK_BYTES + head * 128 + ((chunk ^ i) << 4);
        sts4u(at, w[0], w[1], w[2], w[3]);
        sts4u(at + 4 * BLOCK_BYTES, w[4], w[5], w[6], w[7]);
        const float scale = p.scale_log2 * power(GUARD) * __int_as_float((127 - e) << 23);
        if (lane == 0) sts(base + SCALE_AT + head * 4, fminf(fmaxf(scale, -3e38f), 3e38f));
    }
}

// 2^-e from 2^(e - GUARD); something finite from 0.
DEVICE float inverse_of(float up) { return __int_as_float(((254 - GUARD) << 23) - __float_as_int(up)); }

// Online softmax of 64 heads x 64 slots; this thread's part: heads g and g + 8 of its warp, slots 8 j + 2 t, + 1.
struct Softmax {
    float ref0, ref1, l0, l1;

    DEVICE void start() {
        ref0 = ref1 = FIRST_REF;
        l0 = l1 = 0.f;
    }
    // s -> log2 score + e, and the largest of each head in the tile. `factors`: of slots 2t, 2t + 1; `to_log2`: of this
    // thread's heads, what takes S * 2^(e - GUARD) to log2 units.
    static DEVICE float2 scores(float (&s)[32], unsigned factors, float2 to_log2) {
        float top0 = neg_inf(), top1 = neg_inf();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float4 f = lds4(factors + j * 64);
            s[4 * j] = clamped(s[4 * j] * f.x * to_log2.x, SCORE_MAX) + f.z;
            s[4 * j + 1] = clamped(s[4 * j + 1] * f.y * to_log2.x, SCORE_MAX) + f.w;
            s[4 * j + 2] = clamped(s[4 * j + 2] * f.x * to_log2.y, SCORE_MAX) + f.z;
            s[4 * j + 3] = clamped(s[4 * j + 3] * f.y * to_log2.y, SCORE_MAX) + f.w;
            top0 = fmaxf(top0, fmaxf(s[4 * j], s[4 * j + 1]));
            top1 = fmaxf(top1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
        }
        top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 1));
        top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 1));
        top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 2));
        top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 2));
        return make_float2(top0, top1);
    }
    // Moves the reference where the maximum has grown much; o is idle.
    DEVICE void move(float2 top, float (&o)[128]) {
        const bool move0 = top.x - HEADROOM > ref0 + LAZY, move1 = top.y - HEADROOM > ref1 + LAZY;
        follow(move0 ? top.x - HEADROOM : ref0, move1 ? top.y - HEADROOM : ref1, o);
    }
    DEVICE void follow(float new0, float new1, float (&o)[128]) {
        if (!__any_sync(~0u, new0 != ref0 || new1 != ref1)) return;
        const float f0 = exp2_approx(ref0 - new0), f1 = exp2_approx(ref1 - new1);
#pragma unroll
        for (int j = 0; j < 32; ++j) { o[4 * j] *= f0; o[4 * j + 1] *= f0; o[4 * j + 2] *= f1; o[4 * j + 3] *= f1; }
        l0 *= f0; l1 *= f1;
        ref0 = new0; ref1 = new1;
    }
    // P' as the A operand of PV, and l.
    DEVICE void probabilities(const float (&s)[32], unsigned (&a)[16], unsigned factors) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float2 up = lds2(factors + j * 64);
            const float2 inverse = make_float2(inverse_of(up.x), inverse_of(up.y));
            const float x = exp2_approx(s[4 * j] - ref0), y = exp2_approx(s[4 * j + 1] - ref0);
            const float z = exp2_approx(s[4 * j + 2] - ref1), w = exp2_approx(s[4 * j + 3] - ref1);
            l0 = fmaf(x, inverse.x, l0); l0 = fmaf(y, inverse.y, l0);
            l1 = fmaf(z, inverse.x, l1); l1 = fmaf(w, inverse.y, l1);
            a[2 * j] = pack_half(x, y);
            a[2 * j + 1] = pack_half(z, w);
        }
    }
};

DEVICE void issue_qk(float (&s)[32], Descriptor q, Descriptor k) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
        const int step = (i >> 2) * BLOCK_BYTES + (i & 3) * 32;
        wgmma_64x64(s, further(q, step), further(k, step), i > 0);
    }
    wgmma_commit();
}
DEVICE void issue_pv(float (&o)[128], const unsigned (&a)[16], Descriptor v) {
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i) {
        wgmma_64x128<0>(o, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], further(v, i * 2048));
        wgmma_64x128<64>(o, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], further(v, i * 2048 + 2 * BLOCK_BYTES));
    }
    wgmma_commit();
}

// The segment's end: O / l to out, or a partial.
DEVICE void finish(const DecodeParams& p, const float (&o)[128], const Softmax& soft, unsigned base, int ring, int warpgroup) {
    const int4 info = lds4i(base + SEGMENTS_AT + 16 * ring);
    const int thread = thread_index(), warp = thread >> 5 & 3, g = thread >> 2 & 7, t = thread & 3, row = info.x, partial = info.z;
    float l[2] = {soft.l0, soft.l1};
#pragma unroll
    for (int i = 0; i < 2; ++i) {        // of the tiles of this warpgroup; the partner has the others
        l[i] += __shfl_xor_sync(~0u, l[i], 1);
        l[i] += __shfl_xor_sync(~0u, l[i], 2);
        if (t == 0) sts(base + SUMS_AT + (warpgroup * HEADS + warp * 16 + 8 * i + g) * 4, l[i]);
    }
    named_sync(2 + warp, 64);
    const bool direct = partial < 0;
    if (!direct && partial >= p.num_partials) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int local = warp * 16 + 8 * i + g, head = blockIdx.y * HEADS + local;
        const float sum = lds(base + SUMS_AT + local * 4) + lds(base + SUMS_AT + (HEADS + local) * 4);   // in one order for both
        if (head >= p.num_heads) continue;
        const float lse2 = sum == 0.f ? neg_inf() : (i ? soft.ref1 : soft.ref0) + log2f(sum);
        float factor = sum == 0.f ? 0.f : 1.f / sum;
        if (direct && p.sink) factor *= sink_factor(lse2, __ldg(p.sink + head));
        if (warpgroup == 0 && t == 0) {
            if (!direct) p.partial_lse2[(long long)partial * p.num_heads + head] = lse2;
            else if (p.lse) p.lse[(long long)row * p.num_heads + head] = lse2 * LN_2;
        }
        const int dim0 = warpgroup * 256 + 2 * t;
        float* part = p.partial_out + ((long long)partial * p.num_heads + head) * HEAD_DIM + dim0;
        unsigned short* out = static_cast<unsigned short*>(p.out) + row * p.out_stride_token + head * p.out_stride_head + dim0;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            const int dim = (j & ~7) * 8 + ((j & 7) ^ (j >> 3 & 1)) * 8;   // chunks change places in odd blocks
            // Finite, or NaN; the product may overflow by a rounding, or in fp16.
            const float most = direct ? LARGEST<Q_BF16> : LARGEST_FLOAT;
            const float x = clamped(o[4 * j + 2 * i] * factor, most), y = clamped(o[4 * j + 2 * i + 1] * factor, most);
            if (!direct) *reinterpret_cast<float2*>(part + dim) = make_float2(x, y);
            else *reinterpret_cast<unsigned*>(out + dim) = pack_pair<Q_BF16>(x, y);
        }
    }
}

// Threads find out who they are anew in every tile: what follows from it costs less to make than to keep.
struct Lane {
    int lane, warp;                      // warp of 4
    DEVICE Lane() { const int thread = thread_index(); lane = thread & 31; warp = thread >> 5 & 3; }
    // This lane's heads in arrays of 64 floats; those 8 further on are 32 bytes further on.
    DEVICE unsigned heads() const { return (warp * 16 + (lane >> 2)) * 4; }
    // Its rows of P for stmatrix and ldmatrix: matrices (heads 0-7, 8-15 of the warp) x (chunks j, j + 1).
    DEVICE unsigned p_chunk(int j) const { return (warp * 16 + (lane & 15)) * 128 + (((j + (lane >> 4)) ^ (lane & 7)) << 4); }
};

DEVICE void compute(const DecodeParams& p, unsigned base, int warpgroup) {
    unsigned n = 0;                      // tile
    for (int segment = 0;; ++segment) {
        float o[128];
        Softmax soft;
        barrier_wait(base + SEGMENT_FULL + 8 * (segment % RING), segment / RING & 1);
        const unsigned info = base + SEGMENTS_AT + 16 * (segment % RING);
        const int row = __shfl_sync(~0u, (int)ldsu(info), 0), tiles = __shfl_sync(~0u, ((int)ldsu(info + 4) + TILE - 1) / TILE, 0);
        if (row < 0) break;
        named_sync(1, 256);              // both are through with the old q
        load_queries(p, base, row);
        fence_for_wgmma();
        named_sync(1, 256);
        soft.start();
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0.f;

        for (const unsigned end = n + tiles; n != end; ++n) {
            const int buffer = n & 1;
            const unsigned phase = n >> 1 & 1, tile = base + TILES_AT + buffer * BUFFER_BYTES;
            unsigned a[16];
            barrier_wait(base + FULL + 8 * buffer, phase);
            fence_for_wgmma();
            if (buffer == warpgroup) {
                float s[32];
#pragma unroll
                for (int i = 0; i < 32; ++i) s[i] = 0.f;
                pin(s);
                wgmma_fence();
                issue_qk(s, k_major(base + Q_AT), k_major(tile));
                wgmma_wait<0>();
                pin(s);
                const Lane me;
                const unsigned factors = base + FACTORS_AT + buffer * FACTOR_BYTES + (me.lane & 3) * 16, scale = base + SCALE_AT + me.heads();
                soft.move(soft.scores(s, factors, make_float2(lds(scale), lds(scale + 32))), o);
                soft.probabilities(s, a, factors);
#pragma unroll
                for (int j = 0; j < 8; j += 2)
                    store_matrices(base + P_AT + buffer * P_BYTES + me.p_chunk(j), a[2 * j], a[2 * j + 1], a[2 * j + 2], a[2 * j + 3]);
                if ((me.lane & 3) == 0) {
                    const unsigned refs = base + REFS_AT + buffer * (HEADS * 4) + me.heads();
                    sts(refs, soft.ref0);
                    sts(refs + 32, soft.ref1);
                }
                __syncwarp();
                if (me.lane == 0) barrier_arrive(base + P_FULL + 8 * (4 * buffer + me.warp));
            } else {
                const Lane me;
                barrier_wait(base + P_FULL + 8 * (4 * buffer + me.warp), phase);
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    unsigned r[4];
                    load_matrices(base + P_AT + buffer * P_BYTES + me.p_chunk(j), r);
                    a[2 * j] = r[0]; a[2 * j + 1] = r[1]; a[2 * j + 2] = r[2]; a[2 * j + 3] = r[3];
                }
                const unsigned refs = base + REFS_AT + buffer * (HEADS * 4) + me.heads();
                soft.follow(lds(refs), lds(refs + 32), o);
            }
            pin(o);
            pin(a);
            wgmma_fence();
            issue_pv(o, a, transposed<TILE>(tile + warpgroup * (4 * BLOCK_BYTES)));
            wgmma_wait<0>();
            pin(o);
            if (Lane().lane == 0) barrier_arrive(base + EMPTY + 8 * buffer);
        }
        finish(p, o, soft, base, segment % RING, warpgroup);
        if (Lane().lane == 0) barrier_arrive(base + SEGMENT_EMPTY + 8 * (segment % RING));
    }
}

extern "C" __global__ void __launch_bounds__(512, 1) decode_wgmma(const __grid_constant__ DecodeParams p) {
    allow_next_kernel();
    const unsigned base = shared_address(smem);
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < BUFFERS; ++i) {
            barrier_init(base + FULL + 8 * i, PRODUCER_WARPS);
            barrier_init(base + EMPTY + 8 * i, 8);
            for (int w = 0; w < 4; ++w) barrier_init(base + P_FULL + 8 * (4 * i + w), 1);
        }
        for (int i = 0; i < RING; ++i) {
            barrier_init(base + SEGMENT_FULL + 8 * i, 1);
            barrier_init(base + SEGMENT_EMPTY + 8 * i, 8);
        }
    }
    clear_places(p, blockIdx.x, blockIdx.y * HEADS, HEADS, threadIdx.x, 512);
    __syncthreads();
    if (warp >= 8) {
        registers_fewer<PRODUCER_REGISTERS>();
        Producer producer{base, warp - 8, (int)threadIdx.x & 31};
        producer.run(p);
    } else {
        registers_more<COMPUTE_REGISTERS>();
        compute(p, base, warp >> 2);
    }
}
