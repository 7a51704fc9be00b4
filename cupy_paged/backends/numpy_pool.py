"""NumPy counterparts of backends/cuda_pool.py with the same results, bit for bit; kernels/store_pages.cu has the page rule."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .. import fp8
from ..arrays import Array
from ..checks_pool import Lists, Rotation

_F32 = np.float32


def _as_codes(pool: Array) -> np.ndarray:
    """A pool as (num_pages, page_size, D), FP8 as its bytes."""
    a = pool.obj if pool.ndim == 3 else pool.obj[:, None]
    return a.view(np.uint8) if a.dtype == ml_dtypes.float8_e4m3fn else a


def _winners(slots: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Each slot of the pool that is named, and the last row that names it."""
    rows = np.flatnonzero((slots >= 0) & (slots < num_slots))[::-1]
    places, first = np.unique(slots[rows].astype(np.int64), return_index=True)
    return places, rows[first]


def rotated(rows: np.ndarray, turn: Rotation | None, inverse: bool = False) -> np.ndarray:
    """Rows (T, ..., D) as float32, the last elements rotated by their positions."""
    x = rows.astype(_F32)
    if turn is None:
        return x
    positions, cos, sin = turn.positions.obj, turn.cos.obj, turn.sin.obj
    count, half = cos.shape
    known = (positions >= 0) & (positions < count)
    at = np.where(known, positions, 0)
    shape = (len(x),) + (1,) * (x.ndim - 2) + (half,)
    c, s = cos[at].reshape(shape), sin[at].reshape(shape)
    if inverse:
        s = -s
    tail = x[..., x.shape[-1] - 2 * half :]
    first, second = (tail[..., 0::2], tail[..., 1::2]) if turn.interleaved else (tail[..., :half], tail[..., half:])
    a, b = first.copy(), second.copy()
    turned = positions >= 0  # a negative position, padding, leaves a row as it is
    with np.errstate(all="ignore"):
        first[turned] = (a * c - b * s)[turned]
        second[turned] = (b * c + a * s)[turned]
    tail[positions >= count] = np.nan
    return x


def quantize(kv: Array, codes: Array, scales: Array, group_size: int, pow2: bool, stream: int) -> None:
    """Rows or pages of kv to `codes` and `scales`."""
    codes.obj.view(np.uint8)[...], scales.obj[...] = fp8.quantize(kv.obj, group_size, pow2)


def store(
    kv: Array,
    slots_: Array,
    pool: Array,
    scales_: Array | None,
    group_size: int,
    pow2: bool,
    turn: Rotation | None,
    stream: int,
) -> None:
    """Rows into slots of a pool; the last of several rows for one slot."""
    rows, slots, codes = kv.obj, slots_.obj, _as_codes(pool)
    scales = None if scales_ is None else scales_.obj
    num_pages, page_size, _ = codes.shape
    places, winners = _winners(slots, num_pages * page_size)
    if len(places) == 0:
        return
    picked = Rotation(_at(turn.positions, winners), turn.cos, turn.sin, turn.interleaved) if turn else None
    pages, offsets = places // page_size, places % page_size
    chosen = rows[winners]
    if scales is None:
        whole = chosen if turn is None and chosen.dtype == codes.dtype else _rounded(chosen, picked, codes.dtype)
        codes[pages, offsets] = whole
        return
    x = rotated(chosen, picked)
    if page_size == 1:
        codes[pages, 0], scales[pages] = fp8.quantize(x, group_size, pow2)
        return
    begins = np.flatnonzero(np.r_[True, pages[1:] != pages[:-1]])
    for begin, end in zip(begins, np.r_[begins[1:], len(pages)], strict=True):
        _store_page(codes[pages[begin]], scales[pages[begin]], offsets[begin:end], x[begin:end], group_size, pow2)


class _Picked:
    """The positions of some rows, in the shape of an `Array`."""

    def __init__(self, obj: np.ndarray) -> None:
        self.obj = obj


def _at(positions: Any, rows: np.ndarray) -> Any:
    return _Picked(positions.obj[rows])


