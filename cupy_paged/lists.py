"""Public builders of slot lists: (kv_indices, kv_indptr) from page tables, padded lists, and DeepSeek-V4's layout.

Shapes depend on shapes alone and no length is read by the host, so a builder can be captured in a CUDA graph.
kv_indices has room for the longest lists the shapes allow (or for `capacity` entries); what follows the last row is
-1, and rows are cut off where the capacity ends.
"""

from __future__ import annotations

from typing import Any

from . import arrays, checks, checks_pool
from .arrays import Array, view
from .checks_pool import Lists
from .storage import _backend, _optional


def _outputs(out: Any, capacity: int, like: Array, num_rows: int) -> tuple[Array, Array]:
    if out is None:
        return arrays.empty(like, (capacity,), "int32"), arrays.empty(like, (num_rows + 1,), "int32")
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError("out must be a tuple (kv_indices, kv_indptr)")
    given = view("kv_indices", out[0]), view("kv_indptr", out[1])
    checks_pool.list_outputs(given, like, num_rows)
    return given


def lists_from_page_table(
    page_table: Any, seq_lens: Any, page_size: int, *, capacity: int | None = None, out: Any = None, stream: Any = None
) -> tuple[Any, Any]:
    """Lists of all tokens of each sequence, in order.

    Parameters
    ----------
    page_table : (T, max_pages) array of int32 or int64
        Page ids of each row's sequence; a negative one gives slots -1.
    seq_lens : (T,) array of int32 or int64
        Tokens of each row's sequence; at most ``max_pages * page_size`` count.
    page_size : int
        Slots of a page.
    capacity : int, optional
        Entries of kv_indices, at least the sum of all lengths. Default: ``T * max_pages * page_size``.
    out : (kv_indices, kv_indptr), optional
        int32 arrays to write; the capacity is then kv_indices' length.

    Returns
    -------
    kv_indices : (capacity,) int32
    kv_indptr : (T + 1,) int32
    """
    checks.require(page_table=page_table, seq_lens=seq_lens)
    table, lens = view("page_table", page_table), view("seq_lens", seq_lens)
    checks.same_device("page_table", page_table=table, seq_lens=lens)
    checks_pool.indices("page_table", table, 2, "(T, max_pages)")
    checks_pool.indices("seq_lens", lens)
    checks_pool.length("seq_lens", lens, table.shape[0], f"row of page_table, which has shape {table.shape}")
    size = checks.positive_int("page_size", page_size)
    rows = table.shape[0]
    most = checks_pool.capacity_of(capacity, rows * table.shape[1] * size) if out is None else 0
    lists = Lists(rows, rows, counts=lens, page_table=table, page_size=size)
    with arrays.queue(stream, table, lens) as at:
        outputs = _outputs(out, most, table, rows)
        _backend(table).build_lists(lists, *outputs, at)
        return arrays.result(outputs[0]), arrays.result(outputs[1])


def lists_from_padded(
    padded: Any, lengths: Any = None, *, capacity: int | None = None, out: Any = None, stream: Any = None
) -> tuple[Any, Any]:
    """Padded rows of slots, with -1 anywhere, as ragged ones; the order is kept.

    Parameters
    ----------
    padded : (T, topk) array of int32 or int64
        Negative entries are dropped.
    lengths : (T,) array of int32 or int64, optional
        Entries of each row to look at; default all.
    capacity, out
        As in `lists_from_page_table`; the default capacity is ``T * topk``.

    Returns
    -------
    kv_indices : (capacity,) int32
    kv_indptr : (T + 1,) int32
    """
    checks.require(padded=padded)
    ids, lens = view("padded", padded), _optional("lengths", lengths)
    checks.same_device("padded", padded=ids, lengths=lens)
    checks_pool.indices("padded", ids, 2, "(T, topk)")
    rows = ids.shape[0]
    if lens is not None:
        checks_pool.indices("lengths", lens)
        checks_pool.length("lengths", lens, rows, f"row of padded, which has shape {ids.shape}")
    most = checks_pool.capacity_of(capacity, rows * ids.shape[1]) if out is None else 0
    lists = Lists(rows, rows, counts=lens, topk=ids)
    with arrays.queue(stream, ids, lens) as at:
        outputs = _outputs(out, most, ids, rows)
        _backend(ids).pack_lists(lists, *outputs, at)
        return arrays.result(outputs[0]), arrays.result(outputs[1])


