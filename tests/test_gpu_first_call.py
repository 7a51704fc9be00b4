"""What the first call of a process costs, with an empty kernel cache and with a warm one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import gpu_record
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

# The time of the call alone: CuPy is imported and the CUDA context made before.
PROGRAM = """
import json, time
import cupy, ml_dtypes
import cupy_paged
q = cupy.ones((1, 16, 512), ml_dtypes.bfloat16)
codes, scales = cupy.zeros((64, 512), "uint8"), cupy.ones((64, 8), "float32")
indices, indptr = cupy.arange(64, dtype="int32"), cupy.asarray([0, 64], "int32")
cupy.cuda.Device().synchronize()
start = time.perf_counter()
cupy_paged.paged_decode(q, codes, indices, indptr, kv_scales=scales)
cupy.cuda.Device().synchronize()
print(json.dumps(time.perf_counter() - start))
"""


def first_call_s(cache):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=gpu_record.ROOT,
        env={**os.environ, "CUPY_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_first_call(tmp_path, record_gpu):
    """Under 3 s on an empty cache, under 0.2 s on a warm one."""
    empty, warm = first_call_s(tmp_path), min(first_call_s(tmp_path) for _ in range(3))
    record_gpu("first_call", {"empty_cache_s": empty, "warm_cache_s": warm})
    assert empty < 3
    assert warm < 0.2
