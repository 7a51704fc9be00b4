// Paged sparse decode on Hopper's warpgroup tensor cores (sm_90a): FP8 pools, D = 512, groups of 64, 33 to 128 heads.
// In the making: not chosen for calls (variants.py), because sharp softmax is beyond the error bound; see State below.
//
// Three warpgroups: 0 and 1 compute, 2 produces. A computing warpgroup owns 64 heads x 256 dimensions (one half of D),
// for QK and for PV, and works together with a partner that owns the other half for the same heads:
//   CLUSTER = 1   grid (num_ctas, blocks of 64 heads). The partners are warpgroups 0 and 1 of one CTA.
//   CLUSTER = 2   grid (num_ctas, 2 * blocks of 128 heads), clusters of 2 along y. Warpgroup w has heads 64 w ... of the
//                 block, CTA r the half r of D; the partner is the same warpgroup of the other CTA. A row is read and
//                 widened once for 128 heads, half of it by each CTA.
//
// One tile of 64 slots, in a computing warpgroup:
//   QK    S_half (64 heads, 64 slots) = q (64, 256) k^T (256, 64)       wgmma, both operands from shared memory
//   swap  S = S_half + the partner's S_half, 16 KB each way
//   soft  online softmax, by both partners, of the same bits; P stays in registers as the A operand of
//   PV    O (64, 256) += P (64, 64) v (64, 256)                          wgmma, v = the same tile read transposed
// The producers run one tile ahead in registers (slot ids two ahead), over segment borders: they load the codes of a row
// with plain loads, 16 bytes a lane, widen them to fp16 and store them into the next free of BUFFERS tiles.
//
// Rows of the tile after next are prefetched to L2.
//
// Numerics. The largest scale of a slot is taken out as a power of two, 2^e: operand = fp16(code * scale * 2^-e), the
// ratio scale * 2^-e, in [1, 2) for the largest group, being one fp16 or (EXACT_SCALES) the sum of two. Scores are
// S * 2^e * (q's own power of two) in fp32; P' = exp2(s + e - ref) carries 2^e back into PV, and l sums P' * 2^-e in fp32. q is taken to fp16 after a power of two per head that puts its
// largest element into [2^14, 2^15). ref is lazy: it moves when the maximum has grown by 2^8, so P' <= 2^14 in fp16.
// e is at least -88 so that l stays in range. Slots outside the pool or past the segment's end have codes 0 and e = -inf:
// probability 0, nothing read. An empty row gives 0 and -inf.
//
// The operand's rounding makes an error of scores of about 2e-4 of their spread. Simulated on a CPU with EXACT_SCALES,
// 400 slots: output error 1.8e-3 in bf16 where scores spread by 3 (natural logarithm), up to 2.9e-3 where by 27.
//
// State, H200, us with combine, EXACT_SCALES = 1 / 0: H = 64 (128, 2176) 132 / 122, (512, 2176) 499 / 459; H = 128
// (128, 2176) 229 / 226, (512, 2176) 880 / 874: about 5000 cycles a tile and multiprocessor where some 2700 were
// expected, for a reason not found yet. A build without the prefetch to L2, without the second fp16 of ratios and with
// QK, softmax and PV one after the other took 113 and 427 (H = 64), 259 and 1008 (H = 128, there with cluster-scope
// fences in the swap); the two differ in several things at once. Next: a clock around each wait. Not tested on a GPU:
// NaN, strides, extreme scales, malformed kv_indptr, graph replay, repeated bits.
//
// Shared memory (bytes): q 64 K, tiles BUFFERS * 64 slots * 512 (128 K or 96 K), swap 32 K, then factors of slots,
// group factors on their way from scales to codes, schedule, barriers.
#include "wgmma_layout.cuh"
#include "wgmma_producer.cuh"

// What a computing warpgroup owns.
struct Place {
    int half, head0;                     // half of D; first of its 64 heads
    DEVICE Place(int warpgroup, int rank)
        : half(PAIR ? rank : warpgroup), head0(PAIR ? (blockIdx.y >> 1) * 128 + warpgroup * 64 : blockIdx.y * 64) {}
};

