"""``python -m cupy_paged bench``: time of `paged_decode` beside the ceilings of the same GPU, measured in the same run.

Method: D = 512, an FP8 pool of random codes and scales, random slots, three index sets in turn, nine launches in a
CUDA graph, the median of fifteen replays; the L2 cache is flushed before each replay where the sets would fit in it.
Every shape's output is compared with float64 in the run that times it.

floor = max(4 T H L D flops / matmul rate, bytes / (0.9 copy rate)), bytes = 544 T L + q + out: 0.9 of the copy rate
is what a gather of random 544-byte rows reaches at best.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

HEAD_DIM = 512
GROUP = 64
ROW_BYTES = HEAD_DIM + 4 * (HEAD_DIM // GROUP)
LAUNCHES = 9
INDEX_SETS = 3
REPLAYS = 15
ERROR_BOUND = 2.5e-3
SCHEMA = 1

_TL = (
    (1, 640),
    (1, 8192),
    (1, 65536),
    (8, 640),
    (8, 2176),
    (32, 640),
    (32, 2176),
    (64, 2176),
    (128, 640),
    (128, 2176),
    (256, 1152),
    (256, 2176),
    (512, 2176),
)


class Case(NamedTuple):
    """num_heads, num_tokens, slots of each token."""

    num_heads: int
    num_tokens: int
    length: int


PRESETS: dict[str, tuple[Case, ...]] = {
    "full": tuple(Case(h, t, n) for h in (128, 64, 32, 16, 8) for t, n in _TL),
    "v4-flash": tuple(Case(64, t, n) for n in (128, 640, 128 + 32768 // 128) for t in (1, 8, 32, 128)),
    "v4-pro": tuple(Case(128, t, n) for n in (128, 1152, 128 + 32768 // 128) for t in (1, 8, 32, 128)),
    "latency": tuple(Case(h, t, n) for h in (8, 16, 64, 128) for t, n in ((1, 128), (1, 640), (1, 2176), (4, 640))),
    "headline": tuple(
        Case(*c)
        for c in (
            (128, 128, 2176), (128, 32, 2176), (128, 1, 65536), (128, 1, 640),
            (64, 128, 2176), (64, 512, 2176), (32, 128, 2176),
            (16, 128, 2176), (16, 512, 2176), (16, 32, 2176), (16, 1, 65536), (16, 1, 640),
        )
    ),
}  # fmt: skip

# Best peer on one H200 (FlashMLA FP8, SGLang FP8, SGLang bf16), us, same method; copy 4282 GB/s, matmul 788 TFLOP/s.
_PEER_US = {
    128: (13.2, 26.7, 68.4, 16.4, 26.5, 32.3, 57.8, 87.2, 61.2, 169.8, 190.1, 339.3, 706.6),
    64: (12.7, 30.2, 74.6, 16.2, 24.1, 26.0, 53.7, 84.6, 45.9, 129.3, 143.9, 256.3, 508.4),
    32: (10.1, 24.0, 73.6, 16.1, 23.9, 25.9, 53.7, 84.2, 45.7, 129.9, 144.3, 255.7, 506.7),
    16: (8.2, 20.1, 73.8, 13.1, 20.0, 19.8, 45.6, 80.1, 45.7, 129.3, 143.9, 255.5, 506.2),
}
PEER_US = {Case(h, t, n): us for h, row in _PEER_US.items() for (t, n), us in zip(_TL, row, strict=True)}


@dataclass(frozen=True)
class Ceilings:
    """What this GPU does at best, measured: copy in GB/s (read and write), bf16 matmul in TFLOP/s."""

    copy_gbs: float
    matmul_tflops: float


@dataclass(frozen=True)
class Row:
    """One timed shape. Times in microseconds."""

    num_heads: int
    num_tokens: int
    length: int
    us: float
    us_min: float
    us_max: float
    tflops: float
    gbs: float
    floor_us: float
    bound: str
    percent_of_floor: float
    host_us: float
    error: float
    peer_us: float | None


def flops(case: Case) -> int:
    return 4 * case.num_tokens * case.num_heads * case.length * HEAD_DIM


def moved_bytes(case: Case) -> int:
    return case.num_tokens * (case.length * ROW_BYTES + 2 * case.num_heads * HEAD_DIM * 2)


def floor_us(case: Case, ceilings: Ceilings) -> tuple[float, str]:
    """The least time a case can take on a GPU of these ceilings, and what binds: 'tensor' or 'memory'."""
    tensor = flops(case) / (ceilings.matmul_tflops * 1e6)
    memory = moved_bytes(case) / (0.9 * ceilings.copy_gbs * 1e3)
    return (tensor, "tensor") if tensor > memory else (memory, "memory")


def _event_us(
    work: Callable[[], None], before: Callable[[], None] | None = None, repeats: int = REPLAYS
) -> list[float]:
    """Times of `work` on the current stream, event to event; `before` runs ahead of each, untimed."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    times = []
    for _ in range(repeats):
        if before is not None:
            before()
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        work()
        stop.record(stream)
        stop.synchronize()
        times.append(1e3 * cupy.cuda.get_elapsed_time(start, stop))
    return times


