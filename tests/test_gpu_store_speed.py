"""Storing keeps up with copying: measured in CUDA graphs, cold, and put into the GPU record."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_paged import store_kv

pytestmark = [pytest.mark.gpu, pytest.mark.slow]  # times, so alone on the GPU

LAUNCHES = 24  # of a graph; together they touch more than the L2 holds
NUM_SLOTS = 600_000
COPY = r"""
extern "C" __global__ void copy(const uint4* from, uint4* to, int count) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < count) to[i] = from[i];
}
"""


def graph_us(launch):
    """Microseconds a launch: the least of three medians of a graph of LAUNCHES."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        launch(0)
        stream.begin_capture()
        for i in range(LAUNCHES):
            launch(i)
        graph = stream.end_capture()
        medians = []
        for _ in range(3):
            times = []
            for _ in range(9):
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                begin.record(stream)
                graph.launch(stream)
                end.record(stream)
                end.synchronize()
                times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / LAUNCHES)
            medians.append(float(np.median(times)))
    return min(medians)


def measure(count, page_size=1):
    """Storing `count` bf16 rows of 512 in random slots, and copying as many bytes."""
    import cupy

    rng = np.random.default_rng(count)
    shape = (NUM_SLOTS, 512) if page_size == 1 else (NUM_SLOTS // page_size, page_size, 512)
    pool, scales = cupy.zeros(shape, cupy.uint8), cupy.full((shape[0], 8), 2.0**-80, cupy.float32)
    rows = [cupy.asarray(rng.standard_normal((count, 512), np.float32)).astype("bfloat16") for _ in range(LAUNCHES)]
    slots = [cupy.asarray(rng.permutation(NUM_SLOTS)[:count].astype(np.int32)) for _ in range(LAUNCHES)]
    moved = count * (2 * 512 + 512 + 4 * 8 + 4)
    units = max(1, moved // 32)
    source, target = (cupy.zeros((LAUNCHES, 16 * units), cupy.uint8) for _ in range(2))
    copy = cupy.RawKernel(COPY, "copy")
    grid = ((units + 255) // 256,)
    return {
        "store_us": graph_us(lambda i: store_kv(pool, scales, slots[i], rows[i])),
        "copy_us": graph_us(lambda i: copy(grid, (256,), (source[i], target[i], np.int32(units)))),
        "bytes": moved,
    }


def on_hopper():
    """The promises are for the H200 that the record is made on; other GPUs are only measured."""
    import cupy

    return cupy.cuda.Device().compute_capability == "90"


def test_many_rows_at_sixty_percent_of_the_copy_rate(record_gpu):
    figures = {count: measure(count) for count in (4096, 65536 // 2)}
    record_gpu("store", {f"{count} rows": figure for count, figure in figures.items()})
    for count, figure in figures.items() if on_hopper() else ():
        assert figure["store_us"] <= figure["copy_us"] / 0.6, f"{count} rows: {figure}"


def test_one_row_under_five_microseconds(record_gpu):
    figures = {page_size: measure(1, page_size) for page_size in (1, 64)}
    record_gpu("store one row", {f"pages of {size}": figure for size, figure in figures.items()})
    if on_hopper():
        assert figures[1]["store_us"] < 5
        assert figures[64]["store_us"] < 6  # the page's other rows may have to be requantised
