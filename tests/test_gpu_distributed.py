"""`cupy_paged.distributed` on GPUs: the split on the device, NCCL with one rank, and with as many as there are GPUs."""

from __future__ import annotations

import threading

import numpy as np
import oracle
import pytest
from test_distributed import case, lists_of, mine

import cupy_paged
from cupy_paged import arrays, bench_ranks, distributed

pytestmark = pytest.mark.gpu


def on_gpu(a):
    import cupy

    return None if a is None else cupy.asarray(a.view("uint8") if a.dtype.name == "float8_e4m3fn" else a)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(("tokens", "most"), [(1, 1), (1, 5000), (7, 900), (300, 40), (40, 0)])
def test_split_is_numpys(size, tokens, most):
    import cupy

    from cupy_paged.backends import cuda_split

    _, _, _, indices, indptr, _ = case(2, tokens=tokens, most=most + 1, page_size=4)
    stream = cupy.cuda.get_current_stream().ptr
    for rank in range(size):
        out, bounds = cupy.empty(len(indices), "int32"), cupy.empty(tokens + 1, "int32")
        counts = cupy.empty(cuda_split.chunks(len(indices)), "int32")
        given = [arrays.view("", a) for a in (on_gpu(indices), on_gpu(indptr), out, bounds, counts)]
        cuda_split.split(*given, (rank, size, 4, 37 * 4), stream)
        flat, want = lists_of(rank, size, indices, indptr, 37, 4)
        assert bounds.get().tolist() == want.tolist()
        assert out.get()[: len(flat)].tolist() == flat.tolist()
        assert (out.get()[len(flat) :] == -1).all()


@pytest.mark.parametrize("indptr", [[5, 3, -7, 9], [0, 2**31 - 1, 4, -(2**31)], [100, 100, 100, 100]])
def test_malformed_lists_stay_in_bounds(indptr):
    import cupy

    from cupy_paged.backends import cuda_split

    guarded = cupy.full(64 + 50 + 64, -77, "int32")
    indices = cupy.arange(50, dtype="int32")
    bounds, counts = cupy.empty(4, "int32"), cupy.empty(1, "int32")
    given = [indices, cupy.asarray(indptr, "int32"), guarded[64:114], bounds, counts]
    cuda_split.split(*(arrays.view("", a) for a in given), (0, 2, 1, 50), cupy.cuda.get_current_stream().ptr)
    assert ((bounds >= 0) & (bounds <= 25)).all()
    assert (guarded[:64] == -77).all()
    assert (guarded[114:] == -77).all()


def nccl(count):
    cuda = pytest.importorskip("cupy.cuda")
    if not cuda.nccl.available:
        pytest.skip("this CuPy has no NCCL")
    return cuda.nccl.NcclCommunicator.initAll(count)


def one_rank(make):
    import cupy

    q, codes, scales, indices, indptr, sink = case(4, tokens=5, heads=16, head_dim=512, pages=300, most=200)
    want = cupy_paged.paged_decode(q, codes, indices, indptr, sink, kv_scales=scales)
    put = [on_gpu(a) for a in (q, indices, indptr, sink)]
    pool = distributed.ShardedKV.from_arrays(make(), 300, on_gpu(codes), on_gpu(scales))
    for layout in distributed.LAYOUTS:
        out, lse = pool.decode(*put, layout=layout)
        oracle.compare(out.get(), want.astype("float32"), 3.5e-3)
        assert lse.shape == (5, 16)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            captured, _ = pool.decode(*put, layout=layout)
            graph = stream.end_capture()
            captured.fill(0)
            graph.launch(stream)
            stream.synchronize()
        assert captured.get().tobytes() == out.get().tobytes()


def test_nccl_with_one_rank_eager_and_captured():
    one_rank(lambda: nccl(1)[0])


def test_torch_process_group_with_one_rank(tmp_path):
    torch = pytest.importorskip("torch")
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        one_rank(distributed.Torch)
    finally:
        torch.distributed.destroy_process_group()


def test_store_on_a_gpu():
    import cupy

    rng = np.random.default_rng(3)
    kv = cupy.asarray(rng.standard_normal((20, 512), dtype="float32"))
    slots = cupy.asarray(rng.permutation(20).astype("int32"))
    whole = cupy_paged.PagedKV(20, device="cuda")
    whole.store(slots, kv)
    for rank in range(3):

        class Alone:
            size = 3
            all_gather = all_to_all = None

        Alone.rank = rank
        pool = distributed.ShardedKV(Alone, 7, device="cuda")
        pool.grow(20)
        pool.store(slots, kv)
        assert (pool.local.codes == whole.codes[rank::3]).all()