def lists_for_v4(
    positions: Any,
    sequences: Any = None,
    ring_start: Any = None,
    *,
    window: int = 128,
    ring_size: int | None = None,
    page_table: Any = None,
    page_size: int = 1,
    base: int = 0,
    topk: Any = None,
    num_entries: Any = None,
    ratio: int | None = None,
    capacity: int | None = None,
    out: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """DeepSeek-V4's decode lists: each token's sliding window, then compressed entries of its sequence.

    The window is the last ``min(position + 1, window)`` positions x up to the token's own, oldest first, at slots
    ``ring_start[sequence] + x % ring_size``. Then come, where there is a `page_table` or `topk`, n compressed
    entries: ``n = num_entries[t]``, or ``(position + 1) // ratio``, at most as many as there are columns for.
    Entry e of a sequence is at slot ``base + page_table[sequence, e // page_size] * page_size + e % page_size``.

    - window layers: neither `page_table` nor `topk`
    - ratio 128, the whole history: `page_table`, entries 0 to n - 1
    - ratio 4, a selection: `page_table` and `topk`, entries ``topk[t, :n]``; without `page_table`, `topk` holds slots

    A token whose sequence or position is negative (padding of a captured graph), or whose sequence does not exist,
    has an empty row. An entry that is negative or leads outside the table stays in the list as -1, which decoding
    skips: row lengths follow from positions alone.

    Parameters
    ----------
    positions : (T,) array of int32 or int64
        Each token's position in its sequence; its own K/V row is in the ring already.
    sequences : (T,) array of int32 or int64, optional
        Each token's sequence, a row of `ring_start` and `page_table`. Default: token t is of sequence t.
    ring_start : (num_sequences,) array of int32 or int64
        First slot of each sequence's ring.
    window : int
        128 in V4.
    ring_size : int, optional
        Slots of a ring, at least `window`; default `window`. Larger with speculative tokens.
    page_table : (num_sequences, max_pages) array of int32 or int64, optional
    page_size : int
        Compressed entries of a page of `page_table`.
    base : int
        Slot at which page 0 of `page_table` begins.
    topk : (T, K) array of int32 or int64, optional
    num_entries : (T,) array of int32 or int64, optional
    ratio : int, optional
        Tokens to a compressed entry, for rows without `num_entries`.
    capacity, out
        As in `lists_from_page_table`.

    Returns
    -------
    kv_indices : (capacity,) int32
    kv_indptr : (T + 1,) int32
    """
    checks.require(positions=positions, ring_start=ring_start)
    given = {
        "positions": view("positions", positions),
        "sequences": _optional("sequences", sequences),
        "ring_start": view("ring_start", ring_start),
        "page_table": _optional("page_table", page_table),
        "topk": _optional("topk", topk),
        "num_entries": _optional("num_entries", num_entries),
    }
    checks.same_device("positions", **given)
    lists = checks_pool.v4_lists(given, window, ring_size, page_size, base, ratio)
    most = lists.window
    if lists.topk is not None:
        most += lists.topk.shape[1]
    elif lists.page_table is not None:
        most += lists.page_table.shape[1] * lists.page_size
    first = given["positions"]
    assert first is not None
    entries = checks_pool.capacity_of(capacity, lists.num_rows * most) if out is None else 0
    with arrays.queue(stream, first, *given.values()) as at:
        outputs = _outputs(out, entries, first, lists.num_rows)
        _backend(first).build_lists(lists, *outputs, at)
        return arrays.result(outputs[0]), arrays.result(outputs[1])
