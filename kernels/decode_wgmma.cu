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
#include "params.cuh"
#include "schedule.cuh"
#include "mma.cuh"
#include "mbarrier.cuh"
#include "wgmma.cuh"

constexpr int TILE = 64;
constexpr int HALF_DIMS = 256;
constexpr bool Q_BF16 = Q_DTYPE == 1;
constexpr bool PAIR = CLUSTER == 2;
constexpr bool PIPELINED = PAIR;
constexpr int GROUPS = 8;
static_assert(HEAD_DIM == 512 && GROUP_SIZE == 64 && KV_DTYPE == 0, "other shapes are for decode_mma");

constexpr int CTA_DIMS = PAIR ? HALF_DIMS : HEAD_DIM;        // dimensions that this CTA widens
constexpr int BUFFERS = PAIR ? 3 : 2;
constexpr int BUFFER_BYTES = TILE * CTA_DIMS * 2;
constexpr int BLOCK_BYTES = TILE * 128;                      // 64 dimensions of a tile (wgmma.cuh)
constexpr int RING = 4;                                      // segments between producers and their last user
constexpr int PRODUCER_WARPS = 4;
constexpr int WARP_ROWS = TILE / PRODUCER_WARPS;             // rows of a tile that a producing warp takes
constexpr int ROW_LANES = CTA_DIMS / 16;                     // lanes that share a row
constexpr int LOAD_ROWS = 32 / ROW_LANES;                    // rows of one load of a warp
constexpr int BATCH_ROWS = 8;                                // rows a warp widens with one exchange of factors
constexpr int BATCH_LOADS = BATCH_ROWS / LOAD_ROWS;
constexpr int BATCHES = WARP_ROWS / BATCH_ROWS;
constexpr int LOADS = WARP_ROWS / LOAD_ROWS;

// Byte map. FACTORS of a tile: for each pair of slots {2^(e - GUARD), 2^(e - GUARD), e, e}; 0 and -inf where skipped.
constexpr int WARPGROUP_BYTES = 64 * HALF_DIMS * 2;          // q of a warpgroup
constexpr int SWAP_BYTES = 64 * TILE * 4;                    // one S of a warpgroup
constexpr int FACTOR_BYTES = TILE * 8;
constexpr int Q_AT = 0;
constexpr int TILES_AT = Q_AT + 2 * WARPGROUP_BYTES;
constexpr int SWAP_AT = TILES_AT + BUFFERS * BUFFER_BYTES;   // [warpgroup that reads it]
constexpr int FACTORS_AT = SWAP_AT + 2 * SWAP_BYTES;         // [BUFFERS]
constexpr int RATIOS_AT = FACTORS_AT + BUFFERS * FACTOR_BYTES;               // [producing warp][group][row of batch] fp16 x 2
constexpr int SCHEDULE_AT = RATIOS_AT + PRODUCER_WARPS * GROUPS * BATCH_ROWS * 4;  // [producing warp] Segments
constexpr int SEGMENTS_AT = SCHEDULE_AT + PRODUCER_WARPS * 64;               // [RING] {row, slots, partial}
constexpr int BARRIERS_AT = SEGMENTS_AT + RING * 16;
constexpr int FULL = BARRIERS_AT;                            // [BUFFERS] a tile and its factors are there
constexpr int EMPTY = FULL + 8 * BUFFERS;                    // [BUFFERS] both warpgroups are done with it
constexpr int SEGMENT_FULL = EMPTY + 8 * BUFFERS;            // [RING]
constexpr int SEGMENT_EMPTY = SEGMENT_FULL + 8 * RING;       // [RING]
constexpr int SWAP_FULL = SEGMENT_EMPTY + 8 * RING;          // [warpgroup] the partner's S has come (CLUSTER = 2)
constexpr int SWAP_EMPTY = SWAP_FULL + (PAIR ? 16 : 0);      // [warpgroup] the partner has read ours (CLUSTER = 2)
constexpr int SHARED_BYTES = SWAP_EMPTY + (PAIR ? 16 : 0);
static_assert(sizeof(Segments) <= 64 && SHARED_BYTES <= 232448, "shared memory");

constexpr float HEADROOM = 6.f;          // log2 of P' for the largest score at a fresh reference
constexpr float LAZY = 8.f;              // log2: growth of the maximum before the reference moves
constexpr float FIRST_REF = -1e30f;
constexpr float SCORE_MAX = 1e37f;
constexpr int LEAST_EXPONENT = -88;
constexpr int GUARD = 30;                // scales enter scores as 2^(e - GUARD), so that no product overflows

extern __shared__ __align__(1024) unsigned char smem[];

