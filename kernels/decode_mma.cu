// Paged sparse decode on mma.sync tensor cores: every supported shape on sm_80 and newer, and the fastest form for
// few heads, where reading the rows is the work.
//
// Grid: x = num_ctas workers that share the slot lists (schedule.cuh), y = blocks of HEADS = 16 * M_TILES heads.
// Block: WARPS = HEAD_DIM / WARP_DIMS warps. A warp owns WARP_DIMS dimensions of every row, in QK and in PV, so a row
// is widened from FP8 by one warp only and never written back to shared memory.
//
// One tile of TILE = 32 slots:
//   QK    warp: S_partial (HEADS, TILE) = q (HEADS, WARP_DIMS) k (WARP_DIMS, TILE), scaled by the slot's group scales
//         in fp32, to shared memory                                                            -- barrier --
//         a tile's gather is issued (cp.async, STAGES - 1 tiles ahead, over segment borders)
//   soft  warp: 8 slots of all heads: S summed over warps, online softmax, P and the slots' ratios to shared memory
//                                                                                              -- barrier --
//   PV    warp: O (HEADS, WARP_DIMS) += P (HEADS, TILE) v (TILE, WARP_DIMS)
//
// Numerics, FP8 pools. Codes are exact in fp16. q is taken to fp16 after a power of two per head that puts its largest
// element into [2^14, 2^15) (16-bit pools: stays in its type; bf16 into [2^-11, 2^-10)). Scores are fp32. The scale of V goes into P: P' = exp2(s + log2 smax - ref), smax the
// slot's largest scale (kept in [2^-80, 2^100]), and each group multiplies it by ratio = scale / smax * up <= 2 in
// fp16, `up` being a power of two of the group within a segment, which only falls; O is divided by it at the end.
// l sums exp2(s - ref) = P' / smax in fp32. ref is lazy: it moves when the maximum has grown by more than 2^8, so P' <= 2^14.
// ref and up are proposed by each 8 slots for themselves; after the barrier all take the largest ref and the smallest
// up, and repair P, ratios, O and l where these moved (rare after a segment's first tiles).
// 16-bit pools: P in the pool's type, no ratios; in bf16 all P of a segment together are at most 1.
// A slot outside the pool is zero-filled and gets probability 0; its memory and scale are not read. An empty row
// gives 0 and -inf.
//
// Range: any finite q, subnormal ones included; any finite row and scale; any softmax_scale that fp32 holds. None of
// them gives NaN or Inf: sums of products cannot overflow (Q_TOP, SCORE_GUARD), scores are clamped to +-1e37, results
// to the largest number of out. Exact to the bounds of the tests but for scores of scales below 2^-101, which keep
// fewer bits (products by q beyond 2^100 only can tell), and for values below 2^-117, which may come out as 0.
// NaN or Inf in q spoils that head, in a row or its scales the tokens that list it.
//
// Shared memory (mma_layout.cuh), D = 512, FP8, groups of 64: 3 stages x 17 KB (32 rows and their scales), partial
// scores 8 KB, P 1 KB, ratios, refs and segments 2.4 KB: 64 KB, three blocks a multiprocessor. 32 heads: twice the
// scores and P, 32 KB of q fragments: 107 KB, two blocks. Rows are swizzled in 16-byte chunks so that ldmatrix is free
// of bank conflicts both ways.
//
// Tried on an H200 and not kept (D = 512, FP8, us with combine): programmatic launch of this kernel itself (1 gained at
// H = 16, (T, L) = (128, 2176), 1.7 lost at (1, 640)); all of L1 as shared memory (nothing); tiles of 16 and 8 slots at
// (1, 640) (12.0 and 11.0 against 11.8); q of every segment fetched ahead (spills); 396 workers instead of 384 at
// (128, 2176) (3 more); 4 stages and 2 blocks a multiprocessor (3 to 9 more); 32 heads a block where slots are few (1 to
// 3 more at (1, 640)).
#include "params.cuh"
#include "schedule.cuh"
#include "mma.cuh"
#include "mma_layout.cuh"
#include "mma_gather.cuh"

