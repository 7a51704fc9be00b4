// The producing warps of the Hopper kernel (decode_wgmma.cu): gather rows, widen them to fp16, fill the tiles.
//
// A warp has 8 rows of each tile; a lane 16 dimensions of each of them, so one load a row. The codes of a tile wait in
// registers for their buffer; as soon as BATCH rows are stored, the loads of the next tile's rows take their place, so
// that 4 to 8 rows a warp (16 to 32 KB a multiprocessor) are under way at any time. Slot ids are read a tile ahead of that.
#pragma once
#include "wgmma_layout.cuh"

// What a producing warp knows of its work, in shared memory: it is needed once a segment.
struct Schedule { Segments segments; int published; };

struct Producer {
    unsigned base;
    int warp, lane;
    int begin = 0, left = 0;             // of the current segment: next entry of kv_indices, entries not yet taken; -1: no more

    DEVICE Schedule* schedule() const { return reinterpret_cast<Schedule*>(smem + SCHEDULE_AT + warp * SCHEDULE_BYTES); }

    // Next segment, announced to the computing warpgroups; row -1 ends the work.
    DEVICE void advance(const DecodeParams& p) {
        Segments seg = schedule()->segments;
        const int published = schedule()->published;
        __syncwarp();
        const bool more = seg.next(p);
        if (lane == 0) *schedule() = {seg, published + 1};
        if (warp == 0) {
            const int at = published % RING;
            barrier_wait(base + SEGMENT_EMPTY + 8 * at, (published / RING & 1) ^ 1);
            if (lane == 0) {
                *reinterpret_cast<int4*>(smem + SEGMENTS_AT + 16 * at) = make_int4(more ? seg.row : -1, seg.len, (int)seg.partial, 0);
                barrier_arrive(base + SEGMENT_FULL + 8 * at);
            }
        }
        __syncwarp();
        begin = seg.begin;
        left = more ? seg.len : -1;
        if (!more) return;
        for (int i = lane; i < 64; i += 32) {    // its queries come to L2: this warp's 8 heads, 8 lines of 128 bytes each
            const int head = blockIdx.y * HEADS + warp * 8 + (i >> 3);
            if (head < p.num_heads)
                prefetch(static_cast<const char*>(p.q) + 2 * (seg.row * p.q_stride_token + head * p.q_stride_head) + (i & 7) * 128);
        }
    }
    // Takes the next tile: returns its number of slots, 0 for an empty segment, -1 at the end; `slot` becomes the id of
    // row `lane % 8` of this warp's rows, -1 past the end. At most one segment is announced a call: with two tiles not
    // yet stored, the computing warpgroups can still reach the end of the last but RING - 1.
    DEVICE int take(const DecodeParams& p, int& slot) {
        if (left == 0) advance(p);
        slot = -1;
        if (left < 0) return -1;
        const int count = min(left, TILE), mine = warp * WARP_ROWS + (lane & 7);
        if (mine < count) slot = __ldg(p.indices + begin + mine);
        begin += count;
        left -= count;
        return count;
    }

