"""A GPU for the public functions: CuPy arrays in host memory, and launches that run in the emulator."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import types

import cupy
import ml_dtypes
import numpy as np

import emulator

PARAM_BYTES = 4096


class Token(int):
    """Stands for a CUfunction handle."""

    def __new__(cls, file, entry, constants, arch):
        self = super().__new__(cls, 1)
        self.kernel = (file, entry, tuple(constants), arch)
        return self


class HostArray(cupy.ndarray):
    """A CuPy array over host memory; NumPy does what CuPy would need a GPU for."""

    __module__ = "cupy"

    def __array_finalize__(self, like):
        self.gpu = getattr(like, "gpu", None)

    @property
    def host(self):
        """The same memory as a NumPy array."""
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        spans = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        before, after = -sum(min(s, 0) for s in spans), sum(max(s, 0) for s in spans) + self.dtype.itemsize
        raw = (ctypes.c_char * (before + after)).from_address(self.data.ptr - before)
        return np.ndarray(self.shape, self.dtype, raw, before, self.strides)

    def get(self):
        return self.host.copy()

    def copy(self, order="C"):
        return self.gpu.array(self.host)

    def astype(self, dtype):
        return self.gpu.array(self.host.astype(dtype))

    def __getitem__(self, at):
        if any(isinstance(part, cupy.ndarray) for part in (at if isinstance(at, tuple) else (at,))):
            return self.gpu.array(self.host[to_host(at)])
        return super().__getitem__(at)

    def __setitem__(self, at, values):
        self.host[to_host(at)] = to_host(values)


def to_host(a):
    if isinstance(a, tuple):
        return tuple(map(to_host, a))
    return a.host if isinstance(a, HostArray) else a


def _operator(apply):
    def method(self, *others):
        return self.gpu.array(apply(self.host, *map(to_host, others)))

    return method


for _name in ["lt", "le", "eq", "ne", "ge", "gt", "add", "sub", "mul", "and", "or", "xor", "invert"]:
    setattr(HostArray, f"__{_name}__", _operator(getattr(operator, f"__{_name}__")))
for _name in ("all", "any", "min", "max"):
    setattr(HostArray, _name, lambda self, *axis, _name=_name, **more: getattr(self.host, _name)(*axis, **more))


class Gpu:
    """Host memory that calls see as memory of a Hopper GPU; `seed` orders the warps of every launch."""

    def __init__(self, arch="90", num_sms=4, seed=0):
        self.arch, self.num_sms, self.seed = arch, num_sms, seed
        self.arrays: list[np.ndarray] = []
        self.launches: list[str] = []

    def array(self, values, writable=True):
        """A CuPy array over (a copy of) NumPy values, known to later launches."""
        values = np.asarray(to_host(values))
        room = np.full(values.nbytes + 256, 0xFF, np.uint8)
        begin = -room.ctypes.data % 256
        flat = room[begin : begin + values.nbytes]
        flat[:] = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
        flat.flags.writeable = writable
        self.arrays.append(flat)
        dtype = np.uint8 if values.dtype == ml_dtypes.float8_e4m3fn else values.dtype
        memory = cupy.cuda.UnownedMemory(flat.ctypes.data, max(1, flat.nbytes), flat, 0)
        made = HostArray(values.shape, dtype, cupy.cuda.MemoryPointer(memory, 0))
        made.gpu = self
        return made

    def asarray(self, values, dtype=None):
        if isinstance(values, HostArray) and dtype in (None, values.dtype):
            return values
        return self.array(np.asarray(to_host(values), dtype))

    def empty(self, shape, dtype):
        """Bytes of 0xFF, NaN in every floating dtype."""
        made = np.empty(shape, dtype)
        made.reshape(-1).view(np.uint8)[...] = 0xFF
        return self.array(made)

    def zeros(self, shape, dtype=np.float32):
        return self.array(np.zeros(shape, dtype))

    def numpy(self, a):
        """The values of such an array."""
        return a.get()

    def launcher(self):
        gpu = self

        class Launch:
            def __init__(self, function, grid, block, shared_bytes=0, dependent=False):
                self.kernel, self.grid, self.threads, self.shared = function.kernel, grid, block[0], shared_bytes

            def __call__(self, params, stream):
                file, entry, constants, arch = self.kernel
                size = emulator.program(file, entry, constants, arch).param_bytes
                packed = ctypes.string_at(ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))[0], size)
                gpu.launches.append(entry)
                emulator.run(
                    file, entry, constants, arch, self.grid, self.threads, self.shared, packed, gpu.arrays, gpu.seed
                )

        return Launch


def forget():
    """Let calls find nothing again that was kept for such a device."""
    from cupy_paged.backends import cuda, cuda_pool

    kept = [f for module in (cuda, cuda_pool) for f in vars(module).values() if hasattr(f, "cache_clear")]
    for cached in kept:
        cached.cache_clear()


def install(monkeypatch, gpu):
    """Let cupy_paged's CUDA backend run on `gpu` until the test ends."""
    from cupy_paged import arrays, ops
    from cupy_paged.backends import cuda, cuda_pool

    runtime = types.SimpleNamespace(getDevice=lambda: 0, setDevice=lambda n: None)
    stand_in = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime), empty=gpu.empty)
    launch = gpu.launcher()
    monkeypatch.setattr(cuda, "_cupy", lambda: stand_in)
    monkeypatch.setattr(cuda, "device_properties", lambda number: (gpu.arch, gpu.num_sms))
    monkeypatch.setattr(cuda, "refuse_cold_capture", lambda: None)
    monkeypatch.setattr(
        cuda.jit, "load", lambda file, entry, constants, arch, *rest: Token(file, entry, constants, arch)
    )
    for module in (cuda, cuda_pool):
        monkeypatch.setattr(module, "Launch", launch)
    monkeypatch.setattr(cuda, "_prepared", {})
    monkeypatch.setattr(ops, "_calls", {})
    forget()
    names = {"bfloat16": arrays._ML_DTYPES["bfloat16"], "float8_e4m3fn": np.uint8}

    def own(like, shape, dtype):
        if like.kind == "numpy":
            return made(like, shape, dtype)
        return gpu.empty(shape, np.dtype(names.get(dtype, dtype)))

    made = arrays.own
    monkeypatch.setattr(arrays, "own", own)
    monkeypatch.setattr(arrays, "current_stream_of", lambda kind, device: 0)
    monkeypatch.setattr(arrays, "on_device", lambda a, stream=None: contextlib.nullcontext())
    for name in ("asarray", "empty", "zeros"):  # what tests make arrays by
        monkeypatch.setattr(cupy, name, getattr(gpu, name))
    monkeypatch.setattr(cupy, "isnan", lambda a: gpu.array(np.isnan(a.host)))
    monkeypatch.setattr(arrays, "to_numpy", lambda a: a.obj if a.kind == "numpy" else gpu.numpy(a.obj))
    arrays.view("q", gpu.array(np.zeros(1, np.float32)))
    return cupy
