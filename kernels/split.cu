// A rank's own slots out of the lists of a pool whose pages are dealt out to `size` ranks: page p is rank p % size's page
// p / size. Ids outside the pool belong to nobody.
//
// localise      out[i] = the rank's own id of indices[i], or -1
// count_owned   blocks of CHUNK entries: counts[b] = how many the rank owns
// split_owned   the first `chunks` blocks: the owned ids of a chunk, in order, behind those of the chunks before it, and -1
//               in the rest of out (out has nnz entries); further blocks, a warp a row: out_indptr[t] = owned entries
//               before indptr[t]. A block adds up the counts before its chunk by itself, at most a few hundred.
// indptr is clamped to [0, nnz] and so is everything that is made of it.

struct SplitParams {
    const int* indices;        // (nnz,)
    const int* indptr;         // (num_rows + 1,)
    int* out;                  // (nnz,)
    int* out_indptr;           // (num_rows + 1,)
    int* counts;               // (chunks,)
    unsigned num_slots;        // of the whole pool, at most 2^31
    int nnz, num_rows, chunks, page_size, rank, size;
};

constexpr int THREADS = 256;
constexpr int EACH = CHUNK / THREADS;    // consecutive entries of a thread

__device__ __forceinline__ int local(const SplitParams& p, int slot) {
    if ((unsigned)slot >= p.num_slots) return -1;
    const int page = slot / p.page_size, own = page / p.size;
    return page - own * p.size == p.rank ? own * p.page_size + (slot - page * p.page_size) : -1;
}

// Sum over the block, given to all its threads; and what stands before this thread.
__device__ __forceinline__ int block_sum(int mine, int& before) {
    __shared__ int sums[THREADS / 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int x = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int y = __shfl_up_sync(~0u, x, d);
        if (lane >= d) x += y;
    }
    __syncthreads();           // the sums of the call before have been read
    if (lane == 31) sums[warp] = x;
    __syncthreads();
    int total = 0;
    before = x - mine;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
        if (w < warp) before += sums[w];
        total += sums[w];
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS) localise(const __grid_constant__ SplitParams p) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < p.nnz) p.out[i] = local(p, p.indices[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS) count_owned(const __grid_constant__ SplitParams p) {
    int mine = 0, before;
    for (int k = 0; k < EACH; ++k) {
        const int i = blockIdx.x * CHUNK + k * THREADS + threadIdx.x;
        if (i < p.nnz) mine += local(p, p.indices[i]) >= 0;
    }
    const int total = block_sum(mine, before);
    if (threadIdx.x == 0) p.counts[blockIdx.x] = total;
}

extern "C" __global__ void __launch_bounds__(THREADS) split_owned(const __grid_constant__ SplitParams p) {
    if ((int)blockIdx.x < p.chunks) {
        int earlier = 0, all = 0, unused;
        for (int c = threadIdx.x; c < p.chunks; c += THREADS) {
            all += p.counts[c];
            if (c < (int)blockIdx.x) earlier += p.counts[c];
        }
        earlier = block_sum(earlier, unused);
        all = block_sum(all, unused);
        const int begin = blockIdx.x * CHUNK + threadIdx.x * EACH;
        int ids[EACH], mine = 0, before;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            ids[k] = begin + k < p.nnz ? local(p, p.indices[begin + k]) : -1;
            mine += ids[k] >= 0;
        }
        block_sum(mine, before);
        int to = earlier + before;
#pragma unroll
        for (int k = 0; k < EACH; ++k)
            if (ids[k] >= 0) p.out[to++] = ids[k];
        for (int k = 0; k < EACH; ++k) {
            const int i = blockIdx.x * CHUNK + k * THREADS + threadIdx.x;
            if (i >= all && i < p.nnz) p.out[i] = -1;
        }
        return;
    }
    const int lane = threadIdx.x & 31;
    const int row = (blockIdx.x - p.chunks) * (THREADS / 32) + (threadIdx.x >> 5);
    if (row > p.num_rows) return;
    const int end = min(max(p.indptr[row], 0), p.nnz), chunk = end / CHUNK;
    int sum = 0;
    for (int c = lane; c < chunk; c += 32) sum += p.counts[c];
    for (int i = chunk * CHUNK + lane; i < end; i += 32) sum += local(p, p.indices[i]) >= 0;
#pragma unroll
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0) p.out_indptr[row] = sum;
}
