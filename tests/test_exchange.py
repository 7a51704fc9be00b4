"""DLPack capsules and the CUDA array interface, read without a GPU: exporters here hold host memory."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import sys
import types

import ml_dtypes
import numpy as np
import pytest

import cupy_paged
from cupy_paged import arrays, exchange

FP8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
CODES = {"bfloat16": (4, 16), "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8), "float8_e4m3fnuz": (11, 8)}


class Exporter:
    """A NumPy array whose capsule says `code` and `bits`; NumPy itself knows neither bfloat16 nor FP8."""

    def __init__(self, array, *, versioned=True, read_only=False, device=None):
        self.array, self.versioned, self.device = array, versioned, device
        self.read_only = read_only
        self.given = []

    def __dlpack_device__(self):
        return self.array.view(f"uint{8 * self.array.itemsize}").__dlpack_device__()

    def __dlpack__(self, *, stream=None, **options):
        if not self.versioned and options:
            raise TypeError("unexpected keyword")
        plain = self.array.view(f"uint{8 * self.array.itemsize}") if self.array.dtype.name in CODES else self.array
        capsule = plain.__dlpack__(**options)
        content = exchange._content(capsule)[1]
        if self.array.dtype.name in CODES:
            content.tensor.code, content.tensor.bits = CODES[self.array.dtype.name]
        if self.read_only:
            content.flags |= 1
        if self.device:
            content.tensor.device_type = self.device
        self.given.append(capsule)
        return capsule


def call(wrap=lambda a: a, **changes):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 127, (8, 64), dtype="uint8").view(FP8)
    given = {
        "q": rng.standard_normal((2, 4, 64)).astype(BF16),
        "unified_kv": codes,
        "kv_indices": np.array([0, 3, 5, 7, 1], "int32"),
        "kv_indptr": np.array([0, 3, 5], "int32"),
        "kv_scales": np.full((8, 1), 0.01, "float32"),
        "attn_sink": np.zeros(4, "float32"),
    }
    return {name: wrap(value) for name, value in (given | changes).items()}


@pytest.mark.parametrize("versioned", [True, False])
def test_every_argument_by_dlpack(versioned):
    want = cupy_paged.paged_decode(**call())
    got = cupy_paged.paged_decode(**call(lambda a: Exporter(a, versioned=versioned)))
    assert got.dtype == BF16
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["int32", "float16", "float32", BF16, FP8])
@pytest.mark.parametrize("layout", [np.s_[:], np.s_[::2], np.s_[::-1], np.s_[1:, 1:3], np.s_[:0]])
def test_layouts_share_memory(dtype, layout):
    whole = np.arange(24).reshape(6, 4).astype(dtype)
    part = whole[layout]
    seen = arrays.view("a", Exporter(part))
    assert (seen.shape, seen.dtype, seen.device) == (part.shape, np.dtype(dtype).name, arrays.HOST)
    assert seen.obj.tobytes() == part.tobytes()
    if part.size:
        part[...] = 5
        assert seen.obj.tobytes() == part.tobytes()
        assert seen.obj.ctypes.data == part.ctypes.data


def test_out_is_written_and_given_back():
    want = cupy_paged.paged_decode(**call())
    out = Exporter(np.zeros((2, 4, 64), BF16))
    assert cupy_paged.paged_decode(**call(), out=out) is out
    assert out.array.tobytes() == want.tobytes()


def test_read_only_targets_are_refused():
    out = Exporter(np.zeros((2, 4, 64), BF16), read_only=True)
    with pytest.raises(ValueError, match=r"out.*(read-only|writable)"):
        cupy_paged.paged_decode(**call(), out=out)
    assert not out.array.any()


@pytest.mark.parametrize("other", [ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz])
def test_other_fp8_formats_are_refused(other):
    pool = np.zeros((8, 64), other)
    with pytest.raises(TypeError, match=f"unified_kv.*{np.dtype(other).name}"):
        cupy_paged.paged_decode(**call(unified_kv=Exporter(pool)))


def test_memory_is_given_back_once_and_not_before():
    exporter = Exporter(np.arange(6, dtype="int32"))
    seen = arrays.view("a", exporter).obj
    content = exchange._Versioned.from_address(
        ctypes.pythonapi.PyCapsule_GetPointer(exporter.given[0], b"used_dltensor_versioned")
    )
    deleted = []
    original = exchange._Deleter(content.deleter)

    @exchange._Deleter
    def deleter(address):
        deleted.append(address)
        original(address)

    content.deleter = ctypes.cast(deleter, ctypes.c_void_p).value
    part = seen[2:]
    del seen
    gc.collect()
    assert not deleted
    assert part.tolist() == [2, 3, 4, 5]
    del part
    gc.collect()
    assert len(deleted) == 1


def test_a_capsule_is_taken_once():
    capsule = np.arange(3).__dlpack__()
    exchange.Capsule("a", capsule)
    with pytest.raises(ValueError, match="once"):
        exchange.Capsule("a", capsule)


def test_unknown_dtypes_and_devices_are_named():
    exporter = Exporter(np.arange(3))
    exporter.device = 7
    with pytest.raises(TypeError, match=r"kv_indices.*device type 7"):
        arrays.view("kv_indices", exporter)
    capsule = np.arange(3).__dlpack__()
    exchange._content(capsule)[1].tensor.lanes = 2
    with pytest.raises(TypeError, match=r"q has a DLPack dtype.*2 lanes"):
        exchange.Capsule("q", capsule)


def test_objects_that_export_nothing_are_named():
    with pytest.raises(TypeError, match=r"q must be .*__dlpack__.*got builtins.list"):
        arrays.view("q", [1.0])


def test_tracers_are_sent_to_the_recipe():
    tracer = type("DynamicJaxprTracer", (), {})()
    with pytest.raises(TypeError, match=r"q is being traced by JAX.*pure_callback"):
        arrays.view("q", tracer)


def test_fp8_helpers_share_memory():
    codes = np.arange(8, dtype="uint8")
    back = cupy_paged.as_codes(cupy_paged.as_fp8(codes))
    assert back.dtype == np.uint8
    codes[0] = 99
    assert back[0] == 99
    seen = arrays.view("a", cupy_paged.as_fp8(codes))
    assert seen.dtype == "float8_e4m3fn"
    assert cupy_paged.as_codes(codes.view(FP8)).tolist() == codes.tolist()


def test_fp8_helpers_refuse_what_is_not_fp8():
    with pytest.raises(TypeError, match="uint8"):
        cupy_paged.as_fp8(np.zeros(3, "float32"))
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        cupy_paged.as_codes(np.zeros(3, "uint8"))
    with pytest.raises(TypeError, match="float8_e4m3fn, got float8_e5m2"):
        cupy_paged.as_codes(Exporter(np.zeros(3, ml_dtypes.float8_e5m2)))
    with pytest.raises(TypeError, match=r"array must have __dlpack__.* got list"):
        cupy_paged.as_codes([1, 2])


def test_streams():
    class Given:
        def __init__(self, version):
            self.version = version

        def __cuda_stream__(self):
            return self.version, 12

    assert arrays.stream_address(Given(0)) == 12
    with pytest.raises(TypeError, match="version 1"):
        arrays.stream_address(Given(1))
    with pytest.raises(ValueError, match="-1"):
        arrays.stream_address(-1)
    with pytest.raises(TypeError, match="str"):
        arrays.stream_address("0")


def test_bfloat16_without_a_dtype_is_not_guessed():
    pytest.importorskip("cupy")

    class Bare:
        __cuda_array_interface__ = {"shape": (2,), "typestr": "<V2", "data": (4096, False), "version": 3}  # noqa: RUF012

    with pytest.raises(TypeError, match=r"q offers __cuda_array_interface__ alone.*<V2"):
        arrays.view("q", Bare())


class FakeDevice:
    """CuPy's streams and events, recording what they are asked; work on a stream is done once `done` has it."""

    def __init__(self, monkeypatch, current=0):
        cupy = pytest.importorskip("cupy")
        self.log, self.done, self.captured = [], set(), set()
        outer = self

        class Event:
            def __init__(self, **options):
                self.ptr = self

            @property
            def done(self):
                return self.stream in outer.done

        def record(event, stream):
            event.stream = stream
            outer.log.append(("record", stream))

        current_stream = types.SimpleNamespace(ptr=current)
        monkeypatch.setattr(cupy.cuda, "Event", Event)
        runtime = cupy.cuda.runtime
        monkeypatch.setattr(runtime, "eventRecord", record)
        monkeypatch.setattr(runtime, "streamIsCapturing", lambda stream: stream in outer.captured)
        monkeypatch.setattr(runtime, "streamWaitEvent", lambda s, e: outer.log.append(("wait", s, e.stream)))
        monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda device=-1: current_stream)
        monkeypatch.setattr(cupy.cuda, "Device", lambda number: contextlib.nullcontext())
        monkeypatch.setattr(exchange, "_parked", collections.deque())


