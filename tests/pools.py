"""What the tests of storing share: arrays on either backend, rows of many kinds, and e4m3fn by table."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
ROW_DTYPES = {"bfloat16": BF16, "float16": np.float16, "float32": np.float32}
BACKENDS = ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]


def put(backend, a):
    """A NumPy array, or its copy on the GPU (FP8 as uint8, as CuPy has no such dtype)."""
    if backend == "numpy":
        return a
    import cupy

    return cupy.asarray(a.view(np.uint8) if a.dtype == E4M3 else a)


def get(a):
    """Back to NumPy, FP8 as uint8."""
    a = a.get() if hasattr(a, "get") else a
    return a.view(np.uint8) if a.dtype == E4M3 else a


def same_bits(a, b):
    """Equal bit for bit, any NaN being equal to any other; says where not."""
    a, b = get(a), get(b)
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    bits = f"u{a.itemsize}"
    equal = a.view(bits) == b.view(bits)
    if a.dtype != np.uint8 and a.dtype.kind not in "iu":
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        equal |= np.isnan(wide_a) & np.isnan(wide_b)
    if not equal.all():
        where = tuple(np.argwhere(~equal)[0])
        raise AssertionError(
            f"{(~equal).sum()} of {equal.size} differ, first at {where}: {a[where]!r} and {b[where]!r}"
        )


def e4m3_value(code):
    """By the format's definition: sign, 4 bits of exponent (bias 7), 3 of mantissa, 0x7F and 0xFF NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return np.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


E4M3_VALUES = np.array([e4m3_value(code) for code in range(256)])
E4M3_TIES = (E4M3_VALUES[:0x7E] + E4M3_VALUES[1:0x7F]) / 2


def e4m3_code(x):
    """Nearest even by search among the values, saturating; NaN and infinity give 0x7F. x is float64."""
    size = np.abs(np.where(np.isfinite(x), x, 0))
    above = np.searchsorted(E4M3_TIES, size, side="left")
    tie = (above < len(E4M3_TIES)) & (size == E4M3_TIES[np.minimum(above, len(E4M3_TIES) - 1)])
    code = np.where(tie & (above % 2 == 1), above + 1, above).astype(np.uint8)
    code |= np.where(np.signbit(x), 0x80, 0).astype(np.uint8)
    return np.where(np.isfinite(x), code, np.uint8(0x7F))


def nearest(exact, dtype):
    """float64 to a 16-bit dtype, nearest even, by search among all its values; float32 by NumPy."""
    if dtype == np.float32:
        with np.errstate(over="ignore"):
            return exact.astype(np.float32)
    infinity = np.array(np.inf, dtype).view(np.uint16)
    values = np.arange(infinity, dtype=np.uint16).view(dtype).astype(np.float64)
    step = values[-1] - values[-2]
    ties = np.r_[(values[:-1] + values[1:]) / 2, values[-1] + step / 2]  # beyond the last: infinity
    size = np.abs(exact)
    bits = np.searchsorted(ties, size, side="left")
    on_tie = (bits < len(ties)) & (size == ties[np.minimum(bits, len(ties) - 1)])
    bits = np.where(on_tie & (bits % 2 == 1), bits + 1, bits).astype(np.uint16)
    bits |= np.where(np.signbit(exact), 0x8000, 0).astype(np.uint16)
    return np.where(np.isnan(exact), np.array(np.nan, dtype), bits.view(dtype))


def rows(kind, count, head_dim, dtype, seed=0):
    """Rows of one kind: normal, wide (magnitudes over 2**+-40), special (NaN, infinities, zeros), tiny, huge, ties."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, head_dim)).astype(np.float32)
    if kind == "wide":
        x *= np.exp2(rng.uniform(-40, 40, (count, 1)) + rng.uniform(-14, 0, x.shape)).astype(np.float32)
    elif kind == "special":
        pick = rng.random(x.shape)
        x[pick < 0.006] = np.inf
        x[pick < 0.004] = -np.inf
        x[pick < 0.002] = np.nan
        x[:1] = 0
        x[1:2] = np.nan
        x[2:3, :64] = -0.0
    elif kind == "tiny":
        x *= np.exp2(rng.uniform(-149, -60, (count, 1))).astype(np.float32)
    elif kind == "huge":
        x *= np.float32(2.0**125)
    elif kind == "ties":  # x / scale within three units of a rounding tie
        amax = (rng.uniform(1, 2, (count, 1)) * np.exp2(rng.integers(-12, 12, (count, 1)))).astype(np.float32)
        x = (rng.choice(E4M3_TIES, x.shape).astype(np.float32) * (amax / np.float32(448))).astype(np.float32)
        x = (x.view(np.int32) + rng.integers(-3, 4, x.shape, dtype=np.int32)).view(np.float32)
        x *= rng.choice(np.array([-1, 1], np.float32), x.shape)
        x = np.clip(x, -amax, amax)
        x[:, ::32] = amax
    with np.errstate(over="ignore"):
        return x.astype(dtype)
