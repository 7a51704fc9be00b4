"""Times of `cupy_paged.distributed` over the GPUs of one machine: ``python -m cupy_paged.bench_ranks``.

A thread for each GPU, NCCL between them, calls captured in CUDA graphs. Every call of a graph has lists of its own, so
that rows do not come from a cache. A figure is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import distributed, ops

CASES = ((1, 65536), (1, 1_000_000), (32, 65536))  # T, slots a token
HEADS, HEAD_DIM, GROUP = 128, 512, 64
LISTS, REPLAYS = 4, 10


class Row(NamedTuple):
    """Microseconds of a call, of its collectives alone, and of the same call on one GPU with the whole pool."""

    ranks: int
    tokens: int
    length: int
    layout: str
    us: float
    exchange_us: float
    one_gpu_us: float
    received_bytes: int
    error: float  # relative, Frobenius, to the one GPU's result


def markdown(rows: Sequence[Row], link_gbs: float) -> str:
    """A table of `rows`; `link_gbs` is what a GPU can receive, 10^9 bytes a second."""
    lines = [
        "| GPUs | T | slots a token | layout | call us | exchange us | one GPU us | speedup | MB received | % of link | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        link = 100 * r.received_bytes / (r.exchange_us * 1e3 * link_gbs)
        lines.append(
            f"| {r.ranks} | {r.tokens} | {r.length} | {r.layout} | {r.us:.1f} | {r.exchange_us:.1f} | {r.one_gpu_us:.1f} "
            f"| {r.one_gpu_us / r.us:.2f} | {r.received_bytes / 1e6:.2f} | {link:.1f} | {r.error:.1e} |"
        )
    return "\n".join(lines)


class _Case:
    """Host arrays of a case, equal for all ranks."""

    def __init__(self, tokens: int, length: int, codes: Any, scales: Any) -> None:
        rng = np.random.default_rng(tokens + length)
        self.tokens, self.length, self.codes, self.scales = tokens, length, codes, scales
        self.q = rng.standard_normal((tokens, HEADS, HEAD_DIM), dtype="float32").astype(ml_dtypes.bfloat16)
        self.indices = rng.integers(0, len(codes), (LISTS, tokens * length), dtype="int32")
        self.indptr = np.arange(tokens + 1, dtype="int32") * np.int32(length)


def _graph_us(work: Callable[[int], Any], together: Callable[[], Any], wait: Callable[[Any], None]) -> float:
    """Mean time of ``work(i)``, i < LISTS, captured on the current stream; `together` lets all ranks begin at once."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    work(0)  # loads kernels and makes buffers
    wait(stream)
    stream.begin_capture()
    kept = [work(i) for i in range(LISTS)]
    graph = stream.end_capture()
    graph.launch(stream)
    wait(stream)
    together()
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    for _ in range(REPLAYS):
        graph.launch(stream)
    stop.record(stream)
    wait(stream)
    del kept
    return float(1e3 * cupy.cuda.get_elapsed_time(start, stop) / (REPLAYS * LISTS))


def _one_gpu(case: _Case) -> tuple[float, Any]:
    import cupy

    q, codes, scales, lists, indptr = map(cupy.asarray, (case.q, case.codes, case.scales, case.indices, case.indptr))

    cupy.cuda.get_current_stream().synchronize()

    def work(i: int) -> Any:
        return ops.paged_decode(q, codes, lists[i], indptr, kv_scales=scales, group_size=GROUP, return_lse=True)

    with cupy.cuda.Stream(non_blocking=True) as stream:
        us = _graph_us(work, lambda: None, lambda s: s.synchronize())
        out = work(0)[0].get()
        stream.synchronize()
    return us, out.astype("float32")


