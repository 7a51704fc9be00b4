"""CUDA decode against the NumPy backend and the float64 oracle, over shapes, strides, dtypes and modes."""

from __future__ import annotations

import gc
import threading

import numpy as np
import oracle
import pytest
from calls import BF16, decode_call, draw, to_gpu

import cupy_paged
from cupy_paged import paged_decode

pytestmark = pytest.mark.gpu

# Relative Frobenius error against float64 on the dequantised pool. The output's own rounding alone gives 1.7e-3 in
# bf16 and 2e-4 in fp16; 16-bit pools add the rounding of the probabilities to the pool's type.
BOUND = {("bfloat16", "fp8"): 2.5e-3, ("float16", "fp8"): 1e-3, ("bfloat16", "16"): 2.8e-3, ("float16", "16"): 1e-3}


def close(call, out, lse, kv, sink=None):
    """Out and lse of a CUDA call against the oracle."""
    q_name = call["q"].dtype.name
    exact, exact_lse = decode_call(call, sink)
    oracle.compare(out, exact, BOUND[q_name, kv])
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-4, atol=2e-3)


def check(call, kv, **options):
    out, lse = paged_decode(**to_gpu(call), return_lse=True, **to_gpu(options))
    close(call, out.get(), lse.get(), kv, options.get("attn_sink"))
    return out, lse


def random_lengths(rng, t):
    kinds = [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300, 700]
    return rng.choice(kinds, t)


# D, group, pool, q, page_size: each is a kernel of its own, compiled in about a second.
CONFIGURATIONS = [
    (512, 64, "fp8", BF16, 1),
    (512, 64, "fp8", np.float16, 1),
    (512, 64, "fp8", BF16, 64),
    (512, 32, "fp8", BF16, 1),
    (512, 128, "fp8", np.float16, 3),
    (512, 64, "16", BF16, 1),
    (512, 64, "16", np.float16, 16),
    (448, 64, "fp8", BF16, 1),
    (384, 128, "fp8", BF16, 16),
    (320, 32, "fp8", np.float16, 1),
    (256, 64, "fp8", BF16, 1),
    (192, 64, "16", BF16, 1),
    (128, 64, "fp8", BF16, 3),
    (128, 128, "16", np.float16, 1),
    (64, 32, "fp8", BF16, 1),
    (64, 64, "16", BF16, 3),
]


