"""Arrays of other libraries, by DLPack or the CUDA array interface, without copies.

CuPy and NumPy refuse the FP8 formats in a DLPack capsule, and NumPy bfloat16 too, so capsules are read here. Layout:
https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import sys
from typing import Any

import ml_dtypes
import numpy as np

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_UINT, FP8_CODE = 1, 10
_DTYPES = {
    (0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64",
    (1, 8): "uint8", (1, 16): "uint16", (1, 32): "uint32", (1, 64): "uint64",
    (2, 16): "float16", (2, 32): "float32", (2, 64): "float64",
    (4, 16): "bfloat16", (5, 64): "complex64", (5, 128): "complex128", (6, 8): "bool",
    (7, 8): "float8_e3m4", (8, 8): "float8_e4m3", (9, 8): "float8_e4m3b11fnuz", (FP8_CODE, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz", (12, 8): "float8_e5m2", (13, 8): "float8_e5m2fnuz", (14, 8): "float8_e8m0fnu",
}  # fmt: skip


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_LAYOUTS: dict[bytes, Any] = {b"dltensor": _Managed, b"dltensor_versioned": _Versioned}
_api = ctypes.pythonapi
_api.PyCapsule_GetName.restype = ctypes.c_char_p
_api.PyCapsule_GetName.argtypes = [ctypes.py_object]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _content(capsule: Any) -> tuple[bytes, Any]:
    """The capsule's name and the struct it points to."""
    name = _api.PyCapsule_GetName(capsule)
    if name not in _LAYOUTS:
        raise ValueError(f"a DLPack capsule can be taken once; this one is {(name or b'?').decode()!r}")
    return name, _LAYOUTS[name].from_address(_api.PyCapsule_GetPointer(capsule, name))


_USED = {name: b"used_" + name for name in _LAYOUTS}  # kept: a capsule holds the address of its name


_parked: collections.deque[tuple[Any, Any]] = collections.deque()  # (event, what must outlive it)


def library(a: Any) -> str | None:
    """The library whose arrays the results become; None: NumPy or CuPy, by where the memory is."""
    roots = {cls.__module__.partition(".")[0] for cls in type(a).__mro__}
    return "jax" if roots & {"jax", "jaxlib"} else "numba" if roots & {"numba", "numba_cuda"} else None


def capturing(stream: int) -> bool:
    """Whether work put on a stream goes into a CUDA graph: nothing outside the graph can be waited for there."""
    if stream in (0, 1):  # the legacy default stream cannot be captured
        return False
    import cupy

    return bool(cupy.cuda.runtime.streamIsCapturing(stream))


def wait(stream: int, producer: int, device: int) -> None:
    """Make a stream wait for the work queued on another so far, without the host waiting."""
    if (stream or 1) == (producer or 1):
        return
    import cupy

    event = _record(producer, device)
    cupy.cuda.runtime.streamWaitEvent(stream, event.ptr)


def _record(stream: int, device: int) -> Any:
    """A CuPy event for the work queued on a stream so far."""
    import cupy

    with cupy.cuda.Device(device):
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, stream)
    return event


class Stream:
    """The address of a stream as CUDA's stream protocol gives it."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def cupy_stream(address: int) -> Any:
    """CuPy's object for a stream, which stays its owner's."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14; it deprecates what older ones have
        return cupy.cuda.Stream.from_external(Stream(address))
    return cupy.cuda.ExternalStream(address)


def let_go() -> None:
    """Drop what was kept for work that has been done since."""
    torch = sys.modules.get("torch")
    if _parked and torch is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # events must not be asked then
    for _ in range(len(_parked)):
        try:
            event, held = _parked.popleft()
        except IndexError:  # another thread was faster
            return
        if not event.done:
            _parked.appendleft((event, held))
            return


class Lent:
    """Keeps `held`, another library's, until the work queued on `stream` when this object goes has been done.

    That library may hand freed memory to work on its own streams, which do not wait for ours. `stream` is CuPy's
    current one where none was said.
    """

    held: Any
    device: int
    stream: int | None = None

    def __init__(self, held: Any, device: int, stream: int) -> None:
        self.held, self.device, self.stream = held, device, stream

    def __del__(self) -> None:
        if getattr(self, "held", None) is None or self.device < 0:
            return
        with contextlib.suppress(Exception):  # at the interpreter's end there is no CuPy any more
            import cupy

            stream = cupy.cuda.get_current_stream(self.device).ptr if self.stream is None else self.stream
            if capturing(stream):  # what a graph reads, its owner keeps
                return
            _parked.append((_record(stream, self.device), self.held))


