// What decode_mma.cu reads from memory: tiles of slots (asynchronously, ahead of their use) and queries.
#pragma once
#include "params.cuh"
#include "schedule.cuh"
#include "mma.cuh"
#include "mma_layout.cuh"

// The gather: tiles in the order of the segments, STAGES - 1 ahead of their use.
struct Gather {
    unsigned base;                // shared address; the ring of segments and their state are the warp's own copies
    int warp, lane, row0;         // first of the warp's own rows of a tile (EVEN)
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
    // The warp's part of a segment's queries to L2, before it is read.
    DEVICE void prefetch_queries(const DecodeParams& p, int row) const {
        constexpr int LINES = WARP_DIMS * 2 / 128;   // of 128 bytes, a head
#pragma unroll
        for (int i = 0; i < HEADS * LINES; i += 32) {
            const int head = blockIdx.y * HEADS + (i + lane) / LINES;
            if (HEADS * LINES - i < 32 && i + lane >= HEADS * LINES) break;
            if (head < p.num_heads)
                prefetch(static_cast<const char*>(p.q) + 2 * (row * p.q_stride_token + head * p.q_stride_head + warp * WARP_DIMS) +
                         lane % LINES * 128);
        }
    }
    // Read ahead the next tile's slot ids.
    DEVICE void fetch(const DecodeParams& p) {
        if (more && left == 0 && !fresh) advance(p);
        count = more ? min(left, TILE) : -1;
        slot = -1;
        const int entry = (lane + row0) % TILE;
        if (entry < count) slot = __ldg(p.indices + begin + entry);
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
            const unsigned rotated = __ballot_sync(~0u, valid), mask = __funnelshift_l(rotated, rotated, row0);
            if (lane == 0) *reinterpret_cast<unsigned*>(smem + MASK_AT + (warp * STAGES + stage) * 4) = mask;
            const int page = !valid ? 0 : PAGED ? my / p.page_size : my;
            const int in_page = PAGED && valid ? my - page * p.page_size : 0;
            const unsigned to = base + stage * STAGE_BYTES;
            if (rotated == ~0u) copy_rows<true>(p, page, in_page, rotated, to);
            else copy_rows<false>(p, page, in_page, rotated, to);
            if (FP8) copy_scales(p, page, rotated, to + SCALES_AT);
        }
        copy_commit();
    }
    // Lane i has the slot of row (i + row0) % TILE. Lanes share rows so that a warp's copies are contiguous: 32 lanes
    // a row, or several short rows at once.
    template <bool ALL>
    DEVICE void copy_rows(const DecodeParams& p, int page, int in_page, unsigned rotated, unsigned to) const {
        constexpr int LANES = ROW_CHUNKS > 16 ? 32 : ROW_CHUNKS > 8 ? 16 : ROW_CHUNKS > 4 ? 8 : 4;
        constexpr int ROWS = 32 / LANES;
        constexpr int TURNS = (TILE + ROWS * WARPS - 1) / (ROWS * WARPS);
        constexpr bool WIDE = PAGED || KV_COPY < 16;   // else the host has made sure that a stride fits 31 bits
        const int chunk = lane % LANES, turn0 = EVEN ? 0 : warp * ROWS;
        const char* kv = static_cast<const char*>(p.kv) + chunk * 16;
        long long offset = 0;
        if (WIDE) offset = page * p.page_stride + (PAGED ? in_page * p.slot_stride : 0);
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int local = turn * ROWS * (EVEN ? 1 : WARPS) + turn0 + (ROWS == 1 ? 0 : lane / LANES), row = row0 + local;
            if (!EVEN && turn0 + turn * ROWS * WARPS >= TILE) break;
            const char* from;
            if (WIDE) from = kv + __shfl_sync(~0u, offset, local);
            else from = at_row(kv, __shfl_sync(~0u, page, local), (int)p.page_stride);
            const bool take = ALL || (rotated >> local & 1);
#pragma unroll
            for (int c0 = 0; c0 < ROW_CHUNKS; c0 += LANES) {
                const int c = c0 + chunk;
                if (ROW_CHUNKS % LANES != 0 && c >= ROW_CHUNKS) break;
                unsigned at;
                if (EVEN && TURNS * ROWS % 8 == 0 && ROW_BYTES % 128 == 0)   // row0 is a multiple of 8
                    at = ((to + row0 * ROW_BYTES + chunk * 16) ^ ((local & 7) << 4)) + local * ROW_BYTES + c0 * 16;
                else
                    at = to + row * ROW_BYTES + ((c ^ row_swizzle(row)) << 4);
#pragma unroll
                for (int b = 0; b < 16; b += KV_COPY) {
                    if (ALL) copy_async<KV_COPY>(at + b, from + c0 * 16 + b);
                    else copy_async<KV_COPY>(at + b, from + c0 * 16 + b, take);
                }
            }
        }
    }
    DEVICE void copy_scales(const DecodeParams& p, int my_page, unsigned rotated, unsigned to) const {
        constexpr int UNITS = SCALE_PITCH / SCALE_COPY;                   // copies a row
        constexpr int ROWS = EVEN ? TILE / WARPS : TILE, STEP = EVEN ? 32 : THREADS;   // a warp's own rows, or all
#pragma unroll
        for (int u0 = 0; u0 < ROWS * UNITS; u0 += STEP) {
            const int u = u0 + (EVEN ? 0 : warp * 32) + lane;
            const int local = min(u / UNITS, ROWS - 1), unit = u % UNITS, row = row0 + local;
            const int page = __shfl_sync(~0u, my_page, local);
            const bool take = rotated >> local & 1;
            const char* from = reinterpret_cast<const char*>(p.scales) + unit * SCALE_COPY;
            if (SCALE_COPY < 16) from += page * p.scale_stride * 4;
            else from = at_row(from, page, (int)p.scale_stride * 4);
            if (ROWS * UNITS % STEP == 0 || u < ROWS * UNITS)
                copy_async<SCALE_COPY>(to + scale_row(row) * SCALE_PITCH + unit * SCALE_COPY, from, take);
        }
    }
};

