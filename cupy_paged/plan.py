"""How a call is divided: launch geometry and workspace layout, from shapes alone.

Lengths stay on the device (kernels/schedule.cuh), so one plan serves every replay of a captured graph.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGN = 256  # bytes; sections of the workspace begin on multiples of it


@dataclass(frozen=True, slots=True)
class Problem:
    """The shapes and dtypes of one `paged_decode` call."""

    num_tokens: int
    num_heads: int
    head_dim: int
    nnz: int
    page_size: int
    q_dtype: str
    kv_dtype: str  # 'float8_e4m3fn', 'bfloat16' or 'float16'
    group_size: int  # 0 without scales
    num_splits: int  # 0: automatic
    batch_invariant: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Launch geometry and workspace layout.

    `num_ctas` workers share the slot lists; see kernels/schedule.cuh for `tile`, `row_cost`, `chunk_min` and
    `max_chunks` (0: balanced cuts). The workspace holds `num_partials` partials: first their float32 rows of
    (num_heads, head_dim), then, at byte `lse_offset`, their (num_heads,) lse.
    """

    num_ctas: int
    tile: int
    row_cost: int
    chunk_min: int
    max_chunks: int
    num_partials: int
    lse_offset: int
    workspace_bytes: int


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def balanced_ctas(num_tokens: int, nnz: int, tile: int, slots: int) -> int:
    """Workers for balanced cuts, at most `slots` of them.

    A worker needs at least one tile. Where rows of equal length would then fall on worker boundaries at a loss
    of under a tenth of the GPU, that number is taken: rows that are not divided need no combining.
    """
    most = min(slots, _ceil_div(nnz, tile) + num_tokens)
    if num_tokens <= most:
        aligned = most // num_tokens * num_tokens
    else:
        rows_each = _ceil_div(num_tokens, most)
        aligned = _ceil_div(num_tokens, rows_each)
    return aligned if aligned >= 0.9 * most else most


def make_plan(problem: Problem, *, tile: int, row_cost: int, slots: int, chunk_min: int, max_chunks: int) -> Plan:
    """Plan a call for a kernel that takes `tile` slots at once and of which `slots` workers run at a time.

    `chunk_min` and `max_chunks` say how `batch_invariant` divides rows.
    """
    t, nnz = problem.num_tokens, problem.nnz
    if problem.num_splits:
        chunk_min, max_chunks = tile, min(problem.num_splits, max(1, nnz))  # a chunk has at least one tile
    elif not problem.batch_invariant:
        chunk_min, max_chunks = tile, 0
    if max_chunks:
        # One worker a chunk, up to what runs at a time; empty workers cost little.
        num_partials = min(t * max_chunks, nnz // chunk_min + t)
        num_ctas = max(1, min(num_partials, slots))
    else:
        num_ctas = max(1, balanced_ctas(t, nnz, tile, slots))
        num_partials = 2 * num_ctas
    if problem.num_splits == 1:
        num_partials = 0  # every row is written directly
    row_bytes = problem.num_heads * problem.head_dim * 4
    lse_offset = num_partials * row_bytes
    total = lse_offset + _ceil_div(num_partials * problem.num_heads * 4, ALIGN) * ALIGN
    return Plan(num_ctas, tile, row_cost, chunk_min, max_chunks, num_partials, lse_offset, total)