    DEVICE void run(const DecodeParams& p) {
        {
            Segments seg(p, blockIdx.x);
            if (lane == 0) *schedule() = {seg, 0};
            __syncwarp();
        }
        const unsigned ratios = base + RATIOS_AT + warp * (GROUPS * WARP_ROWS * 4);
        uint4 codes[WARP_ROWS];              // of the tile to be stored next
        float2 scales = make_float2(0.f, 0.f);   // row lane / 4, groups 2 (lane % 4), + 1
        unsigned valid = 0;                  // its rows that exist
        // Of the rows being loaded: id of row lane % 8, or its byte offset.
        long long codes_at = 0;
        auto page_of = [&](int id) { return PAGED ? id / p.page_size : id; };
        auto locate = [&](int id) {
            const bool exists = (unsigned)id < p.num_slots;
            const int page = exists ? page_of(id) : 0;
            valid = __ballot_sync(~0u, exists) & 0xff;
            codes_at = page;
            if (PAGED) codes_at = exists ? page * p.page_stride + (id - page * p.page_size) * p.slot_stride : 0;
            const int scales_page = __shfl_sync(~0u, page, lane >> 2);
            scales = make_float2(0.f, 0.f);
            if (valid >> (lane >> 2) & 1)
                scales = __ldg(reinterpret_cast<const float2*>(p.scales + scales_page * p.scale_stride) + (lane & 3));
        };
        auto load_codes = [&](int row) {
            const long long at = PAGED ? __shfl_sync(~0u, codes_at, row) : __shfl_sync(~0u, (int)codes_at, row) * p.page_stride;
            load_or_zero(codes[row], static_cast<const char*>(p.kv) + lane * 16 + at, valid >> row & 1);
        };
        // Factors and ratios of the tile in `codes`, from its scales.
        auto factors = [&](int buffer) {
            // 2^e with e the exponent of the largest scale. fmaxf drops NaN, which stays in its own ratio.
            float most = fmaxf(fabsf(scales.x), fabsf(scales.y));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            const int e = min(max((int)(__float_as_uint(most) >> 23) - 127, LEAST_EXPONENT), 126);
            const float down = __int_as_float((127 - e) << 23);
            const unsigned ratios_to = ratios + (lane & 3) * 2 * WARP_ROWS * 4 + (lane >> 2) * 4;
            __syncwarp();                    // the ratios of the tile before have been read
            sts1u(ratios_to, split_half(scales.x * down));
            sts1u(ratios_to + WARP_ROWS * 4, split_half(scales.y * down));
            const bool exists = valid >> (lane >> 2) & 1;
            const float up = exists ? __int_as_float((127 - GUARD + e) << 23) : 0.f, log = exists ? (float)e : neg_inf();
            const float up1 = __shfl_down_sync(~0u, up, 4), log1 = __shfl_down_sync(~0u, log, 4);
            if ((lane & 7) == 0)
                sts4(base + FACTORS_AT + buffer * FACTOR_BYTES + (warp * (WARP_ROWS / 2) + (lane >> 3)) * 16, make_float4(up, up1, log, log1));
            __syncwarp();
        };
        auto store = [&](int first, int buffer) {
            // 16 dimensions are the chunks 2c and 2c + 1 of a block. In odd blocks the two change places, so that the 8
            // lanes that store at once hit all 8 chunks; q and O are permuted alike.
            const int block = lane >> 2, chunk = 2 * (lane & 3) + (block & 1);
            const unsigned to = base + TILES_AT + buffer * BUFFER_BYTES + block * BLOCK_BYTES + warp * (WARP_ROWS * 128) + (chunk << 4);
            const int4 r = lds4i(ratios + (lane >> 2) * WARP_ROWS * 4 + first * 4);   // of this lane's group
            const unsigned ratio[BATCH] = {(unsigned)r.x, (unsigned)r.y, (unsigned)r.z, (unsigned)r.w};
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int row = first + i;
                const unsigned high = __byte_perm(ratio[i], 0, 0x1010), low = __byte_perm(ratio[i], 0, 0x3232);
                unsigned w[8];
                widen(codes[row].x, w[0], w[1]);
                widen(codes[row].y, w[2], w[3]);
                widen(codes[row].z, w[4], w[5]);
                widen(codes[row].w, w[6], w[7]);
#pragma unroll
                for (int k = 0; k < 8; ++k) w[k] = fma_half2(w[k], high, mul_half2(w[k], low));
                const unsigned at = (to ^ row << 4) + row * 128;
                sts4u(at, w[0], w[1], w[2], w[3]);
                sts4u(at ^ 16, w[4], w[5], w[6], w[7]);
            }
        };

        unsigned n = 0;                      // tiles stored
        // Slots of the tile in `codes` (none yet), of the one whose ids are in next_slot, of the one after that.
        int next_slot, count = 0, next_count = take(p, next_slot);
        while (count >= 0) {
            const int buffer = n & 1;
            lane = thread_index() & 31;      // what follows from it costs less to make anew than to keep
            if (count > 0) {                 // 0 at the beginning and for an empty segment: no tile to store
                barrier_wait(base + EMPTY + 8 * buffer, (n >> 1 & 1) ^ 1);
                factors(buffer);
                store(0, buffer);
            }
            locate(next_slot);
#pragma unroll
            for (int row = 0; row < BATCH; ++row) load_codes(row);
            if (count > 0) store(BATCH, buffer);
#pragma unroll
            for (int row = BATCH; row < WARP_ROWS; ++row) load_codes(row);
            if (count > 0) {
                __syncwarp();
                if (lane == 0) barrier_arrive(base + FULL + 8 * buffer);   // the readers fence, see decode_wgmma.cu
                ++n;
            }
            count = next_count;
            next_count = take(p, next_slot);
        }
    }
};