// One segment's queries as mma A fragments, and the factor that takes raw scores to log2 units, for heads g and g + 8.
// In registers for 16 heads; for 32, where O takes 128 registers, in the warp's own part of shared memory.
struct Fragment { unsigned r[4]; };

struct Queries {
    unsigned a[M_TILES][K_STEPS][4];
    float to_log2[M_TILES][2];

    DEVICE unsigned shared_place(int m, int k, unsigned base, int warp, int lane) const {
        return base + Q_AT + ((warp * M_TILES + m) * K_STEPS + k) * 512 + lane * 16;
    }
    DEVICE Fragment fragment(int m, int k, unsigned base, int warp, int lane) const {
        Fragment f;
        if (Q_SHARED) {
            const uint4 v = lds4u(shared_place(m, k, base, warp, lane));
            f.r[0] = v.x; f.r[1] = v.y; f.r[2] = v.z; f.r[3] = v.w;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) f.r[i] = a[m][k][i];
        }
        return f;
    }
    DEVICE void to_shared(unsigned base, int warp, int lane) const {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k)
                sts4u(shared_place(m, k, base, warp, lane), make_uint4(a[m][k][0], a[m][k][1], a[m][k][2], a[m][k][3]));
        __syncwarp();
    }

    DEVICE void load(const DecodeParams& p, unsigned base, int row, int warp, int lane) {
        const int g = lane >> 2, t = lane & 3, head0 = blockIdx.y * HEADS;
        const char* q = static_cast<const char*>(p.q);
        unsigned most[M_TILES][2];   // pairs of largest magnitudes, as bits: Inf and NaN are above all else
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int head = head0 + 16 * m + 8 * half + g;
                most[m][half] = 0;
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
                    most[m][half] = __vmaxu2(most[m][half], __vmaxu2(x & 0x7fff7fffu, y & 0x7fff7fffu));
                }
            }
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned x = most[m][half];
                x = __vmaxu2(x, __shfl_xor_sync(~0u, x, 1));
                x = __vmaxu2(x, __shfl_xor_sync(~0u, x, 2));
                if (t == 0) stsu(base + QMAX_AT + ((16 * m + 8 * half + g) * 8 + warp) * 4, max(x & 0xffff, x >> 16));
            }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned x = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) x = max(x, ldsu(base + QMAX_AT + ((16 * m + 8 * half + g) * 8 + w) * 4));
                // 2^e takes the largest element to Q_TOP, a subnormal one less far. Infinite or NaN q: all scores are NaN.
                const int e = min(Q_TOP - (Q_BF16 ? (int)(x >> 7) - 127 : (int)(x >> 10) - 15), 127);
                const int back = GUARD_LOG2 - BOOST_LOG2 - e;
                const float up = power(e), to = mul_kept(mul_kept(p.scale_log2, power(back / 2)), power(back - back / 2));
                to_log2[m][half] = x < (Q_BF16 ? 0x7f80 : 0x7c00) ? clamped(to, LARGEST_FLOAT) : __int_as_float(0x7fffffff);
#pragma unroll
                for (int k = 0; k < K_STEPS; ++k)
#pragma unroll
                    for (int i = half; i < 4; i += 2) {
                        const float2 v = unpack_pair<Q_BF16>(a[m][k][i]);
                        a[m][k][i] = pack_pair<BF16>(mul_kept(v.x, up), mul_kept(v.y, up));
                    }
            }
    }
};