// Of an unscaled score: NaN stays, and what overflowed is finite.
DEVICE float clamp_score(float x) { return clamped(x, SCORE_MAX / BOOST); }
// 1 / x of a power of two
DEVICE float inverse_power(float x) { return __int_as_float(0x7f000000 - __float_as_int(x)); }
// Of values that lane (g, t) has for groups g, g + 8 ..., the one of `group`, uniform in the warp.
template <int N> DEVICE float group_value(const float (&value)[N], int group) {
    return __shfl_sync(~0u, value[N == 1 ? 0 : group / 8 % N], group % 8 * 4);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) decode_mma(const __grid_constant__ DecodeParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const unsigned base = shared_address(smem);
    const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0), g = lane >> 2, t = lane & 3;

    Gather gather;
    gather.base = base;
    gather.warp = warp;
    gather.lane = lane;
    gather.row0 = EVEN ? warp * (TILE / WARPS) : 0;
    gather.pushed = 0;
    {
        Segments seg(p, blockIdx.x);
        if (lane == 0) *gather.segments() = seg;
        __syncwarp();
    }
    gather.more = true;
    gather.left = 0;
    gather.fresh = false;
    gather.fetch(p);
    if (gather.pushed) gather.prefetch_queries(p, *reinterpret_cast<const int*>(smem + RING_AT + warp * RING * 16));
    clear_places(p, blockIdx.x, blockIdx.y * HEADS, HEADS, tid, THREADS);
#pragma unroll 1   // a second copy of the code costs more than the loop
    for (int s = 0; s < STAGES - 1; ++s) gather.issue(p, s);

    // ldmatrix addresses within a stage. K: matrices are 16-byte chunks m of 8 slots; V: slots 0-7 and 8-15 by two chunks.
    const int chunk0 = warp * (WARP_DIMS * (FP8 ? 1 : 2) / 16);
    const unsigned k_at = (lane & 7) * ROW_BYTES + (((chunk0 + (lane >> 3)) ^ row_swizzle(lane & 7)) << 4);
    const int v_row = (lane & 7) + (lane >> 3 & 1) * 8;
    const unsigned v_at = v_row * ROW_BYTES + (((chunk0 + (lane >> 4)) ^ row_swizzle(v_row)) << 4);
    const int group0 = FP8 ? warp * WARP_DIMS / GROUP_SIZE : 0;

    int stage = 0, used = 0;
    copy_wait<STAGES - 2>();
    __syncthreads();

    while (used < gather.pushed) {
        const int4 segment = *reinterpret_cast<const int4*>(smem + RING_AT + (warp * RING + used % RING) * 16);
        const int row = segment.x;
        ++used;
        Queries query;
        query.load(p, base, row, warp, lane);
        if (Q_SHARED) query.to_shared(base, warp, lane);
        float4 o[M_TILES][N_TILES];
        float ref[M_TILES][2], l[M_TILES][2];               // l of the key tiles that this warp does the softmax of
        float up[FP8 ? GROUP_TURNS : 1];                 // ratios of groups g, g + 8 are times this power of two
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            ref[m][0] = ref[m][1] = FLOOR_REF;
            l[m][0] = l[m][1] = 0.f;
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) o[m][n] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
        for (int j = 0; j < (FP8 ? GROUP_TURNS : 1); ++j) up[j] = FP8 ? MOST_UP : 1.f;

        // bf16 pools: all P of a segment together are at most 1, so that no sum of their largest values overflows.
        const float low = BF16 ? LAZY + (float)(33 - __clz(segment.y)) : 0.f;
        const int tiles = max((segment.y + TILE - 1) / TILE, 1);
        for (int i = 0; i < tiles; ++i) {
            const unsigned at = base + stage * STAGE_BYTES, scales = at + SCALES_AT;
            // Scales of the key tiles this warp does the softmax of: smax of slots 2t, 2t + 1, kept in [2^-80, 2^100], so
            // that l stays in range (up makes good for it), and scale / smax of groups g, g + 8. Made amid QK, whose
            // products leave time for it.
            float log_smax[SOFT_TURNS][2], smax[SOFT_TURNS][2], ratio_of[SOFT_TURNS][GROUP_TURNS ? GROUP_TURNS : 1][2];
            auto normalise_scales = [&] {
#pragma unroll
                for (int turn = 0; turn < SOFT_TURNS; ++turn) {
                    const int n = warp + turn * WARPS;
                    const bool past = KEY_TILES % WARPS != 0 && n >= KEY_TILES;
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd) {
                        float most = 0x1p-80f;
#pragma unroll
                        for (int j = 0; j < GROUP_TURNS; ++j) {
                            float scale = 0.f;
                            if (!past && (GROUPS % 8 == 0 || 8 * j + g < GROUPS))
                                scale = lds(scales + (n * 8 + t + 4 * odd) * SCALE_PITCH + (8 * j + g) * 4);
                            ratio_of[turn][j][odd] = scale;
                            most = fmaxf(most, scale);
                        }
#pragma unroll
                        for (int x = 4; x < 32; x *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, x));
                        if (most > 0x1p100f && most != -neg_inf()) most = 0x1p100f;   // Inf stays and spoils its tokens
                        log_smax[turn][odd] = log2_approx(most);
                        smax[turn][odd] = most;
                        const float inverse = exp2_approx(-log_smax[turn][odd]);
#pragma unroll
                        for (int j = 0; j < GROUP_TURNS; ++j) ratio_of[turn][j][odd] *= inverse;
                    }
                }
            };
            // ---- QK ----
            // Two key tiles and two scale groups (or two blocks of heads) at a time: four independent chains of products.
            constexpr int AT_ONCE = 2;
