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

from . import exchange

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
        ``'numpy'``, ``'cupy'`` or ``'torch'``: whose array `obj` is. What came by an exchange protocol has been made
        a NumPy or CuPy array over the same memory.
    given : object
        The caller's array, where `obj` is another.
    lent : exchange.Lent or None
        Keeps another library's memory until the work of the call has been done.
    library : str
        Whose arrays the results become: `kind`, or ``'jax'``, ``'numba'``.
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

    __slots__ = ("device", "dtype", "given", "kind", "lent", "library", "obj", "ptr", "shape", "strides", "writable")

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
        library: str | None = None,
        given: Any = None,
        lent: exchange.Lent | None = None,
    ) -> None:
        self.obj = obj
        self.lent = lent
        self.given = obj if given is None else given
        self.kind = kind
        self.library = library or kind
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
        # torch gives NumPy neither bfloat16 nor FP8 under their own names
        bits = {
            "bfloat16": "view(torch.uint16).numpy().view(ml_dtypes.bfloat16)",
            "float8_e4m3fn": "view(torch.uint8).numpy()",
        }
        raise TypeError(
            f"{name} is a torch tensor on {str(device)!r}; move it to the GPU with {name}.cuda(), "
            f"or give NumPy arrays ({name}.{bits.get(dtype_name(a.dtype), 'numpy()')}) to run on the NumPy backend"
        )
    if a.requires_grad:
        raise TypeError(f"{name} requires grad, and this is inference only: give {name}.detach()")
    if a.is_neg():
        raise TypeError(f"{name} is a view of a conjugate, whose signs are not in memory: give {name}.resolve_neg()")
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


def _from_dlpack(name: str, a: Any) -> Array:
    library = exchange.library(a)
    taken = exchange.take(name, a)
    # JAX arrays are immutable, which only capsules of DLPack 1.0 can say.
    return _from_memory(a, taken, library, taken.writable and library != "jax")


def _from_cuda_interface(name: str, a: Any) -> Array:
    taken = exchange.CudaInterface(name, a)
    return _from_memory(a, taken, exchange.library(a), taken.writable)


def _from_memory(given: Any, taken: exchange.Memory, library: str | None, writable: bool) -> Array:
    if taken.device == HOST:
        obj, kind, ptr = exchange.to_numpy(taken), "numpy", 0
    else:
        obj, kind, ptr = exchange.to_cupy(taken), "cupy", taken.ptr
    return Array(obj, kind, ptr, taken.shape, taken.strides, taken.dtype, taken.device, writable, library, given, taken)


_READERS: dict[str, Callable[[str, Any], Array]] = {"numpy": _from_numpy, "cupy": _from_cupy, "torch": _from_torch}
_BY_TYPE: dict[type, Callable[[str, Any], Array]] = {}

Signature = tuple[int, Any]


def _nothing(a: None) -> Signature:
    return 0, None


# Whether an array is C-contiguous is cheaper to ask than its strides, and stands for them: only those of axes of
# length 1 remain open, which neither the checks nor the kernels look at.


def _cupy_signature(a: Any) -> Signature:
    data = a.data
    ptr = data.ptr
    return ptr, (ptr & 15, a.shape, a._c_contiguous or a.strides, a.dtype, data.device_id)


def _torch_signature(a: Any) -> Signature:
    ptr = a.data_ptr()
    return ptr, (ptr & 15, a.shape, a.is_contiguous() or a.stride(), a.dtype, a.device, a.requires_grad, a.is_neg())


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
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _BY_TYPE.setdefault(type(obj), _from_dlpack)
    if hasattr(obj, "__cuda_array_interface__"):
        return _BY_TYPE.setdefault(type(obj), _from_cuda_interface)
    if "Tracer" in type(obj).__name__:
        raise TypeError(
            f"{name} is being traced by JAX and has no values yet: call this outside jax.jit, or through "
            f"jax.pure_callback as in docs/pages/libraries.md"
        )
    raise TypeError(
        f"{name} must be a NumPy, CuPy, JAX or Numba array, a CUDA torch tensor, or an object with __dlpack__, "
        f"got {type(obj).__module__}.{type(obj).__qualname__}"
    )


def view(name: str, obj: Any) -> Array:
    """Describe `obj`, the argument called `name`, without copying or synchronising."""
    reader = _BY_TYPE.get(type(obj))
    return (reader or _reader(name, obj))(name, obj)


def empty(like: Array, shape: tuple[int, ...], dtype: str, stream: int | None = None) -> Array:
    """A new contiguous array of the kind and device of `like`; FP8 as uint8 for CuPy, which has no such dtype.

    Its memory belongs to `stream`, by default the current stream of like's library.
    """
    if stream is not None and like.kind != "numpy" and stream != current_stream(like):
        with on_device(like, stream):
            return empty(like, shape, dtype)
    if like.kind == "torch":
        torch = sys.modules["torch"]
        return _from_torch("", torch.empty(shape, dtype=getattr(torch, dtype), device=like.obj.device))
    made = view("", own(like, shape, dtype))
    made.library = like.library
    if like.library == "jax":
        made.dtype = dtype  # JAX has FP8 arrays: the result will be one
    return made


