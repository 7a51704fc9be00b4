"""Paged FP8 attention decode for CuPy, NumPy and everything that speaks DLPack."""

from .ops import merge_states, paged_decode, warmup, workspace_size

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "merge_states",
    "paged_decode",
    "warmup",
    "workspace_size",
]
