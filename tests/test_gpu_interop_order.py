"""Order and lifetime across libraries on a GPU, provoked: a long kernel keeps the streams busy during the calls."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from test_gpu_interop import PAGES, D, check, on_host, to_cupy, to_jax, to_numba, to_torch

import cupy_paged

pytestmark = pytest.mark.gpu
BUSY = 200_000_000  # cycles, about 0.1 s: much longer than what the host does meanwhile
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


@pytest.fixture
def side():
    """A CuPy stream that does not wait for the default one, with a function that keeps it busy."""
    import cupy

    kernel = cupy.RawKernel(SPIN, "spin")
    stream = cupy.cuda.Stream(non_blocking=True)

    def busy():
        with stream:
            kernel((1,), (1,), (np.int64(BUSY),))

    with stream:
        kernel((1,), (1,), (np.int64(1),))  # compiled and loaded
    cupy.cuda.Device().synchronize()
    stream_and_busy = stream, busy
    yield stream_and_busy
    stream.synchronize()


def warm(put, **options):
    """The kernels are loaded, and what the call left behind is gone."""
    import cupy

    cupy_paged.paged_decode(**put, **options)
    cupy.cuda.Device().synchronize()
    gc.collect()


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_memory_made_for_a_call_belongs_to_its_stream(side, library):
    """Scratch memory is free for the stream of the call alone: others must not write there while it runs."""
    module = pytest.importorskip(library)
    stream, busy = side
    call = on_host()
    put = {name: (to_cupy if library == "cupy" else to_torch)(a) for name, a in call.items()}
    options = {"dtype": module.uint8} | ({"device": "cuda"} if library == "torch" else {})
    warm(put, stream=stream)
    busy()
    out = cupy_paged.paged_decode(**put, stream=stream)
    garbage = [module.full((1 << n,), 0xFF, **options) for n in range(9, 24) for _ in range(4)]  # on the default stream
    default = module.cuda.get_current_stream() if library == "cupy" else module.cuda.current_stream()
    default.synchronize()
    stream.synchronize()
    check(call, out)
    assert len(garbage) == 60


def test_torch_q_waits_for_cupys_stream(side):
    """The pool is a CuPy array that CuPy's current stream has not written yet."""
    torch = pytest.importorskip("torch")
    stream, busy = side
    call = on_host()
    codes = to_cupy(call["unified_kv"])
    put = {name: to_torch(a) for name, a in call.items()} | {"unified_kv": codes.copy()}
    warm(put)
    put["unified_kv"][...] = 0x7F
    torch.cuda.synchronize()
    busy()
    with stream:
        put["unified_kv"][...] = codes
        out = cupy_paged.paged_decode(**put)
    check(call, out)


def test_cupy_q_waits_for_torchs_stream(side):
    import cupy

    torch = pytest.importorskip("torch")
    call = on_host()
    codes = to_torch(call["unified_kv"])
    put = {name: to_cupy(a) for name, a in call.items()} | {"unified_kv": torch.zeros_like(codes.view(torch.uint8))}
    warm(put)
    producer = torch.cuda.Stream()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(BUSY)
        put["unified_kv"].copy_(codes.view(torch.uint8))
        out = cupy_paged.paged_decode(**put)
    cupy.cuda.get_current_stream().synchronize()
    check(call, out)


def test_jax_memory_is_not_reused_while_it_is_read(side):
    """JAX arrays are deleted right after the call, and JAX fills what memory it has with NaN codes."""
    import cupy

    jax = pytest.importorskip("jax")
    stream, busy = side
    call = on_host()
    out = cupy.zeros(call["q"].shape, call["q"].dtype)
    put = {name: to_jax(a) for name, a in call.items()}
    jax.block_until_ready(list(put.values()))
    warm(put, out=out)
    busy()
    with stream:
        cupy_paged.paged_decode(**put, out=out)
    del put
    gc.collect()
    garbage = [jax.numpy.full((PAGES, D), 0x7F, "uint8") for _ in range(20)]
    garbage += [jax.numpy.full(n, 0x7F, "uint8") for n in (256, 1024, 8192, 1 << 15) for _ in range(20)]
    jax.block_until_ready(garbage)
    stream.synchronize()
    check(call, out)


