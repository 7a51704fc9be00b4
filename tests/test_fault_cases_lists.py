"""Public fault reports about slot lists, as tests: O01, O02, O05, O12, O19 to O21, O24, O32, O33, O37, O38.

A test is named after its case; where the report was about one shape, its relatives (other kernels, dtypes, page sizes,
storing, merging, builders) are tested with it. Shared parts, and the configurations, are in faults.py.
"""

from __future__ import annotations

import faults
import numpy as np
import pytest
from calls import decode_call
from faults import BASE, BF16, F32, FP8, INT_MAX, INT_MIN, Config, base

from cupy_paged import (
    PagedKV,
    dequantize_kv,
    lists_for_v4,
    lists_from_padded,
    lists_from_page_table,
    merge_states,
    paged_decode,
    quantize_kv,
    store_kv,
)

INDPTR_ROWS_1_AND_3_EMPTY = np.array([0, 64, 64, 128, 128], np.int32)


@faults.configs
@faults.modes
@pytest.mark.parametrize("sink", [False, True])
def test_o01_empty_rows_are_written(backend, config, mode, sink):
    call = base(config) | {"kv_indptr": INDPTR_ROWS_1_AND_3_EMPTY}
    sinks = np.linspace(-2, 2, config.num_heads, dtype=F32) if sink else None
    out = backend.full(call["q"].shape, np.nan, call["q"].dtype)
    got, lse = backend.decode(call, out=out, attn_sink=sinks, **mode)
    faults.empty(got[1::2], lse[1::2])
    faults.near_reference(call, got, lse, sinks)


def test_o01_no_lists_at_all(backend):
    call = base(lengths=[0, 0, 0])
    faults.empty(*backend.decode(call))
    faults.empty(*backend.decode({**call, "kv_indices": np.full(9, 5, np.int32)}))


def test_o01_merging_empty_parts(backend):
    """An empty part counts for nothing even where its rows hold NaN; all parts empty is empty."""
    call = base(lengths=[40, 0])
    out, lse = backend.decode(call)
    rubbish, nothing = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    parts = backend.put(out), backend.put(rubbish)
    merged, merged_lse = merge_states(parts, [backend.put(lse), backend.put(nothing)])
    faults.same_bits(merged, out)
    faults.same_bits(merged_lse, lse)
    both = merge_states([parts[1], parts[1]], [backend.put(nothing)] * 2)
    faults.empty(*(backend.get(a) for a in both))


@faults.configs
@faults.modes
def test_o02_minus_one_reads_nothing_before_the_pool(backend, config, mode):
    call = base(config)
    pool, scales = call["unified_kv"], call.get("kv_scales")
    big = np.empty((len(pool) + 2, *pool.shape[1:]), pool.dtype)
    big.view(np.uint8)[...] = 0x7F if scales is not None else 0xFF  # NaN in every dtype
    big[1:-1] = pool
    around = {"unified_kv": backend.put(big)[1:-1]}
    if scales is not None:
        big_scales = np.full((len(scales) + 2, scales.shape[1]), np.nan, F32)
        big_scales[1:-1] = scales
        around["kv_scales"] = backend.put(big_scales)[1:-1]
    indices = call["kv_indices"]
    indices[[0, 20, 63, 64 + 5, 64 + 33, 128 + 63]] = -1
    indices[192:] = -1
    out, lse = backend.decode(call | around, **mode)
    faults.near_reference(call, out, lse)
    faults.empty(out[3:], lse[3:])


@faults.some_configs
def test_o02_storing_to_minus_one_writes_nothing(backend, config):
    call = base(config)
    guarded = {k: faults.Guarded(backend, call[k]) for k in ("unified_kv", "kv_scales") if k in call}
    pool, scales = guarded["unified_kv"].array, guarded["kv_scales"].array if "kv_scales" in guarded else None
    rows = backend.full((3, config.head_dim), 1.0, F32)
    store_kv(pool, scales, backend.put(np.array([-1, -1, -5], np.int32)), rows, group_size=config.group_size)
    assert all(g.intact() for g in guarded.values())
    for name, g in guarded.items():
        faults.same_bits(backend.get(g.array).view(np.uint8), call[name].view(np.uint8))


