// Paged sparse decode on mma.sync tensor cores: every supported shape on sm_80 and newer, and the fastest form for
// few heads, where reading the rows is the work.
//
// Grid: x = num_ctas workers that share the slot lists (schedule.cuh), y = blocks of HEADS = 16 * M_TILES heads.
// Block: WARPS = HEAD_DIM / WARP_DIMS warps. A warp owns WARP_DIMS dimensions of every row, in QK and in PV, so a row
// is widened from FP8 by one warp only and never written back to shared memory.
//
// One tile of TILE = 32 slots:
//   QK    warp: S_partial (HEADS, TILE) = q (HEADS, WARP_DIMS) k (WARP_DIMS, TILE), scaled by the slot's group scales
//         in fp32, to shared memory                                                          -- barrier --
//         next tile's gather is issued (cp.async, STAGES tiles deep, over segment borders)
//   soft  warp: its 16 x 8 pieces of S: sum over warps, online softmax, P to shared memory   -- barrier --
//   PV    warp: O (HEADS, WARP_DIMS) += P (HEADS, TILE) v (TILE, WARP_DIMS)
//
// Numerics, FP8 pools. Codes are exact in fp16. q is taken to fp16 after a power of two per head that puts its largest
// element into [2^14, 2^15). Scores are fp32. The scale of V goes into P: P' = exp2(s + log2 smax - ref), smax the
// slot's largest scale, and each group multiplies it by scale / smax * 2^(group exponent) <= 2 in fp16, the exponent
// being the group's own (of a segment; it only falls). l sums exp2(s - ref) in fp32. ref is lazy: it moves when the
// maximum has grown by more than 2^8, so P' <= 2^14. 16-bit pools: operands as they are, P in the pool's type.
// A slot outside the pool is zero-filled and gets probability 0; its memory and scale are not read. An empty row
// gives 0 and -inf. Products are guarded so that finite rows give finite results (SCORE_GUARD, split factors).
//
// Shared memory: STAGES * (TILE rows + TILE rows of scales), S partials, P, 1 / smax, refs, ratios, segment ring.
// Rows are swizzled in 16-byte chunks so that ldmatrix is free of bank conflicts both ways.
#include "params.cuh"
#include "schedule.cuh"
#include "mma.cuh"

constexpr bool FP8 = KV_DTYPE == 0;
constexpr bool BF16 = FP8 ? false : KV_DTYPE == 1;      // type of the tensor-core operands
constexpr bool Q_BF16 = Q_DTYPE == 1;
constexpr int TILE = 32;
constexpr int KEY_TILES = TILE / 8;
constexpr int WARPS = HEAD_DIM / WARP_DIMS;
constexpr int THREADS = 32 * WARPS;
constexpr int HEADS = 16 * M_TILES;
constexpr int K_STEPS = WARP_DIMS / 16;                  // k16 steps of QK
constexpr int N_TILES = WARP_DIMS / 8;                   // n8 tiles of O

constexpr int ROW_BYTES = HEAD_DIM * (FP8 ? 1 : 2);
constexpr int ROW_CHUNKS = ROW_BYTES / 16;
constexpr int GROUPS = FP8 ? HEAD_DIM / GROUP_SIZE : 0;
constexpr int WARP_GROUPS = FP8 ? (WARP_DIMS + GROUP_SIZE - 1) / GROUP_SIZE : 0;  // scales a warp needs of a row
constexpr int STEPS_PER_GROUP = (GROUP_SIZE < WARP_DIMS ? GROUP_SIZE : WARP_DIMS) / 16;
constexpr int SCALE_PITCH = GROUPS * 4;

constexpr int SCALES_AT = TILE * ROW_BYTES;
constexpr int STAGE_BYTES = (SCALES_AT + TILE * SCALE_PITCH + 127) / 128 * 128;
constexpr int PIECES = M_TILES * KEY_TILES;              // 16 x 8 pieces of S
constexpr int PIECE_TURNS = (PIECES + WARPS - 1) / WARPS;
static_assert(M_TILES == 1 || PIECE_TURNS == 1, "a warp's softmax pieces belong to one block of 16 heads");