#pragma unroll
            for (int n0 = 0; n0 < KEY_TILES; n0 += AT_ONCE) {
                if (FP8 && n0 == KEY_TILES - AT_ONCE) normalise_scales();
                float4 s[AT_ONCE][M_TILES];
                if (FP8) {
                    unsigned x[AT_ONCE][K_STEPS / 4][4];
#pragma unroll
                    for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
                        for (int b = 0; b < K_STEPS / 4; ++b)
                            load_matrices((at + k_at + (n0 + n) * 8 * ROW_BYTES) ^ (b * 64), x[n][b]);
                    constexpr int CHAINS = WARP_GROUPS < 2 || M_TILES > 1 ? 1 : 2;
#pragma unroll
                    for (int j0 = 0; j0 < WARP_GROUPS; j0 += CHAINS) {
                        float4 raw[AT_ONCE][CHAINS][M_TILES];
                        float scale[AT_ONCE][CHAINS][2];
#pragma unroll
                        for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
                            for (int odd = 0; odd < 2; ++odd) {
                                const unsigned from = scales + ((n0 + n) * 8 + t + 4 * odd) * SCALE_PITCH + (group0 + j0) * 4;
                                if (CHAINS == 2) {
                                    const float2 both = lds2(from);
                                    scale[n][0][odd] = mul_kept(both.x, SCORE_GUARD);
                                    scale[n][CHAINS - 1][odd] = mul_kept(both.y, SCORE_GUARD);
                                } else {
                                    scale[n][0][odd] = mul_kept(lds(from), SCORE_GUARD);
                                }
                            }
#pragma unroll
                        for (int k = 0; k < STEPS_PER_GROUP; ++k)
#pragma unroll
                            for (int j = 0; j < CHAINS; ++j) {
                                const int step = (j0 + j) * STEPS_PER_GROUP + k;
                                Fragment a[M_TILES];
#pragma unroll
                                for (int m = 0; m < M_TILES; ++m) a[m] = query.fragment(m, step, base, warp, lane);
#pragma unroll
                                for (int n = 0; n < AT_ONCE; ++n) {
                                    unsigned low, high;
                                    widen(x[n][step / 4][step % 4], low, high);
#pragma unroll
                                    for (int m = 0; m < M_TILES; ++m) {
                                        if (k == 0) mma_from_zero<false>(raw[n][j][m], a[m].r, low, high);
                                        else mma<false>(raw[n][j][m], a[m].r, low, high);
                                    }
                                }
                            }
#pragma unroll
                        for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
                            for (int j = 0; j < CHAINS; ++j)
#pragma unroll
                                for (int m = 0; m < M_TILES; ++m) {
                                    const float4 r = raw[n][j][m];
                                    const float even = scale[n][j][0], odd = scale[n][j][1];
                                    float4& d = s[n][m];
                                    if (j0 + j == 0) d = make_float4(mul_kept(r.x, even), mul_kept(r.y, odd), mul_kept(r.z, even), mul_kept(r.w, odd));
                                    else d = make_float4(fma_kept(r.x, even, d.x), fma_kept(r.y, odd, d.y), fma_kept(r.z, even, d.z), fma_kept(r.w, odd, d.w));
                                }
                    }
                } else {
#pragma unroll
                    for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m) s[n][m] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                    for (int b = 0; b < K_STEPS / 2; ++b) {
                        unsigned x[AT_ONCE][4];
#pragma unroll
                        for (int n = 0; n < AT_ONCE; ++n)
                            load_matrices(((at + k_at + (n0 + n) * 8 * ROW_BYTES) ^ ((b & 1) * 64)) + (b >> 1) * 128, x[n]);
#pragma unroll
                        for (int h = 0; h < 2; ++h)
#pragma unroll
                            for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
                                for (int m = 0; m < M_TILES; ++m)
                                    mma<BF16>(s[n][m], query.fragment(m, 2 * b + h, base, warp, lane).r, x[n][2 * h], x[n][2 * h + 1]);
                    }
                }