def _rounded(rows: np.ndarray, turn: Rotation | None, dtype: Any) -> np.ndarray:
    """Rows in the dtype of a 16-bit pool; elements that are neither rotated nor converted keep their bits."""
    with np.errstate(over="ignore"):
        out = rotated(rows, turn).astype(dtype)
    if rows.dtype == dtype and turn is not None:
        still = rows.shape[-1] - 2 * turn.cos.shape[1]
        out[:, :still] = rows[:, :still]
    return out


def _store_page(
    codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray, rows: np.ndarray, group_size: int, pow2: bool
) -> None:
    """Rows (n, D) into slots of one page whose codes are (page_size, D) and scales (D // group_size,)."""
    page_size, head_dim = codes.shape
    groups = head_dim // group_size
    needed = fp8.scale_of_amax(fp8.finite_amax(rows.reshape(len(rows), groups, group_size), (0, 2)), pow2)
    if len(offsets) == page_size:
        new = needed
    else:
        new, moved_by = grown_scale(scales, needed)
        others = np.setdiff1d(np.arange(page_size), offsets)
        old = codes[others].reshape(len(others), groups, group_size)
        with np.errstate(all="ignore"):
            moved = fp8.encode(fp8.decode(old) * moved_by[:, None], _F32(1))
        changed = new.view(np.uint32) != scales.view(np.uint32)
        codes[others] = np.where(changed[:, None], moved, old).reshape(len(others), head_dim)
    scales[:] = new
    codes[offsets] = fp8.encode(rows.reshape(len(rows), groups, group_size), new[:, None]).reshape(len(rows), head_dim)


