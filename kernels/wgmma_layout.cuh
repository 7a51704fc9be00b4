// Sizes, the byte map of shared memory and the numbers of the Hopper kernel (decode_wgmma.cu), for both of its roles.
#pragma once
#include "params.cuh"
#include "schedule.cuh"
#include "mma.cuh"
#include "mbarrier.cuh"
#include "wgmma.cuh"

constexpr int TILE = 64;                                     // slots
constexpr int HEADS = 64;
constexpr int GROUPS = 8;
constexpr bool Q_BF16 = Q_DTYPE == 1;
static_assert(HEAD_DIM == 512 && GROUP_SIZE == 64 && KV_DTYPE == 0, "other shapes are for decode_mma");

constexpr int BUFFERS = 2;                                   // tile n stands in buffer n % 2 and is scored by warpgroup n % 2
constexpr int BLOCK_BYTES = TILE * 128;                      // 64 dimensions of a tile or of q (wgmma.cuh)
constexpr int BUFFER_BYTES = 8 * BLOCK_BYTES;
constexpr int RING = 4;                                      // segments between producers and their last user
constexpr int PRODUCER_WARPS = 8;
constexpr int WARP_ROWS = TILE / PRODUCER_WARPS;             // rows of a tile that a producing warp takes
constexpr int BATCH = 4;                                     // of them at a time
static_assert(WARP_ROWS == 8 && HEADS == TILE, "lanes are dealt out for 8 rows a warp; q and tiles have one layout");

// Byte map. FACTORS of a tile: for each pair of slots {2^(e - GUARD), 2^(e - GUARD), e, e}; 0 and -inf where skipped.
constexpr int FACTOR_BYTES = TILE * 8;
constexpr int P_BYTES = HEADS * TILE * 2;                    // rows of 128 bytes (heads), chunks swizzled as in tiles
constexpr int Q_AT = 0;
constexpr int TILES_AT = Q_AT + BUFFER_BYTES;                // [BUFFERS]
constexpr int P_AT = TILES_AT + BUFFERS * BUFFER_BYTES;      // [BUFFERS]
constexpr int REFS_AT = P_AT + BUFFERS * P_BYTES;            // [BUFFERS][HEADS] what P is relative to
constexpr int SUMS_AT = REFS_AT + BUFFERS * HEADS * 4;       // [warpgroup][HEADS] at a segment's end
constexpr int SCALE_AT = SUMS_AT + 2 * HEADS * 4;            // [HEADS] from S * 2^(e - GUARD) to log2 units
constexpr int FACTORS_AT = SCALE_AT + HEADS * 4;             // [BUFFERS]
constexpr int RATIOS_AT = FACTORS_AT + BUFFERS * FACTOR_BYTES;               // [producing warp][group][row] fp16 x 2
constexpr int SCHEDULE_BYTES = 64;
constexpr int SCHEDULE_AT = RATIOS_AT + PRODUCER_WARPS * GROUPS * WARP_ROWS * 4;   // [producing warp] Schedule
constexpr int SEGMENTS_AT = SCHEDULE_AT + PRODUCER_WARPS * SCHEDULE_BYTES;   // [RING] {row, slots, partial, 0}
constexpr int FULL = SEGMENTS_AT + RING * 16;                // [BUFFERS] a tile and its factors are there
constexpr int EMPTY = FULL + 8 * BUFFERS;                    // [BUFFERS] both warpgroups are done with it
constexpr int P_FULL = EMPTY + 8 * BUFFERS;                  // [BUFFERS][warp of 4] P and references of its 16 heads are there
constexpr int SEGMENT_FULL = P_FULL + 8 * 4 * BUFFERS;       // [RING]
constexpr int SEGMENT_EMPTY = SEGMENT_FULL + 8 * RING;       // [RING]
constexpr int SHARED_BYTES = SEGMENT_EMPTY + 8 * RING;
static_assert(SHARED_BYTES == SHARED, "variants.py must ask for this much shared memory");

constexpr float HEADROOM = 6.f;          // log2 of P' for the largest score at a fresh reference
constexpr float LAZY = 8.f;              // log2: growth of the maximum before the reference moves
constexpr float FIRST_REF = -1e38f;
constexpr float SCORE_MAX = 1e37f;
constexpr int LEAST_EXPONENT = -88;
constexpr int GUARD = 36;                // scales enter scores as 2^(e - GUARD), so that no product overflows

extern __shared__ __align__(1024) unsigned char smem[];
