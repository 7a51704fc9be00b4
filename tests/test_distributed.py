"""Pools dealt out to the ranks of one process, against one undivided pool."""

from __future__ import annotations

import threading

import gpu_record
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupy_paged
from cupy_paged import bench_ranks, distributed
from cupy_paged.backends.numpy_split import _local

BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def on_every_rank(size, work, timeout=20.0):
    """work(comm) on `size` threads; their results, or the first error."""
    group = distributed.NumpyGroup(size, timeout)
    results, errors = [None] * size, [None] * size

    def run(r):
        try:
            results[r] = work(group.rank(r))
        except Exception as error:
            errors[r] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results, errors


def case(seed, *, tokens, heads=8, head_dim=64, pages=37, page_size=1, fp8=True, most=60):
    rng = np.random.default_rng(seed)
    kv = rng.standard_normal((pages, head_dim) if page_size == 1 else (pages, page_size, head_dim), dtype="float32")
    codes, scales = cupy_paged.quantize_kv(kv) if fp8 else (kv.astype(BF16), None)
    lengths = rng.integers(0, most, tokens)
    lengths[rng.random(tokens) < 0.2] = 0
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype("int32")
    slots = pages * page_size
    indices = rng.integers(-2, slots + 2, int(indptr[-1]), dtype="int32")  # some outside the pool
    q = rng.standard_normal((tokens, heads, head_dim)).astype(BF16)
    sink = rng.standard_normal(heads, dtype="float32")
    return q, codes, scales, indices, indptr, sink


def mine(a, comm):
    return None if a is None else a[comm.rank :: comm.size].copy()


def sharded(comm, codes, scales):
    return distributed.ShardedKV.from_arrays(comm, len(codes), mine(codes, comm), mine(scales, comm))