// ---------------------------------------------------------------------------------------------------- producers
struct Producer {
    unsigned base;
    int warp, lane, rank;                // rank: half of D that this CTA widens (CLUSTER = 2)
    int published = 0;                   // segments put into the ring
    bool more = true, fresh = false;
    int begin = 0, left = 0;             // of the current segment: next entry of kv_indices, entries not yet taken

    DEVICE Segments* schedule() const { return reinterpret_cast<Segments*>(smem + SCHEDULE_AT + warp * 64); }

    // Next segment, announced to the computing warpgroups; row -1 ends the work.
    DEVICE void advance(const DecodeParams& p) {
        Segments seg = *schedule();
        __syncwarp();
        more = seg.next(p);
        if (lane == 0) *schedule() = seg;
        if (warp == 0) {
            const int at = published % RING;
            barrier_wait(base + SEGMENT_EMPTY + 8 * at, (published / RING & 1) ^ 1);
            if (lane == 0) {
                *reinterpret_cast<int4*>(smem + SEGMENTS_AT + 16 * at) = make_int4(more ? seg.row : -1, seg.len, (int)seg.partial, 0);
                barrier_arrive(base + SEGMENT_FULL + 8 * at);
            }
        }
        __syncwarp();
        ++published;
        begin = seg.begin;
        left = more ? seg.len : 0;
        fresh = more;
    }
    // Takes the next tile: returns its number of slots, 0 for an empty segment, -1 at the end; `slot` becomes the id of
    // row `lane % 16` of this warp's rows, -1 past the end. At most one segment is announced a call: the computing
    // warpgroups can always reach the last but RING - 1 with the tiles they were given.
    DEVICE int take(const DecodeParams& p, int& slot) {
        if (more && left == 0 && !fresh) advance(p);
        slot = -1;
        if (!more) return -1;
        const int count = min(left, TILE), mine = warp * WARP_ROWS + (lane & 15);
        if (mine < count) slot = __ldg(p.indices + begin + mine);
        begin += count;
        left -= count;
        fresh = false;
        return count;
    }

    DEVICE void run(const DecodeParams& p) {
        {
            Segments seg(p, blockIdx.x);
            if (lane == 0) *schedule() = seg;
            __syncwarp();
        }
        const int lane_row = lane / ROW_LANES, block = lane % ROW_LANES >> 2;
        const char* codes_from = static_cast<const char*>(p.kv) + rank * HALF_DIMS + lane % ROW_LANES * 16;
        const unsigned ratios = base + RATIOS_AT + warp * (GROUPS * BATCH_ROWS * 4);
        // Where this lane puts the ratios it makes, and where it finds those of its group. PAIR: even rows first.
        const int batch_row = lane >> 1 & 7, place = PAIR ? (batch_row & 1) * 4 + (batch_row >> 1) : batch_row;
        const unsigned ratios_to = ratios + (lane & 1) * 4 * BATCH_ROWS * 4 + place * 4;
        const unsigned ratios_from = ratios + (rank * (HALF_DIMS / GROUP_SIZE) + block) * BATCH_ROWS * 4 + lane_row * 16;
        // Each lane widens 16 dimensions, the chunks 2c and 2c + 1 of its block. In odd blocks the two change places, so
        // that the 8 lanes that store at once hit all 8 chunks; q and O are permuted alike.
        const int chunk = 2 * (lane & 3) + (block & 1);
        const unsigned row_at = base + TILES_AT + block * BLOCK_BYTES + (warp * WARP_ROWS + lane_row) * 128
                                + ((chunk ^ lane_row) << 4);

        uint4 codes[LOADS];                  // of the tile to be stored next
        float4 scales = make_float4(0.f, 0.f, 0.f, 0.f);   // lane: row lane / 2 of the warp's rows, groups 4 (lane % 2) ...
        unsigned valid = 0;                  // its rows that exist
        // Of the rows being loaded: which exist; id of row lane % 16, or its byte offset; page of row lane / 2.
        unsigned loading;
        long long codes_at;
        int scales_page;
        auto page_of = [&](int id) { return PAGED ? id / p.page_size : id; };
        auto offset_of = [&](int id) {
            const int page = page_of(id);
            return PAGED ? page * p.page_stride + (id - page * p.page_size) * p.slot_stride : id * p.page_stride;
        };
        auto locate = [&](int id) {
            const bool exists = (unsigned)id < p.num_slots;
            loading = __ballot_sync(~0u, exists) & 0xffff;
            codes_at = !exists ? 0 : PAGED ? offset_of(id) : id;
            scales_page = __shfl_sync(~0u, exists ? page_of(id) : 0, lane >> 1);
        };
        auto load_scales = [&] {
            scales = make_float4(0.f, 0.f, 0.f, 0.f);
            if (loading >> (lane >> 1) & 1)
                scales = __ldg(reinterpret_cast<const float4*>(p.scales + scales_page * p.scale_stride) + (lane & 1));
        };
        auto load_codes = [&] {
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int row = i * LOAD_ROWS + lane_row;
                const long long at = PAGED ? __shfl_sync(~0u, codes_at, row) : __shfl_sync(~0u, (int)codes_at, row) * p.page_stride;
                load_or_zero(codes[i], codes_from + at, loading >> row & 1);
            }
        };
        // Rows of a tile further ahead come to L2: lines of 128 bytes, lanes 16-31 the second of each pair.
        auto prefetch = [&](int id) {
            if ((unsigned)id >= p.num_slots) return;
            const char* row = static_cast<const char*>(p.kv) + offset_of(id) + rank * HALF_DIMS + (lane >> 4) * 128;
            prefetch_l2(row);
            if (!PAIR) prefetch_l2(row + 256);
            if (lane < 16) prefetch_l2(p.scales + page_of(id) * p.scale_stride);
        };