#pragma unroll
                for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
                    for (int m = 0; m < M_TILES; ++m)
                        sts4(base + S_AT + ((warp * M_TILES + m) * KEY_TILES + n0 + n) * 512 + lane * 16, s[n][m]);
            }
            __syncthreads();
            const unsigned valid = ldsu(base + MASK_AT + (warp * STAGES + stage) * 4);
            gather.issue(p, stage == 0 ? STAGES - 1 : stage - 1);

            // ---- softmax: key tiles warp, warp + WARPS ... of all heads ----
            float near[M_TILES][2], sum[M_TILES][2];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    near[m][half] = ref[m][half];
                    sum[m][half] = 0.f;
                }
            if (warp < KEY_TILES) {
                if (FP8) {
                    float near_up[GROUP_TURNS ? GROUP_TURNS : 1], most[GROUP_TURNS ? GROUP_TURNS : 1];
                    bool above = false;
#pragma unroll
                    for (int j = 0; j < GROUP_TURNS; ++j) {
                        near_up[j] = up[j];
                        most[j] = 0.f;
#pragma unroll
                        for (int turn = 0; turn < SOFT_TURNS; ++turn)
                            most[j] = fmaxf(most[j], fmaxf(ratio_of[turn][j][0], ratio_of[turn][j][1]));
                        above |= most[j] * up[j] > 2.f;
                    }
                    if (__any_sync(~0u, above)) {
#pragma unroll
                        for (int j = 0; j < GROUP_TURNS; ++j) {
                            float x = fmaxf(most[j], __shfl_xor_sync(~0u, most[j], 1));
                            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                            // x * 2^e in [1/2, 1), e from -30 to 100
                            const int e = min(max(126 - (int)(__float_as_uint(x) >> 23 & 0xff), -30), 100);
                            if (x * up[j] > 2.f) near_up[j] = __int_as_float((127 + e) << 23);
                        }
                    }
#pragma unroll
                    for (int turn = 0; turn < SOFT_TURNS; ++turn) {
                        const int n = warp + turn * WARPS;
                        if (KEY_TILES % WARPS != 0 && n >= KEY_TILES) break;
#pragma unroll
                        for (int j = 0; j < GROUP_TURNS; ++j) {
                            if (GROUPS % 8 == 0 || 8 * j + g < GROUPS)
                                stsu(base + RATIO_AT + (n * 4 + t) * RATIO_PITCH + (8 * j + g) * 4,
                                     pack_half(ratio_of[turn][j][0] * near_up[j], ratio_of[turn][j][1] * near_up[j]));
                            if (t == 0) sts(base + UP_AT + ((8 * j + g) * KEY_TILES + n) * 4, near_up[j]);
                        }
                    }
                }
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    const float to0 = query.to_log2[m][0], to1 = query.to_log2[m][1];
                    float4 v[SOFT_TURNS];
                    float top[2] = {FLOOR_REF, FLOOR_REF};
#pragma unroll
                    for (int turn = 0; turn < SOFT_TURNS; ++turn) {
                        const int n = warp + turn * WARPS;
                        if (KEY_TILES % WARPS != 0 && n >= KEY_TILES) break;
                        float4 s = lds4(base + S_AT + (m * KEY_TILES + n) * 512 + lane * 16);
#pragma unroll
                        for (int w = 1; w < WARPS; ++w) {
                            const float4 e = lds4(base + S_AT + ((w * M_TILES + m) * KEY_TILES + n) * 512 + lane * 16);
                            s.x = add_kept(s.x, e.x); s.y = add_kept(s.y, e.y); s.z = add_kept(s.z, e.z); s.w = add_kept(s.w, e.w);
                        }
                        // Scores may overflow here for the first time: they are clamped, and NaN stays. Infinite products
                        // come from infinite elements of 16-bit rows: x - x makes their scores NaN.
                        s.x = fmaf(clamp_score(mul_kept(s.x, to0)), BOOST, FP8 ? log_smax[turn][0] : s.x - s.x);
                        s.y = fmaf(clamp_score(mul_kept(s.y, to0)), BOOST, FP8 ? log_smax[turn][1] : s.y - s.y);
                        s.z = fmaf(clamp_score(mul_kept(s.z, to1)), BOOST, FP8 ? log_smax[turn][0] : s.z - s.z);
                        s.w = fmaf(clamp_score(mul_kept(s.w, to1)), BOOST, FP8 ? log_smax[turn][1] : s.w - s.w);
                        if (!(valid >> (n * 8 + 2 * t) & 1)) s.x = s.z = neg_inf();
                        if (!(valid >> (n * 8 + 2 * t) & 2)) s.y = s.w = neg_inf();
                        top[0] = fmaxf(top[0], fmaxf(s.x, s.y));
                        top[1] = fmaxf(top[1], fmaxf(s.z, s.w));
                        v[turn] = s;
                    }
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float x = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
                        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2)) - (BF16 ? 0.f : HEADROOM);
                        if (x > near[m][half] + LAZY) near[m][half] = x;
                    }
