"""Validation of storing, quantising, rotating and list building; `checks` holds the rules they share with decoding.

The order is the same: presence, device, dtype, layout, shape, all before anything is launched or written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks
from .arrays import Array, dtype_name
from .checks import FP8

ROW_DTYPES = ("bfloat16", "float16", "float32")
INDEX_DTYPES = ("int32", "int64")
SCALE_FORMATS = ("float32", "pow2")
SCALE_MIN = 2.0**-80  # the scale of a group that holds nothing
MAX_SHARED_PAGE = 16384  # slots of an FP8 page that store_kv can write; a block keeps one number for each


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotary position embedding of the last ``2 * cos.shape[1]`` elements of each row."""

    positions: Array
    cos: Array
    sin: Array
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Lists:
    """What list building reads; see kernels/indices.cu. None: absent."""

    num_rows: int
    num_sequences: int
    sequences: Array | None = None
    positions: Array | None = None
    counts: Array | None = None
    ring_start: Array | None = None
    page_table: Array | None = None
    topk: Array | None = None
    window: int = 0
    ring_size: int = 1
    ratio: int = 1
    page_size: int = 1
    base: int = 0


def pow2_format(value: Any) -> bool:
    if value not in SCALE_FORMATS:
        raise ValueError(f"scale_format must be one of {SCALE_FORMATS}, got {value!r}")
    return bool(value == "pow2")


def dtype_argument(dtype: Any) -> str:
    """Canonical name of a dtype given by name, as a NumPy or torch dtype, or as a scalar type."""
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return dtype_name(dtype)


def indices(name: str, a: Array, wanted: int = 1, axes: str = "(T,)") -> None:
    checks.dtype(name, a, *INDEX_DTYPES)
    checks.ndim(name, a, wanted, axes)


def length(name: str, a: Array, count: int, what: str) -> None:
    if a.shape != (count,):
        raise ValueError(f"{name} must have shape ({count},), one for each {what}, got {a.shape}")


def rotation(
    positions: Array | None, cos: Array | None, sin: Array | None, interleaved: Any, head_dim: int
) -> Rotation | None:
    """The tables of a rotation (all three arrays or none); the caller checks devices and the number of positions."""
    given = {"positions": positions, "cos": cos, "sin": sin}
    missing = [name for name, a in given.items() if a is None]
    if len(missing) == 3:
        return None
    if missing:
        raise TypeError(f"positions, cos and sin belong together: {' and '.join(missing)} missing")
    assert positions is not None
    assert cos is not None
    assert sin is not None
    flag = checks.flag("interleaved", interleaved)
    indices("positions", positions)
    for name, table in (("cos", cos), ("sin", sin)):
        checks.dtype(name, table, "float32")
        checks.ndim(name, table, 2, "(num_positions, rope_dim // 2)")
        checks.contiguous_last(name, table, 4)
    if cos.shape != sin.shape:
        raise ValueError(f"cos and sin must have the same shape, got {cos.shape} and {sin.shape}")
    rope_dim = 2 * cos.shape[1]
    if rope_dim == 0 or rope_dim % 16 or rope_dim > head_dim:
        raise ValueError(
            f"cos and sin must have rope_dim // 2 columns, rope_dim a multiple of 16 from 16 to D = {head_dim}, "
            f"got {cos.shape[1]} columns (rope_dim = {rope_dim})"
        )
    return Rotation(positions, cos, sin, flag)