        int buffer = 0;
        unsigned phase = 1;
        // Slots of the tile in `codes` (none yet), of the next, whose rows are being loaded, and of the one after that.
        int next_slot, after_slot, count = 0, next_count = take(p, next_slot);
        prefetch(next_slot);
        int after_count = take(p, after_slot);
        while (count >= 0) {
            locate(next_slot);
            next_slot = after_slot;
            prefetch(next_slot);
            const int last_count = take(p, after_slot);
            if (count > 0) {             // 0 at the beginning and for an empty segment: no tile to store
                barrier_wait(base + EMPTY + 8 * buffer, phase);
                // 2^e with e the exponent of the largest scale. fmaxf drops NaN, which stays in its own ratio.
                float most = fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w)));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                const int e = min(max((int)(__float_as_uint(most) >> 23) - 127, LEAST_EXPONENT), 126);
                const float down = __int_as_float((127 - e) << 23);
                const unsigned ratio[4] = {split_half(scales.x * down), split_half(scales.y * down),
                                           split_half(scales.z * down), split_half(scales.w * down)};
                const bool exists = valid >> (lane >> 1) & 1;
                const float up = exists ? __int_as_float((127 - GUARD + e) << 23) : 0.f, log = exists ? (float)e : neg_inf();
                const float up1 = __shfl_down_sync(~0u, up, 2), log1 = __shfl_down_sync(~0u, log, 2);
                if ((lane & 3) == 0)
                    sts4(base + FACTORS_AT + buffer * FACTOR_BYTES + (warp * (WARP_ROWS / 2) + (lane >> 2)) * 16,
                         make_float4(up, up1, log, log1));
                const unsigned to = row_at + buffer * BUFFER_BYTES;
#pragma unroll
                for (int batch = 0; batch < BATCHES; ++batch) {
                    if (lane >> 4 == batch) {
#pragma unroll
                        for (int k = 0; k < 4; ++k) sts1u(ratios_to + k * BATCH_ROWS * 4, ratio[k]);
                    }
                    __syncwarp();
                    unsigned r[BATCH_LOADS];
#pragma unroll
                    for (int i = 0; i < BATCH_LOADS; i += 4) {
                        const int4 v = lds4i(ratios_from + i * 4);
                        r[i] = v.x; r[i + 1] = v.y; r[i + 2] = v.z; r[i + 3] = v.w;
                    }
#pragma unroll
                    for (int i = 0; i < BATCH_LOADS; ++i) {
                        const int row = batch * BATCH_ROWS + i * LOAD_ROWS;
                        const uint4 x = codes[batch * BATCH_LOADS + i];
                        unsigned w[8];
                        widen(x.x, w[0], w[1]);
                        widen(x.y, w[2], w[3]);
                        widen(x.z, w[4], w[5]);
                        widen(x.w, w[6], w[7]);
                        const unsigned high = __byte_perm(r[i], 0, 0x1010), low = __byte_perm(r[i], 0, 0x3232);
#pragma unroll
                        for (int k = 0; k < 8; ++k) w[k] = EXACT_SCALES ? fma_half2(w[k], high, mul_half2(w[k], low)) : mul_half2(w[k], high);
                        unsigned at = to;
                        asm volatile("" : "+r"(at));   // one LOP3 here costs less than a register kept for each row
                        at = (at ^ (row & 7) << 4) + row * 128;
                        sts4u(at, w[0], w[1], w[2], w[3]);
                        sts4u(at ^ 16, w[4], w[5], w[6], w[7]);
                    }
                }
                fence_for_wgmma();
                __syncwarp();
                if (lane == 0) barrier_arrive(base + FULL + 8 * buffer);
                if (++buffer == BUFFERS) { buffer = 0; phase ^= 1; }
            }
            load_scales();
            load_codes();
            valid = loading;
            count = next_count;
            next_count = after_count;
            after_count = last_count;
        }
    }
};

// ---------------------------------------------------------------------------------------------- computing warpgroups
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
