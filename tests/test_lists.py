"""Index builders against plain Python loops, on both backends."""

from __future__ import annotations

import numpy as np
import pytest
from pools import BACKENDS, get, put

from cupy_paged.lists import lists_for_v4, lists_from_padded, lists_from_page_table

INDEX = [np.int32, np.int64]


def ragged(rows, capacity):
    flat = [slot for row in rows for slot in row]
    indptr = np.minimum(np.cumsum([0] + [len(row) for row in rows]), capacity)
    return np.array((flat + [-1] * capacity)[:capacity], np.int32), indptr.astype(np.int32)


def check(got, rows, capacity):
    indices, indptr = ragged(rows, capacity)
    assert got[0].dtype == got[1].dtype == np.int32
    assert np.array_equal(get(got[1]), indptr)
    assert np.array_equal(get(got[0]), indices)


def put_all(backend, *given):
    return [None if a is None else put(backend, a) for a in given]


@pytest.mark.parametrize("backend", BACKENDS)
def test_page_table_by_hand(backend):
    """Pages of four slots; lengths that end inside, at and before a page's end, and nothing at all."""
    table, lens = np.array([[7, 2], [3, 9], [5, 1], [0, 0]], np.int32), np.array([5, 8, 3, 0], np.int32)
    indices, indptr = lists_from_page_table(*put_all(backend, table, lens), 4)
    assert get(indptr).tolist() == [0, 5, 13, 16, 16]
    assert get(indices)[:16].tolist() == [28, 29, 30, 31, 8, *range(12, 16), *range(36, 40), 20, 21, 22]
    assert get(indices).shape == (32,)
    assert (get(indices)[16:] == -1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", INDEX)
@pytest.mark.parametrize(
    ("count", "width", "page_size"), [(1, 1, 1), (1, 300, 64), (37, 9, 4), (700, 5, 3), (3000, 2, 1)]
)
def test_page_table(backend, dtype, count, width, page_size):
    rng = np.random.default_rng(count)
    table = rng.integers(-1, 1000, (count, width)).astype(dtype)
    lens = rng.integers(-2, width * page_size + 5, count).astype(dtype)
    rows = []
    for pages, n in zip(table.tolist(), lens.tolist(), strict=True):
        slots = [-1 if page < 0 else page * page_size + i for page in pages for i in range(page_size)]
        rows.append(slots[: max(n, 0)])
    for capacity in (None, sum(map(len, rows)), sum(map(len, rows)) // 3):
        got = lists_from_page_table(*put_all(backend, table, lens), page_size, capacity=capacity)
        check(got, rows, count * width * page_size if capacity is None else capacity)


@pytest.mark.parametrize("backend", BACKENDS)
def test_page_table_far_away(backend):
    """Slots beyond int32 become -1; pages beyond the pool are the decoder's to skip."""
    table = np.array([[2**25, 2**31 - 1, 2**40, 3]], np.int64)
    got = lists_from_page_table(*put_all(backend, table, np.array([256], np.int64)), 64)
    rows = [[*range(2**31, 2**31), *[-1] * 192, *range(192, 256)]]
    check(got, rows, 256)
    got = lists_from_page_table(*put_all(backend, np.array([[2**25 - 1]], np.int64), np.array([64], np.int64)), 64)
    check(got, [list(range(2**31 - 64, 2**31))], 64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", INDEX)
@pytest.mark.parametrize(("count", "width"), [(1, 1), (5, 33), (128, 512), (2500, 7)])
def test_padded(backend, dtype, count, width):
    rng = np.random.default_rng(width)
    ids = rng.integers(-300, 1000, (count, width)).astype(dtype)
    if dtype == np.int64:
        ids[0, 0] = 2**40
    for lengths in (None, rng.integers(-1, width + 3, count).astype(np.int32)):
        ends = [width] * count if lengths is None else [max(0, min(width, n)) for n in lengths.tolist()]
        rows = [[s for s in row[:end] if 0 <= s < 2**31] for row, end in zip(ids.tolist(), ends, strict=True)]
        check(lists_from_padded(*put_all(backend, ids, lengths)), rows, count * width)
        check(lists_from_padded(*put_all(backend, ids, lengths), capacity=5), rows, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs(backend):
    rng = np.random.default_rng(1)
    ids = put(backend, rng.integers(-3, 50, (20, 24)))
    dense = np.ascontiguousarray(get(ids)[::2, ::3])
    rows = [[s for s in row if s >= 0] for row in dense.tolist()]
    check(lists_from_padded(ids[::2, ::3]), rows, dense.size)


def v4_rows(positions, sequences, ring_start, window, ring_size, table, page_size, base, topk, counts, ratio):
    """The definition in `lists_for_v4`, one entry at a time."""
    rows = []
    for t, position in enumerate(positions.tolist()):
        s = t if sequences is None else int(sequences[t])
        row = []
        if 0 <= s < len(ring_start) and position >= 0:
            for x in range(max(0, position + 1 - window), position + 1):
                row.append(int(ring_start[s]) + x % ring_size if ring_start[s] >= 0 else -1)
            n = (position + 1) // ratio if counts is None else int(counts[t])
            if topk is not None:
                entries = topk[t, : max(n, 0)].tolist()
            elif table is not None:
                entries = list(range(min(n, table.shape[1] * page_size)))
            else:
                entries = []
            for e in entries:
                if table is None:
                    row.append(max(e, -1))
                elif not 0 <= e < table.shape[1] * page_size or table[s, e // page_size] < 0:
                    row.append(-1)
                else:
                    row.append(base + int(table[s, e // page_size]) * page_size + e % page_size)
        rows.append(row)
    return rows


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", INDEX)
@pytest.mark.parametrize("count", [1, 7, 128, 1500])
def test_v4(backend, dtype, count):
    rng = np.random.default_rng(count)
    sequences = 11
    seq = rng.integers(-1, sequences + 1, count).astype(dtype)
    positions = rng.integers(-1, 3000, count).astype(dtype)
    positions[0], seq[0] = 200, 2
    ring_start = (rng.permutation(sequences) * 130).astype(dtype)
    ring_start[3] = -1
    table = rng.integers(0, 1000, (sequences, 9)).astype(dtype)
    table[rng.random(table.shape) < 0.2] = -1  # base makes the slots of page -1 look like good ones
    topk = rng.integers(-1, 70, (count, 24)).astype(dtype)
    counts = rng.integers(-1, 100, count).astype(dtype)
    layers = [  # page_table, topk, num_entries, ratio
        (None, None, None, None),
        (table, None, None, 128),
        (table, topk, None, 4),
        (table, topk, counts, None),
        (None, topk, counts, None),
    ]
    for window, ring_size in ((128, None), (128, 131), (0, 1), (5, 128)):
        for pages, chosen, entries, ratio in layers:
            rows = v4_rows(
                positions, seq, ring_start, window, ring_size or window, pages, 4, 5000, chosen, entries, ratio or 1
            )
            most = window + (24 if chosen is not None else 36 if pages is not None else 0)
            where = put_all(backend, positions, seq, ring_start)
            options = dict(
                zip(("page_table", "topk", "num_entries"), put_all(backend, pages, chosen, entries), strict=True)
            )
            got = lists_for_v4(
                *where, window=window, ring_size=ring_size, page_size=4, base=5000, ratio=ratio, **options
            )
            check(got, rows, count * most)


@pytest.mark.parametrize("backend", BACKENDS)
def test_v4_without_sequences_and_into_given_buffers(backend):
    positions, ring_start = np.array([0, 127, 300], np.int64), np.array([0, 128, 256], np.int64)
    indices, indptr = put(backend, np.full(400, 77, np.int32)), put(backend, np.full(4, 77, np.int32))
    got = lists_for_v4(put(backend, positions), None, put(backend, ring_start), out=(indices, indptr))
    assert got[0] is indices
    assert got[1] is indptr
    check(got, v4_rows(positions, None, ring_start, 128, 128, None, 1, 0, None, None, 1), 400)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend):
    none, none2 = put(backend, np.zeros(0, np.int32)), put(backend, np.zeros((0, 3), np.int32))
    for got in (
        lists_from_page_table(none2, none, 4),
        lists_from_padded(none2),
        lists_for_v4(none, none, put(backend, np.zeros(2, np.int32))),
    ):
        assert get(got[0]).shape == (0,)
        assert get(got[1]).tolist() == [0]


@pytest.mark.gpu
def test_captured_lists_follow_their_inputs():
    """One graph, replayed with new lengths in the same buffers: nothing was read at capture."""
    import cupy

    table = cupy.arange(40, dtype=cupy.int32).reshape(4, 10)
    lens = cupy.zeros(4, cupy.int32)
    out = cupy.empty(160, cupy.int32), cupy.empty(5, cupy.int32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        lists_from_page_table(table, lens, 4, out=out)
        stream.begin_capture()
        lists_from_page_table(table, lens, 4, out=out)
        graph = stream.end_capture()
        for given in ([0, 0, 0, 0], [40, 1, 0, 7]):
            lens.set(np.array(given, np.int32))
            graph.launch(stream)
            stream.synchronize()
            check(out, [list(range(40 * r, 40 * r + n)) for r, n in enumerate(given)], 160)


def one(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: lists_from_page_table(one(1), one(1), 4), ValueError, "(T, max_pages)"),
        (lambda: lists_from_page_table(one(1)[None], one(1, 2), 4), ValueError, "seq_lens must have shape (1,)"),
        (lambda: lists_from_page_table(one(1)[None].astype("f4"), one(1), 4), TypeError, "float32"),
        (lambda: lists_from_page_table(one(1)[None], one(1), 0), ValueError, "page_size"),
        (lambda: lists_from_page_table(one(1)[None], one(1), 2**31), ValueError, "give capacity"),
        (lambda: lists_from_page_table(one(1)[None], one(1), 4, out=(one(1), one(1))), ValueError, "(T + 1,) = (2,)"),
        (lambda: lists_from_page_table(one(1)[None], one(1), 4, out=one(1)), TypeError, "tuple"),
        (lambda: lists_from_padded(one(1)), ValueError, "(T, topk)"),
        (lambda: lists_from_padded(None), TypeError, "padded is missing"),
        (lambda: lists_for_v4(one(1), None, None), TypeError, "ring_start is missing"),
        (lambda: lists_for_v4(one(1), None, one(1, 2)), ValueError, "one entry for each of the 1 tokens, got 2"),
        (lambda: lists_for_v4(one(1), None, one(1), page_table=one(1)[None]), TypeError, "ratio"),
        (lambda: lists_for_v4(one(1), None, one(1), ratio=4), TypeError, "need page_table or topk"),
        (lambda: lists_for_v4(one(1), None, one(1), window=9, ring_size=8), ValueError, "at least window = 9, got 8"),
        (lambda: lists_for_v4(one(1), one(1, 2), one(1)), ValueError, "sequences must have shape (1,)"),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)