constexpr int S_AT = STAGES * STAGE_BYTES;
constexpr int P_AT = S_AT + WARPS * PIECES * 512;
constexpr int REF_AT = P_AT + PIECES * 256;              // [HEADS][KEY_TILES] proposed references
constexpr int LSE_AT = REF_AT + HEADS * KEY_TILES * 4;   // [HEADS][WARPS rounded to 8]
constexpr int INV_AT = LSE_AT + HEADS * 8 * 4;           // [TILE] 1 / smax
constexpr int RATIO_AT = INV_AT + TILE * 4;              // [WARPS][WARP_GROUPS][TILE] fp16
constexpr int QMAX_AT = RATIO_AT + WARPS * (FP8 ? WARP_GROUPS : 1) * TILE * 2;
constexpr int RING = 8;                                  // segments between gather and use; above STAGES
constexpr int RING_AT = (QMAX_AT + HEADS * 8 * 4 + 15) / 16 * 16;   // [WARPS][RING] int4
constexpr int STATE_AT = RING_AT + WARPS * RING * 16;    // [WARPS] Segments
constexpr int MASK_AT = STATE_AT + WARPS * 64;           // [WARPS][STAGES] valid slots of a tile
[[maybe_unused]] constexpr int SHARED_BYTES = MASK_AT + WARPS * STAGES * 4;

constexpr float HEADROOM = 6.f;       // log2: P' of the largest score at a fresh reference
constexpr float LAZY = 8.f;           // log2: growth of the maximum before the reference moves
constexpr float FLOOR_REF = -1e30f;
constexpr float SCORE_GUARD = 0x1p-30f;   // scales are taken down by it in QK, so that no partial sum overflows
constexpr float SCORE_MAX = 1e37f;

extern __shared__ __align__(1024) unsigned char smem[];

DEVICE int row_swizzle(int row) { return ROW_BYTES % 128 == 0 ? row & 7 : (row >> 1) & 3; }
// Scales of slots 2t and 2t + 1, which one lane needs together, 4 rows apart: fewer bank conflicts.
DEVICE int scale_row(int row) { return (row & ~7) | (row & 7) >> 1 | (row & 1) << 2; }

// The gather: tiles in the order of the segments, STAGES - 1 ahead of their use.
struct Gather {
    unsigned base, ring, state;   // shared addresses; ring and state are the warp's own copies
    int warp, lane;
    int begin, left;              // current segment: next entry of indices, entries not yet issued
    int pushed;                   // segments put into the ring
    bool more;
    int slot, count;              // of the next tile, read ahead: this lane's slot id, entries in the tile
    bool fresh;                   // a segment begins that has not given a tile yet (an empty row gives one)

    DEVICE Segments* segments() const { return reinterpret_cast<Segments*>(smem + STATE_AT + warp * 64); }

