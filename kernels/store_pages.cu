// Scatter rows into an e4m3fn pool whose pages hold several slots that share one row of scales: one launch.
//
// A page's group has one scale, and rows arrive one at a time. The rule, for each group of each page a call touches:
//   needed = scale of the largest finite element of the rows that the call stores there
//   all slots of the page stored, or the old scale at most SCALE_MIN (nothing there yet):   new = needed
//   needed <= old:                                                                            new = old
//   otherwise:                                    new = old * 2^k, the least such power that reaches needed
// The other rows of the page are requantised in the same launch when the scale changed. A power of two moves
// e4m3 codes exactly, but for those that become subnormal: rows do not decay however often a page is rescaled. (Any
// other factor rounds every code anew: a third more error on real rows. A scale frozen at the first row: ten times.)
//
// Grid: blocks of block_rows consecutive rows. The first row of the call in a page leads it, and the leader's block
// does all of the page's rows, which it finds by looking through all slots; the last row that names a slot wins it.
// A warp does CHUNK elements of a page at a time: groups do not depend on one another, so nothing passes between warps.
// With INDEX_BYTES 0 it is quantize_kv of pages: block b does page b, row r goes to slot r.
// Shared memory: a PlaceSet, and beside each entry its leader's row and number; the pages led; for `round` pages at a
// time the rows that win their slots, and which slots those are.
#include "store.cuh"

constexpr int CHUNK = GROUP_SIZE > 64 ? GROUP_SIZE : 64;       // elements of a row that one warp does
constexpr int NUM_CHUNKS = HEAD_DIM / CHUNK;
constexpr int LANES = CHUNK / VEC;                             // lanes of one row
constexpr int ROWS_PER_STEP = 32 / LANES;
constexpr int STEPS = (PAGE_SIZE + ROWS_PER_STEP - 1) / ROWS_PER_STEP;
constexpr int MOST_HELD = 32 / (int)sizeof(RawVec) * 4;        // 64 registers
constexpr int HELD = STEPS < MOST_HELD ? STEPS : MOST_HELD;    // steps whose rows stay in registers between amax and codes

struct Page {
    char* codes;
    float* scales;
    const int* winners;                          // by offset: the row to store there, -1: none
    const unsigned short* order;                 // the offsets that have one
    int count;                                   // how many
    int first_row;                               // with INDEX_BYTES 0: of the page, all of whose slots are stored

    // The k-th slot to store, -1 past the last.
    __device__ __forceinline__ int offset(int k) const { return k >= count ? -1 : INDEX_BYTES ? order[k] : k; }
    __device__ __forceinline__ int row(int offset) const { return offset < 0 ? -1 : INDEX_BYTES ? winners[offset] : first_row + offset; }
    __device__ __forceinline__ bool stays(int offset) const { return INDEX_BYTES && offset < PAGE_SIZE && winners[offset] < 0; }
};

// Keeps the compiler from holding rows as numbers, at twice the registers, between their two uses.
__device__ __forceinline__ void keep_raw(RawVec& raw) {
#pragma unroll
    for (uint4& w : raw.word) asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));
}

__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// The lane's part of a row, as it is and then as numbers.
__device__ __forceinline__ RawVec load_row(const StoreParams& p, int row, int elem) {
    return row >= 0 ? load_raw(row_at(p, row), elem) : RawVec{};
}

__device__ __forceinline__ void rotated_row(const StoreParams& p, const RawVec& raw, int row, int elem, float (&v)[VEC]) {
    to_float(raw, v);
    if (ROPE && row >= 0 && elem >= HEAD_DIM - ROPE_DIM) rotate(p.rope, rope_position(p.rope, row), row_at(p, row), elem, v);
}

// Not so for a scale of a group that holds nothing yet, nor for NaN and infinity.
__device__ __forceinline__ bool usable(float size) { return size > SCALE_MIN && size < __int_as_float(0x7f800000); }

__device__ __forceinline__ float grown_scale(float old, float needed) {
    const float size = fabsf(old);
    if (!usable(size)) return needed;
    if (needed <= size) return old;
    // 2^k with k = exponent of needed - exponent of size, one more where the mantissa of needed is the larger.
    const unsigned have = __float_as_uint(size), want = __float_as_uint(needed);
    const unsigned shift = (want >> 23) - (have >> 23) + ((want & 0x7fffffu) > (have & 0x7fffffu));
    return __uint_as_float(__float_as_uint(old) + (shift << 23));
}

// What codes are multiplied by when their scale changes from old to grown_scale(old, ...): 2^-k. Where nothing was, codes
// become zero; where values were not finite, NaN.
__device__ __forceinline__ float moved_by(float old, float scale) {
    const float size = fabsf(old);
    if (!usable(size)) return size <= SCALE_MIN ? 0.f : __int_as_float(0x7fffffff);
    const int power = (int)(__float_as_uint(scale) >> 23) - (int)(__float_as_uint(old) >> 23);
    return power < 127 ? __uint_as_float((unsigned)(127 - power) << 23) : 0.f;
}