def test_o05_strided_lists(backend):
    """Read with their strides on the host; on a GPU refused by name, and never read wrongly."""
    call, sink = base(), np.linspace(-1, 1, 16, dtype=F32)
    strided = {name: np.repeat(call[name], 2)[::2] for name in ("kv_indices", "kv_indptr")}
    strided["attn_sink"] = np.repeat(sink, 2)[::2]
    for name, value in strided.items():
        arguments = backend.put(call | {"attn_sink": sink})
        whole = backend.put(np.repeat(backend.get(value), 2))
        arguments[name] = whole[::2]
        if backend.cuda:
            with pytest.raises(ValueError, match=name):
                paged_decode(**arguments)
        else:
            faults.near_reference(call, *backend.decode(arguments), sink)


@faults.some_configs
@faults.modes
def test_o05_lists_that_begin_anywhere(backend, config, mode):
    """Slices of larger arrays, and a first row that does not begin at 0, give the bits of arrays of their own."""
    call = base(config, lengths=[64, 33, 0, 200])
    plain = backend.decode(call, **mode)
    for shift in (1, 2, 3):
        buffers = {name: np.r_[np.full(shift, 7, np.int32), call[name], 9] for name in ("kv_indices", "kv_indptr")}
        sliced = {name: backend.put(a)[shift:-1] for name, a in buffers.items()}
        late = {"kv_indices": buffers["kv_indices"], "kv_indptr": call["kv_indptr"] + np.int32(shift)}
        for got, wanted in zip(backend.decode(call | sliced, **mode), plain, strict=True):
            faults.same_bits(got, wanted)
        faults.near_reference(call, *backend.decode(call | late, **mode))


@pytest.mark.parametrize("name", ["kv_indices", "kv_indptr", "attn_sink"])
def test_o05_unaligned_lists_are_refused(cuda, name):
    """A kernel that read them would fault, and the device would be lost to the process."""
    import cupy

    call = cuda.put(base() | {"attn_sink": np.zeros(16, F32)})
    raw = cupy.zeros(call[name].nbytes + 4, "uint8")
    raw[2:-2] = call[name].view("uint8")
    odd = cupy.ndarray(call[name].shape, call[name].dtype, raw.data + 2)
    with pytest.raises(ValueError, match=rf"{name}.*multiple of 4"):
        paged_decode(**call | {name: odd})
    faults.near_reference(base(), *cuda.decode(base()))


def test_o05_strided_inputs_of_storing_and_builders(backend):
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((8, 128)).astype(F32)
    slots = np.array([3, 9, 1, 7], np.int64)
    pools = []
    for strided in (False, True):
        pool = PagedKV(16, head_dim=128, device="cuda" if backend.cuda else "cpu")
        if strided:
            pool.store(backend.put(np.repeat(slots, 3))[::3], backend.put(rows)[::2])
        else:
            pool.store(backend.put(slots), backend.put(rows[::2].copy()))
        pools.append(pool)
    faults.same_bits(backend.get(pools[0].codes).view(np.uint8), backend.get(pools[1].codes).view(np.uint8))
    faults.same_bits(pools[0].scales, pools[1].scales)
    table, lens = np.arange(12, dtype=np.int32).reshape(3, 4), np.array([5, 0, 16], np.int32)
    plain = lists_from_page_table(backend.put(table), backend.put(lens), 4)
    wide, many = backend.put(np.repeat(table, 2, axis=1)), backend.put(np.repeat(lens, 2))
    for a, b in zip(plain, lists_from_page_table(wide[:, ::2], many[::2], 4), strict=True):
        faults.same_bits(a, b)
    for a, b in zip(lists_from_padded(backend.put(table)), lists_from_padded(wide[:, ::2]), strict=True):
        faults.same_bits(a, b)


@pytest.mark.parametrize("h", [8, 16, 64, 128])
@pytest.mark.parametrize("kv", ["fp8", "16"])
@pytest.mark.parametrize("skipped", [False, True])
def test_o12_the_sink_counts_once_whatever_the_splits(backend, h, kv, skipped):
    call = base(Config(num_heads=h, kv=kv), lengths=[4096], num_slots=4200)
    sink = np.full(h, 3.0, F32)
    if skipped:
        call["kv_indices"][:2048] = -1
    first = None
    for splits in (1, 2, 7, 32, 2**40):
        out, lse = backend.decode(call, attn_sink=sink, num_splits=splits)
        faults.near_reference(call, out, lse, sink)
        first = out.astype(np.float64) if first is None else first
        assert np.abs(out.astype(np.float64) - first).max() <= 1e-3