    DEVICE void advance(const DecodeParams& p) {
        Segments seg = *segments();
        __syncwarp();
        more = seg.next(p);
        if (lane == 0) {
            *segments() = seg;
            if (more)
                *reinterpret_cast<int4*>(smem + RING_AT + (warp * RING + pushed % RING) * 16) =
                    make_int4(seg.row, seg.len, (int)seg.partial, 0);
        }
        __syncwarp();
        begin = seg.begin;
        left = more ? seg.len : 0;
        fresh = more;
        pushed += more;
    }
    // Read ahead the next tile's slot ids.
    DEVICE void fetch(const DecodeParams& p) {
        if (more && left == 0 && !fresh) advance(p);
        count = more ? min(left, TILE) : -1;
        slot = -1;
        if (lane < count) slot = __ldg(p.indices + begin + lane);
        if (more) {
            begin += count;
            left -= count;
            fresh = false;
        }
    }
    DEVICE void issue(const DecodeParams& p, int stage) {
        const int my = slot, tile_count = count;
        fetch(p);
        if (tile_count >= 0) {
            const bool valid = (unsigned)my < p.num_slots;
            const unsigned mask = __ballot_sync(~0u, valid);
            if (lane == 0) *reinterpret_cast<unsigned*>(smem + MASK_AT + (warp * STAGES + stage) * 4) = mask;
            const unsigned to = base + stage * STAGE_BYTES;
            copy_rows(p, my, mask, to);
            if (FP8) copy_scales(p, my, mask, to + SCALES_AT);
        }
        copy_commit();
    }
    // Lanes share rows so that a warp's copies are contiguous: 32 lanes a row, or several short rows at once.
    DEVICE void copy_rows(const DecodeParams& p, int my, unsigned mask, unsigned to) const {
        constexpr int LANES = ROW_CHUNKS > 16 ? 32 : ROW_CHUNKS > 8 ? 16 : ROW_CHUNKS > 4 ? 8 : 4;
        constexpr int ROWS = 32 / LANES;
        const char* kv = static_cast<const char*>(p.kv);
        const int chunk = lane % LANES;
#pragma unroll
        for (int r0 = 0; r0 < TILE; r0 += ROWS * WARPS) {
            const int row = r0 + warp * ROWS + lane / LANES;
            if (TILE % (ROWS * WARPS) != 0 && r0 + warp * ROWS >= TILE) break;
            const int id = __shfl_sync(~0u, my, row);
            const bool take = mask >> row & 1;
            const char* from = kv;
            if (PAGED) {
                const int page = id / p.page_size;
                if (take) from += page * p.page_stride + (id - page * p.page_size) * p.slot_stride;
            } else if (take) {
                from += id * p.page_stride;
            }
#pragma unroll
            for (int c0 = 0; c0 < ROW_CHUNKS; c0 += LANES) {
                const int c = c0 + chunk;
                if (ROW_CHUNKS % LANES != 0 && c >= ROW_CHUNKS) break;
                const unsigned at = to + row * ROW_BYTES + ((c ^ row_swizzle(row)) << 4);
#pragma unroll
                for (int b = 0; b < 16; b += KV_COPY) copy_async<KV_COPY>(at + b, from + c * 16 + b, take);
            }
        }
    }
    DEVICE void copy_scales(const DecodeParams& p, int my, unsigned mask, unsigned to) const {
        constexpr int UNITS = SCALE_PITCH / SCALE_COPY;   // copies a row
#pragma unroll
        for (int u0 = 0; u0 < TILE * UNITS; u0 += THREADS) {
            const int u = u0 + warp * 32 + lane;
            const int row = min(u / UNITS, TILE - 1), unit = u % UNITS;
            const int id = __shfl_sync(~0u, my, row);
            const bool take = mask >> row & 1;
            const int page = take ? (PAGED ? id / p.page_size : id) : 0;
            if (TILE * UNITS % THREADS == 0 || u < TILE * UNITS)
                copy_async<SCALE_COPY>(to + scale_row(row) * SCALE_PITCH + unit * SCALE_COPY,
                                       p.scales + page * p.scale_stride + unit * (SCALE_COPY / 4), take);
        }
    }
};

DEVICE float scale_at(unsigned scales, int row, int group) { return lds(scales + scale_row(row) * SCALE_PITCH + group * 4); }

// The scales of a warp's own groups of one slot.
template <int N>
DEVICE void scales_of(unsigned scales, int row, int group0, float (&scale)[N]) {
    const unsigned at = scales + scale_row(row) * SCALE_PITCH + group0 * 4;
    if (N % 2 == 0 && SCALE_PITCH % 8 == 0) {
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            const float2 pair = lds2(at + 4 * j);
            scale[j] = pair.x;
            scale[j + 1 < N ? j + 1 : j] = pair.y;
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) scale[j] = lds(at + 4 * j);
    }
}

// One segment's queries as mma A fragments, and the factor that takes raw scores to log2 units, for heads g and g + 8.
struct Queries {
    unsigned a[M_TILES][K_STEPS][4];
    float to_log2[M_TILES][2];