// q (16 heads of this warp) x (this half of D) to shared memory as fp16, each head times a power of two; returns the
// factors that take S * 2^(e - GUARD) to log2 units, for heads g and g + 8.
template <bool ALIGNED>
DEVICE float2 load_queries(const DecodeParams& p, const char* q, unsigned q_at, int head0, int half, int warp, int lane) {
    constexpr int BATCH = ALIGNED ? 8 : 1;   // heads whose loads are in flight together
    const int block = lane >> 3, chunk = (lane & 7) ^ (block & 1);
    int mine[2] = {0, 0};                // exponents of heads g and g + 8
#pragma unroll 1
    for (int h0 = 0; h0 < 16; h0 += BATCH) {
        uint4 x[BATCH], y[BATCH];        // 8 dimensions of this half; of the other half, for the maximum alone
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int head = head0 + warp * 16 + h0 + i;
            x[i] = y[i] = make_uint4(0, 0, 0, 0);
            if (head < p.num_heads) {
                const char* from = q + 2 * (head * p.q_stride_head + half * HALF_DIMS + lane * 8);
                const char* other = from + (half ? -2 : 2) * HALF_DIMS;
                if (ALIGNED) {
                    x[i] = __ldg(reinterpret_cast<const uint4*>(from));
                    y[i] = __ldg(reinterpret_cast<const uint4*>(other));
                } else {
                    x[i] = load_unaligned(from);
                    y[i] = load_unaligned(other);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            unsigned w[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
            const unsigned v[4] = {y[i].x, y[i].y, y[i].z, y[i].w};
            float most = 0.f;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 a = unpack_pair<Q_BF16>(w[k]), b = unpack_pair<Q_BF16>(v[k]);
                most = fmaxf(most, fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))));
            }
#pragma unroll
            for (int m = 1; m < 32; m *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
            // A zero, infinite or NaN head keeps the exponent in range.
            const int e = min(max(14 - ((int)(__float_as_uint(most) >> 23) - 127), -113), 120);
            const float up = __int_as_float((127 + e) << 23);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 a = unpack_pair<Q_BF16>(w[k]);
                w[k] = pack_half(a.x * up, a.y * up);
            }
            const int local = h0 + i, at = warp * 16 + local;
            sts4u(q_at + block * BLOCK_BYTES + at * 128 + ((chunk ^ (local & 7)) << 4), w[0], w[1], w[2], w[3]);
            if (local == (lane >> 2)) mine[0] = e;
            if (local == (lane >> 2) + 8) mine[1] = e;
        }
    }
    float2 factor;
    const float scale = p.scale_log2 * (float)(1 << GUARD);
    factor.x = fminf(fmaxf(scale * __int_as_float((127 - mine[0]) << 23), -3e38f), 3e38f);
    factor.y = fminf(fmaxf(scale * __int_as_float((127 - mine[1]) << 23), -3e38f), 3e38f);
    return factor;
}

// S (this half of D) -> S. Thread by thread: the partner's thread of the same number holds the same heads and slots.
struct Swap {
    unsigned base, partner;              // partner: what takes an address of this CTA to the partner's (CLUSTER = 2)
    unsigned phase;

    DEVICE Swap(unsigned base_, int rank) : base(base_), partner(PAIR ? cluster_address(base_, rank ^ 1) - base_ : 0), phase(0) {}
    DEVICE void send(const float (&s)[32], int thread) {
        const int warpgroup = thread >> 7;
        if (PAIR) {
            barrier_wait(base + SWAP_EMPTY + 8 * warpgroup, phase ^ 1);
            const unsigned full = base + SWAP_FULL + 8 * warpgroup;
            if ((thread & 127) == 0) barrier_expect(full, SWAP_BYTES);
            const unsigned to = partner + base + SWAP_AT + warpgroup * SWAP_BYTES + (thread & 127) * 16;
#pragma unroll
            for (int j = 0; j < 8; ++j) store_remote(to + j * 2048, s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3], partner + full);
        } else {
            named_sync(5 + (thread >> 5 & 3), 64);   // the partner's warp has read the tile before
            const unsigned to = base + SWAP_AT + (warpgroup ^ 1) * SWAP_BYTES + (thread & 127) * 16;
#pragma unroll
            for (int j = 0; j < 8; ++j) sts4(to + j * 2048, make_float4(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]));
        }
    }
    DEVICE void receive(float (&s)[32], int thread) {
        const int warpgroup = thread >> 7;
        if (PAIR) barrier_wait(base + SWAP_FULL + 8 * warpgroup, phase);
        else named_sync(1 + (thread >> 5 & 3), 64);
        const unsigned at = base + SWAP_AT + warpgroup * SWAP_BYTES + (thread & 127) * 16;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float4 v = lds4(at + j * 2048);
            s[4 * j] += v.x; s[4 * j + 1] += v.y; s[4 * j + 2] += v.z; s[4 * j + 3] += v.w;
            if (j == 3) __syncwarp();    // no more than 16 registers of loads at once
        }
        if (PAIR) {
            __syncwarp();
            if ((thread & 31) == 0) barrier_arrive_remote(partner + base + SWAP_EMPTY + 8 * warpgroup);
            phase ^= 1;
        }
    }
};

