"""CUDA launches of everything but decoding: quantise, dequantise, store, copy, rotate, build lists.

Every function takes arrays that `checks` has passed, packs the kernel's one argument (the struct at the head of its
.cu file; field order and sizes must agree) and launches on the given stream. Nothing here synchronises.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

from .. import arrays
from ..arrays import Array
from ..checks_pool import Lists, Rotation
from .cuda import Device, device_of, launch, load, run
from .launch import Launch, Params

_ROW = {"bfloat16": 1, "float16": 2, "float32": 3}
_POOL = {"float8_e4m3fn": 0, "uint8": 0, "bfloat16": 1, "float16": 2}

_ROPE = struct.Struct("<3q4qif")
_STORE = struct.Struct("<4q64s7q6i")
_DEQUANTIZE = struct.Struct("<4q6q")
_store_params = Params(_STORE.size)
_MOVE = struct.Struct("<6q6q5i4x")
_ROTATE = struct.Struct("<q64s2q2i")
_INTS = struct.Struct("<2qi4x")
_INTS2 = struct.Struct("<2qi4xq")
_LISTS = struct.Struct("<" + 4 * "24s" + 2 * "32s" + "2q3q8i")
_NO_INTS = bytes(_INTS.size)
_NO_INTS2 = bytes(_INTS2.size)
_NO_ROPE = bytes(_ROPE.size)

_MAX_BLOCK_ROWS = 512  # store_rows: rows whose owners one block keeps in shared memory
_WINNER_BYTES = 16 * 1024  # store_pages: shared memory for the rows that win the slots of a block's pages


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _pool_geometry(pool: Array) -> tuple[int, int, int, int, int]:
    """(num_pages, page_size, head_dim, page_stride, slot_stride), strides in bytes."""
    if pool.ndim == 2:
        return pool.shape[0], 1, pool.shape[1], pool.strides[0], 0
    num_pages, page_size, head_dim = pool.shape
    return num_pages, page_size, head_dim, pool.strides[0], pool.strides[1]


def _aligned(*places: Array) -> int:
    """1 if every row of the arrays begins on 16 bytes."""
    return int(all(a.ptr % 16 == 0 and all(s % 16 == 0 for s in a.strides[:-1]) for a in places))


def _rope_constants(rotation: Rotation | None) -> tuple[int, int]:
    """ROPE and ROPE_DIM of kernels/quantize.cuh."""
    return (0, 0) if rotation is None else (1 if rotation.interleaved else 2, 2 * rotation.cos.shape[1])


def _rope(rotation: Rotation | None, sign: float = 1.0) -> bytes:
    if rotation is None:
        return _NO_ROPE
    positions, cos, sin = rotation.positions, rotation.cos, rotation.sin
    itemsize = arrays.ITEMSIZE[positions.dtype]
    return _ROPE.pack(
        positions.ptr,
        cos.ptr,
        sin.ptr,
        positions.strides[0] // itemsize,
        cos.strides[0] // 4,
        sin.strides[0] // 4,
        cos.shape[0],
        itemsize,
        sign,
    )


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Launch geometry of a store kernel and the numbers of StoreParams that belong to it."""

    blocks: int
    threads: int
    rows_per_warp: int
    block_rows: int
    round: int = 1
    table_size: int = 1
    filter_shift: int = 31
    shared_bytes: int = 0