def measure_ceilings() -> Ceilings:
    """Device copy of 2 GB and an 8192^3 matrix product on random data (smaller where memory is short)."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        return _measure_ceilings()


def _measure_ceilings() -> Ceilings:
    import cupy

    free = cupy.cuda.runtime.memGetInfo()[0]
    size = min(2 << 30, free // 8)
    source, target = cupy.empty(size, "uint8"), cupy.empty(size, "uint8")
    copy = statistics.median(_event_us(lambda: target.data.copy_from_device_async(source.data, size)))
    source = target = None  # frees 4 GB before the product
    n = 8192 if free > 2 << 30 else 4096
    try:
        import torch  # its bf16 product is the measure; CuPy's fp16 one runs at the same rate

        tx, ty = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            torch.matmul(tx, ty)
            product = statistics.median(_event_us(lambda: torch.matmul(tx, ty)))
    except ImportError:
        rng = cupy.random.default_rng(1)
        x, y = (rng.standard_normal((n, n), dtype="float32").astype("float16") for _ in range(2))
        cupy.matmul(x, y)
        product = statistics.median(_event_us(lambda: cupy.matmul(x, y)))
    return Ceilings(2 * size / copy / 1e3, 2 * n**3 / product / 1e6)


class Pool:
    """A random FP8 pool on the GPU, and what is needed to check against it."""

    def __init__(self, num_slots: int, seed: int = 7) -> None:
        import cupy

        rng = cupy.random.default_rng(seed)
        codes = rng.integers(0, 254, (num_slots, HEAD_DIM), dtype="uint8")
        self.codes = codes + (codes >= 127)  # every code but the two NaNs, 0x7F and 0xFF
        self.scales = (rng.random((num_slots, HEAD_DIM // GROUP), dtype="float32") + 0.5) * 0.01
        table = np.arange(256, dtype="uint8").view(ml_dtypes.float8_e4m3fn).astype("float64")
        self._table = cupy.asarray(table)
        self.num_slots = num_slots

    def rows(self, slots: Any) -> Any:
        """(n, D) float64 values of some slots."""
        import cupy

        return self._table[self.codes[slots]] * cupy.repeat(self.scales[slots].astype("float64"), GROUP, axis=1)


def reference(q: Any, rows: Any, softmax_scale: float) -> Any:
    """Float64 attention of one token's (H, D) queries over its rows."""
    import cupy

    scores = softmax_scale * (q.astype("float64") @ rows.T)
    weights = cupy.exp(scores - scores.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True)) @ rows


def relative_error(q: Any, out: Any, pool: Pool, indices: Any, indptr: Any, tokens: Iterable[int]) -> float:
    """Relative Frobenius error of some tokens' outputs against float64 on the dequantised pool."""
    wrong = total = 0.0
    for t in tokens:
        exact = reference(q[t].astype("float32"), pool.rows(indices[indptr[t] : indptr[t + 1]]), HEAD_DIM**-0.5)
        wrong += float(((out[t].astype("float64") - exact) ** 2).sum())
        total += float((exact**2).sum())
    return math.sqrt(wrong / total)


