"""Which kernel serves a call, with which constants and geometry; a pure function of shapes, architecture and alignment."""

from __future__ import annotations

from dataclasses import dataclass

from ..jit import Constants
from ..plan import Plan, Problem, make_plan

KV = {"float8_e4m3fn": 0, "bfloat16": 1, "float16": 2}
TILE = 32  # slots that decode_mma takes at once
# Shared memory of a multiprocessor, KB, by compute capability; a block may take all but 1 KB.
SHARED_KB = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100, 121: 100}


@dataclass(frozen=True, slots=True)
class Combine:
    """The kernel that merges partials."""

    file: str
    entry: str
    constants: Constants
    grid: tuple[int, int, int]
    threads: int


@dataclass(frozen=True, slots=True)
class Variant:
    """A decode kernel.

    `waits`: it waits by itself (griddepcontrol.wait) for the kernel ahead of it in the stream before it touches memory.
    `arch`: where it differs from the device's, as 90a does; None otherwise.
    """

    file: str
    entry: str
    constants: Constants
    tile: int
    threads: int
    shared_bytes: int
    heads_per_cta: int
    ctas_per_sm: int
    row_cost: int
    combine: Combine
    waits: bool = False
    arch: str | None = None


def _constants(**values: int) -> Constants:
    return tuple(sorted(values.items()))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def combine_for(problem: Problem, num_sms: int) -> Combine:
    """Many threads a row where rows are few; few where they are many and most leave at once."""
    t, h, d = problem.num_tokens, problem.num_heads, problem.head_dim
    # (dims a block, float4 a thread, partials added side by side, heads a block), measured at D = 512
    if problem.batch_invariant:  # always one after the other: the order of addition must not depend on the batch
        piece, vecs, lanes, heads = d, 2, 1, 2
    elif t * h <= 32:
        piece, vecs, lanes, heads = 64, 1, 16, 1
    elif t * h <= 2 * num_sms:
        piece, vecs, lanes, heads = 128 if d % 128 == 0 else 64, 1, 8, 1
    elif t * h <= 8 * num_sms:
        piece, vecs, lanes, heads = d, 2, 1, 2
    else:
        piece, vecs, lanes, heads = d, d // 64, 1, 8
    constants = _constants(
        HEAD_DIM=d, Q_DTYPE=KV[problem.q_dtype], PIECE_DIMS=piece, VECS=vecs, LANES=lanes, HEADS_PER_CTA=heads
    )
    threads = heads * (piece // (4 * vecs)) * lanes
    return Combine("combine.cu", "combine", constants, (t, _ceil_div(h, heads), d // piece), threads)


def _mma_shared_bytes(head_dim: int, row_bytes: int, groups: int, warps: int, m_tiles: int, stages: int) -> int:
    """SHARED_BYTES of kernels/decode_mma.cu."""
    pieces, heads = 4 * m_tiles, 16 * m_tiles
    stage = _ceil_div(TILE * row_bytes + TILE * groups * 4, 128) * 128
    size = stages * stage + warps * pieces * 512 + pieces * 256 + heads * 16 + heads * 32
    size += _ceil_div(groups, 8) * 128 + _ceil_div(groups, 2) * 128 + heads * 32
    size = _ceil_div(size, 16) * 16 + warps * 8 * 16 + warps * 64 + warps * stages * 4
    return _ceil_div(size, 16) * 16 + (heads * head_dim * 2 if m_tiles > 1 else 0)


def mma_variant(problem: Problem, arch: int, num_sms: int, align: tuple[int, int]) -> Variant:
    """The portable kernel: any shape, any architecture."""
    d, fp8 = problem.head_dim, problem.kv_dtype == "float8_e4m3fn"
    group_size = problem.group_size if fp8 else 64
    groups = d // group_size if fp8 else 0
    warp_dims = 128 if d == 512 else 64
    # 32 heads a block where there are more than 16: a row is widened once for both halves. Few slots are sooner done
    # by more blocks; batch-invariant calls may not choose by the number of slots.
    many = problem.nnz >= 4096 or problem.batch_invariant
    wide = many and fp8 and d == 512 and problem.num_heads > 16 and align[0] == 16 and group_size >= 64
    m_tiles = 2 if wide else 1
    row_bytes, room = d * (1 if fp8 else 2), 1024 * SHARED_KB.get(arch, 100)
    threads = 32 * (d // warp_dims)
    # Registers a thread that the compiler needs: 168, more where a warp has four scales a row or copies in pieces.
    registers = 168
    if wide:
        registers = 255
    elif align[0] < 16 or (fp8 and warp_dims > 2 * group_size):
        registers = 200

    def fitting(stages: int) -> tuple[int, int]:
        """Shared memory of a block, and blocks that fit a multiprocessor."""
        shared = _mma_shared_bytes(d, row_bytes, groups, d // warp_dims, m_tiles, stages)
        return shared, min(room // (shared + 1024), 65536 // (registers * threads), 3 if d == 512 else 8)

    # Three stages, unless two let a second block run.
    stages = max((3, 2), key=lambda n: (min(fitting(n)[1], 2), n))
    shared, ctas = fitting(stages)
    scale_copy = min(align[1], groups * 4 & -(groups * 4)) if fp8 else 4
    constants = _constants(
        HEAD_DIM=d,
        GROUP_SIZE=group_size,
        KV_DTYPE=KV[problem.kv_dtype],
        Q_DTYPE=KV[problem.q_dtype],
        KV_COPY=align[0],
        SCALE_COPY=min(scale_copy, 16),
        PAGED=int(problem.page_size > 1),
        WARP_DIMS=warp_dims,
        M_TILES=m_tiles,
        STAGES=stages,
        MIN_CTAS=ctas,
        SHARED=shared,
    )
    heads = 16 * m_tiles
    combine = combine_for(problem, num_sms)
    return Variant("decode_mma.cu", "decode_mma", constants, TILE, threads, shared, heads, ctas, TILE, combine)


def wgmma_variant(problem: Problem, num_sms: int) -> Variant:
    """The Hopper kernel: FP8, D = 512, groups of 64; a CTA for up to 64 heads.

    `choose` does not take it yet: it has to be timed and to meet decode_mma's tests on a GPU first.
    """
    # Byte map of kernels/wgmma_layout.cuh: q, tiles, P; references, sums, scales of heads; factors of slots; ratios,
    # schedules, segments; barriers.
    shared = 64 * 1024 + 2 * 64 * 1024 + 2 * 8192 + 2 * 256 + 2 * 256 + 256 + 2 * 512 + 8 * 256 + 8 * 64 + 64 + 8 * 20
    constants = _constants(
        HEAD_DIM=512,
        GROUP_SIZE=64,
        KV_DTYPE=0,
        Q_DTYPE=KV[problem.q_dtype],
        PAGED=int(problem.page_size > 1),
        COMPUTE_REGISTERS=192,
        PRODUCER_REGISTERS=64,
        SHARED=shared,
    )
    combine = combine_for(problem, num_sms)
    return Variant("decode_wgmma.cu", "decode_wgmma", constants, 64, 512, shared, 64, 1, 64, combine, arch="90a")


def choose(problem: Problem, arch: int, num_sms: int, align: tuple[int, int]) -> tuple[Variant, Plan]:
    """The kernel and plan of a call.

    Parameters
    ----------
    arch : int
        Compute capability, 90 for 9.0.
    align : (int, int)
        Bytes, 16, 8 or 4, to which the rows of the pool and of the scales are aligned.
    """
    variant = mma_variant(problem, arch, num_sms, align)
    blocks = _ceil_div(problem.num_heads, variant.heads_per_cta)
    per_sm = variant.ctas_per_sm
    if problem.num_tokens <= 32:
        per_sm = min(per_sm, 2)  # every row is divided: more workers cost more in combining than they gain
    slots = max(1, num_sms * per_sm // blocks)
    # Fixed splits for batch_invariant: chunks of a few tiles for few heads, longer where partials are larger.
    chunk_min, max_chunks = max(256, 16 * problem.num_heads), 64
    plan = make_plan(
        problem, tile=variant.tile, row_cost=variant.row_cost, slots=slots, chunk_min=chunk_min, max_chunks=max_chunks
    )
    return variant, plan