def test_o19_no_tokens(backend):
    call = base(lengths=[])
    out, lse = backend.decode(call)
    assert (out.shape, lse.shape) == ((0, 16, 512), (0, 16))
    assert out.dtype == BF16
    faults.near_reference(base(), *backend.decode(base()))
    merged, merged_lse = merge_states([backend.put(out)] * 2, [backend.put(lse)] * 2)
    assert (merged.shape, merged_lse.shape) == (out.shape, lse.shape)


def test_o19_nothing_to_store_build_or_quantise(backend):
    call = backend.put(base())
    before = backend.get(call["unified_kv"]).copy()
    none = backend.put(np.empty(0, np.int32))
    store_kv(call["unified_kv"], call["kv_scales"], none, backend.put(np.empty((0, 512), F32)))
    faults.same_bits(call["unified_kv"], before)
    codes, scales = quantize_kv(backend.put(np.empty((0, 512), F32)))
    assert (codes.shape, scales.shape) == ((0, 512), (0, 8))
    assert dequantize_kv(codes, scales).shape == (0, 512)
    pool = PagedKV(4, head_dim=64, device="cuda" if backend.cuda else "cpu")
    pool.copy_pages(none, none)
    pool.copy_slots(none, none)
    assert pool.dequantize(none).shape == (0, 64)
    for built in (
        lists_from_page_table(backend.put(np.empty((0, 3), np.int32)), none, 4),
        lists_from_padded(backend.put(np.empty((0, 3), np.int32))),
        lists_for_v4(none, ring_start=none),
    ):
        assert built[0].shape == (0,)
        assert backend.get(built[1]).tolist() == [0]


@faults.some_configs
def test_o20_bits_do_not_depend_on_batchmates(backend, config):
    rng = np.random.default_rng(20)
    alone = base(config, lengths=[1536], num_slots=4096)
    first = backend.decode(alone, batch_invariant=True)
    faults.near_reference(alone, *first)
    for t in (2, 8, 64, 300) if backend.cuda else (2, 8):
        lengths = rng.choice([0, 1, 17, 64, 700, 1536], t)
        at = int(rng.integers(t))
        lengths[at] = 1536
        call = {**alone, **base(config, lengths=lengths, seed=t, num_slots=4096)}
        call |= {k: alone[k] for k in ("unified_kv", "kv_scales") if k in alone}
        begin = call["kv_indptr"][at]
        call["q"][at], call["kv_indices"][begin : begin + 1536] = alone["q"][0], alone["kv_indices"]
        out, lse = backend.decode(call, batch_invariant=True)
        faults.same_bits(out[at], first[0][0])
        faults.same_bits(lse[at], first[1][0])


@faults.configs
@faults.modes
def test_o21_slots_outside_the_pool_are_dropped(backend, config, mode):
    call = base(config)
    slots, bad = faults.num_slots(call), call["kv_indices"]
    bad[::5] = np.resize([slots, slots + 10**6, INT_MAX, INT_MIN, -2], len(bad[::5]))
    guarded = faults.guard(backend, call)
    out, lse = backend.decode(faults.unguard(guarded), **mode)
    faults.near_reference(call, out, lse)
    assert all(g.intact() for g in guarded.values() if isinstance(g, faults.Guarded))
    first = int(np.argmax((bad < 0) | (bad >= slots)))
    bad[first] = 3
    bad[70] = slots
    bad[:70] %= slots
    with pytest.raises(IndexError, match=r"kv_indices\[70\].*token 1, position 6"):
        backend.decode(call, validate=True)


HOSTILE_INDPTR = {
    "decreasing": [5, 4, 3, 2, 1],
    "beyond": [0, 64, 10**9, INT_MAX, INT_MAX],
    "negative": [-5, 0, INT_MIN, 7, 9],
    "extremes": [INT_MIN, INT_MAX, INT_MIN, INT_MAX, INT_MIN],
    "zigzag": [0, 256, 0, 256, 0],
    "all -1": [-1] * 5,
    "starts late": [200, 220, 256, 256, 256],
}