class Workload:
    """Arrays of one case on the GPU: q, three index sets, out and workspace."""

    def __init__(self, lengths: Sequence[int], num_heads: int, pool: Pool, seed: int = 1, **options: Any) -> None:
        import cupy

        from . import workspace_size

        rng = cupy.random.default_rng(seed)
        t, nnz = len(lengths), int(sum(lengths))
        self.pool, self.options = pool, options
        self.q = rng.standard_normal((t, num_heads, HEAD_DIM), dtype="float32").astype(ml_dtypes.bfloat16)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("int32")
        self.indptr = cupy.asarray(self.offsets)
        self.indices = [rng.integers(0, pool.num_slots, nnz, dtype="int32") for _ in range(INDEX_SETS)]
        self.out = cupy.full(self.q.shape, float("nan"), "float32").astype(ml_dtypes.bfloat16)
        self.workspace = cupy.empty(max(1, workspace_size(t, num_heads, HEAD_DIM, nnz, **options)), "uint8")

    def launch(self, index_set: int = 0) -> None:
        from . import paged_decode

        paged_decode(
            self.q, self.pool.codes, self.indices[index_set], self.indptr, kv_scales=self.pool.scales,
            out=self.out, workspace=self.workspace, **self.options,
        )  # fmt: skip

    def error(self) -> float:
        self.launch(0)
        t = len(self.offsets) - 1
        return relative_error(self.q, self.out, self.pool, self.indices[0], self.offsets, sorted({0, t // 2, t - 1}))

    def is_cold(self, flush: Any) -> bool:
        """Whether the index sets touch so much that the L2 holds nothing of one when its turn comes again."""
        return INDEX_SETS * self.indices[0].nbytes // 4 * ROW_BYTES > 2 * flush.nbytes

    def graph_us(self, flush: Any) -> list[float]:
        """Microseconds a launch, one value a replay."""
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            self.launch()
            stream.synchronize()
            stream.begin_capture()
            for i in range(LAUNCHES):
                self.launch(i % INDEX_SETS)
            graph = stream.end_capture()
            graph.launch(stream)
            before = None if self.is_cold(flush) else lambda: flush.fill(1)
            return [us / LAUNCHES for us in _event_us(graph.launch, before)]

    def host_us(self, calls: int = 300) -> float:
        """Median microseconds that one call from Python takes the host, nothing waiting on the GPU."""
        import cupy

        times = []
        for i in range(calls):
            if i % 50 == 0:
                cupy.cuda.get_current_stream().synchronize()
            start = time.perf_counter()
            self.launch()
            times.append(time.perf_counter() - start)
        cupy.cuda.get_current_stream().synchronize()
        return 1e6 * statistics.median(times)


def flush_buffer() -> Any:
    """An array at least twice as large as the L2 cache; writing it evicts everything else."""
    import cupy

    l2 = cupy.cuda.Device().attributes["L2CacheSize"]
    return cupy.zeros(max(2 * l2, 128 << 20), "uint8")


def measure(case: Case, pool: Pool, ceilings: Ceilings, flush: Any) -> Row:
    work = Workload([case.length] * case.num_tokens, case.num_heads, pool)
    error = work.error()
    if not error <= ERROR_BOUND:
        raise RuntimeError(f"{case}: relative error {error:.2e} against float64 is beyond {ERROR_BOUND}")
    times = work.graph_us(flush)
    us = statistics.median(times)
    least, bound = floor_us(case, ceilings)
    return Row(
        *case,
        us=us,
        us_min=min(times),
        us_max=max(times),
        tflops=flops(case) / us / 1e6,
        gbs=moved_bytes(case) / us / 1e3,
        floor_us=least,
        bound=bound,
        percent_of_floor=100 * least / us,
        host_us=work.host_us(),
        error=error,
        peer_us=PEER_US.get(case),
    )


def gpu_description() -> dict[str, Any]:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return {
        "device": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": properties["multiProcessorCount"],
        "driver_cuda": cupy.cuda.runtime.driverGetVersion(),
        "cupy": cupy.__version__,
    }


def run(
    cases: Sequence[Case],
    num_slots: int,
    progress: Callable[[int, int], None] | None = None,
    against: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure the ceilings and every case; returns the record that `markdown` and `compare` read.

    `against`: names of `alternatives` to time on the same work.
    """
    from . import alternatives

    ceilings = measure_ceilings()
    pool, flush, rows, others = Pool(num_slots), flush_buffer(), [], []
    for i, case in enumerate(cases):
        if progress is not None:
            progress(i, len(cases))
        rows.append(asdict(measure(case, pool, ceilings, flush)))
        others += [alternatives.measure(name, case, pool, flush) for name in against]
    if progress is not None:
        progress(len(cases), len(cases))
    record = {
        "schema": SCHEMA,
        "backend": "cuda",
        "gpu": gpu_description(),
        "ceilings": asdict(ceilings),
        "num_slots": num_slots,
        "rows": rows,
    }
    return {**record, "alternatives": others} if others else record


def gpu_missing() -> str | None:
    """Why no CUDA kernel can be timed here; None where one can."""
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "no CUDA GPU"
    except Exception as error:  # no CuPy, or no driver under it
        return str(error).splitlines()[0]


NUMPY_CASES = (Case(8, 1, 640), Case(16, 1, 640), Case(16, 4, 640), Case(64, 1, 2176))


def numpy_run(
    cases: Sequence[Case], progress: Callable[[int, int], None] | None = None, repeats: int = 3
) -> dict[str, Any]:
    """A record of the NumPy backend's times; it has no ceilings, and rows have the case and its times alone."""
    from . import paged_decode, quantize_kv

    rng = np.random.default_rng(1)
    codes, scales = quantize_kv(rng.standard_normal((4096, HEAD_DIM), dtype="float32"))
    rows = []
    for i, case in enumerate(cases):
        if progress is not None:
            progress(i, len(cases))
        q = rng.standard_normal((case.num_tokens, case.num_heads, HEAD_DIM)).astype(ml_dtypes.bfloat16)
        indices = rng.integers(0, 4096, case.num_tokens * case.length).astype("int32")
        indptr = np.arange(0, case.num_tokens + 1, dtype="int32") * np.int32(case.length)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            paged_decode(q, codes, indices, indptr, kv_scales=scales)
            times.append(1e6 * (time.perf_counter() - start))
        rows.append({**case._asdict(), "us": statistics.median(times), "us_min": min(times), "us_max": max(times)})
    if progress is not None:
        progress(len(cases), len(cases))
    return {"schema": SCHEMA, "backend": "numpy", "rows": rows}


def numpy_markdown(record: dict[str, Any]) -> str:
    lines = ["| H | T | L | ms | min-max |", "|--:|--:|--:|--:|--:|"]
    for r in record["rows"]:
        spread = f"{r['us_min'] / 1e3:.1f}-{r['us_max'] / 1e3:.1f}"
        lines.append(f"| {r['num_heads']} | {r['num_tokens']} | {r['length']} | {r['us'] / 1e3:.1f} | {spread} |")
    return "\n".join(lines)


def markdown(record: dict[str, Any]) -> str:
    ceilings = record["ceilings"]
    lines = [
        f"{record['gpu']['device']}: copy {ceilings['copy_gbs']:.0f} GB/s, "
        f"bf16 matmul {ceilings['matmul_tflops']:.0f} TFLOP/s, in the same run",
        "",
        "| H | T | L | us | min-max | TFLOP/s | GB/s | floor us | % of floor | bound | host us | error | best peer us |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|",
    ]
    for row in record["rows"]:
        r = Row(**row)
        peer = "" if r.peer_us is None else f"{r.peer_us:.1f}"
        lines.append(
            f"| {r.num_heads} | {r.num_tokens} | {r.length} | {r.us:.1f} | {r.us_min:.1f}-{r.us_max:.1f} | {r.tflops:.0f} "
            f"| {r.gbs:.0f} | {r.floor_us:.1f} | {r.percent_of_floor:.0f} | {r.bound} | {r.host_us:.1f} | {r.error:.2e} | {peer} |"
        )
    return "\n".join(lines)


def compare(new: dict[str, Any], old: dict[str, Any]) -> list[tuple[Case, float, str]]:
    """(case, new time / old time, verdict) of every shape that both records hold.

    Times are first taken to the ceilings of their own run, by what binds the shape, so that two GPUs or two days
    compare. 'same': the ranges of both runs, widened by 2 %, overlap.
    """
    if new.get("schema") != old.get("schema"):
        raise ValueError(f"records of different schemas, {new.get('schema')} and {old.get('schema')}, do not compare")
    backends = new.get("backend", "cuda"), old.get("backend", "cuda")
    if backends[0] != backends[1]:
        raise ValueError(f"records of different backends, {backends[0]} and {backends[1]}, do not compare")
    earlier = {Case(r["num_heads"], r["num_tokens"], r["length"]): r for r in old["rows"]}
    found = []
    for row in new["rows"]:
        case = Case(row["num_heads"], row["num_tokens"], row["length"])
        before = earlier.get(case)
        if before is None:
            continue
        speed = 1.0  # NumPy's records have no ceilings
        if "ceilings" in new:
            ceiling = "matmul_tflops" if row["bound"] == "tensor" else "copy_gbs"
            speed = new["ceilings"][ceiling] / old["ceilings"][ceiling]
        low, high = 0.98 * row["us_min"] * speed, 1.02 * row["us_max"] * speed
        if low <= before["us_max"] and before["us_min"] <= high:
            verdict = "same"
        else:
            verdict = "faster" if high < before["us_min"] else "slower"
        found.append((case, row["us"] * speed / before["us"], verdict))
    return found


def comparison(new: dict[str, Any], old: dict[str, Any]) -> str:
    """`compare` as a Markdown table."""
    lines = ["| H | T | L | new / old | verdict |", "|--:|--:|--:|--:|---|"]
    lines += [f"| {c[0]} | {c[1]} | {c[2]} | {ratio:.3f} | {verdict} |" for c, ratio, verdict in compare(new, old)]
    return "\n".join(lines)


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        bar = "#" * (30 * done // max(total, 1))
        print(f"\r[{bar:<30}] {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cupy_paged bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="headline")
    parser.add_argument("--shape", action="append", metavar="H,T,L", help="a shape of your own instead; repeatable")
    parser.add_argument("--slots", type=int, default=2_000_000, help="slots of the pool (544 bytes each)")
    parser.add_argument("--json", type=Path, help="also write the record here")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a record written with --json, or a GPU record")
    parser.add_argument("--against", action="append", choices=("torch", "sglang"), help="time this as well; repeatable")
    options = parser.parse_args(arguments)
    cases = PRESETS[options.preset]
    if options.shape:
        cases = tuple(Case(*map(int, shape.split(","))) for shape in options.shape)
    missing = gpu_missing()
    if missing:
        print(f"No CUDA kernel can be timed here ({missing}); the NumPy backend instead:\n")
        record = numpy_run(cases if options.shape else NUMPY_CASES, _progress)
        print(numpy_markdown(record))
    else:
        from . import alternatives

        against = list(dict.fromkeys(options.against or ()))
        for name in against:
            lacking = alternatives.missing(name)
            if lacking:
                parser.error(f"--against {name} needs {lacking}, which is not installed")
        record = run(cases, options.slots, _progress, against)
        print(markdown(record))
        if against:
            print("\n" + alternatives.table(record["alternatives"], record["rows"]))
    if options.json:  # first, so that a comparison that fails loses nothing
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.compare:
        earlier = json.loads(options.compare.read_text())
        print("\n" + comparison(record, earlier.get("benchmark", earlier)))
    return 0