@pytest.mark.parametrize("seed", range(320))
def test_random_call(seed):
    """Any supported combination agrees with float64, and with the NumPy backend."""
    rng = np.random.default_rng(seed)
    d, group, kv, q_dtype, page_size = CONFIGURATIONS[seed % len(CONFIGURATIONS)]
    t = int(rng.choice([1, 2, 3, 7, 40]))
    h = int(rng.choice([1, 2, 3, 8, 12, 16, 17, 24, 32, 33, 40, 48, 64, 65, 100, 128]))
    call = draw(
        rng, t=t, h=h, d=d, lengths=random_lengths(rng, t), page_size=page_size, q_dtype=q_dtype, kv=kv,
        group=group, bad=rng.choice([0.0, 0.0, 0.3, 1.0]),
    )  # fmt: skip
    options = {}
    if rng.random() < 0.4:
        options["attn_sink"] = rng.standard_normal(h).astype(np.float32) * 4
    if rng.random() < 0.4:
        options["num_splits"] = int(rng.choice([1, 2, 5, 32]))
    if rng.random() < 0.3:
        options["batch_invariant"] = True
    out, lse = check(call, kv, **options)
    host, host_lse = paged_decode(**call, return_lse=True, **options)
    oracle.compare(out.get(), np.asarray(host, np.float64), 2 * BOUND[call["q"].dtype.name, kv])
    np.testing.assert_allclose(lse.get(), host_lse, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("h", [16, 128])
def test_strides(h):
    """Padded pools, scales, q and out, negative token strides, give the bits of contiguous copies."""
    import cupy

    rng = np.random.default_rng(h)
    call = draw(rng, t=6, h=h, d=512, lengths=[64, 0, 100, 33, 5, 300])
    gpu = to_gpu(call)
    plain = paged_decode(**gpu)
    for pad in (64, 4, 8):
        buffer = cupy.zeros((257, 512 + pad), "uint8")
        buffer[:, :512] = gpu["unified_kv"]
        scales = cupy.zeros((257, 17), "float32")
        scales[:, 8:16] = gpu["kv_scales"]
        q = cupy.zeros((6, h + 2, 640), BF16)
        q[:, 1 : h + 1, 64:576] = gpu["q"]
        out = cupy.zeros((6, h, 1024), BF16)[:, :, 256:768]
        got = paged_decode(
            q[:, 1 : h + 1, 64:576],
            buffer[:, :512],
            gpu["kv_indices"],
            gpu["kv_indptr"],
            kv_scales=scales[:, 8:16],
            out=out,
        )
        assert got is out
        assert (got.view("uint16") == plain.view("uint16")).all()
    backwards = paged_decode(**{**gpu, "q": gpu["q"][:, ::-1]})
    oracle.compare(backwards[:, ::-1].get(), plain.get().astype(np.float64), 2.5e-3)


@pytest.mark.parametrize("h", [8, 64])
def test_unaligned_rows(h):
    """q and out may begin at any element; lists with strides are refused by name."""
    import cupy

    rng = np.random.default_rng(h)
    gpu = to_gpu(draw(rng, t=3, h=h, d=512, lengths=[40, 50, 60]))
    plain = paged_decode(**gpu)
    q = cupy.zeros((3, h, 513), BF16)[:, :, 1:]
    q[...] = gpu["q"]
    out = cupy.zeros((3, h, 515), BF16)[:, :, 3:]
    paged_decode(**{**gpu, "q": q}, out=out)
    assert (out.view("uint16") == plain.view("uint16")).all()
    for name in ("kv_indices", "kv_indptr"):
        with pytest.raises(ValueError, match=name):
            paged_decode(**{**gpu, name: cupy.repeat(gpu[name], 2)[::2]})


@pytest.mark.parametrize("h", [8, 16, 32, 64, 128])
def test_batch_invariant(h):
    """A token's bits are the same alone, in any batch and at any position."""
    import cupy

    rng = np.random.default_rng(h)
    lengths = rng.choice([1, 64, 100, 1536, 2176, 5000], 40)
    lengths[[0, 17, 39]] = 1536
    call = draw(rng, t=40, h=h, d=512, lengths=lengths, pages=4096)
    gpu = to_gpu(call)
    batch = paged_decode(**gpu, batch_invariant=True)
    for t in (0, 3, 17, 39):
        a, b = call["kv_indptr"][t : t + 2]
        alone = paged_decode(
            gpu["q"][t : t + 1], gpu["unified_kv"], gpu["kv_indices"][a:b], cupy.asarray([0, b - a], "int32"),
            kv_scales=gpu["kv_scales"], batch_invariant=True,
        )  # fmt: skip
        assert (alone.view("uint16") == batch[t : t + 1].view("uint16")).all(), t
    close(call, batch.get(), paged_decode(**gpu, batch_invariant=True, return_lse=True)[1].get(), "fp8")


@pytest.mark.parametrize("h", [16, 128])
def test_repeated_bits(h):
    rng = np.random.default_rng(h)
    gpu = to_gpu(draw(rng, t=9, h=h, d=512, lengths=random_lengths(rng, 9), pages=2048))
    first = paged_decode(**gpu).view("uint16").copy()
    for _ in range(200):
        assert (paged_decode(**gpu).view("uint16") == first).all()


@pytest.mark.parametrize("h", [16, 64, 128])
def test_graph_replay_with_other_contents(h):
    """Captured at lengths of 1, replayed with other indices, lengths and q, empty rows included."""
    import cupy

    rng = np.random.default_rng(h)
    call = draw(rng, t=4, h=h, d=512, lengths=[2000] * 4, pages=4096)
    gpu = to_gpu(call)
    cupy_paged.warmup(4, h, 512, len(call["kv_indices"]))
    workspace = cupy.empty(cupy_paged.workspace_size(4, h, 512, len(call["kv_indices"])), "uint8")
    out = cupy.empty_like(gpu["q"])
    buffers = {**gpu, "kv_indptr": cupy.asarray([0, 1, 2, 3, 4], "int32")}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        paged_decode(**buffers, out=out, workspace=workspace)
        graph = stream.end_capture()
        for lengths in ([2000] * 4, [0, 5000, 0, 64], [1, 1, 1, 1], [0, 0, 0, 0]):
            indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            fresh = {**call, "q": rng.standard_normal(call["q"].shape).astype(BF16), "kv_indptr": indptr}
            buffers["q"].set(fresh["q"])
            buffers["kv_indptr"].set(indptr)
            out.fill(float("nan"))
            graph.launch()
            exact, _ = decode_call(fresh)
            oracle.compare(out.get(), exact, 2.5e-3)


def test_first_call_inside_a_capture_is_refused():
    import cupy

    from cupy_paged import jit
    from cupy_paged.backends import cuda

    gpu = to_gpu(draw(np.random.default_rng(0), t=1, h=5, d=192, lengths=[10]))
    cuda._prepared.clear()
    jit.load.cache_clear()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="warmup"):
            paged_decode(**gpu)
        stream.end_capture()
        out = paged_decode(**gpu)
        stream.synchronize()
    assert bool(cupy.isfinite(out.astype("float32")).all())