class Memory(Lent):
    """An array's memory and layout, whatever it came by; keeps the memory alive.

    Attributes
    ----------
    ptr : int
        Address of the first element.
    shape, strides : tuple of int
        Strides in bytes.
    dtype : str
        Canonical name.
    device : int
        CUDA device number, or -1 for host memory.
    writable : bool
    held : object
        Gives the memory back when it goes.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    writable: bool

    def extent(self) -> tuple[int, int]:
        """Lowest address of an element, and bytes from there to the end of the highest."""
        if 0 in self.shape:
            return self.ptr, 0
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low = sum(min(r, 0) for r in reach)
        return self.ptr + low, sum(max(r, 0) for r in reach) - low + np.dtype(_numpy_dtype(self.dtype)).itemsize


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(np.cumprod((itemsize, *shape[:0:-1]))[::-1].tolist()) if shape else ()


class _Content:
    """A DLPack struct taken from its capsule; its deleter is called when this object goes."""

    def __init__(self, struct: Any) -> None:
        self.struct = struct

    def __del__(self) -> None:
        if self.struct.deleter:
            _Deleter(self.struct.deleter)(ctypes.addressof(self.struct))


class Capsule(Memory):
    """A DLPack tensor taken from its exporter."""

    def __init__(self, name: str, capsule: Any) -> None:
        kind, content = _content(capsule)
        if kind == b"dltensor_versioned" and content.major != 1:
            raise TypeError(f"{name} comes as DLPack {content.major}.{content.minor}; this reads versions 0 and 1")
        _api.PyCapsule_SetName(capsule, _USED[kind])
        self.device = -1
        self.held = _Content(content)
        tensor = content.tensor
        dtype = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
        if dtype is None:
            raise TypeError(
                f"{name} has a DLPack dtype that is not known here (code {tensor.code}, {tensor.bits} bits, "
                f"{tensor.lanes} lanes)"
            )
        if tensor.device_type not in (_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED):
            raise TypeError(f"{name} is on DLPack device type {tensor.device_type}; expected CUDA or host memory")
        self.dtype = dtype
        self.device = tensor.device_id if tensor.device_type in (_CUDA, _CUDA_MANAGED) else -1
        self.shape = tuple(tensor.shape[: tensor.ndim])
        itemsize = tensor.bits // 8
        if tensor.strides:
            self.strides = tuple(itemsize * s for s in tensor.strides[: tensor.ndim])
        else:
            self.strides = _contiguous(self.shape, itemsize)
        self.ptr = (tensor.data or 0) + tensor.byte_offset
        self.writable = not (kind == b"dltensor_versioned" and content.flags & _READ_ONLY)


def _numpy_dtype(name: str) -> Any:
    return getattr(ml_dtypes, name, None) or np.dtype(name)


def take(name: str, obj: Any) -> Capsule:
    """Ask `obj` for its tensor, ready for use on CuPy's current stream of its device."""
    device_type, device = obj.__dlpack_device__()
    stream = None
    if int(device_type) in (_CUDA, _CUDA_MANAGED):
        import cupy

        let_go()
        current = cupy.cuda.get_current_stream(device).ptr
        stream = current or 1  # 1: the legacy default stream
        if capturing(current):  # -1: no waiting; JAX knows no -1, and waits on the host for None
            stream = None if library(obj) == "jax" else -1
    try:
        capsule = obj.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # an exporter older than DLPack 1.0
        capsule = obj.__dlpack__(stream=stream)
    return Capsule(name, capsule)


