"""What `cupy_paged.distributed` exchanges partial results by: NumPy ranks in one process, NCCL, torch process groups."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from . import arrays, checks


class Communicator(Protocol):
    """What a pool needs of the ranks: two collectives over contiguous NumPy or CuPy arrays.

    `send` and `receive` have the rank as their first axis where there is one. Work is queued on `stream` (an address;
    0 for NumPy arrays) and must have the semantics of NCCL: every rank makes the same calls in the same order.
    """

    rank: int
    size: int

    def all_gather(self, send: Any, receive: Any, stream: int) -> None:
        """``receive[r]`` becomes rank r's `send`, on every rank."""

    def all_to_all(self, send: Any, receive: Any, stream: int) -> None:
        """``receive[r]`` becomes rank r's ``send[rank]``."""


class NumpyGroup:
    """Ranks that are threads of one process, over NumPy arrays: for tests and examples.

    Parameters
    ----------
    size : int
    timeout : float
        Seconds after which a rank that waits for the others raises.
    """

    def __init__(self, size: int, timeout: float = 30.0) -> None:
        self.size = checks.positive_int("size", size)
        self._timeout = timeout
        self._barrier = threading.Barrier(size)
        self._sent: list[Any] = [None] * size

    def rank(self, number: int) -> Communicator:
        """The communicator of one rank, 0 to size - 1."""
        if not 0 <= checks.positive_int("number", number, 0) < self.size:
            raise ValueError(f"number must be a rank from 0 to {self.size - 1}, got {number}")
        return _NumpyRank(self, number)

    def _meet(self) -> None:
        try:
            self._barrier.wait(self._timeout)
        except threading.BrokenBarrierError:
            raise RuntimeError(
                f"not all of {self.size} ranks came to a collective within {self._timeout} s: one has failed or makes "
                "other calls; find its error and start again with a new NumpyGroup"
            ) from None


class _NumpyRank:
    def __init__(self, group: NumpyGroup, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size

    def _exchange(self, send: Any, receive: Any, mine: Any) -> None:
        group = self._group
        group._sent[self.rank] = send
        group._meet()
        parts = [mine(sent) for sent in group._sent]
        fits = all(p.nbytes == receive[r].nbytes for r, p in enumerate(parts))
        if fits:
            for r, part in enumerate(parts):
                receive[r].view(np.uint8)[...] = part.view(np.uint8)
        group._meet()  # nobody changes what another still reads
        if not fits:
            raise ValueError(f"the ranks exchange different amounts: {[int(s.nbytes) for s in group._sent]} bytes")

    def all_gather(self, send: Any, receive: Any, stream: int) -> None:
        self._exchange(send, receive, lambda sent: sent)

    def all_to_all(self, send: Any, receive: Any, stream: int) -> None:
        self._exchange(send, receive, lambda sent: sent[self.rank])


class Nccl:
    """A `Communicator` over ``cupy.cuda.nccl.NcclCommunicator``.

    Parameters
    ----------
    communicator : NcclCommunicator
    timeout : float
        Seconds that `limit` allows.
    """

    def __init__(self, communicator: Any, timeout: float = 60.0) -> None:
        self._comm, self._timeout = communicator, timeout
        self.rank, self.size = int(communicator.rank_id()), int(communicator.size())

    @contextlib.contextmanager
    def limit(self) -> Iterator[None]:
        """Abort the communicator when what stands inside takes longer than `timeout`, and raise RuntimeError.

        For code in which the host waits for a collective, as in ``with comm.limit(): stream.synchronize()``. NCCL itself
        waits for ever. An aborted communicator, and graphs that captured it, are of no more use.
        """
        lock, done, expired = threading.Lock(), threading.Event(), threading.Event()

        def abort() -> None:
            with lock:  # held to the end: nobody leaves while the communicator is taken down
                if not done.is_set():
                    expired.set()
                    self._comm.abort()

        timer = threading.Timer(self._timeout, abort)
        timer.daemon = True
        timer.start()
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        finally:
            timer.cancel()
            with lock:
                done.set()
        if expired.is_set():
            raise RuntimeError(
                f"rank {self.rank} waited {self._timeout} s for {self.size} ranks and aborted the communicator: a rank has "
                "failed or makes other calls"
            ) from error
        if error is not None:
            raise error

    def all_gather(self, send: Any, receive: Any, stream: int) -> None:
        from cupy.cuda import nccl

        self._comm.allGather(send.data.ptr, receive.data.ptr, send.nbytes, nccl.NCCL_UINT8, stream)

    def all_to_all(self, send: Any, receive: Any, stream: int) -> None:
        from cupy.cuda import nccl

        share = send.nbytes // self.size
        nccl.groupStart()
        try:
            for r in range(self.size):
                self._comm.send(send.data.ptr + r * share, share, nccl.NCCL_UINT8, r, stream)
                self._comm.recv(receive.data.ptr + r * share, share, nccl.NCCL_UINT8, r, stream)
        finally:
            nccl.groupEnd()


class Torch:
    """A `Communicator` over a ``torch.distributed`` process group (NCCL).

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the default group, which must have been initialised.
    """

    def __init__(self, group: Any = None) -> None:
        import torch

        self._torch, self._group = torch, group
        self.rank, self.size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)

    def _tensors(self, *given: Any) -> list[Any]:
        return [self._torch.from_dlpack(a.reshape(-1).view("uint8")) for a in given]

    def all_gather(self, send: Any, receive: Any, stream: int) -> None:
        with arrays.torch_stream(stream, send.device.id):
            sent, received = self._tensors(send, receive)
            self._torch.distributed.all_gather_into_tensor(received, sent, group=self._group)

    def all_to_all(self, send: Any, receive: Any, stream: int) -> None:
        with arrays.torch_stream(stream, send.device.id):
            sent, received = self._tensors(send, receive)
            self._torch.distributed.all_to_all_single(received, sent, group=self._group)


def communicator(given: Any) -> Communicator:
    """`given` as a `Communicator`: one already, an NcclCommunicator, a cupyx.distributed backend or a torch process group."""
    if type(given).__module__.startswith("cupyx.distributed"):
        return Nccl(given._comm)
    if all(hasattr(given, name) for name in ("rank", "size", "all_gather", "all_to_all")) and not callable(given.size):
        result: Communicator = given
        return result
    if hasattr(given, "allGather"):
        return Nccl(given)
    if type(given).__module__.partition(".")[0] == "torch":
        return Torch(given)
    raise TypeError(
        "comm must be a cupy.cuda.nccl.NcclCommunicator, a cupyx.distributed NCCLBackend, a torch process group or an object "
        f"with rank, size, all_gather and all_to_all, got {type(given).__module__}.{type(given).__qualname__}"
    )
