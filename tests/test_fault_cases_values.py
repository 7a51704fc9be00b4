"""Public fault reports about values, dtypes and layouts, as tests: O03, O04, O06 to O11, O13, O14, O22, O23, O28 to O31.

Named as in test_fault_cases_lists.py; shared parts are in faults.py.
"""

from __future__ import annotations

import gc
import math

import faults
import ml_dtypes
import numpy as np
import oracle
import pytest
from calls import decode_call
from faults import BF16, F32, FP8, FP16, INT_MAX, INT_MIN, Config, base

from cupy_paged import PagedKV, dequantize_kv, merge_states, paged_decode, quantize_kv, store_kv


def pool_like(backend, *args, **options):
    return PagedKV(*args, device="cuda" if backend.cuda else "cpu", **options)


# O03: more bytes than 32 bits count


@pytest.fixture
def huge(cuda):
    """An empty FP8 pool of 2^22 + 64 slots, 2.1 GB."""
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < 6 << 30:
        pytest.skip("needs 6 GB of GPU memory")
    codes, scales = cupy.zeros((2**22 + 64, 512), "uint8"), cupy.full((2**22 + 64, 8), 2.0**-80, "float32")
    yield codes, scales
    del codes, scales
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def test_o03_decode_store_and_dequantise_beyond_two_to_the_31_bytes(cuda, huge):
    import cupy

    codes, scales = huge
    call = cuda.put(base(num_slots=64))
    far = np.int32(2**22)
    small = paged_decode(**call)
    codes[far:], scales[far:] = call["unified_kv"], call["kv_scales"]
    options = {"unified_kv": codes, "kv_scales": scales, "kv_indices": call["kv_indices"] + far}
    for mode in faults.MODES:
        faults.same_bits(paged_decode(**{**call, **options}, **mode), paged_decode(**call, **mode))
    faults.near(cuda.get(paged_decode(**{**call, **options})), cuda.get(small), 2.5e-3)

    near, there = PagedKV(64, device="cuda"), PagedKV.from_arrays(codes, scales)
    rows = cupy.random.default_rng(3).standard_normal((40, 512), dtype="float32")
    slots = cupy.asarray(np.random.default_rng(3).permutation(64)[:40].astype(np.int32))
    near.store(slots, rows)
    there.store(slots + far, rows)
    faults.same_bits(there.codes[far:][slots], near.codes[slots])
    faults.same_bits(there.scales[far:][slots], near.scales[slots])
    faults.same_bits(there.dequantize(slots + far), near.dequantize(slots))
    there.copy_slots(slots + far, slots + (far - 64))
    faults.same_bits(there.dequantize(slots + (far - 64)), near.dequantize(slots))
    assert not bool(codes[: far - 64].any())


# O04: strides


@faults.configs
@faults.modes
def test_o04_pool_and_scales_inside_larger_arrays(backend, config, mode):
    call = base(config)
    plain = backend.decode(call, **mode)
    pool, d = call["unified_kv"], config.head_dim
    wide = np.zeros((*pool.shape[:-1], d + 128), pool.dtype)
    wide[..., 64 : d + 64] = pool
    strided = backend.put(call) | {"unified_kv": backend.put(wide)[..., 64 : d + 64]}
    if config.kv == "fp8":
        groups = d // config.group_size
        wide_scales = np.full((len(pool), 3 * groups), np.nan, F32)
        wide_scales[:, groups : 2 * groups] = call["kv_scales"]
        strided["kv_scales"] = backend.put(wide_scales)[:, groups : 2 * groups]
    for got, wanted in zip(backend.decode(strided, **mode), plain, strict=True):
        faults.same_bits(got, wanted)
    # A layer of a cache with all layers: rows far apart, and pages that do not adjoin.
    layers = np.zeros((len(pool), 3, *pool.shape[1:]), pool.dtype)
    layers[:, 1] = pool
    strided["unified_kv"] = backend.put(layers)[:, 1]
    for got, wanted in zip(backend.decode(strided, **mode), plain, strict=True):
        faults.same_bits(got, wanted)


