"""CUDA launch of `merge_states`."""

from __future__ import annotations

import struct

from ..arrays import Array
from ..checks import MAX_PARTS
from .cuda import device_of, launch

_DTYPE = {"bfloat16": 1, "float16": 2, "float32": 3}
_HEAD = struct.Struct("<3q4i")  # struct MergeParams of kernels/merge.cu
_PART = struct.Struct("<6q")


def merge(outs: list[Array], lses: list[Array], sink: Array | None, out: Array, lse: Array, stream: int) -> None:
    """Launch a checked `merge_states` call."""
    tokens, heads, head_dim = out.shape
    itemsize = 4 if out.dtype == "float32" else 2
    packed = _HEAD.pack(out.ptr, lse.ptr, sink.ptr if sink is not None else 0, len(outs), heads, head_dim, 0)
    for part, e in zip(outs, lses, strict=True):
        packed += _PART.pack(
            part.ptr,
            e.ptr,
            part.strides[0] // itemsize,
            part.strides[1] // itemsize,
            e.strides[0] // 4,
            e.strides[1] // 4,
        )
    packed += bytes(_PART.size * (MAX_PARTS - len(outs)))
    constants = {"DTYPE": _DTYPE[out.dtype], "MAX_PARTS": MAX_PARTS}
    launch(device_of(out), "merge.cu", "merge", constants, (tokens, heads, 1), 128, 0, stream, packed)