def test_streams_and_threads():
    """Two threads on two streams give the bits of serial calls."""
    import cupy

    rng = np.random.default_rng(5)
    calls = [to_gpu(draw(rng, t=5, h=16, d=512, lengths=random_lengths(rng, 5), pages=512)) for _ in range(2)]
    serial = [paged_decode(**c).view("uint16").copy() for c in calls]
    cupy.cuda.Device().synchronize()
    failures = []

    def work(i):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(100):
                out = paged_decode(**calls[i])
                stream.synchronize()
                if not (out.view("uint16") == serial[i]).all():
                    failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_pool_beyond_two_to_the_31_elements():
    """Slots past 2^31 bytes give the bits of the same rows in a small pool."""
    import cupy

    rng = np.random.default_rng(3)
    pages = 2**22 + 64
    if cupy.cuda.runtime.memGetInfo()[0] < 6 << 30:
        pytest.skip("needs 6 GB of GPU memory")
    call = draw(rng, t=2, h=16, d=512, lengths=[40, 24], pages=64)
    gpu = to_gpu(call)
    small = paged_decode(**gpu)
    codes, scales = cupy.zeros((pages, 512), "uint8"), cupy.zeros((pages, 8), "float32")
    codes[2**22 :], scales[2**22 :] = gpu["unified_kv"], gpu["kv_scales"]
    far = paged_decode(
        **{**gpu, "unified_kv": codes, "kv_scales": scales, "kv_indices": gpu["kv_indices"] + np.int32(2**22)}
    )
    assert (far.view("uint16") == small.view("uint16")).all()
    del codes, scales, far
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("h", [16, 64, 128])
def test_nothing_leaks_from_unused_slots(h):
    """NaN codes and infinite scales in every slot that no token lists, and in skipped ones, change no bit."""
    import cupy

    rng = np.random.default_rng(h)
    call = draw(rng, t=4, h=h, d=512, lengths=[70, 1, 130, 64], pages=600)
    call["kv_indices"] = np.concatenate([rng.permutation(300)[: len(call["kv_indices"])]]).astype(np.int32)
    call["kv_indices"][::7] = -1
    gpu = to_gpu(call)
    clean = paged_decode(**gpu)
    used = np.unique(call["kv_indices"][: call["kv_indptr"][-1]])
    unused = np.setdiff1d(np.arange(600), used[used >= 0])
    gpu["unified_kv"][cupy.asarray(unused)] = 0x7F
    gpu["kv_scales"][cupy.asarray(unused)] = float("inf")
    assert (paged_decode(**gpu).view("uint16") == clean.view("uint16")).all()