@faults.some_configs
@pytest.mark.parametrize("offset", [8, 4, 2, 1, 3])
def test_o04_queries_and_outputs_at_any_address(backend, config, offset):
    """Slices of q and out that begin at any element give the bits of aligned ones, and nothing around is written."""
    call = base(config)
    plain, _ = backend.decode(call)
    t, h, d = call["q"].shape
    wide = np.full((t, h, d + 16), np.nan, call["q"].dtype)
    wide[..., offset : d + offset] = call["q"]
    around = backend.full((t, h, d + 16), np.nan, call["q"].dtype)
    out = around[..., offset : d + offset]
    got, _ = backend.decode(call | {"q": backend.put(wide)[..., offset : d + offset]}, out=out)
    faults.same_bits(got, plain)
    left = backend.get(around).astype(F32)
    assert np.isnan(left[..., :offset]).all()
    assert np.isnan(left[..., d + offset :]).all()
    swapped = backend.put(np.ascontiguousarray(call["q"].transpose(1, 0, 2))).transpose(1, 0, 2)
    faults.same_bits(backend.decode(call | {"q": swapped})[0], plain)


def test_o04_strided_storing(backend):
    rng = np.random.default_rng(4)
    rows, slots = rng.standard_normal((5, 512)).astype(BF16), np.array([0, 9, 4, 31, 2], np.int32)
    buffer, scale_buffer = backend.full((32, 640), 7, np.uint8), backend.full((32, 20), 7, F32)
    pool, scales = buffer[:, :512], scale_buffer[:, 8:16]
    store_kv(pool, scales, backend.put(slots), backend.put(rows))
    codes, wanted = quantize_kv(backend.put(rows))
    faults.same_bits(backend.get(pool)[slots], backend.get(codes).view(np.uint8))
    faults.same_bits(backend.get(scales)[slots], backend.get(wanted))
    assert (backend.get(buffer)[:, 512:] == 7).all()
    assert (np.delete(backend.get(scale_buffer), range(8, 16), axis=1) == 7).all()
    assert (np.delete(backend.get(buffer), slots, axis=0) == 7).all()