// 2^-e from 2^(e - GUARD); something finite from 0.
DEVICE float inverse_of(float up) { return __int_as_float(((254 - GUARD) << 23) - __float_as_int(up)); }

// Online softmax of 64 heads x 64 slots; this thread's part: heads g and g + 8 of its warp, slots 8 j + 2 t, + 1.
struct Softmax {
    float2 to_log2;                      // S * 2^(e - GUARD) to log2 units
    float ref0, ref1, l0, l1;

    DEVICE void start(float2 factors) {
        to_log2 = factors;
        ref0 = ref1 = FIRST_REF;
        l0 = l1 = 0.f;
    }
    // s -> log2 score + e, and the largest of each head in the tile. `factors`: of slots 2t, 2t + 1.
    DEVICE float2 scores(float (&s)[32], unsigned factors) const {
        float top0 = neg_inf(), top1 = neg_inf();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float4 f = lds4(factors + j * 64);
            s[4 * j] = fmaf(s[4 * j] * f.x, to_log2.x, f.z);
            s[4 * j + 1] = fmaf(s[4 * j + 1] * f.y, to_log2.x, f.w);
            s[4 * j + 2] = fmaf(s[4 * j + 2] * f.x, to_log2.y, f.z);
            s[4 * j + 3] = fmaf(s[4 * j + 3] * f.y, to_log2.y, f.w);
            top0 = fmaxf(top0, fmaxf(s[4 * j], s[4 * j + 1]));
            top1 = fmaxf(top1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
        }
        top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 1));
        top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 1));
        top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 2));
        top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 2));
        if (__any_sync(~0u, fmaxf(top0, top1) > SCORE_MAX)) {   // scores of finite rows that overflowed; NaN stays
#pragma unroll
            for (int i = 0; i < 32; ++i) s[i] = s[i] > SCORE_MAX ? SCORE_MAX : s[i];
            top0 = fminf(top0, SCORE_MAX);
            top1 = fminf(top1, SCORE_MAX);
        }
        return make_float2(top0, top1);
    }
    // Moves the reference where the maximum has grown much; o is idle.
    DEVICE void move(float2 top, float (&o)[128]) {
        const bool move0 = top.x - HEADROOM > ref0 + LAZY, move1 = top.y - HEADROOM > ref1 + LAZY;
        if (!__any_sync(~0u, move0 || move1)) return;
        const float new0 = move0 ? top.x - HEADROOM : ref0, new1 = move1 ? top.y - HEADROOM : ref1;
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

// Keeps the compiler from holding 16 loop-invariant descriptors in registers.
DEVICE unsigned opaque(unsigned x) { unsigned r; asm volatile("mov.u32 %0, %1;" : "=r"(r) : "r"(x)); return r; }

DEVICE void issue_qk(float (&s)[32], unsigned q_at, unsigned k_at) {
    q_at = opaque(q_at);
    k_at = opaque(k_at);
#pragma unroll
    for (int k = 0; k < HALF_DIMS / 16; ++k) {
        const int step = (k >> 2) * BLOCK_BYTES + (k & 3) * 32;
        wgmma_64x64(s, k_major(q_at + step), k_major(k_at + step), k > 0);
    }
    wgmma_commit();
}
DEVICE void issue_pv(float (&o)[128], const unsigned (&a)[16], unsigned v_at) {
    v_at = opaque(v_at);
#pragma unroll
    for (int k = 0; k < TILE / 16; ++k)
        wgmma_64x256(o, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3], transposed<TILE>(v_at + k * 2048));
    wgmma_commit();
}

