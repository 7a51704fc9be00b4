"""Every kernel but the decoding ones compiles without a GPU, for every architecture, without spilling registers."""

from __future__ import annotations

import re

import pytest

from cupy_paged import jit

pytest.importorskip("cupy", reason="compiling needs CuPy")

ARCHITECTURES = [
    pytest.param(arch, marks=() if arch == "90" else pytest.mark.slow)
    for arch in ("80", "86", "89", "90", "100", "120")
]

ROWS = {"HEAD_DIM": 512, "GROUP_SIZE": 64, "ROW_DTYPE": 1, "KV_DTYPE": 0, "POW2_SCALES": 0, "ALIGNED": 1}
ROWS |= {"ROPE": 0, "ROPE_DIM": 0, "PAGE_SIZE": 1, "INDEX_BYTES": 4}
SHARED = ROWS | {"PAGE_SIZE": 64}
BACK = {
    "HEAD_DIM": 512,
    "GROUP_SIZE": 64,
    "KV_DTYPE": 0,
    "OUT_DTYPE": 1,
    "PAGE_SIZE": 64,
    "INDEX_BYTES": 4,
    "ALIGNED": 1,
}
TURN = {"HEAD_DIM": 512, "ROW_DTYPE": 1, "ROPE": 1, "ROPE_DIM": 64, "ALIGNED": 1}
MOVE = {"GATHER": 1, "INDEX_BYTES": 4, "ALIGNED": 1}
KERNELS = {
    "rows": ("store_rows.cu", ROWS),
    "rows float32 rotated": ("store_rows.cu", ROWS | {"ROW_DTYPE": 3, "ROPE": 2, "ROPE_DIM": 64, "INDEX_BYTES": 8}),
    "rows quantised": ("store_rows.cu", ROWS | {"INDEX_BYTES": 0, "POW2_SCALES": 1}),
    "rows to bf16": ("store_rows.cu", ROWS | {"KV_DTYPE": 1, "ROW_DTYPE": 3, "PAGE_SIZE": 16}),
    "rows narrow misaligned": ("store_rows.cu", ROWS | {"HEAD_DIM": 64, "ROW_DTYPE": 2, "ALIGNED": 0}),
    "pages": ("store_pages.cu", SHARED),
    "pages rotated": ("store_pages.cu", SHARED | {"ROPE": 2, "ROPE_DIM": 64, "INDEX_BYTES": 8}),
    "pages float32 rotated": ("store_pages.cu", SHARED | {"ROW_DTYPE": 3, "ROPE": 1, "ROPE_DIM": 64, "PAGE_SIZE": 256}),
    "pages quantised": ("store_pages.cu", SHARED | {"INDEX_BYTES": 0}),
    "pages misaligned": ("store_pages.cu", SHARED | {"HEAD_DIM": 384, "GROUP_SIZE": 128, "PAGE_SIZE": 3, "ALIGNED": 0}),
    "back to bf16": ("dequantize.cu", BACK),
    "back to float32": ("dequantize.cu", BACK | {"OUT_DTYPE": 3, "INDEX_BYTES": 0}),
    "back from fp16": ("dequantize.cu", BACK | {"KV_DTYPE": 2, "OUT_DTYPE": 1, "ALIGNED": 0}),
    "rotate": ("rope.cu", TURN),
    "rotate halves": ("rope.cu", TURN | {"ROPE": 2, "ROW_DTYPE": 3, "ALIGNED": 0}),
    "gather": ("move.cu", MOVE),
    "scatter": ("move.cu", MOVE | {"GATHER": 0, "INDEX_BYTES": 8, "ALIGNED": 0}),
    "lists": ("indices.cu", {}),
    "split": ("split.cu", {"CHUNK": 2048}),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_spills(name, arch):
    file, constants = KERNELS[name]
    _, log = jit.compile_cubin(file, tuple(sorted(constants.items())), arch)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert spills, log
    assert not any(spills), log