def lists_of(rank, size, indices, indptr, pages, page_size):
    """A rank's lists, built row by row."""
    rows = []
    for t in range(len(indptr) - 1):
        row = indices[indptr[t] : indptr[t + 1]]
        row = row[(row >= 0) & (row < pages * page_size)]
        row = row[row // page_size % size == rank]
        rows.append(row // page_size // size * page_size + row % page_size)
    flat = np.concatenate([*rows, np.zeros(0, "int32")]).astype("int32")
    return flat, np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype("int32")


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([1, 2, 3, 4, 8]),
    seed=st.integers(0, 2**32),
    tokens=st.integers(1, 9),
    page_size=st.sampled_from([1, 4]),
    fp8=st.booleans(),
    pages=st.integers(1, 40),
)
def test_is_merge_states_of_the_same_split_bit_for_bit(size, seed, tokens, page_size, fp8, pages):
    q, codes, scales, indices, indptr, sink = case(seed, tokens=tokens, page_size=page_size, fp8=fp8, pages=pages)
    results, errors = on_every_rank(size, lambda comm: sharded(comm, codes, scales).decode(q, indices, indptr, sink))
    assert errors == [None] * size
    parts = []
    for r in range(size):
        local = lists_of(r, size, indices, indptr, pages, page_size)
        own = codes[r::size].copy(), None if scales is None else scales[r::size].copy()
        parts.append(cupy_paged.paged_decode(q, own[0], *local, kv_scales=own[1], return_lse=True))
    want, want_lse = cupy_paged.merge_states([p[0] for p in parts], [p[1] for p in parts], sink)
    for out, lse in results:
        assert out.tobytes() == want.tobytes()
        assert lse.tobytes() == want_lse.tobytes()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_error_against_float64(size, seed):
    q, codes, scales, indices, indptr, sink = case(seed, tokens=24, heads=16, head_dim=512, pages=500, most=400)
    results, errors = on_every_rank(size, lambda comm: sharded(comm, codes, scales).decode(q, indices, indptr, sink))
    assert errors == [None] * size
    rows = oracle.dequantized(codes, scales)
    want, want_lse = oracle.attention(q, rows, indices, indptr, sink=sink)
    oracle.compare(results[0][0], want, 2.5e-3)
    oracle.compare(results[0][1], want_lse, 1e-3)


@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_layouts_are_parts_of_the_whole(size, layout):
    q, codes, scales, indices, indptr, sink = case(1, tokens=8)

    def work(comm):
        pool = sharded(comm, codes, scales)
        return pool.decode(q, indices, indptr, sink), pool.decode(q, indices, indptr, sink, layout=layout)

    results, errors = on_every_rank(size, work)
    assert errors == [None] * size
    for r, (whole, part) in enumerate(results):
        for a, b in zip(whole, part, strict=True):
            n = 8 // size
            wanted = a[:, r * n : (r + 1) * n] if layout == "heads" else a[r * n : (r + 1) * n]
            assert b.tobytes() == np.ascontiguousarray(wanted).tobytes()


@pytest.mark.parametrize("page_size", [1, 4])
def test_store_and_grow_go_to_the_owner(page_size):
    rng = np.random.default_rng(3)
    slots = rng.permutation(20 * page_size).astype("int32")
    kv = rng.standard_normal((len(slots), 64), dtype="float32").astype(BF16)
    q = rng.standard_normal((1, 4, 64)).astype(BF16)
    indices, indptr = np.arange(20 * page_size, dtype="int32"), np.array([0, 20 * page_size], "int32")

    def work(comm):
        pool = distributed.ShardedKV(comm, 7, page_size, 64)
        first = slots[slots < 7 * page_size]
        pool.store(first, kv[slots < 7 * page_size])
        pool.grow(20)
        assert pool.num_slots == 20 * page_size
        pool.store(slots[slots >= 7 * page_size], kv[slots >= 7 * page_size])
        return pool.decode(q, indices, indptr), pool.local.codes.copy()

    whole = cupy_paged.PagedKV(20, page_size, 64)
    whole.store(slots, kv)
    results, errors = on_every_rank(3, work)
    assert errors == [None] * 3
    for r, (_, codes) in enumerate(results):
        assert codes.tobytes() == whole.codes[r::3].tobytes()
    oracle.compare(results[0][0][0], whole.decode(q, indices, indptr).astype("float32"), 3.5e-3)


def test_store_validates_against_the_whole_pool():
    rng = np.random.default_rng(6)
    kv = rng.standard_normal((20, 64), dtype="float32")
    pool = distributed.ShardedKV(distributed.NumpyGroup(3).rank(1), 20, head_dim=64)
    pool.store(np.arange(20), kv, validate=True)  # int64, most of them of other ranks
    assert pool.local.codes.tobytes() == cupy_paged.quantize_kv(kv).codes[1::3].tobytes()
    before = pool.local.codes.copy()
    with pytest.raises(IndexError, match=r"slots\[3\] = 20 is outside the pool's 20 slots"):
        pool.store(np.array([0, 1, 2, 20]), -kv[:4], validate=True)
    table = np.ones((5, 8), "float32")
    positions = np.array([4, 5])
    with pytest.raises(IndexError, match=r"positions\[1\] = 5 is outside"):
        pool.store(np.array([0, 1]), -kv[:2], positions=positions, cos=table, sin=table, validate=True)
    assert pool.local.codes.tobytes() == before.tobytes()


def test_ranks_that_disagree_all_raise():
    q, codes, scales, indices, _, _ = case(1, tokens=2)

    def work(comm):
        n = 30 + comm.rank
        return sharded(comm, codes, scales).decode(q, indices[:n], np.array([0, 1, n], "int32"))

    _, errors = on_every_rank(3, work)
    assert all(isinstance(e, ValueError) for e in errors)
    assert "disagree on nnz: [30, 31, 32]" in str(errors[1])


def test_a_rank_that_fails_does_not_hang_the_others():
    q, codes, scales, indices, indptr, _ = case(1, tokens=2)

    def work(comm):
        if comm.rank == 1:
            raise KeyError("this rank is gone")
        return sharded(comm, codes, scales).decode(q, indices, indptr)

    _, errors = on_every_rank(3, work, timeout=0.5)
    assert isinstance(errors[1], KeyError)
    assert all("not all of 3 ranks" in str(errors[r]) for r in (0, 2))


def test_empty_shards_and_empty_lists():
    q, codes, scales, indices, indptr, sink = case(1, tokens=4, pages=2)
    results, errors = on_every_rank(8, lambda comm: sharded(comm, codes, scales).decode(q, indices, indptr, sink))
    assert errors == [None] * 8
    want = cupy_paged.paged_decode(q, codes, indices, indptr, sink, kv_scales=scales)
    oracle.compare(results[7][0], want.astype("float32"), 3.5e-3)
    nothing = np.zeros(5, "int32")
    results, errors = on_every_rank(2, lambda comm: sharded(comm, codes, scales).decode(q, indices[:0], nothing, sink))
    assert errors == [None] * 2
    assert not results[0][0].any()
    assert np.isneginf(results[0][1]).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "rows"}, "layout must be one of"),
        ({"layout": "heads"}, "num_heads divisible by the 3 ranks, got 8"),
        ({"layout": "tokens"}, "num_tokens divisible by the 3 ranks, got 4"),
    ],
)
def test_layouts_that_do_not_fit(change, words):
    q, codes, scales, indices, indptr, _ = case(1, tokens=4)
    _, errors = on_every_rank(3, lambda comm: sharded(comm, codes, scales).decode(q, indices, indptr, **change))
    assert all(words in str(e) for e in errors)


