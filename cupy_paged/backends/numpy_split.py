"""A rank's own slots out of lists of the whole pool's, on NumPy; see `cupy_paged.distributed`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array

Geometry = tuple[int, int, int, int]  # rank, size, page_size, num_slots


def _local(slots: Any, geometry: Geometry) -> Any:
    rank, size, page_size, num_slots = geometry
    slots = slots.astype(np.int64)
    page = slots // page_size
    mine = (slots >= 0) & (slots < num_slots) & (page % size == rank)
    return np.where(mine, page // size * page_size + slots % page_size, -1)


def localise(slots: Array, out: Array, geometry: Geometry, stream: int) -> None:
    """Local slot ids; -1 for those of other ranks and outside the pool."""
    out.obj[...] = _local(slots.obj, geometry)


def split(
    indices: Array, indptr: Array, out_indices: Array, out_indptr: Array, counts: Array, geometry: Geometry, stream: int
) -> None:
    """This rank's part of every list, in order; what is left of `out_indices` is -1."""
    local = _local(indices.obj, geometry)
    before = np.concatenate([[0], np.cumsum(local >= 0)])
    out_indptr.obj[...] = before[np.clip(indptr.obj, 0, len(local))]
    kept = local[local >= 0]
    out_indices.obj[: len(kept)] = kept
    out_indices.obj[len(kept) :] = -1
