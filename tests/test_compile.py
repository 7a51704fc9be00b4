"""The decoding kernels compile without a GPU, for every architecture, without spilling registers."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from cupy_paged import jit
from cupy_paged.backends.variants import choose, wgmma_variant
from cupy_paged.plan import Problem

pytest.importorskip("cupy", reason="compiling needs CuPy")

ARCHITECTURES = [
    pytest.param(arch, marks=() if arch == "90" else pytest.mark.slow)
    for arch in ("80", "86", "89", "90", "100", "120")
]
NUM_SMS = 132
FP8 = "float8_e4m3fn"


class Call(NamedTuple):
    num_tokens: int = 128
    num_heads: int = 16
    head_dim: int = 512
    q_dtype: str = "bfloat16"
    kv_dtype: str = FP8
    group_size: int = 64
    page_size: int = 1
    align: int = 16


CALLS = {
    "few heads": Call(),
    "one token": Call(num_tokens=1),
    "32 heads": Call(num_heads=32),
    "128 heads": Call(num_heads=128),
    "fp16 q, pages": Call(q_dtype="float16", page_size=64),
    "groups of 32": Call(group_size=32),
    "groups of 128": Call(group_size=128),
    "rows on 4 bytes": Call(align=4, page_size=64),
    "bf16 pool": Call(kv_dtype="bfloat16"),
    "fp16 pool, rows on 8 bytes": Call(kv_dtype="float16", q_dtype="float16", align=8),
    "D 64": Call(head_dim=64),
    "D 64, groups of 32": Call(head_dim=64, group_size=32, align=8),
    "D 192": Call(head_dim=192),
    "D 384, groups of 128": Call(head_dim=384, group_size=128),
    "D 448, groups of 32": Call(head_dim=448, group_size=32),
    "D 320, bf16 pool": Call(head_dim=320, kv_dtype="bfloat16"),
}


def variant_of(call: Call, arch: str):
    problem = Problem(
        call.num_tokens, call.num_heads, call.head_dim, call.num_tokens * 2176, call.page_size, call.q_dtype,
        call.kv_dtype, call.group_size if call.kv_dtype == FP8 else 0, 0, False,
    )  # fmt: skip
    return choose(problem, int(arch.rstrip("a")), NUM_SMS, (call.align, call.align))[0]


def check(kernel, arch, threads, per_sm):
    _, log = jit.compile_cubin(kernel.file, kernel.constants, arch)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert spills, log
    assert registers, log
    assert not any(spills), log
    # Registers are given out by the warp, in units of 8 a thread.
    assert all(-(-r // 8) * 8 * threads * per_sm <= 65536 for r in registers), log


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", CALLS)
def test_compiles_without_spills(name, arch):
    """And as many blocks fit a multiprocessor as the plan counts on."""
    variant = variant_of(CALLS[name], arch)
    if variant.arch:
        arch = variant.arch
    check(variant, arch, variant.threads, variant.ctas_per_sm)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 16), (32, 16), (128, 128)])
def test_combine_compiles_without_spills(num_tokens, num_heads, arch):
    combine = variant_of(Call(num_tokens=num_tokens, num_heads=num_heads), arch).combine
    check(combine, arch, combine.threads, 1)


@pytest.mark.parametrize("page_size", [1, 64])
def test_hopper_kernel_compiles(page_size):
    """The four registers it spills are the counters of its outer loop."""
    variant = wgmma_variant(Problem(128, 128, 512, 278528, page_size, "bfloat16", FP8, 64, 0, False), NUM_SMS)
    _, log = jit.compile_cubin(variant.file, variant.constants, "90a")
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert spilled, log
    assert int(spilled[1]) <= 16, log
    assert "C75" not in log, log  # wgmma taken apart, or register budgets ignored