def store(
    pool: Array,
    scales: Array | None,
    slots: Array,
    kv: Array,
    positions: Array | None,
    cos: Array | None,
    sin: Array | None,
    interleaved: Any,
    size: Any,
) -> int:
    """Check the arrays of `store_kv`, a pure function of their layouts; returns the group size, 0 without scales."""
    checks.same_device(
        "unified_kv", unified_kv=pool, kv_scales=scales, slots=slots, kv=kv, positions=positions, cos=cos, sin=sin
    )
    stored = checks.pool_dtype(pool, scales, None, "unified_kv", "kv_scales")
    checks.dtype("kv", kv, *ROW_DTYPES)
    indices("slots", slots)
    checks.ndim("kv", kv, 2, "(T, D)")
    num_pages, page_size, head_dim = checks.pool_shape(pool, "unified_kv")
    checks.head_dim("unified_kv", head_dim)
    checks.contiguous_last("unified_kv", pool, 1 if stored == FP8 else 2)
    checks.contiguous_last("kv", kv, 4 if kv.dtype == "float32" else 2)
    checks.target("unified_kv", pool)
    if kv.shape[1] != head_dim:
        raise ValueError(f"kv and unified_kv must have the same head dimension, got {kv.shape[1]} and {head_dim}")
    length("slots", slots, kv.shape[0], f"row of kv, which has shape {kv.shape}")
    groups = 0
    if scales is not None:
        groups = checks.group_size(size, head_dim)
        checks.scales_shape(scales, (num_pages, page_size, head_dim), groups, "kv_scales", "unified_kv")
        checks.contiguous_last("kv_scales", scales, 4)
        checks.target("kv_scales", scales)
        if page_size > MAX_SHARED_PAGE:
            raise ValueError(
                f"an FP8 pool can be stored to with pages of at most {MAX_SHARED_PAGE} slots, got {page_size}"
            )
    if num_pages * page_size > 2**31:
        raise ValueError(f"unified_kv must have at most 2**31 slots, got {num_pages * page_size}")
    turn = rotation(positions, cos, sin, interleaved, head_dim)
    if turn is not None:
        length("positions", turn.positions, kv.shape[0], "row of kv")
    return groups


def quantize(kv: Array, size: Any) -> int:
    """Check `quantize_kv`'s argument; returns the group size."""
    checks.dtype("kv", kv, *ROW_DTYPES)
    _, _, head_dim = checks.pool_shape(kv, "kv")
    checks.head_dim("kv", head_dim)
    checks.contiguous_last("kv", kv, 4 if kv.dtype == "float32" else 2)
    return checks.group_size(size, head_dim)


def dequantize(codes: Array, scales: Array | None, slots: Array | None, out_dtype: str, size: Any) -> int:
    """Check the arrays of `dequantize_kv`; returns the group size (0 without scales)."""
    checks.same_device("codes", codes=codes, scales=scales, slots=slots)
    stored = checks.pool_dtype(codes, scales, None, "codes", "scales")
    if out_dtype not in ROW_DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(ROW_DTYPES)}, got {out_dtype}")
    shape = checks.pool_shape(codes, "codes")
    checks.head_dim("codes", shape[2])
    checks.contiguous_last("codes", codes, 1 if stored == FP8 else 2)
    if slots is not None:
        indices("slots", slots)
    if scales is None:
        return 0
    groups = checks.group_size(size, shape[2])
    checks.scales_shape(scales, shape, groups, "scales", "codes")
    checks.contiguous_last("scales", scales, 4)
    return groups


def rope(name: str, x: Array, positions: Array, cos: Array, sin: Array, interleaved: Any) -> Rotation:
    checks.same_device(name, **{name: x}, positions=positions, cos=cos, sin=sin)
    checks.dtype(name, x, *ROW_DTYPES)
    checks.ndim(name, x, 3, "(T, H, D)")
    checks.contiguous_last(name, x, 4 if x.dtype == "float32" else 2)
    checks.target(name, x)
    checks.head_dim(name, x.shape[2])
    turn = rotation(positions, cos, sin, interleaved, x.shape[2])
    assert turn is not None
    length("positions", positions, x.shape[0], f"token of {name}, which has shape {x.shape}")
    return turn


def copy(pool: Array, src: Array, dst: Array) -> None:
    """Check the arguments of `copy_pages` and `copy_slots`."""
    checks.same_device("codes", codes=pool, src=src, dst=dst)
    indices("src", src, axes="(n,)")
    indices("dst", dst, axes="(n,)")
    if src.dtype != dst.dtype:
        raise TypeError(f"src and dst must have the same dtype, got {src.dtype} and {dst.dtype}")
    if src.shape != dst.shape:
        raise ValueError(f"src and dst must have the same length, got {src.shape} and {dst.shape}")


