// Who works on which slots, decided on the device from kv_indptr alone (no host read, no extra pass).
//
// All rows are laid end to end on one axis on which row t takes len(t) + row_cost units and starts at
//     pos(t) = indptr[t] - indptr[0] + row_cost * t,
// so that a position costs no prefix sum. The axis is cut into num_ctas equal parts; a cut inside a row is
// moved down to a multiple of the row's quantum. Worker g takes [cut(g), cut(g + 1)): a run of segments, each
// within one row. Quantum = tile (balanced cuts: cheapest), or the row's chunk (fixed splits: where a row is
// divided depends on its own length only, which makes a token's bits independent of its batch).
//
// A segment that is a whole row is written to out directly. Any other is a partial, at a place both the
// writer and combine.cu compute: balanced cuts give each worker at most two partials, 2g (it begins inside a
// row) and 2g + 1 (it begins with its row); fixed splits use first_partial(row) + chunk number.
//
// Malformed kv_indptr (decreasing, negative, past nnz) gives meaningless but bounded work: every begin and
// length is clamped to [0, nnz], every loop ends, every partial index is checked against num_partials.
#pragma once
#include "params.cuh"

struct RowRange { int begin, len; };

// a / b for a >= 0, b > 0: 64-bit division takes over a hundred instructions, and values nearly always fit 32 bits.
__device__ __forceinline__ long long quotient(long long a, long long b) {
    return (a | b) >> 32 ? a / b : (long long)((unsigned)a / (unsigned)b);
}

__device__ __forceinline__ int clamped_indptr(const DecodeParams& p, int t) {
    return min(max(__ldg(p.indptr + t), 0), p.nnz);
}

__device__ __forceinline__ RowRange row_range(const DecodeParams& p, int t) {
    const int begin = clamped_indptr(p, t);
    return {begin, max(clamped_indptr(p, t + 1) - begin, 0)};
}

// The slots between two possible cuts of a row of this length.
__device__ __forceinline__ int row_quantum(const DecodeParams& p, int len) {
    if (p.max_chunks == 0) return p.tile;
    const int chunks = min(max((len + p.chunk_min - 1) / p.chunk_min, 1), p.max_chunks);
    const int even = (len + chunks - 1) / chunks;
    return max((even + p.tile - 1) / p.tile, 1) * p.tile;
}

// Fixed splits: the row's first place among the partials. Both bounds leave room for every earlier row's
// chunks (a row has at most max_chunks, and at most len / chunk_min + 1), hence so does the smaller.
__device__ __forceinline__ long long first_partial(const DecodeParams& p, int t, int begin, int indptr0) {
    const long long by_row = (long long)t * p.max_chunks;
    const long long by_slot = (long long)(max(begin - indptr0, 0) / p.chunk_min) + t;
    return by_row < by_slot ? by_row : by_slot;
}

struct Axis {
    int indptr0;        // clamped indptr[0]
    long long length;   // pos(num_tokens), at least 1

    __device__ __forceinline__ explicit Axis(const DecodeParams& p) {
        indptr0 = clamped_indptr(p, 0);
        const long long slots = clamped_indptr(p, p.num_tokens) - indptr0;
        length = (slots > 0 ? slots : 0) + (long long)p.row_cost * p.num_tokens;
        if (length < 1) length = 1;
    }
    __device__ __forceinline__ long long pos(const DecodeParams& p, int t) const {
        return (long long)(clamped_indptr(p, t) - indptr0) + (long long)p.row_cost * t;
    }
    __device__ __forceinline__ long long cut_pos(const DecodeParams& p, int g) const {
        return quotient(length * g, p.num_ctas);
    }
};

// A cut: the row it falls in and how many of that row's slots lie before it.
struct Cut { int row, offset; };

// All 32 lanes of a warp together find cuts g and g + 1: each is in the last row with pos(row) <= x. Every lane probes
// one row for each, so 1024 rows take two rounds of loads that wait for each other.
struct Cuts { Cut at[2]; };

__device__ __forceinline__ Cuts find_cuts(const DecodeParams& p, const Axis& axis, int g) {
    const int lane = threadIdx.x & 31;
    const long long x[2] = {axis.cut_pos(p, g), axis.cut_pos(p, g + 1)};
    int lo[2] = {0, 0}, hi[2] = {p.num_tokens, p.num_tokens};
    while (hi[0] - lo[0] > 1 || hi[1] - lo[1] > 1) {
        int step[2];
        bool below[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            step[i] = (hi[i] - lo[i] + 31) / 32;
            const int probe = lo[i] + (lane + 1) * step[i];
            below[i] = probe < hi[i] && axis.pos(p, min(probe, p.num_tokens)) <= x[i];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned above = ~__ballot_sync(~0u, below[i]);
            lo[i] += (above ? __ffs(above) - 1 : 32) * step[i];
            hi[i] = min(hi[i], lo[i] + step[i]);
        }
    }
    Cuts cuts;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const RowRange row = row_range(p, lo[i]);
        const long long inside = max(x[i] - axis.pos(p, lo[i]), 0LL);
        const int quantum = row_quantum(p, row.len);
        const long long offset = quotient(inside, quantum) * quantum;
        cuts.at[i] = offset >= row.len && offset ? Cut{lo[i] + 1, 0} : Cut{lo[i], (int)offset};
        if (g + i >= p.num_ctas) cuts.at[i] = {p.num_tokens, 0};
    }
    return cuts;
}

