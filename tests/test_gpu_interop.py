"""Library x dtype x role x stream on a GPU, each against the NumPy backend."""

from __future__ import annotations

import gc
import itertools
import statistics
import time

import ml_dtypes
import numpy as np
import oracle
import pytest

import cupy_paged

pytestmark = pytest.mark.gpu
FP8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
T, H, D, PAGES = 3, 16, 512, 300
ROLES = ("q", "unified_kv", "kv_scales", "kv_indices", "kv_indptr", "attn_sink", "out")


def on_host(pool="float8_e4m3fn", q="bfloat16"):
    rng = np.random.default_rng(5)
    kv = rng.standard_normal((PAGES, D), dtype="float32")
    given = {
        "q": rng.standard_normal((T, H, D)).astype(BF16 if q == "bfloat16" else q),
        "kv_indices": rng.integers(0, PAGES, 200, dtype="int32"),
        "kv_indptr": np.array([0, 70, 70, 200], "int32"),
        "attn_sink": rng.standard_normal(H, dtype="float32"),
    }
    if pool == "float8_e4m3fn":
        given["unified_kv"], given["kv_scales"] = cupy_paged.quantize_kv(kv)
    else:
        given["unified_kv"] = kv.astype(BF16 if pool == "bfloat16" else pool)
    return given


class Exporter:
    """Only DLPack; FP8 codes as FP8."""

    def __init__(self, array, fp8):
        self._array = cupy_paged.as_fp8(array) if fp8 else array

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)


class Interface:
    """Only __cuda_array_interface__."""

    def __init__(self, array):
        self._array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def to_cupy(a):
    import cupy

    return cupy.asarray(a.view("uint8") if a.dtype == FP8 else a)


def to_torch(a):
    torch = pytest.importorskip("torch")
    code = {BF16: torch.bfloat16, FP8: torch.float8_e4m3fn}
    if a.dtype in (BF16, FP8):
        plain = torch.from_numpy(a.view(f"int{8 * a.itemsize}" if a.dtype == BF16 else "uint8").copy())
        return plain.view(code[a.dtype.type]).cuda()
    return torch.from_numpy(a.copy()).cuda()


def to_jax(a):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    return jax.numpy.asarray(a)


def to_numba(a):
    cuda = pytest.importorskip("numba.cuda")
    return cuda.to_device(a.view("uint8") if a.dtype == FP8 else a)


PUT = {
    "cupy": to_cupy,
    "torch": to_torch,
    "jax": to_jax,
    "numba": to_numba,
    "dlpack": lambda a: Exporter(to_cupy(a), a.dtype == FP8),
    "interface": lambda a: Interface(to_cupy(a)),
}


def values(a):
    """On the host, whatever library."""
    import cupy

    if type(a).__module__.partition(".")[0] == "torch":
        return a.float().cpu().numpy()
    if hasattr(a, "copy_to_host"):
        return a.copy_to_host().astype("float32")
    if isinstance(a, (Exporter, Interface)):
        a = a._array
    return (a.get() if isinstance(a, cupy.ndarray) else np.asarray(a)).astype("float32")


def check(call, got, lse=None):
    want, want_lse = cupy_paged.paged_decode(**call, return_lse=True)
    oracle.compare(values(got), want.astype("float32"), 3.5e-3)  # both sides round to q's dtype
    if lse is not None:
        np.testing.assert_allclose(values(lse), want_lse, atol=2e-3)


def kinds():
    for library, (pool, q) in itertools.product(
        PUT, [(p, q) for p in (FP8, BF16, "float16") for q in (BF16, "float16")]
    ):
        pool, q = np.dtype(pool).name, np.dtype(q).name
        if library in ("numba", "interface") and "bfloat16" in (pool, q):
            continue  # refused by name, see test_exchange.py
        yield library, pool, q


@pytest.mark.parametrize(("library", "pool", "q"), kinds())
def test_everything_of_one_library(library, pool, q):
    call = on_host(pool, q)
    put = {name: PUT[library](a) for name, a in call.items()}
    out, lse = cupy_paged.paged_decode(**put, return_lse=True)
    expected = {"dlpack": "cupy", "interface": "cupy", "jax": "jaxlib", "numba": "numba"}.get(library, library)
    roots = {cls.__module__.partition(".")[0] for cls in type(out).__mro__}
    assert expected in roots or (library == "numba" and "numba_cuda" in roots)
    check(call, out, lse)