// The segment's end: O / l to out, or a partial. Reads its place anew, so that the tiles' loop need not hold it.
DEVICE void finish(const DecodeParams& p, const float (&o)[128], const Softmax& soft, int ring, int rank) {
    const int thread = thread_index(), lane = thread & 31, warp = thread >> 5 & 3, warpgroup = thread >> 7, g = lane >> 2, t = lane & 3;
    const Place at(warpgroup, rank);
    const int4 info = lds4i(shared_address(smem) + SEGMENTS_AT + 16 * ring);
    const int row = info.x, partial = info.z;
    float l0 = soft.l0, l1 = soft.l1;
    l0 += __shfl_xor_sync(~0u, l0, 1);
    l1 += __shfl_xor_sync(~0u, l1, 1);
    l0 += __shfl_xor_sync(~0u, l0, 2);
    l1 += __shfl_xor_sync(~0u, l1, 2);
    const bool direct = partial < 0;
    if (!direct && partial >= p.num_partials) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float l = i ? l1 : l0;
        const int head = at.head0 + warp * 16 + 8 * i + g;
        if (head >= p.num_heads) continue;
        const float lse2 = l == 0.f ? neg_inf() : (i ? soft.ref1 : soft.ref0) + log2f(l);
        float factor = l == 0.f ? 0.f : 1.f / l;
        if (direct && p.sink) factor *= sink_factor(lse2, __ldg(p.sink + head));
        if (at.half == 0 && t == 0) {
            if (!direct) p.partial_lse2[(long long)partial * p.num_heads + head] = lse2;
            else if (p.lse) p.lse[(long long)row * p.num_heads + head] = lse2 * LN_2;
        }
        const int dim0 = at.half * HALF_DIMS + 2 * t;
        float* part = p.partial_out + ((long long)partial * p.num_heads + head) * HEAD_DIM + dim0;
        unsigned short* out = static_cast<unsigned short*>(p.out) + row * p.out_stride_token + head * p.out_stride_head + dim0;
        const bool aligned = (reinterpret_cast<unsigned long long>(out) & 3) == 0;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            const int dim = (j & ~7) * 8 + ((j & 7) ^ (j >> 3 & 1)) * 8;   // chunks change places in odd blocks
            const float x = o[4 * j + 2 * i] * factor, y = o[4 * j + 2 * i + 1] * factor;
            if (!direct) {
                *reinterpret_cast<float2*>(part + dim) = make_float2(x, y);
            } else {
                const unsigned both = result_pair<Q_BF16>(x, y);
                if (aligned) *reinterpret_cast<unsigned*>(out + dim) = both;
                else { out[dim] = (unsigned short)both; out[dim + 1] = (unsigned short)(both >> 16); }
            }
        }
    }
}