class CudaInterface(Memory):
    """Memory described by ``__cuda_array_interface__`` (version 2 or 3), in order with CuPy's current stream."""

    def __init__(self, name: str, obj: Any) -> None:
        import cupy

        let_go()
        described = obj.__cuda_array_interface__
        dtype = np.dtype(described["typestr"])
        if dtype.kind == "V":
            raise TypeError(
                f"{name} offers __cuda_array_interface__ alone, where bfloat16 and FP8 are bytes without a dtype "
                f"({described['typestr']!r}): give an array with __dlpack__, or FP8 codes as uint8"
            )
        self.dtype = dtype.name
        self.shape = tuple(described["shape"])
        self.strides = tuple(described.get("strides") or _contiguous(self.shape, dtype.itemsize))
        self.ptr, read_only = described["data"]
        self.writable = not read_only
        self.device = cupy.cuda.runtime.pointerGetAttributes(self.ptr).device if self.ptr else cupy.cuda.Device().id
        self.held = obj
        producer = described.get("stream")
        current = cupy.cuda.get_current_stream(self.device).ptr
        if producer is not None and not capturing(current):
            wait(current, producer, self.device)


def to_numpy(memory: Memory) -> Any:
    """A NumPy array over host memory."""
    dtype = np.dtype(_numpy_dtype(memory.dtype))
    low, size = memory.extent()
    if size == 0:
        return np.empty(memory.shape, dtype)
    buffer: Any = (ctypes.c_ubyte * size).from_address(low)
    buffer.owner = memory  # the array's base is `buffer`
    array: Any = np.ndarray(memory.shape, dtype, buffer, memory.ptr - low, memory.strides)
    array.flags.writeable = memory.writable
    return array


def to_cupy(memory: Memory) -> Any:
    """A CuPy array over a GPU's memory, elements without a CuPy dtype (FP8) as uint8."""
    import cupy

    low, size = memory.extent()
    dtype = "uint8" if memory.dtype.startswith("float8") else _numpy_dtype(memory.dtype)
    owned = cupy.cuda.UnownedMemory(low, size, memory, memory.device)
    return cupy.ndarray(memory.shape, dtype, cupy.cuda.MemoryPointer(owned, memory.ptr - low), memory.strides)


class FP8:
    """Codes as a DLPack exporter of float8_e4m3fn, see `as_fp8`."""

    def __init__(self, codes: Any) -> None:
        self.codes = codes

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.codes.__dlpack_device__()
        return device

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.codes.__dlpack__(**options)
        _content(capsule)[1].tensor.code = FP8_CODE
        return capsule


def as_fp8(codes: Any) -> FP8:
    """FP8 codes for a library that has an FP8 dtype, without a copy.

    CuPy and NumPy hold FP8 as uint8 codes and cannot export FP8 themselves. The result has ``__dlpack__`` and is what
    ``torch.from_dlpack`` and ``jax.dlpack.from_dlpack`` take.

    Parameters
    ----------
    codes : array of uint8
        CuPy, NumPy, or any array with ``__dlpack__``.

    Returns
    -------
    exporter of a float8_e4m3fn array of the same shape and memory

    Raises
    ------
    TypeError
        `codes` is not uint8.

    See Also
    --------
    as_codes : the way back
    """
    if str(getattr(codes, "dtype", None)).rpartition(".")[2] != "uint8" or not hasattr(codes, "__dlpack__"):
        raise TypeError(
            f"codes must be an array of uint8 with __dlpack__ (a NumPy array of FP8: codes.view('uint8')), "
            f"got {getattr(codes, 'dtype', type(codes))}"
        )
    return FP8(codes)


def as_codes(array: Any) -> Any:
    """The uint8 codes of an FP8 array of any library, as a CuPy array (NumPy, if in host memory), without a copy.

    Parameters
    ----------
    array : array of float8_e4m3fn
        Anything with ``__dlpack__``, or a NumPy array of ``ml_dtypes.float8_e4m3fn``.

    Returns
    -------
    array of uint8

    Raises
    ------
    TypeError
        `array` is not float8_e4m3fn, or offers no ``__dlpack__``.
    """
    if isinstance(array, np.ndarray):
        dtype, codes = array.dtype.name, array
    elif not hasattr(array, "__dlpack_device__"):
        raise TypeError(f"array must have __dlpack__, or be NumPy's, got {type(array).__qualname__}")
    else:
        memory = take("array", array)
        dtype, codes = memory.dtype, to_numpy(memory) if memory.device < 0 else to_cupy(memory)
    if dtype != "float8_e4m3fn":
        raise TypeError(f"array must be float8_e4m3fn, got {dtype}; quantize_kv makes codes of other values")
    return codes.view("uint8")
