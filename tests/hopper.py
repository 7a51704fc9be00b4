"""A choice of kernels that takes the Hopper kernel for every call it can do."""

from __future__ import annotations

from cupy_paged.backends import variants
from cupy_paged.plan import make_plan


def always_hopper(problem, arch, num_sms, align):
    """In place of `cupy_paged.backends.cuda.choose`."""
    variant = variants.wgmma_variant(problem, num_sms)
    slots = max(1, num_sms // -(-problem.num_heads // variant.heads_per_cta))
    chunks = {"chunk_min": max(256, 16 * problem.num_heads), "max_chunks": 64}
    return variant, make_plan(problem, tile=variant.tile, row_cost=variant.row_cost, slots=slots, **chunks)