__device__ __forceinline__ uint2 load_codes(const char* from) {
    if (ALIGNED) return *reinterpret_cast<const uint2*>(from);
    unsigned word[2] = {0, 0};
    for (int i = 0; i < VEC; ++i) word[i / 4] |= (unsigned)(unsigned char)from[i] << 8 * (i % 4);
    return make_uint2(word[0], word[1]);
}

__device__ __forceinline__ void store_codes(char* to, uint2 codes) {
    if (ALIGNED) { *reinterpret_cast<uint2*>(to) = codes; return; }
    for (int i = 0; i < VEC; ++i) to[i] = (i < 4 ? codes.x : codes.y) >> 8 * (i % 4) & 0xffu;
}

// Codes of the same values under another scale, ratio = old / new.
__device__ __forceinline__ unsigned rescaled(unsigned word, float ratio) {
    unsigned result = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float v = mul_ieee(decode_code(word >> 8 * i & 0xffu), ratio);
        const bool special = (__float_as_uint(v) & 0x7fffffffu) >= 0x7f800000u;
        result |= (special ? NAN_CODE : encode_one(v)) << 8 * i;
    }
    return result;
}

// One warp, one chunk of one page.
__device__ __forceinline__ void store_chunk(const StoreParams& p, const Page& page, int chunk) {
    const int lane = threadIdx.x % LANES, sub = threadIdx.x % 32 / LANES;
    const int elem = chunk * CHUNK + lane * VEC;
    const int steps = (page.count + ROWS_PER_STEP - 1) / ROWS_PER_STEP;
    const float old = page.scales[elem / GROUP_SIZE];

    RawVec held[HELD];
    unsigned most = 0;
    float v[VEC];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        if (i >= steps) break;
        held[i] = load_row(p, page.row(page.offset(i * ROWS_PER_STEP + sub)), elem);
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        if (i >= steps) break;
        rotated_row(p, held[i], page.row(page.offset(i * ROWS_PER_STEP + sub)), elem, v);
        most = max(most, amax_bits(v, true));
    }
#pragma unroll 4
    for (int i = HELD; i < steps; ++i) {
        const int row = page.row(page.offset(i * ROWS_PER_STEP + sub));
        rotated_row(p, load_row(p, row, elem), row, elem, v);
        most = max(most, amax_bits(v, true));
    }
    most = max_over_lanes<VECS_PER_GROUP>(most);
    most = max_over_lanes<ROWS_PER_STEP, LANES>(most);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        if (i >= steps) break;
        keep_raw(held[i]);
    }

    const float needed = scale_of_amax(__uint_as_float(most));
    const float scale = page.count == PAGE_SIZE ? needed : grown_scale(old, needed);
    if (sub == 0 && lane % VECS_PER_GROUP == 0) page.scales[elem / GROUP_SIZE] = scale;

    // encode() takes positive scales whose inverse is a normal number, which one made elsewhere need not be.
    const float unit = copysignf(fabsf(scale) > 0x1p100f ? 0x1p-40f : 1.f, scale);
    auto write = [&](const RawVec& raw, int offset) {
        if (offset < 0) return;
        rotated_row(p, raw, page.row(offset), elem, v);
        const bool special = amax_bits(v, false) >= 0x7f800000u;
#pragma unroll
        for (int e = 0; e < VEC; ++e) v[e] *= unit;
        store_codes(page.codes + offset * p.slot_stride + elem, encode<2>(v, scale * unit, special));
    };
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        if (i >= steps) break;
        write(held[i], page.offset(i * ROWS_PER_STEP + sub));
    }