class OnGpu(Exporter):
    """An exporter that says its memory is on CUDA device 0."""

    def __init__(self, array):
        super().__init__(array, device=2)
        self.streams = []

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, *, stream=None, **options):
        self.streams.append(stream)
        return super().__dlpack__(**options)


class JaxArray(OnGpu):
    __module__ = "jax.fake"


def deletions(exporter):
    """A list that grows when the exporter's latest capsule is given back."""
    content = exchange._Versioned.from_address(
        ctypes.pythonapi.PyCapsule_GetPointer(exporter.given[-1], b"used_dltensor_versioned")
    )
    seen, original = [], exchange._Deleter(content.deleter)

    @exchange._Deleter
    def deleter(address):
        seen.append(address)
        original(address)

    content.deleter = ctypes.cast(deleter, ctypes.c_void_p).value
    exporter.kept = deleter
    return seen


def described(exporter, device=0):
    """As `arrays.view` describes it, without a CuPy array over memory that is not there."""
    taken = exchange.take("a", exporter)
    return arrays.Array(
        None, "cupy", taken.ptr, taken.shape, taken.strides, taken.dtype, 0, True, None, exporter, taken
    )


@pytest.mark.filterwarnings("error")
def test_streams_are_wrapped_by_what_this_cupy_does_not_deprecate():
    pytest.importorskip("cupy")
    assert exchange.cupy_stream(32).ptr == 32