# O06 to O09: codes and scales


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("scale_format", ["float32", "pow2"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_o06_all_zero_groups(backend, group_size, scale_format, zero):
    rows = backend.full((64, 512), zero, F32)
    codes, scales = quantize_kv(rows, group_size=group_size, scale_format=scale_format)
    assert not (backend.get(codes).view(np.uint8) & 0x7F).any()
    assert (np.isfinite(backend.get(scales)) & (backend.get(scales) > 0)).all()
    assert (backend.get(dequantize_kv(codes, scales, group_size=group_size)) == 0).all()
    call = base(lengths=[64, 10], num_slots=64)
    out, lse = backend.decode(call | {"unified_kv": codes, "kv_scales": scales, "group_size": group_size})
    assert (out.astype(F32) == 0).all()
    np.testing.assert_allclose(lse, np.log([[64.0], [10.0]]) + np.zeros((2, 16)), atol=1e-5)


def test_o06_scales_of_zero_given_by_the_caller(backend):
    call = base()
    call["kv_scales"][:] = 0
    out, lse = backend.decode(call)
    assert (out.astype(F32) == 0).all()
    np.testing.assert_allclose(lse, math.log(64), atol=1e-5)


@pytest.mark.parametrize("h", [4, 16, 64, 128])
@pytest.mark.parametrize("q_dtype", [BF16, FP16])
def test_o07_scales_keep_all_their_bits(backend, h, q_dtype):
    call = base(Config(num_heads=h, q_dtype=q_dtype), lengths=[1] * 8)
    values = np.array([0.7, 1.3, 3.1e-3, 97.3, 1 / 3, 1.0000001, 0.99999994, 2.0**-9 * 1.7], F32)
    slots = call["kv_indices"]
    slots[:] = np.random.default_rng(0).permutation(1024)[:8]
    call["kv_scales"][slots] = values[:, None]
    out, _ = backend.decode(call)
    rows = oracle.E4M3FN[call["unified_kv"][slots].view(np.uint8)] * values.astype(np.float64)[:, None]
    wanted = np.repeat(rows.astype(F32).astype(q_dtype)[:, None], h, 1)
    ulp = np.spacing(np.abs(wanted).astype(q_dtype)).astype(np.float64)
    assert (np.abs(out.astype(np.float64) - wanted.astype(np.float64)) <= ulp).all()


def test_o08_saturation(backend):
    """A group whose largest element is 448 has scale 1; what a given scale cannot hold becomes 448, never NaN."""
    values = np.array([448, 464, 465, 480, 1e4, -1e4], F32)
    pool = pool_like(backend, 2, 2, 64)
    first = np.zeros((1, 64), F32)
    first[0, 0] = 448
    pool.store(backend.put(np.array([0], np.int32)), backend.put(first))
    assert backend.get(pool.scales)[0, 0] == 1
    from cupy_paged import fp8

    assert fp8.encode(values, F32(1)).tolist() == [0x7E] * 5 + [0xFE]
    rows = np.zeros((1, 2, 64), F32)
    rows[0, 0, :6] = values
    for scale_format in ("float32", "pow2"):
        codes, scales = quantize_kv(backend.put(rows), scale_format=scale_format)
        codes = backend.get(codes).view(np.uint8)
        assert not (codes & 0x7F == 0x7F).any()
        assert codes[0, 0, 5] == codes[0, 0, 4] | 0x80
        if scale_format == "float32":
            assert codes[0, 0, 4] == 0x7E
        assert backend.get(scales)[0, 0] >= 1e4 / 448


@pytest.mark.parametrize("amax", [1e-44, 1e-38, 1e-20, 448.0, 464.5, 65504.0, 1e30, 3.4028235e38])
@pytest.mark.parametrize("dtype", [F32, BF16, FP16], ids=["float32", "bfloat16", "float16"])
def test_o08_no_finite_row_quantises_to_nan(backend, amax, dtype):
    if amax > float(ml_dtypes.finfo(dtype).max):
        amax = float(ml_dtypes.finfo(dtype).max)
    rng = np.random.default_rng(8)
    rows = (rng.uniform(-1, 1, (16, 128)) * amax).astype(dtype)
    rows[:, 5] = amax
    for scale_format in ("float32", "pow2"):
        codes, scales = quantize_kv(backend.put(rows), scale_format=scale_format)
        assert not (backend.get(codes).view(np.uint8) & 0x7F == 0x7F).any()
        assert np.isfinite(backend.get(scales)).all()


@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e5m2fnuz"])
def test_o09_other_fp8_formats_are_refused(name):
    call = base()
    call["unified_kv"] = call["unified_kv"].view(np.uint8).view(getattr(ml_dtypes, name))
    for function in (
        lambda: paged_decode(**call),
        lambda: dequantize_kv(call["unified_kv"], call["kv_scales"]),
        lambda: store_kv(call["unified_kv"], call["kv_scales"], np.zeros(1, np.int32), np.zeros((1, 512), F32)),
    ):
        with pytest.raises(TypeError, match=rf"float8_e4m3fn.*{name}"):
            function()


def test_o09_uint8_means_e4m3fn(backend):
    call = base()
    plain = backend.decode(call)
    for got, wanted in zip(
        backend.decode(call | {"unified_kv": call["unified_kv"].view(np.uint8)}), plain, strict=True
    ):
        faults.same_bits(got, wanted)


# O10, O11: heads and head dimensions


@pytest.mark.parametrize("h", [1, 2, 4, 5, 8, 12, 16, 20, 24, 40, 48, 64, 96, 128, 200])
@pytest.mark.parametrize("kv", ["fp8", "16"])
def test_o10_any_head_count(backend, h, kv):
    call = base(Config(num_heads=200, kv=kv))
    exact, exact_lse = decode_call(call)
    out, lse = backend.decode(call | {"q": call["q"][:, :h]})
    faults.near(out, exact[:, :h], faults.BOUND[faults.kind(call)])
    faults.near_lse(lse, exact_lse[:, :h], faults.LSE_BOUND[faults.kind(call)])


@pytest.mark.parametrize("h", [16, 64, 128])
@pytest.mark.parametrize("kv", ["fp8", "16"])
def test_o11_every_dimension_comes_out_where_it_went_in(backend, h, kv):
    """Row s is one-hot in dimension s, token t lists slot t alone."""
    call = base(Config(num_heads=h, kv=kv), lengths=[1] * 512, num_slots=512)
    call["unified_kv"] = np.eye(512).astype(FP8 if kv == "fp8" else BF16)
    if kv == "fp8":
        call["kv_scales"][:] = 0.5
    call["kv_indices"] = np.arange(512, dtype=np.int32)
    out, _ = backend.decode(call)
    wanted = np.eye(512, dtype=F32)[:, None] * (0.5 if kv == "fp8" else 1) + np.zeros((1, h, 1), F32)
    assert (out.astype(F32) == wanted).all()
    # In QK: the score of slot s is q's dimension s, so that a shifted dimension would give another slot.
    call = call | {"kv_indptr": np.array([0, 512], np.int32), "q": np.zeros((1, h, 512), BF16)}
    call["q"][0, np.arange(h), (37 * np.arange(h)) % 512] = 100
    out, _ = backend.decode(call, softmax_scale=1.0)
    assert (out[0].astype(F32).argmax(axis=1) == (37 * np.arange(h)) % 512).all()


@pytest.mark.parametrize("d", [64, 128, 192, 256, 320, 384, 448, 512])
@pytest.mark.parametrize("kv", ["fp8", "16"])
@pytest.mark.parametrize("h", [3, 64])
def test_o11_head_dimensions(backend, d, kv, h):
    call = base(Config(num_heads=h, head_dim=d, kv=kv))
    faults.near_reference(call, *backend.decode(call))


@pytest.mark.parametrize("d", [0, 32, 96, 576, 640])
def test_o11_other_head_dimensions_are_refused(backend, d):
    call = backend.put({"q": np.zeros((1, 4, d), BF16), "unified_kv": np.zeros((8, d), BF16)})
    lists = backend.put({"kv_indices": np.zeros(1, np.int32), "kv_indptr": np.array([0, 1], np.int32)})
    with pytest.raises(ValueError, match=rf"multiple of 64 from 64 to 512, got {d}"):
        paged_decode(**call, **lists)


# O13, O14: sink and lse


@faults.configs
@faults.modes
def test_o13_the_sink_is_used(backend, config, mode):
    call = base(config)
    sink = np.random.default_rng(13).standard_normal(config.num_heads).astype(F32)
    plain, lse = backend.decode(call, **mode)
    out, sink_lse = backend.decode(call, attn_sink=sink, **mode)
    exact, exact_lse = decode_call(call)
    wanted = exact / (1 + np.exp(sink[None, :, None] - exact_lse[..., None]))
    faults.near(out, wanted, faults.BOUND[faults.kind(call)])
    faults.same_bits(sink_lse, lse)
    faults.near_reference(call, plain, lse)


@faults.some_configs
@faults.modes
def test_o13_extreme_sinks(backend, config, mode):
    call = base(config)
    plain, _ = backend.decode(call, **mode)
    for value, factor in ((-math.inf, 1.0), (-1e30, 1.0), (math.inf, 0.0), (1e30, 0.0), (3e38, 0.0)):
        out, _ = backend.decode(call, attn_sink=np.full(config.num_heads, value, F32), **mode)
        faults.near(out, plain.astype(np.float64) * factor, 1e-6)


def test_o13_wrong_sinks_are_refused(backend):
    call = base()
    with pytest.raises(ValueError, match=r"attn_sink.*\(16,\).*\(15,\)"):
        backend.decode(call, attn_sink=np.zeros(15, F32))
    for dtype in (BF16, np.float64):
        with pytest.raises(TypeError, match=r"attn_sink.*float32"):
            backend.decode(call, attn_sink=np.zeros(16, dtype))


@faults.configs
@faults.modes
@pytest.mark.parametrize("sink", [False, True])
def test_o14_two_halves_merge_to_the_whole(backend, config, mode, sink):
    call = base(config)
    sinks = np.linspace(-1, 4, config.num_heads, dtype=F32) if sink else None
    parts = []
    for half in range(2):
        indices, indptr = call["kv_indices"].reshape(4, 64)[:, 32 * half : 32 * half + 32], np.arange(0, 129, 32)
        parts.append(call | {"kv_indices": indices.reshape(-1).copy(), "kv_indptr": indptr.astype(np.int32)})
    results = [backend.decode(part, **mode) for part in parts]
    for part, (out, lse) in zip(parts, results, strict=True):
        faults.near_reference(part, out, lse)
    merged = merge_states(
        [backend.put(out) for out, _ in results], [backend.put(lse) for _, lse in results], backend.put(sinks)
    )
    exact, exact_lse = decode_call(call, sinks)
    # Each part was rounded to its dtype and the sum once more: twice the variance.
    faults.near(backend.get(merged[0]), exact, math.sqrt(2) * faults.BOUND[faults.kind(call)])
    faults.near_lse(backend.get(merged[1]), exact_lse, faults.LSE_BOUND[faults.kind(call)])


# O22, O23: storing


@pytest.mark.parametrize("page_size", [1, 4])
def test_o22_codes_and_scales_move_together(backend, page_size):
    rng = np.random.default_rng(22)
    pool = pool_like(backend, 16, page_size, 256)
    slots = np.arange(16 * page_size, dtype=np.int32)
    rows = rng.standard_normal((len(slots), 256)).astype(F32)
    pool.store(backend.put(slots), backend.put(rows * F32(0.01)))
    pool.store(backend.put(slots), backend.put(rows * F32(100)))
    pool.grow(32)
    pool.copy_slots(backend.put(slots), backend.put(slots[::-1] + np.int32(len(slots))))
    got = backend.get(pool.dequantize())
    fresh = backend.get(dequantize_kv(*quantize_kv(backend.put(rows * F32(100)))))
    half = len(slots)
    bound = 0.04  # e4m3fn rounds by up to 1/16 of an element, 2.6e-2 in the mean square; a stale scale gives 1e4
    for part in (got[:half], got[half:][::-1]):
        oracle.compare(part, (rows * F32(100)).astype(np.float64), bound)
    if page_size == 1:
        faults.same_bits(got[:half], fresh)
        faults.same_bits(got[half:][::-1], fresh)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kv", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("rows_dtype", [F32, BF16, FP16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("d", [64, 512])
def test_o23_storing_to_bad_slots_writes_nothing(backend, page_size, kv, rows_dtype, d):
    rng = np.random.default_rng(23)
    p = 32
    shape = (p, d) if page_size == 1 else (p, page_size, d)
    slots_count = p * page_size
    pool = rng.integers(0, 120, shape).astype(np.uint8)
    if kv == "bfloat16":
        pool = pool.astype(BF16)
    guarded = faults.Guarded(backend, pool), faults.Guarded(backend, np.ones((p, d // 64), F32))
    slots = np.array([-1, slots_count, 2**40 + 17, 5, INT_MIN, INT_MAX, -(2**63), 2**63 - 1, 2**32 + 5], np.int64)
    rows = np.full((len(slots), d), 3.0, rows_dtype)
    scales = guarded[1].array if kv != "bfloat16" else None
    store_kv(guarded[0].array, scales, backend.put(slots), backend.put(rows))
    assert guarded[0].intact()
    assert guarded[1].intact()
    got, got_scales = backend.get(guarded[0].array), backend.get(guarded[1].array)
    changed = np.flatnonzero((got != pool).reshape(slots_count, d).any(axis=1))
    page = 5 // page_size
    assert set(changed) <= ({5} if page_size == 1 or kv == "bfloat16" else {5, 4, 6, 7})
    assert 5 in changed
    assert (np.delete(got_scales, page, axis=0) == 1).all()
    with pytest.raises(IndexError, match=r"slots\[0\] = -1"):
        store_kv(guarded[0].array, scales, backend.put(slots), backend.put(rows), validate=True)
    only = slots.astype(np.int32)[[0, 1, 4, 5]]
    before = got.copy()
    store_kv(guarded[0].array, scales, backend.put(only), backend.put(rows[:4]))
    faults.same_bits(backend.get(guarded[0].array).view(np.uint8), before.view(np.uint8))


def test_o23_copying_and_reading_bad_slots(backend):
    pool = pool_like(backend, 8, 2, 64)
    rows = np.random.default_rng(0).standard_normal((16, 64)).astype(F32)
    pool.store(backend.put(np.arange(16, dtype=np.int32)), backend.put(rows))
    before = backend.get(pool.codes).copy(), backend.get(pool.scales).copy()
    wild = np.array([-1, 16, INT_MAX, INT_MIN, 8], np.int32)
    fine = np.array([0, 1, 2, 3, 4], np.int32)
    for copy in (pool.copy_pages, pool.copy_slots):
        first, second = (wild, fine) if copy == pool.copy_pages else (wild[:4], fine[:4])
        copy(backend.put(first), backend.put(second))
        copy(backend.put(second), backend.put(first))
        faults.same_bits(backend.get(pool.codes).view(np.uint8), before[0].view(np.uint8))
        faults.same_bits(pool.scales, before[1])
    assert np.isnan(backend.get(pool.dequantize(backend.put(wild[:4])))).all()


# O28 to O31: scalars and foreign arrays


def test_o28_scalar_arguments(backend):
    call = base()
    plain = backend.decode(call, softmax_scale=0.0625)
    for scale in (np.float32(0.0625), np.float64(0.0625), np.float16(0.0625)):
        for got, wanted in zip(backend.decode(call, softmax_scale=scale), plain, strict=True):
            faults.same_bits(got, wanted)
    faults.near_reference(call, *backend.decode(call, softmax_scale=1), softmax_scale=1)
    faults.near_reference(call, *backend.decode(call, softmax_scale=-0.25), softmax_scale=-0.25)
    faults.near_reference(call, *backend.decode(call, softmax_scale=0), softmax_scale=0)
    for bad, error in ((math.nan, ValueError), (math.inf, ValueError), ("0.1", TypeError), (True, TypeError)):
        with pytest.raises(error, match="softmax_scale"):
            backend.decode(call, softmax_scale=bad)
    with pytest.raises(TypeError, match="softmax_scale"):
        backend.decode(call, softmax_scale=np.ones(1, F32))
    for name in ("num_splits", "group_size"):
        for good, bad in ((1, True), (64, 64.0), (64, "64"), (64, 1.5)):
            if (name, good) != ("group_size", 1):
                backend.decode(call | {name: good})  # a call that passed must not let its equal pass
            with pytest.raises(TypeError, match=name):
                backend.decode(call | {name: bad})
    backend.decode(call, batch_invariant=True)
    with pytest.raises(TypeError, match="batch_invariant"):
        backend.decode(call, batch_invariant=1)


def test_o29_torch_tensors_without_copying(cuda):
    torch = pytest.importorskip("torch")
    call = base()
    plain = cuda.decode(call)
    t = {k: torch.from_numpy(call[k]).cuda() for k in ("kv_indices", "kv_indptr", "kv_scales")}
    t["q"] = torch.from_numpy(call["q"].view(np.int16)).cuda().view(torch.bfloat16)
    t["unified_kv"] = torch.from_numpy(call["unified_kv"].view(np.uint8)).cuda().view(torch.float8_e4m3fn)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out, lse = paged_decode(**t, return_lse=True)
    assert out.dtype == torch.bfloat16
    assert out.device == t["q"].device
    grown = torch.cuda.memory_allocated() - before
    assert grown < 2**20, "the pool was copied"
    faults.same_bits(out.view(torch.int16).cpu().numpy(), plain[0].view(np.int16))
    faults.same_bits(lse.cpu().numpy(), plain[1])
    given = torch.full_like(t["q"], float("nan"))
    assert paged_decode(**t, out=given) is given
    faults.same_bits(given.view(torch.int16).cpu().numpy(), plain[0].view(np.int16))


@pytest.mark.parametrize("name", ["int4", "uint4", "float8_e3m4", "float8_e8m0fnu"])
def test_o29_dtypes_that_nobody_supports(name):
    call = base()
    strange = getattr(ml_dtypes, name, None)
    if strange is None:
        pytest.skip(f"this ml_dtypes has no {name}")
    for argument in ("q", "unified_kv", "kv_scales", "kv_indices"):
        with pytest.raises(TypeError, match=name):
            paged_decode(**call | {argument: np.zeros(call[argument].shape, strange)})


def test_o30_capsules_are_not_consumed_twice(backend):
    """A raw capsule is refused, however often, and stays usable; the same array serves any number of arguments."""
    call = backend.put(base())
    capsule = call["kv_indptr"].__dlpack__()
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match="kv_indptr"):
            paged_decode(**call | {"kv_indptr": capsule})
    assert "dltensor" in repr(capsule)
    assert "used_dltensor" not in repr(capsule)
    first, second = (backend.get(paged_decode(**call)) for _ in range(2))
    faults.same_bits(first, second)
    out = call["q"].copy()
    paged_decode(**call | {"q": out}, out=backend.put(np.empty(out.shape, BF16)))


@pytest.mark.parametrize("name", ["q", "kv_indices", "kv_scales", "attn_sink", "out"])
def test_o31_mixed_host_and_device(cuda, name):
    call = base() | {"attn_sink": np.zeros(16, F32), "out": np.empty((4, 16, 512), BF16)}
    with pytest.raises(TypeError, match=r"(cupy\.asarray\(.*\)|\.get\(\))"):
        paged_decode(**{k: v if k == name else cuda.put(v) for k, v in call.items()})


@pytest.mark.parametrize("value", [[[1.0]], 3.0, "q", object(), (1, 2)])
@pytest.mark.parametrize("name", ["q", "unified_kv", "kv_indices", "kv_indptr", "kv_scales"])
def test_o31_things_that_are_no_arrays(backend, value, name):
    with pytest.raises(TypeError, match=rf"{name} .*NumPy, CuPy"):
        paged_decode(**backend.put(base()) | {name: value})


def test_o31_torch_on_the_host_or_with_gradients(cuda):
    torch = pytest.importorskip("torch")
    call = cuda.put(base())
    with pytest.raises(TypeError, match=r"\.cuda\(\)"):
        paged_decode(**call | {"q": torch.zeros(4, 16, 512, dtype=torch.bfloat16)})
    with pytest.raises(TypeError, match=r"detach\(\)"):
        paged_decode(**call | {"q": torch.zeros(4, 16, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)})


def test_o31_numpy_scalars_and_missing_arguments(backend):
    call = backend.put(base())
    for name in ("q", "unified_kv", "kv_indices", "kv_indptr"):
        with pytest.raises(TypeError, match=rf"{name} is missing"):
            paged_decode(**call | {name: None})
    with pytest.raises(ValueError, match="kv_scales is missing"):
        paged_decode(**call | {"kv_scales": None})
