// Copy slots or whole pages within a pool, codes and scales together: all sources as they were before the call, and
// the last of several copies to one place. Two launches: GATHER 1 (pool -> scratch), then GATHER 0 (scratch -> pool).
//
// An item is one slot or one page: item_rows rows of row_bytes, and num_groups scales (0: none).
// A pair (src, dst) with either outside the pool copies nothing.
// Grid: one block an item, which finds out alone whether a later pair has the same dst.
// Constants: GATHER, INDEX_BYTES (4, 8), ALIGNED (1: rows begin on 16 bytes and are multiples of it).

struct MoveParams {
    char* pool;
    float* scales;
    char* scratch;             // (num_items, item_rows * row_bytes) of the pool
    float* scratch_scales;     // (num_items, num_groups)
    const void* src;           // (num_items,) item numbers, int32 or int64
    const void* dst;
    long long src_stride, dst_stride;       // elements
    // Item i lies at (i / items_per_page) * page_stride + (i % items_per_page) * slot_stride bytes; its rows are
    // slot_stride apart. Its scales at (i / items_per_page) * scale_stride floats: only whole pages have any.
    long long page_stride, slot_stride, scale_stride;
    long long pool_items;      // item numbers are below it; at most 2^31
    int items_per_page, item_rows, row_bytes, num_groups, num_items;
};

#if ALIGNED
using Unit = uint4;
#else
using Unit = unsigned char;
#endif

__device__ __forceinline__ long long item_of(const void* list, long long stride, int i) {
    return INDEX_BYTES == 8 ? __ldg(static_cast<const long long*>(list) + i * stride)
                            : (long long)__ldg(static_cast<const int*>(list) + i * stride);
}

__device__ __forceinline__ bool inside(const MoveParams& p, long long item) { return item >= 0 && item < p.pool_items; }

extern "C" __global__ void __launch_bounds__(256) move_items(const __grid_constant__ MoveParams p) {
    const int i = blockIdx.x;
    const long long src = item_of(p.src, p.src_stride, i), dst = item_of(p.dst, p.dst_stride, i);
    if (!inside(p, src) || !inside(p, dst)) return;
    if (!GATHER) {
        bool overruled = false;
        for (int k = i + 1 + threadIdx.x; k < p.num_items; k += blockDim.x)
            overruled |= item_of(p.dst, p.dst_stride, k) == dst && inside(p, item_of(p.src, p.src_stride, k));
        if (__syncthreads_or(overruled)) return;
    }
    const unsigned item = GATHER ? src : dst, page = item / (unsigned)p.items_per_page;
    char* in_pool = p.pool + page * p.page_stride + item % (unsigned)p.items_per_page * p.slot_stride;
    char* in_scratch = p.scratch + (long long)i * p.item_rows * p.row_bytes;
    const int units = p.row_bytes / (int)sizeof(Unit);
    for (int row = threadIdx.x / 32; row < p.item_rows; row += blockDim.x / 32) {
        Unit* a = reinterpret_cast<Unit*>(in_pool + row * p.slot_stride);
        Unit* b = reinterpret_cast<Unit*>(in_scratch + (long long)row * p.row_bytes);
        for (int u = threadIdx.x % 32; u < units; u += 32) {
            if (GATHER) b[u] = a[u];
            else a[u] = b[u];
        }
    }
    for (int g = threadIdx.x; g < p.num_groups; g += blockDim.x) {
        float* a = p.scales + page * p.scale_stride + g;
        float* b = p.scratch_scales + (long long)i * p.num_groups + g;
        if (GATHER) *b = *a;
        else *a = *b;
    }
}
