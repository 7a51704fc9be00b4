"""The public decode functions: check, plan, backend, out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import arrays, checks
from .arrays import SIGNATURES, Array, view
from .plan import Problem

if TYPE_CHECKING:
    from .backends.cuda import Call

_calls: dict[Any, Call] = {}  # by everything that the checks of a CUDA call look at, for calls that passed them
_MAX_CALLS = 4096


def _optional(name: str, obj: Any) -> Array | None:
    return None if obj is None else view(name, obj)


def paged_decode(
    q: Any,
    unified_kv: Any,
    kv_indices: Any,
    kv_indptr: Any,
    attn_sink: Any = None,
    softmax_scale: float | None = None,
    kv_scales: Any = None,
    *,
    group_size: int = 64,
    out: Any = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    num_splits: int | None = None,
    workspace: Any = None,
    stream: Any = None,
    validate: bool = False,
) -> Any:
    """Attention of each token over the slots listed for it, K and V being the same row of the pool.

    For token t, head h and the slots s in ``kv_indices[kv_indptr[t]:kv_indptr[t + 1]]``::

        kv[s]     = codes[s] * scale[page(s), d // group_size]     (FP8)  or  unified_kv[s]
        score[s]  = softmax_scale * dot(q[t, h], kv[s])
        out[t, h] = sum_s exp(score[s]) * kv[s] / (exp(attn_sink[h]) + sum_s exp(score[s]))

    Parameters
    ----------
    q : (T, H, D) array of bfloat16 or float16
        Queries; any strides with a contiguous last axis. D is a multiple of 64 up to 512.
    unified_kv : (num_pages, D) or (num_pages, page_size, D) array
        The pool: float8_e4m3fn, or uint8 holding e4m3fn codes, with `kv_scales`; else of q's dtype.
    kv_indices : (nnz,) array of int32
        Slot ids, ``page * page_size + offset``. Ids outside the pool, negative ones included, are skipped.
    kv_indptr : (T + 1,) array of int32
        Where each token's list begins and ends. An empty list gives ``out = 0`` and ``lse = -inf``.
        Nothing outside the arrays is touched whatever it holds; but where it decreases or leaves kv_indices, results
        on a GPU mean nothing and rows may be left unwritten (``validate=True`` finds that).
    attn_sink : (H,) array of float32, optional
        Extra logit in the denominator (natural log).
    softmax_scale : float, optional
        Default ``D ** -0.5``.
    kv_scales : (num_pages, D // group_size) array of float32, optional
        One row of group scales for each page; required for FP8 pools.
    group_size : int
        Elements that share a scale: 32, 64 or 128.
    out : (T, H, D) array of q's dtype, optional
        Where to write the result; any strides with a contiguous last axis.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    batch_invariant : bool
        The bits of a token's output depend on that token alone, not on T or its neighbours.
    num_splits : int, optional
        Divide every row into this many parts; default: by the lengths, on the device.
    workspace : (n,) array of uint8, optional
        Scratch memory of at least `workspace_size` bytes (CUDA only).
    stream : int or stream object, optional
        Where to run; default: the current stream of the library that owns q.
    validate : bool
        Read the lists and raise on the first bad entry (this synchronises).

    Returns
    -------
    out : (T, H, D) array of q's kind and dtype
    lse : (T, H) array of float32
        Only with ``return_lse=True``: natural log, sink excluded, -inf for an empty list.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        A wrong shape, length or value; with ``validate=True`` also a bad `kv_indptr`.
    IndexError
        With ``validate=True``: a slot id outside the pool.

    Notes
    -----
    The semantics are those of SGLang's ``sparse_attn_v4_paged_decode``, with exact float32 scales.
    """
    try:
        q_at, q_key = SIGNATURES[type(q)](q)
        pool_at, pool_key = SIGNATURES[type(unified_kv)](unified_kv)
        indices_at, indices_key = SIGNATURES[type(kv_indices)](kv_indices)
        indptr_at, indptr_key = SIGNATURES[type(kv_indptr)](kv_indptr)
        sink_at, sink_key = SIGNATURES[type(attn_sink)](attn_sink)
        scales_at, scales_key = SIGNATURES[type(kv_scales)](kv_scales)
        out_at, out_key = SIGNATURES[type(out)](out)
        work_at, work_key = SIGNATURES[type(workspace)](workspace)
        # Types stand beside options because 64.0 and True equal 64 and 1, and must not pass for them.
        key: Any = (
            q_key,
            pool_key,
            indices_key,
            indptr_key,
            sink_key,
            scales_key,
            out_key,
            work_key,
            group_size,
            type(group_size),
            num_splits,
            type(num_splits),
            batch_invariant,
            type(batch_invariant),
        )
        call = _calls.get(key)
    except Exception:  # an array of a new type or without an address, an unhashable option: the checks name it
        call = key = None
    # Validation, which reads the lists, and calls from another current device go the whole way.
    if call is not None and not validate and call.current_device() == call.device:
        at = None if stream is None else arrays.stream_address(stream)
        scale = call.default_scale if softmax_scale is None else checks.finite("softmax_scale", softmax_scale)
        target, lse, lse_at, new = out, None, 0, 0  # new: all addresses that the key does not know
        if out is None or return_lse or workspace is None:
            q_ = view("q", q)
            if out is None:
                made = arrays.empty(q_, q_.shape, q_.dtype, at)
                target, out_at = made.obj, made.ptr
                new = out_at
            if return_lse:
                made = arrays.empty(q_, q_.shape[:2], "float32", at)
                lse, lse_at = made.obj, made.ptr
                new |= lse_at
            if workspace is None and call.workspace_bytes:
                scratch = arrays.empty(q_, (call.workspace_bytes,), "uint8", at)  # in use until the launches are queued
                work_at = scratch.ptr
                new |= work_at
        if not new & 15:
            if at is None:
                at = arrays.current_stream_of(call.kind, call.device)
            work_at = work_at if call.workspace_bytes else 0
            call(q_at, pool_at, scales_at, indices_at, indptr_at, sink_at, out_at, lse_at, work_at, scale, at)
            return (target, lse) if return_lse else target

    checks.require(q=q, unified_kv=unified_kv, kv_indices=kv_indices, kv_indptr=kv_indptr)
    q_, pool = view("q", q), view("unified_kv", unified_kv)
    indices, indptr = view("kv_indices", kv_indices), view("kv_indptr", kv_indptr)
    sink, scales, out_ = _optional("attn_sink", attn_sink), _optional("kv_scales", kv_scales), _optional("out", out)
    splits = 0 if num_splits is None else checks.positive_int("num_splits", num_splits)
    invariant = checks.flag("batch_invariant", batch_invariant)
    problem = checks.decode(q_, pool, indices, indptr, sink, scales, out_, group_size, splits, invariant)
    scale = problem.head_dim**-0.5 if softmax_scale is None else checks.finite("softmax_scale", softmax_scale)
    if validate:
        checks.index_values(arrays.to_numpy(indices), arrays.to_numpy(indptr), pool.shape[0] * problem.page_size)

    on_host = q_.kind == "numpy"
    if workspace is not None and not on_host:
        workspace = checks.workspace(view("workspace", workspace), q_)
    at = 0
    if not on_host:
        given = (pool, indices, indptr, sink, scales, out_, workspace)
        at = arrays.stream_for(stream, q_, *given)
        # A call that waits for other libraries goes the whole way every time.
        key = key if all(a is None or a.kind == q_.kind for a in given) else None
    if out_ is None:
        out_ = arrays.empty(q_, q_.shape, q_.dtype, at)
    lse = arrays.empty(q_, q_.shape[:2], "float32", at) if return_lse else None
    if on_host:
        from .backends import numpy as host

        host.decode(problem, q_, pool, indices, indptr, sink, scales, scale, out_, lse)
    elif problem.num_tokens:
        from .backends import cuda

        call = cuda.decode(problem, q_, pool, indices, indptr, sink, scales, scale, out_, lse, workspace, at)
        if key is not None and call is not None:
            if len(_calls) >= _MAX_CALLS:
                _calls.clear()
            _calls[key] = call
    result = arrays.result(out_, at)
    return (result, arrays.result(lse, at)) if lse is not None else result


def merge_states(outs: Any, lses: Any, attn_sink: Any = None, *, stream: Any = None) -> Any:
    """Combine partial results over disjoint slot lists, from other pools or other GPUs.

    ``out = sum_i exp(lses[i]) * outs[i] / (exp(attn_sink) + sum_i exp(lses[i]))``; the sink is applied here, so the
    partial results must have been made without it.

    Parameters
    ----------
    outs : sequence of up to 64 (T, H, D) arrays of one dtype: bfloat16, float16 or float32
        Results of `paged_decode` without a sink.
    lses : sequence of n (T, H) arrays of float32
        Their log-sum-exp (natural log, -inf where empty).
    attn_sink : (H,) array of float32, optional

    Returns
    -------
    out : (T, H, D) array of the partial results' kind and dtype
    lse : (T, H) array of float32
        Log-sum-exp over all lists, sink excluded.

    Notes
    -----
    The order of the parts is the order of addition, so equal inputs give equal bits.
    """
    views = [view(f"outs[{i}]", o) for i, o in enumerate(outs)]
    lse_views = [view(f"lses[{i}]", o) for i, o in enumerate(lses)]
    sink = _optional("attn_sink", attn_sink)
    checks.merge(views, lse_views, sink)
    first = views[0]
    with arrays.queue(stream, first, *views[1:], *lse_views, sink) as at:
        out = arrays.empty(first, first.shape, first.dtype)
        lse = arrays.empty(first, first.shape[:2], "float32")
        if first.kind == "numpy":
            from .backends import numpy as host

            host.merge(views, lse_views, sink, out, lse)
        elif 0 not in first.shape:
            from .backends import cuda_merge

            cuda_merge.merge(views, lse_views, sink, out, lse, at)
        return arrays.result(out), arrays.result(lse)


def _problem_of(
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    nnz: int,
    q_dtype: Any,
    kv_dtype: Any,
    page_size: int,
    group_size: int,
    batch_invariant: bool,
    num_splits: int | None,
) -> Problem:
    q, kv = checks.problem_dtypes(arrays.dtype_name(q_dtype), arrays.dtype_name(kv_dtype))
    checks.head_dim("q", checks.positive_int("head_dim", head_dim))
    return Problem(
        checks.positive_int("num_tokens", num_tokens, 0),
        checks.positive_int("num_heads", num_heads),
        head_dim,
        checks.positive_int("nnz", nnz, 0),
        checks.positive_int("page_size", page_size),
        q,
        kv,
        checks.group_size(group_size, head_dim) if kv == checks.FP8 else 0,
        0 if num_splits is None else checks.positive_int("num_splits", num_splits),
        checks.flag("batch_invariant", batch_invariant),
    )


def workspace_size(
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    nnz: int,
    *,
    q_dtype: Any = "bfloat16",
    kv_dtype: Any = "float8_e4m3fn",
    page_size: int = 1,
    group_size: int = 64,
    batch_invariant: bool = False,
    num_splits: int | None = None,
    device: int | None = None,
) -> int:
    """Bytes of `workspace` that `paged_decode` needs for these shapes, with or without lse.

    Parameters
    ----------
    num_tokens, num_heads, head_dim : int
        T, H and D of q.
    nnz : int
        Length of kv_indices (of the buffer, where it is longer than the lists).
    q_dtype, kv_dtype : dtype or str
    device : int, optional
        CUDA device; default: the current one.
    """
    problem = _problem_of(
        num_tokens, num_heads, head_dim, nnz, q_dtype, kv_dtype, page_size, group_size, batch_invariant, num_splits
    )
    from .backends import cuda

    return cuda.workspace_bytes(problem, cuda.current_device() if device is None else device)


def warmup(
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    nnz: int,
    *,
    q_dtype: Any = "bfloat16",
    kv_dtype: Any = "float8_e4m3fn",
    page_size: int = 1,
    group_size: int = 64,
    batch_invariant: bool = False,
    num_splits: int | None = None,
    device: int | None = None,
) -> None:
    """Compile and load the kernels of a `paged_decode` call of these shapes, as a graph capture needs it.

    Parameters
    ----------
    num_tokens, num_heads, head_dim, nnz, q_dtype, kv_dtype, page_size, group_size, batch_invariant, num_splits, device
        As for `workspace_size`. Rows of the pool and of the scales are taken to begin on multiples of 16 bytes;
        for others, call `paged_decode` once instead.
    """
    problem = _problem_of(
        num_tokens, num_heads, head_dim, nnz, q_dtype, kv_dtype, page_size, group_size, batch_invariant, num_splits
    )
    if num_tokens == 0:
        return
    from .backends import cuda

    number = cuda.current_device() if device is None else device
    with cuda.on_device(number):
        cuda.prepare(problem, number)