#pragma unroll
                    for (int turn = 0; turn < SOFT_TURNS; ++turn) {
                        const int n = warp + turn * WARPS;
                        if (KEY_TILES % WARPS != 0 && n >= KEY_TILES) break;
                        // exp2(s - ref), and P' = smax times that. The differences come first: scores may be far beyond
                        // the numbers that are added to them.
                        const float even = FP8 ? log_smax[turn][0] : low, odd = FP8 ? log_smax[turn][1] : low;
                        float4 e = make_float4(exp2_approx(v[turn].x - near[m][0] - even), exp2_approx(v[turn].y - near[m][0] - odd),
                                               exp2_approx(v[turn].z - near[m][1] - even), exp2_approx(v[turn].w - near[m][1] - odd));
                        sum[m][0] += e.x + e.y;
                        sum[m][1] += e.z + e.w;
                        if (FP8) e = make_float4(e.x * smax[turn][0], e.y * smax[turn][1], e.z * smax[turn][0], e.w * smax[turn][1]);
                        const unsigned first = pack_pair<BF16>(e.x, e.y), second = pack_pair<BF16>(e.z, e.w);
                        sts2u(base + P_AT + (m * KEY_TILES + n) * 256 + lane * 8, first, second);
                        if (t == 0) {
                            sts(base + REF_AT + ((m * 16 + g) * KEY_TILES + n) * 4, near[m][0]);
                            sts(base + REF_AT + ((m * 16 + g + 8) * KEY_TILES + n) * 4, near[m][1]);
                        }
                    }
                }
            }
            copy_wait<STAGES - 2>();
            __syncthreads();

            // ---- what the pieces agree on: the largest reference, the smallest factor of each group's ratios ----
            bool moved = false;
            float old[M_TILES][2], old_up[FP8 ? GROUP_TURNS : 1];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float4 r = lds4(base + REF_AT + (16 * m + 8 * half + g) * KEY_TILES * 4);
                    old[m][half] = ref[m][half];
                    ref[m][half] = fmaxf(fmaxf(r.x, r.y), fmaxf(r.z, r.w));
                    moved |= ref[m][half] != old[m][half];
                }
            if (FP8) {
#pragma unroll
                for (int j = 0; j < GROUP_TURNS; ++j) {
                    const float4 r = lds4(base + UP_AT + (8 * j + g) * KEY_TILES * 4);
                    old_up[j] = up[j];
                    up[j] = fminf(fminf(r.x, r.y), fminf(r.z, r.w));
                    moved |= up[j] != old_up[j];
                }
            }
            moved = __any_sync(~0u, moved);
            if (moved) {
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    const float f0 = exp2_approx(old[m][0] - ref[m][0]), f1 = exp2_approx(old[m][1] - ref[m][1]);
#pragma unroll
                    for (int n = 0; n < N_TILES; ++n) {
                        float down = 1.f;
                        if (FP8) {
                            const int group = group0 + n * 8 / GROUP_SIZE;
                            down = group_value(up, group) * inverse_power(group_value(old_up, group));
                        }
                        o[m][n].x *= f0 * down; o[m][n].y *= f0 * down; o[m][n].z *= f1 * down; o[m][n].w *= f1 * down;
                    }
                }
