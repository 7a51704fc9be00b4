"""Decode on a GPU: which kernel for which call, and its launches.

A call is described by its `Problem`; everything derived from it (kernel, plan, launches) is made once and kept,
so that a warm call only packs pointers and launches.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import arrays, jit
from ..arrays import Array
from ..plan import Plan, Problem
from .launch import Launch, Params
from .variants import Variant, choose

LOG2_E = 1.4426950408889634
LARGEST = 3.4028234663852886e38  # of float32
# struct DecodeParams of kernels/params.cuh: "=10Q7qfI10i", of which only addresses and the softmax factor vary
# between calls of equal layout.
_STRIDES, _SIZES = struct.Struct("=7q"), struct.Struct("=I10i")
_PACK = struct.Struct(f"=10Q{_STRIDES.size}sf{_SIZES.size}s")
_params = Params(_PACK.size)


@functools.cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "CUDA arrays need CuPy: pip install 'cupy-paged[cuda12]' or 'cupy-paged[cuda13]', by the driver's CUDA major"
        ) from error
    return cupy


@functools.cache
def device_properties(device: int) -> tuple[str, int]:
    """(architecture such as '90a', number of multiprocessors) of a CUDA device this package supports."""
    cupy = _cupy()
    properties = cupy.cuda.runtime.getDeviceProperties(device)
    major, minor = properties["major"], properties["minor"]
    if major < 8:
        raise RuntimeError(
            f"CUDA device {device} ({properties['name'].decode()}) has compute capability {major}.{minor}; "
            f"cupy_paged needs 8.0 or newer (Ampere, Ada, Hopper, Blackwell). The NumPy backend runs anywhere"
        )
    return f"{major}{minor}", properties["multiProcessorCount"]


@dataclass(frozen=True, slots=True)
class Device:
    """What launches need to know of a CUDA device."""

    number: int
    arch: str
    num_sms: int


@functools.cache
def _device(number: int) -> Device:
    return Device(number, *device_properties(number))


def current_device() -> int:
    return int(_cupy().cuda.runtime.getDevice())


def device_of(a: Array) -> Device:
    return _device(a.device)


@functools.lru_cache(maxsize=4096)
def _launch(
    device: Device,
    file: str,
    entry: str,
    constants: jit.Constants,
    grid: tuple[int, ...],
    threads: int,
    shared_bytes: int,
) -> Launch:
    refuse_cold_capture()
    function = jit.load(file, entry, constants, device.arch, device.number, shared_bytes)
    return Launch(function, grid, (threads,), shared_bytes)


def load(
    device: Device,
    file: str,
    entry: str,
    constants: dict[str, int],
    grid: tuple[int, ...],
    threads: int,
    shared_bytes: int = 0,
) -> Launch:
    """A kernel with its geometry; what was loaded before is found again."""
    with on_device(device.number):
        return _launch(device, file, entry, tuple(sorted(constants.items())), grid, threads, shared_bytes)


def run(kernel: Launch, device: int, params: int | ctypes.c_void_p, stream: int) -> None:
    """Launch on `device`; `params` is the address of the kernel parameter array."""
    if _cupy().cuda.runtime.getDevice() == device:
        kernel(params, stream)
        return
    with on_device(device):
        kernel(params, stream)


def launch(
    device: Device,
    file: str,
    entry: str,
    constants: dict[str, int],
    grid: tuple[int, ...],
    threads: int,
    shared_bytes: int,
    stream: int,
    packed: bytes,
) -> None:
    """Launch a kernel whose one argument is the struct `packed`."""
    kernel = load(device, file, entry, constants, grid, threads, shared_bytes)
    argument = ctypes.c_char_p(packed)  # the launch copies the struct before it returns
    pointers = (ctypes.c_void_p * 1)(ctypes.cast(argument, ctypes.c_void_p).value)
    run(kernel, device.number, ctypes.addressof(pointers), stream)


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make `device` current and put the former one back."""
    runtime = _cupy().cuda.runtime
    before = runtime.getDevice()
    if before == device:
        yield
        return
    runtime.setDevice(device)
    try:
        yield
    finally:
        runtime.setDevice(before)


@dataclass(frozen=True)
class Prepared:
    """All of a call that its shapes decide."""

    variant: Variant
    plan: Plan
    launches: tuple[Launch, ...]


