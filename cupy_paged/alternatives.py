"""What else could do the same work on the same GPU, timed by ``python -m cupy_paged bench --against NAME``.

`torch` is what a torch user would write: gather the rows, dequantise them, `scaled_dot_product_attention`. `sglang` is
SGLang's own kernel, where it is installed. Both get the arrays of our run, and their outputs are compared with float64.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

from . import bench

PACKAGES = {"torch": ("torch",), "sglang": ("torch", "sglang")}  # what each needs to be installed


def missing(name: str) -> str | None:
    """The first package that an alternative needs and that is not installed; None where it can run."""
    return next((p for p in PACKAGES[name] if importlib.util.find_spec(p) is None), None)


def attend(q: Any, codes: Any, scales: Any, slots: Any) -> Any:
    """Gather, dequantise and attend in torch, for lists of one length.

    Parameters
    ----------
    q : (T, H, D) tensor of bfloat16 or float16
    codes : (num_slots, D) tensor of float8_e4m3fn
    scales : (num_slots, D // group_size) tensor of float32
    slots : (T, L) tensor of int32 or int64, all inside the pool

    Returns
    -------
    out : (T, H, D) tensor of q's dtype
    """
    import torch

    num_tokens, length = slots.shape
    at, dim = slots.reshape(-1).long(), codes.shape[1]
    # Bytes are gathered: indexing of float8 tensors is not everywhere there.
    rows = codes.view(torch.uint8)[at].view(torch.float8_e4m3fn).to(q.dtype)
    rows = rows.reshape(len(at), scales.shape[1], -1) * scales[at].to(q.dtype).unsqueeze(-1)
    rows = rows.reshape(num_tokens, 1, length, dim)
    # One KV head: the heads stand where SDPA has query positions, so that a row is read once for all.
    return torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(1), rows, rows, scale=dim**-0.5).squeeze(1)


def _sglang() -> Callable[..., Any]:
    from sglang.kernels.ops.attention.dsv4.unified_kv_kernels import (  # type: ignore[import-not-found]
        paged_decode as module,
    )

    return module.sparse_attn_v4_paged_decode


def _tensor(array: Any) -> Any:
    """A CuPy array as a torch tensor of the same memory; bfloat16 goes by its bits."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _launcher(name: str, work: bench.Workload) -> Callable[[int], Any]:
    """A function that runs the alternative on one of the index sets and returns its output."""
    import torch

    q, codes, scales = _tensor(work.q), _tensor(work.pool.codes).view(torch.float8_e4m3fn), _tensor(work.pool.scales)
    indices = [_tensor(i) for i in work.indices]
    if name == "torch":
        return lambda i: attend(q, codes, scales, indices[i].view(q.shape[0], -1))
    kernel, indptr = _sglang(), _tensor(work.indptr)
    sink = torch.full((q.shape[1],), float("-inf"), device="cuda")
    return lambda i: kernel(q, codes, indices[i], indptr, sink, bench.HEAD_DIM**-0.5, scales)


def measure(name: str, case: bench.Case, pool: bench.Pool, flush: Any) -> dict[str, Any]:
    """Time of an alternative for one case, by the method of `bench`: a graph of launches, cold L2, medians.

    Returns a row of the record's ``alternatives``: the case, name, and either us, us_min, us_max and error, or
    `failed` with the reason. An alternative that cannot run a case does not end the run.
    """
    row: dict[str, Any] = {"name": name, **case._asdict()}
    try:
        row.update(_measure(name, case, pool, flush))
    except Exception as error:
        row["failed"] = (str(error).strip() or type(error).__name__).splitlines()[0]
    return row


def _measure(name: str, case: bench.Case, pool: bench.Pool, flush: Any) -> dict[str, float]:
    import cupy
    import torch

    work = bench.Workload([case.length] * case.num_tokens, case.num_heads, pool)
    launch = _launcher(name, work)
    cupy.cuda.Device().synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(bench.INDEX_SETS):  # whatever compiles or allocates, ahead of the capture
            out = launch(i)
        out = launch(0)
    stream.synchronize()
    tokens = sorted({0, case.num_tokens // 2, case.num_tokens - 1})
    result = cupy.from_dlpack(out.float().contiguous())
    error = bench.relative_error(work.q, result, pool, work.indices[0], work.offsets, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(bench.LAUNCHES):
            launch(i % bench.INDEX_SETS)
    cold, flushed, times = work.is_cold(flush), _tensor(flush), []
    with torch.cuda.stream(stream):
        graph.replay()
        for _ in range(bench.REPLAYS):
            if not cold:
                flushed.fill_(1)
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            stop.record(stream)
            stop.synchronize()
            times.append(1e3 * start.elapsed_time(stop) / bench.LAUNCHES)
    return {"us": statistics.median(times), "us_min": min(times), "us_max": max(times), "error": error}


def table(rows: list[dict[str, Any]], ours: list[dict[str, Any]]) -> str:
    """Markdown: every alternative's time beside ours of the same case and run."""
    own = {(r["num_heads"], r["num_tokens"], r["length"]): r["us"] for r in ours}
    lines = ["| H | T | L | against | us | ours us | ratio | error |", "|--:|--:|--:|---|--:|--:|--:|--:|"]
    for r in rows:
        case = (r["num_heads"], r["num_tokens"], r["length"])
        head = f"| {case[0]} | {case[1]} | {case[2]} | {r['name']} |"
        if "failed" in r:
            lines.append(f"{head} failed: {r['failed'].replace('|', '/')} | {own[case]:.1f} | | |")
        else:
            lines.append(f"{head} {r['us']:.1f} | {own[case]:.1f} | {r['us'] / own[case]:.1f} | {r['error']:.2e} |")
    return "\n".join(lines)
