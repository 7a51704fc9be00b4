"""Same inputs, same bits: over runs, streams and graph replays; and errors that leave the next call working."""

from __future__ import annotations

import faults
import pytest
from faults import base, captured

from cupy_paged import paged_decode


@faults.some_configs
@faults.modes
def test_same_inputs_give_the_same_bits(cuda, config, mode):
    """200 runs, over streams and graph replays."""
    import cupy

    call = base(config, lengths=[700, 64, 1, 0, 333])
    gpu = cuda.put(call)
    out, lse = paged_decode(**gpu, return_lse=True, **mode)
    wanted = out.view("uint16").copy()
    differences = cupy.zeros((), "int64")
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    cupy.cuda.Device().synchronize()
    for i in range(160):
        with streams[i % 4]:
            again, again_lse = paged_decode(**gpu, return_lse=True, **mode)
            bad = (again.view("uint16") != wanted).any() | (again_lse.view("uint32") != lse.view("uint32")).any()
            if i % 4 == 0:
                differences += bad
            else:
                assert not bool(bad)
    with streams[0]:
        result = cupy.empty_like(out)
        workspace = cupy.empty(1 << 26, "uint8")
        graph = captured(gpu, streams[0], result, workspace, **mode)
        for _ in range(40):
            graph.launch()
            differences += (result.view("uint16") != wanted).any()
            result.view("uint16").fill(0)
        assert int(differences) == 0


def test_out_of_memory_leaves_the_next_call_working(cuda):
    import cupy

    call = base()
    gpu = cuda.put(call)
    wanted = paged_decode(**gpu).get()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.get_limit()
    try:
        pool.set_limit(size=pool.used_bytes() + 1)
        out = cupy.ndarray(0, "uint8")
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            paged_decode(**gpu)
        assert out.size == 0
    finally:
        pool.set_limit(size=before)
    faults.same_bits(paged_decode(**gpu), wanted)


@pytest.mark.parametrize("at", [0, 1])
def test_a_failed_launch_leaves_the_next_call_working(cuda, monkeypatch, at):
    """Also between the two launches of a divided call."""
    from cupy_paged.backends.launch import Launch

    call = base(lengths=[700] * 4)
    gpu = cuda.put(call)
    wanted = paged_decode(**gpu, num_splits=3).get()
    inner, count = Launch.__call__, iter(range(10))

    def failing(self, params, stream):
        if next(count) == at:
            raise RuntimeError("kernel launch failed: as if")
        inner(self, params, stream)

    monkeypatch.setattr(Launch, "__call__", failing)
    with pytest.raises(RuntimeError, match="as if"):
        paged_decode(**gpu, num_splits=3)
    monkeypatch.undo()
    faults.same_bits(paged_decode(**gpu, num_splits=3), wanted)