@functools.lru_cache(maxsize=4096)
def _row_geometry(num_rows: int, head_dim: int, scatter: bool, num_sms: int) -> _Geometry:
    """Of store_rows.

    Without slots, small blocks. With them every block looks through all later slots, so there are about two blocks an
    SM at most: of 4 to 16 warps with one row each, then of 32 warps with more and more rows.
    """
    rows_per_step = 32 // min(32, _power_of_two(head_dim // 8))
    steps = _ceil_div(num_rows, rows_per_step)
    warps, steps_per_warp = (min(16, max(4, _power_of_two(_ceil_div(steps, num_sms)))) if scatter else 8), 1
    if scatter and steps > 32 * num_sms:
        warps = 32
        steps_per_warp = min(_power_of_two(_ceil_div(steps, 32 * num_sms)), _MAX_BLOCK_ROWS // (32 * rows_per_step))
    rows_per_warp = steps_per_warp * rows_per_step
    block_rows = warps * rows_per_warp
    blocks = _ceil_div(num_rows, block_rows)
    if not scatter:
        return _Geometry(blocks, 32 * warps, rows_per_warp, block_rows)
    table, words = 2 * _power_of_two(block_rows), 8 * _power_of_two(block_rows)
    shift = 33 - words.bit_length()
    return _Geometry(blocks, 32 * warps, rows_per_warp, block_rows, 1, table, shift, 4 * words + 8 * table)


@functools.lru_cache(maxsize=4096)
def _page_geometry(num_pages: int, num_rows: int, page_size: int, scatter: bool, num_sms: int) -> _Geometry:
    """Of store_pages: 8 warps for the at most 8 chunks of a row; blocks enough to fill the GPU, as their pages wait."""
    if not scatter:
        return _Geometry(num_pages, 256, 1, 1)
    block_rows = min(256, max(1, num_rows // (2 * num_sms)))
    table, words = 2 * _power_of_two(block_rows), 8 * _power_of_two(block_rows)
    shift = 33 - words.bit_length()
    at_once = min(block_rows, max(1, _WINNER_BYTES // (4 * page_size)))
    shared = 4 * words + 12 * table + 8 * block_rows + 6 * at_once * page_size
    return _Geometry(_ceil_div(num_rows, block_rows), 256, 1, block_rows, at_once, table, shift, shared)


@functools.lru_cache(maxsize=4096)
def _store_kernel(
    device: Device,
    pool: tuple[int, int, int],
    num_rows: int,
    group_size: int,
    row_dtype: str,
    pool_dtype: str,
    index_bytes: int,
    aligned: int,
    pow2: bool,
    rope: tuple[int, int],
) -> tuple[Launch, _Geometry]:
    """The kernel of a store, loaded and with its geometry; group_size is 0 for pools without scales."""
    num_pages, page_size, head_dim = pool
    shared_scales = group_size > 0 and page_size > 1
    if shared_scales:
        geometry = _page_geometry(num_pages, num_rows, page_size, index_bytes > 0, device.num_sms)
    else:
        geometry = _row_geometry(num_rows, head_dim, index_bytes > 0, device.num_sms)
    constants = {
        "HEAD_DIM": head_dim,
        "GROUP_SIZE": group_size or 64,
        "ROW_DTYPE": _ROW[row_dtype],
        "KV_DTYPE": _POOL[pool_dtype],
        "POW2_SCALES": int(pow2),
        "ALIGNED": aligned,
        "PAGE_SIZE": page_size,
        "INDEX_BYTES": index_bytes,
        "ROPE": rope[0],
        "ROPE_DIM": rope[1],
    }
    name = "store_pages" if shared_scales else "store_rows"
    kernel = load(device, f"{name}.cu", name, constants, (geometry.blocks,), geometry.threads, geometry.shared_bytes)
    return kernel, geometry


def store(
    rows: Array,
    slots: Array | None,
    pool: Array,
    scales: Array | None,
    group_size: int,
    pow2: bool,
    rotation: Rotation | None,
    stream: int,
) -> None:
    """Rows into `slots` of the pool, or without slots row r into slot r, which quantises whole pools."""
    num_pages, page_size, head_dim, page_stride, slot_stride = _pool_geometry(pool)
    row_stride = rows.strides[-2]
    if rows.ndim == 3:
        num_rows, page_of_rows = rows.shape[0] * rows.shape[1], rows.strides[0]
    else:
        num_rows, page_of_rows = rows.shape[0], row_stride * page_size
    if num_rows == 0:
        return
    index_bytes = arrays.ITEMSIZE[slots.dtype] if slots is not None else 0
    kernel, geometry = _store_kernel(
        device_of(pool),
        (num_pages, page_size, head_dim),
        num_rows,
        group_size if scales is not None else 0,
        rows.dtype,
        pool.dtype,
        index_bytes,
        _aligned(rows, pool),
        pow2,
        _rope_constants(rotation),
    )
    _STORE.pack_into(
        _store_params.buffer,
        0,
        rows.ptr,
        slots.ptr if slots is not None else 0,
        pool.ptr,
        scales.ptr if scales is not None else 0,
        _rope(rotation),
        row_stride,
        page_of_rows,
        slots.strides[0] // index_bytes if slots is not None else 0,
        page_stride,
        slot_stride,
        scales.strides[0] // 4 if scales is not None else 0,
        num_pages * page_size,
        num_rows,
        geometry.rows_per_warp,
        geometry.block_rows,
        geometry.round,
        geometry.table_size,
        geometry.filter_shift,
    )
    run(kernel, pool.device, _store_params.address, stream)


def quantize(kv: Array, codes: Array, scales: Array, group_size: int, pow2: bool, stream: int) -> None:
    """Rows or pages of kv to `codes` and `scales`."""
    store(kv, None, codes, scales, group_size, pow2, None, stream)


def dequantize(
    pool: Array, scales: Array | None, slots: Array | None, out: Array, group_size: int, stream: int
) -> None:
    """Slots of the pool, or all of it, as rows of `out` (contiguous)."""
    num_pages, page_size, head_dim, page_stride, slot_stride = _pool_geometry(pool)
    num_rows = slots.shape[0] if slots is not None else num_pages * page_size
    if num_rows == 0:
        return
    index_bytes = arrays.ITEMSIZE[slots.dtype] if slots is not None else 0
    constants = {
        "HEAD_DIM": head_dim,
        "GROUP_SIZE": group_size if scales is not None else 64,
        "KV_DTYPE": _POOL[pool.dtype],
        "OUT_DTYPE": _ROW[out.dtype],
        "PAGE_SIZE": page_size,
        "INDEX_BYTES": index_bytes,
        "ALIGNED": _aligned(pool, out),
    }
    packed = _DEQUANTIZE.pack(
        pool.ptr,
        scales.ptr if scales is not None else 0,
        slots.ptr if slots is not None else 0,
        out.ptr,
        page_stride,
        slot_stride,
        scales.strides[0] // 4 if scales is not None else 0,
        slots.strides[0] // index_bytes if slots is not None else 0,
        num_pages * page_size,
        num_rows,
    )
    grid = (_ceil_div(num_rows, 8),)
    launch(device_of(pool), "dequantize.cu", "dequantize_rows", constants, grid, 256, 0, stream, packed)


def move(pool: Array, scales: Array | None, src: Array, dst: Array, pages: bool, stream: int) -> None:
    """Copy slots, or whole pages with their scales, within the pool; `src` and `dst` share a dtype."""
    num_pages, page_size, head_dim, page_stride, slot_stride = _pool_geometry(pool)
    count = src.shape[0]
    if count == 0:
        return
    index_bytes = arrays.ITEMSIZE[src.dtype]
    row_bytes = head_dim * arrays.ITEMSIZE[pool.dtype]
    item_rows = page_size if pages else 1
    groups = scales.shape[1] if scales is not None else 0
    scratch = arrays.empty(pool, (count, item_rows * row_bytes), "uint8")
    scratch_scales = arrays.empty(pool, (count, max(groups, 1)), "float32")
    packed = _MOVE.pack(
        pool.ptr,
        scales.ptr if scales is not None else 0,
        scratch.ptr,
        scratch_scales.ptr,
        src.ptr,
        dst.ptr,
        src.strides[0] // index_bytes,
        dst.strides[0] // index_bytes,
        page_stride,
        slot_stride,
        scales.strides[0] // 4 if scales is not None else 0,
        num_pages if pages else num_pages * page_size,
        1 if pages else page_size,
        item_rows,
        row_bytes,
        groups,
        count,
    )
    for gather in (1, 0):
        constants = {"GATHER": gather, "INDEX_BYTES": index_bytes, "ALIGNED": _aligned(pool, scratch)}
        launch(device_of(pool), "move.cu", "move_items", constants, (count, 1, 1), 256, 0, stream, packed)


def rotate(x: Array, rotation: Rotation, inverse: bool, stream: int) -> None:
    """Rotate the last elements of every head of x (T, H, D) in place."""
    interleaved, rope_dim = _rope_constants(rotation)
    num_tokens, num_heads, head_dim = x.shape
    threads = num_tokens * num_heads * rope_dim // 16
    if threads == 0:
        return
    constants = {
        "HEAD_DIM": head_dim,
        "ROW_DTYPE": _ROW[x.dtype],
        "ALIGNED": _aligned(x),
        "ROPE": interleaved,
        "ROPE_DIM": rope_dim,
    }
    rope = _rope(rotation, -1.0 if inverse else 1.0)
    packed = _ROTATE.pack(x.ptr, rope, x.strides[0], x.strides[1], num_tokens, num_heads)
    launch(device_of(x), "rope.cu", "rope_rows", constants, (_ceil_div(threads, 256),), 256, 0, stream, packed)


def _ints(a: Array | None) -> bytes:
    if a is None:
        return _NO_INTS
    itemsize = arrays.ITEMSIZE[a.dtype]
    return _INTS.pack(a.ptr, a.strides[0] // itemsize, itemsize)


def _ints2(a: Array | None) -> bytes:
    if a is None:
        return _NO_INTS2
    itemsize = arrays.ITEMSIZE[a.dtype]
    return _INTS2.pack(a.ptr, a.strides[1] // itemsize, itemsize, a.strides[0] // itemsize)


def _pack_lists(lists: Lists, indices: Array, indptr: Array, rows_per_block: int) -> bytes:
    table, topk = lists.page_table, lists.topk
    return _LISTS.pack(
        _ints(lists.sequences),
        _ints(lists.positions),
        _ints(lists.counts),
        _ints(lists.ring_start),
        _ints2(table),
        _ints2(topk),
        indices.ptr,
        indptr.ptr,
        indices.shape[0],
        lists.num_sequences,
        lists.base,
        min(table.shape[1] * lists.page_size, 2**31 - 1) if table is not None else 0,
        topk.shape[1] if topk is not None else 0,
        lists.num_rows,
        lists.window,
        lists.ring_size,
        lists.ratio,
        lists.page_size,
        rows_per_block,
    )


def build_lists(lists: Lists, indices: Array, indptr: Array, stream: int) -> None:
    """Window and paged entries of every row, ragged (one launch)."""
    rows_per_block = max(1, _ceil_div(lists.num_rows, 1024))
    blocks = max(1, _ceil_div(lists.num_rows, rows_per_block))
    longest = indices.shape[0] // max(lists.num_rows, 1)
    parts = max(1, min(_ceil_div(longest, 512), 1024 // blocks))
    packed = _pack_lists(lists, indices, indptr, rows_per_block)
    launch(device_of(indptr), "indices.cu", "build_lists", {}, (blocks, parts), 256, 0, stream, packed)


def pack_lists(lists: Lists, indices: Array, indptr: Array, stream: int) -> None:
    """Padded ids of every row, ragged (three launches)."""
    packed = _pack_lists(lists, indices, indptr, 1)
    blocks = max(1, lists.num_rows)
    device = device_of(indptr)
    launch(device, "indices.cu", "count_padded", {}, (blocks,), 256, 0, stream, packed)
    launch(device, "indices.cu", "scan_counts", {}, (1,), 1024, 0, stream, packed)
    launch(device, "indices.cu", "fill_padded", {}, (blocks,), 256, 0, stream, packed)