def _rank(case: _Case, comm: distributed.Nccl, barrier: threading.Barrier) -> list[tuple[float, float, int, Any]]:
    """For each layout: time of a call and of its collectives, bytes received, and the result for the first lists."""
    import cupy

    def wait(stream: Any) -> None:
        with comm.limit():
            stream.synchronize()

    n, found = comm.size, []
    own = [cupy.asarray(a[comm.rank :: n].copy()) for a in (case.codes, case.scales)]
    pool = distributed.ShardedKV.from_arrays(comm, len(case.codes), *own, group_size=GROUP)
    q, lists, indptr = map(cupy.asarray, (case.q, case.indices, case.indptr))
    cupy.cuda.get_current_stream().synchronize()
    for layout in distributed.LAYOUTS:
        if layout == "tokens" and case.tokens % n:
            continue
        share = case.tokens * HEADS // (1 if layout == "all" else n)
        parts = [cupy.zeros((1 if layout == "all" else n, share * size), "uint8") for size in (2 * HEAD_DIM, 4)]
        received = [cupy.empty((n, part.shape[1]), "uint8") for part in parts]
        collective = comm.all_gather if layout == "all" else comm.all_to_all
        cupy.cuda.get_current_stream().synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:

            def exchange(
                i: int, at: int = stream.ptr, sent: Any = parts, to: Any = received, do: Any = collective
            ) -> None:
                for a, b in zip(sent, to, strict=True):
                    do(a, b, at)

            def decode(i: int, how: str = layout) -> Any:
                return pool.decode(q, lists[i], indptr, layout=how)

            us = _graph_us(decode, barrier.wait, wait)
            alone = _graph_us(exchange, barrier.wait, wait)
            out = pool.decode(q, lists[0], indptr, layout=layout)[0]
            wait(stream)
            found.append((us, alone, sum(a.nbytes // n * (n - 1) for a in received), out.get().astype("float32")))
    return found


def _thread(case: _Case, comm: distributed.Nccl, barrier: threading.Barrier, found: list[Any]) -> None:
    import cupy

    try:
        with cupy.cuda.Device(comm.rank):
            found[comm.rank] = _rank(case, comm, barrier)
    except Exception as error:
        found[comm.rank] = error
        barrier.abort()


def run(
    ranks: int,
    cases: Sequence[tuple[int, int]] = CASES,
    num_slots: int = 1_000_000,
    progress: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measure all cases and layouts on the first `ranks` GPUs."""
    import cupy

    comms = [distributed.Nccl(comm) for comm in cupy.cuda.nccl.NcclCommunicator.initAll(ranks)]
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 254, (num_slots, HEAD_DIM), dtype="uint8")
    codes += codes >= 127  # every code but the two NaNs
    scales = (rng.random((num_slots, HEAD_DIM // GROUP), dtype="float32") + np.float32(0.5)) * np.float32(0.01)
    rows = []
    for tokens, length in cases:
        case = _Case(tokens, length, codes, scales)
        with cupy.cuda.Device(0):
            one_us, wanted = _one_gpu(case)
        barrier = threading.Barrier(ranks, timeout=120)
        found: list[Any] = [None] * ranks
        threads = [threading.Thread(target=_thread, args=(case, comms[r], barrier, found)) for r in range(ranks)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        errors = [f for f in found if isinstance(f, Exception)]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        layouts = [a for a in distributed.LAYOUTS if a != "tokens" or tokens % ranks == 0]
        for layout, parts in zip(layouts, zip(*found, strict=True), strict=True):
            outs = [p[3] for p in parts]
            out = outs[0] if layout == "all" else np.concatenate(outs, 1 if layout == "heads" else 0)
            error = float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))
            times = max(p[0] for p in parts), max(p[1] for p in parts)
            rows.append(Row(ranks, tokens, length, layout, *times, one_us, parts[0][2], error))
            if progress is not None:
                progress(rows[-1])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m cupy_paged.bench_ranks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="GPUs to use (default: all)")
    parser.add_argument("--link-gbs", type=float, default=450.0, help="what a GPU can receive, GB/s (NVLink 4: 450)")
    options = parser.parse_args(arguments)
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        if not cupy.cuda.nccl.available:
            raise ImportError("this CuPy has no NCCL")
    except Exception as error:  # no CuPy, no driver
        print(f"nothing to measure: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    rows = run(options.ranks or count, progress=lambda row: print(row, file=sys.stderr))
    print(markdown(rows, options.link_gbs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
