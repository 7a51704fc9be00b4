"""A model of what a decode over several GPUs costs, and from which context length on it pays."""

from __future__ import annotations

from typing import Any, NamedTuple


class Cost(NamedTuple):
    """What `cost` expects of one call on each rank, in bytes and microseconds."""

    bytes_received: int
    exchange_us: float
    decode_us: float
    merge_us: float
    one_gpu_us: float

    @property
    def us(self) -> float:
        return self.exchange_us + self.decode_us + self.merge_us


def cost(
    size: int,
    num_tokens: int,
    num_heads: int,
    length: int,
    *,
    layout: str = "all",
    head_dim: int = 512,
    group_size: int = 64,
    link_gbs: float = 400.0,
    memory_gbs: float = 3500.0,
    overhead_us: float = 8.0,
    collective_us: float = 12.0,
) -> Cost:
    """A model of a decode over `size` GPUs, for choosing a layout; memory and link rates bind, arithmetic does not.

    Parameters
    ----------
    size, num_tokens, num_heads, length : int
        Ranks; T, H and slots of each token, evenly spread over the pages.
    layout : {'all', 'heads', 'tokens'}
    link_gbs : float
        What a GPU receives from the others in a second, 10^9 bytes.
    memory_gbs : float
        At which it gathers rows.
    overhead_us : float
        Of launching a decode, and of the merge beside its traffic.
    collective_us : float
        Of a collective of few bytes.
    """
    row_bytes = head_dim + 4 * (head_dim // group_size)
    partial_bytes = num_tokens * num_heads * (2 * head_dim + 4)  # bf16 and lse
    received = partial_bytes * (size - 1) // (1 if layout == "all" else size)
    kept = partial_bytes if layout == "all" else partial_bytes // size
    rows_us = num_tokens * length * row_bytes / memory_gbs / 1e3
    return Cost(
        received,
        (2 * collective_us if size > 1 else 0.0) + received / link_gbs / 1e3,
        overhead_us + rows_us / size,
        overhead_us + (size + 1) * kept / memory_gbs / 1e3 if size > 1 else 0.0,
        overhead_us + rows_us,
    )


def pays_from(size: int, num_tokens: int, num_heads: int, **options: Any) -> int:
    """The shortest length, to a multiple of 64, from which `size` GPUs are expected to beat one; options as for `cost`."""
    low, high = 1, 1 << 25
    while low < high:
        middle = (low + high) // 2
        expected = cost(size, num_tokens, num_heads, 64 * middle, **options)
        low, high = (low, middle) if expected.us < expected.one_gpu_us else (middle + 1, high)
    return 64 * low