    DEVICE void load(const DecodeParams& p, unsigned base, int row, int warp, int lane) {
        const int g = lane >> 2, t = lane & 3, head0 = blockIdx.y * HEADS;
        const char* q = static_cast<const char*>(p.q);
        float most[M_TILES][2];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int head = head0 + 16 * m + 8 * half + g;
                most[m][half] = 0.f;
                const char* from = q + 2 * (row * p.q_stride_token + head * p.q_stride_head + warp * WARP_DIMS);
#pragma unroll
                for (int k = 0; k < K_STEPS; ++k) {
                    unsigned x = 0, y = 0;
                    if (head < p.num_heads) {
                        if (FP8) {   // dims 16 k + 4 t .. + 3: the order in which widened codes come
                            const uint2 v = __ldg(reinterpret_cast<const uint2*>(from + 2 * (16 * k + 4 * t)));
                            x = v.x;
                            y = v.y;
                        } else {
                            x = __ldg(reinterpret_cast<const unsigned*>(from + 2 * (16 * k + 2 * t)));
                            y = __ldg(reinterpret_cast<const unsigned*>(from + 2 * (16 * k + 2 * t + 8)));
                        }
                    }
                    a[m][k][half] = x;
                    a[m][k][2 + half] = y;
                    if (FP8) {
                        const float2 u = unpack_pair<Q_BF16>(x), v = unpack_pair<Q_BF16>(y);
                        most[m][half] = fmaxf(most[m][half], fmaxf(fmaxf(fabsf(u.x), fabsf(u.y)), fmaxf(fabsf(v.x), fabsf(v.y))));
                    }
                }
            }
        if (!FP8) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) to_log2[m][0] = to_log2[m][1] = p.scale_log2;
            return;
        }
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x = most[m][half];
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                if (t == 0) sts(base + QMAX_AT + ((16 * m + 8 * half + g) * 8 + warp) * 4, x);
            }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x = 0.f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) x = fmaxf(x, lds(base + QMAX_AT + ((16 * m + 8 * half + g) * 8 + w) * 4));
                // 2^e with e = 14 - exponent of the largest element; a zero, infinite or NaN q keeps e in range.
                int e = 14 - (int)((__float_as_uint(x) >> 23 & 0xff) - 127);
                e = min(max(e, -80), 120);
                const float up = __int_as_float((127 + e) << 23), down = __int_as_float((127 - e) << 23);
                to_log2[m][half] = down * (p.scale_log2 / SCORE_GUARD);
#pragma unroll
                for (int k = 0; k < K_STEPS; ++k)
