"""Paged FP8 attention decode for CuPy, NumPy and everything that speaks DLPack."""

from .exchange import as_codes, as_fp8
from .lists import lists_for_v4, lists_from_padded, lists_from_page_table
from .ops import merge_states, paged_decode, warmup, workspace_size
from .pool import PagedKV
from .storage import QuantizedKV, apply_rope, dequantize_kv, inverse_rope, quantize_kv, store_kv

__version__ = "0.1.0"

__all__ = [
    "PagedKV",
    "QuantizedKV",
    "__version__",
    "apply_rope",
    "as_codes",
    "as_fp8",
    "dequantize_kv",
    "inverse_rope",
    "lists_for_v4",
    "lists_from_padded",
    "lists_from_page_table",
    "merge_states",
    "paged_decode",
    "quantize_kv",
    "store_kv",
    "warmup",
    "workspace_size",
]
