// Ragged slot lists (kv_indices, kv_indptr) from what a scheduler has, without the host knowing any length.
//
// build_lists: for each row (token) its window, then its paged entries:
//   window   the last min(position + 1, window) positions x, oldest first, at slot ring_start[seq] + x % ring_size
//   paged    count entries e of its sequence at slot base + page_table[seq, e / page_size] * page_size + e % page_size:
//            e = 0, 1, ... or, with topk, e = topk[row, 0], topk[row, 1], ... (without a page table these are slots)
// A row whose sequence or position is negative, or whose sequence does not exist, is empty. An entry that leads
// nowhere (negative, outside the table, or a slot beyond int32) is -1, which decoding skips.
// Page tables with lengths are the case window = 0.
//
// count_padded, scan_counts, fill_padded: padded rows of ids to ragged ones, dropping every id outside [0, 2^31) and
// those at and after lengths[row]; the order is kept. Counts pass through indptr, so no scratch is needed.
//
// indices is filled with -1 from the end of the last row to its capacity; rows are cut off at the capacity.
// Inputs may be int32 or int64, with any stride.

struct Ints {                  // a 1-D array of integers
    const void* data;          // null: absent
    long long stride;          // elements
    int bytes;                 // 4 or 8

    __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }
    __device__ __forceinline__ long long operator[](long long i) const {
        return bytes == 8 ? __ldg(static_cast<const long long*>(data) + i * stride)
                          : (long long)__ldg(static_cast<const int*>(data) + i * stride);
    }
};

struct Ints2 {                 // a 2-D array of integers
    Ints flat;                 // its stride is the columns'
    long long row_stride;      // elements

    __device__ __forceinline__ explicit operator bool() const { return flat.data != nullptr; }
    __device__ __forceinline__ Ints row(long long i) const {
        const long long offset = i * row_stride * flat.bytes;
        return {static_cast<const char*>(flat.data) + offset, flat.stride, flat.bytes};
    }
};

struct ListParams {
    Ints sequences;            // (num_rows,) absent: row r is of sequence r
    Ints positions;            // (num_rows,) absent: no window, counts given
    Ints counts;               // (num_rows,) paged entries; absent: (position + 1) / ratio
    Ints ring_start;           // (num_sequences,)
    Ints2 page_table;          // (num_sequences, table_width)
    Ints2 topk;                // (num_rows, topk_width), or the padded ids
    int* indices;              // (capacity,)
    int* indptr;               // (num_rows + 1,)
    long long capacity, num_sequences, base;
    int table_entries;         // table_width * page_size, at most 2^31 - 1
    int topk_width;
    int num_rows, window, ring_size, ratio, page_size, rows_per_block;
};

struct Row { long long sequence; int position, window, paged; };

__device__ __forceinline__ Row row_of(const ListParams& p, int r) {
    const long long position = p.positions ? p.positions[r] : 0;
    Row row{p.sequences ? p.sequences[r] : r, (int)min(position, 0x7ffffffeLL), 0, 0};
    if (row.sequence < 0 || row.sequence >= p.num_sequences || position < 0) return row;
    row.window = min(row.position + 1, p.window);
    if (p.page_table || p.topk) {
        const long long count = p.counts ? p.counts[r] : (unsigned)(row.position + 1) / (unsigned)p.ratio;
        row.paged = (int)max(min(count, (long long)(p.topk ? p.topk_width : p.table_entries)), 0LL);
    }
    return row;
}

__device__ __forceinline__ int entry_of(const ListParams& p, int r, const Row& row, long long i) {
    long long slot;
    if (i < row.window) {
        const long long start = p.ring_start[row.sequence];
        slot = start < 0 ? -1 : start + (unsigned)(row.position - row.window + 1 + (int)i) % (unsigned)p.ring_size;
    } else {
        const long long entry = p.topk ? p.topk.row(r)[i - row.window] : i - row.window;
        if (!p.page_table) {
            slot = entry;
        } else if (entry < 0 || entry >= p.table_entries) {
            slot = -1;
        } else {
            const unsigned e = (unsigned)entry, size = p.page_size;
            const long long page = p.page_table.row(row.sequence)[e / size];
            slot = page < 0 || page > 0x7fffffffLL ? -1 : p.base + page * size + e % size;
        }
    }
    return slot >= 0 && slot <= 0x7fffffffLL ? (int)slot : -1;
}

struct Sums { long long a, b; };

// Over the threads of a block, of at most 32 warps.
__device__ __forceinline__ Sums block_sum(Sums value) {
    __shared__ Sums part[32];
    auto over_lanes = [](Sums& s) {
#pragma unroll
        for (int offset = 16; offset; offset /= 2) {
            s.a += __shfl_xor_sync(~0u, s.a, offset);
            s.b += __shfl_xor_sync(~0u, s.b, offset);
        }
    };
    over_lanes(value);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : Sums{0, 0};
    over_lanes(value);
    return value;
}