// Threads find out who they are anew in every tile: what follows from it costs less to make than to keep.
DEVICE void compute(const DecodeParams& p, unsigned base, int rank) {
    Swap swap(base, rank);
    int buffer = 0;                      // of the next tile
    unsigned phase = 0;
    auto k_at = [&](int b) { return base + TILES_AT + b * BUFFER_BYTES + (PAIR ? 0 : (thread_index() >> 7) * (HALF_DIMS / 64) * BLOCK_BYTES); };
    auto q_at = [&] { return base + Q_AT + (thread_index() >> 7) * WARPGROUP_BYTES; };
    auto factors_at = [&](int b) { return base + FACTORS_AT + b * FACTOR_BYTES + (thread_index() & 3) * 16; };
    auto await_tile = [&] { barrier_wait(base + FULL + 8 * buffer, phase); };
    auto release = [&](int b) { if ((thread_index() & 31) == 0) barrier_arrive(base + EMPTY + 8 * b); };
    auto next = [&] { if (++buffer == BUFFERS) { buffer = 0; phase ^= 1; } };

    for (int segment = 0;; ++segment) {
        float o[128], s[32];
        Softmax soft;
        int tiles;
        {
            const int thread = thread_index(), lane = thread & 31, warp = thread >> 5 & 3, warpgroup = thread >> 7, ring = segment % RING;
            barrier_wait(base + SEGMENT_FULL + 8 * ring, segment / RING & 1);
            const int4 info = lds4i(base + SEGMENTS_AT + 16 * ring);
            if (info.x < 0) break;
            tiles = (info.y + TILE - 1) / TILE;
            const Place at(warpgroup, rank);
            const char* q = static_cast<const char*>(p.q) + 2 * (info.x * p.q_stride_token);
            const bool aligned = ((reinterpret_cast<unsigned long long>(q) | 2 * p.q_stride_head) & 15) == 0;
            named_sync(9 + warpgroup, 128);   // every warp is through with the old q
            soft.start(aligned ? load_queries<true>(p, q, q_at(), at.head0, at.half, warp, lane)
                               : load_queries<false>(p, q, q_at(), at.head0, at.half, warp, lane));
            fence_for_wgmma();
            named_sync(9 + warpgroup, 128);
        }
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0.f;
#pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = 0.f;

        if (!PIPELINED) {
            for (; tiles > 0; --tiles) {
                await_tile();
                pin(s);
                wgmma_fence();
                issue_qk(s, q_at(), k_at(buffer));
                const int thread = thread_index();
                const unsigned factors = factors_at(buffer);
                wgmma_wait<0>();
                pin(s);
                swap.send(s, thread);
                swap.receive(s, thread);
                soft.move(soft.scores(s, factors), o);
                unsigned a[16];
                soft.probabilities(s, a, factors);
                pin(o);
                pin(a);
                wgmma_fence();
                issue_pv(o, a, k_at(buffer));
                wgmma_wait<0>();
                pin(o);
                release(buffer);
                next();
            }
        } else if (tiles > 0) {
            // PV of a tile is issued behind QK of the next and runs while S is swapped.
            unsigned a[16];
            auto pin_all = [&] { pin(o); pin(a); };
            int before = buffer;
            await_tile();
            pin(s);
            wgmma_fence();
            issue_qk(s, q_at(), k_at(buffer));
            int thread = thread_index();
            unsigned factors = factors_at(buffer);
            wgmma_wait<0>();
            pin(s);
            swap.send(s, thread);
            swap.receive(s, thread);
            soft.move(soft.scores(s, factors), o);
            soft.probabilities(s, a, factors);
            next();
            while (--tiles > 0) {
                await_tile();
                pin(s);
                pin_all();
                wgmma_fence();
                issue_qk(s, q_at(), k_at(buffer));
                issue_pv(o, a, k_at(before));
                thread = thread_index();
                factors = factors_at(buffer);
                wgmma_wait<1>();
                pin(s);
                swap.send(s, thread);
                swap.receive(s, thread);
                const float2 top = soft.scores(s, factors);
                wgmma_wait<0>();
                pin_all();
                release(before);
                soft.move(top, o);
                soft.probabilities(s, a, factors);
                before = buffer;
                next();
            }
            pin_all();
            wgmma_fence();
            issue_pv(o, a, k_at(before));
            wgmma_wait<0>();
            pin(o);
            release(before);
        }
        finish(p, o, soft, segment % RING, rank);
        if ((thread_index() & 31) == 0) barrier_arrive(base + SEGMENT_EMPTY + 8 * (segment % RING));
    }
}

#if CLUSTER == 2
#define CLUSTER_SHAPE __cluster_dims__(1, 2, 1)
#else
#define CLUSTER_SHAPE
#endif

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(384, 1) decode_wgmma(const __grid_constant__ DecodeParams p) {
    allow_next_kernel();
    const unsigned base = shared_address(smem);
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), warpgroup = warp >> 2;
    const int rank = PAIR ? (int)cluster_rank() : 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < BUFFERS; ++i) {
            barrier_init(base + FULL + 8 * i, PRODUCER_WARPS);
            barrier_init(base + EMPTY + 8 * i, 8);
        }
        for (int i = 0; i < RING; ++i) {
            barrier_init(base + SEGMENT_FULL + 8 * i, 1);
            barrier_init(base + SEGMENT_EMPTY + 8 * i, 8);
        }
        if (PAIR)
            for (int i = 0; i < 2; ++i) {
                barrier_init(base + SWAP_FULL + 8 * i, 1);
                barrier_init(base + SWAP_EMPTY + 8 * i, 4);
            }
        fence_barrier_init();
    }
    __syncthreads();
    if (PAIR) cluster_sync();
    if (warpgroup == 2) {
        registers_fewer<PRODUCER_REGISTERS>();
        Producer producer{base, warp & 3, lane, rank};
        producer.run(p);
    } else {
        registers_more<COMPUTE_REGISTERS>();
        compute(p, base, rank);
    }
    if (PAIR) cluster_sync();            // the partner may still store here
}