def v4_lists(
    given: dict[str, Array | None], window: Any, ring_size: Any, page_size: Any, base: Any, ratio: Any
) -> Lists:
    """Check the arguments of `lists_for_v4`; all arrays are on one device already."""
    positions, sequences, ring_start = given["positions"], given["sequences"], given["ring_start"]
    page_table, topk, num_entries = given["page_table"], given["topk"], given["num_entries"]
    assert positions is not None
    assert ring_start is not None
    indices("positions", positions)
    rows = positions.shape[0]
    what = f"token of positions, which has shape {positions.shape}"
    for name, a in (("sequences", sequences), ("num_entries", num_entries)):
        if a is not None:
            indices(name, a)
            length(name, a, rows, what)
    indices("ring_start", ring_start, axes="(num_sequences,)")
    count = ring_start.shape[0]
    if sequences is None and count != rows:
        raise ValueError(
            f"without sequences, ring_start must have one entry for each of the {rows} tokens, got {count}"
        )
    if page_table is not None:
        indices("page_table", page_table, 2, "(num_sequences, max_pages)")
        if page_table.shape[0] != count:
            raise ValueError(
                f"page_table must have one row for each of the {count} sequences of ring_start, got {page_table.shape}"
            )
    if topk is not None:
        indices("topk", topk, 2, "(T, K)")
        if topk.shape[0] != rows:
            raise ValueError(f"topk must have one row for each {what}, got {topk.shape}")
    compressed = page_table is not None or topk is not None
    if compressed and num_entries is None and ratio is None:
        raise TypeError("page_table and topk need num_entries, or ratio to derive it from positions")
    if not compressed and (num_entries is not None or ratio is not None):
        raise TypeError("num_entries and ratio need page_table or topk")
    span = checks.positive_int("window", window, 0)
    ring = span if ring_size is None else checks.positive_int("ring_size", ring_size)
    if ring < span:
        raise ValueError(f"ring_size must be at least window = {span}, got {ring}")
    return Lists(
        rows,
        count,
        sequences,
        positions,
        num_entries,
        ring_start,
        page_table,
        topk,
        window=span,
        ring_size=max(ring, 1),
        ratio=1 if ratio is None else checks.positive_int("ratio", ratio),
        page_size=checks.positive_int("page_size", page_size),
        base=checks.positive_int("base", base, 0),
    )


def capacity_of(value: Any, most: int) -> int:
    """Entries of kv_indices: as many as the shapes allow, or as given."""
    entries = most if value is None else checks.positive_int("capacity", value, 0)
    if entries >= 2**31:
        raise ValueError(
            f"kv_indices would have {entries} entries, more than int32 kv_indptr can count; "
            f"give capacity, an upper bound on the sum of all lengths"
        )
    return entries


def list_outputs(out: tuple[Array, Array], like: Array, num_rows: int) -> None:
    """Given kv_indices and kv_indptr to be written."""
    kv_indices, kv_indptr = out
    checks.same_device("the inputs", **{"the inputs": like}, kv_indices=kv_indices, kv_indptr=kv_indptr)
    for name, a in (("kv_indices", kv_indices), ("kv_indptr", kv_indptr)):
        checks.dtype(name, a, "int32")
        checks.ndim(name, a, 1, "(capacity,)" if name == "kv_indices" else "(T + 1,)")
        checks.contiguous_last(name, a, 4)
        checks.target(name, a)
    if kv_indptr.shape != (num_rows + 1,):
        raise ValueError(f"kv_indptr must have shape (T + 1,) = ({num_rows + 1},), got {kv_indptr.shape}")


def stored_values(slots: np.ndarray, kv: np.ndarray, num_slots: int) -> None:
    """The contents of a store, for ``validate=True``: raises on the first bad slot or value."""
    bad = (slots < 0) | (slots >= num_slots)
    if bad.any():
        row = int(np.argmax(bad))
        raise IndexError(f"slots[{row}] = {slots[row]} is outside the pool's {num_slots} slots")
    finite_rows("kv", kv)


def finite_rows(name: str, kv: np.ndarray) -> None:
    finite = np.isfinite(kv.astype(np.float32, copy=False))
    if not finite.all():
        where = tuple(int(i) for i in np.unravel_index(int(np.argmin(finite)), kv.shape))
        raise ValueError(f"{name}[{', '.join(map(str, where))}] is {float(kv[where])}; it would be stored as NaN")


def position_values(positions: np.ndarray, num_positions: int) -> None:
    bad = (positions < 0) | (positions >= num_positions)
    if bad.any():
        row = int(np.argmax(bad))
        raise IndexError(f"positions[{row}] = {positions[row]} is outside the {num_positions} rows of cos and sin")
