"""PagedKV: one pool and its scales as one object, so that codes and scales cannot drift apart."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import arrays, checks, checks_pool, pool_file, storage
from .arrays import Array, view
from .checks import FP8
from .ops import paged_decode
from .storage import _backend, _optional


class PagedKV:
    """A pool of pages of K/V rows with everything a decode loop does to it.

    Parameters
    ----------
    num_pages : int
    page_size : int
        Slots of a page; slot ``page * page_size + offset``. In an FP8 pool the slots of a page share its scales;
        1 is the most exact.
    head_dim : int
        A multiple of 64 up to 512.
    dtype : str or dtype
        'float8_e4m3fn', 'bfloat16' or 'float16'.
    group_size : int
        Elements that share a scale in an FP8 pool: 32, 64 or 128.
    scale_format : {'float32', 'pow2'}
        Whether scales are any float32 or powers of two.
    device : 'cpu', 'cuda', 'cuda:N' or int
        'cpu' gives NumPy arrays, otherwise CuPy arrays on that CUDA device. For a pool of torch tensors see
        `from_arrays`.

    Attributes
    ----------
    codes : (num_pages, D) array for pages of one slot, else (num_pages, page_size, D)
        e4m3fn codes (uint8 for CuPy), or the rows themselves in a bf16 or fp16 pool. Replaced by `grow`.
    scales : (num_pages, D // group_size) array of float32, or None
        Replaced by `grow`, together with `codes`.

    Notes
    -----
    A new pool holds zeros. Methods are in place and do not synchronise, but for `save` and ``validate=True``.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 1,
        head_dim: int = 512,
        *,
        dtype: Any = FP8,
        group_size: int = 64,
        scale_format: str = "float32",
        device: str | int = "cpu",
    ) -> None:
        name = checks_pool.dtype_argument(dtype)
        if name not in (FP8, "bfloat16", "float16"):
            raise TypeError(f"dtype must be {FP8}, bfloat16 or float16, got {name}")
        pages = checks.positive_int("num_pages", num_pages, 0)
        slots = checks.positive_int("page_size", page_size)
        checks.head_dim("the pool", checks.positive_int("head_dim", head_dim))
        shape = (pages, head_dim) if slots == 1 else (pages, slots, head_dim)
        groups = head_dim // checks.group_size(group_size, head_dim) if name == FP8 else 0
        like = _sample(device)
        with arrays.on_device(like):
            codes = arrays.empty(like, shape, name)
            scales = arrays.empty(like, (pages, groups), "float32") if groups else None
        self._adopt(codes, scales, group_size, scale_format)
        self._clear(0)

    def _adopt(self, codes: Array, scales: Array | None, group_size: int, scale_format: str) -> None:
        self._pow2 = checks_pool.pow2_format(scale_format)
        self._group_size = group_size
        self._codes = codes
        self._scales = scales

    @classmethod
    def from_arrays(
        cls, codes: Any, scales: Any = None, *, group_size: int = 64, scale_format: str = "float32"
    ) -> PagedKV:
        """A pool that works on existing arrays, without copying; NumPy, CuPy or torch.

        Parameters
        ----------
        codes : (num_pages, D) or (num_pages, page_size, D) array
            float8_e4m3fn, or uint8 holding its codes, with `scales`; bfloat16 or float16 without.
        scales : (num_pages, D // group_size) array of float32, optional
        """
        checks.require(codes=codes)
        pool, scale_rows = view("codes", codes), _optional("scales", scales)
        checks_pool.dequantize(pool, scale_rows, None, "float32", group_size)
        self = cls.__new__(cls)
        self._adopt(pool, scale_rows, group_size, scale_format)
        return self

    @property
    def codes(self) -> Any:
        return arrays.result(self._codes)

    @property
    def scales(self) -> Any:
        return None if self._scales is None else arrays.result(self._scales)

    @property
    def num_pages(self) -> int:
        return self._codes.shape[0]

    @property
    def page_size(self) -> int:
        return self._codes.shape[1] if self._codes.ndim == 3 else 1

    @property
    def head_dim(self) -> int:
        return self._codes.shape[-1]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def group_size(self) -> int:
        return self._group_size

    @property
    def scale_format(self) -> str:
        return "pow2" if self._pow2 else "float32"

    @property
    def dtype(self) -> str:
        """'float8_e4m3fn', 'bfloat16' or 'float16'."""
        return FP8 if self._scales is not None else self._codes.dtype

    @property
    def nbytes(self) -> int:
        itemsize = arrays.ITEMSIZE[self._codes.dtype]
        scales = 0 if self._scales is None else 4 * self._scales.shape[0] * self._scales.shape[1]
        return self.num_slots * self.head_dim * itemsize + scales

    def __repr__(self) -> str:
        scales = f", group_size={self.group_size}" if self._scales is not None else ""
        return (
            f"PagedKV(num_pages={self.num_pages}, page_size={self.page_size}, head_dim={self.head_dim}, "
            f"dtype={self.dtype!r}{scales}) of {self._codes.kind} arrays, {self.nbytes} bytes"
        )

    def store(
        self,
        slots: Any,
        kv: Any,
        *,
        positions: Any = None,
        cos: Any = None,
        sin: Any = None,
        interleaved: bool = True,
        stream: Any = None,
        validate: bool = False,
    ) -> None:
        """Write rows kv (T, D) into `slots` (T,); see `store_kv`."""
        storage.store_kv(
            self.codes,
            self.scales,
            slots,
            kv,
            group_size=self._group_size,
            scale_format=self.scale_format,
            positions=positions,
            cos=cos,
            sin=sin,
            interleaved=interleaved,
            stream=stream,
            validate=validate,
        )

    def decode(
        self,
        q: Any,
        kv_indices: Any,
        kv_indptr: Any,
        attn_sink: Any = None,
        softmax_scale: float | None = None,
        **options: Any,
    ) -> Any:
        """Attention over this pool; see `paged_decode`, whose other keyword arguments are taken as `options`."""
        return paged_decode(
            q,
            self.codes,
            kv_indices,
            kv_indptr,
            attn_sink,
            softmax_scale,
            self.scales,
            group_size=self._group_size,
            **options,
        )

    def dequantize(self, slots: Any = None, dtype: Any = "float32", *, stream: Any = None) -> Any:
        """Rows (T, D) of `slots` (T,), or (num_slots, D) of all; a slot outside the pool gives a row of NaN."""
        name = checks_pool.dtype_argument(dtype)
        where = _optional("slots", slots)
        size = checks_pool.dequantize(self._codes, self._scales, where, name, self._group_size)
        rows = self.num_slots if where is None else where.shape[0]
        with self._on(stream, where) as at:
            out = arrays.empty(self._codes, (rows, self.head_dim), name)
            _backend(self._codes).dequantize(self._codes, self._scales, where, out, size, at)
            return arrays.result(out)

    def grow(self, num_pages: int) -> None:
        """Make the pool larger; its pages keep their numbers, new ones hold zeros.

        `codes` and `scales` are replaced, so a captured graph must be captured again.
        """
        pages = checks.positive_int("num_pages", num_pages, 0)
        old, before = self.num_pages, self._codes
        if pages < old:
            raise ValueError(f"grow makes a pool larger: it has {old} pages, got {pages}")
        with arrays.on_device(before):
            codes = arrays.empty(before, (pages, *before.shape[1:]), before.dtype)
            arrays.raw(codes)[:old] = arrays.raw(before)
            scales = None
            if self._scales is not None:
                scales = arrays.empty(before, (pages, *self._scales.shape[1:]), "float32")
                arrays.raw(scales)[:old] = arrays.raw(self._scales)
        self._codes, self._scales = codes, scales
        self._clear(old)

    def _clear(self, begin: int) -> None:
        """Zeros from page `begin` on, with the scale of a group that holds nothing."""
        with arrays.on_device(self._codes):
            arrays.raw(self._codes)[begin:] = 0
            if self._scales is not None:
                arrays.raw(self._scales)[begin:] = checks_pool.SCALE_MIN

    def copy_pages(self, src: Any, dst: Any, *, stream: Any = None) -> None:
        """Copy whole pages, codes and scales: page ``src[i]`` to page ``dst[i]``.

        All sources are as they were before the call; of several copies to one page the last counts. A pair with
        either page outside the pool copies nothing.

        Parameters
        ----------
        src, dst : (n,) arrays of int32 or of int64
        """
        self._move(src, dst, True, stream)

    def copy_slots(self, src: Any, dst: Any, *, stream: Any = None) -> None:
        """Copy rows: slot ``src[i]`` to slot ``dst[i]``, in the manner of `copy_pages`.

        Bit for bit, but where the slots of an FP8 page share scales: there the row's values are stored anew.
        """
        if self._scales is None or self.page_size == 1:
            self._move(src, dst, False, stream)
            return
        from_, to = self._copy_arguments(src, dst)
        with self._on(stream, from_, to):
            begin, end = arrays.raw(from_), arrays.raw(to)
            known = (begin >= 0) & (begin < self.num_slots)
            self.store(known * end - ~known, self.dequantize(src, stream=stream), stream=stream)

    def _copy_arguments(self, src: Any, dst: Any) -> tuple[Array, Array]:
        checks.require(src=src, dst=dst)
        from_, to = view("src", src), view("dst", dst)
        checks_pool.copy(self._codes, from_, to)
        return from_, to

    def _move(self, src: Any, dst: Any, pages: bool, stream: Any) -> None:
        from_, to = self._copy_arguments(src, dst)
        checks.target("codes", self._codes)
        with self._on(stream, from_, to) as at:
            _backend(self._codes).move(self._codes, self._scales, from_, to, pages, at)

    @contextlib.contextmanager
    def _on(self, stream: Any, *others: Array | None) -> Iterator[int]:
        """The stream to work on, which is current on the pool's device meanwhile."""
        with (
            arrays.queue(stream, self._codes, *others) as at,
            arrays.on_device(self._codes, None if stream is None else at),
        ):
            try:
                yield at
            finally:
                self._outlive()

    def _outlive(self) -> None:
        """Forget the stream of a call: the pool lives longer, perhaps than the stream."""
        for a in (self._codes, self._scales):
            if a is not None and a.lent is not None:
                a.lent.stream = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the pool to a safetensors file: codes, scales, page size and group size together.

        An existing file is replaced only once the new one is complete.
        """
        codes = arrays.to_numpy(self._codes)
        if self._scales is not None:
            codes = codes.view(pool_file.E4M3)
        metadata = {"page_size": str(self.page_size), "scale_format": self.scale_format}
        if self._scales is not None:
            metadata["group_size"] = str(self._group_size)
        scales = None if self._scales is None else arrays.to_numpy(self._scales)
        pool_file.write(path, codes, scales, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | int = "cpu") -> PagedKV:
        """Read a pool that `save` wrote; ValueError for a truncated or foreign file."""
        codes, scales, metadata = pool_file.read(path)
        try:
            page_size = int(metadata["page_size"])
            group_size = int(metadata["group_size"]) if scales is not None else 64
            whole = cls.from_arrays(codes, scales, group_size=group_size, scale_format=metadata["scale_format"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold a consistent pool: {error}") from error
        if whole.page_size != page_size:
            raise ValueError(f"{path} says page_size = {page_size}, but its codes have shape {codes.shape}")
        like = _sample(device)
        if like.kind == "numpy":
            return whole
        with arrays.on_device(like):
            on_gpu = [None if a is None else _upload(a) for a in (codes, scales)]
        return cls.from_arrays(*on_gpu, group_size=group_size, scale_format=metadata["scale_format"])


def _sample(device: str | int) -> Array:
    """An array of the kind and device that a pool on `device` is made of."""
    if device == "cpu":
        return view("", np.empty(0, np.uint8))
    number: Any = device
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        if kind != "cuda" or not (number.isdigit() or device == "cuda"):
            raise ValueError(f"device must be 'cpu', 'cuda', 'cuda:N' or a CUDA device number, got {device!r}")
    from .backends import cuda

    index = cuda.current_device() if number == "" else checks.positive_int("device", int(number), 0)
    with cuda.on_device(index):
        import cupy

        return view("", cupy.empty(0, np.uint8))


def _upload(a: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(a.view(np.uint8) if a.dtype == pool_file.E4M3 else a)
