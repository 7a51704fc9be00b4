"""Reference attention in float64, a loop that shares no code with the package, and the measure of errors.

It reads e4m3fn codes from their bit fields, one token, one head and one slot at a time.
"""

from __future__ import annotations

import math

import numpy as np


def e4m3fn_value(code):
    """Value of one code: sign, 4 exponent bits with bias 7, 3 mantissa bits; 0x7F and 0xFF are NaN."""
    sign = -1.0 if code >> 7 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3FN = np.array([e4m3fn_value(code) for code in range(256)])


def dequantized(pool, scales=None, group_size=64):
    """The pool's slots as float64 rows (num_slots, D)."""
    pool = np.asarray(pool)
    page_size = pool.shape[1] if pool.ndim == 3 else 1
    flat = np.ascontiguousarray(pool).reshape(-1, pool.shape[-1])
    if scales is None:
        return flat.astype(np.float64)
    values = E4M3FN[flat.view(np.uint8)]
    with np.errstate(invalid="ignore"):  # an infinite scale of a zero code
        return values * np.repeat(np.repeat(scales.astype(np.float64), page_size, 0), group_size, 1)


def attention(q, rows, indices, indptr, sink=None, softmax_scale=None):
    """out (T, H, D) and lse (T, H) in float64 over the float64 rows (num_slots, D)."""
    num_tokens, num_heads, head_dim = q.shape
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    out = np.zeros(q.shape)
    lse = np.full((num_tokens, num_heads), -np.inf)
    for t in range(num_tokens):
        begin, end = (min(max(int(indptr[t + i]), 0), len(indices)) for i in (0, 1))
        listed = [int(s) for s in indices[begin:end] if 0 <= s < len(rows)] if end > begin else []
        if not listed:
            continue
        for h in range(num_heads):
            with np.errstate(all="ignore"):
                scores = [scale * float(np.sum(q[t, h].astype(np.float64) * rows[s])) for s in listed]
                top = max(scores) if all(map(math.isfinite, scores)) else math.nan
                total, acc = 0.0, np.zeros(head_dim)
                for score, s in zip(scores, listed, strict=True):
                    weight = math.exp(score - top)
                    total += weight
                    acc += weight * rows[s]
                lse[t, h] = top + math.log(total)
                extra = 0.0 if sink is None else float(np.exp(float(sink[h]) - lse[t, h]))
                out[t, h] = acc / total / (1.0 + extra)
    return out, lse


def compare(got, expected, tolerance):
    """Assert that `got` is `expected` up to a relative Frobenius error; places that are not finite come first.

    NaN, inf and -inf must each stand in the same places.
    """
    got, expected = np.asarray(got).astype(np.float64), np.asarray(expected).astype(np.float64)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    for name, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        differ = test(got) != test(expected)
        if differ.any():
            at = tuple(int(i) for i in np.argwhere(differ)[0])
            raise AssertionError(
                f"{name} in other places, {int(differ.sum())} of them; first at {at}: got {got[at]}, expected {expected[at]}"
            )
    finite = np.isfinite(expected)
    difference = np.where(finite, got, 0) - np.where(finite, expected, 0)
    norm = np.linalg.norm(np.where(finite, expected, 0))
    error = np.linalg.norm(difference) / (norm if norm else 1.0)
    if not error <= tolerance:
        at = tuple(int(i) for i in np.unravel_index(np.argmax(np.abs(difference)), difference.shape))
        raise AssertionError(
            f"relative error {error:.3e} exceeds {tolerance:.1e}; worst at {at}: got {got[at]}, expected {expected[at]}"
        )
    return float(error)