#pragma unroll 4
    for (int i = HELD; i < steps; ++i) {
        const int offset = page.offset(i * ROWS_PER_STEP + sub);
        write(load_row(p, page.row(offset), elem), offset);
    }

    if (page.count == PAGE_SIZE || __float_as_uint(scale) == __float_as_uint(old)) return;
    const float ratio = moved_by(old, scale);
    constexpr int UNROLL = 8;                    // codes of other rows a lane has under way
    for (int begin = 0; begin < STEPS; begin += UNROLL) {
        uint2 codes[UNROLL];
        auto stays = [&](int i) { return page.stays((begin + i) * ROWS_PER_STEP + sub); };
        char* const at = page.codes + (begin * ROWS_PER_STEP + sub) * p.slot_stride + elem;
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            codes[i] = stays(i) ? load_codes(at + i * ROWS_PER_STEP * p.slot_stride) : make_uint2(0, 0);
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const uint2 moved = make_uint2(rescaled(codes[i].x, ratio), rescaled(codes[i].y, ratio));
            if (stays(i) && (moved.x != codes[i].x || moved.y != codes[i].y))
                store_codes(at + i * ROWS_PER_STEP * p.slot_stride, moved);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) store_pages(const __grid_constant__ StoreParams p) {
    const int warp = threadIdx.x / 32;
#if INDEX_BYTES == 0
    const Page page{static_cast<char*>(p.pool) + blockIdx.x * p.page_stride, p.scales + blockIdx.x * p.scale_stride,
                    nullptr, nullptr, PAGE_SIZE, (int)blockIdx.x * PAGE_SIZE};
    for (int chunk = warp; chunk < NUM_CHUNKS; chunk += blockDim.x / 32) store_chunk(p, page, chunk);
#else
    extern __shared__ int shared[];
    const int first = blockIdx.x * p.block_rows, later = min(first + p.block_rows, p.num_rows);
    const int words = 1 << (32 - p.filter_shift);
    const PlaceSet pages{reinterpret_cast<unsigned*>(shared), shared + words, p.filter_shift, p.table_size - 1};
    int* leader = shared + words + p.table_size; // by entry: the first row of the page, as far as this block's rows tell
    int* number = leader + p.table_size;         // by entry: of the page among those led
    int* led = number + p.table_size;            // by number: the page; -1 once an earlier block is known to lead it
    int* counts = led + p.block_rows;            // by number: slots to store
    int* winners = counts + p.block_rows;        // (round, PAGE_SIZE)
    unsigned short* order = reinterpret_cast<unsigned short*>(winners + p.round * PAGE_SIZE);  // likewise
    __shared__ int num_led;

    // Likely to be needed, once it is known who leads what: the block's own rows.
    constexpr int LINES = (HEAD_DIM * ROW_ITEMSIZE + 127) / 128;
    for (int i = threadIdx.x; i < (later - first) * LINES; i += blockDim.x) prefetch(row_at(p, first + i / LINES) + i % LINES * 128);
    for (int i = threadIdx.x; i < words; i += blockDim.x) shared[i] = 0;
    for (int i = threadIdx.x; i < p.table_size; i += blockDim.x) pages.keys[i] = -1, leader[i] = p.num_rows;
    if (threadIdx.x == 0) num_led = 0;
    __syncthreads();
    // A row after one of its own page does not lead: rows in order, as a prefill brings them, end here.
    const int row = first + threadIdx.x;
    const int slot = row < later ? slot_of(p, row) : -1, before = row < later && row > 0 ? slot_of(p, row - 1) : -1;
    const bool candidate = slot >= 0 && (before < 0 || before / PAGE_SIZE != slot / PAGE_SIZE);
    const int entry = candidate ? pages.insert(slot / PAGE_SIZE) : -1;
    if (candidate) atomicMin(leader + entry, row);
    if (candidate) prefetch(p.scales + slot / PAGE_SIZE * p.scale_stride);
    __syncthreads();
    if (candidate && leader[entry] == row) {
        number[entry] = atomicAdd(&num_led, 1);
        led[number[entry]] = slot / PAGE_SIZE;
    }
    __syncthreads();

    for (int begin = 0; begin < num_led; begin += p.round) {
        for (int i = threadIdx.x; i < min(p.round, num_led - begin) * PAGE_SIZE; i += blockDim.x) winners[i] = -1;
        __syncthreads();
        unsigned fetched[FETCH];
        fetch_slots(p, 0, fetched);
        visit_rows<PAGE_SIZE>(p, pages, 0, fetched, [&](int seen, int place, int at) {
            const int n = number[at];
            if (seen < first) led[n] = -1;
            else if (n >= begin && n < begin + p.round) atomicMax(winners + (n - begin) * PAGE_SIZE + place % PAGE_SIZE, seen);
        });
        __syncthreads();
        for (int n = begin + warp; n < min(begin + p.round, num_led); n += blockDim.x / 32) {
            const int lane = threadIdx.x % 32, at = (n - begin) * PAGE_SIZE;
            int count = 0;
            for (int base = 0; base < PAGE_SIZE; base += 32) {
                const bool stored = base + lane < PAGE_SIZE && winners[at + base + lane] >= 0;
                const unsigned all = __ballot_sync(~0u, stored);
                if (stored) order[at + count + __popc(all & ((1u << lane) - 1))] = base + lane;
                count += __popc(all);
            }
            if (lane == 0) counts[n] = count;
        }
        __syncthreads();
        for (int item = warp; item < min(p.round, num_led - begin) * NUM_CHUNKS; item += blockDim.x / 32) {
            const int n = begin + item / NUM_CHUNKS;
            const long long page = led[n];
            if (page < 0) continue;
            store_chunk(p, {static_cast<char*>(p.pool) + page * p.page_stride, p.scales + page * p.scale_stride,
                            winners + (n - begin) * PAGE_SIZE, order + (n - begin) * PAGE_SIZE, counts[n], 0},
                        item % NUM_CHUNKS);
        }
        __syncthreads();
    }
#endif
}
