"""A GPU for the public functions: CuPy arrays in host memory, and launches that run in the emulator."""

from __future__ import annotations

import contextlib
import ctypes
import types

import numpy as np

import emulator

PARAM_BYTES = 4096


class Token(int):
    """Stands for a CUfunction handle."""

    def __new__(cls, file, entry, constants, arch):
        self = super().__new__(cls, 1)
        self.kernel = (file, entry, tuple(constants), arch)
        return self


class Gpu:
    """Host memory that calls see as memory of a Hopper GPU; `seed` orders the warps of every launch."""

    def __init__(self, arch="90", num_sms=4, seed=0):
        self.arch, self.num_sms, self.seed = arch, num_sms, seed
        self.arrays: list[np.ndarray] = []
        self.launches: list[str] = []

    def array(self, values, writable=True):
        """A CuPy array over (a copy of) NumPy values, known to later launches."""
        import cupy

        values = np.asarray(values)
        room = np.full(values.nbytes + 256, 0xFF, np.uint8)
        begin = -room.ctypes.data % 256
        flat = room[begin : begin + values.nbytes]
        flat[:] = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
        flat.flags.writeable = writable
        self.arrays.append(flat)
        dtype = np.uint8 if values.dtype.itemsize == 1 else values.dtype
        memory = cupy.cuda.UnownedMemory(flat.ctypes.data, max(1, flat.nbytes), flat, 0)
        return cupy.ndarray(values.shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def empty(self, shape, dtype):
        return self.array(
            np.full(shape, 0xFF, np.uint8).view(np.uint8) if dtype == np.uint8 else self._filled(shape, dtype)
        )

    @staticmethod
    def _filled(shape, dtype):
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return np.full(size, 0xFF, np.uint8).view(dtype).reshape(shape)

    def numpy(self, a):
        """The values of such an array."""
        if 0 in a.shape:
            return np.zeros(a.shape, a.dtype)
        size = sum((n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)) + a.dtype.itemsize
        raw = np.frombuffer(ctypes.string_at(a.data.ptr, size), np.uint8)
        return np.ndarray(a.shape, a.dtype, raw.tobytes(), 0, a.strides)

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
    import cupy

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
    monkeypatch.setattr(arrays, "to_numpy", lambda a: a.obj if a.kind == "numpy" else gpu.numpy(a.obj))
    arrays.view("q", gpu.array(np.zeros(1, np.float32)))
    return cupy