#pragma unroll
                for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {   // by square roots: l has a wider range than P'
                        const float f = exp2_approx(0.5f * (old[m][half] - ref[m][half])), e = exp2_approx(0.5f * (near[m][half] - ref[m][half]));
                        l[m][half] = l[m][half] * f * f + sum[m][half] * e * e;
                    }
            } else {
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    l[m][0] += sum[m][0];
                    l[m][1] += sum[m][1];
                }
            }

            // ---- PV: P (and ratios) of the tile first, brought to the common reference where that moved ----
            unsigned x[2][4];
            if (FP8) load_matrices_transposed(at + v_at, x[0]);
            unsigned prob[TILE / 16][M_TILES][4], ratio[TILE / 16][FP8 ? WARP_GROUPS : 1][2];
#pragma unroll
            for (int kb = 0; kb < TILE / 16; ++kb) {
#pragma unroll
                for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                    for (int piece = 0; piece < 2; ++piece) {
                        const uint2 y = lds2u(base + P_AT + (m * KEY_TILES + 2 * kb + piece) * 256 + lane * 8);
                        prob[kb][m][2 * piece] = y.x;
                        prob[kb][m][2 * piece + 1] = y.y;
                    }
                if (FP8) {
#pragma unroll
                    for (int piece = 0; piece < 2; ++piece)
#pragma unroll
                        for (int j = 0; j < WARP_GROUPS; ++j) {
                            const unsigned from = base + RATIO_AT + ((2 * kb + piece) * 4 + t) * RATIO_PITCH + (group0 + j) * 4;
                            if (WARP_GROUPS % 2 == 0) {
                                if (j % 2) continue;
                                const uint2 y = lds2u(from);
                                ratio[kb][j][piece] = y.x;
                                ratio[kb][WARP_GROUPS % 2 == 0 ? j + 1 : j][piece] = y.y;
                            } else {
                                ratio[kb][j][piece] = ldsu(from);
                            }
                        }
                }
            }
            if (moved) {   // a piece may have been made with an older reference than the common one
#pragma unroll
                for (int kb = 0; kb < TILE / 16; ++kb)
#pragma unroll
                    for (int piece = 0; piece < 2; ++piece) {
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const float f = exp2_approx(lds(base + REF_AT + ((16 * m + 8 * half + g) * KEY_TILES + 2 * kb + piece) * 4) - ref[m][half]);
                                unsigned& e = prob[kb][m][2 * piece + half];
                                const float2 y = unpack_pair<BF16>(e);
                                e = pack_pair<BF16>(y.x * f, y.y * f);
                            }
                        if (FP8) {
#pragma unroll
                            for (int j = 0; j < WARP_GROUPS; ++j) {
                                const unsigned proposed = base + UP_AT + ((group0 + j) * KEY_TILES + 2 * kb + piece) * 4;
                                const float f = group_value(up, group0 + j) * inverse_power(lds(proposed));
                                ratio[kb][j][piece] = mul_half2(ratio[kb][j][piece], pack_half(f, f));
                            }
                        }
                    }
            }
