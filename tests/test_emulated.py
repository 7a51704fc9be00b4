"""The CUDA kernels, interpreted on the CPU, against the float64 oracle and the NumPy backend."""

from __future__ import annotations

import ctypes

import calls
import emulator
import fuzz
import ml_dtypes
import numpy as np
import oracle
import pytest
import test_ends
from hopper import always_hopper

from cupy_paged import (
    arrays,
    dequantize_kv,
    distributed,
    lists_from_padded,
    lists_from_page_table,
    merge_states,
    paged_decode,
    quantize_kv,
    store_kv,
)
from cupy_paged.backends import cuda, cuda_split, numpy_split

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(not emulator.available(), reason="the emulator is compiled with g++")

BF16, FP16 = ml_dtypes.bfloat16, np.float16


@pytest.fixture
def gpu(monkeypatch):
    from emulator import gpu as device

    made = device.Gpu()
    device.install(monkeypatch, made)
    yield made
    device.forget()  # nothing of this device is found by later tests


def decode(gpu, call, **more):
    moved = {k: gpu.array(v, writable=False) if isinstance(v, np.ndarray) else v for k, v in (call | more).items()}
    out, lse = paged_decode(**moved, return_lse=True)
    return gpu.numpy(out), gpu.numpy(lse)


SHAPES = {
    "512": {"h": 16, "d": 512},
    "ragged heads": {"h": 5, "d": 512},
    "pages": {"h": 16, "d": 512, "page_size": 4, "pages": 40},
    "fp16 q": {"h": 16, "d": 128, "q_dtype": FP16},
    "narrow": {"h": 3, "d": 64, "group": 32},
    "192": {"h": 20, "d": 192},
    "wide groups": {"h": 8, "d": 256, "group": 128},
    "bf16 pool": {"h": 16, "d": 256, "kv": "16"},
    "fp16 pool": {"h": 4, "d": 64, "kv": "16", "q_dtype": FP16},
}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SHAPES)
def test_decode_is_the_oracles(gpu, name, seed):
    """Ragged and empty rows, skipped and hostile slots, with a sink."""
    gpu.seed = seed
    rng = np.random.default_rng(3)
    call = calls.draw(rng, t=4, lengths=[70, 0, 1, 33], bad=0.1, **SHAPES[name])
    sink = rng.standard_normal(call["q"].shape[1]).astype(np.float32)
    out, lse = decode(gpu, call, attn_sink=sink)
    exact, exact_lse = calls.decode_call(call, sink)
    oracle.compare(out, exact, 2.5e-3)
    oracle.compare(lse, exact_lse, 1e-3)
    assert "decode_mma" in gpu.launches


@pytest.mark.parametrize("seed", range(2))
def test_decode_with_divided_rows(gpu, seed):
    gpu.seed = seed
    call = calls.draw(np.random.default_rng(4), t=2, h=2, d=128, lengths=[300, 90])
    out, lse = decode(gpu, call, batch_invariant=bool(seed))
    exact, exact_lse = calls.decode_call(call)
    oracle.compare(out, exact, 2.5e-3)
    oracle.compare(lse, exact_lse, 1e-3)


def test_quantize_and_back_are_the_numpy_backends(gpu):
    rng = np.random.default_rng(5)
    rows = (rng.standard_normal((9, 128)) * 10.0 ** rng.uniform(-3, 3, (9, 1))).astype(BF16)
    rows[2] = 0
    expected = quantize_kv(rows)
    got = quantize_kv(gpu.array(rows))
    np.testing.assert_array_equal(gpu.numpy(got.codes).view(np.uint8), expected.codes.view(np.uint8))
    np.testing.assert_array_equal(gpu.numpy(got.scales), expected.scales)
    back = dequantize_kv(got.codes, got.scales, "bfloat16")
    exact = dequantize_kv(expected.codes, expected.scales, "bfloat16")
    np.testing.assert_array_equal(gpu.numpy(back).view(np.uint16), exact.view(np.uint16))


@pytest.mark.parametrize("page_size", [1, 16])
def test_store_is_the_numpy_backends(gpu, page_size):
    rng = np.random.default_rng(6)
    shape = (32, 128) if page_size == 1 else (4, page_size, 128)
    codes = rng.integers(0, 100, shape).astype(np.uint8)
    scales = np.full((shape[0], 2), 0.5, np.float32)
    rows = rng.standard_normal((7, 128)).astype(BF16)
    slots = np.array([3, 1, -1, 3, 30, 999, 17], np.int32)
    mine = (gpu.array(codes), gpu.array(scales))
    store_kv(*mine, gpu.array(slots), gpu.array(rows))
    store_kv(codes, scales, slots, rows)
    np.testing.assert_array_equal(gpu.numpy(mine[0]), codes)
    np.testing.assert_array_equal(gpu.numpy(mine[1]), scales)


