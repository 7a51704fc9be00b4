"""Any library's array as pointer, shape, strides, dtype and device: the one place that knows array libraries.

No array library is imported here except NumPy; a library is recognised by its type and, where needed, taken
from ``sys.modules``, where it must be because the caller holds one of its arrays.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

HOST = -1  # device of an array in host memory

# Canonical dtype names, whatever library they come from.
_NAMES: dict[Any, str] = {
    np.dtype(t): np.dtype(t).name
    for t in (
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e4m3b11fnuz,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e5m2fnuz,
    )
}
_ML_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
ITEMSIZE = {
    "uint8": 1,
    "float8_e4m3fn": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "int32": 4,
    "int64": 8,
}


def dtype_name(dtype: Any) -> str:
    """Canonical name of a NumPy, ml_dtypes or torch dtype, such as ``'bfloat16'``."""
    name = _NAMES.get(dtype)
    if name is None:
        text = np.dtype(dtype).name if isinstance(dtype, type) else str(dtype)  # np.float16, ml_dtypes.bfloat16
        name = text[6:] if text.startswith("torch.") else text
        if len(_NAMES) < 256:
            _NAMES[dtype] = name
    return name


class Array:
    """What a kernel needs to know of an array, and the object it came from.

    Attributes
    ----------
    obj : object
        The caller's array; kept so that its memory outlives the launch.
    kind : str
        ``'numpy'``, ``'cupy'`` or ``'torch'``: whose array it is, hence whose arrays the results become.
    ptr : int
        Address of the first element (0 for NumPy arrays, which no kernel reads).
    shape, strides : tuple of int
        Strides in bytes.
    dtype : str
        Canonical dtype name.
    device : int
        CUDA device number, or `HOST`.
    writable : bool
    """

    __slots__ = ("device", "dtype", "kind", "obj", "ptr", "shape", "strides", "writable")

    def __init__(
        self,
        obj: Any,
        kind: str,
        ptr: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: str,
        device: int,
        writable: bool,
    ) -> None:
        self.obj = obj
        self.kind = kind
        self.ptr = ptr
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.device = device
        self.writable = writable

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def layout(self) -> tuple[Any, ...]:
        """All that checks look at: two arrays of equal layout pass or fail alike."""
        return (self.kind, self.shape, self.strides, self.dtype, self.device, self.writable)


def _from_numpy(name: str, a: Any) -> Array:
    return Array(a, "numpy", 0, a.shape, a.strides, dtype_name(a.dtype), HOST, a.flags.writeable)


def _from_cupy(name: str, a: Any) -> Array:
    data = a.data
    return Array(
        a, "cupy", data.ptr, a.shape, a.strides, _NAMES.get(a.dtype) or dtype_name(a.dtype), data.device_id, True
    )


def _from_torch(name: str, a: Any) -> Array:
    device = a.device
    if device.type != "cuda":
        raise TypeError(
            f"{name} is a torch tensor on {str(device)!r}; move it to the GPU with {name}.cuda(), "
            f"or give NumPy arrays ({name}.numpy()) to run on the NumPy backend"
        )
    if a.requires_grad:
        raise TypeError(f"{name} requires grad, and this is inference only: give {name}.detach()")
    itemsize = a.element_size()
    return Array(
        a,
        "torch",
        a.data_ptr(),
        tuple(a.shape),
        tuple([s * itemsize for s in a.stride()]),
        dtype_name(a.dtype),
        device.index,
        True,
    )


_READERS: dict[str, Callable[[str, Any], Array]] = {"numpy": _from_numpy, "cupy": _from_cupy, "torch": _from_torch}
_BY_TYPE: dict[type, Callable[[str, Any], Array]] = {}

Signature = tuple[int, Any]


def _nothing(a: None) -> Signature:
    return 0, None


def _cupy_signature(a: Any) -> Signature:
    data = a.data
    ptr = data.ptr
    return ptr, (ptr & 15, a.shape, a.strides, a.dtype, data.device_id)


def _torch_signature(a: Any) -> Signature:
    ptr = a.data_ptr()
    return ptr, (ptr & 15, a.shape, a.stride(), a.dtype, a.device, a.requires_grad)


# By the type of an array seen before: its address, and a key of everything else that the checks, the plan and the
# choice of a kernel look at, the address's alignment included. Much cheaper than `view`; for repeated calls.
SIGNATURES: dict[type, Callable[[Any], Signature]] = {type(None): _nothing}
_SIGNATURE_OF: dict[str, Callable[[Any], Signature]] = {"cupy": _cupy_signature, "torch": _torch_signature}


def _reader(name: str, obj: Any) -> Callable[[str, Any], Array]:
    for cls in type(obj).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in _READERS and hasattr(obj, "shape") and hasattr(obj, "dtype") and not isinstance(obj, np.generic):
            if root in _SIGNATURE_OF:
                SIGNATURES[type(obj)] = _SIGNATURE_OF[root]
            return _BY_TYPE.setdefault(type(obj), _READERS[root])
    raise TypeError(
        f"{name} must be a CuPy or NumPy array or a CUDA torch tensor, got {type(obj).__module__}.{type(obj).__qualname__}"
    )


def view(name: str, obj: Any) -> Array:
    """Describe `obj`, the argument called `name`, without copying or synchronising."""
    reader = _BY_TYPE.get(type(obj))
    return (reader or _reader(name, obj))(name, obj)


def empty(like: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """A new contiguous array of the kind and device of `like`; FP8 as uint8 for CuPy, which has no such dtype."""
    if like.kind == "torch":
        torch = sys.modules["torch"]
        return _from_torch("", torch.empty(shape, dtype=getattr(torch, dtype), device=like.obj.device))
    module = np if like.kind == "numpy" else sys.modules["cupy"]
    if like.kind == "cupy" and dtype == "float8_e4m3fn":
        dtype = "uint8"
    return view("", module.empty(shape, _ML_DTYPES.get(dtype, dtype)))


def as_cupy(a: Array) -> Any:
    """The same memory as a CuPy array; bf16 and FP8 elements as uint16 and uint8."""
    import cupy

    if a.kind == "cupy":
        return a.obj
    itemsize = ITEMSIZE[a.dtype]
    raw = a.dtype if a.dtype in ("int32", "int64", "float32") else f"uint{8 * itemsize}"
    last = sum((n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)) + itemsize if 0 not in a.shape else 0
    memory = cupy.cuda.UnownedMemory(a.ptr, last, a.obj, a.device)
    return cupy.ndarray(a.shape, raw, cupy.cuda.MemoryPointer(memory, 0), a.strides)


def raw(a: Array) -> Any:
    """The same memory as a NumPy or CuPy array, elements without a common dtype (bf16, FP8) as unsigned integers."""
    if a.kind != "numpy":
        return as_cupy(a)
    return a.obj.view(f"uint{8 * a.obj.itemsize}") if a.dtype in _ML_DTYPES else a.obj


@contextlib.contextmanager
def on_device(a: Array, stream: int | None = None) -> Iterator[None]:
    """Make a's CUDA device and the stream (default: its library's) current for CuPy; nothing for NumPy arrays."""
    if a.kind == "numpy":
        yield
        return
    import cupy

    address = current_stream(a) if stream is None else stream
    with cupy.cuda.Device(a.device), cupy.cuda.ExternalStream(address, a.device):
        yield


def to_numpy(a: Array) -> Any:
    """The values as a NumPy array; synchronises where they are on a GPU."""
    if a.kind == "numpy":
        return a.obj
    import cupy

    with on_device(a):
        values = cupy.asnumpy(as_cupy(a))
    dtype = np.dtype(_ML_DTYPES.get(a.dtype, a.dtype))
    return values if values.dtype == dtype else values.view(dtype)


def current_stream(a: Array) -> int:
    """Address of the current stream of the library that owns `a`."""
    return current_stream_of(a.kind, a.device)


def current_stream_of(kind: str, device: int) -> int:
    if kind == "torch":
        return sys.modules["torch"].cuda.current_stream(device).cuda_stream
    return sys.modules["cupy"].cuda.get_current_stream().ptr


def stream_address(stream: Any) -> int:
    """Address of a stream given as an integer, a CuPy or torch stream, or a ``__cuda_stream__`` object."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for attribute in ("ptr", "cuda_stream"):
        address = getattr(stream, attribute, None)
        if isinstance(address, int):
            return address
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    raise TypeError(
        "stream must be an integer address, a CuPy or torch stream, or an object with __cuda_stream__, "
        f"got {type(stream).__qualname__}"
    )