#pragma unroll
            for (int kb = 0; kb < TILE / 16; ++kb) {
                const unsigned v = at + v_at + kb * 16 * ROW_BYTES;
                if (FP8) {
#pragma unroll
                    for (int j = 0; j < WARP_GROUPS; ++j) {
                        const unsigned r0 = ratio[kb][j][0], r1 = ratio[kb][j][1];
                        unsigned b[M_TILES][4];
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m) {
                            b[m][0] = mul_half2(prob[kb][m][0], r0); b[m][1] = mul_half2(prob[kb][m][1], r0);
                            b[m][2] = mul_half2(prob[kb][m][2], r1); b[m][3] = mul_half2(prob[kb][m][3], r1);
                        }
#pragma unroll
                        for (int c = j * STEPS_PER_GROUP; c < (j + 1) * STEPS_PER_GROUP; c += 2) {   // chunks of 16 dims
                            // The next fragment is loaded ahead of this one's products.
                            const int next = kb * K_STEPS + c + 2;
                            if (next < TILE / 16 * K_STEPS)
                                load_matrices_transposed((at + v_at + next / K_STEPS * 16 * ROW_BYTES) ^ (next % K_STEPS * 16), x[next / 2 % 2]);
                            const unsigned* y = x[(kb * K_STEPS + c) / 2 % 2];
#pragma unroll
                            for (int h = 0; h < 2; ++h) {
                                unsigned even0, odd0, even1, odd1;
                                widen(__byte_perm(y[2 * h], 0, 0x3120), even0, odd0);
                                widen(__byte_perm(y[2 * h + 1], 0, 0x3120), even1, odd1);
#pragma unroll
                                for (int m = 0; m < M_TILES; ++m) {
                                    mma<false>(o[m][2 * (c + h)], b[m], even0, even1);
                                    mma<false>(o[m][2 * (c + h) + 1], b[m], odd0, odd1);
                                }
                            }
                        }
                    }
                } else {
#pragma unroll
                    for (int c = 0; c < N_TILES; c += 2) {   // chunks of 8 dims
                        unsigned x[4];
                        load_matrices_transposed((v ^ ((c & 7) * 16)) + (c >> 3) * 128, x);
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m) {
                            mma<BF16>(o[m][c], prob[kb][m], x[0], x[1]);
                            mma<BF16>(o[m][c + 1], prob[kb][m], x[2], x[3]);
                        }
                    }
                }
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }

        // ---- the segment's end: l over all warps, O / l, out or partial ----
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x = l[m][half];
                x += __shfl_xor_sync(~0u, x, 1);
                x += __shfl_xor_sync(~0u, x, 2);
                if (t == 0) sts(base + LSE_AT + ((16 * m + 8 * half + g) * 8 + warp) * 4, warp < KEY_TILES ? log2f(x) : neg_inf());
            }
        __syncthreads();
        const long long partial = segment.z;
        float up_log2[FP8 ? WARP_GROUPS : 1];
        if (FP8) {
#pragma unroll
            for (int j = 0; j < WARP_GROUPS; ++j) up_log2[j] = log2_approx(group_value(up, group0 + j));
        }
        const bool direct = partial < 0, keep = direct || partial < p.num_partials;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int local = 16 * m + 8 * half + g, head = blockIdx.y * HEADS + local;
                float most = neg_inf(), sum = 0.f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) most = fmaxf(most, lds(base + LSE_AT + (local * 8 + w) * 4));
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    const float x = lds(base + LSE_AT + (local * 8 + w) * 4);
                    sum += x == neg_inf() ? 0.f : exp2_approx(x - most);
                }
                const float log_l = sum == 0.f ? neg_inf() : most + log2f(sum);
                const float lse2 = sum == 0.f ? neg_inf() : ref[m][half] + (log_l + low);
                if (head >= p.num_heads || !keep) continue;
                float end = 1.f;
                if (direct && p.sink) end = sink_factor(lse2, __ldg(p.sink + head));
                if (warp == 0 && t == 0) {
                    if (!direct) p.partial_lse2[partial * p.num_heads + head] = lse2;
                    else if (p.lse) p.lse[(long long)row * p.num_heads + head] = lse2 * LN_2;
                }
                float* part = p.partial_out + (partial * p.num_heads + head) * HEAD_DIM + warp * WARP_DIMS;
                char* out = static_cast<char*>(p.out) + 2 * (row * p.out_stride_token + head * p.out_stride_head + warp * WARP_DIMS);