// One worker's segments in order. Every thread of a warp must construct it (warp-collective); next() is not
// collective. Warps of one block all get the same sequence.
struct Segments {
    Cut at, end;
    int indptr0, cta;

    // The current segment, valid after next() returned true:
    int row;              // token
    int begin;            // first entry in kv_indices
    int len;              // slots, 0 only for an empty row
    long long partial;    // where it goes among the partials; -1: the whole row, write out and lse

    __device__ __forceinline__ Segments(const DecodeParams& p, int g) {
        const Axis axis(p);
        const Cuts cuts = find_cuts(p, axis, g);
        at = cuts.at[0];
        end = cuts.at[1];
        indptr0 = axis.indptr0;
        cta = g;
    }
    __device__ __forceinline__ bool next(const DecodeParams& p) {
        if (at.row > end.row || (at.row == end.row && at.offset >= end.offset)) return false;
        const RowRange range = row_range(p, at.row);
        const int offset = min(at.offset, range.len);
        int stop = at.row == end.row ? min(end.offset, range.len) : range.len;
        if (p.max_chunks) stop = min(stop, offset + row_quantum(p, range.len));
        row = at.row;
        begin = range.begin + offset;
        len = stop - offset;
        if (offset == 0 && stop == range.len) {
            partial = -1;
        } else if (p.max_chunks) {
            partial = first_partial(p, row, range.begin, indptr0) + offset / row_quantum(p, range.len);
        } else {
            partial = 2LL * cta + (offset == 0);
        }
        if (stop == range.len) at = {at.row + 1, 0};
        else at.offset = stop;
        return true;
    }
};

// Balanced cuts: both places of a worker begin as empty, before the block's first barrier. combine.cu looks at places
// that nobody writes where two cuts fell together, and anywhere where kv_indptr is malformed.
// Threads first, first + step, ... of the block do heads [head0, head0 + heads).
__device__ __forceinline__ void clear_places(const DecodeParams& p, int cta, int head0, int heads, int first, int step) {
    if (p.max_chunks || p.num_partials == 0) return;
    for (int i = first; i < 2 * heads; i += step) {
        const int head = head0 + i % heads;
        if (head < p.num_heads)
            p.partial_lse2[(2LL * cta + i / heads) * p.num_heads + head] = __int_as_float(0xff800000);
    }
}

// The partials of one row, seen from combine.cu. count < 2: the row was written directly, there are none.
struct RowPartials {
    int count;            // places to look at, in slot order
    int first_cta;        // balanced cuts: worker of place 0
    long long base;       // fixed splits: place 0; balanced cuts: pos(row)
    long long length;     // balanced cuts: of the axis

    __device__ __forceinline__ RowPartials(const DecodeParams& p, int t) {
        const RowRange row = row_range(p, t);
        const Axis axis(p);
        length = axis.length;
        if (p.max_chunks) {
            const int quantum = row_quantum(p, row.len);
            count = (row.len + quantum - 1) / quantum;
            base = first_partial(p, t, row.begin, axis.indptr0);
            first_cta = 0;
            return;
        }
        base = axis.pos(p, t);
        // Cuts at or before the row's begin are those below begin_end; cuts before the row's end below end_end.
        const long long extent = (long long)row.len + p.row_cost;
        const long long rounded = quotient((long long)row.len + p.tile - 1, p.tile) * p.tile;
        const long long begin_end = base + (extent < p.tile ? extent : p.tile);
        const long long end_end = base + (extent < rounded ? extent : rounded);
        first_cta = last_cta_below(p, begin_end);
        count = row.len ? last_cta_below(p, end_end) - first_cta + 1 : 0;
    }
    // Largest g with length * g / num_ctas < x.
    __device__ __forceinline__ int last_cta_below(const DecodeParams& p, long long x) const {
        const long long g = quotient(max(x, 0LL) * p.num_ctas + length - 1, length) - 1;
        return (int)(g < 0 ? 0 : g < p.num_ctas ? g : p.num_ctas - 1);
    }
    // Place k among the partials; -1 beyond them. A worker between two equal cuts has marked its place empty.
    __device__ __forceinline__ long long at(const DecodeParams& p, int k) const {
        const long long place = p.max_chunks ? base + k : 2LL * (first_cta + k) + (k == 0);
        return place < p.num_partials ? place : -1;
    }
};

// out = attention without sink * sink_factor; 0 for an empty row whatever the sink.
__device__ __forceinline__ float sink_factor(float lse2, float sink) {
    if (lse2 == __int_as_float(0xff800000)) return 0.f;
    return 1.f / (1.f + exp2f(sink * 1.4426950408889634f - lse2));
}
