"""A rank's own slots out of lists of the whole pool's, on a GPU; see `cupy_paged.distributed` and kernels/split.cu."""

from __future__ import annotations

import struct

from ..arrays import Array
from .cuda import device_of, launch
from .numpy_split import Geometry

CHUNK = 2048  # entries of kv_indices that one block counts
_THREADS = 256
_SPLIT = struct.Struct("<5qI6i4x")  # struct SplitParams of kernels/split.cu


def chunks(nnz: int) -> int:
    """Blocks that count, hence the entries of `counts`."""
    return max(1, -(-nnz // CHUNK))


def _pack(ptrs: tuple[int, ...], nnz: int, num_rows: int, geometry: Geometry) -> bytes:
    rank, size, page_size, num_slots = geometry
    return _SPLIT.pack(*ptrs, min(num_slots, 2**31), nnz, num_rows, chunks(nnz), page_size, rank, size)


def localise(slots: Array, out: Array, geometry: Geometry, stream: int) -> None:
    """Local slot ids; -1 for those of other ranks and outside the pool."""
    count = slots.shape[0]
    if count:
        packed = _pack((slots.ptr, 0, out.ptr, 0, 0), count, 0, geometry)
        grid = (-(-count // _THREADS),)
        launch(device_of(slots), "split.cu", "localise", {"CHUNK": CHUNK}, grid, _THREADS, 0, stream, packed)


def split(
    indices: Array, indptr: Array, out_indices: Array, out_indptr: Array, counts: Array, geometry: Geometry, stream: int
) -> None:
    """This rank's part of every list, in order; what is left of `out_indices` is -1."""
    nnz, rows = indices.shape[0], indptr.shape[0] - 1
    packed = _pack((indices.ptr, indptr.ptr, out_indices.ptr, out_indptr.ptr, counts.ptr), nnz, rows, geometry)
    device, n = device_of(indices), chunks(nnz)
    launch(device, "split.cu", "count_owned", {"CHUNK": CHUNK}, (n,), _THREADS, 0, stream, packed)
    grid = (n + -(-(rows + 1) // (_THREADS // 32)),)
    launch(device, "split.cu", "split_owned", {"CHUNK": CHUNK}, grid, _THREADS, 0, stream, packed)