#pragma unroll
                for (int n = 0; n < N_TILES; n += FP8 ? 2 : 1) {
                    float step = 0.f;   // square root of the factor: neither it nor the product leaves the range
                    if (sum != 0.f) {
                        const float e = FP8 ? up_log2[FP8 ? n * 8 / GROUP_SIZE : 0] : 0.f;
                        step = exp2f(-0.5f * (log_l + e));
                    }
                    const float4 a = o[m][n], b = o[m][FP8 ? n + 1 : n];
                    float x[4] = {half ? a.z : a.x, half ? (FP8 ? b.z : a.w) : (FP8 ? b.x : a.y), half ? a.w : a.y, half ? b.w : b.y};
#pragma unroll
                    for (int i = 0; i < 4; ++i)   // finite, or NaN; the last product may overflow by a rounding
                        x[i] = clamped(mul_kept(mul_kept(x[i], step), step) * end, direct ? LARGEST<Q_BF16> : LARGEST_FLOAT);
                    const int dim = FP8 ? n * 8 + 4 * t : n * 8 + 2 * t;
                    if (direct) {
                        const unsigned first = pack_pair<Q_BF16>(x[0], x[1]);
                        if (FP8) *reinterpret_cast<uint2*>(out + 2 * dim) = make_uint2(first, pack_pair<Q_BF16>(x[2], x[3]));
                        else *reinterpret_cast<unsigned*>(out + 2 * dim) = first;
                    } else if (FP8) {
                        *reinterpret_cast<float4*>(part + dim) = make_float4(x[0], x[1], x[2], x[3]);
                    } else {
                        *reinterpret_cast<float2*>(part + dim) = make_float2(x[0], x[1]);
                    }
                }
            }
    }
    copy_wait<0>();
}