#pragma unroll
                    for (int i = half; i < 4; i += 2) {
                        const float2 v = unpack_pair<Q_BF16>(a[m][k][i]);
                        a[m][k][i] = pack_half(v.x * up, v.y * up);
                    }
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) decode_mma(const __grid_constant__ DecodeParams p) {
    allow_next_kernel();
    const unsigned base = shared_address(smem);
    const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0), g = lane >> 2, t = lane & 3;

    Gather gather;
    gather.base = base;
    gather.warp = warp;
    gather.lane = lane;
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
    clear_places(p, blockIdx.x, blockIdx.y * HEADS, HEADS, tid, THREADS);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) gather.issue(p, s);

    // ldmatrix addresses within a stage. K: matrices are 16-byte chunks m of 8 slots; V: slots 0-7 and 8-15 by two chunks.
    const int chunk0 = warp * (WARP_DIMS * (FP8 ? 1 : 2) / 16);
    const unsigned k_at = (lane & 7) * ROW_BYTES + (((chunk0 + (lane >> 3)) ^ row_swizzle(lane & 7)) << 4);
    const int v_row = (lane & 7) + (lane >> 3 & 1) * 8;
    const unsigned v_at = v_row * ROW_BYTES + (((chunk0 + (lane >> 4)) ^ row_swizzle(v_row)) << 4);
    const int group0 = FP8 ? warp * WARP_DIMS / GROUP_SIZE : 0;
    // This warp's softmax pieces: key tiles piece0, piece0 + WARPS ... of heads 16 * soft_m ...
    const int soft_m = M_TILES == 1 ? 0 : warp / KEY_TILES % M_TILES, piece0 = M_TILES == 1 ? warp : warp % KEY_TILES;
    const bool softens = warp < PIECES;

    int stage = 0, used = 0;
    copy_wait<STAGES - 2>();
    __syncthreads();

    while (used < gather.pushed) {
        const int4 segment = *reinterpret_cast<const int4*>(smem + RING_AT + (warp * RING + used % RING) * 16);
        const int row = segment.x;
        ++used;
        Queries query;
        query.load(p, base, row, warp, lane);
        float4 o[M_TILES][N_TILES];
        float ref[M_TILES][2], l0 = 0.f, l1 = 0.f;      // l of this warp's softmax pieces
        float l_log2 = 0.f;                              // l0 and l1 are times 2^l_log2
        bool l_set = false;
        int exponent[FP8 ? WARP_GROUPS : 1];             // ratios are times 2^exponent; unset: 1000
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            ref[m][0] = ref[m][1] = FLOOR_REF;
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) o[m][n] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
        for (int j = 0; j < (FP8 ? WARP_GROUPS : 1); ++j) exponent[j] = 1000;

        const int tiles = max((segment.y + TILE - 1) / TILE, 1);
        for (int i = 0; i < tiles; ++i) {
            const unsigned at = base + stage * STAGE_BYTES, scales = at + SCALES_AT;
            // ---- QK ----
#pragma unroll
            for (int n = 0; n < KEY_TILES; ++n) {
                float4 s[M_TILES];
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) s[m] = make_float4(0.f, 0.f, 0.f, 0.f);
                if (FP8) {
                    unsigned x[K_STEPS / 4][4];
#pragma unroll
                    for (int b = 0; b < K_STEPS / 4; ++b) load_matrices((at + k_at + n * 8 * ROW_BYTES) ^ (b * 64), x[b]);
                    float scale[2][WARP_GROUPS ? WARP_GROUPS : 1];
                    scales_of(scales, n * 8 + 2 * t, group0, scale[0]);
                    scales_of(scales, n * 8 + 2 * t + 1, group0, scale[1]);
#pragma unroll
                    for (int j = 0; j < WARP_GROUPS; ++j) {
                        float4 raw[M_TILES];
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m) raw[m] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                        for (int k = j * STEPS_PER_GROUP; k < (j + 1) * STEPS_PER_GROUP; ++k) {
                            unsigned low, high;
                            widen(x[k / 4][k % 4], low, high);
#pragma unroll
                            for (int m = 0; m < M_TILES; ++m) mma<false>(raw[m], query.a[m][k], low, high);
                        }
                        const float even = scale[0][j] * SCORE_GUARD, odd = scale[1][j] * SCORE_GUARD;
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m) {
                            s[m].x += raw[m].x * even;
                            s[m].y += raw[m].y * odd;
                            s[m].z += raw[m].z * even;
                            s[m].w += raw[m].w * odd;
                        }
                    }
                } else {
#pragma unroll
                    for (int b = 0; b < K_STEPS / 2; ++b) {
                        unsigned x[4];
                        load_matrices(((at + k_at + n * 8 * ROW_BYTES) ^ ((b & 1) * 64)) + (b >> 1) * 128, x);
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m) {
                            mma<BF16>(s[m], query.a[m][2 * b], x[0], x[1]);
                            mma<BF16>(s[m], query.a[m][2 * b + 1], x[2], x[3]);
                        }
                    }
                }
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) sts4(base + S_AT + ((warp * M_TILES + m) * KEY_TILES + n) * 512 + lane * 16, s[m]);
            }
            __syncthreads();
            const unsigned valid = ldsu(base + MASK_AT + (warp * STAGES + stage) * 4);
            gather.issue(p, stage == 0 ? STAGES - 1 : stage - 1);

            // ---- softmax of this warp's pieces ----
            float p0 = 0.f, p1 = 0.f;
            float near0 = ref[0][0], near1 = ref[0][1];
            if (M_TILES > 1 && soft_m) near0 = ref[M_TILES - 1][0], near1 = ref[M_TILES - 1][1];
            if (softens) {
                const float to0 = M_TILES > 1 && soft_m ? query.to_log2[M_TILES - 1][0] : query.to_log2[0][0];
                const float to1 = M_TILES > 1 && soft_m ? query.to_log2[M_TILES - 1][1] : query.to_log2[0][1];
                float4 v[PIECE_TURNS];
                float log_even[PIECE_TURNS], log_odd[PIECE_TURNS];   // log2 smax of slots 2t, 2t + 1
                float top0 = FLOOR_REF, top1 = FLOOR_REF;
#pragma unroll
                for (int turn = 0; turn < PIECE_TURNS; ++turn) {
                    const int n = piece0 + turn * WARPS;
                    if (PIECES % WARPS != 0 && n >= KEY_TILES) break;
                    float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                    for (int w = 0; w < WARPS; ++w) {
                        const float4 e = lds4(base + S_AT + ((w * M_TILES + soft_m) * KEY_TILES + n) * 512 + lane * 16);
                        s.x += e.x; s.y += e.y; s.z += e.z; s.w += e.w;
                    }
                    s.x *= to0; s.y *= to0; s.z *= to1; s.w *= to1;
                    const int even = n * 8 + 2 * t, odd = even + 1;
                    log_even[turn] = log_odd[turn] = 0.f;
                    if (FP8) {
                        float a = 0.f, b = 0.f;
#pragma unroll
                        for (int j = 0; j < GROUPS; j += 8) {
                            if (GROUPS % 8 == 0 || j + g < GROUPS) {
                                a = fmaxf(a, scale_at(scales, even, j + g));
                                b = fmaxf(b, scale_at(scales, odd, j + g));
                            }
                        }
#pragma unroll
                        for (int x = 4; x < 32; x *= 2) {
                            a = fmaxf(a, __shfl_xor_sync(~0u, a, x));
                            b = fmaxf(b, __shfl_xor_sync(~0u, b, x));
                        }
                        a = fmaxf(a, 0x1p-125f);
                        b = fmaxf(b, 0x1p-125f);
                        log_even[turn] = log2_approx(a);
                        log_odd[turn] = log2_approx(b);
                        if (g == 0) {
                            sts(base + INV_AT + even * 4, exp2_approx(-log_even[turn]));
                            sts(base + INV_AT + odd * 4, exp2_approx(-log_odd[turn]));
                        }
                        // Overflown scores of finite rows; NaN stays.
                        s.x = s.x > SCORE_MAX ? SCORE_MAX : s.x < -SCORE_MAX ? -SCORE_MAX : s.x;
                        s.y = s.y > SCORE_MAX ? SCORE_MAX : s.y < -SCORE_MAX ? -SCORE_MAX : s.y;
                        s.z = s.z > SCORE_MAX ? SCORE_MAX : s.z < -SCORE_MAX ? -SCORE_MAX : s.z;
                        s.w = s.w > SCORE_MAX ? SCORE_MAX : s.w < -SCORE_MAX ? -SCORE_MAX : s.w;
                        s.x += log_even[turn]; s.y += log_odd[turn]; s.z += log_even[turn]; s.w += log_odd[turn];
                    }
                    if (!(valid >> even & 1)) s.x = s.z = neg_inf();
                    if (!(valid >> odd & 1)) s.y = s.w = neg_inf();
                    top0 = fmaxf(top0, fmaxf(s.x, s.y));
                    top1 = fmaxf(top1, fmaxf(s.z, s.w));
                    v[turn] = s;
                }
                top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 1));
                top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 1));
                top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 2)) - HEADROOM;
                top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 2)) - HEADROOM;
                if (top0 > near0 + LAZY) near0 = top0;
                if (top1 > near1 + LAZY) near1 = top1;
                if (FP8 && !l_set) {   // units in which l is near 1, whatever the scales: by the first slots seen
                    float most = -1000.f;
#pragma unroll
                    for (int turn = 0; turn < PIECE_TURNS; ++turn) {
                        const int even = (piece0 + turn * WARPS) * 8 + 2 * t;
                        if (PIECES % WARPS != 0 && even >= TILE) break;
                        if (valid >> even & 1) most = fmaxf(most, log_even[turn]);
                        if (valid >> (even + 1) & 1) most = fmaxf(most, log_odd[turn]);
                    }
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                    l_set = most > -1000.f;
                    l_log2 = l_set ? most : 0.f;
                }
