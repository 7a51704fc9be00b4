"""Kernel launches through the driver that CuPy has loaded.

CuPy's own launch path rebuilds its argument list on every call and has no launch attributes; a decode step makes
thousands of launches. Here the arguments are one packed struct, and programmatic dependent launch is available.
"""

from __future__ import annotations

import ctypes
import functools
import threading

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_ubyte * 64)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    driver.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.c_void_p]
    driver.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return driver


def _error(status: int) -> str:
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(name))
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return f"{(name.value or b'?').decode()}: {(text.value or b'unknown error').decode()}"


class Launch:
    """One kernel with its geometry; calling it launches with a packed argument struct.

    Parameters
    ----------
    function : int
        CUfunction handle.
    grid, block : tuple of int
        Up to three numbers each.
    shared_bytes : int
        Dynamic shared memory.
    dependent : bool
        Programmatic dependent launch: may begin before the kernel ahead of it in the stream has ended, and waits
        for it with ``griddepcontrol.wait`` (compute capability 9.0 and newer).
    """

    def __init__(
        self,
        function: int,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int = 0,
        dependent: bool = False,
    ) -> None:
        self._function = ctypes.c_void_p(function)  # an object that ctypes takes as it is
        self._geometry = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        self._shared_bytes = shared_bytes
        self._dependent = dependent
        self._launch = _driver().cuLaunchKernelEx
        self._local = threading.local()  # a config holds the stream, so each thread has its own

    def _config(self) -> tuple[_Config, ctypes.c_void_p]:
        grid, block = self._geometry
        config = _Config((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), self._shared_bytes)
        if self._dependent:
            attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
            attribute.value[0] = 1
            config.attributes = ctypes.pointer(attribute)
            config.num_attributes = 1
        made = self._local.config = config, ctypes.c_void_p(ctypes.addressof(config))
        return made

    def __call__(self, params: int | ctypes.c_void_p, stream: int) -> None:
        """Launch on `stream` with `params`, the address of the kernel parameter array."""
        try:
            config, address = self._local.config
        except AttributeError:
            config, address = self._config()
        config.stream = stream
        status = self._launch(address, self._function, params, None)
        if status:
            raise RuntimeError(f"kernel launch failed: {_error(status)}")


class Params(threading.local):
    """A reusable argument struct of `size` bytes and the one-pointer array that launches take, per thread."""

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.address = ctypes.c_void_p(ctypes.addressof(self._pointers))