def test_jax_waits_for_a_result_of_a_given_stream(side):
    import cupy

    jax = pytest.importorskip("jax")
    stream, busy = side
    call = on_host()
    put = {name: to_jax(a) for name, a in call.items()}
    jax.block_until_ready(list(put.values()))
    warm(put, stream=stream)
    busy()
    out, lse = cupy_paged.paged_decode(**put, stream=stream, return_lse=True)
    assert isinstance(out, jax.Array)
    check(call, out, lse)
    busy()
    codes, scales = cupy_paged.quantize_kv(to_jax(np.ones((4, 64), "float32")), stream=stream)
    assert (np.asarray(codes).view("uint8") == 0x7E).all()  # 448, the largest code
    np.testing.assert_array_equal(np.asarray(scales), np.full((4, 1), np.float32(1) / np.float32(448)))
    assert cupy.cuda.get_current_stream().ptr == 0


def test_numba_waits_for_a_result_of_a_given_stream(side):
    pytest.importorskip("numba.cuda")
    stream, busy = side
    call = on_host(q="float16")
    put = {name: to_numba(a) for name, a in call.items()}
    warm(put, stream=stream)
    busy()
    out = cupy_paged.paged_decode(**put, stream=stream)
    assert out.dtype == "float16"
    check(call, out)


def test_round_trips_with_jax_leave_memory_flat():
    import cupy

    jax = pytest.importorskip("jax")
    put = {name: to_jax(a) for name, a in on_host().items()}
    device = next(iter(put["q"].devices()))

    def held():
        cupy.cuda.Device().synchronize()
        gc.collect()
        cupy_paged.paged_decode(**put).block_until_ready()
        cupy.cuda.Device().synchronize()
        gc.collect()
        return cupy.get_default_memory_pool().used_bytes(), device.memory_stats()["bytes_in_use"]

    for _ in range(100):
        cupy_paged.paged_decode(**put)
    before = held()
    for _ in range(10_000):
        cupy_paged.paged_decode(**put)
    jax.block_until_ready(cupy_paged.paged_decode(**put))
    after = held()
    assert after[0] <= before[0] + 2**20  # results that JAX has not let go of yet
    assert after[1] <= before[1] + 2**20


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_fp8_helpers(library):
    """Codes to the library's FP8 array and back share memory."""
    import cupy

    module = pytest.importorskip(library)
    codes = cupy.arange(256, dtype="uint8")
    if library == "torch":
        there = module.from_dlpack(cupy_paged.as_fp8(codes))
        assert there.dtype == module.float8_e4m3fn
        assert there.data_ptr() == codes.data.ptr
        back = cupy_paged.as_codes(there)
    else:
        to_jax(np.ones(1, "float32"))  # skips where this JAX has no GPU
        there = module.dlpack.from_dlpack(cupy_paged.as_fp8(codes))
        assert there.dtype == module.numpy.float8_e4m3fn
        back = cupy_paged.as_codes(there)
    assert back.data.ptr == codes.data.ptr
    assert (back == codes).all()


def test_torch_views_without_their_values_are_refused():
    torch = pytest.importorskip("torch")
    imaginary = torch.ones(4, 64, dtype=torch.complex64, device="cuda").conj().imag
    with pytest.raises(TypeError, match=r"kv is a view of a conjugate.*kv\.resolve_neg"):
        cupy_paged.quantize_kv(imaginary)
    with pytest.raises(TypeError, match=r"kv must be .* got complex64"):
        cupy_paged.quantize_kv(torch.ones(4, 64, dtype=torch.complex64, device="cuda"))
