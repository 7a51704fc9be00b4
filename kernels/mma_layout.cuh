// Constants of decode_mma.cu: shapes of a tile, and the map of shared memory.
#pragma once
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
// Each warp copies TILE / WARPS whole rows that stand together; else rows are dealt to the warps in turn.
constexpr bool EVEN = TILE % WARPS == 0 && TILE / WARPS * (ROW_CHUNKS > 16 ? 32 : ROW_CHUNKS > 8 ? 16 : ROW_CHUNKS > 4 ? 8 : 4) % 32 == 0;
constexpr int GROUPS = FP8 ? HEAD_DIM / GROUP_SIZE : 0;
constexpr int WARP_GROUPS = FP8 ? (WARP_DIMS + GROUP_SIZE - 1) / GROUP_SIZE : 0;  // scales a warp needs of a row
constexpr int STEPS_PER_GROUP = (GROUP_SIZE < WARP_DIMS ? GROUP_SIZE : WARP_DIMS) / 16;
constexpr int SCALE_PITCH = GROUPS * 4;
constexpr int GROUP_TURNS = (GROUPS + 7) / 8;            // scales of a row by 8 lanes
constexpr int RATIO_PITCH = (GROUPS + 1) / 2 * 8;        // bytes: half2 of slots 2t, 2t + 1 for each group

constexpr int SCALES_AT = TILE * ROW_BYTES;
constexpr int STAGE_BYTES = (SCALES_AT + TILE * SCALE_PITCH + 127) / 128 * 128;
constexpr int PIECES = M_TILES * KEY_TILES;              // 16 x 8 pieces of S
constexpr int SOFT_TURNS = (KEY_TILES + WARPS - 1) / WARPS;   // key tiles that a warp does the softmax of

constexpr int S_AT = STAGES * STAGE_BYTES;
constexpr int P_AT = S_AT + WARPS * PIECES * 512;
constexpr int REF_AT = P_AT + PIECES * 256;              // [HEADS][KEY_TILES] proposed references
constexpr int LSE_AT = REF_AT + HEADS * KEY_TILES * 4;   // [HEADS][WARPS rounded to 8]
constexpr int UP_AT = LSE_AT + HEADS * 8 * 4;            // [GROUPS rounded to 8][KEY_TILES] proposed factors of ratios
constexpr int RATIO_AT = UP_AT + GROUP_TURNS * 8 * KEY_TILES * 4;   // [KEY_TILES][4][GROUPS rounded to 2] pairs of fp16
constexpr int QMAX_AT = RATIO_AT + KEY_TILES * 4 * RATIO_PITCH;
constexpr int RING = 8;                                  // segments between gather and use
static_assert(RING > STAGES, "a segment would be overwritten before its use");
constexpr int RING_AT = (QMAX_AT + HEADS * 8 * 4 + 15) / 16 * 16;   // [WARPS][RING] int4
constexpr int STATE_AT = RING_AT + WARPS * RING * 16;    // [WARPS] Segments
constexpr int MASK_AT = STATE_AT + WARPS * 64;           // [WARPS][STAGES] valid slots of a tile
constexpr bool Q_SHARED = M_TILES > 1;
constexpr int Q_AT = (MASK_AT + WARPS * STAGES * 4 + 15) / 16 * 16;
constexpr int SHARED_BYTES = Q_AT + (Q_SHARED ? HEADS * HEAD_DIM * 2 : 0);
static_assert(SHARED_BYTES <= SHARED, "the host gives less shared memory than the kernel uses");

constexpr float HEADROOM = 6.f;       // log2: P' of the largest score at a fresh reference
constexpr float LAZY = 8.f;           // log2: growth of the maximum before the reference moves
constexpr float FLOOR_REF = -2e38f;       // below any score, and less any score still finite
// Powers of two that keep sums of products in fp32's range. q is brought to [2^Q_TOP, 2^(Q_TOP + 1)) a head; a row of
// 512 of an FP8 pool's largest values, or a bf16 pool's, by it then stays below 2^127, in FP8 pools with GUARD taken
// from the scales.
constexpr int Q_TOP = BF16 ? -11 : 14;
constexpr int GUARD_LOG2 = FP8 ? 25 : 0;
constexpr float SCORE_GUARD = FP8 ? 0x1p-25f : 1.f;
constexpr int BOOST_LOG2 = 12;            // of the factor that takes products to scores: applied apart, after the clamp
constexpr float BOOST = 0x1p12f;
constexpr float SCORE_MAX = 1e37f;        // of a score in log2 units
constexpr float MOST_UP = 0x1p100f;

extern __shared__ __align__(1024) unsigned char smem[];

DEVICE int row_swizzle(int row) { return ROW_BYTES % 128 == 0 ? row & 7 : (row >> 1) & 3; }
// Scales of slots 2t and 2t + 1, which one lane needs together, 4 rows apart: fewer bank conflicts.
DEVICE int scale_row(int row) { return (row & ~7) | (row & 7) >> 1 | (row & 1) << 2; }