def test_store_takes_long_and_strided_slots_and_refuses_host_ones():
    import cupy

    rng = np.random.default_rng(3)
    kv = cupy.asarray(rng.standard_normal((20, 512), dtype="float32"))
    slots = rng.permutation(20)
    whole = cupy_paged.PagedKV(20, device="cuda")
    whole.store(cupy.asarray(slots), kv)
    pool = distributed.ShardedKV(nccl(1)[0], 20, device="cuda")
    with pytest.raises(TypeError, match=r"slots is in host memory"):
        pool.store(slots.astype("int32"), kv)
    for given in (cupy.asarray(slots), cupy.asarray(np.repeat(slots, 2).astype("int32"))[::2]):
        pool.local.codes.fill(0)
        pool.store(given, kv)
        assert (pool.local.codes == whole.codes).all()


@pytest.mark.parametrize("make", [lambda: nccl(1)[0], distributed.Torch])
def test_torch_tensors_on_torchs_streams(make, tmp_path):
    """On the default stream, whose address is 0, and on another one; results are tensors."""
    torch = pytest.importorskip("torch")
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        q, codes, scales, indices, indptr, sink = case(4, tokens=5, heads=16, head_dim=512, pages=300, most=200)
        want = cupy_paged.paged_decode(q, codes, indices, indptr, sink, kv_scales=scales)
        put = [torch.from_dlpack(on_gpu(a)) for a in (q.view("uint16"), indices, indptr, sink)]
        put[0] = put[0].view(torch.bfloat16)
        own = [torch.from_dlpack(on_gpu(a)) for a in (codes, scales)]
        pool = distributed.ShardedKV.from_arrays(make(), 300, *own)
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for layout in distributed.LAYOUTS:
                    out, lse = pool.decode(*put, layout=layout)
                    assert isinstance(out, torch.Tensor)
                    assert isinstance(lse, torch.Tensor)
                    oracle.compare(out.float().cpu().numpy(), want.astype("float32"), 3.5e-3)
    finally:
        torch.distributed.destroy_process_group()


def test_as_many_ranks_as_gpus():
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("one GPU")
    comms = nccl(count)
    q, codes, scales, indices, indptr, sink = case(4, tokens=5, heads=16, head_dim=512, pages=300, most=200)
    want = cupy_paged.paged_decode(q, codes, indices, indptr, sink, kv_scales=scales)
    results = [None] * count

    def run(r):
        with cupy.cuda.Device(r):
            comm = distributed.communicator(comms[r])
            put = [on_gpu(a) for a in (q, indices, indptr, sink)]
            own = [on_gpu(mine(a, comm)) for a in (codes, scales)]
            pool = distributed.ShardedKV.from_arrays(comm, 300, *own)
            results[r] = pool.decode(*put)[0].get()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    for result in results:
        oracle.compare(result, want.astype("float32"), 3.5e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_benchmark_over_ranks(ranks):
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < ranks:
        pytest.skip("needs two GPUs")
    if not cupy.cuda.nccl.available:
        pytest.skip("this CuPy has no NCCL")
    rows = bench_ranks.run(ranks, ((1, 4096), (4, 1024)), 20000)
    assert [(r.tokens, r.layout) for r in rows if r.layout != "tokens"] == [
        (t, layout) for t in (1, 4) for layout in ("all", "heads")
    ]
    for row in rows:
        assert row.error <= 3.5e-3
        assert row.us > 0
        assert row.exchange_us > 0


def test_everything_on_device_1_while_device_0_is_current():
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    rng = np.random.default_rng(5)
    kv, q = rng.standard_normal((20, 512), dtype="float32"), rng.standard_normal((1, 16, 512), dtype="float32")
    slots, padded = rng.permutation(20).astype("int32"), np.array([[3, -1, 7, 11]], "int32")
    results = []
    for put in (np.array, cupy.asarray):
        with cupy.cuda.Device(1):
            kv_, q_, slots_, padded_ = (put(a) for a in (kv, q.astype("float16"), slots, padded))
        codes, scales = cupy_paged.quantize_kv(kv_)
        cupy_paged.store_kv(codes, scales, slots_, kv_)
        lists = cupy_paged.lists_from_padded(padded_)
        out, lse = cupy_paged.paged_decode(q_, codes, *lists, kv_scales=scales, return_lse=True)
        merged, _ = cupy_paged.merge_states([out, out], [lse, lse])
        assert cupy.cuda.runtime.getDevice() == 0
        results.append((codes, scales, *lists, merged))
    on_host, on_device = results
    assert {a.device.id for a in on_device} == {1}
    for wanted, got in zip(on_host[:4], on_device[:4], strict=True):
        assert got.get().tobytes() == wanted.tobytes()
    oracle.compare(on_device[4].get(), on_host[4].astype("float32"), 3.5e-3)
    with pytest.raises(ValueError, match="device"):
        cupy_paged.merge_states([out, cupy.asarray(q.astype("float16"))], [lse, lse])
