"""e4m3fn codes and group scales in NumPy; kernels/quantize.cuh does the same arithmetic bit for bit.

A value is ``code * scale``. Codes are handled as uint8; the two NaN codes are 0x7F and 0xFF, and there is no
infinity: the largest number is 448.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
E4M3_MAX = np.float32(448)
NAN_CODE = np.uint8(0x7F)
SCALE_MIN = np.float32(2.0**-80)  # of an all-zero group; small enough for any data, products by it stay normal

_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)


def decode(codes: np.ndarray) -> np.ndarray:
    """The exact values of uint8 codes, as float32."""
    return _VALUES[codes]


def encode(x: np.ndarray, scale: np.ndarray | np.float32) -> np.ndarray:
    """Codes of float32 ``x`` under `scale`: nearest even, saturating at 448; NaN and infinity become NaN_CODE."""
    with np.errstate(all="ignore"):
        quotient = np.divide(x, scale, dtype=np.float32)
        codes = np.clip(quotient, -E4M3_MAX, E4M3_MAX).astype(E4M3).view(np.uint8)
    return np.where(np.isfinite(x), codes, NAN_CODE)


def finite_amax(x: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """Largest magnitude of the finite elements, 0 where there are none."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(x), np.abs(x), np.float32(0)).max(axis=axis)


def scale_of_amax(amax: np.ndarray, pow2: bool) -> np.ndarray:
    """``amax / 448``, at least SCALE_MIN; with `pow2` the least power of two that is no less."""
    scale = np.maximum(amax.astype(np.float32) / E4M3_MAX, SCALE_MIN)
    if not pow2:
        return scale
    return ((scale.view(np.uint32) + np.uint32(0x007FFFFF)) & np.uint32(0x7F800000)).view(np.float32)


def quantize(x: np.ndarray, group_size: int, pow2: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes (uint8, in x's shape) and scales of pages (P, page_size, D) or rows (P, D)."""
    head_dim = x.shape[-1]
    page_size = x.shape[1] if x.ndim == 3 else 1
    groups = x.astype(np.float32).reshape(len(x), page_size, head_dim // group_size, group_size)
    scales = scale_of_amax(finite_amax(groups, (1, 3)), pow2)
    return encode(groups, scales[:, None, :, None]).reshape(x.shape), scales


def dequantize(codes: np.ndarray, scales: np.ndarray, group_size: int, dtype: Any) -> np.ndarray:
    """``code * scale`` of pages of codes (P, page_size, D), exact and then rounded once to `dtype`."""
    num_pages, page_size, head_dim = codes.shape
    values = decode(codes).reshape(num_pages, page_size, head_dim // group_size, group_size)
    out = np.empty(codes.shape, dtype)
    with np.errstate(all="ignore"):
        for page in range(num_pages):  # a page at a time: float64 of a whole pool would be eight times its size
            exact = values[page].astype(np.float64) * scales[page, :, None].astype(np.float64)
            out[page] = round_once(exact, dtype).reshape(page_size, head_dim)
    return out


def round_once(exact: np.ndarray, dtype: Any) -> np.ndarray:
    """float64 to `dtype` without a second rounding in float32 on the way.

    A float32 rounded toward zero whose last bit is set where something was cut off rounds to 16 bits as the exact
    number does, because it has two bits more than they have.
    """
    nearest = exact.astype(np.float32)
    if np.dtype(dtype) == np.float32:
        return nearest
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(exact)
    toward_zero = np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)
    inexact = np.isfinite(exact) & (toward_zero.astype(np.float64) != exact)
    return (toward_zero.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32).astype(dtype)
