"""All argument validation, for both backends, before anything is launched or written.

Order: presence, device, dtype, layout, shape. TypeError for a wrong kind or dtype, ValueError for a wrong shape,
length or value. A message names the argument, what was expected and what came, and the likely cause.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from .arrays import HOST, Array
from .plan import Problem

FP8 = "float8_e4m3fn"
MAX_HEAD_DIM = 512
GROUP_SIZES = (32, 64, 128)
MAX_PARTS = 64  # of merge_states: they travel as one kernel argument of 4 KB
_OTHER_FP8 = "e4m3fn is the only FP8 format; convert the values, do not reinterpret the bytes"


def _where(a: Array) -> str:
    return "in host memory (NumPy)" if a.device == HOST else f"on CUDA device {a.device}"


def require(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is None:
            raise TypeError(f"{name} is missing (None)")


def same_device(reference: str, **arrays: Array | None) -> None:
    """All arrays where the one called `reference` is."""
    first = arrays[reference]
    assert first is not None
    for name, a in arrays.items():
        if a is None or a.device == first.device:
            continue
        if HOST in (a.device, first.device):
            host, cuda = (name, reference) if a.device == HOST else (reference, name)
            raise TypeError(
                f"{name} is {_where(a)} but {reference} is {_where(first)}: give all arrays on one device, "
                f"e.g. cupy.asarray({host}) to run on CUDA or {cuda}.get() to run on NumPy"
            )
        raise ValueError(f"{name} is {_where(a)} but {reference} is {_where(first)}: all arrays must share one device")


def dtype(name: str, a: Array, *wanted: str) -> None:
    if a.dtype not in wanted:
        hint = f"; convert it with {name}.astype('{wanted[0]}')" if "int" in a.dtype and wanted[0] == "int32" else ""
        raise TypeError(f"{name} must be {' or '.join(wanted)}, got {a.dtype}{hint}")


def ndim(name: str, a: Array, wanted: int, axes: str) -> None:
    if a.ndim != wanted:
        raise ValueError(f"{name} must have shape {axes}, got {a.shape}")


def contiguous_last(name: str, a: Array, itemsize: int) -> None:
    if 0 not in a.shape and a.shape[-1] > 1 and a.strides[-1] != itemsize:
        raise ValueError(
            f"the last axis of {name} must be contiguous (stride {itemsize} bytes), got strides {a.strides} bytes; "
            f"make a contiguous copy first"
        )


def contiguous(name: str, a: Array, itemsize: int) -> None:
    """A one-dimensional array that a kernel reads from its first address on."""
    if a.device != HOST and a.ndim == 1 and a.shape[0] > 1 and a.strides[0] != itemsize:
        raise ValueError(
            f"{name} must be contiguous on a GPU (stride {itemsize} bytes), got strides {a.strides} bytes; "
            f"make a contiguous copy first, e.g. {name}.copy()"
        )


def target(name: str, a: Array) -> None:
    """An array to be written: writable, and no element twice."""
    if not a.writable:
        raise ValueError(f"{name} is read-only; give a writable array")
    if 0 not in a.shape and any(n > 1 and s == 0 for n, s in zip(a.shape, a.strides, strict=True)):
        raise ValueError(
            f"{name} has overlapping elements (strides {a.strides} bytes); give an array with memory of its own"
        )


def positive_int(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {type(value).__qualname__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def group_size(value: Any, head_dim: int) -> int:
    size = positive_int("group_size", value)
    if head_dim % size:
        raise ValueError(f"group_size must divide the head dimension: D = {head_dim}, group_size = {size}")
    if size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {GROUP_SIZES}, got {size}")
    return size


def finite(name: str, value: Any) -> float:
    if type(value) is float and abs(value) <= 3e38:  # the usual case, for warm calls
        return value
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.floating, np.integer)):
        raise TypeError(f"{name} must be a Python or NumPy float, got {type(value).__qualname__}")
    number = float(value)
    if not math.isfinite(number) or abs(number) > 3e38:
        raise ValueError(f"{name} must be finite, got {value}")
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def head_dim(name: str, size: int) -> None:
    if size % 64 or not 64 <= size <= MAX_HEAD_DIM:
        raise ValueError(
            f"the head dimension D of {name} must be a multiple of 64 from 64 to {MAX_HEAD_DIM}, got {size}"
        )


def problem_dtypes(q_dtype: str, kv_dtype: str) -> tuple[str, str]:
    """The dtypes of q and of the pool where they are given by name."""
    if q_dtype not in ("bfloat16", "float16"):
        raise TypeError(f"q_dtype must be bfloat16 or float16, got {q_dtype}")
    stored = FP8 if kv_dtype == "uint8" else kv_dtype
    if stored not in (FP8, q_dtype):
        raise TypeError(f"kv_dtype must be {FP8} or q_dtype, which is {q_dtype}, got {kv_dtype}")
    return q_dtype, stored


def pool_dtype(pool: Array, scales: Array | None, q_dtype: str | None, pool_name: str, scales_name: str) -> str:
    """Stored format of a pool: FP8 exactly with scales, else `q_dtype` (or any 16-bit float when None)."""
    stored = FP8 if pool.dtype == "uint8" else pool.dtype
    if stored.startswith("float8") and stored != FP8:
        raise TypeError(f"{pool_name} must be {FP8} (or its codes as uint8), got {pool.dtype}: {_OTHER_FP8}")
    if scales is not None:
        if stored != FP8:
            raise TypeError(
                f"{scales_name} was given, so {pool_name} must be {FP8} (or its codes as uint8), got {pool.dtype}; "
                f"leave {scales_name} out for a {pool.dtype} pool"
            )
        if scales.dtype != "float32":
            raise TypeError(f"{scales_name} must be float32, got {scales.dtype}")
        return stored
    if stored == FP8:
        raise ValueError(
            f"{pool_name} is {pool.dtype} ({FP8} codes) and {scales_name} is missing: scales are never assumed to be 1.0; "
            f"give the float32 array of shape (num_pages, D // group_size), e.g. quantize_kv(kv).scales"
        )
    if q_dtype is None:
        dtype(pool_name, pool, "bfloat16", "float16")
    elif stored != q_dtype:
        raise TypeError(
            f"without {scales_name}, {pool_name} must have q's dtype: q is {q_dtype}, {pool_name} is {pool.dtype}"
        )
    return stored


def pool_shape(pool: Array, name: str) -> tuple[int, int, int]:
    """(num_pages, page_size, D) of a pool of shape (num_pages, D) or (num_pages, page_size, D)."""
    if pool.ndim == 2:
        pages, size = pool.shape
        return pages, 1, size
    if pool.ndim == 3:
        pages, page_size, size = pool.shape
        if page_size == 0:
            raise ValueError(f"{name} must have at least one slot a page, got shape {pool.shape}")
        return pages, page_size, size
    raise ValueError(f"{name} must have shape (num_pages, D) or (num_pages, page_size, D), got {pool.shape}")


def scales_shape(scales: Array, pool: tuple[int, int, int], size: int, name: str, pool_name: str) -> None:
    """Exactly (num_pages, D // group_size), or a ValueError that says what the shape looks like."""
    pages, page_size, width = pool
    groups = width // size
    wanted, got = (pages, groups), scales.shape
    if got == wanted:
        return
    count = math.prod(got)
    if scales.ndim == 1 and count == pages * groups:
        cause = f"a flat vector of the right size: reshape it with {name}.reshape({pages}, {groups})"
    elif scales.ndim == 2 and got == (groups, pages):
        cause = f"the transposed array: give {name}.T as a contiguous copy"
    elif scales.ndim >= 2 and page_size > 1 and got[-1] == groups and math.prod(got[:-1]) == pages * page_size:
        cause = (
            f"one row of scales per slot ({pages} pages of {page_size} slots); here all slots of a page share one row: "
            f"quantise page by page (quantize_kv of shape (num_pages, page_size, D)), or use pages of one slot"
        )
    elif scales.ndim == 2 and got[1] == groups and got[0] < pages:
        cause = (
            f"the pool grew without its scales ({got[0]} rows of scales for {pages} pages): grow both together "
            f"(PagedKV.grow does), or quantise the new pages"
        )
    elif scales.ndim == 2 and got[1] == groups:
        cause = f"scales of a larger pool ({got[0]} pages), or of another one: slice {name}[:{pages}] only if the pages agree"
    elif scales.ndim == 2 and got[0] == pages and got[1] > 0:
        cause = f"{got[1]} groups a row, as for a head dimension of {got[1] * size} or a group_size of {width // got[1] if width % got[1] == 0 else '?'}"
        if got[1] == 1:
            cause = "one scale per row (per-token quantisation): repeat it over the groups only if that is how the codes were made"
    else:
        cause = "scales of another pool"
    raise ValueError(
        f"{name} must have shape (num_pages, D // group_size) = {wanted} for {pool_name} with {pages} pages, "
        f"D = {width} and group_size = {size}, got {got}; it looks like {cause}"
    )


def decode(
    q: Array,
    pool: Array,
    indices: Array,
    indptr: Array,
    sink: Array | None,
    scales: Array | None,
    out: Array | None,
    size: Any,
    num_splits: int,
    batch_invariant: bool,
) -> Problem:
    """Check the arrays of `paged_decode`; a pure function of their layouts."""
    same_device(
        "q", q=q, unified_kv=pool, kv_indices=indices, kv_indptr=indptr, attn_sink=sink, kv_scales=scales, out=out
    )
    dtype("q", q, "bfloat16", "float16")
    stored = pool_dtype(pool, scales, q.dtype, "unified_kv", "kv_scales")
    dtype("kv_indices", indices, "int32")
    dtype("kv_indptr", indptr, "int32")
    if sink is not None:
        dtype("attn_sink", sink, "float32")
    if out is not None:
        dtype("out", out, q.dtype)

    ndim("q", q, 3, "(T, H, D)")
    t, h, d = q.shape
    pages, page_size, pool_width = pool_shape(pool, "unified_kv")
    contiguous_last("q", q, 2)
    contiguous_last("unified_kv", pool, 1 if stored == FP8 else 2)
    if scales is not None and scales.ndim == 2:
        contiguous_last("kv_scales", scales, 4)
    if out is not None:
        target("out", out)
        contiguous_last("out", out, 2)
    contiguous("kv_indices", indices, 4)
    contiguous("kv_indptr", indptr, 4)
    if sink is not None:
        contiguous("attn_sink", sink, 4)

    head_dim("q", d)
    if h < 1:
        raise ValueError(f"q must have at least one head, got shape {q.shape}")
    if pool_width != d:
        raise ValueError(f"q and unified_kv must have the same head dimension, got {d} and {pool_width}")
    groups = 0
    if scales is not None:
        groups = group_size(size, d)
        scales_shape(scales, (pages, page_size, d), groups, "kv_scales", "unified_kv")
    ndim("kv_indices", indices, 1, "(nnz,)")
    if indptr.shape != (t + 1,):
        raise ValueError(f"kv_indptr must have shape (T + 1,) = ({t + 1},) for q with {t} tokens, got {indptr.shape}")
    if sink is not None and sink.shape != (h,):
        raise ValueError(f"attn_sink must have shape (H,) = ({h},), got {sink.shape}")
    if out is not None and out.shape != q.shape:
        raise ValueError(f"out must have q's shape {q.shape}, got {out.shape}")
    nnz = indices.shape[0]
    if nnz >= 2**31:
        raise ValueError(f"kv_indices must have fewer than 2**31 entries (kv_indptr is int32), got {nnz}")
    return Problem(t, h, d, nnz, page_size, q.dtype, stored, groups, num_splits, batch_invariant)


def workspace(a: Array, q: Array) -> Array:
    same_device("q", q=q, workspace=a)
    dtype("workspace", a, "uint8")
    target("workspace", a)
    if a.ndim != 1 or (a.shape[0] > 1 and a.strides[0] != 1):
        raise ValueError(f"workspace must be one contiguous axis of bytes, got shape {a.shape}, strides {a.strides}")
    return a


def merge(outs: list[Array], lses: list[Array], sink: Array | None) -> None:
    """Check the arguments of `merge_states`."""
    if not outs:
        raise ValueError("outs must hold at least one partial result")
    if len(outs) > MAX_PARTS:
        raise ValueError(f"outs must hold at most {MAX_PARTS} partial results, got {len(outs)}: merge in steps")
    if len(outs) != len(lses):
        raise ValueError(f"outs and lses must be equally many, got {len(outs)} and {len(lses)}")
    first = outs[0]
    named = {f"outs[{i}]": a for i, a in enumerate(outs)} | {f"lses[{i}]": a for i, a in enumerate(lses)}
    same_device("outs[0]", **named, attn_sink=sink)
    dtype("outs[0]", first, "bfloat16", "float16", "float32")
    ndim("outs[0]", first, 3, "(T, H, D)")
    for i, (o, e) in enumerate(zip(outs, lses, strict=True)):
        dtype(f"outs[{i}]", o, first.dtype)
        dtype(f"lses[{i}]", e, "float32")
        contiguous_last(f"outs[{i}]", o, 4 if first.dtype == "float32" else 2)
        if o.shape != first.shape:
            raise ValueError(f"outs[{i}] must have the shape of outs[0], {first.shape}, got {o.shape}")
        if e.shape != first.shape[:2]:
            raise ValueError(f"lses[{i}] must have shape (T, H) = {first.shape[:2]}, got {e.shape}")
    if sink is not None:
        dtype("attn_sink", sink, "float32")
        contiguous("attn_sink", sink, 4)
        if sink.shape != first.shape[1:2]:
            raise ValueError(f"attn_sink must have shape (H,) = {first.shape[1:2]}, got {sink.shape}")


def index_values(indices: np.ndarray, indptr: np.ndarray, num_slots: int) -> None:
    """The contents of the lists, for ``validate=True``: raises on the first bad entry."""
    nnz = len(indices)
    if indptr[0] < 0 or indptr[0] > nnz:
        raise ValueError(f"kv_indptr[0] = {indptr[0]} is outside [0, {nnz}]")
    steps = np.diff(indptr.astype(np.int64))
    if (steps < 0).any():
        t = int(np.argmax(steps < 0))
        raise ValueError(
            f"kv_indptr must not decrease: kv_indptr[{t}] = {indptr[t]}, kv_indptr[{t + 1}] = {indptr[t + 1]}"
        )
    if indptr[-1] > nnz:
        t = int(np.argmax(indptr > nnz))
        raise ValueError(f"kv_indptr[{t}] = {indptr[t]} is beyond the {nnz} entries of kv_indices")
    used = indices[indptr[0] : indptr[-1]]
    bad = (used < 0) | (used >= num_slots)
    if bad.any():
        i = int(np.argmax(bad)) + int(indptr[0])
        t = int(np.searchsorted(indptr, i, side="right")) - 1
        raise IndexError(
            f"kv_indices[{i}] = {indices[i]} (token {t}, position {i - int(indptr[t])}) is outside the pool's "
            f"{num_slots} slots"
        )