#pragma unroll
                for (int turn = 0; turn < PIECE_TURNS; ++turn) {
                    const int n = piece0 + turn * WARPS;
                    if (PIECES % WARPS != 0 && n >= KEY_TILES) break;
                    float4 e = make_float4(exp2_approx(v[turn].x - near0), exp2_approx(v[turn].y - near0),
                                           exp2_approx(v[turn].z - near1), exp2_approx(v[turn].w - near1));
                    const unsigned first = pack_pair<BF16>(e.x, e.y), second = pack_pair<BF16>(e.z, e.w);
                    sts2u(base + P_AT + (soft_m * KEY_TILES + n) * 256 + lane * 8, first, second);
                    if (FP8) {
                        const float even = exp2_approx(fminf(l_log2 - log_even[turn], 100.f));
                        const float odd = exp2_approx(fminf(l_log2 - log_odd[turn], 100.f));
                        p0 += e.x * even + e.y * odd;
                        p1 += e.z * even + e.w * odd;
                    } else {   // what the tensor cores will sum
                        const float2 a = unpack_pair<BF16>(first), b = unpack_pair<BF16>(second);
                        p0 += a.x + a.y;
                        p1 += b.x + b.y;
                    }
                    if (t == 0) {
                        sts(base + REF_AT + ((soft_m * 16 + g) * KEY_TILES + n) * 4, near0);
                        sts(base + REF_AT + ((soft_m * 16 + g + 8) * KEY_TILES + n) * 4, near1);
                    }
                }
            }
            copy_wait<STAGES - 2>();
            __syncthreads();

            // ---- common reference; ratios of this warp's groups ----
            bool moved = false;
            float old[M_TILES][2];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float4 r = lds4(base + REF_AT + (16 * m + 8 * half + g) * KEY_TILES * 4);
                    old[m][half] = ref[m][half];
                    ref[m][half] = fmaxf(fmaxf(r.x, r.y), fmaxf(r.z, r.w));
                    moved |= ref[m][half] != old[m][half];
                }
            moved = __any_sync(~0u, moved);
            if (moved) {
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    const float f0 = exp2_approx(old[m][0] - ref[m][0]), f1 = exp2_approx(old[m][1] - ref[m][1]);
#pragma unroll
                    for (int n = 0; n < N_TILES; ++n) {
                        o[m][n].x *= f0; o[m][n].y *= f0; o[m][n].z *= f1; o[m][n].w *= f1;
                    }
                }
                const float new0 = M_TILES > 1 && soft_m ? ref[M_TILES - 1][0] : ref[0][0];
                const float new1 = M_TILES > 1 && soft_m ? ref[M_TILES - 1][1] : ref[0][1];
                const float old0 = M_TILES > 1 && soft_m ? old[M_TILES - 1][0] : old[0][0];
                const float old1 = M_TILES > 1 && soft_m ? old[M_TILES - 1][1] : old[0][1];
                l0 = l0 * exp2_approx(old0 - new0) + p0 * exp2_approx(near0 - new0);
                l1 = l1 * exp2_approx(old1 - new1) + p1 * exp2_approx(near1 - new1);
            } else {
                l0 += p0;
                l1 += p1;
            }
            if (FP8) {
                const float inverse = lds(base + INV_AT + lane * 4);
                float scale[WARP_GROUPS ? WARP_GROUPS : 1];
                scales_of(scales, lane, group0, scale);
#pragma unroll
                for (int j = 0; j < WARP_GROUPS; ++j) {
                    const float ratio = scale[j] * inverse;
                    float up = __int_as_float((127 + exponent[j]) << 23);
                    if (__any_sync(~0u, exponent[j] == 1000 ? ratio > 0.f : ratio * up > 2.f)) {
                        float most = ratio;
#pragma unroll
                        for (int x = 1; x < 32; x *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, x));
                        // ratio * 2^e in [1/2, 1); at most 2^100, at least 2^-1
                        const int e = min(max(126 - (int)(__float_as_uint(most) >> 23 & 0xff), -1), 100);
                        if (exponent[j] != 1000) {
                            const float down = exp2_approx((float)(e - exponent[j]));
                            const int first = j * GROUP_SIZE / 8, last = min(first + GROUP_SIZE / 8, N_TILES);
#pragma unroll
                            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                                for (int n = 0; n < N_TILES; ++n)
                                    if (n >= first && n < last) { o[m][n].x *= down; o[m][n].y *= down; o[m][n].z *= down; o[m][n].w *= down; }
                        }
                        exponent[j] = e;
                        up = __int_as_float((127 + e) << 23);
                    }
                    sts16(base + RATIO_AT + ((warp * WARP_GROUPS + j) * TILE + lane) * 2,
                          __half_as_ushort(__float2half_rn(exponent[j] == 1000 ? ratio : ratio * up)));
                }
                __syncwarp();
            }

            // ---- PV ----