@pytest.mark.parametrize("h", [16, 64, 128])
def test_nan_stays_with_its_tokens(h):
    import cupy

    rng = np.random.default_rng(h)
    call = draw(rng, t=3, h=h, d=512, lengths=[70, 70, 70], pages=300)
    call["kv_indices"] = rng.permutation(300)[: len(call["kv_indices"])].astype(np.int32)
    gpu = to_gpu(call)
    clean = paged_decode(**gpu)
    gpu["unified_kv"][int(call["kv_indices"][100]), 17] = 0x7F
    out = paged_decode(**gpu)
    assert bool(
        cupy.isnan(out[1].astype("float32")).all(axis=-1).all() or cupy.isnan(out[1, :, 17].astype("float32")).all()
    )
    assert (out[0::2].view("uint16") == clean[0::2].view("uint16")).all()


@pytest.mark.parametrize("h", [4, 16, 32, 64, 128])
@pytest.mark.parametrize(
    ("scale_range", "q_scale"),
    [((-6, 6), 1e-5), ((-6, 6), 1e-3), ((-30, -25), 1.0), ((-3, 0), 1e4), ((30, 34), 1e-3)],
)
def test_extreme_scales(h, scale_range, q_scale):
    """The error bound holds for group scales spread over many decades, with tiny and large q."""
    rng = np.random.default_rng(h)
    call = draw(rng, t=2, h=h, d=512, lengths=[200, 77], pages=300)
    call["kv_scales"] = (10.0 ** rng.uniform(*scale_range, call["kv_scales"].shape)).astype(np.float32)
    call["q"] = (rng.standard_normal(call["q"].shape) * q_scale).astype(BF16)
    gpu = to_gpu(call)
    scale = 1.0 if scale_range[0] < 10 else 1e-30
    out = paged_decode(**gpu, softmax_scale=scale)
    exact, _ = decode_call(call, softmax_scale=scale)
    oracle.compare(out.get(), exact, 2.5e-3)


@pytest.mark.parametrize("h", [16, 128])
def test_malformed_indptr_is_harmless(h):
    import cupy

    rng = np.random.default_rng(h)
    gpu = to_gpu(draw(rng, t=5, h=h, d=512, lengths=[50] * 5))
    good = paged_decode(**gpu)
    for bad in ([5, 4, 3, 2, 1, 0], [0, -5, 2**31 - 1, -(2**31), 7, 9], [0, 10, 20, 30, 40, 10**9], [-1] * 6):
        for options in ({}, {"num_splits": 3}, {"batch_invariant": True}):
            paged_decode(**{**gpu, "kv_indptr": cupy.asarray(bad, "int32")}, **options)
    cupy.cuda.Device().synchronize()
    assert (paged_decode(**gpu).view("uint16") == good.view("uint16")).all()


def test_long_row_beside_short_ones():
    rng = np.random.default_rng(1)
    lengths = [65536 if i == 11 else 128 for i in range(64)]
    check(draw(rng, t=64, h=16, d=512, lengths=lengths, pages=70000), "fp8")


@pytest.mark.parametrize("h", [8, 128])
def test_many_tokens(h):
    """More rows than any grid limit but x."""
    import cupy

    rng = np.random.default_rng(h)
    t = 65537
    gpu = to_gpu(draw(rng, t=t, h=h, d=64, lengths=[2] * t))
    out = paged_decode(**gpu)
    split = paged_decode(**gpu, num_splits=2)
    for t in (0, 40000, 65536):
        one = paged_decode(
            gpu["q"][t : t + 1], gpu["unified_kv"], gpu["kv_indices"][2 * t : 2 * t + 2], cupy.asarray([0, 2], "int32"),
            kv_scales=gpu["kv_scales"],
        )  # fmt: skip
        for got in (out, split):
            oracle.compare(got[t : t + 1].get(), one.get().astype(np.float64), 2.5e-3)