@pytest.mark.parametrize(("current", "asked"), [(0, 1), (1, 1), (32, 32)])
def test_producers_are_asked_for_order_with_cupys_stream(monkeypatch, current, asked):
    FakeDevice(monkeypatch, current)
    exporter = OnGpu(np.arange(3))
    exchange.take("a", exporter)
    assert exporter.streams == [asked]


def test_nothing_is_waited_for_inside_a_capture(monkeypatch):
    gpu = FakeDevice(monkeypatch, 32)
    gpu.captured.add(32)
    exporter, jax_array = OnGpu(np.arange(3)), JaxArray(np.arange(3))
    views = [described(exporter), described(jax_array)]
    assert (exporter.streams, jax_array.streams) == ([-1], [None])
    seen = deletions(exporter)
    assert arrays.stream_for(None, *views) == 32
    del views
    gc.collect()
    assert gpu.log == []
    assert len(seen) == 1


def test_memory_of_other_libraries_is_kept_until_the_work_is_done(monkeypatch):
    gpu = FakeDevice(monkeypatch, 32)
    exporter = OnGpu(np.arange(3))
    a = described(exporter)
    seen = deletions(exporter)
    assert arrays.stream_for(64, a) == 64
    assert gpu.log == [("record", 32), ("wait", 64, 32)]
    del a
    gc.collect()
    assert gpu.log[2:] == [("record", 64)]
    exchange.let_go()
    assert seen == []
    gpu.done.add(64)
    exchange.let_go()
    assert len(seen) == 1


def test_arrays_of_two_libraries_are_put_in_order(monkeypatch):
    """A CuPy pool with torch's q: torch's stream waits for CuPy's, and the pool's memory is kept."""
    gpu = FakeDevice(monkeypatch, 32)
    monkeypatch.setitem(sys.modules, "torch", TORCH)
    q = arrays.Array(None, "torch", 0, (), (), "float16", 0, True)
    pool = arrays.Array(object(), "cupy", 0, (), (), "float16", 0, True)
    assert arrays.stream_for(None, q, q, None) == 96
    assert gpu.log == []
    assert arrays.stream_for(None, q, pool) == 96
    assert gpu.log == [("record", 32), ("wait", 96, 32)]
    kept = pool.obj
    del pool
    assert [held for _, held in exchange._parked] == [kept]
    gpu.done.add(96)
    arrays.stream_for(None, q, arrays.Array(object(), "cupy", 0, (), (), "float16", 0, True))
    assert kept not in [held for _, held in exchange._parked]


TORCH = types.SimpleNamespace(
    cuda=types.SimpleNamespace(
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=96),
        is_available=lambda: True,
        is_current_stream_capturing=lambda: False,
    )
)


class TestJax:
    """On the CPU, where JAX is installed; the GPU matrix is in test_gpu_interop.py."""

    def test_jax_in_jax_out(self):
        jax = pytest.importorskip("jax")
        want = cupy_paged.paged_decode(**call())
        got, lse = cupy_paged.paged_decode(**call(jax.numpy.asarray), return_lse=True)
        assert isinstance(got, jax.Array)
        assert isinstance(lse, jax.Array)
        assert np.asarray(got).tobytes() == want.tobytes()
        codes, scales = cupy_paged.quantize_kv(jax.numpy.ones((4, 64)))
        assert (codes.dtype, scales.shape) == (FP8, (4, 1))

    def test_jax_arrays_are_no_targets(self):
        jax = pytest.importorskip("jax")
        with pytest.raises(ValueError, match="read-only"):
            cupy_paged.paged_decode(**call(), out=jax.numpy.zeros((2, 4, 64), BF16))

    def test_fp8_helpers(self):
        jax = pytest.importorskip("jax")
        codes = np.arange(64, dtype="uint8")
        there = jax.dlpack.from_dlpack(cupy_paged.as_fp8(codes))
        assert there.dtype == FP8
        assert cupy_paged.as_codes(there).tolist() == codes.tolist()
