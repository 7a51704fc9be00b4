"""The Hopper kernel on a GPU, taken for every call here whatever `choose` thinks: against float64 and decode_mma."""

from __future__ import annotations

import warnings

import calls
import fuzz
import ml_dtypes
import numpy as np
import oracle
import pytest
from hopper import always_hopper

from cupy_paged import ops, paged_decode, workspace_size
from cupy_paged.backends import cuda, variants

pytestmark = pytest.mark.gpu
BF16, FP16 = ml_dtypes.bfloat16, np.float16


@pytest.fixture
def hopper(monkeypatch):
    if cuda.device_properties(cuda.current_device())[0] != "90":
        pytest.skip("not a Hopper GPU")
    monkeypatch.setattr(cuda, "choose", always_hopper)
    monkeypatch.setattr(cuda, "_prepared", {})
    monkeypatch.setattr(ops, "_calls", {})


def on_gpu(a):
    import cupy

    if not isinstance(a, np.ndarray):
        return a
    return cupy.asarray(a.view(np.uint8) if a.dtype == ml_dtypes.float8_e4m3fn else a)


def decode(call, **options):
    out, lse = paged_decode(**{k: on_gpu(v) for k, v in (call | options).items()}, return_lse=True)
    return out.get(), lse.get()


def draw(h, lengths, seed=5, **options):
    return calls.draw(np.random.default_rng(seed), t=len(lengths), h=h, d=512, lengths=lengths, **options)


RAGGED = [64, 65, 0, 0, 0, 0, 0, 1, 300, 63, 128, 2176, 129, 7]
SHAPES = {
    "ragged": (64, RAGGED, {"bad": 0.1}, {}),
    "33 heads": (33, RAGGED, {"bad": 0.1, "q_dtype": FP16}, {}),
    "128 heads": (128, RAGGED, {}, {}),
    "100 heads, one long row": (100, [20000], {}, {}),
    "many rows": (64, [65] * 700, {}, {}),
    "pages": (64, RAGGED, {"page_size": 16, "pages": 40}, {}),
    "splits": (128, [300, 5, 4000], {}, {"num_splits": 7}),
    "batch invariant": (64, [600, 5, 0, 1100], {}, {"batch_invariant": True}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_is_the_oracles_and_decode_mmas(hopper, monkeypatch, name):
    h, lengths, shape, options = SHAPES[name]
    call, sink = draw(h, lengths, **shape), np.linspace(-3, 3, h, dtype=np.float32)
    out, lse = decode(call, attn_sink=sink, **options)
    exact, exact_lse = calls.decode_call(call, sink)
    oracle.compare(out, exact, 2.5e-3)
    oracle.compare(lse, exact_lse, 1e-3)
    monkeypatch.setattr(cuda, "choose", variants.choose)
    monkeypatch.setattr(cuda, "_prepared", {})
    monkeypatch.setattr(ops, "_calls", {})
    portable, _ = decode(call, attn_sink=sink, **options)
    oracle.compare(out, portable.astype(np.float32), 3.5e-3)


def test_same_bits_200_times(hopper):
    call = draw(64, RAGGED)
    first = decode(call)
    put = {k: on_gpu(v) for k, v in call.items()}
    for _ in range(200):
        out, lse = paged_decode(**put, return_lse=True)
        assert out.get().tobytes() == first[0].tobytes()
        assert lse.get().tobytes() == first[1].tobytes()


def test_graph_replay_with_other_lists(hopper):
    import cupy

    call, other = draw(64, [200, 300]), draw(64, [490, 10], seed=6)
    put = {k: on_gpu(v) for k, v in call.items()}
    out = cupy.zeros_like(put["q"])
    workspace = cupy.empty(workspace_size(2, 64, 512, 505), "uint8")
    paged_decode(**put, out=out, workspace=workspace)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        paged_decode(**put, out=out, workspace=workspace)
        graph = stream.end_capture()
        for name in ("q", "unified_kv", "kv_scales", "kv_indices", "kv_indptr"):
            put[name][...] = on_gpu(other[name])
        graph.launch(stream)
        stream.synchronize()
    oracle.compare(out.get(), calls.decode_call(other)[0], 2.5e-3)


def test_nan_shows_where_it_is_listed(hopper):
    call = draw(64, [40, 40])
    call["kv_indices"] = np.arange(80, dtype=np.int32)
    clean, _ = decode(call)
    codes = call["unified_kv"].copy()
    codes.view(np.uint8)[50, 77] = 0x7F
    codes.view(np.uint8)[80:] = 0x7F
    out, _ = decode(call | {"unified_kv": codes})
    assert out[0].tobytes() == clean[0].tobytes()
    assert np.isnan(out[1, :, 77].astype(np.float32)).all()


def test_malformed_lists_end(hopper):
    call = draw(64, [100, 30, 7])
    low, high = -(2**31), 2**31 - 1
    for bad in ([0, 137, 5, 9], [high, low, 3, 137], [-5, 60, 20, 500]):
        hostile = call | {"kv_indptr": np.array(bad, np.int32)}
        hostile["kv_indices"] = np.resize(np.array([low, -1, 0, 299, 10**6, high], np.int32), 137)
        out, _ = decode(hostile, out=on_gpu(np.zeros(call["q"].shape, BF16)))
        assert np.isfinite(out.astype(np.float32)).all()
    oracle.compare(decode(call)[0], calls.decode_call(call)[0], 2.5e-3)


def test_fuzz(hopper):
    """Finite for any finite input, and within three times what decode_mma is allowed (its operands are rounded once)."""
    for seed in range(150):
        rng = np.random.default_rng(seed)
        call, options = {}, {}
        while not call or call["q"].shape[2] != 512 or call.get("group_size") != 64:
            call, options, _ = fuzz.decode_case(rng, 0.5)
        if call["kv_scales"].max() < 2.0**-80:
            continue  # loses bits there, as the kernel's head says
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exact, _, allowed, _ = fuzz.exact(call, options)
        out, lse = decode(call, **options)
        got = out.astype(np.float64)
        assert np.isfinite(got).all(), seed
        assert not np.isnan(lse).any(), seed
        most = float(ml_dtypes.finfo(out.dtype).max)
        assert np.linalg.norm(got - np.clip(exact, -most, most)) <= 3 * allowed, seed
