// The one argument of every decode and combine kernel, and the map of memory it describes.
//
// Pool (unified_kv), one head shared by K and V:
//
//   page 0                                   page 1
//   +--------+--------+-----+--------------+ +--------+ ...
//   | slot 0 | slot 1 | ... | slot PS - 1  | | slot PS|         PS = page_size
//   +--------+--------+-----+--------------+ +--------+
//   each slot: head_dim elements, contiguous   (e4m3fn: 1 byte, bf16 / fp16: 2 bytes)
//   address of slot s = kv + (s / PS) * page_stride + (s % PS) * slot_stride        [bytes]
//
// Scales (e4m3fn pools only): one fp32 row a page, one scale for each group of GROUP_SIZE elements
//   value[d] = code[d] * scales[(s / PS) * scale_stride + d / GROUP_SIZE]           [elements]
//
// Lists: row t of the call is kv_indices[kv_indptr[t] : kv_indptr[t + 1]], slot ids in any order.
// An id outside [0, num_slots) is skipped: such a slot has probability zero and its memory is never touched.
//
// The host packs this struct in cupy_paged/backends/cuda.py; field order and sizes must agree with it.
#pragma once

struct DecodeParams {
    const void* q;           // (num_tokens, num_heads, HEAD_DIM) bf16 or fp16
    const void* kv;          // pool, see above
    const float* scales;     // (num_pages, HEAD_DIM / GROUP_SIZE), null unless e4m3fn
    const int* indices;      // (nnz,)
    const int* indptr;       // (num_tokens + 1,)
    const float* sink;       // (num_heads,) natural-log logits, or null
    void* out;               // (num_tokens, num_heads, HEAD_DIM) in q's dtype
    float* lse;              // (num_tokens, num_heads) natural log, contiguous, or null
    float* partial_out;      // (num_partials, num_heads, HEAD_DIM) fp32, normalised
    float* partial_lse2;     // (num_partials, num_heads) log2-sum-exp2 of the scaled logits, -inf when empty
    long long q_stride_token, q_stride_head;      // elements
    long long out_stride_token, out_stride_head;  // elements
    long long page_stride, slot_stride;           // bytes
    long long scale_stride;                       // elements
    float scale_log2;        // softmax_scale * log2(e)
    unsigned num_slots;      // num_pages * page_size, at most 2^31 (slot ids are int32)
    int page_size;
    int num_tokens, num_heads, nnz;
    int num_ctas;            // workers that share the lists = gridDim.x of the decode kernel
    int tile;                // slots a worker takes at once; cuts fall on multiples of it within a row
    int row_cost;            // what a row costs beside its slots, in slots (see schedule.cuh)
    int chunk_min;           // fixed splits: smallest chunk, a multiple of tile
    int max_chunks;          // fixed splits: most chunks a row; 0 = balanced cuts
    int num_partials;        // capacity of partial_out
};