__device__ __forceinline__ void fill_tail(const ListParams& p, long long end) {
    const long long block = blockIdx.x + (long long)blockIdx.y * gridDim.x;
    for (long long i = end + block * blockDim.x + threadIdx.x; i < p.capacity; i += (long long)gridDim.x * gridDim.y * blockDim.x)
        p.indices[i] = -1;
}

// Grid: (row blocks, parts of each row). A block adds up the lengths before its rows itself: for a batch of a few
// hundred rows that is one load a thread, and no block waits for another.
extern "C" __global__ void __launch_bounds__(256, 4) build_lists(const __grid_constant__ ListParams p) {
    const int first = blockIdx.x * p.rows_per_block, last = min(first + p.rows_per_block, p.num_rows);
    Sums length{0, 0};                           // of the rows before first, and of the others
    for (int r = threadIdx.x; r < p.num_rows; r += blockDim.x) {
        const Row row = row_of(p, r);
        (r < first ? length.a : length.b) += (long long)row.window + row.paged;
    }
    length = block_sum(length);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) p.indptr[0] = 0;
    long long begin = length.a;
    for (int r = first; r < last; ++r) {
        const Row row = row_of(p, r);
        const long long len = (long long)row.window + row.paged;
        if (blockIdx.y == 0 && threadIdx.x == 0) p.indptr[r + 1] = (int)min(begin + len, p.capacity);
        for (long long i = (long long)blockIdx.y * blockDim.x + threadIdx.x; i < len && begin + i < p.capacity;
             i += (long long)gridDim.y * blockDim.x)
            p.indices[begin + i] = entry_of(p, r, row, i);
        begin += len;
    }
    fill_tail(p, length.a + length.b);
}

__device__ __forceinline__ int kept_width(const ListParams& p, int r) {
    return (int)(p.counts ? max(min(p.counts[r], (long long)p.topk_width), 0LL) : p.topk_width);
}

__device__ __forceinline__ bool keep(long long id) { return id >= 0 && id <= 0x7fffffffLL; }

// A block a row.
extern "C" __global__ void __launch_bounds__(256) count_padded(const __grid_constant__ ListParams p) {
    const int r = blockIdx.x;
    if (r == 0 && threadIdx.x == 0) p.indptr[0] = 0;
    if (r >= p.num_rows) return;
    const Ints ids = p.topk.row(r);
    const int width = kept_width(p, r);
    int count = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) count += keep(ids[i]);
    const Sums total = block_sum({count, 0});
    if (threadIdx.x == 0) p.indptr[r + 1] = (int)total.a;
}

// One block of 1024: counts in indptr[1:] to their running sums, in place.
extern "C" __global__ void __launch_bounds__(1024) scan_counts(const __grid_constant__ ListParams p) {
    __shared__ int warp_sum[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int carry = 0;
    for (int begin = 0; begin < p.num_rows; begin += 1024) {
        const int r = begin + threadIdx.x;
        int sum = r < p.num_rows ? p.indptr[r + 1] : 0;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const int lower = __shfl_up_sync(~0u, sum, offset);
            if (lane >= offset) sum += lower;
        }
        if (lane == 31) warp_sum[warp] = sum;
        __syncthreads();
        int warps = warp_sum[lane];
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const int lower = __shfl_up_sync(~0u, warps, offset);
            if (lane >= offset) warps += lower;
        }
        const int earlier = __shfl_sync(~0u, warps, (warp + 31) % 32);
        sum += carry + (warp ? earlier : 0);
        if (r < p.num_rows) p.indptr[r + 1] = (int)min((long long)sum, p.capacity);
        carry += __shfl_sync(~0u, warps, 31);
        __syncthreads();
    }
}

// A block a row, blockDim.x ids at a time.
extern "C" __global__ void __launch_bounds__(256) fill_padded(const __grid_constant__ ListParams p) {
    __shared__ int warp_count[8];
    const int r = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (r < p.num_rows) {
        const Ints ids = p.topk.row(r);
        const int width = kept_width(p, r);
        long long to = p.indptr[r];
        long long next = threadIdx.x < width ? ids[threadIdx.x] : -1;
        for (int begin = 0; begin < width; begin += blockDim.x) {
            const long long id = next;
            const int ahead = begin + blockDim.x + threadIdx.x;
            next = ahead < width ? ids[ahead] : -1;
            const unsigned kept = __ballot_sync(~0u, keep(id));
            if (lane == 0) warp_count[warp] = __popc(kept);
            __syncthreads();
            int before = 0, total = 0;
#pragma unroll
            for (int w = 0; w < 8; ++w) {
                if (w < warp) before += warp_count[w];
                total += warp_count[w];
            }
            const long long at = to + before + __popc(kept & ((1u << lane) - 1));
            if (keep(id) && at < p.capacity) p.indices[at] = (int)id;
            to += total;
            __syncthreads();
        }
    }
    fill_tail(p, p.indptr[p.num_rows]);
}
