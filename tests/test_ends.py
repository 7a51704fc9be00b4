"""Finite rows give finite, right results to the ends of the formats: largest and subnormal q, rows, scales, sinks.

The references and the allowed errors are the fuzzer's; these are the cases that go wrong where a product, a sum, a
factor or an exponent leaves its format.
"""

from __future__ import annotations

import fuzz
import ml_dtypes
import numpy as np
import pytest
from faults import BF16, F32, FP8, FP16, same_bits

T, D, PAGES = 2, 512, 90
LARGEST = float(np.finfo(F32).max)


def q_values(rng, kind, h, dtype):
    normal = rng.standard_normal((T, h, D))
    info = ml_dtypes.finfo(dtype)
    return {
        "normal": normal,
        "largest": np.copysign(float(info.max), normal),
        "largest of one sign": np.full(normal.shape, float(info.max)),
        "subnormal": rng.integers(-100, 101, normal.shape) * float(info.smallest_subnormal),
        "one head largest": np.where(np.arange(h)[:, None] == 0, float(info.max), normal),
    }[kind].astype(dtype)


def fp8_pool(rng, kind):
    """(codes, scales) of groups of 64."""
    codes = rng.integers(0, 254, (PAGES, D)).astype(np.uint8)
    codes = (codes + (codes >= 127)).view(FP8)
    shape = (PAGES, D // 64)
    if kind == "largest":
        codes = np.copysign(448.0, rng.standard_normal((PAGES, D))).astype(FP8)
        scales = np.full(shape, LARGEST / 448 * (1 - 2.0**-20))
    elif kind == "largest scale":  # of codes of at most 1
        codes = np.clip(codes.astype(F32), -1, 1).astype(FP8)
        scales = np.full(shape, LARGEST)
    elif kind == "smallest":
        scales = np.full(shape, 2.0**-126)
    elif kind == "all magnitudes":  # from slot to slot, and from group to group
        scales = 10.0 ** rng.uniform(-38, 35.8, shape)
    elif kind == "zeros beside large":
        scales = np.where(np.arange(PAGES)[:, None] % 2 == 0, 0.0, 10.0 ** rng.uniform(28, 32, shape))
    else:
        scales = 10.0 ** rng.uniform(-3, 0, shape)
    return codes, scales.astype(F32)


def rows_16(rng, kind, dtype):
    normal, most = rng.standard_normal((PAGES, D)), float(ml_dtypes.finfo(dtype).max)
    tiny = float(ml_dtypes.finfo(dtype).smallest_normal)
    rows = {
        "normal": normal,
        "largest": np.full((PAGES, D), most),
        "largest of both signs": np.copysign(most, normal),
        "smallest": normal * tiny,
        "all magnitudes": normal * 10.0 ** rng.uniform(np.log10(tiny), np.log10(most), (PAGES, 1)),
    }[kind]
    return np.clip(rows, -most, most).astype(dtype)


def call_of(rng, q, pool, scales=None):
    n = 75
    call = {"q": q, "unified_kv": pool, "kv_indices": rng.integers(-1, PAGES, T * n).astype(np.int32)}
    call["kv_indptr"] = np.arange(0, T * n + 1, n, dtype=np.int32)
    return call if scales is None else call | {"kv_scales": scales, "group_size": 64}


def check(backend, call, **options):
    for splits in (1, 3):
        out, lse = backend.decode(call, **options, num_splits=splits)
        fuzz.compare(f"{backend.name}, {splits} splits", out, lse, fuzz.exact(call, options))


kinds_of_q = pytest.mark.parametrize(
    "q_kind", ["normal", "largest", "largest of one sign", "subnormal", "one head largest"]
)
q_dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bfloat16", "float16"])


@kinds_of_q
@q_dtypes
@pytest.mark.parametrize("h", [5, 40])
@pytest.mark.parametrize(
    "kind", ["normal", "largest", "largest scale", "smallest", "all magnitudes", "zeros beside large"]
)
def test_fp8_rows(backend, q_kind, dtype, h, kind):
    rng = np.random.default_rng(1)
    check(backend, call_of(rng, q_values(rng, q_kind, h, dtype), *fp8_pool(rng, kind)))


@kinds_of_q
@q_dtypes
@pytest.mark.parametrize("kind", ["normal", "largest", "largest of both signs", "smallest", "all magnitudes"])
def test_16_bit_rows(backend, q_kind, dtype, kind):
    rng = np.random.default_rng(2)
    check(backend, call_of(rng, q_values(rng, q_kind, 5, dtype), rows_16(rng, kind, dtype)))


@pytest.mark.parametrize("softmax_scale", [0.0, 1e-38, 1e-20, -1.0, 1e20, 3e38])
@pytest.mark.parametrize("kv", ["fp8", "16"])
def test_softmax_scale(backend, softmax_scale, kv):
    rng = np.random.default_rng(3)
    pool = fp8_pool(rng, "normal") if kv == "fp8" else (rows_16(rng, "normal", BF16),)
    check(backend, call_of(rng, q_values(rng, "normal", 5, BF16), *pool), softmax_scale=softmax_scale)


@pytest.mark.parametrize("q_kind", ["normal", "largest", "subnormal"])
def test_sinks(backend, q_kind):
    """A sink at either end of float32, beside scores of any size."""
    rng = np.random.default_rng(4)
    sink = np.array([-np.inf, np.inf, LARGEST, -LARGEST, 0.0], F32)
    check(backend, call_of(rng, q_values(rng, q_kind, 5, BF16), *fp8_pool(rng, "normal")), attn_sink=sink)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kv", ["fp8", "16"])
def test_a_bad_q_spoils_its_head_alone(cuda, bad, kv):
    rng = np.random.default_rng(5)
    q = q_values(rng, "normal", 5, BF16)
    pool = fp8_pool(rng, "normal") if kv == "fp8" else (rows_16(rng, "normal", BF16),)
    call = call_of(rng, q, *pool)
    clean, _ = cuda.decode(call)
    q = q.copy()
    q[1, 3, 200] = bad
    out, lse = cuda.decode(call | {"q": q})
    assert np.isnan(out[1, 3].astype(F32)).all()
    assert np.isnan(lse[1, 3])
    others = np.arange(T * 5).reshape(T, 5) != 5 + 3
    same_bits(out[others], clean[others])