@faults.some_configs
@faults.modes
@pytest.mark.parametrize("name", HOSTILE_INDPTR)
def test_o21_any_indptr_is_harmless(backend, config, mode, name):
    """Nothing outside the arrays is read into a result or written; the next call is right.

    What fixed splits of malformed rows give may come from the workspace, which is therefore given, and zero.
    """
    call = base(config)
    hostile = call | {"kv_indptr": np.array(HOSTILE_INDPTR[name], np.int32)}
    guarded = faults.guard(backend, hostile)
    out = faults.Guarded(backend, np.zeros(call["q"].shape, call["q"].dtype))
    if mode:
        mode = mode | backend.zero_workspace(1 << 24)
    got, _ = backend.decode(faults.unguard(guarded), out=out.array, **mode)
    assert out.intact()
    assert all(g.intact() for g in guarded.values() if isinstance(g, faults.Guarded))
    assert np.isfinite(got.astype(F32)).all()
    if name == "starts late":
        faults.near_reference(hostile, got, decode_call(hostile)[1])
    else:
        with pytest.raises(ValueError, match="kv_indptr"):
            backend.decode(hostile, validate=True)
    faults.near_reference(call, *backend.decode(call, **mode))


@faults.configs
@faults.modes
def test_o24_nothing_reaches_the_output_from_unreferenced_slots(backend, config, mode):
    call = base(config, lengths=[64, 1, 33, 0])
    clean = backend.decode(call, **mode)
    used = np.unique(call["kv_indices"])
    faults.poison(call, np.setdiff1d(np.arange(faults.num_slots(call)), used))
    for got, wanted in zip(backend.decode(call, **mode), clean, strict=True):
        faults.same_bits(got, wanted)


def test_o24_half_full_last_page(backend):
    call = base(Config(page_size=4), lengths=[6])
    call["kv_indices"][:] = np.r_[8:12, 40:42]
    clean = backend.decode(call)
    call["unified_kv"].view(np.uint8).reshape(-1, 512)[42:44] = 0x7F
    for got, wanted in zip(backend.decode(call), clean, strict=True):
        faults.same_bits(got, wanted)


@faults.some_configs
def test_o24_nan_in_a_listed_slot_reaches_only_its_tokens(backend, config):
    call = base(config)
    call["kv_indices"][:] = np.random.default_rng(0).permutation(faults.num_slots(call))[:256]
    clean, _ = backend.decode(call)
    slot = call["kv_indices"][70]  # of token 1
    flat = call["unified_kv"].reshape(-1, config.head_dim)
    if config.kv == "fp8":
        flat.view(np.uint8)[slot, 3] = 0x7F
    else:
        flat[slot, 3] = np.nan
    out, _ = backend.decode(call)
    assert np.isnan(out[1].astype(F32)[:, 3]).all()
    faults.same_bits(out[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("name", ["kv_indices", "kv_indptr"])
@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.int16, F32])
def test_o32_other_index_dtypes_are_refused(backend, name, dtype):
    call = base()
    with pytest.raises(TypeError, match=rf"{name}.*int32.*{np.dtype(dtype).name}"):
        backend.decode(call | {name: call[name].astype(dtype)})


def test_o32_storing_and_builders_take_int64(backend):
    table = np.array([[7, 2], [5, 0]])
    lens = np.array([5, 8])
    for name in ("int32", "int64"):
        built = lists_from_page_table(backend.put(table.astype(name)), backend.put(lens.astype(name)), 4)
        assert backend.get(built[1]).tolist() == [0, 5, 13]
        assert backend.get(built[0])[:13].tolist() == [28, 29, 30, 31, 8, 20, 21, 22, 23, 0, 1, 2, 3]
    pool = PagedKV(4, head_dim=64, device="cuda" if backend.cuda else "cpu")
    with pytest.raises(TypeError, match="slots"):
        pool.store(backend.put(np.array([1], np.int16)), backend.put(np.zeros((1, 64), F32)))


