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
    int table_size;            // entries of the PlaceSet, a power of two
    int filter_shift;          // 32 - log2(words of its filter)
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

// Which of all the call's rows concern this block? It enters its own places (slots, or pages) here, in shared memory,
// and looks every row's place up. A word of a bit filter answers nearly all of them; the few that pass it are looked
// for in a hash table with open addressing, at most half full. All words are zero, all keys -1 before the first insert.
struct PlaceSet {
    unsigned* filter;
    int* keys;
    int filter_shift;          // 32 - log2(words of the filter)
    int mask;                  // entries of the table, a power of two, minus 1

    // A place's word is in the top bits of its hash, its two bits of the word in the middle.
    __device__ __forceinline__ static unsigned hash(unsigned place) { return place * 2654435769u; }
    __device__ __forceinline__ bool may_hold(unsigned place) const {
        const unsigned h = hash(place), word = filter[h >> filter_shift];
        return word >> (h >> 10 & 31) & word >> (h >> 15 & 31) & 1u;
    }
    // The entry of a place, made if it is new.
    __device__ __forceinline__ int insert(int place) const {
        const unsigned h = hash(place);
        atomicOr(filter + (h >> filter_shift), 1u << (h >> 10 & 31) | 1u << (h >> 15 & 31));
        int at = h >> 15 & mask;
        while (true) {
            const int seen = atomicCAS(keys + at, -1, place);
            if (seen == -1 || seen == place) return at;
            at = (at + 1) & mask;
        }
    }
    // The entry of a place, or -1.
    __device__ __forceinline__ int find(int place) const {
        int at = hash(place) >> 15 & mask;
        while (true) {
            const int seen = keys[at];
            if (seen == place) return at;
            if (seen == -1) return -1;
            at = (at + 1) & mask;
        }
    }
};

constexpr int FETCH = 4;       // rows whose slots a thread has under way while it looks through all of them

// The low halves of the slots of rows begin + threadIdx.x, + blockDim.x, ..., unchecked.
__device__ __forceinline__ void fetch_slots(const StoreParams& p, int begin, unsigned (&slots)[FETCH]) {
#pragma unroll
    for (int i = 0; i < FETCH; ++i) {
        const int row = begin + threadIdx.x + i * blockDim.x;
        const long long at = (long long)row * p.index_stride;
        if (row >= p.num_rows) slots[i] = 0;
        else if (INDEX_BYTES == 8) slots[i] = (unsigned)__ldg(static_cast<const long long*>(p.slots) + at);
        else slots[i] = __ldg(static_cast<const unsigned*>(p.slots) + at);
    }
}

// Calls visit(row, slot, entry) for every row from begin on whose place is in the set; a place is slot / PER_PLACE.
// fetched: what fetch_slots(p, begin, ...) gave.
template <int PER_PLACE, class Visit>
__device__ __forceinline__ void visit_rows(const StoreParams& p, const PlaceSet& set, int begin, unsigned (&fetched)[FETCH], Visit visit) {
    while (begin < p.num_rows) {
        unsigned passed = 0;
#pragma unroll
        for (int i = 0; i < FETCH; ++i) passed |= (unsigned)set.may_hold(fetched[i] / PER_PLACE) << i;
        const int next = begin + FETCH * blockDim.x;
        if (next < p.num_rows) fetch_slots(p, next, fetched);
        while (passed) {
            const int row = begin + threadIdx.x + (__ffs(passed) - 1) * blockDim.x;
            passed &= passed - 1;
            const int slot = row < p.num_rows ? slot_of(p, row) : -1;
            const int entry = slot < 0 ? -1 : set.find(slot / PER_PLACE);
            if (entry >= 0) visit(row, slot, entry);
        }
        begin = next;
    }
}
