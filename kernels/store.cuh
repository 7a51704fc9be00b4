// The argument of the store kernels, and who of several rows may write a place.
//
// Pool and scales as drawn in params.cuh: slot s lies at pool + (s / PAGE_SIZE) * page_stride +
// (s % PAGE_SIZE) * slot_stride bytes, its page's scales at scales + (s / PAGE_SIZE) * scale_stride.
// Constants: PAGE_SIZE, INDEX_BYTES (of a slot id: 4, 8, or 0 where row r simply goes to slot r).
#pragma once
#include "quantize.cuh"

struct StoreParams {
    const void* rows;          // (num_rows, HEAD_DIM)
    const void* slots;         // (num_rows,) int32 or int64, null with INDEX_BYTES 0
    void* pool;
    float* scales;             // (num_pages, HEAD_DIM / GROUP_SIZE), null unless the pool is e4m3fn
    Rope rope;
    long long row_stride, row_page_stride;  // bytes: row r lies at (r / PAGE_SIZE) * row_page_stride + (r % PAGE_SIZE) * row_stride
    long long index_stride;                 // elements
    long long page_stride, slot_stride;     // bytes
    long long scale_stride;                 // elements
    long long num_slots;                    // at most 2^31
    int num_rows;
    int rows_per_warp;         // store_rows: rows that a warp takes one after the other
    int block_rows;            // rows of a block; for store_rows at most blockDim.x
    int round;                 // store_pages: pages of which a block keeps the winners at a time
    int table_size;            // entries of the PlaceSet in shared memory, a power of two
};

// Slot of a row, -1 for one outside the pool.
__device__ __forceinline__ int slot_of(const StoreParams& p, int row) {
    if (INDEX_BYTES == 0) return row;
    const long long at = (long long)row * p.index_stride;
    const long long slot = INDEX_BYTES == 8 ? __ldg(static_cast<const long long*>(p.slots) + at)
                                            : __ldg(static_cast<const int*>(p.slots) + at);
    return slot >= 0 && slot < p.num_slots ? (int)slot : -1;
}

__device__ __forceinline__ const char* row_at(const StoreParams& p, int row) {
    return static_cast<const char*>(p.rows) + (row / PAGE_SIZE) * p.row_page_stride + (row % PAGE_SIZE) * p.row_stride;
}

// A set of places (slots or pages, never negative) in shared memory; open addressing. Kept at most an eighth full, so
// that looking up a place that is absent, the common case, takes one probe. All keys are -1 before the first insert.
struct PlaceSet {
    int* keys;
    int mask;

    __device__ __forceinline__ int home(int place) const { return (int)((unsigned)place * 2654435769u >> 15) & mask; }
    // The entry of a place, made if it is new.
    __device__ __forceinline__ int insert(int place) const {
        int at = home(place);
        while (true) {
            const int seen = atomicCAS(keys + at, -1, place);
            if (seen == -1 || seen == place) return at;
            at = (at + 1) & mask;
        }
    }
    // The entry of a place, or -1.
    __device__ __forceinline__ int find(int place) const {
        int at = home(place);
        while (true) {
            const int seen = keys[at];
            if (seen == place) return at;
            if (seen == -1) return -1;
            at = (at + 1) & mask;
        }
    }
};

constexpr int FETCH = 4;       // slots that a thread has under way while it looks through all of them

// The slots of rows begin + threadIdx.x, + blockDim.x, ...; -1 past the last row.
__device__ __forceinline__ void fetch_slots(const StoreParams& p, int begin, int (&slots)[FETCH]) {
#pragma unroll
    for (int i = 0; i < FETCH; ++i) {
        const int row = begin + threadIdx.x + i * blockDim.x;
        slots[i] = row < p.num_rows ? slot_of(p, row) : -1;
    }
}