@pytest.mark.parametrize(("t", "mode"), [(65537, {}), (70000, {"num_splits": 2}), (65537, {"batch_invariant": True})])
@pytest.mark.parametrize("h", [8, 64])
def test_o33_more_rows_than_a_grid_axis_holds(cuda, t, mode, h):
    import cupy

    call = base(Config(num_heads=h), lengths=[2] * 8)
    gpu = cuda.put(call)
    rng = np.random.default_rng(33)
    indices = rng.integers(0, 1024, 2 * t).astype(np.int32)
    gpu["q"] = cupy.tile(gpu["q"], (-(-t // 8), 1, 1))[:t]
    gpu["kv_indices"], gpu["kv_indptr"] = cupy.asarray(indices), cupy.arange(0, 2 * t + 1, 2, dtype="int32")
    out = cupy.full((t, h, 512), float("nan"), BF16)
    _, lse = paged_decode(**gpu, out=out, return_lse=True, **mode)
    rows = np.array([0, 1, 65535, 65536, t - 1])
    few = call | {"q": call["q"][rows % 8], "kv_indptr": np.arange(0, 11, 2, dtype=np.int32)}
    few["kv_indices"] = indices.reshape(-1, 2)[rows].ravel()
    faults.near_reference(few, out[rows].get(), lse[rows].get())
    assert not bool(((out.view("uint16") & 0x7FFF) > 0x7F80).any())  # no row is left unwritten


def test_o33_many_rows_to_store_and_build(cuda):
    import cupy

    t = 200_000
    pool = PagedKV(t, head_dim=64, device="cuda")
    rows = cupy.ones((t, 64), "float32")
    pool.store(cupy.arange(t, dtype="int64"), rows)
    assert bool((pool.dequantize() == 1).all())
    indices, indptr = lists_from_padded(cupy.arange(2 * t, dtype="int32").reshape(t, 2))
    assert bool((indices == cupy.arange(2 * t)).all())
    assert bool((indptr == cupy.arange(0, 2 * t + 1, 2)).all())


@pytest.mark.parametrize(
    ("page_size", "lens"), [(4, [5, 8, 3, 0]), (1, [2, 0, 7, 1]), (64, [64, 65, 63, 1]), (16, [0] * 4)]
)
def test_o37_lists_of_a_page_table(backend, page_size, lens):
    rng = np.random.default_rng(37)
    most = max(-(-max(lens) // page_size), 1)
    table = rng.permutation(4 * most).reshape(4, most).astype(np.int32)
    indices, indptr = lists_from_page_table(backend.put(table), backend.put(np.array(lens, np.int32)), page_size)
    wanted, bounds = [], [0]
    for row, length in zip(table, lens, strict=True):
        wanted += [int(row[i // page_size]) * page_size + i % page_size for i in range(length)]
        bounds.append(len(wanted))
    assert backend.get(indptr).tolist() == bounds
    got = backend.get(indices)
    assert got[: len(wanted)].tolist() == wanted
    assert (got[len(wanted) :] == -1).all()
    call = base(BASE._replace(page_size=page_size), num_slots=4 * most * page_size)
    out, lse = backend.decode(call | {"kv_indices": indices, "kv_indptr": indptr})
    faults.near_reference(call | {"kv_indices": got, "kv_indptr": np.array(bounds, np.int32)}, out, lse)


@pytest.mark.parametrize("h", [17, 32, 48, 64, 96, 128])
@pytest.mark.parametrize("kv", ["fp8", "16"])
@faults.modes
def test_o38_every_head_reads_its_own_tokens_list(backend, h, kv, mode):
    call = base(Config(num_heads=h, kv=kv), lengths=[3, 64, 100, 1, 40])
    values = np.zeros(faults.num_slots(call))
    order = np.random.default_rng(h).permutation(len(values))[: len(call["kv_indices"])]
    call["kv_indices"] = order.astype(np.int32)
    for t in range(5):
        values[order[call["kv_indptr"][t] : call["kv_indptr"][t + 1]]] = t + 1
    rows = np.repeat(values[:, None], 512, 1)
    call["unified_kv"] = rows.astype(FP8 if kv == "fp8" else BF16)
    if kv == "fp8":
        call["kv_scales"] = np.ones((len(values), 8), F32)
    out, _ = backend.decode(call, **mode)
    for t in range(5):
        assert (out[t].astype(F32) == t + 1).all(), t
