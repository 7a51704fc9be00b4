// The producing warpgroup of the Hopper kernel (decode_wgmma.cu): gathers rows, widens them to fp16, fills the tiles.
#pragma once
#include "wgmma_layout.cuh"

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