_prepared: dict[tuple[Any, ...], Prepared] = {}


def plan_for(problem: Problem, device: int, align: tuple[int, int] = (16, 16)) -> tuple[Variant, Plan]:
    """The kernel and plan of a call; needs the device's properties but loads nothing."""
    arch, num_sms = device_properties(device)
    return choose(problem, int(arch), num_sms, align)


def prepare(problem: Problem, device: int, align: tuple[int, int] = (16, 16)) -> Prepared:
    """Load the kernels of a call (compiling them where no cache has them) on the current device.

    `align` is the alignment in bytes of the pool's rows and of the rows of scales.
    """
    key = (problem, device, align)
    found = _prepared.get(key)
    if found is not None:
        return found
    variant, plan = plan_for(problem, device, align)
    arch, _ = device_properties(device)
    refuse_cold_capture()
    grid = (plan.num_ctas, -(-problem.num_heads // variant.heads_per_cta))
    function = jit.load(
        variant.file, variant.entry, variant.constants, variant.arch or arch, device, variant.shared_bytes
    )
    overlaps = int(arch) >= 90  # programmatic dependent launch
    launches = [Launch(function, grid, (variant.threads,), variant.shared_bytes, overlaps and variant.waits)]
    if plan.num_partials:
        combine = variant.combine
        function = jit.load(combine.file, combine.entry, combine.constants, arch, device)
        launches.append(Launch(function, combine.grid, (combine.threads,), 0, overlaps))
    if len(_prepared) >= 4096:
        _prepared.clear()
    return _prepared.setdefault(key, Prepared(variant, plan, tuple(launches)))


def refuse_cold_capture() -> None:
    """Loading a module inside a capture fails halfway on some drivers: say so before touching the stream."""
    cupy = _cupy()
    stream = cupy.cuda.get_current_stream()
    if (stream.ptr and stream.is_capturing()) or _torch_is_capturing():
        raise RuntimeError(
            "the first call of this shape is inside a CUDA graph capture, and its kernel is not loaded yet: "
            "make the same call once (or cupy_paged.warmup(...) for paged_decode) before the capture"
        )


def _torch_is_capturing() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _alignment(a: Array | None, least: int, name: str) -> int:
    """Largest of 16, 8 and 4 bytes that divides the array's address and its row strides."""
    if a is None:
        return 16
    mixed = a.ptr | 16
    for size, stride in zip(a.shape[:-1], a.strides[:-1], strict=True):
        if size > 1:
            mixed |= stride
    step = mixed & -mixed
    if step < least:
        raise ValueError(
            f"rows of {name} must begin at multiples of {least} bytes, got address {a.ptr:#x} and strides {a.strides}; "
            f"make an aligned copy first"
        )
    if any(abs(stride) >= 1 << 31 for stride in a.strides[:-1]):
        return min(step, 8)  # the kernels for 16 bytes keep strides in 31 bits
    return step


def _needs_copy(a: Array) -> bool:
    """Whether rows of q or out begin elsewhere than on 16 bytes, which the kernels count on."""
    strides = a.strides
    if not (a.ptr | strides[0] | strides[1]) & 15:
        return False
    return bool(a.ptr & 15) or any(n > 1 and s & 15 for n, s in zip(a.shape[:2], strides[:2], strict=True))


def _refuse_unaligned(**given: Array | None) -> None:
    for name, a in given.items():
        if a is not None and a.ptr & 3:
            raise ValueError(f"{name} must begin at a multiple of 4 bytes, got address {a.ptr:#x}; make a copy first")


@dataclass(frozen=True, slots=True)
class Call:
    """All of a checked call but its addresses and softmax factor: good for every call of the same layouts."""

    kind: str  # of q, whose library's current stream is the default
    device: int
    current_device: Callable[[], int]
    default_scale: float
    workspace_bytes: int
    lse_offset: int
    strides: bytes
    sizes: bytes
    launches: tuple[Launch, ...]

    def __call__(
        self,
        q: int,
        pool: int,
        scales: int,
        indices: int,
        indptr: int,
        sink: int,
        out: int,
        lse: int,
        workspace: int,
        softmax_scale: float,
        stream: int,
    ) -> None:
        """Launch on the current device, which must be `device`; the arrays are given by their addresses."""
        params = _params
        factor = softmax_scale * LOG2_E
        if not -LARGEST <= factor <= LARGEST:
            factor = LARGEST if factor > 0 else -LARGEST
        _PACK.pack_into(
            params.buffer,
            0,
            q,
            pool,
            scales,
            indices,
            indptr,
            sink,
            out,
            lse,
            workspace,
            workspace + self.lse_offset,
            self.strides,
            factor,
            self.sizes,
        )
        address = params.address
        for launch in self.launches:
            launch(address, stream)


def bind(problem: Problem, q: Array, pool: Array, scales: Array | None, out: Array) -> Call:
    """The `Call` for these layouts; loads the kernels where that has not been done."""
    align = (_alignment(pool, 4, "unified_kv"), _alignment(scales, 4, "kv_scales"))
    prepared = prepare(problem, q.device, align)
    plan = prepared.plan
    strides = _STRIDES.pack(
        q.strides[0] >> 1,
        q.strides[1] >> 1,
        out.strides[0] >> 1,
        out.strides[1] >> 1,
        pool.strides[0],
        pool.strides[1] if len(pool.shape) == 3 else 0,
        scales.strides[0] >> 2 if scales is not None else 0,
    )
    sizes = _SIZES.pack(
        min(pool.shape[0] * problem.page_size, 2**31),
        problem.page_size,
        problem.num_tokens,
        problem.num_heads,
        problem.nnz,
        plan.num_ctas,
        plan.tile,
        plan.row_cost,
        plan.chunk_min,
        plan.max_chunks,
        plan.num_partials,
    )
    scale = problem.head_dim**-0.5
    current = _cupy().cuda.runtime.getDevice
    return Call(
        q.kind, q.device, current, scale, plan.workspace_bytes, plan.lse_offset, strides, sizes, prepared.launches
    )


def decode(
    problem: Problem,
    q: Array,
    pool: Array,
    indices: Array,
    indptr: Array,
    sink: Array | None,
    scales: Array | None,
    softmax_scale: float,
    out: Array,
    lse: Array | None,
    workspace: Array | None,
    stream: int | None,
) -> Call | None:
    """Launch a checked call, all of whose arrays are on q's device.

    Returns what repeats it for equal layouts and alignments; None where it needs copies of q or out.
    """
    runtime = _cupy().cuda.runtime
    if runtime.getDevice() != q.device:
        with on_device(q.device):
            return decode(problem, q, pool, indices, indptr, sink, scales, softmax_scale, out, lse, workspace, stream)
    if stream is None:
        stream = arrays.current_stream(q)
    if (indices.ptr | indptr.ptr | (sink.ptr if sink is not None else 0)) & 3:
        _refuse_unaligned(kv_indices=indices, kv_indptr=indptr, attn_sink=sink)
    if _needs_copy(q) or _needs_copy(out):
        with arrays.on_device(q, stream):
            near, target = arrays.raw(q).copy(order="C"), arrays.raw(out)
            result = _cupy().empty(target.shape, target.dtype)
            q, out = arrays.view("q", near), arrays.view("out", result)
            decode(problem, q, pool, indices, indptr, sink, scales, softmax_scale, out, lse, workspace, stream)
            target[...] = result
        return None
    call = bind(problem, q, pool, scales, out)
    base = 0
    if call.workspace_bytes:
        if workspace is None:
            workspace = arrays.empty(q, (call.workspace_bytes,), "uint8", stream)
        elif workspace.shape[0] < call.workspace_bytes:
            raise ValueError(
                f"workspace must hold at least {call.workspace_bytes} bytes (see cupy_paged.workspace_size), "
                f"got {workspace.shape[0]}"
            )
        base = workspace.ptr
        if base % 16:
            raise ValueError(f"workspace must begin at a multiple of 16 bytes, got address {base:#x}")
    call(
        q.ptr,
        pool.ptr,
        scales.ptr if scales is not None else 0,
        indices.ptr,
        indptr.ptr,
        sink.ptr if sink is not None else 0,
        out.ptr,
        lse.ptr if lse is not None else 0,
        base,
        softmax_scale,
        stream,
    )
    return call


def workspace_bytes(problem: Problem, device: int) -> int:
    """Enough for any alignment of the pool."""
    return max(plan_for(problem, device, (step, step))[1].workspace_bytes for step in (16, 8, 4))
