"""The recorded benchmark: the table, and the scheduling, graph, invariance and host figures beside it.

Times go into the GPU record; what is asserted here is correctness and what the contract promises as a ratio.
"""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from cupy_paged import bench

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def pool():
    return bench.Pool(2_000_000)


@pytest.fixture(scope="module")
def flush():
    return bench.flush_buffer()


def median_us(work, flush):
    return statistics.median(work.graph_us(flush))


def test_table(pool, flush, record_gpu):
    """Every shape is within the error bound (measure() raises otherwise) and is timed."""
    ceilings = bench.measure_ceilings()
    rows = [bench.asdict(bench.measure(case, pool, ceilings, flush)) for case in bench.PRESETS["full"]]
    record_gpu(
        "benchmark",
        {
            "schema": bench.SCHEMA,
            "backend": "cuda",
            "gpu": bench.gpu_description(),
            "ceilings": bench.asdict(ceilings),
            "num_slots": pool.num_slots,
            "rows": rows,
        },
    )
    assert all(row["error"] <= bench.ERROR_BOUND for row in rows)


def test_one_long_row_beside_short_ones(pool, flush, record_gpu):
    """One row of 65536 slots and 63 of 128 take at most 1.3 times the long row alone."""
    figures = {}
    for heads in (16, 128):
        alone = median_us(bench.Workload([65536], heads, pool), flush)
        together = median_us(bench.Workload([65536] + [128] * 63, heads, pool), flush)
        figures[f"H={heads}"] = {"alone_us": alone, "with_63_short_us": together, "ratio": together / alone}
    record_gpu("ragged", figures)
    assert figures["H=16"]["ratio"] <= 1.3


def test_batch_invariant_cost(pool, flush, record_gpu):
    """Batch-invariant splitting costs at most 1.15 times the default from 32 tokens on."""
    figures = {}
    for heads in (16, 128):
        for tokens in (1, 32, 128):
            usual = median_us(bench.Workload([2176] * tokens, heads, pool), flush)
            invariant = median_us(bench.Workload([2176] * tokens, heads, pool, batch_invariant=True), flush)
            figures[f"H={heads} T={tokens}"] = {
                "default_us": usual,
                "invariant_us": invariant,
                "ratio": invariant / usual,
            }
    record_gpu("batch_invariant", figures)


def test_graph_captured_at_length_one(pool, flush, record_gpu):
    """Captured at lengths of 1, replayed at 16384: at most 1.3 times a capture at that length."""
    import cupy

    long = bench.Workload([16384] * 4, 16, pool)
    eager = median_us(long, flush)
    short = bench.Workload([16384] * 4, 16, pool)
    lengths = short.indptr.copy()
    short.indptr[...] = cupy.arange(5)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        short.launch()
        stream.begin_capture()
        for i in range(bench.LAUNCHES):
            short.launch(i % bench.INDEX_SETS)
        graph = stream.end_capture()
        short.indptr[...] = lengths
        graph.launch()
        times = bench._event_us(graph.launch, lambda: flush.fill(1))
    replay = statistics.median(times) / bench.LAUNCHES
    record_gpu("graph", {"capture_at_16384_us": eager, "capture_at_1_replay_at_16384_us": replay})
    assert replay <= 1.3 * eager
    assert short.error() <= bench.ERROR_BOUND


def test_host_cost(pool, record_gpu):
    """Microseconds of Python a call, with and without out and workspace."""
    import cupy

    from cupy_paged import paged_decode

    work = bench.Workload([640], 16, pool)
    given = work.host_us()

    def bare():
        paged_decode(work.q, pool.codes, work.indices[0], work.indptr, kv_scales=pool.scales)

    work.launch = bare
    record_gpu("host", {"out_and_workspace_given_us": given, "nothing_given_us": work.host_us()})
    cupy.cuda.Device().synchronize()


def test_automatic_split_is_near_the_best(pool, flush, record_gpu):
    """The automatic division of rows beside a sweep of forced ones."""
    figures = {}
    for heads in (8, 16, 128):
        for tokens in (1, 4, 32):
            for length in (128, 2048, 65536):
                if tokens * length > 1 << 20:
                    continue
                auto = median_us(bench.Workload([length] * tokens, heads, pool), flush)
                sweep = {}
                for splits in (1, 2, 4, 8, 16, 32, 64, 128):
                    if splits > max(1, length // 16):
                        break
                    sweep[splits] = median_us(bench.Workload([length] * tokens, heads, pool, num_splits=splits), flush)
                best = min(sweep, key=sweep.__getitem__)
                figures[f"H={heads} T={tokens} L={length}"] = {
                    "automatic_us": auto,
                    "best_us": sweep[best],
                    "best_splits": best,
                    "ratio": auto / sweep[best],
                }
    record_gpu("automatic_split", figures)
    assert figures
    assert all(np.isfinite(f["ratio"]) for f in figures.values())
