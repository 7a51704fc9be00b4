"""Public fault reports about graphs, streams, devices and cost, as tests: O15, O17, O18, O34 to O36.

Named as in test_fault_cases_lists.py; shared parts are in faults.py.
"""

from __future__ import annotations

import gc
import statistics
import time

import faults
import numpy as np
import pytest
from faults import F32, Config, base, captured

import cupy_paged
from cupy_paged import merge_states, paged_decode, workspace_size


def median_us(run, stream, count=9, inner=5):
    """Median time of one run() on the stream, by events around `inner` of them."""
    import cupy

    times = []
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(count):
        begin.record(stream)
        for _ in range(inner):
            run()
        end.record(stream)
        end.synchronize()
        times.append(1e3 * cupy.cuda.get_elapsed_time(begin, end) / inner)
    return statistics.median(times)


# O15: CUDA graphs


@pytest.mark.slow  # times, so alone on the GPU
@pytest.mark.parametrize("h", [16, 64, 128])
def test_o15_a_graph_captured_at_length_one_serves_any_length(cuda, h, record_gpu):
    import cupy

    call = base(Config(num_heads=h), lengths=[16384] * 4, num_slots=20000)
    gpu, nnz = cuda.put(call), 4 * 16384
    cupy_paged.warmup(4, h, 512, nnz)
    out, workspace = cupy.empty_like(gpu["q"]), cupy.empty(workspace_size(4, h, 512, nnz), "uint8")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        buffers = gpu | {"kv_indptr": cupy.asarray([0, 1, 2, 3, 4], "int32")}
        graph = captured(buffers, stream, out, workspace)
        buffers["kv_indptr"].set(call["kv_indptr"])
        graph.launch()
        got = out.get()
        eager, lse = paged_decode(**gpu, return_lse=True)
        faults.same_bits(eager, got)
        faults.near_reference(call, got, lse.get())
        fresh = captured(gpu, stream, out, workspace)
        frozen_us, fresh_us = median_us(graph.launch, stream), median_us(fresh.launch, stream)
    assert frozen_us <= 1.3 * fresh_us, (frozen_us, fresh_us)


@pytest.mark.parametrize("mode", [*faults.MODES[1:], {"batch_invariant": True, "num_splits": 2}], ids=str)
def test_o15_other_modes(cuda, mode):
    import cupy

    call = base(lengths=[900] * 4, num_slots=4096)
    gpu = cuda.put(call)
    wanted = paged_decode(**gpu, **mode).get()
    out, workspace = cupy.empty_like(gpu["q"]), cupy.empty(workspace_size(4, 16, 512, 3600, **mode), "uint8")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        buffers = gpu | {"kv_indptr": cupy.zeros(5, "int32")}
        graph = captured(buffers, stream, out, workspace, **mode)
        graph.launch()
        assert not out.get().view(np.uint16).any()
        buffers["kv_indptr"].set(call["kv_indptr"])
        graph.launch()
        faults.same_bits(out, wanted)