@pytest.mark.parametrize("far", [1.0, 90.0])  # expf clamps arguments below -87
def test_merge_is_the_numpy_backends(gpu, far):
    rng = np.random.default_rng(7)
    outs = [rng.standard_normal((3, 4, 64)).astype(np.float32) for _ in range(3)]
    lses = [rng.standard_normal((3, 4)).astype(np.float32) for _ in range(3)]
    lses[1][0] = -np.inf
    lses = [np.float32(far) * e for e in lses]
    sink = rng.standard_normal(4).astype(np.float32)
    expected = merge_states(outs, lses, sink)
    got = merge_states([gpu.array(o) for o in outs], [gpu.array(e) for e in lses], gpu.array(sink))
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(gpu.numpy(mine), theirs, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("size", "lengths"), [(1, [5]), (3, [0, 2500, 0, 1, 1600, 30]), (8, [4100] + 20 * [3])])
def test_split_lists_are_the_numpy_backends(gpu, size, lengths):
    rng = np.random.default_rng(9)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    indices = rng.integers(-3, 4 * 37 + 3, int(indptr[-1]), dtype=np.int32)
    shapes = len(indices), len(indptr), cuda_split.chunks(len(indices))
    for rank in {0, size // 2, size - 1}:
        both = []
        for split, put in ((numpy_split.split, np.array), (cuda_split.split, gpu.array)):
            made = [put(a) for a in (indices, indptr, *[np.zeros(n, np.int32) for n in shapes])]
            split(*[arrays.view("", a) for a in made], (rank, size, 4, 4 * 37), 0)
            both.append(made[2:4])
        for expected, got in zip(*both, strict=True):
            np.testing.assert_array_equal(gpu.numpy(got), expected)


@pytest.mark.parametrize("indptr", [[5, 3, -7, 9], [0, 2**31 - 1, 4, -(2**31)], [100, 100, 100, 100]])
def test_split_of_malformed_lists_stays_in_its_arrays(gpu, indptr):
    made = [np.arange(50, dtype=np.int32), np.array(indptr, np.int32), np.zeros(50, np.int32)]
    made += [np.zeros(4, np.int32), np.zeros(1, np.int32)]
    put = [gpu.array(a) for a in made]
    cuda_split.split(*[arrays.view("", a) for a in put], (0, 2, 1, 50), 0)
    numpy_split.split(*[arrays.view("", a) for a in made], (0, 2, 1, 50), 0)
    for got, expected in zip(put[2:4], made[2:4], strict=True):
        np.testing.assert_array_equal(gpu.numpy(got), expected)


class InTurn:
    """A rank of several that run one after the other: the last one has everybody's parts."""

    def __init__(self, rank, size, sent):
        self.rank, self.size, self._sent, self._calls = rank, size, sent, 0

    def _exchange(self, send, receive, first, count):
        parts = self._sent.setdefault(self._calls, {})
        self._calls += 1
        parts[self.rank] = ctypes.string_at(send.data.ptr, send.nbytes)
        for r, part in parts.items():
            ctypes.memmove(receive.data.ptr + r * count, part[first : first + count], count)

    def all_gather(self, send, receive, stream):
        self._exchange(send, receive, 0, send.nbytes)

    def all_to_all(self, send, receive, stream):
        share = send.nbytes // self.size
        self._exchange(send, receive, self.rank * share, share)


@pytest.mark.parametrize("layout", ["all", "tokens"])
@pytest.mark.parametrize(("size", "pages"), [(1, 37), (3, 37), (3, 2)])  # a rank of the last has no page
def test_decode_over_ranks_is_the_oracles(gpu, monkeypatch, size, pages, layout):
    monkeypatch.setattr(distributed.ShardedKV, "_agree", lambda self, *shape: None)
    call = calls.draw(np.random.default_rng(10), t=3, h=4, d=128, lengths=[60, 0, 9], bad=0.1, pages=pages)
    sink = np.linspace(-1, 1, 4, dtype=np.float32)
    sent = {}
    for rank in range(size):
        own = [gpu.array(call[name][rank::size]) for name in ("unified_kv", "kv_scales")]
        pool = distributed.ShardedKV.from_arrays(InTurn(rank, size, sent), pages, *own)
        out, lse = pool.decode(
            *[gpu.array(call[n]) for n in ("q", "kv_indices", "kv_indptr")], gpu.array(sink), layout=layout
        )
    mine = slice(None) if layout == "all" else slice(3 - 3 // size, 3)  # the last rank's tokens
    exact, exact_lse = calls.decode_call(call, sink)
    oracle.compare(gpu.numpy(out), exact[mine], 2.5e-3)
    oracle.compare(gpu.numpy(lse), exact_lse[mine], 1e-3)


def test_an_access_outside_the_arrays_is_found(gpu):
    call = calls.draw(np.random.default_rng(8), t=1, h=1, d=64, lengths=[40])
    gpu.array(call["q"])
    paged_decode_arguments = {k: gpu.array(v) if isinstance(v, np.ndarray) else v for k, v in call.items()}
    pool = paged_decode_arguments["unified_kv"].data.ptr
    gpu.arrays = [a for a in gpu.arrays if a.ctypes.data != pool]
    with pytest.raises(emulator.EmulationError, match="load from global memory outside every array"):
        paged_decode(**paged_decode_arguments)


@pytest.mark.parametrize("seed", range(6))
def test_decode_of_fuzzed_calls(gpu, seed):
    """Any shapes, values up to the ends of the formats, lists, sinks and splits; NaN around all arrays."""
    gpu.seed = seed
    call, options, _ = fuzz.decode_case(np.random.default_rng(seed), 0.1)
    out, lse = decode(gpu, call, **options)
    fuzz.compare("emulated", out, lse, fuzz.exact(call, options))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_decode_of_more_fuzzed_calls(gpu, seed):
    test_decode_of_fuzzed_calls(gpu, seed)


@pytest.mark.parametrize("fp8", [True, False])
def test_malformed_lists_reach_no_other_memory(gpu, fp8):
    """Whatever stands in kv_indptr and kv_indices, no access leaves the arrays, and results are finite."""
    rng = np.random.default_rng(11)
    call = calls.draw(rng, t=5, h=3, d=128, lengths=[9] * 5, kv="fp8" if fp8 else "16", pages=12)
    call["kv_indptr"] = np.array([-5, 2**31 - 1, 3, -(2**31), 40, 7], np.int32)
    call["kv_indices"] = rng.choice([-(2**31), -1, 0, 11, 12, 2**31 - 1], len(call["kv_indices"])).astype(np.int32)
    out, _ = decode(gpu, call)
    assert np.isfinite(out.astype(np.float32)).all()


def test_nan_reaches_its_token_alone(gpu):
    rng = np.random.default_rng(12)
    call = calls.draw(rng, t=2, h=3, d=64, lengths=[20, 20], pages=64)
    call["kv_indices"] = rng.permutation(64).astype(np.int32)[:40]
    clean, _ = decode(gpu, call)
    call["unified_kv"].view(np.uint8)[call["kv_indices"][3], 5] = 0x7F
    out, _ = decode(gpu, call)
    assert np.isnan(out[0, :, 5].astype(np.float32)).all()
    np.testing.assert_array_equal(out[1].view(np.uint16), clean[1].view(np.uint16))


@pytest.mark.parametrize("name", ["int32", "int64"])
def test_lists_are_the_numpy_backends(gpu, name):
    rng = np.random.default_rng(13)
    padded = rng.integers(-2, 40, (5, 7)).astype(name)
    lens = rng.integers(0, 7 * 4 + 1, 5).astype(name)
    for expected, got in (
        (lists_from_padded(padded), lists_from_padded(gpu.array(padded))),
        (lists_from_page_table(padded, lens, 4), lists_from_page_table(gpu.array(padded), gpu.array(lens), 4)),
    ):
        for mine, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(gpu.numpy(mine), theirs)


@pytest.mark.parametrize("softmax_scale", [0.0, -3e38, 3e38])
def test_any_softmax_scale(gpu, softmax_scale):
    rng = np.random.default_rng(3)
    call = test_ends.call_of(rng, test_ends.q_values(rng, "normal", 5, BF16), *test_ends.fp8_pool(rng, "normal"))
    out, lse = decode(gpu, call, softmax_scale=softmax_scale)
    fuzz.compare("emulated", out, lse, fuzz.exact(call, {"softmax_scale": softmax_scale}))


@pytest.mark.parametrize(
    ("q_kind", "kind"),
    [
        ("largest", "largest"),
        ("one head largest", "largest scale"),
        ("subnormal", "all magnitudes"),
        ("largest of one sign", "smallest"),
        ("normal", "zeros beside large"),
    ],
)
def test_ends_of_the_formats(gpu, q_kind, kind):
    """A few of test_ends.py, FP8 and bf16 pools, undivided and in three splits with a sink."""
    rng = np.random.default_rng(1)
    q = test_ends.q_values(rng, q_kind, 5, BF16)
    pools = [test_ends.fp8_pool(rng, kind), (test_ends.rows_16(rng, kind if "large" not in kind else "largest", BF16),)]
    for pool in pools:
        call = test_ends.call_of(rng, q, *pool)
        for options in ({}, {"num_splits": 3, "attn_sink": np.array([-np.inf, np.inf, 3e38, -3e38, 0], np.float32)}):
            out, lse = decode(gpu, call, **options)
            fuzz.compare("emulated", out, lse, fuzz.exact(call, options))


HOPPER = {
    "ragged": ({"lengths": [64, 65, 0, 0, 0, 0, 0, 1, 300, 63, 128], "h": 64, "bad": 0.1}, {}),
    "100 heads, long": ({"lengths": [1500], "h": 100}, {}),
    "40 heads, many short rows": ({"lengths": [5] * 12, "h": 40, "q_dtype": FP16}, {}),
    "pages, splits": ({"lengths": [100, 300], "h": 128, "page_size": 4, "pages": 40}, {"num_splits": 3}),
    "batch invariant": ({"lengths": [600, 5, 0, 1100], "h": 33}, {"batch_invariant": True}),
}


@pytest.fixture
def hopper(gpu, monkeypatch):
    """Every call takes the Hopper kernel."""
    monkeypatch.setattr(cuda, "choose", always_hopper)
    return gpu


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_decode(hopper, name, seed):
    hopper.seed = seed
    shape, options = HOPPER[name]
    call = calls.draw(np.random.default_rng(5), t=len(shape["lengths"]), d=512, **shape)
    sink = np.linspace(-3, 3, shape["h"], dtype=np.float32)
    out, lse = decode(hopper, call, attn_sink=sink, **options)
    assert hopper.launches[0] == "decode_wgmma"
    exact, exact_lse = calls.decode_call(call, sink)
    oracle.compare(out, exact, 2.5e-3)
    oracle.compare(lse, exact_lse, 1e-3)


def test_hopper_with_malformed_lists(hopper):
    """Reads nothing else, ends, and the next call is right."""
    call = calls.draw(np.random.default_rng(5), t=3, h=64, d=512, lengths=[100, 30, 7])
    low, high = -(2**31), 2**31 - 1
    zeros = np.zeros(call["q"].shape, BF16)
    for bad in ([0, 137, 5, 9], [high, low, 3, 137], [-5, 60, 20, 500]):
        hostile = call | {"kv_indptr": np.array(bad, np.int32)}
        hostile["kv_indices"] = np.resize(np.array([low, -1, 0, 299, 10**6, high], np.int32), 137)
        target = hopper.array(zeros)  # rows may stay unwritten
        moved = {k: hopper.array(v) if isinstance(v, np.ndarray) else v for k, v in hostile.items()}
        paged_decode(**moved, out=target)
        assert np.isfinite(hopper.numpy(target).astype(np.float32)).all()
    oracle.compare(decode(hopper, call)[0], calls.decode_call(call)[0], 2.5e-3)


def test_hopper_shows_nan_where_it_is_listed(hopper):
    call = calls.draw(np.random.default_rng(5), t=2, h=64, d=512, lengths=[40, 40])
    call["kv_indices"] = np.arange(80, dtype=np.int32)
    clean, _ = decode(hopper, call)
    codes = call["unified_kv"].copy()
    codes.view(np.uint8)[50, 77] = 0x7F
    codes.view(np.uint8)[80:] = 0x7F
    out, _ = decode(hopper, call | {"unified_kv": codes})
    assert out[0].tobytes() == clean[0].tobytes()
    assert np.isnan(out[1, :, 77].astype(np.float32)).all()


@pytest.mark.parametrize(
    "seed", [1040, 1054, 1131, 1195, *(pytest.param(s, marks=pytest.mark.slow) for s in range(12))]
)
def test_hopper_at_the_ends_of_the_formats(hopper, seed):
    """Finite whatever finite values it is given; as exact as decode_mma but for tiny rows and sharp softmax (its head)."""
    rng = np.random.default_rng(seed)
    call, options = {}, {}
    while not call or call["q"].shape[2] != 512 or call.get("group_size") != 64:
        call, options, _ = fuzz.decode_case(rng, 0.5)
    out, lse = decode(hopper, call, **options)
    assert np.isfinite(out.astype(np.float32)).all()
    assert not np.isnan(lse).any()