def grown_scale(old: np.ndarray, needed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """New scales of a partly stored page, and what its other codes are multiplied by.

    The old scale if it reaches, else the least ``old * 2**k`` that does. A group that holds nothing yet (or whose
    scale is not a finite number) starts afresh.
    """
    size = np.abs(old)
    usable = (size > fp8.SCALE_MIN) & np.isfinite(old)
    have, want = size.view(np.int32), needed.view(np.int32)
    power = (want >> 23) - (have >> 23) + ((want & 0x7FFFFF) > (have & 0x7FFFFF))
    power = np.where(usable & (needed > size), power, 0).astype(np.int32)
    new = np.where(usable, (old.view(np.int32) + (power << 23)).view(_F32), needed)
    moved_by = np.where(
        usable, np.where(power < 127, np.ldexp(_F32(1), -power), 0), np.where(size <= fp8.SCALE_MIN, 0, np.nan)
    )
    return new.astype(_F32), moved_by.astype(_F32)


def dequantize(
    pool: Array, scales_: Array | None, slots_: Array | None, out: Array, group_size: int, stream: int
) -> None:
    """Slots of the pool, or all of it, as rows of `out`; a slot outside the pool gives NaN."""
    codes, scales = _as_codes(pool), None if scales_ is None else scales_.obj
    out.obj.reshape(-1, codes.shape[2])[...] = _dequantized(
        codes, scales, None if slots_ is None else slots_.obj, group_size, out.obj.dtype
    )


def _dequantized(
    codes: np.ndarray, scales: np.ndarray | None, slots: np.ndarray | None, group_size: int, dtype: Any
) -> np.ndarray:
    num_pages, page_size, head_dim = codes.shape
    if slots is None:
        if scales is None:
            return codes.reshape(-1, head_dim).astype(dtype)
        return fp8.dequantize(codes, scales, group_size, dtype).reshape(-1, head_dim)
    known = (slots >= 0) & (slots < num_pages * page_size)
    at = np.where(known, slots, 0)
    rows = (
        codes[at // page_size, at % page_size] if num_pages * page_size else np.zeros((len(at), head_dim), codes.dtype)
    )
    if scales is None:
        out = rows.astype(dtype)
    else:
        chosen = scales[at // page_size] if num_pages else np.zeros((len(at), head_dim // group_size), _F32)
        out = fp8.dequantize(rows[:, None], chosen, group_size, dtype)[:, 0]
    out[~known] = np.nan
    return out


def move(pool: Array, scales_: Array | None, src_: Array, dst_: Array, pages: bool, stream: int) -> None:
    """Copy slots, or whole pages with their scales: sources as they were, the last of several copies to one place."""
    codes, src, dst = _as_codes(pool), src_.obj, dst_.obj
    scales = None if scales_ is None else scales_.obj
    page_size = codes.shape[1]
    count = len(codes) if pages else len(codes) * page_size
    kept = (src >= 0) & (src < count) & (dst >= 0) & (dst < count)
    src = src[kept]
    dst, last = _winners(dst[kept], count)
    src = src[last]
    if pages:
        codes[dst] = codes[src]
    else:
        codes[dst // page_size, dst % page_size] = codes[src // page_size, src % page_size]
    if scales is not None:
        scales[dst] = scales[src]


def rotate(a: Array, turn: Rotation, inverse: bool, stream: int) -> None:
    """Rotate the last elements of every head of (T, H, D) in place."""
    x = a.obj
    begin = x.shape[-1] - 2 * turn.cos.shape[1]
    turned = turn.positions.obj >= 0
    with np.errstate(over="ignore"):
        x[turned, :, begin:] = rotated(x, turn, inverse)[turned, :, begin:].astype(x.dtype)


def build_lists(lists: Lists, indices: Array, indptr: Array, stream: int) -> None:
    """Window and paged entries of every row, ragged."""
    sequences, positions, counts, ring_start, table, topk = (
        None if a is None else a.obj
        for a in (lists.sequences, lists.positions, lists.counts, lists.ring_start, lists.page_table, lists.topk)
    )
    table_entries = min(table.shape[1] * lists.page_size, 2**31 - 1) if table is not None else 0
    rows = []
    for r in range(lists.num_rows):
        sequence = r if sequences is None else int(sequences[r])
        position = 0 if positions is None else int(positions[r])
        if not 0 <= sequence < lists.num_sequences or position < 0:
            rows.append(np.empty(0, np.int64))
            continue
        window = np.empty(0, np.int64)
        if ring_start is not None and lists.window:
            places = np.arange(position + 1 - min(position + 1, lists.window), position + 1)
            start = int(ring_start[sequence])
            window = start + places % lists.ring_size if start >= 0 else np.full(len(places), -1)
        entries = np.empty(0, np.int64)
        if topk is not None or table is not None:
            count = (position + 1) // lists.ratio if counts is None else int(counts[r])
            count = max(0, min(count, table_entries if topk is None else topk.shape[1]))
            entries = np.arange(count) if topk is None else topk[r, :count].astype(np.int64)
        if table is not None and len(entries):
            known = (entries >= 0) & (entries < table_entries)
            at = np.where(known, entries, 0)
            page = table[sequence, at // lists.page_size].astype(np.int64)
            known &= (page >= 0) & (page < 2**31)
            entries = np.where(
                known, lists.base + np.where(known, page, 0) * lists.page_size + at % lists.page_size, -1
            )
        row = np.concatenate([window, entries])
        rows.append(np.where((row >= 0) & (row < 2**31), row, -1))
    _write_lists(rows, indices.obj, indptr.obj)


def pack_lists(lists: Lists, indices: Array, indptr: Array, stream: int) -> None:
    """Padded ids of every row, ragged."""
    assert lists.topk is not None
    ids = lists.topk.obj
    rows = []
    for r in range(lists.num_rows):
        width = ids.shape[1] if lists.counts is None else max(0, min(int(lists.counts.obj[r]), ids.shape[1]))
        row = ids[r, :width]
        rows.append(row[(row >= 0) & (row < 2**31)])
    _write_lists(rows, indices.obj, indptr.obj)


def _write_lists(rows: list[np.ndarray], indices: np.ndarray, indptr: np.ndarray) -> None:
    flat = np.concatenate([*rows, np.empty(0, np.int64)])[: len(indices)]
    indices[: len(flat)] = flat
    indices[len(flat) :] = -1
    indptr[0] = 0
    indptr[1:] = np.minimum(np.cumsum([len(r) for r in rows]), len(indices)) if rows else 0
