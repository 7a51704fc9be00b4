"""Decode over a pool whose pages are dealt out to the ranks of a communicator (context parallelism).

Page p belongs to rank ``p % size`` and is that rank's page ``p // size``, so pages keep their places when the pool grows.
Slot ids are those of the whole pool everywhere. A rank takes its own slots out of the call's lists on the device, decodes
all heads of all tokens over them without the sink, and the partial results are exchanged and merged with it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import arrays, checks, checks_pool
from .arrays import Array, view
from .backends.cuda_split import chunks
from .communicators import Communicator, Nccl, NumpyGroup, Torch, communicator
from .distributed_cost import Cost, cost, pays_from
from .pool import PagedKV
from .storage import _optional

__all__ = [
    "Communicator",
    "Cost",
    "Nccl",
    "NumpyGroup",
    "ShardedKV",
    "Torch",
    "communicator",
    "cost",
    "owned_pages",
    "pays_from",
]

LAYOUTS = ("all", "heads", "tokens")


def owned_pages(num_pages: int, rank: int, size: int) -> int:
    """How many of `num_pages` pages rank `rank` of `size` has."""
    return (num_pages - rank + size - 1) // size


@dataclass(frozen=True)
class _Buffers:
    """What calls of one shape write beside their results; kept, because captured graphs hold their addresses."""

    indices: Array  # (nnz,) int32
    indptr: Array  # (T + 1,) int32
    counts: Array  # (chunks,) int32
    part: Array  # (T, H, D) of q's dtype
    part_lse: Array  # (T, H) float32
    sent: Any  # 'heads': (N, T, H / N, D) of q's dtype, (N, T, H / N) float32
    received: Any
    outs: list[Array]  # the ranks' parts of `received`
    lses: list[Array]
    workspace: Array


class ShardedKV:
    """This rank's pages of a pool that is dealt out to the ranks of a communicator.

    Parameters
    ----------
    comm : Communicator, NcclCommunicator, cupyx.distributed NCCLBackend, or torch process group
    num_pages : int
        Of the whole pool.
    page_size, head_dim, dtype, group_size, scale_format, device
        As for `PagedKV`.

    Attributes
    ----------
    local : PagedKV
        The pages ``rank, rank + size, ...``.
    """

    def __init__(self, comm: Any, num_pages: int, page_size: int = 1, head_dim: int = 512, **options: Any) -> None:
        self._comm = communicator(comm)
        self._num_pages = checks.positive_int("num_pages", num_pages, 0)
        self.local = PagedKV(owned_pages(num_pages, self.rank, self.size), page_size, head_dim, **options)
        self._buffers: dict[tuple[Any, ...], _Buffers] = {}

    @classmethod
    def from_arrays(cls, comm: Any, num_pages: int, codes: Any, scales: Any = None, **options: Any) -> ShardedKV:
        """A pool over existing arrays: this rank's pages in order, as `PagedKV.from_arrays` takes them.

        ValueError if `codes` does not hold as many pages as this rank has of `num_pages`.
        """
        self = cls.__new__(cls)
        self._comm = communicator(comm)
        self._num_pages = checks.positive_int("num_pages", num_pages, 0)
        self._buffers = {}
        self.local = PagedKV.from_arrays(codes, scales, **options)
        expected = owned_pages(num_pages, self.rank, self.size)
        if self.local.num_pages != expected:
            raise ValueError(
                f"codes must hold the {expected} pages of rank {self.rank} of {self.size} (pages {self.rank}, "
                f"{self.rank + self.size}, ... of {num_pages}), got {self.local.num_pages}"
            )
        return self

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def size(self) -> int:
        return self._comm.size

    @property
    def num_pages(self) -> int:
        """Of the whole pool."""
        return self._num_pages

    @property
    def num_slots(self) -> int:
        """Of the whole pool."""
        return self._num_pages * self.local.page_size

    def grow(self, num_pages: int) -> None:
        """Make the whole pool larger; see `PagedKV.grow`. No communication; every rank calls it alike."""
        pages = checks.positive_int("num_pages", num_pages, 0)
        if pages < self._num_pages:
            raise ValueError(f"grow makes a pool larger: it has {self._num_pages} pages, got {pages}")
        self.local.grow(owned_pages(pages, self.rank, self.size))
        self._num_pages = pages

    def store(self, slots: Any, kv: Any, *, stream: Any = None, validate: bool = False, **options: Any) -> None:
        """Write rows kv (T, D) into `slots` (T,) of the whole pool: every rank is given all rows and keeps its own.

        No communication.

        Parameters
        ----------
        slots, kv, stream, validate
            As for `store_kv`.
        **options
            positions, cos, sin and interleaved of `store_kv`.
        """
        checks.require(slots=slots, kv=kv)
        where, rows, pool = view("slots", slots), view("kv", kv), self.local._codes
        checks_pool.indices("slots", where)
        checks.same_device("codes", codes=pool, slots=where, kv=rows)
        if checks.flag("validate", validate):
            checks_pool.stored_values(arrays.to_numpy(where), arrays.to_numpy(rows), self.num_slots)
            if options.get("positions") is not None and options.get("cos") is not None:
                positions, cos = view("positions", options["positions"]), view("cos", options["cos"])
                checks_pool.position_values(arrays.to_numpy(positions), cos.shape[0])
        at = self._address(stream, rows, where)
        with arrays.on_device(rows, at):
            if where.kind != "numpy" and (where.dtype == "int64" or where.strides != (4,)):  # the kernel reads int32
                given = arrays.raw(where)
                known = (given >= 0) & (given < 2**31)
                where = view("slots", (known * given - ~known).astype("int32"))
            mine = view("slots", arrays.own(where, where.shape, "int32"))
            self._split().localise(where, mine, self._geometry(), at)
            self.local.store(mine.obj, kv, stream=None if where.kind == "numpy" else at, **options)

    def prepare(self, q: Any, nnz: int, layout: str = "all") -> None:
        """Agree with the other ranks on a shape and make its buffers; `decode` does so at the first call of each.

        A collective that waits for the host: outside graph captures only.

        Parameters
        ----------
        q : (T, H, D) array
            Of the calls to come; its values do not matter.
        nnz : int
            Length of kv_indices.
        layout : {'all', 'heads', 'tokens'}

        Raises
        ------
        ValueError
            On every rank, if the ranks disagree on the shapes, the pool or the layout.
        RuntimeError
            In a graph capture, or a rank has not come within the time limit.
        """
        q_ = view("q", q)
        checks.ndim("q", q_, 3, "(T, H, D)")
        checks.problem_dtypes(q_.dtype, self.local.dtype)
        self._prepared(q_, checks.positive_int("nnz", nnz, 0), layout)

    def decode(
        self,
        q: Any,
        kv_indices: Any,
        kv_indptr: Any,
        attn_sink: Any = None,
        softmax_scale: float | None = None,
        *,
        layout: str = "all",
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Attention over the whole pool; every rank makes the same call, with the same q, lists and sink.

        Parameters
        ----------
        q, kv_indices, kv_indptr, attn_sink, softmax_scale, stream
            As for `paged_decode`; slot ids are those of the whole pool.
        layout : {'all', 'heads', 'tokens'}
            What each rank gets: everything; the heads ``[rank * H / size, (rank + 1) * H / size)``; or the tokens
            ``[rank * T / size, ...)``. The last two exchange 1 / size of the bytes.

        Returns
        -------
        out : (T, H, D), (T, H / size, D) or (T / size, H, D) array of q's kind and dtype
        lse : the same without D, float32
            Log-sum-exp over the whole pool, sink excluded.

        Raises
        ------
        TypeError, ValueError
            As `paged_decode`; ValueError for a layout that does not divide, and on every rank where the first calls of
            a shape differ between the ranks.
        RuntimeError
            The first call of a shape is inside a graph capture, or a rank has not come within the time limit.
        """
        checks.require(q=q, kv_indices=kv_indices, kv_indptr=kv_indptr)
        q_, indices, indptr = view("q", q), view("kv_indices", kv_indices), view("kv_indptr", kv_indptr)
        sink = _optional("attn_sink", attn_sink)
        pool, scales = self.local._codes, self.local._scales
        problem = checks.decode(q_, pool, indices, indptr, sink, scales, None, self.local.group_size, 0, False)
        scale = problem.head_dim**-0.5 if softmax_scale is None else checks.finite("softmax_scale", softmax_scale)
        at = self._address(stream, q_, indices, indptr, sink)
        with arrays.on_device(q_, at):
            buffers = self._prepared(q_, problem.nnz, layout)
            mine, bounds, part, part_lse = buffers.indices, buffers.indptr, buffers.part, buffers.part_lse
            self._split().split(indices, indptr, mine, bounds, buffers.counts, self._geometry(), at)
            if q_.kind == "numpy":
                from .backends import numpy as host

                host.decode(problem, q_, pool, mine, bounds, None, scales, scale, part, part_lse)
            elif problem.num_tokens:
                from .backends import cuda

                cuda.decode(problem, q_, pool, mine, bounds, None, scales, scale, part, part_lse, buffers.workspace, at)
            return self._merged(q_, buffers, sink, layout, at)

    def _merged(self, q: Array, buffers: _Buffers, sink: Array | None, layout: str, stream: int) -> tuple[Any, Any]:
        n, (tokens, heads, _) = self.size, q.shape
        for kind, mine in enumerate((buffers.part.obj, buffers.part_lse.obj)):
            send, receive = mine, buffers.received[kind]
            if layout == "heads":
                send = buffers.sent[kind]
                send[...] = mine.reshape(tokens, n, heads // n, *mine.shape[2:]).swapaxes(0, 1)
            elif layout == "tokens":
                send = mine.reshape(n, tokens // n, *mine.shape[1:])
            if layout == "all":
                self._comm.all_gather(send, receive, stream)
            else:
                self._comm.all_to_all(send, receive, stream)
        outs, lses = buffers.outs, buffers.lses
        if sink is not None and layout == "heads":
            sink = view("attn_sink", arrays.raw(sink)[self.rank * heads // n : (self.rank + 1) * heads // n])
        out, lse = arrays.empty(q, outs[0].shape, q.dtype), arrays.empty(q, lses[0].shape, "float32")
        if q.kind == "numpy":
            from .backends import numpy as host

            host.merge(outs, lses, sink, out, lse)
        elif 0 not in out.shape:
            from .backends import cuda_merge

            cuda_merge.merge(outs, lses, sink, out, lse, stream)
        return arrays.result(out), arrays.result(lse)

    def _prepared(self, q: Array, nnz: int, layout: str) -> _Buffers:
        key = (q.kind, q.device, q.shape, q.dtype, nnz, layout)
        found = self._buffers.get(key)
        if found is None:
            found = self._buffers[key] = self._make(q, nnz, layout)
        return found

    def _make(self, q: Array, nnz: int, layout: str) -> _Buffers:
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
        tokens, heads, head_dim = q.shape
        n = self.size
        if n > checks.MAX_PARTS:
            raise ValueError(f"a pool can be dealt out to at most {checks.MAX_PARTS} ranks, got {n}")
        for wanted, axis, extent in (("heads", "num_heads", heads), ("tokens", "num_tokens", tokens)):
            if layout == wanted and extent % n:
                raise ValueError(f"layout={layout!r} needs {axis} divisible by the {n} ranks, got {extent}")
        if q.kind != "numpy":
            from .backends import cuda

            cuda.refuse_cold_capture()
        self._agree(q, nnz, layout)
        shape = {"all": (tokens, heads), "heads": (tokens, heads // n), "tokens": (tokens // n, heads)}[layout]
        with arrays.on_device(q):

            def make(shape: tuple[int, ...], dtype: str) -> Any:
                return arrays.own(q, shape, dtype)  # torch tensors are no arrays for a `Communicator`

            received = make((n, *shape, head_dim), q.dtype), make((n, *shape), "float32")
            staged = layout == "heads"
            sent = (make((n, *shape, head_dim), q.dtype), make((n, *shape), "float32")) if staged else None
            size = 0
            if q.kind != "numpy":
                from . import ops

                size = ops.workspace_size(
                    tokens, heads, head_dim, nnz, q_dtype=q.dtype, kv_dtype=self.local.dtype,
                    page_size=self.local.page_size, group_size=self.local.group_size, device=q.device,
                )  # fmt: skip
            return _Buffers(
                view("buffers", make((nnz,), "int32")),
                view("buffers", make((tokens + 1,), "int32")),
                view("buffers", make((chunks(nnz),), "int32")),
                view("buffers", make(q.shape, q.dtype)),
                view("buffers", make((tokens, heads), "float32")),
                sent,
                received,
                [view("outs", part) for part in received[0]],
                [view("lses", part) for part in received[1]],
                view("buffers", make((max(size, 1),), "uint8")),
            )

    def _agree(self, q: Array, nnz: int, layout: str) -> None:
        """Every rank learns what the others are about to do; ValueError on all of them if it differs."""
        names = ("T", "H", "D", "nnz", "layout", "q's dtype", "num_pages", "page_size", "pool dtype")
        dtypes = sorted(arrays.ITEMSIZE)
        mine = [
            *q.shape, nnz, LAYOUTS.index(layout), dtypes.index(q.dtype), self._num_pages, self.local.page_size,
            dtypes.index(self.local.dtype),
        ]  # fmt: skip
        # Where the communicator has a time limit, a rank that does not come is an error here instead of a wait for ever.
        with arrays.on_device(q), getattr(self._comm, "limit", contextlib.nullcontext)():
            at = 0 if q.kind == "numpy" else arrays.current_stream(q)
            send: Any = np.array(mine)
            if q.kind != "numpy":
                import cupy

                send = cupy.asarray(send)
            receive = arrays.own(q, (self.size, len(mine)), "int64")
            self._comm.all_gather(send, receive, at)
            every = receive if q.kind == "numpy" else receive.get()
        for i, name in enumerate(names):
            if (every[:, i] != every[0, i]).any():
                raise ValueError(f"the ranks disagree on {name}: {every[:, i].tolist()} (rank 0 first)")

    def _geometry(self) -> tuple[int, int, int, int]:
        """(rank, size, page_size, num_slots)"""
        return self.rank, self.size, self.local.page_size, self.num_slots

    def _address(self, stream: Any, first: Array, *others: Array | None) -> int:
        """The stream of a call; it waits for the pool and `others` where they are other libraries'."""
        if first.kind == "numpy":
            return 0
        address = arrays.stream_for(stream, first, self.local._codes, self.local._scales, *others)
        self.local._outlive()
        return address

    def _split(self) -> Any:
        if self.local._codes.kind == "numpy":
            from .backends import numpy_split

            return numpy_split
        from .backends import cuda_split

        return cuda_split
