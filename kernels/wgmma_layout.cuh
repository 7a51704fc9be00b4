// Sizes, the byte map of shared memory and the numbers of the Hopper kernel (decode_wgmma.cu), for both of its roles.
#pragma once
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
