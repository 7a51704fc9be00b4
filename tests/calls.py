"""Random calls of paged_decode, and their float64 result by matrices (the loops of oracle.py, but for large calls)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import oracle

BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def draw(rng, *, t, h, d, lengths, pages=257, page_size=1, q_dtype=BF16, kv="fp8", group=64, bad=0.0, strided=False):
    """NumPy arguments of one call."""
    q = rng.standard_normal((t, h, d)).astype(q_dtype)
    shape = (pages, d) if page_size == 1 and not strided else (pages, page_size, d)
    call = {}
    if kv == "fp8":
        codes = rng.integers(0, 254, shape).astype(np.uint8)
        pool = (codes + (codes >= 127)).view(FP8)
        call["kv_scales"] = (10.0 ** rng.uniform(-3, 0, (pages, d // group))).astype(np.float32)
        call["group_size"] = group
    else:
        pool = rng.standard_normal(shape).astype(q_dtype)
    slots = pages * page_size
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    indices = rng.integers(0, slots, int(indptr[-1]) + 5).astype(np.int32)
    wild = rng.random(len(indices)) < bad
    indices[wild] = rng.choice([-1, -(2**31), slots, 2**31 - 1], int(wild.sum()))
    return {"q": q, "unified_kv": pool, "kv_indices": indices, "kv_indptr": indptr, **call}


def to_gpu(call):
    import cupy

    moved = {}
    for name, value in call.items():
        if isinstance(value, np.ndarray) and value.dtype == FP8:
            value = value.view(np.uint8)
        moved[name] = cupy.asarray(value) if isinstance(value, np.ndarray) else value
    return moved


def decode_call(call, sink=None, softmax_scale=None):
    """(out, lse) in float64 of the arguments that `draw` makes. Every referenced row must be finite."""
    q = call["q"].astype(np.float64)
    pool, scales, indptr = call["unified_kv"], call.get("kv_scales"), call["kv_indptr"]
    num_tokens, num_heads, head_dim = q.shape
    slots = pool.reshape(-1, head_dim)
    page_size = len(slots) // len(pool)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out, lse = np.zeros(q.shape), np.full((num_tokens, num_heads), -np.inf)
    for t in range(num_tokens):
        listed = call["kv_indices"][indptr[t] : indptr[t + 1]].astype(np.int64)
        listed = listed[(listed >= 0) & (listed < len(slots))]
        if not len(listed):
            continue
        rows = oracle.dequantized(
            slots[listed], None if scales is None else scales[listed // page_size], call.get("group_size", 64)
        )
        scores = scale * (q[t] @ rows.T)
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        lse[t] = (top + np.log(total))[:, 0]
        extra = 0.0 if sink is None else np.exp(sink.astype(np.float64)[:, None] - lse[t][:, None])
        out[t] = weights @ rows / total / (1.0 + extra)
    return out, lse