#pragma unroll
            for (int kb = 0; kb < TILE / 16; ++kb) {
                unsigned a[M_TILES][4];
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    const uint2 x = lds2u(base + P_AT + (m * KEY_TILES + 2 * kb) * 256 + lane * 8);
                    const uint2 y = lds2u(base + P_AT + (m * KEY_TILES + 2 * kb + 1) * 256 + lane * 8);
                    a[m][0] = x.x; a[m][1] = x.y; a[m][2] = y.x; a[m][3] = y.y;
                    if (moved) {   // a piece may have been made with an older reference than the common one
#pragma unroll
                        for (int half = 0; half < 2; ++half)
#pragma unroll
                            for (int piece = 0; piece < 2; ++piece) {
                                const float f = exp2_approx(lds(base + REF_AT + ((16 * m + 8 * half + g) * KEY_TILES + 2 * kb + piece) * 4) - ref[m][half]);
                                const float2 e = unpack_pair<BF16>(a[m][2 * piece + half]);
                                a[m][2 * piece + half] = pack_pair<BF16>(e.x * f, e.y * f);
                            }
                    }
                }
                const unsigned v = at + v_at + kb * 16 * ROW_BYTES;
                if (FP8) {
#pragma unroll
                    for (int j = 0; j < WARP_GROUPS; ++j) {
                        const unsigned ratios = base + RATIO_AT + ((warp * WARP_GROUPS + j) * TILE + kb * 16 + 2 * t) * 2;
                        const unsigned r0 = ldsu(ratios), r1 = ldsu(ratios + 16);
                        unsigned b[M_TILES][4];
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m) {
                            b[m][0] = mul_half2(a[m][0], r0); b[m][1] = mul_half2(a[m][1], r0);
                            b[m][2] = mul_half2(a[m][2], r1); b[m][3] = mul_half2(a[m][3], r1);
                        }
#pragma unroll
                        for (int c = j * STEPS_PER_GROUP; c < (j + 1) * STEPS_PER_GROUP; c += 2) {   // chunks of 16 dims
                            unsigned x[4];
                            load_matrices_transposed(v ^ (c * 16), x);
#pragma unroll
                            for (int h = 0; h < 2; ++h) {
                                unsigned even0, odd0, even1, odd1;
                                widen(__byte_perm(x[2 * h], 0, 0x3120), even0, odd0);
                                widen(__byte_perm(x[2 * h + 1], 0, 0x3120), even1, odd1);
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
                            mma<BF16>(o[m][c], a[m], x[0], x[1]);
                            mma<BF16>(o[m][c + 1], a[m], x[2], x[3]);
                        }
                    }
                }
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }

        // ---- the segment's end: l over all warps, O / l, out or partial ----
        l0 += __shfl_xor_sync(~0u, l0, 1);
        l1 += __shfl_xor_sync(~0u, l1, 1);
        l0 += __shfl_xor_sync(~0u, l0, 2);
        l1 += __shfl_xor_sync(~0u, l1, 2);
        if (t == 0) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                const bool mine = softens && m == soft_m;
                sts(base + LSE_AT + ((16 * m + g) * 8 + warp) * 4, mine ? log2f(l0) - l_log2 : neg_inf());
                sts(base + LSE_AT + ((16 * m + g + 8) * 8 + warp) * 4, mine ? log2f(l1) - l_log2 : neg_inf());
            }
        }
        __syncthreads();
        const long long partial = segment.z;
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
                const float lse2 = sum == 0.f ? neg_inf() : ref[m][half] + log_l;
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
                        const int e = FP8 ? exponent[FP8 ? n * 8 / GROUP_SIZE : 0] : 0;
                        step = exp2f(-0.5f * (log_l + (float)(e == 1000 ? 0 : e)));
                    }
                    const float4 a = o[m][n], b = o[m][FP8 ? n + 1 : n];
                    float x[4] = {half ? a.z : a.x, half ? (FP8 ? b.z : a.w) : (FP8 ? b.x : a.y), half ? a.w : a.y, half ? b.w : b.y};
#pragma unroll
                    for (int i = 0; i < 4; ++i) x[i] = x[i] * step * step * end;
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
