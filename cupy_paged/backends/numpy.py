"""Decode and merge on NumPy arrays: runs anywhere, and is what the kernels are debugged against.

Everything is float64 between the stored numbers and the one rounding into `out`, so that no finite row overflows on
the way. Tokens are computed one after another and each in the same steps whatever its neighbours are: results are
batch-invariant by construction, and a division into splits has nothing to change.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .. import fp8
from ..arrays import Array
from ..plan import Problem

CHUNK = 1024  # slots gathered at once: 4 MiB of float64 rows at D = 512

_VALUES = fp8.decode(np.arange(256, dtype=np.uint8)).astype(np.float64)


def decode(
    problem: Problem,
    q: Array,
    pool: Array,
    indices: Array,
    indptr: Array,
    sink: Array | None,
    scales: Array | None,
    softmax_scale: float,
    out: Array,
    lse: Array | None,
) -> None:
    """Compute a checked `paged_decode` call into `out` (T, H, D) and `lse` (T, H)."""
    rows = pool.obj.view(np.uint8) if scales is not None else pool.obj
    sinks = None if sink is None else sink.obj.astype(np.float64)
    # A list is clamped into kv_indices; one that ends before it begins is empty.
    bounds = np.clip(indptr.obj.astype(np.int64), 0, problem.nnz).tolist()
    with np.errstate(all="ignore"):
        for t in range(problem.num_tokens):
            row, row_lse = _attend(
                q.obj[t].astype(np.float64) * softmax_scale,
                rows,
                None if scales is None else scales.obj,
                indices.obj[bounds[t] : bounds[t + 1]],
            )
            if sinks is not None:
                row *= _sink_factor(row_lse, sinks)[:, None]
            _write(out.obj[t], row)
            if lse is not None:
                _write(lse.obj[t], row_lse)


def _attend(q: Any, pool: Any, scales: Any | None, slots: Any) -> tuple[Any, Any]:
    """Attention without sink of scaled queries (H, D) over a list of slots: rows (H, D) and lse (H,).

    Online softmax over chunks: `most` (H,) is the largest score so far, `total` (H,) the sum of exp(score - most) and
    `acc` (H, D) the sum of exp(score - most) * kv.
    """
    num_heads, head_dim = q.shape
    page_size = pool.shape[1] if pool.ndim == 3 else 1
    slots = slots.astype(np.int64)
    used = slots[(slots >= 0) & (slots < pool.shape[0] * page_size)]
    most = np.full(num_heads, -np.inf)
    total = np.zeros(num_heads)
    acc = np.zeros((num_heads, head_dim))
    for begin in range(0, len(used), CHUNK):
        kv = _gather(pool, scales, used[begin : begin + CHUNK], page_size)
        score = q @ kv.T  # (H, D) x (D, n)
        higher = np.maximum(most, score.max(axis=1))
        # Scores of infinite elements can all be -inf: they weigh nothing, and -inf - -inf is not to become NaN.
        base = np.where(higher == -np.inf, 0.0, higher)
        weight = np.exp(score - base[:, None])
        kept = np.exp(most - base)
        total = total * kept + weight.sum(axis=1)
        acc = acc * kept[:, None] + weight @ kv  # (H, n) x (n, D)
        most = higher
    nothing = total == 0
    # Without any weight acc is 0, or NaN where an infinite element met a weight of 0.
    return acc / np.where(nothing, 1.0, total)[:, None], np.where(nothing, -np.inf, most + np.log(total))


def _gather(pool: Any, scales: Any | None, slots: Any, page_size: int) -> Any:
    """The rows of slots that lie in the pool, (n, D) in float64; FP8 codes times the scales of their pages."""
    page, offset = np.divmod(slots, page_size)
    rows = pool[page, offset] if pool.ndim == 3 else pool[page]
    if scales is None:
        return rows.astype(np.float64)
    factors = scales[page].astype(np.float64)
    groups = factors.shape[1]
    values = _VALUES[rows].reshape(len(rows), groups, -1) * factors[:, :, None]
    return values.reshape(rows.shape)


def _sink_factor(lse: Any, sink: Any) -> Any:
    """What the sink leaves of an output without sink; nothing of an empty row, which is 0 whatever the sink."""
    return np.where(lse == -np.inf, 0.0, 1 / (1 + np.exp(sink - lse)))


def _write(target: Any, values: Any) -> None:
    """Round float64 once into `target`; what is finite stays finite, at the largest number of the dtype if need be."""
    if target.dtype == np.float32:
        rounded = values.astype(np.float32)
    else:
        rounded = fp8.round_once(values, target.dtype)
    largest = ml_dtypes.finfo(target.dtype).max
    target[...] = np.where(np.isfinite(values) & ~np.isfinite(rounded), np.copysign(largest, rounded), rounded)


def merge(outs: list[Array], lses: list[Array], sink: Array | None, out: Array, lse: Array) -> None:
    """Compute a checked `merge_states` call: parts (T, H, D) with lse (T, H), added in their order.

    A part whose lse is -inf is empty and counts for nothing, whatever its rows hold.
    """
    with np.errstate(all="ignore"):
        for t in range(out.shape[0]):
            part_lse = np.stack([e.obj[t] for e in lses]).astype(np.float64)  # (n, H)
            most = part_lse.max(axis=0)
            base = np.where(most == -np.inf, 0.0, most)
            weight = np.exp(part_lse - base)
            total = np.zeros(out.shape[1])
            acc = np.zeros(out.shape[1:])
            for i, part in enumerate(outs):
                total = total + weight[i]
                empty = (part_lse[i] == -np.inf)[:, None]
                acc = acc + np.where(empty, 0.0, part.obj[t].astype(np.float64) * weight[i][:, None])
            merged = np.where(most == -np.inf, -np.inf, base + np.log(total))
            row = acc / np.where(total == 0, 1.0, total)[:, None]
            if sink is not None:
                row *= _sink_factor(merged, sink.obj.astype(np.float64))[:, None]
            _write(out.obj[t], row)
            _write(lse.obj[t], merged)