# O17, O18: streams and devices

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {}
}
"""


@pytest.mark.parametrize("mode", faults.MODES, ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_o17_every_launch_is_on_the_callers_stream(cuda, mode, given):
    """After a spin on the stream new queries and rows arrive there; all that was asked for later sees them."""
    import cupy

    call = base(lengths=[64, 700, 1, 0])
    gpu = cuda.put(call)
    wanted, wanted_lse = paged_decode(**gpu, return_lse=True, **mode)
    new_row = np.linspace(-3, 3, 512, dtype=F32)[None]
    stored = [a.copy() for a in (gpu["unified_kv"], gpu["kv_scales"])]
    slot = cupy.asarray([5], "int32")
    cupy_paged.store_kv(*stored, slot, cupy.asarray(new_row))
    q, pool, scales = gpu["q"].copy(), gpu["unified_kv"].copy(), gpu["kv_scales"].copy()
    gpu["q"][...] = 0
    gpu["unified_kv"][...] = 0
    cupy.cuda.Device().synchronize()
    spin = cupy.RawKernel(SPIN, "spin")
    spin((1,), (1,), (1,))
    stream = cupy.cuda.Stream(non_blocking=True)
    option = {"stream": stream} if given else {}
    with stream:
        spin((1,), (1,), (50_000_000,))
        gpu["q"][...], gpu["unified_kv"][...] = q, pool
        out, lse = paged_decode(**gpu, return_lse=True, **mode, **option)
        merged = merge_states([out, out], [lse, lse], **option)
        cupy_paged.store_kv(gpu["unified_kv"], gpu["kv_scales"], slot, cupy.asarray(new_row), **option)
        built = cupy_paged.lists_from_padded(gpu["kv_indices"][:64].reshape(4, 16), **option)
    stream.synchronize()
    faults.same_bits(out, wanted)
    faults.same_bits(lse, wanted_lse)
    faults.same_bits(gpu["unified_kv"], stored[0])
    faults.same_bits(gpu["kv_scales"], stored[1])
    assert merged[0].shape == out.shape
    assert built[1].get().tolist() == [0, 16, 32, 48, 64]
    assert scales.shape == (1024, 8)


def test_o18_arrays_on_another_device_than_the_current(cuda):
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    call = base()
    with cupy.cuda.Device(1):
        gpu = cuda.put(call)
    assert cupy.cuda.runtime.getDevice() == 0
    out, lse = paged_decode(**gpu, return_lse=True, num_splits=3)
    assert cupy.cuda.runtime.getDevice() == 0
    assert out.device.id == lse.device.id == 1
    faults.near_reference(call, out.get(), lse.get())
    with pytest.raises(ValueError, match="device"):
        paged_decode(**gpu | {"q": cupy.asarray(call["q"])})


# O34 to O36: memory and time


@faults.some_configs
@faults.modes
@pytest.mark.parametrize("return_lse", [False, True])
def test_o34_the_workspace_is_what_was_asked_for(cuda, config, mode, return_lse):
    import cupy

    call = base(config, lengths=[700, 64, 1, 0])
    gpu, t = cuda.put(call), 4
    size = workspace_size(
        t, config.num_heads, config.head_dim, len(call["kv_indices"]), q_dtype=config.q_dtype,
        kv_dtype="float8_e4m3fn" if config.kv == "fp8" else config.q_dtype, page_size=config.page_size,
        group_size=config.group_size, **mode,
    )  # fmt: skip
    if size == 0:
        paged_decode(**gpu, workspace=cupy.empty(0, "uint8"), **mode)
        return
    guarded = faults.Guarded(cuda, np.zeros(size, np.uint8), 0xFF)
    plain = paged_decode(**gpu, **mode, return_lse=True)
    got = paged_decode(**gpu, workspace=guarded.array, return_lse=return_lse, **mode)
    assert guarded.intact()
    faults.same_bits(got[0] if return_lse else got, plain[0])
    out = cupy.zeros_like(gpu["q"])
    with pytest.raises(ValueError, match=rf"workspace.*{size}.*{size - 1}"):
        paged_decode(**gpu, workspace=guarded.array[:-1], out=out, **mode)
    assert not bool(out.view("uint16").any())
    with pytest.raises(TypeError, match="workspace"):
        paged_decode(**gpu, workspace=np.zeros(size, np.uint8), **mode)


@pytest.mark.parametrize("name", ["q_dtype", "kv_dtype"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2", np.float64, np.int8])
def test_o34_sizes_of_dtypes_that_are_not_supported(name, dtype):
    with pytest.raises(TypeError, match=name):
        workspace_size(1, 16, 512, 64, **{name: dtype})
    with pytest.raises(TypeError, match=name):
        cupy_paged.warmup(1, 16, 512, 64, **{name: dtype})


@pytest.mark.slow  # times, so alone on the GPU
@pytest.mark.parametrize("h", [16, 128])
def test_o35_a_warm_call_only_launches(cuda, h, record_gpu):
    """No allocation, no synchronisation, no copy to the host: a capture, which forbids the latter two, passes."""
    import cupy

    gpu = cuda.put(base(Config(num_heads=h), lengths=[640] * 4))
    out, workspace = cupy.empty_like(gpu["q"]), cupy.empty(workspace_size(4, h, 512, 2560), "uint8")

    class Count(cupy.cuda.MemoryHook):
        name = "count"
        calls = 0

        def malloc_preprocess(self, **kwargs):
            Count.calls += 1

    def run():
        paged_decode(**gpu, out=out, workspace=workspace)

    with cupy.cuda.Stream(non_blocking=True) as stream:
        run()
        stream.synchronize()
        with Count():
            stream.begin_capture()
            run()
            stream.end_capture()
        assert Count.calls == 0
        medians = []
        for _ in range(10):  # the least of ten: other processes take the processor too
            times = []
            for _ in range(50):
                begin = time.perf_counter()
                run()
                times.append(1e6 * (time.perf_counter() - begin))
            stream.synchronize()
            medians.append(statistics.median(times))
    host_us = min(medians)
    record_gpu(f"host time of a warm call, us, H={h}", round(host_us, 1))
    assert host_us <= 30


@pytest.mark.slow  # times, so alone on the GPU
def test_o36_time_does_not_grow_with_the_pool(cuda, record_gpu):
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < 6 << 30:
        pytest.skip("needs 6 GB of GPU memory")
    call = base(num_slots=10_000)
    gpu = cuda.put(call)
    codes, scales = cupy.zeros((4_000_000, 512), "uint8"), cupy.zeros((4_000_000, 8), "float32")
    codes[:10_000], scales[:10_000] = gpu["unified_kv"], gpu["kv_scales"]
    large = gpu | {"unified_kv": codes, "kv_scales": scales}
    out, workspace = cupy.empty_like(gpu["q"]), cupy.empty(workspace_size(4, 16, 512, 256), "uint8")
    faults.same_bits(paged_decode(**large), paged_decode(**gpu))
    used = cupy.get_default_memory_pool().used_bytes()
    assert bool(paged_decode(**large).any())
    assert cupy.get_default_memory_pool().used_bytes() - used < 2**20
    with cupy.cuda.Stream(non_blocking=True) as stream:
        graphs = []
        for arguments in (gpu, large):
            stream.begin_capture()
            for _ in range(20):
                paged_decode(**arguments, out=out, workspace=workspace)
            graphs.append(stream.end_capture())
        rounds = [[median_us(g.launch, stream, 5, 2) / 20 for g in graphs] for _ in range(7)]
        small_us, large_us = (min(r[i] for r in rounds) for i in (0, 1))
    record_gpu("us of one call, pool of 10k and 4M slots", [round(small_us, 2), round(large_us, 2)])
    del codes, scales, large
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    assert large_us <= 1.05 * small_us
