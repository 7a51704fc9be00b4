"""The emulator finds the faults it is for: in small kernels, and in the Hopper kernel with one instruction taken out."""

from __future__ import annotations

import calls
import emulator
import numpy as np
import pytest
from hopper import always_hopper

from cupy_paged import jit, paged_decode
from cupy_paged.backends import cuda

pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(not emulator.available(), reason="the emulator is compiled with g++")

HEAD = 'extern "C" __global__ void __launch_bounds__(64) k(const int* from, int* to) { const int i = threadIdx.x; '
SHARED = "__shared__ int s[64]; "
COPY = "__shared__ __align__(16) int s[64]; asm volatile(\"cp.async.ca.shared.global [%0], [%1], 4;\" :: \"r\"((unsigned)__cvta_generic_to_shared(s + i)), \"l\"(from + i) : \"memory\"); asm volatile(\"cp.async.commit_group;\"); "  # fmt: skip
WAIT = 'asm volatile("cp.async.wait_group 0;" ::: "memory"); '
TURN = "to[i] = s[63 - i]; }"


def run(monkeypatch, body, seed=0, size=64):
    monkeypatch.setattr(jit, "source", lambda file: HEAD + body)
    name = f"kernel{abs(hash(body))}.cu"
    numbers, to = np.arange(size, dtype=np.int32), np.full(64, -7, np.int32)
    numbers.flags.writeable = False
    params = np.array([numbers.ctypes.data, to.ctypes.data], np.uint64).tobytes()
    # The struct of one argument is what launches pass; here two pointers lie the same way.
    emulator.run(name, "k", (), "80", (1,), 64, 0, params, [numbers, to], seed)
    return to


@pytest.mark.parametrize("seed", range(4))
def test_a_right_kernel_runs(monkeypatch, seed):
    """Also where all warps write the same value to one word."""
    got = run(monkeypatch, f"{SHARED} s[i] = 3 * from[i]; __syncthreads(); {TURN}", seed)
    np.testing.assert_array_equal(got, 3 * np.arange(64)[::-1])
    got = run(monkeypatch, f"{COPY} {WAIT} __syncthreads(); {TURN}", seed)
    np.testing.assert_array_equal(got, np.arange(64)[::-1])
    got = run(monkeypatch, f"{SHARED} s[0] = 5; __syncthreads(); to[i] = s[0] + from[i]; }}", seed)
    np.testing.assert_array_equal(got, 5 + np.arange(64))


FAULTS = {
    "no barrier": (f"{SHARED} s[i] = from[i]; {TURN}", "race: (read|write) of the shared word"),
    "barrier too late": (f"{SHARED} s[i] = from[i]; __syncthreads(); int x = s[63 - i]; s[i] = x; __syncthreads(); {TURN}", "race: (read|write) of the shared word"),
    "two values": (f"{SHARED} s[0] = i / 32; __syncthreads(); to[i] = s[0] + from[i]; }}", "race: write of the shared word"),
    "barrier of one warp": ('if (i < 32) asm volatile("bar.sync 1, 64;"); to[i] = from[i]; }', "deadlock: .*warp 0"),
    "load beyond the array": ("to[i] = from[i + 1]; }", "load from global memory outside every array"),
    "store to an input": ("const_cast<int*>(from)[i] = 1; to[i] = 1; }", "store to global memory outside every array"),
    "misaligned": ("to[i] = *reinterpret_cast<const int*>(reinterpret_cast<const char*>(from) + (i & 1)); }", "misaligned global"),
    "beyond shared memory": (f"{SHARED} s[i] = 0; __syncthreads(); s[i + from[60]] = 1; {TURN}", "shared access out of bounds"),
    "without end": ("while (*reinterpret_cast<volatile const int*>(from + 1)) {} to[i] = 1; }", "too many instructions"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_small_kernels(monkeypatch, name):
    body, message = FAULTS[name]
    if name == "without end":
        monkeypatch.setattr(emulator.run, "__defaults__", (0, 100_000))
    with pytest.raises(emulator.EmulationError, match=message):
        run(monkeypatch, body)


def test_a_missing_wait_changes_results_for_some_seeds(monkeypatch):
    outcomes = set()
    for seed in range(16):
        try:
            got = run(monkeypatch, f"{COPY} __syncthreads(); {TURN}", seed)
            outcomes.add("right" if (got == np.arange(64)[::-1]).all() else "wrong")
        except emulator.EmulationError as error:
            outcomes.add("race" if "race" in str(error) else str(error))
    assert outcomes - {"right"}
    assert outcomes <= {"right", "wrong", "race"}


HOPPER = {
    "no fence before wgmma reads": ("fence.proxy.async.shared::cta;", "without fence.proxy.async between"),
    "no wait for wgmma": ("wgmma.wait_group.sync.aligned %0;", "register of a wgmma in flight"),
}


@pytest.mark.parametrize("name", HOPPER)
def test_hopper_kernel_with_one_instruction_less(monkeypatch, name):
    from emulator import gpu as device

    gone, message = HOPPER[name]
    source = jit.source
    assert gone in source("decode_wgmma.cu")
    monkeypatch.setattr(jit, "source", lambda file: source(file).replace(gone, ""))
    emulator.ptx.cache_clear()
    emulator.program.cache_clear()
    try:
        gpu = device.Gpu(num_sms=2)
        device.install(monkeypatch, gpu)
        monkeypatch.setattr(cuda, "choose", always_hopper)
        call = calls.draw(np.random.default_rng(9), t=3, h=64, d=512, lengths=[130, 0, 70], bad=0.1)
        moved = {k: gpu.array(v) if isinstance(v, np.ndarray) else v for k, v in call.items()}
        with pytest.raises(emulator.EmulationError, match=message):
            paged_decode(**moved)
    finally:
        emulator.ptx.cache_clear()
        emulator.program.cache_clear()
        device.forget()
