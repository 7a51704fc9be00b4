"""Errors of the CUDA kernels against float64 by dtype, D, L and kind of values, as a table in the GPU record.

`call` is the relative Frobenius error of all of a call's outputs, which the contract bounds; `row` the largest of one
token's head; `lse` the largest absolute error. Bounds are those of faults.py, where their reasons are. Rows that are
sums of many values of random sign, as here, are the hard case: their norm falls as 1 / sqrt(L).
"""

from __future__ import annotations

import faults
import numpy as np
import oracle
import pytest
from faults import BF16, FP16

from cupy_paged import paged_decode

CHUNK = 65536
LENGTHS = (1, 64, 640, 2176)
PATTERNS = ("normal", "any codes", "spread", "outliers", "pow2")
LONG = (65536, 1_000_000)


def matmul(a, b):
    """float64 product; through torch where it is installed, as CuPy's cuBLAS may not be."""
    try:
        import torch
    except ImportError:
        return a @ b
    import cupy

    product = torch.from_dlpack(cupy.ascontiguousarray(a)) @ torch.from_dlpack(cupy.ascontiguousarray(b))
    torch.cuda.synchronize()
    return cupy.from_dlpack(product)


def draw_pool(rng, pattern, slots, d, fp8, dtype):
    """(pool, scales or None) on the GPU, random rows of the pattern."""
    import cupy

    if fp8 and pattern in ("any codes", "spread"):
        codes = cupy.asarray(rng.integers(0, 254, (slots, d), dtype=np.uint8))
        codes += (codes >= 127).astype("uint8")
        low, high = (-3, 0) if pattern == "any codes" else (-8, 4)
        scales = 10.0 ** rng.uniform(low, high, (slots, d // 64))
        return codes, cupy.asarray(scales.astype(np.float32))
    rows = cupy.asarray(rng.standard_normal((slots, d), dtype=np.float32))
    if pattern == "outliers":
        rows *= cupy.where(cupy.asarray(rng.random((slots, d), dtype=np.float32)) < 0.01, 1e4, 1).astype("float32")
    elif pattern == "spread":
        rows *= cupy.asarray((10.0 ** rng.uniform(-3, 1, (slots, 1))).astype(np.float32))
    if not fp8:
        return rows.astype(dtype), None
    from cupy_paged import quantize_kv

    return quantize_kv(rows, scale_format="pow2" if pattern == "pow2" else "float32")


def exact_row(q, pool, scales, slots, softmax_scale):
    """(out (H, D), lse (H,)) in float64 of one token, in chunks."""
    import cupy

    table = cupy.asarray(oracle.E4M3FN)

    def rows(begin):
        some = slots[begin : begin + CHUNK]
        if scales is None:
            return pool[some].astype("float64")
        return table[pool[some]] * cupy.repeat(scales[some].astype("float64"), 64, axis=1)

    q = q.astype("float32").astype("float64") * softmax_scale
    scores = cupy.concatenate([matmul(q, rows(b).T) for b in range(0, len(slots), CHUNK)], axis=1)
    top = scores.max(axis=1, keepdims=True)
    weights = cupy.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    out = sum(matmul(weights[:, b : b + CHUNK], rows(b)) for b in range(0, len(slots), CHUNK)) / total
    return out, (top + cupy.log(total))[:, 0]


def measure(rng, q_dtype, fp8, d, h, length, pattern, tokens, softmax_scale=None):
    import cupy

    pool, scales = draw_pool(rng, pattern, max(2 * length, 1024) if length < 10**5 else length, d, fp8, q_dtype)
    q = cupy.asarray(rng.standard_normal((tokens, h, d)).astype(q_dtype))
    indices = cupy.asarray(rng.integers(0, len(pool), tokens * length).astype(np.int32))
    indptr = cupy.arange(0, tokens * length + 1, length, dtype="int32")
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    out, lse = paged_decode(q, pool, indices, indptr, kv_scales=scales, softmax_scale=scale, return_lse=True)
    bound = faults.LSE_BOUND[np.dtype(q_dtype).name, "fp8" if fp8 else "16"]
    wrong, norm, off, beyond = [], [], 0.0, False
    for t in range(tokens):
        exact, exact_lse = exact_row(q[t], pool, scales, indices[t * length : (t + 1) * length], scale)
        wrong.append(cupy.linalg.norm(out[t].astype("float64") - exact, axis=1).get())
        norm.append(cupy.linalg.norm(exact, axis=1).get())
        difference = cupy.abs(lse[t] - exact_lse)
        off = max(off, float(difference.max()))
        beyond |= bool((difference > bound + 2.0**-20 * cupy.abs(exact_lse)).any())
    wrong, norm = np.array(wrong), np.array(norm)
    return {
        "call": float(f"{np.linalg.norm(wrong) / np.linalg.norm(norm):.2e}"),
        "row": float(f"{(wrong / norm).max():.2e}"),
        "lse": float(f"{off:.1e}"),
        **({"lse beyond its bound": True} if beyond else {}),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["fp8", "16"])
@pytest.mark.parametrize("q_dtype", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("h", [16, 128])
def test_errors(kv, q_dtype, h, record_gpu):
    rng = np.random.default_rng(8)
    name, fp8 = np.dtype(q_dtype).name, kv == "fp8"
    table = {}
    for d in (64, 256, 512):
        for length in LENGTHS:
            for pattern in PATTERNS if fp8 else ("normal", "spread"):
                if pattern == "outliers" and q_dtype == FP16:
                    continue  # outputs beyond fp16
                table[f"D={d} L={length} {pattern}"] = measure(rng, q_dtype, fp8, d, h, length, pattern, 4)
    for length in LONG:
        if length == LONG[1] and (h, name) != (16, "bfloat16"):
            continue
        for pattern in PATTERNS[:3] if fp8 and length == LONG[0] else PATTERNS[:1]:
            table[f"D=512 L={length} {pattern}"] = measure(rng, q_dtype, fp8, 512, h, length, pattern, 1)
    bound = faults.BOUND[name, kv]
    record_gpu(f"errors: q {name}, pool {kv}, H={h}, bound {bound}", table)
    bad = {k: v for k, v in table.items() if not v["call"] <= bound or len(v) > 3}
    assert not bad
