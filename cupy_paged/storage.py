"""Public functions that fill a pool and read it back: quantise, dequantise, store, rotate."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import arrays, checks, checks_pool
from .arrays import Array, view


class QuantizedKV(NamedTuple):
    """What `quantize_kv` returns: e4m3fn codes in kv's shape, and float32 scales (num_pages, D // group_size)."""

    codes: Any
    scales: Any


_passed: dict[tuple[Any, ...], tuple[int, bool]] = {}  # layouts of stores that passed the checks


def _backend(a: Array) -> Any:
    if a.kind == "numpy":
        from .backends import numpy_pool

        return numpy_pool
    from .backends import cuda_pool

    return cuda_pool


def _optional(name: str, obj: Any) -> Array | None:
    return None if obj is None else view(name, obj)


def quantize_kv(
    kv: Any, *, group_size: int = 64, scale_format: str = "float32", stream: Any = None, validate: bool = False
) -> QuantizedKV:
    """Quantise rows to e4m3fn codes with one float32 scale for each group of elements.

    ``scale = max(amax / 448, 2**-80)`` over the finite elements of a group, ``code = e4m3fn(x / scale)``, rounded to
    nearest even; NaN and infinite elements become the NaN code, 0x7F, and leave their neighbours alone.

    Parameters
    ----------
    kv : (num_pages, D) or (num_pages, page_size, D) array, bfloat16, float16 or float32
        A group of a page of several slots spans all its slots.
    group_size : int
        32, 64 or 128; divides D.
    scale_format : {'float32', 'pow2'}
        'pow2' takes the least power of two that is no less.
    validate : bool
        Read the values and raise ValueError on the first NaN or infinity (this synchronises).

    Returns
    -------
    QuantizedKV
        ``codes`` as NumPy or torch float8_e4m3fn, for CuPy as uint8; ``scales`` float32.
    """
    checks.require(kv=kv)
    a = view("kv", kv)
    size = checks_pool.quantize(a, group_size)
    pow2 = checks_pool.pow2_format(scale_format)
    if checks.flag("validate", validate):
        checks_pool.finite_rows("kv", arrays.to_numpy(a))
    with arrays.queue(stream, a) as at:
        codes = arrays.empty(a, a.shape, checks.FP8)
        scales = arrays.empty(a, (a.shape[0], a.shape[-1] // size), "float32")
        _backend(a).quantize(a, codes, scales, size, pow2, at)
        return QuantizedKV(arrays.result(codes), arrays.result(scales))


def dequantize_kv(codes: Any, scales: Any, dtype: Any = "float32", *, group_size: int = 64, stream: Any = None) -> Any:
    """``code * scale``, exact and then rounded once to `dtype`.

    Parameters
    ----------
    codes : (num_pages, D) or (num_pages, page_size, D) array of float8_e4m3fn, or of uint8 holding its codes
    scales : (num_pages, D // group_size) array of float32
    dtype : bfloat16, float16 or float32, by name or as a dtype of NumPy, ml_dtypes or torch

    Returns
    -------
    array in the shape of `codes`
    """
    checks.require(codes=codes, scales=scales)
    a, s = view("codes", codes), view("scales", scales)
    name = checks_pool.dtype_argument(dtype)
    size = checks_pool.dequantize(a, s, None, name, group_size)
    with arrays.queue(stream, a, s) as at:
        out = arrays.empty(a, a.shape, name)
        _backend(a).dequantize(a, s, None, out, size, at)
        return arrays.result(out)


def store_kv(
    unified_kv: Any,
    kv_scales: Any,
    slots: Any,
    kv: Any,
    *,
    group_size: int = 64,
    scale_format: str = "float32",
    positions: Any = None,
    cos: Any = None,
    sin: Any = None,
    interleaved: bool = True,
    stream: Any = None,
    validate: bool = False,
) -> None:
    """Write rows into slots of a pool, in place, in one launch and without synchronising.

    A slot that is negative or outside the pool is skipped. Of several rows for one slot the last remains, whole.

    With pages of one slot a row's scales are those of `quantize_kv`. Where an FP8 page has several slots they share
    its scales: a page's scale grows by the least power of two that lets the new rows in, and the page's other rows
    are requantised in the same launch, which moves their codes exactly unless they become subnormal. A page all of
    whose slots are written at once is quantised afresh. Real rows appended one at a time to pages of 64 (the demo's
    data) have a relative error of 2.65e-2, as whole pages quantised at once, and 2.3e-2 to 2.4e-2 with scales of their
    own; requantising to the exact new scale gives 3.6e-2, keeping a page's first scale 0.2 to 0.3.

    Parameters
    ----------
    unified_kv : (num_pages, D) or (num_pages, page_size, D) array
        float8_e4m3fn (or uint8 codes) with `kv_scales`, bfloat16 or float16 with ``kv_scales=None``.
    kv_scales : (num_pages, D // group_size) array of float32, or None
    slots : (T,) array of int32 or int64
    kv : (T, D) array of bfloat16, float16 or float32
    positions : (T,) array of int32 or int64, optional
        With `cos` and `sin`: rotate the last ``rope_dim`` elements of each row by its position first, in float32. A
        negative position leaves a row as it is; one beyond the tables makes those elements NaN.
    cos, sin : (num_positions, rope_dim // 2) arrays of float32, optional
        rope_dim is a multiple of 16.
    interleaved : bool
        True: pairs are elements (2i, 2i + 1); False: (i, i + rope_dim // 2).
    validate : bool
        Read the arguments and raise IndexError on the first bad slot or position, ValueError on the first NaN or
        infinity in `kv`, before anything is written (this synchronises).
    """
    checks.require(unified_kv=unified_kv, slots=slots, kv=kv)
    pool, scales = view("unified_kv", unified_kv), _optional("kv_scales", kv_scales)
    where, rows = view("slots", slots), view("kv", kv)
    at, cosines, sines = _optional("positions", positions), _optional("cos", cos), _optional("sin", sin)
    key = (
        pool.layout,
        None if scales is None else scales.layout,
        where.layout,
        rows.layout,
        None if at is None else at.layout,
        None if cosines is None else cosines.layout,
        None if sines is None else sines.layout,
        group_size,
        interleaved,
        scale_format,
    )
    passed = _passed.get(key)
    if passed is None:
        size = checks_pool.store(pool, scales, where, rows, at, cosines, sines, interleaved, group_size)
        passed = size, checks_pool.pow2_format(scale_format)
        if len(_passed) >= 4096:
            _passed.clear()
        _passed[key] = passed
    size, pow2 = passed
    turn = checks_pool.Rotation(at, cosines, sines, interleaved) if at and cosines and sines else None
    if checks.flag("validate", validate):
        num_pages, page_size, _ = checks.pool_shape(pool, "unified_kv")
        checks_pool.stored_values(arrays.to_numpy(where), arrays.to_numpy(rows), num_pages * page_size)
        if turn is not None:
            checks_pool.position_values(arrays.to_numpy(turn.positions), turn.cos.shape[0])
    launch_on = 0
    if pool.kind != "numpy":
        launch_on = arrays.stream_for(stream, rows, pool, scales, where, at, cosines, sines)
    _backend(pool).store(rows, where, pool, scales, size, pow2, turn, launch_on)


def apply_rope(
    x: Any, positions: Any, cos: Any, sin: Any, *, interleaved: bool = True, stream: Any = None, validate: bool = False
) -> Any:
    """Rotate the last ``2 * cos.shape[1]`` elements of every head by its token's position, in place; returns x.

    Parameters
    ----------
    x : (T, H, D) array of bfloat16, float16 or float32
    positions, cos, sin, interleaved, validate
        As in `store_kv`.
    """
    return _rotate("x", x, positions, cos, sin, interleaved, stream, validate, inverse=False)


def inverse_rope(
    out: Any,
    positions: Any,
    cos: Any,
    sin: Any,
    *,
    interleaved: bool = True,
    stream: Any = None,
    validate: bool = False,
) -> Any:
    """Undo the rotation of `apply_rope`, in place; returns out. DeepSeek-V4 applies it to the attention output."""
    return _rotate("out", out, positions, cos, sin, interleaved, stream, validate, inverse=True)


def _rotate(
    name: str,
    x: Any,
    positions: Any,
    cos: Any,
    sin: Any,
    interleaved: bool,
    stream: Any,
    validate: bool,
    inverse: bool,
) -> Any:
    checks.require(**{name: x}, positions=positions, cos=cos, sin=sin)
    a = view(name, x)
    turn = checks_pool.rope(name, a, view("positions", positions), view("cos", cos), view("sin", sin), interleaved)
    if checks.flag("validate", validate):
        checks_pool.position_values(arrays.to_numpy(turn.positions), turn.cos.shape[0])
    at = 0 if a.kind == "numpy" else arrays.stream_for(stream, a, turn.positions, turn.cos, turn.sin)
    _backend(a).rotate(a, turn, inverse, at)
    return x