def own(like: Array, shape: tuple[int, ...], dtype: str) -> Any:
    """A new contiguous NumPy array where `like` is one, else a CuPy array on the current device; FP8 as uint8 there."""
    if like.kind == "numpy":
        return np.empty(shape, _ML_DTYPES.get(dtype, dtype))
    stored = "uint8" if dtype == "float8_e4m3fn" else dtype
    return sys.modules["cupy"].empty(shape, _ML_DTYPES.get(stored, stored))


def result(a: Array, stream: int | None = None) -> Any:
    """What the caller gets: his own array, or one made by `empty` as an array of his library.

    Its work has been queued on `stream`, by default the current one.
    """
    if a.given is not a.obj or a.library == a.kind:
        return a.given
    if a.library == "jax":
        jax = sys.modules["jax"]
        if a.kind == "numpy":  # stays on the CPU where that is not JAX's default
            other = jax.default_backend() != "cpu"
            with jax.default_device(jax.local_devices(backend="cpu")[0]) if other else contextlib.nullcontext():
                return jax.numpy.asarray(a.obj)
        with on_device(a, stream):  # JAX will wait for CuPy's current stream
            return jax.dlpack.from_dlpack(exchange.FP8(a.obj) if a.dtype == "float8_e4m3fn" else a.obj)
    if a.kind == "numpy" or a.dtype == "bfloat16":  # Numba has no bfloat16: those stay CuPy arrays
        return a.obj
    address = current_stream(a) if stream is None else stream
    if not exchange.capturing(address):
        exchange.wait(0, address, a.device)  # Numba's default stream; its own way is to wait on the host
    return sys.modules["numba"].cuda.as_cuda_array(a.obj, sync=False)


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
    """Make a's CUDA device and the stream (default: its library's) current for CuPy and a's library.

    Nothing for NumPy arrays.
    """
    if a.kind == "numpy":
        yield
        return
    import cupy

    address = current_stream(a) if stream is None else stream
    with contextlib.ExitStack() as stack:
        if a.kind == "torch" and stream is not None:
            stack.enter_context(torch_stream(stream, a.obj.device))
        stack.enter_context(cupy.cuda.Device(a.device))
        stack.enter_context(exchange.cupy_stream(address))
        yield


def torch_stream(address: int, device: Any) -> Any:
    """Context in which a stream is torch's current one."""
    cuda = sys.modules["torch"].cuda
    stream = cuda.current_stream(device)
    if stream.cuda_stream != address:
        legacy = address in (0, 1)  # an ExternalStream of 0 would be a new stream
        stream = cuda.default_stream(device) if legacy else cuda.ExternalStream(address, device=device)
    return cuda.stream(stream)


def stream_for(stream: Any, first: Array, *others: Array | None) -> int:
    """Address of the stream to launch on: `stream`, or the current one of the library that owns `first`.

    It waits for arrays of other libraries, which are ready on CuPy's or torch's current stream, and they are kept
    until the work queued by the time the descriptions go has been done.
    """
    address = current_stream(first) if stream is None else stream_address(stream)
    foreign = [a for a in (first, *others) if a is not None and (a.kind != first.kind or a.lent is not None)]
    if foreign and not exchange.capturing(address):
        exchange.let_go()
        for producer in {current_stream(a) for a in foreign}:
            exchange.wait(address, producer, first.device)
        for a in foreign:
            if a.lent is None:
                a.lent = exchange.Lent(a.obj, a.device, address)
            a.lent.stream = address
    return address


@contextlib.contextmanager
def queue(stream: Any, first: Array, *others: Array | None) -> Iterator[int]:
    """The stream of `stream_for`; a given one is current meanwhile, so that the memory of new arrays belongs to it."""
    if first.kind == "numpy":
        yield 0
        return
    address = stream_for(stream, first, *others)
    if stream is None:
        yield address
        return
    with on_device(first, address):
        yield address


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
        torch = sys.modules["torch"]
        # What torch's own compiler asks: the address alone, many times faster than a stream object.
        address = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
        return torch.cuda.current_stream(device).cuda_stream if address is None else address(device)
    return sys.modules["cupy"].cuda.get_current_stream(device).ptr


def stream_address(stream: Any) -> int:
    """Address of a stream given as an integer, a CuPy or torch stream, or a ``__cuda_stream__`` object."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream < 0:
            raise ValueError(f"stream must be the address of a CUDA stream, 0, 1 or 2, got {stream}")
        return stream
    for attribute in ("ptr", "cuda_stream"):
        address = getattr(stream, attribute, None)
        if isinstance(address, int):
            return address
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, address = protocol() if callable(protocol) else protocol
        if version != 0:
            raise TypeError(f"stream has version {version} of __cuda_stream__; version 0 is understood")
        return int(address)
    raise TypeError(
        "stream must be an integer address, a CuPy or torch stream, or an object with __cuda_stream__, "
        f"got {type(stream).__qualname__}"
    )
