// Scatter rows into the slots of a pool, quantising them where the pool is e4m3fn: one launch, one pass.
// For every pool but e4m3fn with PAGE_SIZE > 1, where slots share scales (store_pages.cu).
// With INDEX_BYTES 0 it is quantize_kv: row r goes to slot r.
//
// Grid: blocks of consecutive rows; a warp takes rows_per_warp (at most 32) of them, ROWS_PER_STEP at a time.
// A row is written only if no later row of the call names its slot, so one whole row remains, the last, and its
// codes and scales are of one origin. A block finds that out alone: it enters its own slots into a table in shared
// memory and looks all later slots up in it. The first rows are on their way meanwhile.
// Shared memory: a PlaceSet, and beside each entry the last row that names its slot.
// Numerics: quantize.cuh. KV_DTYPE is the pool's: 0 e4m3fn, 1 bf16, 2 fp16; a 16-bit pool takes rows rounded once,
// or bit for bit where the dtypes agree and nothing is rotated.
#include "store.cuh"

constexpr int LANES = HEAD_DIM >= 256 ? 32 : HEAD_DIM > 128 ? 32 : HEAD_DIM > 64 ? 16 : 8;  // lanes of one row
constexpr int ROWS_PER_STEP = 32 / LANES;
constexpr int VECS = (VECS_PER_ROW + LANES - 1) / LANES;                     // VEC elements each, a lane's share of a row

struct RowPart { RawVec vec[VECS]; };

__device__ __forceinline__ RowPart load_part(const char* row, int lane) {
    RowPart part;
#pragma unroll
    for (int j = 0; j < VECS; ++j)
        if (lane + j * LANES < VECS_PER_ROW) part.vec[j] = load_raw(row, (lane + j * LANES) * VEC);
        else part.vec[j] = RawVec{};
    return part;
}

__device__ __forceinline__ void write_bytes(void* to, const unsigned* words, int count) {
    for (int i = 0; i < 4 * count; ++i) static_cast<unsigned char*>(to)[i] = words[i / 4] >> 8 * (i % 4) & 0xffu;
}

// All lanes of the warp call it; slot -1 writes nothing.
__device__ __forceinline__ void store_part(const StoreParams& p, const RowPart& part, int row, int slot, int lane) {
    const long long page = slot / PAGE_SIZE;
    char* to = static_cast<char*>(p.pool) + page * p.page_stride + slot % PAGE_SIZE * p.slot_stride;
    const long long position = ROPE && slot >= 0 ? rope_position(p.rope, row) : -1;
#pragma unroll
    for (int j = 0; j < VECS; ++j) {
        const int vec = lane + j * LANES, elem = vec * VEC;
        const bool inside = vec < VECS_PER_ROW && slot >= 0;
        float v[VEC];
        to_float(part.vec[j], v);
        if (ROPE && inside && elem >= HEAD_DIM - ROPE_DIM) rotate(p.rope, position, row_at(p, row), elem, v);
#if KV_DTYPE == 0
        unsigned most = group_amax_bits(part.vec[j], v);
        const bool special = most >= 0x7f800000u;
        if (__any_sync(~0u, special)) most = max_over_lanes<VECS_PER_GROUP>(amax_bits(v, true));
        const float scale = scale_of_amax(__uint_as_float(most));
        const uint2 codes = encode<ROW_DTYPE == 3 || ROPE ? 2 : 1>(v, scale, special);
        if (!inside) continue;
        if (ALIGNED) *reinterpret_cast<uint2*>(to + elem) = codes;
        else write_bytes(to + elem, &codes.x, 2);
        if (vec % VECS_PER_GROUP == 0) p.scales[page * p.scale_stride + vec / VECS_PER_GROUP] = scale;
#else
        if (!inside) continue;
        unsigned word[VEC / 2];
        if (KV_DTYPE == ROW_DTYPE && !(ROPE && elem >= HEAD_DIM - ROPE_DIM)) {
#pragma unroll
            for (int i = 0; i < VEC / 2; ++i) word[i] = reinterpret_cast<const unsigned*>(part.vec[j].word)[i];
        } else {
#pragma unroll
            for (int i = 0; i < VEC / 2; ++i) {
                if (KV_DTYPE == 1) {
                    const __nv_bfloat162 two = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
                    word[i] = *reinterpret_cast<const unsigned*>(&two);
                } else {
                    const __half2 two = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
                    word[i] = *reinterpret_cast<const unsigned*>(&two);
                }
            }
        }
        if (ALIGNED) *reinterpret_cast<uint4*>(to + 2 * elem) = make_uint4(word[0], word[1], word[2], word[3]);
        else write_bytes(to + 2 * elem, word, 4);
#endif
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) store_rows(const __grid_constant__ StoreParams p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES, sub = threadIdx.x % 32 / LANES;
    const int first = blockIdx.x * p.block_rows;              // the block's first row
    const int later = min(first + p.block_rows, p.num_rows);  // the first row after it
    int local = warp * p.rows_per_warp + sub;                 // the lane's row within the block

    RowPart part;
    if (first + local < p.num_rows) part = load_part(row_at(p, first + local), lane);
    else part = RowPart{};

#if INDEX_BYTES
    int slot = -1;
    extern __shared__ int shared[];
    const int words = 1 << (32 - p.filter_shift);
    const PlaceSet own{reinterpret_cast<unsigned*>(shared), shared + words, p.filter_shift, p.table_size - 1};
    int* last = shared + words + p.table_size;   // by entry: the row that may write the slot

    // Lane l decides about the l-th row of its warp.
    const int decided = first + warp * p.rows_per_warp + threadIdx.x % 32;
    if (threadIdx.x % 32 < p.rows_per_warp && decided < later) slot = slot_of(p, decided);
    unsigned fetched[FETCH];
    fetch_slots(p, later, fetched);
    for (int i = threadIdx.x; i < words + 2 * p.table_size; i += blockDim.x) shared[i] = i < words ? 0 : -1;
    __syncthreads();
    const int entry = slot < 0 ? 0 : own.insert(slot);
    if (slot >= 0) atomicMax(last + entry, decided);
    __syncthreads();
    visit_rows<1>(p, own, later, fetched, [&](int, int, int at) { last[at] = p.num_rows; });  // not this block's to write
    __syncthreads();
    if (slot >= 0 && last[entry] != decided) slot = -1;
#endif

    for (int step = 0; step < p.rows_per_warp; step += ROWS_PER_STEP) {
        const int row = first + local, next_row = row + ROWS_PER_STEP;
#if INDEX_BYTES
        const int to = __shfl_sync(~0u, slot, step + sub);
#else
        const int to = row < p.num_rows ? row : -1;
#endif
        RowPart next{};
        if (step + ROWS_PER_STEP < p.rows_per_warp && next_row < p.num_rows) next = load_part(row_at(p, next_row), lane);
        store_part(p, part, row, to, lane);
        part = next;
        local += ROWS_PER_STEP;
    }
}