def test_wrong_shards_and_communicators_are_named():
    _, codes, scales, *_ = case(1, tokens=4)
    comm = distributed.NumpyGroup(2).rank(1)
    with pytest.raises(ValueError, match=r"18 pages of rank 1 of 2 .*got 37"):
        distributed.ShardedKV.from_arrays(comm, 37, codes, scales)
    with pytest.raises(ValueError, match=r"number must be a rank from 0 to 1, got 2"):
        distributed.NumpyGroup(2).rank(2)
    with pytest.raises(TypeError, match=r"q_dtype must be bfloat16 or float16, got float64"):
        distributed.ShardedKV(comm, 37, head_dim=64).prepare(np.zeros((1, 4, 64)), 8)
    with pytest.raises(TypeError, match=r"comm must be .*got builtins.int"):
        distributed.ShardedKV(3, 37, 64)


class StandIn:
    """What an NcclCommunicator shows of itself; a wait ends when it is aborted, as NCCL's do."""

    def __init__(self):
        self.aborted = threading.Event()

    def rank_id(self):
        return 2

    def size(self):
        return 3

    def abort(self):
        self.aborted.set()

    allGather = None


def test_a_wait_for_nccl_has_a_time_limit():
    inner = StandIn()
    comm = distributed.Nccl(inner, timeout=0.1)
    with pytest.raises(RuntimeError, match=r"rank 2 waited 0.1 s for 3 ranks"), comm.limit():
        assert inner.aborted.wait(20)
    inner = StandIn()
    comm = distributed.Nccl(inner, timeout=0.1)
    with comm.limit():
        pass
    with pytest.raises(KeyError, match="mine"), comm.limit():
        raise KeyError("mine")
    assert not inner.aborted.wait(0.3)


def test_communicators_are_recognised():
    backend = type("NCCLBackend", (), {"__module__": "cupyx.distributed._nccl_comm", "_comm": StandIn(), "rank": 2})
    for theirs in (StandIn(), backend()):  # a cupyx backend has a rank but no size
        comm = distributed.communicator(theirs)
        assert isinstance(comm, distributed.Nccl)
        assert (comm.rank, comm.size) == (2, 3)
    own = distributed.NumpyGroup(2).rank(1)
    assert distributed.communicator(own) is own


def test_local_slots():
    got = _local(np.array([-1, 0, 5, 11, 12, 2**31 - 1], "int32"), (1, 2, 3, 12))
    assert got.tolist() == [-1, -1, 2, 5, -1, -1]  # pages 0 (slots 0-2), 1 (3-5), 2, 3 (9-11)


def test_cost_model_and_its_table():
    """The page's table is what the model gives, and the model has the limits one expects."""
    page = (gpu_record.ROOT / "docs" / "pages" / "distributed.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert len(rows) == 24
    for n, t, h, length, layout, mb, exchange, us, one, pays in rows:
        n, t, h, layout = int(n), int(t), int(h), layout.strip()
        c = distributed.cost(n, t, h, int(length), layout=layout)
        shown = [f"{c.bytes_received / 1e6:.2f}", f"{c.exchange_us:.0f}", f"{c.us:.0f}", f"{c.one_gpu_us:.0f}"]
        assert [x.strip() for x in (mb, exchange, us, one)] == shown
        assert int(pays) == distributed.pays_from(n, t, h, layout=layout)
        longer = distributed.cost(n, t, h, int(pays), layout=layout)
        shorter = distributed.cost(n, t, h, int(pays) - 64, layout=layout)
        assert longer.us < longer.one_gpu_us
        assert shorter.us >= shorter.one_gpu_us
    alone = distributed.cost(1, 4, 16, 1000)
    assert (alone.bytes_received, alone.us) == (0, alone.one_gpu_us)


def test_table_of_measurements():
    row = bench_ranks.Row(4, 32, 65536, "heads", 131.0, 20.0, 334.0, 3_000_000, 1.5e-3)
    cells = bench_ranks.markdown([row], 450.0).splitlines()[-1].split("|")[1:-1]
    assert [c.strip() for c in cells][4:] == ["131.0", "20.0", "334.0", "2.55", "3.00", "33.3", "1.5e-03"]


def test_measuring_without_a_gpu_says_why(monkeypatch, capsys):
    cupy = pytest.importorskip("cupy")

    def none():
        raise RuntimeError("no device here")

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", none)
    assert bench_ranks.main([]) == 1
    assert "nothing to measure: RuntimeError: no device here" in capsys.readouterr().err