def test_jax_on_the_cpu_stays_there():
    to_jax(np.ones(1, "float32"))  # skips where this JAX has no GPU
    import jax

    cpu = jax.local_devices(backend="cpu")[0]
    call = on_host()
    out, lse = cupy_paged.paged_decode(**{n: jax.device_put(a, cpu) for n, a in call.items()}, return_lse=True)
    assert out.devices() == lse.devices() == {cpu}
    check(call, out, lse)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("library", [k for k in PUT if k != "cupy"])
@pytest.mark.parametrize("stream", ["default", "side", "captured"])
def test_one_role_of_another_library(library, role, stream):
    import cupy

    if role == "out" and library == "jax":
        pytest.skip("JAX arrays are read-only, see test_exchange.py")
    q = "float16" if library in ("numba", "interface") else "bfloat16"
    call = on_host(q=q)
    out = np.zeros((T, H, D), call["q"].dtype)
    put = {name: PUT[library if name == role else "cupy"](a) for name, a in (call | {"out": out}).items()}
    workspace = cupy.empty(cupy_paged.workspace_size(T, H, D, 200), "uint8")

    def work(**options):
        return cupy_paged.paged_decode(**put, workspace=workspace, **options)

    if stream == "default":
        result = work()
    else:
        work()
        cupy.cuda.Device().synchronize()
        side = cupy.cuda.Stream(non_blocking=True)
        with side:
            # torch's current stream does not follow CuPy's, hence stream=.
            if stream == "side":
                result = work(stream=side)
            else:
                side.begin_capture()
                result = work(stream=side)
                graph = side.end_capture()
                graph.launch(side)
        side.synchronize()
    assert result is put["out"]
    check(call, result)


def test_pending_work_of_the_producer_is_waited_for():
    """The pool is written on another stream, behind a long kernel, when the call is made."""
    import cupy

    torch = pytest.importorskip("torch")
    call = on_host()
    put = {name: to_cupy(a) for name, a in call.items()}
    producer = torch.cuda.Stream()
    codes = to_torch(call["unified_kv"])
    target = torch.zeros_like(codes.view(torch.uint8))

    class Late:
        """A torch tensor behind DLPack, whose capsule is asked for while its stream is busy."""

        def __dlpack_device__(self):
            return target.__dlpack_device__()

        def __dlpack__(self, **options):
            with torch.cuda.stream(producer):
                return target.__dlpack__(**options)

    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(200_000_000)
        target.copy_(codes.view(torch.uint8))
    side = cupy.cuda.Stream(non_blocking=True)
    out = cupy_paged.paged_decode(**put | {"unified_kv": Late()}, stream=side)
    side.synchronize()
    check(call, out)


def test_inputs_may_be_deleted_right_after_the_call():
    import cupy

    call = on_host()
    outs = []
    for _ in range(50):
        put = {name: Exporter(to_cupy(a), a.dtype == FP8) for name, a in call.items()}
        outs.append(cupy_paged.paged_decode(**put))
        del put
        cupy.full(PAGES * D, 0x7F, "uint8")  # takes the memory that was freed
    for out in outs:
        check(call, out)


def test_round_trips_leave_memory_flat():
    import cupy

    call = {name: Exporter(to_cupy(a), a.dtype == FP8) for name, a in on_host().items()}
    for _ in range(100):
        cupy_paged.paged_decode(**call)
    gc.collect()
    before = cupy.get_default_memory_pool().used_bytes()
    for _ in range(10_000):
        cupy_paged.paged_decode(**call)
    cupy.cuda.Device().synchronize()
    gc.collect()
    assert cupy.get_default_memory_pool().used_bytes() == before


@pytest.mark.slow
def test_torch_call_takes_at_most_20_us():
    torch = pytest.importorskip("torch")
    put = {name: to_torch(a) for name, a in on_host().items()}
    put["out"] = torch.empty_like(put["q"])
    put["workspace"] = torch.empty(cupy_paged.workspace_size(T, H, D, 200), device="cuda", dtype=torch.uint8)
    times = []
    for i in range(2000):
        if i % 50 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        cupy_paged.paged_decode(**put)
        times.append(time.perf_counter() - start)
    assert 1e6 * statistics.median(times) <= 20


def test_device_1_while_device_0_is_current():
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    call = on_host()
    with cupy.cuda.Device(1):
        put = {name: to_cupy(a) for name, a in call.items()}
    out = cupy_paged.paged_decode(**put)
    assert cupy.cuda.Device().id == 0
    assert out.device.id == 1
    check(call, out)
    with pytest.raises(ValueError, match="device"):
        cupy_paged.paged_decode(**put | {"q": to_cupy(call["q"])})
